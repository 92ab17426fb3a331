"""GELU and SiLU by kernels that write output and code in one pass.

Kept is what the XLA path keeps. Kernels have no derivative of their own: unlike on the
XLA path there is no forward mode, and XLA computes second derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmem.ops.activations.forms import Forms, Op
from jaxmem.ops.activations.inverse import UnimodalFunction, invert, settled, start
from jaxmem.ops.common.lean import FAR_OUT
from jaxmem.ops.few_bit.tables import shipped
from pallas_kernels.dispatch import Implementation, considered, dispatch, kernel_module
from pallas_kernels.partials import partial

INV_SQRT_2PI = 0.3989422804014327
# P(-u) = exp(-u^2 / 2) times this polynomial without constant in 1 / (1 + 0.35 u), to
# 3.2e-8 of it for u in 0 .. 14.5 (Lawson's iteration on 400 Chebyshev points)
TAIL_SCALE = 0.35
TAIL = (0.139621307, 0.139863515, 0.119821288, 0.105552501, -0.0232123521)
TAIL += (0.159319694, -0.255839003, 0.144030919, -0.0291578857)

# value and slope of a float32 array
Both = Callable[[Array], tuple[Array, Array]]


# Mosaic lowers no `erfc`: a polynomial stands in for the normal distribution, off by at
# most 2e-7, and by 8e-7 of itself where x > -5.
def gelu_erf(x: Array) -> tuple[Array, Array]:
    """x times the normal distribution's P(x), and the derivative."""
    near = jnp.clip(x, -FAR_OUT, FAR_OUT)
    bell = jnp.exp(-0.5 * (near * near))
    below = near < 0
    t = 1 / (1 + TAIL_SCALE * jnp.where(below, -near, near))  # `abs` has no slope at 0
    tail = t * _horner(TAIL, t) * bell
    cdf = jnp.where(below, tail, 1 - tail)
    return x * cdf, cdf + near * (INV_SQRT_2PI * bell)


def _horner(coefficients: Sequence[float], z: Array) -> Array:
    total = z * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        total = total * z + c
    return total


def _sqrt(v: Array) -> Array:
    # Mosaic lowers no square root. For v above zero; infinity counts as a large number.
    v = jnp.minimum(v, FAR_OUT)
    return v * lax.rsqrt(v)


class ActivationKernel(NamedTuple):
    """Float32 formulas: `value` and `code` forward, g times `slope` backward."""

    value: Callable  # of x
    code: Callable  # of x, in int32
    bits: int
    slope: Callable  # of the code, and of the output where that is kept
    xla_slope: Callable  # the same for XLA, which can be differentiated
    keeps_output: bool


def of_output(unimodal: UnimodalFunction) -> ActivationKernel:
    """What keeps the output and the side of the minimum that the input lay on."""

    def code(x):
        return (x >= unimodal.argmin).astype(jnp.int32)

    def slope(code, y):
        return unimodal.slope(start(unimodal, y, code != 0, _sqrt))

    def xla_slope(code, y):
        return unimodal.slope(invert(unimodal, y, code != 0))

    return ActivationKernel(settled(unimodal), code, 1, slope, xla_slope, True)


def of_code(value: Callable, borders: Sequence[float], levels: Sequence[float]):
    """What keeps the stretch of the line that the input lay in: one of 2**bits."""
    bits = len(levels).bit_length() - 1

    def code(x):
        above = _binary_search(x, borders, bits)
        places = [a.astype(jnp.int32) << b for b, a in enumerate(reversed(above))]
        return functools.reduce(lambda one, other: one | other, places)

    def slope(code):
        digits = [(code >> b) & 1 != 0 for b in reversed(range(bits))]
        return _picked(digits, levels)

    return ActivationKernel(value, code, bits, slope, slope, False)


def _binary_search(x: Array, borders: Sequence[float], bits: int) -> list[Array]:
    """The binary digits, the highest first, of how many borders are not above x."""
    # As many selections as there are borders, and a comparison for each digit: half the
    # instructions of a comparison and an addition for each border.
    digits: list[Array] = []
    for b in reversed(range(bits)):
        halfway = borders[(1 << b) - 1 :: 2 << b]  # of the stretches that are left
        digits.append(x >= _picked(digits, halfway))
    return digits


def _picked(digits: Sequence[Array], numbers: Sequence[float]) -> Array:
    """The one of 2**n numbers whose place has these n binary digits, in float32."""
    if not digits:
        return jnp.float32(numbers[0])
    half = len(numbers) // 2
    low, high = (_picked(digits[1:], part) for part in (numbers[:half], numbers[half:]))
    return jnp.where(digits[0], high, low)


def forms_for(
    op: str,
    x: Array,
    implementation: Implementation | None,
    save: str | int,
    lean: Forms,
    unimodal: UnimodalFunction,
    both: Both,
) -> Forms:
    """`lean`, or its forms by kernels where one may be taken."""
    if not _considered(op, implementation, x):
        return lean
    if implementation == "pallas" and save == "input":
        raise ValueError(
            f"{op}: save='input' has no kernel, as XLA fuses it all the same; "
            "implementation='pallas' goes with save='output' or a number of bits"
        )
    return _kernel_forms(op, implementation, lean, unimodal, both)


def _considered(op: str, implementation: Implementation | None, x: Array) -> bool:
    # float64 is XLA's unless a kernel is asked for, and refuses it.
    is_double = x.dtype == jnp.float64 and implementation is None
    return considered(op, implementation, x) and not is_double


@functools.cache
def _kernel_forms(
    op, implementation, lean: Forms, unimodal: UnimodalFunction, both: Both
) -> Forms:
    def value(x):
        return both(x)[0]

    unimodal = replace(unimodal, value=value, slope=lambda x: both(x)[1])
    make = functools.partial(_kept, op, implementation)

    @functools.cache
    def coded(bits: int) -> Op:
        return make("code", of_code(value, *shipped(lean.name, bits)))

    exact = {"input": lean.exact["input"], "output": make("side", of_output(unimodal))}
    return Forms(f"{lean.name}_{implementation or 'kernel'}", exact, coded)


def _kept(op: str, implementation, kept_name: str, kernel: ActivationKernel) -> Op:
    """The op of a kernel: its derivative is made of what it kept."""
    value, code, bits, slope, xla_slope, keeps_output = kernel
    run = functools.partial(_dispatch, op, implementation)

    def forward(x):
        return run("forward", x, value=value, code=code, bits=bits)

    @jax.custom_vjp
    def apply(x):
        return forward(x)[0]

    def rule(x):
        y, packed = forward(x)
        y = checkpoint_name(y, f"jaxmem_{op}_output")
        packed = checkpoint_name(packed, f"jaxmem_{op}_{kept_name}")
        return y, (packed, y) if keeps_output else (packed,)

    def pull(kept, g):
        return (run("backward", g, *kept, slope=slope, xla={"slope": xla_slope}),)

    apply.defvjp(rule, pull)
    return apply


def _dispatch(
    op: str, implementation, function: str, *arrays: Array, xla=None, **how
) -> Any:
    """The `function` of the module for each platform; `xla` replaces some of `how`."""
    on = functools.partial(partial, _run, function)
    each = {"xla": on("reference", **how | (xla or {}))}
    each |= {platform: on(platform, **how) for platform in ("tpu", "gpu")}
    with jax.named_scope(f"jaxmem.{op}"):
        run = functools.partial(dispatch, op, implementation, *arrays, **each)
        return run(backward=function.endswith("backward"), xla_derives=True)


def _run(function: str, platform: str, *arrays: Array, **how) -> Any:
    return getattr(kernel_module("activation", platform), function)(*arrays, **how)
