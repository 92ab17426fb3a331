"""Tiles of logits on Hopper, and the products that they come from and go to.

A tile lies in registers as tensor cores leave it, with queries along its first axis
(`across == 0`) or its second. Tensor cores take the left operand of the next product
from registers, and the axis it sums over must lie along that operand's rows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import simulated_platform
from pallas_kernels.arrays import dot
from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.attention.gpu.dropout import drop
from pallas_kernels.attention.gpu.tables import FLOOR, WORD, in_base_2
from pallas_kernels.attention.inputs import all_of
from pallas_kernels.gpu import Named, spread
from pallas_kernels.hashing import half_of, kept

MASK_WORDS = "mask_low", "mask_high"  # of a tile of 64 keys


def product(a, b, meanwhile: Callable[[], None] = lambda: None):
    """a b' of two tiles in shared memory; float32. `meanwhile` runs before its end."""
    if simulated_platform():
        meanwhile()
        return dot(a[...], b[...], (1, 1))

    def multiply(acc):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def accumulate(acc, a, b):
    """acc + a b, for `a` in registers and `b` in shared memory."""
    if simulated_platform():
        # The simulator supports no left operand in registers.
        return acc + dot(a, b[...], (1, 0))
    add = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return add(plgpu.ACC.init(acc))


class LogitsTile(NamedTuple):
    """A tile of logits: its vectors by query and by key, and where its keys start."""

    case: GpuCase
    per_query: Named
    per_key: Named
    first_key: Any
    masked: bool  # whether some query does not see some key
    got: Named  # what streams, in shared memory, with "bias_tile" and "mask" or not

    @property
    def shape(self) -> tuple[int, int]:
        return self.case.tile

    @property
    def across(self) -> int:
        return self.case.across

    @property
    def has_bias(self) -> bool:
        return "bias_tile" in self.got or "bias" in self.per_key

    def of_queries(self, vector):
        return spread(vector, self.shape, self.across)

    def of_keys(self, vector):
        return spread(vector, self.shape, 1 - self.across)

    def _key(self):
        return lax.broadcasted_iota(jnp.int32, self.shape, 1 - self.across)

    def _conditions(self):
        limits = self.per_query
        if "high" in limits:
            yield self._key() <= self.of_queries(limits["high"] - self.first_key)
        if "low" in limits:
            yield self._key() >= self.of_queries(limits["low"] - self.first_key)
        if "q_segment" in limits:
            segment = self.of_keys(self.per_key["kv_segment"])
            yield self.of_queries(limits["q_segment"]) == segment
        if self.case.hides:
            yield self.of_keys(self.per_key["bias"]) > np.float32(FLOOR)
        if "mask_low" in self.got:
            yield self._bits() == np.uint32(1)

    def _bits(self):
        """The mask's, from two words of each query."""
        low, high = (self.of_queries(self.got[x][...]) for x in MASK_WORDS)
        key = self._key()
        word = jnp.where(key < np.int32(WORD), low, high)
        bit = (key & np.int32(WORD - 1)).astype(jnp.uint32)
        return (word >> bit) & np.uint32(1)

    def _bias(self):
        """The bias in base 2, or None; without a mask of keys that is apart from it."""
        if "bias_tile" in self.got:
            return in_base_2(self.got["bias_tile"][...].astype(jnp.float32))
        if "bias" in self.per_key:
            return self.of_keys(self.per_key["bias"])
        return None

    def seen(self):
        """Where a query sees a key; None where all do."""
        return all_of(self._conditions()) if self.masked else None

    @property
    def _scale(self):
        return np.float32(self.case.rules.scale / math.log(2))

    def logits(self, products, seen):
        """Scaled, with bias and masks, in base 2; -inf for keys that are not there."""
        x = products * self._scale
        if (bias := self._bias()) is not None:
            x = x + bias
        if seen is not None:
            x = jnp.where(seen, x, np.float32(FLOOR))
        if self.masked and self.case.keys % self.case.block_kv:
            there = self._key() < self.case.keys - self.first_key
            x = jnp.where(there, x, np.float32(-np.inf))
        return x

    def row_max(self, products, x):
        """Row maxima of `x`; from the products if that is the same and cheaper."""
        if self.masked or self.has_bias or self._scale < 0:
            return x.max(axis=1)
        return products.max(axis=1) * self._scale

    def _words(self):
        """Two of each query, and one of each key."""
        rows = [self.of_queries(self.per_query[x]) for x in ("factor", "term")]
        return rows, self.of_keys(self.per_key["word"])

    def _keep(self):
        """Where dropout keeps an element."""
        half = half_of(self._key().astype(jnp.uint32))  # blocks start at even keys
        return kept(*self._words(), half, self.case.rules.rate)

    def dropped(self, x):
        """`x` with zeros where dropout has them."""
        if not self.case.rules.rate:
            return x
        if self.across or simulated_platform():
            return jnp.where(self._keep(), x, jnp.zeros((), x.dtype))
        (factor, term), word = self._words()
        return drop(x, factor * word + term, self.case.rules.rate)

    @property
    def factor(self):
        """1 / (1 - rate), of the elements that dropout keeps; None without it."""
        rate = self.case.rules.rate
        return np.float32(1 / (1 - rate)) if rate else None

    def share(self):
        """What dropout multiplies elements by: 0 or `factor`. None without it."""
        # Multiplied by twice, it is cheaper than a mask, for which there are too few
        # predicate registers.
        if self.factor is None:
            return None
        return jnp.where(self._keep(), self.factor, np.float32(0))
