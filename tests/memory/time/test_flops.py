"""The model's flops, and those that are done a second time."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.products import products_of
from jaxmem.memory.time.step_time import step_time
from jaxmem.ops import dot_product_attention
from tests.memory.time import modules

S = jax.ShapeDtypeStruct
LAYERS, TOKENS, WIDTH = 4, 4096, 64
PRODUCT = 2 * TOKENS * WIDTH * WIDTH
WEIGHTS, INPUT = S((LAYERS, WIDTH, WIDTH), jnp.float32), S((TOKENS, WIDTH), jnp.float32)


def layer(x, w):
    return jnp.tanh(jnp.tanh(x) @ w), None


def gradient(body):
    def loss(w, x):
        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    return jax.grad(loss)


def time_of(step, *args):
    return step_time(jax.jit(step).lower(*args).compile().as_text(), "h100")


def test_a_plain_step_repeats_nothing():
    found = time_of(gradient(layer), WEIGHTS, INPUT)
    assert found.recomputed_flops == 0
    assert found.mfu == found.hfu > 0


def test_a_checkpoint_repeats_the_forward_pass():
    found = time_of(gradient(jax.checkpoint(layer)), WEIGHTS, INPUT)
    assert found.recomputed_flops == LAYERS * PRODUCT
    assert found.flops == 4 * LAYERS * PRODUCT
    assert found.mfu == pytest.approx(0.75 * found.hfu)


def test_a_schedule_repeats_what_it_says():
    step = gradient(lambda x, w: (layer(layer(x, w)[0], w)[0], None))
    plain = jaxmem.estimate(step, WEIGHTS, INPUT)
    scheduled = jaxmem.schedule(step, budget=int(0.6 * plain.peak_bytes))
    plan = scheduled.plan(WEIGHTS, INPUT)
    found = time_of(scheduled, WEIGHTS, INPUT)
    assert found.recomputed_flops == pytest.approx(plan.recomputed_flops)


def test_attention_in_blocks_repeats_its_logits():
    length, block = 64, 16
    shape = S((2, length, 2, 32), jnp.float32)
    how = {"implementation": "xla", "block_size": block}

    def loss(q, k, v):
        return dot_product_attention(q, k, v, **how).sum()

    found = time_of(jax.grad(loss, argnums=(0, 1, 2)), shape, shape, shape)
    product = 2 * 2 * 2 * length * length * 32
    assert found.recomputed_flops == product
    assert found.flops == 7 * product


def test_the_backward_pass_of_cudnn_repeats_one_of_five():
    shape = "bf16[2,128,4,64]{3,2,1,0}"
    names = [f"%{x} = {shape} parameter({i})" for i, x in enumerate("qkvog")]
    call = (
        f"ROOT %c = ({shape}, {shape}, {shape}, u8[0]{{0}}) custom-call(%q, %k, %v, "
        '%o, %g), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
    )
    hlo = parse_hlo(modules.text("\n".join([*names, call])))
    again = [one.again for one in products_of(hlo, hlo.instruction("c"))]
    assert len(again) == 5 and sum(again) == 1
