"""`flax.nnx.Linear` that codes its input in running ranges."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn._constructor import check_mesa
from jaxmem.nn._sampled_nnx import parameters


class Ranges(nnx.Variable):
    """The ranges of a `MesaDense`, zeros at first; no parameter."""


class MesaDense(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.stored_in_ranges`.

    The output and the gradients of input and bias are exact; the kernel's gradient is
    that at the input's codes, with values outside the ranges clipped to their ends. The
    ranges are the variable `ranges`, zeros until the first call that is not
    `deterministic`. Where none are kept, as in a pure function whose state is dropped,
    each batch has its own, which costs a pass over the input. Parameters are those of
    `Linear`; codes are rounded to the nearest.

    Args:
        groups: parts of the input's features, such as heads, each with a range of its
            own; must divide them. Keyword-only, as all of these; others as in Flax.
        bits: of a code, 1 to 8.
        decay: share of the average that stays in a step.
        deterministic: True leaves the ranges as they are; set by `model.eval()`.

    Saves:
        bits / 8 byte an element of the input where the kernel is trained, and in
        float32 a step and an offset a group.

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3.
    """

    def __init__(
        self,
        *args: Any,
        groups: int = 8,
        bits: int = 8,
        decay: float = 0.9,
        deterministic: bool = False,
        **kwargs: Any,
    ):
        check_mesa(groups, bits, decay)
        super().__init__(*args, **kwargs)
        self.groups, self.bits, self.decay = groups, bits, decay
        self.deterministic = deterministic
        self.ranges = Ranges(jnp.zeros((2, groups), jnp.float32))

    def __call__(
        self, inputs: Float[Array, "*batch d"], out_sharding: Any = None
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = parameters(self, out_sharding)
        how = {"bits": self.bits, "decay": self.decay}
        kept, ranges = ops.stored_in_ranges(inputs, self.ranges[...], **how)
        if not self.deterministic:
            self.ranges[...] = ranges
        options: Any = {"dtype": self.dtype, "precision": self.precision}
        return ops.dense(kept, kernel, bias, **options)
