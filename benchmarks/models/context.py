"""Context parallelism: each device has a part of every example's tokens.

Only attention needs the others' tokens. "gathered" gives each device all keys and
values, by a sharding constraint. "ring" hands them on from device to device, and
combines the parts of the softmax (Liu et al. 2023, "Ring Attention").
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import (
    Model,
    Sizes,
    by_name,
    dense,
    language_loss,
    pin,
)
from benchmarks.steps.tiles import F32, layer, softmax_attention

DATA, CONTEXT = "data", "context"
TOKENS = P(DATA, CONTEXT)


def gathered(mesh, q, k, v):
    spread, whole = pin(mesh, DATA, CONTEXT), pin(mesh, DATA)
    return spread(softmax_attention(spread(q), whole(k), whole(v)))


def _part(q, k, v, row, column):
    """Sums of one block's softmax, with its largest score: [b, s, h, (c)]."""
    scores = jnp.einsum("bshd,bthd->bsht", q, k).astype(F32) / q.shape[-1] ** 0.5
    seen = (row[:, None] >= column)[None, :, None]
    scores = jnp.where(seen, scores, -1e30)
    most = lax.stop_gradient(scores.max(-1))
    p = jnp.where(seen, jnp.exp(scores - most[..., None]), 0.0)
    sums = jnp.einsum("bsht,bthd->bshd", p.astype(q.dtype), v).astype(F32)
    return sums, p.sum(-1), most


def _added(first, other):
    """The sums of both, in terms of the larger score."""
    most = jnp.maximum(first[2], other[2])
    scales = [jnp.exp(part[2] - most) for part in (first, other)]
    sums = first[0] * scales[0][..., None] + other[0] * scales[1][..., None]
    return sums, first[1] * scales[0] + other[1] * scales[1], most


def ring(count: int, q, k, v):
    """Inside of `shard_map` over `count` devices."""
    own, size = lax.axis_index(CONTEXT), q.shape[1]
    places = lambda device: device * size + jnp.arange(size)
    onward = [(i, (i + 1) % count) for i in range(count)]

    def hop(carry, step):
        total, k, v = carry
        k, v = lax.ppermute((k, v), CONTEXT, onward)
        part = _part(q, k, v, places(own), places((own - step) % count))
        return (_added(total, part), k, v), None

    first = _part(q, k, v, places(own), places(own))
    (total, _, _), _ = lax.scan(hop, (first, k, v), jnp.arange(1, count))
    return (total[0] / total[1][..., None]).astype(q.dtype)


def _model(attention: Callable, mesh, sizes: Sizes) -> Model:
    keep = pin(mesh, DATA, CONTEXT)
    one = functools.partial(layer, attention, sizes.heads)

    def layers(params, x):
        step = lambda x, w: (keep(one(keep(x), w)), None)
        return lax.scan(step, x, params)[0], 0.0

    loss = language_loss(sizes, keep, layers)
    # one token more is read than the model sees: that number does not divide
    return Model(loss, dense(sizes), by_name({}), P(DATA))


def gathered_context(mesh, sizes: Sizes) -> Model:
    return _model(functools.partial(gathered, mesh), mesh, sizes)


def ring_context(mesh, sizes: Sizes) -> Model:
    attention = jax.shard_map(
        functools.partial(ring, mesh.shape[CONTEXT]),
        mesh=mesh,
        in_specs=(TOKENS,) * 3,
        out_specs=TOKENS,
    )
    return _model(attention, mesh, sizes)
