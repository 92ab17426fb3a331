"""In-place ABN: every activation, scales of any sign, both kinds of statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array
from tests.sets import some_fast

ACTIVATIONS = {
    "identity": lambda z: z,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


def _normal(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


# One scale of zero (64 channels guard one), and negative ones, small and large.
SCALE = (
    (1 + _normal(1, (64,)) / 5)
    .at[jnp.array([3, 5, 7])]
    .set(jnp.array([-0.7, 0.0, -1.3]))
)
BIAS, MEAN, VAR = _normal(2, (64,)) / 3, _normal(3, (64,)) / 9, 1 + SCALE**2


@pytest.mark.fast("identity-False", "leaky_relu-True", "gelu-True")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "name", some_fast(ACTIVATIONS, "identity", "leaky_relu", "gelu")
)
def test_gradients(name, trained):
    stats = {} if trained else dict(mean=MEAN, var=VAR)

    def both(op):
        out = lambda y: y[0] if trained else y
        return lambda *args: out(op(*args, **stats))

    lean = both(functools.partial(ops.inplace_abn, activation=name))
    norm = both(functools.partial(ops.batch_norm, dtype="float32"))
    plain = lambda x, s, b: ACTIVATIONS[name](norm(x, s, b)).astype(x.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def run(op, x, g):
        y, pull = jax.vjp(op, x, SCALE, BIAS)
        return (y, *pull(g))

    for dtype, bound in (("float32", 1e-4), ("bfloat16", 1e-2)):
        x, g = _normal(4, (8, 9, 64), dtype), _normal(5, (8, 9, 64), dtype)
        for got, want in zip(run(lean, x, g), run(plain, x, g), strict=True):
            got, want = np.asarray(got, "f8"), np.asarray(want, "f8")
            assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


def test_statistics_and_saturation():
    x = 30 * _normal(0, (16, 4))
    y, mean, var = ops.inplace_abn(x, activation="elu")
    _, want_mean, want_var = ops.batch_norm(x)
    np.testing.assert_array_equal(mean, want_mean)
    np.testing.assert_array_equal(var, want_var)
    # Far out every activation is at its limit; gradients stay finite.
    big = jnp.asarray([[-3e4, 3e4, 0.0, -60.0]] * 4, "float16")
    for name in ACTIVATIONS:
        op = functools.partial(ops.inplace_abn, activation=name)
        one = functools.partial(op, mean=jnp.zeros(4), var=jnp.ones(4))
        total = lambda x, s, op=one: op(x, s).astype("f4").sum()
        grads = jax.jit(jax.grad(total, (0, 1)))(big, jnp.ones(4))
        assert all(np.isfinite(g).all() for g in grads), name


X = jnp.ones((2, 3, 8))
BAD = [
    (lambda: ops.inplace_abn(X, activation="relu"), "take leaky_relu"),
    (lambda: ops.inplace_abn(X, activation="tanh"), "activation='tanh'"),
    (lambda: ops.inplace_abn(X, negative_slope=0.0), "negative_slope=0.0"),
    (lambda: ops.inplace_abn(X, activation="elu", alpha=-1), "alpha=-1"),
    (lambda: ops.inplace_abn(X, axis=(1, 2)), "one feature axis"),
    (lambda: ops.inplace_abn(X, mean=jnp.ones(8)), "both or neither"),
    (lambda: ops.inplace_abn(X[0, 0]), "leaves none"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
