"""Dropout that keeps a key: the mask is recomputed in the backward pass.

Saved: eight bytes. Recomputed: the mask, about ten integer operations an element
(`bits.py`). Reverse mode only, as every `custom_vjp`; a second derivative keeps the
mask.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from jaxmem._checks import (
    check_array,
    check_bool,
    check_float,
    check_key,
    check_numbers,
)
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.common.gpu_barrier import gpu_barrier
from jaxmem.ops.common.lean import widen
from jaxmem.ops.randomness import bits as _random


class DropoutMask(NamedTuple):
    rate: float
    shared: tuple[int, ...]


def check_rate(rate: float, name: str = "rate") -> float:
    """The rate as a float, or ValueError."""
    return check_float(name, rate, at_least=0, at_most=1)


def need_rng(rng, rate: float, rate_name: str, rng_name: str) -> None:
    """ValueError for dropout without a key."""
    if rng is None:
        raise ValueError(
            f"{rate_name}={rate} needs a random key, and {rng_name}=None: pass "
            f"{rng_name}=jax.random.key(...), a new one each step, or "
            "deterministic=True"
        )


def masked(mask: DropoutMask, x, seed):
    """`x`, or its gradient, with the mask of `seed`."""
    shape = tuple(1 if d in mask.shared else n for d, n in enumerate(x.shape))
    keep = _random.keep_mask(seed, *_random.positions(shape), mask.rate)
    scaled = (widen(x) / (1.0 - mask.rate)).astype(x.dtype)
    keep = jnp.broadcast_to(keep.reshape(shape), x.shape)
    # a plain zero, of the shape of x, would be moved out of a scan over layers
    return jnp.where(keep, scaled, (seed[0] & 0).astype(x.dtype))


def wait_for_gradient(seed, g):
    """The seed and a gradient, for a mask that is drawn when the gradient is there."""
    # else XLA finds that both passes make the same mask, and keeps it between them; and
    # what needs the seed alone XLA:GPU draws at the start of an unrolled step
    return gpu_barrier((jax.lax.optimization_barrier(seed), g))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropout(mask: DropoutMask, x, seed):
    return masked(mask, x, seed)


def _forward(mask, x, seed):
    return masked(mask, x, seed), seed


def _backward(mask, seed, g):
    seed, g = wait_for_gradient(seed, g)
    with jax.named_scope("jaxmem.dropout"):
        return masked(mask, g, seed), None


# without optimize_remat: it has nothing to save here, and forbids a second derivative
_dropout.defvjp(_forward, _backward)


def dropout(
    x: Float[Array, "..."],
    rate: float,
    rng: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    *,
    broadcast_dims: tuple[int, ...] = (),
    deterministic: bool = False,
) -> Float[Array, "..."]:
    """Zeroes elements with probability `rate` and divides the others by `1 - rate`.

    The mask is a function of the key and of the element's position alone: the same
    under `jit`, `vmap`, `scan`, `jax.checkpoint` and any sharding. Under `shard_map`
    each shard sees its own positions; give each its own key (`jax.random.fold_in` with
    `jax.lax.axis_index`) for masks that differ. The random bits are not those of
    `flax.linen.Dropout`.

    Args:
      x: any shape, floating.
      rate: a Python float in [0, 1]; honoured to 2**-32. 0 gives `x` itself, 1 zeros.
      rng: a key, typed or raw. Needed unless `deterministic`, `rate` 0 or `rate` 1.
      broadcast_dims: axes along which one mask is shared.
      deterministic: True gives `x` itself.

    Returns:
      An array of the shape and dtype of `x`. The division is in float32 or wider.

    Raises:
      ValueError: `rate` outside [0, 1], a missing or batched key, an axis out of range.

    Saves:
      8 bytes.

    TPU's cost analysis of a dropout alone, forward and backward, counts twice the bytes
    of Flax's, since it counts a prefetch into on-chip memory; in a scan over layers it
    counts fewer (`python -m benchmarks.cost`).

    Source:
      Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from
      Overfitting" (2014), section 4; a mask recomputed from a key instead of stored:
      `bits.py`.
    """
    rate = check_rate(rate)
    x = jnp.asarray(check_array("dropout: x", x, "floating"))
    dims = check_numbers("broadcast_dims", broadcast_dims)
    if any(not -x.ndim <= d < x.ndim for d in dims):
        raise ValueError(f"broadcast_dims={broadcast_dims} for an array of {x.ndim}-D")
    if rng is not None:
        check_key("rng", rng)
    if check_bool("deterministic", deterministic) or rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    need_rng(rng, rate, "rate", "rng")
    shared = tuple(sorted({d % x.ndim for d in dims}))
    with jax.named_scope("jaxmem.dropout"):
        x, seed = vary_alike(x, _random.seed_words(rng))
        return _dropout(DropoutMask(rate, shared), x, seed)
