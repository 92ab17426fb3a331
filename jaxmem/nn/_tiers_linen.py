"""An adapter of linen that merges the outputs of frozen layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmem.nn._tiers import check_adapter, check_tiers, merge, parameters


class MultiTierAdapter(nn.Module):
    """Merges outputs of frozen early layers into the input of the late ones, as SHERL.

    The late layers are trained, the early ones run without a gradient. Each tier x_i,
    the output of an early layer, goes through a dense layer and a norm of its own,
    h_i = LN(x_i W_i + b_i), of d / `reduction` features. The last one, h_n, is the
    guide. Each other tier is weighed by relu(w (h_i h_n) + b) / sum_j relu(cos(h_i,
    h_j)), over its sum for all tiers: a tier that says what others say counts less.
    With m, the weighted sum, the output is LN(relu(m + h_n) U + c) + tanh(10 gate) x_n.

    Parameters: "down", "down_bias", "norm_scale" and "norm_bias" (tiers along axis 0),
    "weigh" and "weigh_bias", "up" and "up_bias", "out_scale" and "out_bias", "gate".

    Args:
        reduction: the input has so many times the features of the merged tiers.
        dtype: of the computation, beside norms and cosines, which are in float32; None:
            that of the tiers.
        param_dtype: of the parameters.
        gate_init: zeros, by default, as in the authors' code; with ones, for instance,
            late layers begin with what they read before (and the merged tiers).

    Raises:
        TypeError, ValueError: where it is made, options; at the call, fewer than two
            tiers, tiers of several shapes, a `reduction` above d.

    Saves:
        The tiers, each once, in their own dtype; the rest is recomputed from them. Of
        frozen layers between two tiers nothing is saved.

    Limits:
        A tier costs an array of its size: of many early layers, take every k-th one.
        The authors' dropout of a tenth of the first term of the output is left out.

    Source:
        Diao et al., "SHERL: Synthesizing High Accuracy and Efficient Memory for
        Resource-Limited Transfer Learning", arXiv 2407.07523: tiers, redundancy, late
        layers. Norms, the gate and the small terms in quotients are those of the
        authors' code for transformers, where the redundancy counts a tier itself, too.
        There every layer is a tier; here the caller chooses them.
    """

    reduction: int = 2
    dtype: Any = None
    param_dtype: Any = jnp.float32
    gate_init: Callable[..., Any] = nn.initializers.zeros

    def __post_init__(self) -> None:
        check_adapter(self)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        tiers: Sequence[Float[Array, "*batch d"]] | Float[Array, "n *batch d"],
    ) -> Float[Array, "*batch d"]:
        """The merged tiers, in order; a list of arrays, or a stack, as of a scan."""
        found = check_tiers(tiers)
        drawn = parameters(found.shape[0], found.shape[-1], self)
        params = {
            name: self.param(name, init, shape, self.param_dtype)
            for name, (init, shape) in drawn.items()
        }
        return merge(params, tiers, self.dtype or found.dtype)
