"""What is different in a step that is traced for a TPU, and why: compiled for one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem import chips, ops
from jaxmem.rewriting import auto_save, rewrite
from tests.arrays import array

V5E, H100 = (chips.get_target(name, check=False) for name in ("tpu-v5e", "h100"))


def _mlp(w, v, x):
    return ops.gelu(x @ w, save="auto") @ v


def _scanned(w, v, x):
    layers = jnp.stack([w, w]), jnp.stack([v, v])
    return jax.lax.scan(lambda x, wv: (_mlp(*wv, x), None), x, layers)[0]


def _random(*shape):
    return array(np.random.default_rng(sum(shape)).normal(size=shape), np.float32)


ARGS = _random(8, 32), _random(32, 8), _random(16, 8)


@pytest.mark.parametrize(
    ("fn", "on_tpu", "elsewhere"),
    [(_mlp, "input", "output"), (_scanned, "output", "output")],
    ids=["unrolled", "scanned"],
)
def test_an_unrolled_activation_keeps_its_input_on_a_tpu(fn, on_tpu, elsewhere):
    def chosen(target):
        seen = []
        with chips.traced_for(target):
            jaxmem.residuals(auto_save(fn, on_choice=seen.append), *ARGS)
        return {one.keeps for one in seen}

    assert chosen(V5E) == {on_tpu}
    assert chosen(H100) == chosen(None) == {elsewhere}


def test_a_code_that_was_asked_for_is_not_replaced_by_the_input():
    seen = []
    fn = lambda w, v, x: ops.gelu(x @ w, save="auto", bits=2) @ v
    with chips.traced_for(V5E):
        jaxmem.residuals(auto_save(fn, on_choice=seen.append), *ARGS)
        jaxmem.residuals(auto_save(fn, on_choice=seen.append), *ARGS, argnums=(0, 2))
    assert {one.keeps for one in seen} == {"output", "2 bits"}


def test_one_function_for_a_gpu_and_for_a_tpu_in_one_process():
    """JAX's cache of traces does not hand the one to the other."""
    gradient = jax.jit(jax.grad(lambda *a: auto_save(_mlp)(*a).sum(), (0, 1, 2)))
    texts = []
    for target in (H100, V5E, H100):
        with chips.traced_for(target):
            texts.append(str(gradient.trace(*ARGS).jaxpr))
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("fn", [_mlp, _scanned], ids=["unrolled", "scanned"])
def test_values_and_gradients_are_those_of_the_plain_activation(fn):
    def plain(w, v, x):
        one = lambda w, v, x: jax.nn.gelu(x @ w) @ v
        return one(w, v, one(w, v, x)) if fn is _scanned else one(w, v, x)

    want = jax.grad(lambda *a: plain(*a).sum(), (0, 1, 2))(*ARGS)
    with chips.traced_for(V5E):
        got = jax.grad(lambda *a: auto_save(fn)(*a).sum(), (0, 1, 2))(*ARGS)
    for a, b in zip(got, want, strict=True):
        # sums of at most 32 terms, one after the other in two layers and back
        close = 4 * 32 * np.finfo(np.float32).eps * np.max(np.abs(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=close)


def _pooled(x):
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def test_max_pooling_stays_as_it_is_on_a_tpu():
    x = _random(2, 8, 8, 4)
    gradient = jax.grad(lambda x: rewrite(_pooled)(x).sum())
    searches = lambda: "select_and_scatter" in str(jax.jit(gradient).trace(x).jaxpr)
    assert not searches()
    with chips.traced_for(V5E):
        assert searches()


def test_a_group_norm_has_no_barriers_on_a_tpu():
    x = _random(2, 8, 8, 4)
    gradient = jax.grad(lambda x: jnp.sum(ops.group_norm(x, num_groups=2) ** 2))
    marked = lambda: str(jax.jit(gradient).trace(x).jaxpr).count("prevent_cse=True")
    assert marked()
    with chips.traced_for(V5E):
        assert not marked()


class _Net(nnx.Module):
    """Unrolled layers: pre-norm MLPs."""

    def __init__(self, rngs):
        how = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.norms = nnx.List([nnx.LayerNorm(512, **how) for _ in range(4)])
        self.up = nnx.List([nnx.Linear(512, 2048, **how) for _ in range(4)])
        self.down = nnx.List([nnx.Linear(2048, 512, **how) for _ in range(4)])

    def __call__(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(norm(x))))
        return x


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax's layers mix them
def test_unrolled_layers_take_no_more_once_they_are_substituted():
    def report(make):
        model = nnx.eval_shape(lambda: make(_Net(nnx.Rngs(0))))
        loss = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)
        x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
        return jaxmem.estimate(nnx.grad(loss), model, x, target="tpu-v5e")

    plain, lean = report(lambda model: model), report(jaxmem.substitute)
    assert lean.temp_bytes <= plain.temp_bytes
    assert lean.seconds <= 1.02 * plain.seconds
