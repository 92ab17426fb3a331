"""Gated linear units that keep the projections alone.

The activated gate and its derivative are recomputed in the backward pass, so two
arrays of the gate's size are kept where `jax.nn.silu(gate) * up` keeps five and the
tanh form of GELU seven. One sigmoid (or tanh, or erfc) an element is computed twice.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from jaxmem._checks import check_bool, check_int
from jaxmem._deprecated import ignored_argument
from jaxmem.ops.activations.gelu import gelu, gelu_tanh
from jaxmem.ops.common.lean import inexact, recomputed, widen


@functools.cache
def _gated(name, activation):
    """`activation(gate) * up`, keeping no more than the two."""

    def op(gate, up):
        return (activation(widen(gate)) * widen(up)).astype(gate.dtype)

    # XLA keeps an `erfc` of the forward pass sooner than that it computes another.
    return recomputed(name, op, prevent_cse=activation is _gelu_erf)


def _gelu_tanh(x):
    # By the logistic function: XLA keeps a hyperbolic tangent of the forward pass, in
    # float32, sooner than that it computes another.
    return gelu_tanh(x)[0]


def _gelu_erf(x):
    # ours: jax 0.12 cannot differentiate float32 erfc inside shard_map
    return gelu(x, approximate=False)


# Its kernels are gone: XLA's fusions hold and move as few bytes.
_no_implementation = ignored_argument(
    "implementation", "leave it out, as there are no kernels any more", "0.4.0"
)


def _check(name, gate, up):
    gate, up = inexact(name, gate, "gate"), inexact(name, up, "up")
    if gate.shape != up.shape:
        raise ValueError(
            f"{name}: gate and up must have one shape, got {gate.shape} and {up.shape}"
        )
    if gate.dtype != up.dtype:
        raise TypeError(
            f"{name}: gate and up must have one dtype, got {gate.dtype} and {up.dtype}"
        )
    return gate, up


def glu(x: Shaped[ArrayLike, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Gated linear unit, as `jax.nn.glu`: the first half times sigmoid of the second.

    Args:
        x: input with an even size along `axis`; integers become floats.
        axis: the axis to halve.

    Returns:
        Array of half the size along `axis`, in the dtype of x.

    Raises:
        ValueError: the size along `axis` is odd, or x has no such axis.
        TypeError: x is complex, or no array.

    Saves:
        x alone.

    Source:
        Dauphin et al., arXiv 1612.08083, section 2.
    """
    x = inexact("glu", x)
    axis = check_int("glu: axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"glu: axis={axis} is none of an array of shape {x.shape}")
    if x.shape[axis] % 2:
        raise ValueError(f"glu: axis={axis} must have an even size, got {x.shape}")
    with jax.named_scope("jaxmem.glu"):
        return _halves(x, axis)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def _halves(x, axis):
    up, gate = jnp.split(x, 2, axis)
    return (widen(up) * jax.nn.sigmoid(widen(gate))).astype(x.dtype)


@_no_implementation
def swiglu(
    gate: Shaped[ArrayLike, "*shape"],
    up: Shaped[ArrayLike, "*shape"],
) -> Float[Array, "*shape"]:
    """silu(gate) times up.

    Deprecated: `implementation=` has no effect, and will be removed in 0.4.0.

    Args:
        gate: the projection that is activated.
        up: the projection that is gated, same shape and dtype.

    Returns:
        Array of that shape and dtype, computed in float32 and rounded once.

    Raises:
        ValueError: the shapes differ.
        TypeError: the dtypes differ, or one is complex.

    Saves:
        gate and up; gate alone where only `up` is differentiated.

    Source:
        Shazeer, GLU variants improve transformer, arXiv 2002.05202, section 2.
    """
    gate, up = _check("swiglu", gate, up)
    return _gated("swiglu", jax.nn.silu)(gate, up)


@_no_implementation
def geglu(
    gate: Shaped[ArrayLike, "*shape"],
    up: Shaped[ArrayLike, "*shape"],
    approximate: bool = True,
) -> Float[Array, "*shape"]:
    """gelu(gate) times up.

    Deprecated: `implementation=` has no effect, and will be removed in 0.4.0.

    Args:
        gate: the projection that is activated.
        up: the projection that is gated, same shape and dtype.
        approximate: the tanh form of GELU if true, else the erf form.

    Returns:
        Array of that shape and dtype, computed in float32 and rounded once.

    Saves:
        gate and up; gate alone where only `up` is differentiated.

    Source:
        Shazeer, GLU variants improve transformer, arXiv 2002.05202, section 2.
    """
    gate, up = _check("geglu", gate, up)
    is_tanh = check_bool("geglu: approximate", approximate)
    return _gated("geglu", _gelu_tanh if is_tanh else _gelu_erf)(gate, up)
