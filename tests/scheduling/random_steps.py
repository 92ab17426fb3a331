"""Whole train steps drawn at random: model, precision, remat, optimizer, batches.

A seed says everything, so that a step that fails can be drawn once more by itself.
Parameters are of float64, where an operation moved is told from one changed; in some
steps the layers are computed in float32, as others are in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.arrays import array

RATE = 0.01


@dataclass(frozen=True)
class Drawn:
    """A step `(params, state, batch) -> (params, state, report)` and its arguments.

    Attributes:
      step: the function.
      args: its arguments.
      words: what was drawn.
      dtype: that the layers are computed in.
    """

    step: Callable
    args: tuple[Any, Any, Any]
    words: tuple[str, ...]
    dtype: Any


def drawn(seed: int) -> Drawn:
    """The step of a seed."""
    rng = np.random.default_rng(seed)
    pick = lambda table: list(table)[rng.integers(len(table))]
    width = int(rng.choice([16, 48, 96]))
    layers, rows = int(rng.integers(2, 6)), int(rng.choice([4, 24, 64]))
    names = tuple(map(pick, (FORMS, BODIES, REMAT, DTYPES, UPDATES, CLIPS, BATCHES)))
    form, body, remat, dtype, update, clip, batches = names
    extra = pick(EXTRAS)
    run = FORMS[form](REMAT[remat](BODIES[body]))
    loss = _loss(run, DTYPES[dtype])
    tx = optax.chain(CLIPS[clip](), UPDATES[update]())
    params = _params(rng, layers, width)
    batch = array(rng.standard_normal((rows, width)), jnp.float64)
    step = EXTRAS[extra](tx, BATCHES[batches](jax.value_and_grad(loss)))
    sizes = f"{layers} x {width}", f"{rows} rows"
    words = *names, extra, *sizes
    return Drawn(step, (params, tx.init(params), batch), words, DTYPES[dtype])


def _params(rng, layers: int, width: int):
    def normal(*shape, scale):
        return array(scale * rng.standard_normal(shape), jnp.float64)

    w = normal(layers, width, width, scale=0.5 * width**-0.5)
    v = normal(layers, width, width, scale=0.5 * width**-0.5)
    b = normal(layers, width, scale=0.1)
    return {
        "first": normal(width, width, scale=width**-0.5),
        "layers": {"w": w, "v": v, "b": b},
        "head": normal(width, 8, scale=width**-0.5),
    }


def _loss(run: Callable, dtype) -> Callable:
    def loss(params, x):
        cast = jax.tree.map(lambda w: w.astype(dtype), params)
        x = jnp.tanh(x.astype(dtype) @ cast["first"])
        x = run(x, cast["layers"])
        return jnp.mean((x @ cast["head"]).astype(jnp.float64) ** 2)

    return loss


# -- layers, and how they follow each other


def _dense(x, w):
    return jnp.tanh(x @ w["w"] + w["b"])


def _residual(x, w):
    return x + jax.nn.gelu(x @ w["w"]) @ w["v"] + w["b"]


def _norm(x, w):
    y = x - jnp.mean(x, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-3)
    return x + jax.nn.silu(y @ w["w"]) * (y @ w["v"]) + w["b"]


def _attention(x, w):
    scores = (x @ w["w"]) @ x.T * x.shape[-1] ** -0.5
    return x + jax.nn.softmax(scores, -1) @ (x @ w["v"]) + w["b"]


def _scanned(body):
    return lambda x, layers: lax.scan(lambda x, w: (body(x, w), None), x, layers)[0]


def _unrolled(body):
    def run(x, layers):
        for i in range(len(layers["b"])):
            x = body(x, jax.tree.map(lambda w, i=i: w[i], layers))
        return x

    return run


def _shared(body):
    """A recurrent net: the same weights at every step."""

    def run(x, layers):
        w = jax.tree.map(lambda w: w[0], layers)
        inputs = 0.1 * jnp.cos(jnp.arange(5.0)).astype(x.dtype)
        return lax.scan(lambda x, t: (body(x + t, w), None), x, inputs)[0]

    return run


def _two_stacks(body):
    """Two scans, the second one over the same layers from the end."""
    run = _scanned(body)
    turned = lambda layers: jax.tree.map(lambda w: w[::-1], layers)
    return lambda x, layers: run(run(x, layers), turned(layers))


BODIES = {
    "dense": _dense,
    "residual": _residual,
    "norm": _norm,
    "attention": _attention,
}
FORMS = {
    "scanned": _scanned,
    "unrolled": _unrolled,
    "recurrent": _shared,
    "twice": _two_stacks,
}
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT = {
    "no remat": lambda body: body,
    "remat": jax.checkpoint,
    "remat but dots": lambda body: jax.checkpoint(body, policy=_DOTS),
}
DTYPES = {"float64": jnp.float64, "float32": jnp.float32}

# -- what is done with gradients

UPDATES = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "adam": lambda: optax.adam(RATE),
    "adamw": lambda: optax.adamw(RATE),
    "lion": lambda: optax.lion(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
}
CLIPS = {
    "no clip": optax.identity,
    "global norm": lambda: optax.clip_by_global_norm(0.1),
    "each value": lambda: optax.clip(0.01),
}


def _accumulated(grad, n: int = 2):
    def both(params, x):
        def one(sums, part):
            return jax.tree.map(jnp.add, sums, grad(params, part)), None

        parts = x.reshape(n, -1, x.shape[-1])
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad, params, parts[0]))
        sums, _ = lax.scan(one, zeros, parts)
        return jax.tree.map(lambda s: s / n, sums)

    return both


BATCHES = {"one batch": lambda grad: grad, "two batches": _accumulated}


def _plain(tx, grad):
    def step(params, state, x):
        value, grads = grad(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _reporting(tx, grad):
    """Also returns the gradients' norms, each by itself."""

    def step(params, state, x):
        value, grads = grad(params, x)
        updates, state = tx.update(grads, state, params)
        norms = jax.tree.map(lambda g: jnp.sum(g**2), grads)
        return optax.apply_updates(params, updates), state, (value, norms)

    return step


def _giving_gradients(tx, grad):
    """Also returns the layers' gradients."""

    def step(params, state, x):
        value, grads = grad(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, grads["layers"])

    return step


def _skipping(tx, grad):
    """As with loss scaling: no update where a gradient is not finite."""

    def step(params, state, x):
        value, grads = grad(params, x)
        finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        updates, new = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), new
        keep = lambda a, b: jnp.where(jnp.all(jnp.stack(finite)), a, b)
        return *jax.tree.map(keep, new, (params, state)), value

    return step


def _frozen_head(tx, grad):
    """Updates the layers alone."""

    def step(params, state, x):
        value, grads = grad(params, x)
        updates, state = tx.update(grads, state, params)
        layers = optax.apply_updates(params["layers"], updates["layers"])
        return params | {"layers": layers}, state, value

    return step


EXTRAS = {
    "plain": _plain,
    "reports norms": _reporting,
    "returns gradients": _giving_gradients,
    "skips": _skipping,
    "frozen head": _frozen_head,
}
