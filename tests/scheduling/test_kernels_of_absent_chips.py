"""A search compiles a step with the kernels that it has on an absent chip."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir import jaxprs

SHAPE, LAYERS = (2, 256, 2, 64), 3


def gradient(w, x):
    """Of layers under `scan`, with attention in bfloat16."""

    def layer(x, w):
        x = x * w[None, None, None]
        return x + jaxmem.ops.dot_product_attention(x, x, x, is_causal=True), None

    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].astype("float32").sum())(w)


@pytest.fixture
def args():
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return like(LAYERS, SHAPE[-1]), like(*SHAPE)


def test_the_compiled_plan_is_that_of_the_step(args):
    step = jaxmem.schedule(gradient, target="h100", donate_argnums=())
    plan = step.plan(*args).scheduled
    report = jaxmem.estimate(step, *args, target="h100")
    assert plan.temp_bytes == report.temp_bytes
    assert plan.seconds == report.seconds
    assert "custom-call" in str(plan.time)


def test_a_jaxpr_keeps_its_kernels(args):
    """Traced where no chip is told, in no context of one."""
    closed = jaxprs.trace(gradient, *args).jaxpr
    again = lambda *leaves: jaxprs.evaluate(closed, leaves)
    want, got = (jaxmem.estimate(f, *args, target="h100") for f in (gradient, again))
    assert (want.temp_bytes, want.seconds) == (got.temp_bytes, got.seconds)


@pytest.mark.parametrize("axis", [None, "data"])
def test_a_scheduled_step_with_the_attention_of_jax_by_cudnn(args, axis):
    """Which is traced, while the search lowers what it compiles, as if for that GPU."""
    held = lambda x: x
    if axis is not None:  # a mesh of one device: nothing of it is sharded
        where = NamedSharding(jaxmem.target_mesh("h100", (1,), (axis,)), P(axis))
        held = lambda x: jax.lax.with_sharding_constraint(x, where)

    def layer(x, w):
        x = held(x)
        attention = jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
        return jnp.tanh(x * w[None, None, None]) + attention, None

    def gradient(w, x):
        run = lambda w: jax.lax.scan(layer, x, w)[0].astype("float32").sum()
        return jax.grad(run)(w)

    step = jaxmem.schedule(gradient, target="h100", donate_argnums=())
    report = jaxmem.estimate(step, *args, target="h100")
    assert report.temp_bytes == step.plan(*args).scheduled.temp_bytes
    plain = jaxmem.estimate(gradient, *args, target="h100")
    assert 0 < report.temp_bytes <= plain.temp_bytes
