"""A train step over micro-batches without a gradient accumulator.

`microbatch` makes the step from a loss function and an optax transformation. With AdamA
in the transformation each micro-batch's gradient goes into the moments, layer by layer,
and the gradient of the whole model is never stored.
"""

from jaxmem.accumulate._microbatch import microbatch as microbatch
from jaxmem.accumulate._step import MicrobatchStep as MicrobatchStep

__all__ = [
    "microbatch",
]
