"""What a block of attention may see and keep: masks as functions of position.

Nothing here has more elements than one block of logits, and the masks that depend on
positions alone are one comparison in the fusion that reads the logits.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmem.ops import _random

MASKED = -0.7 * float(np.finfo(np.float32).max)  # what jax.nn gives a masked logit


class Rules(NamedTuple):
    """The static part of the op: what decides a mask, and the scale."""

    scale: float
    causal: bool
    window: tuple[int, int] | None
    rate: float
    shared: bool  # one dropout mask over batch and heads


def _by_position(rules: Rules, times, keys):
    """Conditions on [t, 1] and [1, s]."""
    t, s = times[:, None], keys[None, :]
    if rules.causal:
        yield t >= s
    if rules.window is not None:
        left, right = rules.window
        yield t <= s + left
        yield t >= s - right


def visible(rules: Rules, times, keys, mask=None, q_len=None, kv_len=None):
    """Boolean [b|1, n|1, t|1, s|1] of the logits that count; None where all do."""
    seen = [c[None, None] for c in _by_position(rules, times, keys)]
    if mask is not None:
        seen.append(mask)
    if q_len is not None:
        seen.append(inside(times, q_len)[:, None, :, None])
    if kv_len is not None:
        seen.append(inside(keys, kv_len)[:, None, None, :])
    result = None
    for condition in seen:
        result = condition if result is None else result & condition
    return result


def inside(positions, lengths):
    """Boolean [b, positions]: below each length."""
    return positions[None, :] < lengths[:, None]


def kept(rules: Rules, seed, heads: int, length: int, rows, times, keys):
    """Dropout's mask of a block: [b, n, t, s], or [1, 1, t, s] where it is shared.

    The row of a probability is (b * heads + n) * length + t, its column s.
    """
    t = times.astype(jnp.uint32)[None, None, :, None]
    if not rules.shared:
        b = rows.astype(jnp.uint32)[:, None, None, None]
        n = jnp.arange(heads, dtype=jnp.uint32)[None, :, None, None]
        t = (b * np.uint32(heads) + n) * np.uint32(length) + t
    s = keys.astype(jnp.uint32)[None, None, None, :]
    return _random.keep_mask(seed, t, s, rules.rate)
