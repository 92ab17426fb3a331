"""`flax.linen.Dense` that codes its input in running ranges."""

from dataclasses import field

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn._constructor import check_mesa
from jaxmem.nn._linen_calls import save_rng
from jaxmem.nn._sampled_linen import parameters

_COLLECTION = "ranges"


class MesaDense(nn.Dense):
    """`flax.linen.Dense`, built on `jaxmem.ops.stored_in_ranges`.

    The output and the gradients of input and bias are exact; the kernel's gradient is
    that at the input's codes, with values outside the ranges clipped to their ends. The
    ranges are the variable "ranges" of the collection "ranges", zeros until a batch
    comes with `mutable=["ranges"]`; `init` takes none. Where there are none, each batch
    has its own, which costs a pass over the input. Carry the collection along as the
    statistics of batch norms are, and scan layers with `variable_axes={"params": 0,
    "ranges": 0}`. Parameters are those of `Dense`. Given a key named "storage" it
    rounds at random.

    Args:
        groups: parts of the input's features, such as heads, each with a range of its
            own; must divide them. Keyword-only, as all of these.
        bits: of a code, 1 to 8.
        decay: share of the average that stays in a step.

    Saves:
        bits / 8 byte an element of the input where the kernel is trained, and in
        float32 a step and an offset a group.

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    groups: int = field(default=8, kw_only=True)
    bits: int = field(default=8, kw_only=True)
    decay: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        check_mesa(self.groups, self.bits, self.decay)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = parameters(self, inputs)
        trains, shape = self.is_mutable_collection(_COLLECTION), (2, self.groups)
        kept = None
        if trains or self.has_variable(_COLLECTION, "ranges"):
            kept = self.variable(_COLLECTION, "ranges", jnp.zeros, shape, jnp.float32)
        known = jnp.zeros(shape, jnp.float32) if kept is None else kept.value
        how = {"bits": self.bits, "decay": self.decay, "rng": save_rng(self)}
        stored, ranges = ops.stored_in_ranges(inputs, known, **how)
        # the inputs of `init` may be zeros of the right shape
        if kept is not None and trains and not self.is_initializing():
            kept.value = ranges
        options = {"dtype": self.dtype, "precision": self.precision}
        return ops.dense(stored, kernel, bias, **options)
