"""`galore.paper`: GaLore as it was published, by name.

`galore` stays a function, so that `help` and signatures are those of one; the type that
it has for a type checker knows the attribute too.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, cast

import optax
from jax.typing import ArrayLike

from jaxmem.optim.accumulation.devices import AxisName
from jaxmem.optim.low_bit import scale_by_adam
from jaxmem.optim.low_bit.low_bit import EIGHT, Bits, as_low_bit
from jaxmem.optim.low_rank.galore import galore as with_options

Options = ParamSpec("Options")
Paper = ParamSpec("Paper")


class WithPaper(Protocol[Options, Paper]):
    """A function that makes an optimizer, and has the published one as `paper`."""

    @property
    def __name__(self) -> str: ...

    @property
    def paper(self) -> Callable[Paper, optax.GradientTransformationExtraArgs]: ...

    def __call__(
        self, *args: Options.args, **kwargs: Options.kwargs
    ) -> optax.GradientTransformationExtraArgs: ...


def paper(
    learning_rate: ArrayLike | optax.Schedule,
    rank: int = 128,
    gap: int = 200,
    scale: ArrayLike = 0.25,
    *,
    bits: Bits = EIGHT,
    projected: Any = None,
    micro_batches: int = 1,
    axis_name: AxisName | None = None,
    weight_decay: ArrayLike | optax.Schedule = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """GaLore by the rule of its paper and of its authors' code.

    `galore` with these options: the first singular vectors, exactly, of the shorter
    side of each matrix, in the dtype of its gradient, every 200 steps; updates that are
    projected back times 0.25; and inside of the subspace the Adam that goes with
    `bits`, decays 0.9 and 0.999::

      8 (or 4) bits:  update = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + 1e-8)
      32 bits:        update = sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + 1e-6)

    The first is "8-bit GaLore", whose Adam is that of bitsandbytes and of the paper's
    algorithm 2. The second is the AdamW of the authors' code, which adds eps before the
    bias correction.

    **What differs.** Moments in 8 bits have the codes of `scale_by_adam(bits=8)`;
    `LowBit(8, code="dynamic")` is bitsandbytes' map. A new singular vector is turned to
    the half space of the old one, the sign of it being arbitrary. The authors project
    the matrices of attention and of the MLPs alone, by their names: `projected` says
    that here.

    **State**, in bytes of a matrix with sides a <= b and bfloat16 gradients, 8 bits: 2
    a r for the projector and 2.13 b r for the moments. A checkpoint holds the
    projectors, and with them the signs of their vectors: a restored run continues as
    one that was not interrupted, through refreshes too.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 0.01 in the paper,
        0.005 for 7B parameters.
      rank: dimension of the subspace. The paper has a quarter of the width or half of
        it: 128 for 60M parameters, 1,024 for 7B.
      gap: steps from one refresh to the next; 500 for 7B parameters.
      scale: factor of updates that are projected back.
      bits: of the moments: 8, 4, 32, or a `LowBit`.
      projected, micro_batches, axis_name: see `scale_by_galore`.
      weight_decay, mask: see `galore`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a chain's state.

    Raises:
      ValueError, TypeError: as `galore`, and for `bits` as `scale_by_adam`.

    Source:
      Zhao et al., arXiv 2403.03507, algorithm 2, sections 4 and 5, appendix C; the
      scripts and the README of the authors' code. bitsandbytes adds eps times
      sqrt(1 - b2^t) to the root of v.

    Example::

      tx = jaxmem.optim.galore.paper(0.01, rank=128, projected="layers/**/kernel")
    """
    how = as_low_bit(bits)
    wide = how.bits == 32
    return with_options(
        learning_rate,
        rank,
        gap,
        scale,
        projection="std",
        subspace="svd",
        inner=None if wide else scale_by_adam(bits=how),
        eps_placement="reference" if wide else "optax",
        projector_dtype="gradient",
        projected=projected,
        micro_batches=micro_batches,
        axis_name=axis_name,
        weight_decay=weight_decay,
        mask=mask,
    )


def _having(
    function: Callable[Options, optax.GradientTransformationExtraArgs],
    published: Callable[Paper, optax.GradientTransformationExtraArgs],
) -> WithPaper[Options, Paper]:
    """The function, with the other as its attribute `paper`."""
    published.__qualname__ = f"{function.__name__}.{published.__name__}"
    setattr(function, published.__name__, published)
    return cast(WithPaper[Options, Paper], function)


galore = _having(with_options, paper)
