"""SiLU that keeps its input, its output and one bit an element, or a code of a few.

`jax.nn.silu` keeps two arrays of the input's size.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from jaxmem._checks import check_float
from jaxmem.ops.activations.forms import Forms, Op, forms
from jaxmem.ops.activations.inverse import (
    UnimodalFunction,
    from_input,
    from_output,
)
from jaxmem.ops.activations.kernels import forms_for
from jaxmem.ops.common.lean import FAR_OUT, inexact, lean, of_input
from jaxmem.ops.few_bit.derivative import coded
from jaxmem.ops.few_bit.tables import shipped
from pallas_kernels.dispatch import Implementation


def value_and_slope(x):
    """Both, which share the sigmoid."""
    near = jnp.clip(x, -FAR_OUT, FAR_OUT)
    s = jax.nn.sigmoid(near)
    return x * s, s * (1 + near * (1 - s))


# argmin and low: root of the derivative in 40-digit arithmetic
SILU = UnimodalFunction(
    value=jax.nn.silu,
    slope=lambda x: value_and_slope(x)[1],
    argmin=-1.2784645427610737,
    low=-0.2784645427610738,
    bottom=(0.10890585286, 0.0488829323323, 0.00471870356),
    right=(2.26818759, -0.104931055, 0.412989058, -0.0729885942, 0.079252081)
    + (-0.0426131778, 0.00724022648, -0.0177136032, 0.0171585042, -0.00583343654)
    + (0.000684276407,),
    left=(-1.59890841, -0.576001872, -0.015939881, -0.0436560504)
    + (0.00974780198, 0.00157350649, -0.000519854065),
    s_max=4.3907,
    q_max=4.1989,
    rising=(0.924766501, -0.263566213, -0.368186316, 0.225687444, 0.0658871624)
    + (-0.0432074019, -0.028843375, 0.0204679766, -0.00328981658),
    falling=(1.24006516, -0.800834285, 0.295407157, -0.0497428371),
    near_one=3.2059,
)
FORMS = forms(
    "silu",
    SILU.value,
    {"input": from_input("silu", SILU), "output": from_output("silu", SILU)},
    "silu",
)


@functools.cache
def _with_factor(beta: float) -> Forms:
    """The forms of silu(beta x) / beta."""

    def value(x):
        return SILU.value(beta * x) / beta

    def slope(x):
        return SILU.slope(beta * x)

    def code(bits: int) -> Op:
        borders, levels = shipped("silu", bits)
        return coded("silu", value, tuple(b / beta for b in borders), levels)

    exact = {
        "input": lean("silu", value, slope, of_input),
        "output": from_output("silu", SILU, beta),
    }
    return Forms(f"silu_{beta!r}", exact, code)


def _check_beta(beta, implementation) -> float:
    beta = check_float("beta", beta, above=0)
    if beta != 1 and implementation == "pallas":
        raise ValueError(
            f"silu: implementation='pallas' has no kernel for beta={beta!r}: leave "
            "beta at 1, or the implementation at None"
        )
    return beta


def silu(
    x: Shaped[ArrayLike, "*shape"],
    *,
    beta: float = 1.0,
    save: str | int = "input",
    bits: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*shape"]:
    """Sigmoid linear unit x sigmoid(beta x), as `jax.nn.silu`; also called `swish`.

    With `beta=1.702` it is the quick GELU of CLIP.

    Args:
        x: input of any shape; integers become floats.
        beta: the factor inside, a number above zero.
        save: what the backward pass keeps, as in `gelu`. The derivative from the
            output is off by at most 1e-4 in float32, 0.0075 in float16 and 0.016 in
            bfloat16, near the minimum at -1.28; that from a code by 0.049 at 2 bits,
            0.029 at 3, 0.015 at 4 (root mean square over -10 .. 10), by at most 0.19,
            0.13, 0.07.
        bits: of the code, 1 to 8; for save="auto".
        implementation: as in `gelu`; a kernel has no other beta than 1.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        ValueError: `save` is another word, bits are out of range or not for "auto",
            beta is not above zero, or no kernel does what "pallas" asks for.
        TypeError: x is complex, or no array; beta is no number.

    Saves:
        "input": x alone. "output": the output and 1/8 byte an element. A number of
        bits: bits/8 byte an element and nothing else. With a kernel the same.

    Costs:
        As `gelu`.

    Source:
        Hendrycks and Gimpel, arXiv 1606.08415; beta: Ramachandran et al., arXiv
        1710.05941; the kept bit: Inverted Activations, arXiv 2407.15545; the
        code: Few-Bit Backward, arXiv 2202.00441, section 3.
    """
    x = inexact("silu", x)
    beta = _check_beta(beta, implementation)
    if beta != 1:
        return _with_factor(beta).op(save, bits)(x)
    forms_ = forms_for("silu", x, implementation, save, FORMS, SILU, value_and_slope)
    return forms_.op(save, bits)(x)


swish = silu
