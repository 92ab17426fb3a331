"""LoRADense: a dense layer's own parameters and values, and a thin addition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_nn

import jaxmem
from jaxmem.nn.linen import LoRADense
from tests.arrays import array
from tests.nn.compare import assert_close, assert_trees_identical

X = jax.random.normal(jax.random.key(1), (3, 5, 8))


def variables(layer):
    return jax.jit(layer.init)(jax.random.key(0), X)["params"]


@pytest.mark.parametrize("options", [{}, dict(use_bias=False, dtype=jnp.bfloat16)])
def test_starts_as_the_dense_layer(options):
    plain, lora = flax_nn.Dense(6, **options), LoRADense(6, rank=2, **options)
    params = variables(lora)
    own = {k: v for k, v in params.items() if not k.startswith("lora")}
    assert_trees_identical(own, variables(plain))
    assert {k: v.shape for k, v in params.items() if k not in own} == {
        "lora_a": (8, 2),
        "lora_b": (2, 6),
    }
    want = jax.jit(plain.apply)({"params": own}, X)
    got = jax.jit(lora.apply)({"params": params}, X)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)  # lora_b starts at zero
    assert isinstance(lora, flax_nn.Dense)


def test_is_the_merged_kernel():
    lora, scale = LoRADense(6, rank=2, alpha=8.0), 8.0 / 2
    rng = np.random.default_rng(0)
    draw = lambda x: array(rng.standard_normal(x.shape), x.dtype)
    params = jax.tree.map(draw, variables(lora))
    a, b, rest = params["lora_a"], params["lora_b"], ("kernel", "bias")
    merged = {name: params[name] for name in rest}
    merged["kernel"] += scale * (a @ b)
    want = flax_nn.Dense(6).apply({"params": merged}, X)
    assert_close(want, lora.apply({"params": params}, X))


def test_trains_under_trainable(dtype=jnp.bfloat16):
    """The gradients of the thin matrices are those of the whole, in a scanned stack."""

    class Block(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x, _):
            return jnp.tanh(LoRADense(8, rank=2, dtype=dtype)(x)), None

    stack = flax_nn.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    init = jax.jit(lambda key: stack.init(key, X.astype(dtype), None)["params"])
    params = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda x: x + 0.1 * rng.standard_normal(x.shape).astype("f4")
    params = jax.tree.map(draw, params)

    def loss(params, x):
        out = stack.apply({"params": params}, x.astype(dtype), None)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    trained, frozen = jaxmem.trainable(params, "**/lora_*")
    _, grads = jax.jit(jaxmem.value_and_grad(loss))(trained, frozen, X)
    whole = jax.jit(jax.grad(loss))(params, X)
    pairs = zip(*map(jax.tree.leaves, (grads, _lora(whole))), strict=True)
    for got, want in pairs:
        # the same products, fused otherwise: two roundings to `dtype` of the largest
        allowed = 2 * float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed)


def _lora(tree):
    layer = tree["LoRADense_0"]
    return {name: layer[name] for name in ("lora_a", "lora_b")}


def test_rank_is_checked():
    with pytest.raises(ValueError, match="rank=0"):
        LoRADense(4, rank=0)
