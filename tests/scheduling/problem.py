"""A stack of layers in a scan, train steps on it, and what all tests ask of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from jaxmem import schedule
from jaxmem.ir import jaxprs
from tests import arrays

L, D, OUT, BATCH = 6, 16, 3, 5

# Sums over layers and batch in another order are off by some units in the last place,
# 2e-16 here; a division by the root of a second moment makes at most 1e3 times that of
# it, since no gradient of these problems is under 1e-3 of the largest.
RTOL = 1e-11


def array(*shape, seed=0, scale=1.0, dtype=None):
    values = scale * np.random.default_rng(seed).standard_normal(shape)
    return arrays.array(values, dtype)


def stack(n=L, width=D, seed=1, dtype=None):
    """Parameters of `n` layers, each `tanh(x w + b)`."""
    w = array(n, width, width, seed=seed, scale=0.3, dtype=dtype)
    return {"w": w, "b": array(n, width, seed=seed + 1, scale=0.1, dtype=dtype)}


def params(dtype=None):
    return {"layers": stack(dtype=dtype), "head": array(D, OUT, seed=3, dtype=dtype)}


def inputs(dtype=None):
    return array(BATCH, D, seed=4, dtype=dtype)


def layer(x, w):
    return jnp.tanh(x @ w["w"] + add_row(x, w["b"])), None


def add_row(x, b):
    return jnp.broadcast_to(b, x.shape)


def forward(x, layers, body=layer, **options):
    return jax.lax.scan(body, x, layers, **options)[0]


def named_layer(x, w):
    x, _ = layer(x, w)
    return checkpoint_name(x, "out"), None


def loss_with(body, params, x):
    """The loss of layers that are `body`: with remat, say."""
    return jnp.mean((forward(x, params["layers"], body) @ params["head"]) ** 2)


def loss(params, x):
    return jnp.mean((forward(x, params["layers"]) @ params["head"]) ** 2)


def train_step(tx, loss=loss) -> Callable:
    return _train_step(tx, loss)


@functools.cache  # one function, which is compiled once
def _train_step(tx, loss) -> Callable:
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@functools.cache
def compiled(step) -> Callable:
    """`step`, jitted or not, compiled quickly, and once for arguments of a kind."""
    made: dict[Any, Any] = {}

    def call(*args, **kwargs):
        kind = tuple(map(jnp.shape, jax.tree.leaves((args, kwargs))))
        if kind not in made:
            made[kind] = compile_quickly(step, *args, **kwargs)
        return made[kind](*args, **kwargs)

    return call


def compile_quickly(step, *args, **kwargs):
    """Without what LLVM makes faster: half of the time of these tests."""
    lowered = jitted(step).lower(*args, **kwargs)
    return lowered.compile({"xla_backend_optimization_level": 0})


def jitted(fn, **options):
    return fn if hasattr(fn, "lower") else jax.jit(fn, **options)


def state_of(tx, params, x, loss=loss) -> tuple[Any, Any, Any]:
    """The arguments of a step, after one step from the start: no moment is 0."""
    step = compiled(train_step(tx, loss))
    return *step(params, tx.init(params), x)[:2], x


def copy(tree):
    """Buffers of its own, which a step may take."""
    return jax.tree.map(lambda x: jnp.copy(x) if jaxprs.is_array(x) else x, tree)


def assert_close(got, want, rtol=RTOL):
    """Same trees, shapes, dtypes; values within `rtol` of the largest of an array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = map(plain, (g, w))
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if jnp.issubdtype(w.dtype, jnp.inexact):
            w, g = w.astype(np.float64), g.astype(np.float64)
            top = np.max(np.abs(w), initial=0)
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * top)
        else:
            np.testing.assert_array_equal(g, w)


def plain(x) -> np.ndarray:
    x = jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def checked(step, *args, donate=(0, 1), rtol=RTOL, clip=None, **kwargs):
    """The plan of a step; it is scheduled, run, and does what it did."""
    want = compiled(step)(*args, **kwargs)
    scheduled = schedule(step, donate_argnums=donate, clip=clip)
    plan = scheduled.plan(*args, **kwargs)
    got = compiled(scheduled)(*copy(args), **copy(kwargs))
    assert_close(got, want, rtol)
    weak = lambda tree: [jax.typeof(x).weak_type for x in jax.tree.leaves(tree)]
    assert weak(got) == weak(want)
    return plan


def bytes_of(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def temp_bytes(fn, *args, donate=(0, 1)) -> int:
    """What a compiled function needs beyond its arguments and results."""
    lowered = jitted(fn, donate_argnums=donate).lower(*args)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def whys(plan) -> set[str]:
    return {g.why for g in plan.gradients if not g.released}
