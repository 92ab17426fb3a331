"""Activations and gated units against `jax.nn`."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem.ops.activations.records import INPUT, OUTPUT, UNARY, UNIMODAL
from jaxmem.ops.few_bit.tables import shipped
from jaxmem.ops.record import KeptByForm
from tests.references import Comparison, unary_args

SHAPES = ((7,), (), (3, 5, 13))


def saves(kept):
    return lambda args, wanted: kept.nbytes(args[0])


@jax.custom_jvp
def _gelu_in_steps(x):
    return jax.nn.gelu(x)


@_gelu_in_steps.defjvp
def _(primals, tangents):
    """GELU with the derivative of its table of 3 bits."""
    (x,), (t,) = primals, tangents
    borders, levels = (jnp.asarray(p, jnp.float32) for p in shipped("gelu_tanh", 3))
    slope = jnp.vectorize(lambda x: levels[jnp.sum(x >= borders)])
    return _gelu_in_steps(x), slope(x.astype(jnp.float32)).astype(x.dtype) * t


def parameter_args(shape, dtype, rng):
    (x,) = unary_args(shape, dtype, rng)
    return x, jnp.asarray(0.3, dtype)


def pair_args(shape, dtype, rng):
    return (*unary_args(shape, dtype, rng), *unary_args(shape, dtype, rng))


def _unary(name, lean, plain, kept):
    """A function of one array, which is off by no more than `kept` says."""
    return Comparison(
        name,
        lean,
        plain,
        unary_args,
        SHAPES,
        saves=saves(kept),
        derivative_error=kept.error,
    )


def _of_records():
    """Every op in all forms but those whose derivative is JAX's own, of the input."""
    for record in UNARY:
        for save, kept in record.residuals.items():
            if save == "input" and record.residuals.get("output") == OUTPUT:
                continue
            lean = partial(record.op, save=save)
            yield _unary(f"{record.name}_{save}", lean, record.reference, kept)


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _geglu(gate, up, approximate=True):
    return jax.nn.gelu(gate, approximate) * up


OF_RECORDS = [*_of_records()]
# The same ops with other arguments.
VARIANTS = [
    _unary(f"{name}_{save}", partial(lean, save=save), plain, kept)
    for save, kept in UNIMODAL.items()
    for name, lean, plain in (
        (
            "gelu_erf",
            partial(ops.gelu, approximate=False),
            partial(jax.nn.gelu, approximate=False),
        ),
        (
            "silu_beta",
            partial(ops.silu, beta=1.702),
            lambda x: x * jax.nn.sigmoid(jnp.asarray(1.702, x.dtype) * x),
        ),
    )
] + [
    _unary("gelu_code", partial(ops.gelu, save=3), _gelu_in_steps, KeptByForm(bits=3)),
    _unary(
        "elu_2", partial(ops.elu, alpha=2.0), partial(jax.nn.elu, alpha=2.0), OUTPUT
    ),
    _unary(
        "elu_negative",
        partial(ops.elu, alpha=-0.5),
        partial(jax.nn.elu, alpha=-0.5),
        INPUT,
    ),
    _unary(
        "leaky_relu_zero",
        partial(ops.leaky_relu, negative_slope=0.0),
        partial(jax.nn.leaky_relu, negative_slope=0.0),
        INPUT,
    ),
]
PARAMETERS = [
    Comparison(
        name,
        lean,
        plain,
        parameter_args,
        SHAPES[::2],
        diff=(0, 1),
        saves=saves(INPUT),
    )
    for name, lean, plain in (
        ("elu_array", ops.elu, jax.nn.elu),
        ("leaky_relu_array", ops.leaky_relu, jax.nn.leaky_relu),
    )
]
GATED = [
    Comparison(
        "glu", ops.glu, jax.nn.glu, unary_args, ((6,), (3, 5, 14)), saves=saves(INPUT)
    )
] + [
    Comparison(name, lean, plain, pair_args, SHAPES, diff=(0, 1), saves=saves(INPUT))
    for name, lean, plain in (
        ("swiglu", ops.swiglu, _swiglu),
        ("geglu", ops.geglu, _geglu),
        (
            "geglu_erf",
            partial(ops.geglu, approximate=False),
            partial(_geglu, approximate=False),
        ),
    )
]
COMPARISONS = OF_RECORDS + VARIANTS + PARAMETERS + GATED
