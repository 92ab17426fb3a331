"""Activations and gated units against `jax.nn`."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem._bits import packed_nbytes
from jaxmem.ops.codes.packing import packed_codes_nbytes
from jaxmem.ops.few_bit.tables import shipped
from tests.twins import Twin, nbytes, unary_args

SHAPES = ((7,), (), (3, 5, 13))

# the derivative from the rounded output: half a cell of y at the minimum, and the fit
FROM_OUTPUT = {"float32": 1e-4, "bfloat16": 0.016}


def saves_nothing(args, wanted):
    return 0


def saves_output(args, wanted):
    return nbytes(args[0])


def saves_output_and_bit(args, wanted):
    return nbytes(args[0]) + packed_nbytes(args[0].shape)


def saves_three_bits(args, wanted):
    return packed_codes_nbytes(args[0].shape, 3)


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


def _unary(name, lean, plain, saves, **more):
    return Twin(name, lean, plain, unary_args, SHAPES, saves=saves, **more)


def _squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _geglu(gate, up, approximate=True):
    return jax.nn.gelu(gate, approximate) * up


INVERTED = [
    _unary(
        f"{name}_{save}",
        partial(lean, save=save),
        plain,
        saves_nothing if save == "input" else saves_output_and_bit,
        derivative_error={} if save == "input" else FROM_OUTPUT,
    )
    for save in ("input", "output")
    for name, lean, plain in (
        ("gelu_tanh", ops.gelu, jax.nn.gelu),
        (
            "gelu_erf",
            partial(ops.gelu, approximate=False),
            partial(jax.nn.gelu, approximate=False),
        ),
        ("silu", ops.silu, jax.nn.silu),
        (
            "silu_beta",
            partial(ops.silu, beta=1.702),
            lambda x: x * jax.nn.sigmoid(jnp.asarray(1.702, x.dtype) * x),
        ),
    )
]
CODED = [
    _unary("gelu_code", partial(ops.gelu, save=3), _gelu_in_steps, saves_three_bits)
]
KEEP_OUTPUT = [
    _unary(name, lean, plain, saves_output)
    for name, lean, plain in (
        ("relu", ops.relu, jax.nn.relu),
        ("squared_relu", ops.squared_relu, _squared_relu),
        ("softplus", ops.softplus, jax.nn.softplus),
        ("elu", ops.elu, jax.nn.elu),
        ("elu_2", partial(ops.elu, alpha=2.0), partial(jax.nn.elu, alpha=2.0)),
        ("leaky_relu", ops.leaky_relu, jax.nn.leaky_relu),
        ("tanh", ops.tanh, jnp.tanh),
        ("sigmoid", ops.sigmoid, jax.nn.sigmoid),
    )
]
KEEP_INPUT = [
    _unary(name, lean, plain, saves_nothing)
    for name, lean, plain in (
        ("mish", ops.mish, jax.nn.mish),
        (
            "elu_negative",
            partial(ops.elu, alpha=-0.5),
            partial(jax.nn.elu, alpha=-0.5),
        ),
        (
            "leaky_relu_zero",
            partial(ops.leaky_relu, negative_slope=0.0),
            partial(jax.nn.leaky_relu, negative_slope=0.0),
        ),
    )
]
PARAMETERS = [
    Twin(
        name,
        lean,
        plain,
        parameter_args,
        SHAPES[::2],
        diff=(0, 1),
        saves=saves_nothing,
    )
    for name, lean, plain in (
        ("elu_array", ops.elu, jax.nn.elu),
        ("leaky_relu_array", ops.leaky_relu, jax.nn.leaky_relu),
    )
]
GATED = [
    Twin(
        "glu", ops.glu, jax.nn.glu, unary_args, ((6,), (3, 5, 14)), saves=saves_nothing
    )
] + [
    Twin(name, lean, plain, pair_args, SHAPES, diff=(0, 1), saves=saves_nothing)
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
TWINS = INVERTED + CODED + KEEP_OUTPUT + KEEP_INPUT + PARAMETERS + GATED
