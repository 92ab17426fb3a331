"""ReGELU2 and ReSiLU2: GELU and SiLU with the derivative of three ReLUs, in 2 bits.

The sum of three ReLUs nearest to the function itself, with the coefficients that the
paper publishes. `fewbit_table(..., objective="primitive")` finds slightly better
ones.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from jaxmem.ops.activations.gelu import ERF
from jaxmem.ops.activations.silu import SILU
from jaxmem.ops.common.lean import inexact
from jaxmem.ops.few_bit.derivative import as_table, coded

# a and c of the sum of a_i relu(x - c_i)
GELU_SUM = (
    (-0.04922261145617846, 1.0979632065417297, -0.048740595085551286),
    (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
)
SILU_SUM = (
    (-0.04060357190528599, 1.080925428529668, -0.040321856624382146),
    (-6.3050461001646445, -0.0008684942046214787, 6.325815242089708),
)


_DOC = """{function}, its derivative from 2 bits an element: {name}.

Args:
    x: input of any shape; integers become floats.

Returns:
    Array of the shape and dtype of x: {function}, computed in float32, rounded once.

Raises:
    TypeError: x is complex, or no array.

Saves:
    1/4 byte an element.

Limits:
    {limits}

Source:
    Yang et al., Approx-BP, arXiv 2406.16282, section 4.
"""


def _op(value: Callable, sum_of_relus, **words: str):
    """The op whose derivative is that of a sum of ReLUs."""
    rises, corners = sum_of_relus
    name = words["name"].lower()
    apply = coded(name, value, *as_table((corners, np.cumsum([0.0, *rises]))))

    def op(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
        return apply(inexact(name, x))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = _DOC.format(**words)
    return op


regelu2 = _op(
    ERF.value,
    GELU_SUM,
    name="ReGELU2",
    function="GELU (erf form)",
    limits="The derivative is 0, -0.05, 1.05 or 1: off by up to 0.55 near zero, but "
    "its integral is never far from GELU (squared distance 0.0095, ReLU 0.062). "
    "`gelu(x, save=2)` is off by up to 0.18.",
)
resilu2 = _op(
    SILU.value,
    SILU_SUM,
    name="ReSiLU2",
    function="SiLU",
    limits="The derivative is 0, -0.04, 1.04 or 1: off by up to 0.54 near zero, but "
    "its integral is never far from SiLU (squared distance 0.040). `silu(x, save=2)` "
    "is off by up to 0.19.",
)
