"""Ring attention on TPUs: JAX's splash kernels on the keys and values of one device.

Each device has two of 2 n pieces of an example's tokens, the i-th and the i-th from the
end: under a causal mask, all devices then have equal work in each hop (Llama Team 2024,
"The Llama 3 Herd of Models", section 3.3.2; MaxText's "dual chunk swap"). Keys and
values are handed on from device to device (Liu et al. 2023, "Ring Attention"), and the
parts of the softmax are combined by the logarithms of their sums. The backward pass
hands on the gradients of keys and values with them.

All but its own pieces' products are of whole pieces, without a mask: the late piece of
a device sees the early ones of all others, and either its early piece sees the other's
early one, or its late piece the other's late one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.steps.tiles import F32
from jaxmem.ops.attention import splash
from jaxmem.ops.attention.block import Extras, Rules

CONTEXT, KEPT = "context", "context"  # the axis of the mesh; what a layer may keep


def places(tokens: int, devices: int):
    """Positions of an example's tokens as the devices have them, one after another."""
    pieces = jnp.arange(tokens, dtype=F32).reshape(2 * devices, -1)
    return jnp.stack([pieces[:devices], pieces[: devices - 1 : -1]], 1).reshape(-1)


def _rules(q, causal: bool) -> Rules:
    return Rules(q.shape[-1] ** -0.5, causal, None, 0.0, False)


def _forward(q, k, v, causal: bool = False):
    """The output [b, t, n, h] in float32, and logarithms of the sums [b, n, t]."""
    o, total, _ = splash.forward(_rules(q, causal), q, k, v, None, Extras())
    return o.astype(F32), total


class _Saved(NamedTuple):
    """Queries' side of a backward pass: all tokens of a device, or one piece."""

    q: jax.Array
    o: jax.Array
    total: jax.Array
    g: jax.Array


def _backward(saved: _Saved, k, v, causal: bool = False):
    """Gradients of q, k and v in float32."""
    q, o, total, g = saved
    arrays = {"q": q, "k": k, "v": v, "o": o, "top": total}
    arrays["log_total"] = jnp.zeros_like(total)
    found = splash.backward(_rules(q, causal), frozenset("qkv"), arrays, g)
    return tuple(found[name].astype(F32) for name in "qkv")


# -- pieces: (early, late)


def _pieces(x, axis: int = 1):
    early, late = jnp.split(x, 2, axis)
    return early, late


def _whole(pieces, axis: int = 1):
    return jnp.concatenate(pieces, axis)


def _either(later, pieces):
    """The late piece if `later`, else the early one."""
    return jax.tree.map(functools.partial(jnp.where, later), pieces[1], pieces[0])


def _added(later, pieces, more):
    """`more` is added to the late piece if `later`, else to the early one."""
    early, late = pieces
    return early + jnp.where(later, 0, more), late + jnp.where(later, more, 0)


def _combined(first, other, counts=True):
    """Of two parts of one softmax, of which the other one may not count."""
    (o, total), (p, more) = first, other
    more = jnp.where(counts, more, -jnp.inf)
    both = jnp.logaddexp(total, more)
    share = lambda one: jnp.exp(one - both).swapaxes(1, 2)[..., None]
    return o * share(total) + p * share(more), both


# -- the ring


def _hops(count: int, hop, carry, moved):
    """`hop(carry, moved, later)` for the arrays of each other device.

    `later`: whether the other's early piece is after this device's.
    """
    onward = [(i, (i + 1) % count) for i in range(count)]
    own = lax.axis_index(CONTEXT)

    def one(held, step):
        carry, moved = held
        moved = lax.ppermute(moved, CONTEXT, onward)
        return hop(carry, moved, (own - step) % count > own), None

    (carry, moved), _ = lax.scan(one, (carry, moved), jnp.arange(1, count))
    return carry, lax.ppermute(moved, CONTEXT, onward)  # each where it came from


def _attended(count: int, q, k, v):
    o, total = _forward(q, k, v, causal=True)
    queries = _pieces(q)

    def hop(carry, moved, later):
        (early, late), (k, v) = carry, moved
        late = _combined(late, _forward(queries[1], k[0], v[0]))
        part = _forward(*(_either(later, one) for one in (queries, k, v)))
        return (_combined(early, part, ~later), _combined(late, part, later)), moved

    parts = tuple(zip(_pieces(o), _pieces(total, 2), strict=True))
    carry, _ = _hops(count, hop, parts, (_pieces(k), _pieces(v)))
    o, total = zip(*carry, strict=True)
    return _whole(o).astype(q.dtype), _whole(total, 2)


def _gradients(count: int, saved: _Saved, k, v):
    dq, dk, dv = map(_pieces, _backward(saved, k, v, causal=True))
    q, o, total, g = saved
    pieces = map(_pieces, (q, o, total, g), (1, 1, 2, 1))
    early, late = map(_Saved, *pieces)

    def hop(dq, moved, later):
        k, v, (dk, dv) = moved
        first = _backward(late, k[0], v[0])
        keys = _either(later, k), _either(later, v)
        other = _backward(_either(later, (early, late)), *keys)
        dq = _added(later, (dq[0], dq[1] + first[0]), other[0])
        grads = tuple(
            _added(later, (d[0] + one, d[1]), more)
            for d, one, more in zip((dk, dv), first[1:], other[1:], strict=True)
        )
        return dq, (k, v, grads)

    moved = _pieces(k), _pieces(v), (dk, dv)
    dq, (_, _, grads) = _hops(count, hop, dq, moved)
    return tuple(_whole(x).astype(q.dtype) for x in (dq, *grads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(count: int, q, k, v):
    """Causal attention inside of `shard_map` over `count` devices.

    Args:
      count: devices along the axis "context" of the mesh.
      q, k, v: [batch, tokens, heads, channels] in bfloat16, the two pieces of one
        device one after the other, as `places` says.
    """
    return _attended(count, q, k, v)[0]


def _attended_and_kept(count: int, q, k, v):
    o, total = (checkpoint_name(x, KEPT) for x in _attended(count, q, k, v))
    return o, (q, k, v, o, total)


def _of_kept(count: int, kept, g):
    q, k, v, o, total = kept
    return _gradients(count, _Saved(q, o, total, g), k, v)


ring_attention.defvjp(_attended_and_kept, _of_kept)
