"""What attention's kernels and its reference share: masks as functions of positions.

A position is an int32: a query's t, a key's s. Conditions broadcast, so a kernel may
have queries along either axis of a block. Which positions a block can see at all is an
interval, and blocks outside it are not visited. There is one exception. A row that sees
no key takes the mean of all values, hidden ones too, so the blocks of queries that may
hold such a row (`sees_nothing`) visit every block of keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hashing import random_mask

MASKED = -0.7 * float(np.finfo(np.float32).max)  # what jax.nn gives a masked logit


class Rules(NamedTuple):
    """The static part of attention: what determines a mask, and the scale."""

    scale: float
    causal: bool
    window: tuple[int, int] | None
    rate: float
    shared: bool  # one dropout mask over batch and heads


class Extras(NamedTuple):
    """Inputs without a gradient, each an array or None.

    Attributes:
      mask: boolean [b|1, n|1, t|1, s|1]: whether a query may see a key.
      q_len, kv_len: int32 [b], lengths of the sequences.
      seed: uint32 [2], of dropout.
      q_segments, kv_segments: int32 [b, t] and [b, s].
    """

    mask: Any = None
    q_len: Any = None
    kv_len: Any = None
    seed: Any = None
    q_segments: Any = None
    kv_segments: Any = None


class Inputs(NamedTuple):
    """The arrays of attention.

    Attributes:
      q: [b, t, n, h]; k, v: [b, s, kh, h]. v is None where only its gradient is wanted.
      bias: [b|1, n|1, t|1, s|1], added to the logits, or None.
      extras: inputs without a gradient.
    """

    q: Any
    k: Any
    v: Any = None
    bias: Any = None
    extras: Extras = Extras()

    def masked_bias(self):
        """The bias [b|1, n|1, t|1, s|1] with -inf where the mask hides a key; or None.

        A kernel then reads one array for both, of two bytes an element without a bias.
        """
        if self.extras.mask is None:
            return self.bias
        bias = jnp.zeros((), jnp.bfloat16) if self.bias is None else self.bias
        return jnp.where(self.extras.mask, bias, jnp.array(-jnp.inf, bias.dtype))


def all_of(conditions):
    """The conjunction of arrays of booleans; None, which holds everywhere, of none."""
    result = None
    for condition in conditions:
        result = condition if result is None else result & condition
    return result


def _by_position(rules: Rules, t, s):
    if rules.causal:
        yield t >= s
    if rules.window is not None:
        left, right = rules.window
        yield t <= s + left
        yield t >= s - right


def near(rules: Rules, t, s):
    """Whether query t may see key s by the rules alone; None where all may."""
    return all_of(_by_position(rules, t, s))


def visible(rules: Rules, t, s, q_segment=None, kv_segment=None, kv_len=None):
    """Whether query t sees key s; None where all do."""
    # Queries beyond their sequence are not excluded: their outputs become zeros anyway.
    seen = list(_by_position(rules, t, s))
    if q_segment is not None:
        seen.append(q_segment == kv_segment)
    if kv_len is not None:
        seen.append(s < kv_len)
    return all_of(seen)


def dropout_row(rules: Rules, b, n, t, heads: int, length: int):
    """The row of a probability, as `hashing` counts them; its column is s. uint32."""
    if rules.shared:
        return t
    return (b * np.uint32(heads) + n) * np.uint32(length) + t


def dropout_mask(rules: Rules, seed, row, column):
    """Dropout's mask; `row` and `column` are uint32 and broadcast."""
    return random_mask(seed, row, column, rules.rate)


def keys_seen(rules: Rules, first, last, keys: int, kv_len=None):
    """(lowest, highest) key that queries first..last can see; none if lowest > highest.

    By position alone: segments and masks may hide some of these.
    """
    low, high = first * 0, first * 0 + (keys - 1)
    if rules.causal:
        high = jnp.minimum(high, last)
    if rules.window is not None:
        left, right = rules.window
        low = jnp.maximum(low, first - left)
        high = jnp.minimum(high, last + right)
    if kv_len is not None:
        high = jnp.minimum(high, kv_len - 1)
    return low, high


def all_seen(rules: Rules, queries, keys):
    """Whether each of the queries sees each of the keys by position; None: always.

    `queries` and `keys` are the first and the last position of each.
    """
    (first, last), (low, high) = queries, keys
    seen = []
    if rules.causal:
        seen.append(first >= high)
    if rules.window is not None:
        left, right = rules.window
        seen += [last <= low + left, first >= high - right]
    return all_of(seen)


def queries_seeing(rules: Rules, first, last, queries: int, q_len=None):
    """(lowest, highest) query that can see any of the keys first..last."""
    low, high = first * 0, first * 0 + (queries - 1)
    if rules.causal:
        low = jnp.maximum(low, first)
    if rules.window is not None:
        left, right = rules.window
        low = jnp.maximum(low, first - right)
        high = jnp.minimum(high, last + left)
    if q_len is not None:
        high = jnp.minimum(high, q_len - 1)
    return low, high


def bounded(rules: Rules, queries: int, keys: int) -> Rules:
    """The same rules for these lengths, without sums that overflow int32."""
    if rules.window is None:
        return rules
    left, right = (min(size, queries + keys) for size in rules.window)
    return rules._replace(window=(left, right))


def sees_nothing(rules: Rules, inputs: Inputs) -> jax.Array | None:
    """Boolean [b|1, queries] of the rows that may see no key; None if all see one."""
    # With segments these are the rows at whose own position there is no key of their
    # segment: in self-attention none. Rows beyond `q_len` are not included.
    mask, q_len, kv_len, _, q_segments, kv_segments = inputs.extras
    if mask is not None:
        return _masked_rows(rules, inputs)
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    t = jnp.arange(queries, dtype=jnp.int32)[None]
    limit = None if kv_len is None else kv_len[:, None]
    dynamic = kv_len is not None or q_segments is not None
    if not dynamic and not _can_miss(rules, queries, keys):
        return None
    low, high = keys_seen(rules, t, t, keys, limit)
    nothing = low > high
    if q_segments is not None and kv_segments is not None:
        some = min(queries, keys)
        alike = q_segments[:, :some] == kv_segments[:, :some]
        alike = jnp.pad(alike, ((0, 0), (0, queries - some)))
        nothing = nothing | (t > high) | ~alike
    if q_len is not None:
        nothing = nothing & (t < q_len[:, None])
    return nothing


def _masked_rows(rules: Rules, inputs: Inputs):
    """`sees_nothing` with a mask, every element of which is read."""
    extras = inputs.extras
    rows = jnp.arange(inputs.q.shape[1], dtype=jnp.int32)[None, None, :, None]
    columns = jnp.arange(inputs.k.shape[1], dtype=jnp.int32)[None, None, None, :]
    q_segments, kv_segments, kv_len = (
        None if x is None else jnp.expand_dims(x, axes)
        for x, axes in (
            (extras.q_segments, (1, 3)),
            (extras.kv_segments, (1, 2)),
            (extras.kv_len, (1, 2, 3)),
        )
    )
    seen = visible(rules, rows, columns, q_segments, kv_segments, kv_len)
    seen = extras.mask if seen is None else extras.mask & seen
    nothing = (~seen.any(axis=3)).any(axis=1)
    nothing = jnp.broadcast_to(nothing, (nothing.shape[0], rows.size))
    if extras.q_len is None:
        return nothing
    return nothing & (rows.reshape(1, -1) < extras.q_len[:, None])


def _can_miss(rules: Rules, queries: int, keys: int) -> bool:
    """Whether a window ends before the last query's first key."""
    return rules.window is not None and queries - 1 - rules.window[0] > keys - 1


def any_in_blocks(rows, block: int) -> Any:
    """Of boolean [b, t]: whether a block of t has one; [b, blocks]."""
    b, t = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, -t % block)))
    return rows.reshape(b, -1, block).any(axis=-1)


def spans(segments, block: int):
    """The lowest and the highest segment of each block: [b, blocks, 2]."""
    b, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, -length % block)), mode="edge")
    blocks = padded.reshape(b, -1, block)
    return jnp.stack([blocks.min(axis=-1), blocks.max(axis=-1)], axis=-1)
