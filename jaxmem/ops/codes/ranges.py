"""`stored_in_ranges`: codes whose steps and offsets are running averages.

They are known before the batch is: to code it needs no minimum and no maximum of it.
Source: Mesa, Pan et al., arXiv 2111.11124, section 3.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmem._checks import check_array, check_float, check_int, check_key, wrong_value
from jaxmem.ops.codes.packing import MOST_BITS
from jaxmem.ops.codes.quantization import Quantization, codes_at
from jaxmem.ops.codes.stored import Rng, Stored, StoredCodes, WithArray, seed_of
from jaxmem.ops.common.blocks import vary_alike

Ranges = Float[Array, "2 groups"]


def stored_in_ranges(
    x: Float[Array, "..."],
    ranges: Ranges,
    *,
    bits: int = 8,
    decay: float = 0.9,
    rng: Rng = None,
) -> tuple[Stored, Ranges]:
    """`x` with codes in ranges that are known before, and the ranges after this batch.

    The last axis is cut in groups of equal size, such as the channels of a head. All
    rows share a group's range. Values outside of it are clipped to its ends in what
    the backward pass reads; the forward pass has them as they are.

    Args:
        x: an array, not a `Stored`.
        ranges: the least and the largest value of each group, averaged over the batches
            before; zeros before the first. Where the two are equal, nothing is known,
            and the batch has its own range.
        bits: of a code, 1 to 8.
        decay: share of the average that stays: the new one is `decay * ranges + (1 -
            decay)` times the ends of this batch. Its first known ends are taken as they
            are; ends that are not finite leave the average alone.
        rng: a key for stochastic rounding, another each step; None: to the nearest.

    Returns:
        What to give to the functions that read x, as from `stored`; and ranges for the
        next batch, in the dtype of `ranges`. No gradient is taken of these.

    Raises:
        TypeError: x or ranges no floating array, or x with codes already.
        ValueError: ranges that are not (2, groups), groups that do not divide the last
            axis, bits or decay out of range.

    Saves:
        bits / 8 byte an element where a derivative needs x, and in float32 a step and
        an offset a group, whatever the number of rows.

    Error:
        Of a value within its range half a step, or a step with a key; a step is the
        range over `2^bits - 1`. Of a value outside its distance from the range, and
        that is no rounding: it has a sign, and does not average out.

    Example::

        ranges = jnp.zeros((2, 4))  # of 4 heads; keep it from step to step
        kept, ranges = jaxmem.ops.stored_in_ranges(x, ranges)
        y = jaxmem.ops.dense(kept, params["head"])

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3. There a batch moves the averages
        before it is coded; here after, so that its codes wait for no sum over it.
    """
    _check(x, ranges)
    bits = check_int("stored_in_ranges: bits", bits, 1, MOST_BITS)
    decay = check_float("stored_in_ranges: decay", decay, at_least=0, below=1)
    if rng is not None:
        check_key("rng", rng)
    if x.size == 0:
        return Stored(x, None), ranges
    with jax.named_scope("jaxmem.stored_in_ranges"):
        known, plain = vary_alike(*map(lax.stop_gradient, (ranges, _at_most_32(x))))
        quantization = Quantization(bits, x.shape[-1] // ranges.shape[1])
        low, high = _at_hand(known, plain)
        step = (high - low) / (2**bits - 1)
        # a step and an offset a group, for all rows
        step, low = (_as_stats(one, x.ndim) for one in (step, low))
        codes = codes_at(plain, quantization, step, low, seed_of(rng))
        codes = checkpoint_name(codes, "jaxmem_codes")
        kept = Stored(x, StoredCodes(codes, quantization))
        return kept, _moved(known, plain, decay).astype(ranges.dtype)


def _check(x, ranges) -> None:
    for name, array in (("x", x), ("ranges", ranges)):
        check_array(f"stored_in_ranges: {name}", array, "floating")
    if isinstance(x, WithArray):
        raise TypeError("stored_in_ranges: x has codes already: give it the array")
    if ranges.ndim != 2 or ranges.shape[0] != 2 or not ranges.size:
        allowed = "of shape (2, groups)"
        raise wrong_value("stored_in_ranges: ranges", ranges.shape, allowed)
    if x.ndim == 0 or x.shape[-1] % ranges.shape[1]:
        raise ValueError(
            f"stored_in_ranges: the {ranges.shape[1]} groups of ranges must divide "
            f"the last axis of x {x.shape}"
        )


def _at_most_32(x) -> Array:
    """Codes have no use for more than the bits of float32."""
    return x.astype(jnp.float32) if x.dtype.itemsize > 4 else x


def _of_batch(x, groups: int) -> Array:
    """The ends of each group, in float32."""
    parts = x.reshape(-1, groups, x.shape[-1] // groups)
    ends = jnp.min(parts, axis=(0, 2)), jnp.max(parts, axis=(0, 2))
    return jnp.stack(ends).astype(jnp.float32)


def _is_known(ranges) -> Array:
    return jnp.broadcast_to(ranges[1:] > ranges[:1], ranges.shape)


def _at_hand(ranges, x) -> Array:
    """Ranges to code with; the batch's own where none are known."""
    wide = ranges.astype(jnp.float32)
    own = lambda x: jnp.where(_is_known(wide), wide, _of_batch(x, wide.shape[1]))
    # a branch: once all are known, no code waits for the batch's ends
    return lax.cond(jnp.all(_is_known(wide)), lambda x: wide, own, x)


def _moved(ranges, x, decay: float) -> Array:
    """The averages after a batch."""
    wide = ranges.astype(jnp.float32)
    own = _of_batch(x, wide.shape[1])
    mean = decay * wide + (1 - decay) * own
    finite = jnp.isfinite(own).all(0, keepdims=True)
    new = jnp.where(_is_known(wide), mean, own)
    return jnp.where(jnp.broadcast_to(finite, own.shape), new, wide)


def _as_stats(of_groups, ndim: int) -> Array:
    return of_groups.reshape((1,) * (ndim - 1) + of_groups.shape)
