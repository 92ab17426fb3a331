"""GELU that keeps its input, its output and one bit an element, or a code of a few.

`jax.nn.gelu` keeps four arrays of the input's size (tanh form) or three (erf form).
Here the backward pass computes the derivative, from the input, or from the output and
the side of the minimum (`inverse.py`), or from a table by a code (`few_bit`).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from jaxmem._checks import check_bool
from jaxmem.ops.activations.forms import forms
from jaxmem.ops.activations.inverse import UnimodalFunction, from_input, from_output
from jaxmem.ops.activations.kernels import forms_for, gelu_erf
from jaxmem.ops.common.lean import FAR_OUT, inexact
from pallas_kernels.dispatch import Implementation

SQRT_2_OVER_PI = float(np.sqrt(2 / np.pi))
SQRT_HALF = float(np.sqrt(0.5))
INV_SQRT_2PI = float(1 / np.sqrt(2 * np.pi))
CUBIC = 0.044715


def gelu_tanh(x):
    """Value and slope, which share the distribution function."""
    near = jnp.clip(x, -FAR_OUT, FAR_OUT)
    square = near * near
    cdf = jax.nn.sigmoid(2 * SQRT_2_OVER_PI * near * (1 + CUBIC * square))
    inner = 2 * SQRT_2_OVER_PI * (1 + 3 * CUBIC * square)
    return x * cdf, cdf + near * inner * (cdf * (1 - cdf))


def _erf_slope(x):
    x = jnp.clip(x, -FAR_OUT, FAR_OUT)
    cdf = 0.5 * jax.lax.erfc(-SQRT_HALF * x)
    return cdf + x * (INV_SQRT_2PI * jnp.exp(-0.5 * (x * x)))


# argmin and low: root of the derivative in 40-digit arithmetic
TANH = UnimodalFunction(
    value=partial(jax.nn.gelu, approximate=True),
    slope=lambda x: gelu_tanh(x)[1],
    argmin=-0.7524614220710163,
    low=-0.17004075057125406,
    bottom=(0.215200045512, 0.129172815379, -0.00394571338),
    right=(1.74208022, 0.109036026, 0.419985242, 0.0637305623, 0.101906999)
    + (-0.0469759356, -0.0914837272, -0.131591956, 0.0405407819, 0.112501182)
    + (0.0105337708, -0.0389974734),
    left=(-0.888861158, -0.238037677, 0.062353611, -0.00347730518)
    + (2.87308307e-05, -0.000222781116, 3.31862116e-05),
    s_max=2.3173,
    q_max=4.5,
    rising=(1.08071718, -0.617781599, -0.511700228, 0.40094545, 0.397939631)
    + (0.119905481, -0.409575324, -0.12590057, 0.165898254),
    falling=(2.22794917, -1.01514137, 0.572996163, -0.110109548),
    near_one=2.0664,
)
ERF = UnimodalFunction(
    value=partial(jax.nn.gelu, approximate=False),
    slope=_erf_slope,
    argmin=-0.7517915246935645,
    low=-0.16997120747990366,
    bottom=(0.215746996157, 0.129428327664, -0.0045499191),
    right=(1.74133621, 0.109192174, 0.419984504, 0.0672919753, 0.104919831)
    + (-0.0494575897, -0.103272168, -0.137765716, 0.0525084134, 0.123256911)
    + (0.00660394936, -0.0435728784),
    left=(-0.88755543, -0.236906206, 0.0598980321, 0.000130361087)
    + (-0.00577127976, 0.00177768475, -0.00018478469),
    s_max=2.402,
    q_max=4.5049,
    rising=(1.08107134, -0.6186806, -0.518678971, 0.400599498, 0.425100495)
    + (0.125290506, -0.444600525, -0.131073308, 0.181496926),
    falling=(2.22956151, -1.00539363, 0.559344778, -0.119240237),
    near_one=2.0664,
)
FORMS = {
    approximate: forms(
        "gelu",
        unimodal.value,
        {
            "input": from_input("gelu", unimodal),
            "output": from_output("gelu", unimodal),
        },
        table,
    )
    for approximate, unimodal, table in (
        (True, TANH, "gelu_tanh"),
        (False, ERF, "gelu_erf"),
    )
}


def gelu(
    x: Shaped[ArrayLike, "*shape"],
    approximate: bool = True,
    *,
    save: str | int = "input",
    bits: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*shape"]:
    """Gaussian error linear unit, as `jax.nn.gelu`.

    Args:
        x: input of any shape; integers become floats.
        approximate: the tanh form if true, else the erf form.
        save: what the backward pass keeps. "input": x, and the derivative is exact.
            "output": the output, which costs nothing when the next matmul keeps it
            too, and one bit an element; the derivative is that at the x recovered
            from the rounded output, off by at most 1e-4 in float32, 0.0075 in
            float16 and 0.016 in bfloat16, near the minimum at -0.75. A number from 1
            to 8: a code of so many bits, and the derivative is one of 2**bits levels:
            off by 0.045 at 2 bits, 0.024 at 3, 0.0125 at 4 (root mean square over
            -10 .. 10), by at most 0.19, 0.13, 0.07. "auto": "output" where the next
            operation keeps the output anyway, else `bits` where given, else "input";
            see `jaxmem.rewriting.auto_save`, without which it is "input".
        bits: of the code, 1 to 8; for save="auto".
        implementation: "xla"; "pallas" for the kernel of a TPU or GPU, which writes
            output and code in one pass and the gradient over its cotangent, for
            "output" and 1 to 8 bits, in reverse mode alone; None: the kernel where it
            was measured to be no slower.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        ValueError: `save` is another word, bits are out of range or not for "auto", or
            no kernel does what "pallas" asks for.
        TypeError: x is complex, or no array.

    Saves:
        "input": x alone. "output": the output and 1/8 byte an element. A number of
        bits: bits/8 byte an element and nothing else. With a kernel the same.

    Costs:
        In a scan over layers fewer bytes moved than by `jax.nn.gelu`, both passes.
        Alone in one program with its own backward pass "output" moves more, as XLA
        fuses the plain op away there (4096 x 4096 bfloat16, TPU: 320 MiB to 128).

    Source:
        Hendrycks and Gimpel, arXiv 1606.08415; the kept bit: Tempo, arXiv 2210.10246,
        section 3.1; the code: Few-Bit Backward, arXiv 2202.00441, section 3.
    """
    x, approximate = inexact("gelu", x), check_bool("gelu: approximate", approximate)
    unimodal, both = (TANH, gelu_tanh) if approximate else (ERF, gelu_erf)
    lean = FORMS[approximate]
    forms_ = forms_for("gelu", x, implementation, save, lean, unimodal, both)
    return forms_.op(save, bits)(x)
