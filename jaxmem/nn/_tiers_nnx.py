"""An adapter of nnx that merges the outputs of frozen layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem._checks import check_int, wrong_value
from jaxmem.nn._tiers import NAME, check_adapter, check_tiers, merge, parameters


class MultiTierAdapter(nnx.Module):
    """Merges outputs of frozen early layers into the input of the late ones, as SHERL.

    As `jaxmem.nn.linen.MultiTierAdapter`, whose options and parameters it has.

    Args:
        in_features: of each tier.
        tiers: how many there are, two or more.
        reduction: the input has so many times the features of the merged tiers.
        rngs: its stream "params" gives the keys.

    Raises:
        TypeError, ValueError: as the layer of linen; also a call with another number of
            tiers, or of features.

    Saves:
        As the layer of linen.
    """

    def __init__(
        self,
        in_features: int,
        tiers: int,
        *,
        reduction: int = 2,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        gate_init: Callable[..., Any] = jax.nn.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        check_int(f"{NAME}: in_features", in_features, 1)
        check_int(f"{NAME}: tiers", tiers, 2)
        self.in_features, self.tiers, self.reduction = in_features, tiers, reduction
        self.dtype, self.param_dtype, self.gate_init = dtype, param_dtype, gate_init
        check_adapter(self)
        drawn = parameters(tiers, in_features, self)
        for name, (init, shape) in drawn.items():
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
        self._names = tuple(drawn)

    def __call__(
        self,
        tiers: Sequence[Float[Array, "*batch d"]] | Float[Array, "n *batch d"],
    ) -> Float[Array, "*batch d"]:
        """The merged tiers, in order; a list of arrays, or a stack, as of a scan."""
        own, found = (self.tiers, self.in_features), check_tiers(tiers)
        if (sizes := (found.shape[0], found.shape[-1])) != own:
            allowed = f"{own[0]} of {own[1]} features, for which the layer was made"
            raise wrong_value(f"{NAME}: tiers and their features", sizes, allowed)
        params = {name: getattr(self, name)[...] for name in self._names}
        return merge(params, tiers, self.dtype or found.dtype)
