"""Chains of elementwise steps that keep one derivative: nested forward differentiation.

JAX keeps the factors of every step of a chain. Here the derivative of each element is
computed in the forward pass, and is all that is kept (Guo et al., arXiv 2209.10778).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmem import _compat
from jaxmem._checks import check_callable, check_key
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives
from jaxmem.ops.codes.quantization import Quantization, SaveLike, bits_or_none
from jaxmem.ops.codes.stored import Rng, codes_of, is_nonzero, seed_of
from jaxmem.ops.common.lean import widen


def elementwise(
    fn: Callable[..., Array], *, save: SaveLike | None = None, rng: Rng = None
) -> Callable[..., Array]:
    """The function `fn`, keeping one derivative an element for each input.

    The forward pass is bitwise that of `fn`. Its derivatives are computed there
    too, by forward mode in the dtypes of `fn`, and kept in that of the input: with
    bfloat16 inputs they are rounded once more, to 2^-9 of their size.

    Args:
        fn: of one or more arrays of one shape, and scalars, to one array of that
            shape; every step elementwise. Arrays of that shape, and scalars, that it
            closes over are inputs too.
        save: None keeps the derivative as it is. Bits (1 to 8), or a `Quantization`,
            keep codes of it: off by at most half a step, the spread of a block of 128
            neighbours / (2^bits - 1).
        rng: a key for stochastic rounding of the codes, which makes their mean exact
            and doubles the largest error; another each step.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: a step of `fn` that is not elementwise (it is named), or bits out of
            range.
        TypeError: an output that is not one floating array, `save` that is no number.

    Saves:
        For each differentiated input one number an element in the dtype of that input
        (of the output, for a scalar); with `save` bits / 8 byte and a step and an
        offset a block. No input and no output.

    Limits:
        With `save` the derivative is a constant to a second derivative.

    Example::

        act = jaxmem.ops.elementwise(lambda x, g: jnp.tanh(x) * jnp.exp(-x * x) * g)
        y = act(x, gate)

    Source:
        Guo et al., Nested Forward Automatic Differentiation, arXiv 2209.10778.
    """
    check_callable("fn", fn)
    if rng is not None:
        check_key("rng", rng)
    quantization = bits_or_none("elementwise", save)
    name = getattr(fn, "__name__", type(fn).__name__)

    def wrapped(*args):
        xs = [jnp.asarray(x) for x in args]
        shape = jnp.broadcast_shapes(*(x.shape for x in xs))
        if bad := [x.shape for x in xs if x.shape not in (shape, ())]:
            raise ValueError(
                f"elementwise({name}): arguments of shapes {bad[0]} and {shape}; one "
                "shape is needed, or scalars"
            )
        body, hoisted = jax.closure_convert(fn, *xs)
        xs += hoisted
        _check(name, body, xs)
        with jax.named_scope(f"jaxmem.elementwise.{name}"):
            return _nested(body, xs, quantization, rng)

    return functools.wraps(fn)(wrapped) if hasattr(fn, "__name__") else wrapped


def _nested(fn: Callable, xs: list[Array], quantization, rng: Rng) -> Array:
    @jax.custom_jvp
    def op(xs):
        return fn(*xs)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (xs,), (dots,) = primals, tangents
        parts = []
        for i, dot in enumerate(dots):
            if is_nonzero(dot):
                slope = _slope(fn, xs, i)
                parts.append(_times(slope, dot, quantization, seed_of(rng, i)))
        return fn(*xs), sum(parts[1:], parts[0])

    return op(xs)


def _slope(fn: Callable, xs: list[Array], i: int) -> Array:
    """The derivative of each element of the output in its element of input `i`."""
    alone = lambda x: fn(*xs[:i], x, *xs[i + 1 :])
    # A tangent a differentiated input costs less than recomputing the chain backwards.
    y_dot = jax.jvp(alone, (xs[i],), (jnp.ones_like(xs[i]),))[1]
    kept = y_dot.dtype if xs[i].ndim == 0 else xs[i].dtype
    return checkpoint_name(y_dot.astype(kept), "jaxmem_elementwise_slope")


def _times(slope: Array, dot: Array, quantization: Quantization | None, seed) -> Array:
    """slope * dot, in the dtype of the output, keeping the slope or its codes."""
    kept = None if quantization is None else codes_of(slope, quantization, seed)
    like = jax.ShapeDtypeStruct(slope.shape, slope.dtype)

    def product(slope, kept, dot):
        slope = slope if kept is None else kept.recall(like)
        dot = jnp.broadcast_to(widen(dot), slope.shape)
        return (widen(slope).astype(dot.dtype) * dot).astype(like.dtype)

    product = jax.checkpoint(product, prevent_cse=False)
    return product(slope if kept is None else None, kept, dot)


def _check(name: str, fn: Callable, xs: list[Array]) -> None:
    """Raises unless every step from `xs` to the one output is elementwise."""
    closed = jax.make_jaxpr(fn)(*xs)
    outs = closed.jaxpr.outvars
    if len(outs) != 1 or not jnp.issubdtype(outs[0].aval.dtype, jnp.floating):
        raise TypeError(f"elementwise({name}): the output must be one floating array")
    shape = jnp.broadcast_shapes(*(x.shape for x in xs))
    if outs[0].aval.shape != shape:
        raise ValueError(
            f"elementwise({name}): the output has shape {outs[0].aval.shape}, the "
            f"inputs {shape}"
        )
    _check_body(name, closed, [True] * len(xs), shape)


def _check_body(name: str, body: Any, moving: list[bool], shape) -> list[bool]:
    """Which outputs of a body depend on the inputs that move; raises as `_check`."""
    jaxpr, _ = _jaxpr.split(body)
    moves = {v for v, m in zip(jaxpr.invars, moving, strict=True) if m}

    def touched(atom) -> bool:
        return not isinstance(atom, _compat.Literal) and atom in moves

    for eqn in jaxpr.eqns:
        inputs = [touched(v) for v in eqn.invars]
        if not any(inputs):
            continue
        if primitives.of(eqn).calls and (inner := _jaxpr.bodies(eqn)):
            outs = _check_body(name, inner[0], inputs, shape)
        else:
            _check_step(name, eqn, inputs, shape)
            outs = [True] * len(eqn.outvars)
        moves |= {v for v, m in zip(eqn.outvars, outs, strict=True) if m}
    return [touched(v) for v in jaxpr.outvars]


def _check_step(name: str, eqn: Any, inputs: list[bool], shape) -> None:
    mine = [v.aval.shape for v, m in zip(eqn.invars, inputs, strict=True) if m]
    known = primitives.of(eqn)
    if (known.elementwise or known.same) and all(s in (shape, ()) for s in mine):
        return
    # one number is spread over the whole shape
    if known.kind is primitives.Kind.SHAPE and all(s == () for s in mine):
        return
    line = _compat.source_line(eqn)
    raise ValueError(
        f"elementwise({name}): the step {known.name!r}{line and f' at {line}'} is not "
        f"elementwise on arrays of shape {shape}"
    )
