"""AdamA in NumPy float64, from the paper's formulas, and data to run it on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

STEPS = 50
# Bounds per element of a sum over steps: float32 has about seven digits, and a
# parameter of order 1 is rounded once a step (50 roundings of 2**-24, at random).
RTOL = {"float32": 1e-6, "float64": 1e-12}


def tree(seed=0, dtype=jnp.float32):
    """A parameter tree of a matrix and a bias."""
    r = np.random.default_rng(seed)
    make = lambda *shape: array(1 + r.uniform(size=shape), dtype)  # noqa: E731
    return {"w": make(6, 5), "b": make(5)}


def gradients(n, steps=STEPS, seed=1, dtype=jnp.float32):
    """Gradients of `steps` mini-batches of `n`, stacked along two leading axes."""
    r = np.random.default_rng(seed)
    draw = lambda p: array(0.3 + r.standard_normal((steps, n, *p.shape)), dtype)
    return jax.tree.map(draw, tree())


def at(grads, *index):
    return jax.tree.map(lambda g: g[index], grads)


def adama_leaf(
    p,
    grads,
    lr=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    weight_decay=0.0,
    mode="paper",
    v_scale="paper",
    nesterov=False,
    weights=None,
):
    """(p, m, v) after all mini-batches; `grads` is [steps, n, ...]."""
    p, grads = np.asarray(p, np.float64), np.asarray(grads, np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    n = grads.shape[1]
    weights = np.full(grads.shape[:2], 1 / n) if weights is None else weights
    ema_steps = 0
    for t in range(1, len(grads) + 1):
        if mode == "paper":
            m, v = b1 * m, b2 * v
        for g, w in zip(grads[t - 1], weights[t - 1], strict=True):
            ema_steps += 1
            if mode == "paper":
                m = m + (1 - b1) * g * w
                v = v + (1 - b2) * (g**2 * w if v_scale == "mean" else (g * w) ** 2)
            else:
                root = 1 / n if mode == "fractional" else 1
                m = b1**root * m + (1 - b1**root) * g * w * n
                v = b2**root * v + (1 - b2**root) * (g * w * n) ** 2
        s = ema_steps if mode == "ema" else t
        m_hat, v_hat = m / (1 - b1**s), v / (1 - b2**s)
        if nesterov:  # one micro-batch: g is its gradient
            m_hat = b1 * m / (1 - b1 ** (s + 1)) + (1 - b1) * g / (1 - b1**s)
        step = m_hat / (np.sqrt(v_hat + eps_root) + eps)
        p = p - (lr(t - 1) if callable(lr) else lr) * (step + weight_decay * p)
    return p, m, v


def adama_tree(params, grads, decayed=lambda name: True, **kwargs):
    """`adama_leaf` on every leaf: (params, m, v), each a dict."""
    decay = kwargs.pop("weight_decay", 0.0)
    out = {
        k: adama_leaf(p, grads[k], weight_decay=decay if decayed(k) else 0.0, **kwargs)
        for k, p in params.items()
    }
    return tuple({k: x[i] for k, x in out.items()} for i in range(3))


def assert_near(got, want, rtol):
    """Leaf by leaf, the error against the largest element."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        w = np.asarray(w, np.float64)
        error = np.abs(np.asarray(g, np.float64) - w).max()
        assert error <= rtol * np.abs(w).max(), (error, np.abs(w).max())


assert_same = chex.assert_trees_all_equal
