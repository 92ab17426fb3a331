"""A small problem whose gradients are sums of positive numbers, so well conditioned.

loss = mean over examples of exp(x . w) + b . x with x > 0. Each gradient is a sum of
positive terms, so its relative error is a small multiple of the number of roundings:
at most 16 terms a dot product, 32 examples, 16 micro-batches and a handful for exp and
the optimizer. RTOL is that with a factor of about two to spare.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

RTOL = 128 * float(np.finfo(np.float32).eps)
LR = 0.01


def params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        "b": array(rng.uniform(0.5, 1.0, (3,)), dtype),
        "w": array(rng.uniform(-0.1, 0.1, (3, 4)), dtype),
    }


def batch(size=16, seed=1):
    rng = np.random.default_rng(seed)
    return {"x": array(rng.uniform(0.5, 1.5, (size, 3)), jnp.float32)}


def per_example(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.exp(jnp.einsum("bi,ij->bj", x, params["w"])).sum(1)
    return out + jnp.einsum("bi,i->b", x, params["b"])


def loss(params, batch, rng):
    return per_example(params, batch["x"]).mean()


def micro_batches(batch, n):
    """Every n-th example, from the i-th on."""
    return [jax.tree.map(lambda x, i=i: x[i::n], batch) for i in range(n)]


def gradients(params, batch, n, loss=loss):
    return [jax.grad(loss)(params, b, None) for b in micro_batches(batch, n)]


def mean_gradient(params, batch, n, shares=None):
    """In float64."""
    shares = np.full(n, 1 / n) if shares is None else np.asarray(shares, np.float64)
    trees = gradients(params, batch, n)
    total = lambda *gs: sum(
        s * np.asarray(g, np.float64) for s, g in zip(shares, gs, strict=True)
    )
    return jax.tree.map(total, *trees)


def copy(tree):
    """Buffers of one's own, to be given up."""
    return jax.tree.map(lambda x: jnp.array(x), tree)


def assert_close(got, want, rtol=RTOL, atol=0.0):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


assert_same = chex.assert_trees_all_equal
