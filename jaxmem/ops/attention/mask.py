"""What a block of attention may see and keep: masks as functions of position.

Nothing here has more elements than one block of logits, and the masks that depend on
positions alone are one comparison in the fusion that reads the logits.
"""

import jax.numpy as jnp

from pallas_kernels import attention as common
from pallas_kernels.attention import MASKED as MASKED
from pallas_kernels.attention import Rules as Rules


def visible(rules: Rules, times, keys, extras):
    """Boolean [b|1, n|1, t|1, s|1] of the logits that count; None where all do."""
    near = common.near(rules, times[:, None], keys[None, :])
    seen = [] if near is None else [near[None, None]]
    if extras.mask is not None:
        seen.append(extras.mask)
    if extras.q_len is not None:
        seen.append(inside(times, extras.q_len)[:, None, :, None])
    if extras.kv_len is not None:
        seen.append(inside(keys, extras.kv_len)[:, None, None, :])
    if extras.q_segments is not None:
        ours, theirs = extras.q_segments, extras.kv_segments
        seen.append(ours[:, None, :, None] == theirs[:, None, None, :])
    return common.all_of(seen)


def inside(positions, lengths):
    """Boolean [b, positions]: below each length."""
    return positions[None, :] < lengths[:, None]


def kept(rules: Rules, seed, heads: int, length: int, rows, times, keys):
    """Dropout's mask of a block: [b, n, t, s], or [1, 1, t, s] where it is shared."""
    b = rows.astype(jnp.uint32)[:, None, None, None]
    n = jnp.arange(heads, dtype=jnp.uint32)[None, :, None, None]
    t = times.astype(jnp.uint32)[None, None, :, None]
    s = keys.astype(jnp.uint32)[None, None, None, :]
    return common.dropout_mask(
        rules, seed, common.dropout_row(rules, b, n, t, heads, length), s
    )
