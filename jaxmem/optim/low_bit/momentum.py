"""A first moment of a rule that is not elementwise: as it is, or in codes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.low_bit.codes import pack, unpack
from jaxmem.optim.low_bit.low_bit import LowBit, nearest_code, zeros_of
from jaxmem.optim.low_bit.moments import check_moments, is_codes


class Momentum(NamedTuple):
    """How first moments are kept; they are rounded to the nearest code.

    Attributes:
      how: the codes; 32 bits are of the dtype that gradients are accumulated in.
    """

    how: LowBit

    def zeros(self, params: PyTree) -> PyTree:
        """The moments of new parameters, `MomentCodes` or an array a leaf."""
        if self.how.bits == 32:
            new = lambda p: jnp.zeros_like(p, dtype=accumulation_dtype(p))
            return jax.tree.map(new, params)
        new = lambda path, p: zeros_of(self.how, 0, path, p)
        return jax.tree_util.tree_map_with_path(new, params)

    def loaded(self, stored: Any) -> Float[Array, "..."]:
        """A moment as numbers."""
        if not is_codes(stored):
            return stored
        assert self.how.formats is not None
        return unpack(self.how.formats[0], stored)

    def stored(self, m: Float[Array, "..."], like: Any) -> Any:
        """A moment as it is kept, as the one before was."""
        if not is_codes(like):
            return m
        assert self.how.formats is not None
        return pack(self.how.formats[0], m.shape[-1] // like.scale.shape[-1], m)

    def check(self, updates: PyTree, mu: PyTree) -> None:
        """ValueError for codes of other parameters, or of other options."""
        if self.how.bits != 32:
            check_moments(self.how, updates, mu, names=("mu",), which=(0,))


def momentum_of(bits: Any) -> Momentum:
    """The moments that `bits` says, or an error that names it."""
    return Momentum(nearest_code(bits))
