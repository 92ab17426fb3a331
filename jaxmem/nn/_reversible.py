"""Reversible blocks: the backward pass computes inputs again from outputs.

A block adds f of the second stream to the first, then g of the first to the second.
Subtraction undoes that, so a stack of blocks keeps its output and nothing of each layer
(RevNet, Gomez et al., arXiv 1707.04585, section 3; Reformer, Kitaev et al., arXiv
2001.04451, section 4). Subtraction undoes addition up to rounding, which is why the
streams are in float32 unless another dtype is asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, DTypeLike, Float

from jaxmem._checks import check_callable, check_dtype, wrong_type, wrong_value
from jaxmem.ops.common.lean import wide_dtype

Pair = tuple[Float[Array, "..."], Float[Array, "..."]]


class _Branch(NamedTuple):
    """f or g as a function of arrays alone: `run(x, consts, layer)`."""

    run: Callable[[Array, Sequence[Any], Sequence[Any]], Array]
    consts: list[Any]  # what the user's function closes over
    layers: list[Any]  # leaves with layers along axis 0


class _Wanted(NamedTuple):
    """Which leaves are differentiated."""

    flags: tuple[bool, ...]

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        parts: tuple[list[Any], list[Any]] = [], []
        for flag, x in zip(self.flags, leaves, strict=True):
            parts[not flag].append(x)
        return parts

    def join(self, moving: Sequence[Any], still: Sequence[Any]) -> list[Any]:
        sources = iter(moving), iter(still)
        return [next(sources[not flag]) for flag in self.flags]


def reversible(
    f: Callable[[Array, Any], Array],
    g: Callable[[Array, Any], Array],
    *,
    stream_dtype: DTypeLike | None = None,
) -> Callable[[Pair, tuple[Any, Any]], Pair]:
    """A stack of reversible blocks, which keeps its output and nothing of each layer.

    A layer maps two streams (x1, x2) to (y1, y2):

        y1 = x1 + f(x2, layer of f)
        y2 = x2 + g(y1, layer of g)

    The backward pass goes through the layers in a scan from the last to the first:
    it recomputes x2 = y2 - g(y1) and x1 = y1 - f(x2), and differentiates f and g there.
    It runs each of them once more, as `jax.checkpoint` of a layer does.

    Args:
        f: from a stream and one layer's slice of its parameters to an array of the
            shape of the other stream, the same at each call with the same arguments:
            random keys are leaves of the layers. Arrays that it closes over are
            differentiated, too.
        g: likewise.
        stream_dtype: of the two streams between layers; None: float32, or that of the
            input where it is wider. f and g get streams in the dtype of the input.

    Returns:
        `stack(x, layers)`: x is a pair of floating arrays, layers is a pair of pytrees
        (for f, for g) of arrays with the layers along axis 0, as `jax.lax.scan` takes
        them; the result is the pair (y1, y2) in the dtypes of x.

    Raises:
        TypeError: f or g is no function, x no pair of floating arrays, an output of f
            or g no floating array.
        ValueError: `layers` is no pair, or its leaves differ in axis 0; an output of f
            or g with another shape than its stream; `stream_dtype` that is no floating
            dtype.

    Saves:
        The output, two arrays in `stream_dtype`, for all layers together. Parameters
        are arguments; those that are frozen get no gradient, and nothing is made for
        them.

    Limits:
        Gradients are those of the recomputed streams. These differ from the forward
        pass by a rounding in `stream_dtype` of each layer, and where f and g compute in
        bfloat16 by their roundings, which an input that differs a little changes. The
        error grows with depth, most with bfloat16 streams; `docs/reversible.md` has it
        measured. Forward-mode differentiation (`jax.jvp`) raises.

    Example::

        f = lambda x, w: jnp.tanh(x @ w)
        stack = jaxmem.reversible(f, f)
        x, w = jnp.ones((8, 16)), jnp.ones((4, 16, 16))  # 4 layers
        y1, y2 = stack((x, x), (w, w))

    Source:
        Gomez et al., The Reversible Residual Network, arXiv 1707.04585, section 3.
        Kitaev et al., Reformer, arXiv 2001.04451, section 4.
    """
    check_callable("reversible: f", f)
    check_callable("reversible: g", g)
    if stream_dtype is not None:
        check_dtype("reversible: stream_dtype", stream_dtype)

    def stack(x: Pair, layers: tuple[Any, Any]) -> Pair:
        _check_streams(x)
        _check_layers(layers)
        with jax.named_scope("jaxmem.reversible"):
            dtypes = [x.dtype for x in x]
            streams = [jnp.asarray(x, stream_dtype or wide_dtype(x.dtype)) for x in x]
            branches = [
                _branch(name, fn, layer, streams[i], streams[1 - i], dtypes[i])
                for name, fn, layer, i in zip("fg", (f, g), layers, (1, 0), strict=True)
            ]
            out = _stack([b.run for b in branches])(
                *streams, [b.consts for b in branches], [b.layers for b in branches]
            )
            return out[0].astype(dtypes[0]), out[1].astype(dtypes[1])

    return stack


def _check_streams(x: Any) -> None:
    allowed = "a pair of floating arrays, the two streams"
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise wrong_type("reversible: x", x, allowed)
    if not all(jnp.issubdtype(getattr(s, "dtype", int), jnp.floating) for s in x):
        raise wrong_type("reversible: x", x, allowed)


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, tuple | list) or len(layers) != 2:
        raise wrong_type("reversible: layers", layers, "a pair, of f and of g")
    leaves = jax.tree.leaves(layers)
    lengths = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        allowed = "leaves with the layers along axis 0, as many in each"
        raise wrong_value("reversible: layers", layers, allowed)


def _branch(name: str, fn: Callable, layers: Any, x, to, dtype) -> _Branch:
    """`fn` traced once, so that what it closes over becomes arguments."""
    leaves, tree = jax.tree.flatten(layers)

    def flat(x, *layer):
        out = fn(x.astype(dtype), jax.tree.unflatten(tree, layer))
        _check_output(name, out, to)
        return out.astype(to.dtype)

    # A slice has the type of the whole, with the axes of a mesh that it varies over.
    first = jax.eval_shape(lambda leaves: [leaf[0] for leaf in leaves], leaves)
    closed = jax.make_jaxpr(flat)(x, *first)

    def run(x, consts, layer):
        return jax.core.eval_jaxpr(closed.jaxpr, consts, x, *layer)[0]

    return _Branch(run, list(closed.consts), leaves)


def _check_output(name: str, out: Any, to: Array) -> None:
    allowed = f"an output like its stream, a floating array of shape {to.shape}"
    if not jnp.issubdtype(getattr(out, "dtype", int), jnp.floating):
        raise wrong_type(f"reversible: {name} returned", out, allowed)
    if out.shape != to.shape:
        raise wrong_value(f"reversible: {name} returned", out, allowed)


def _stack(runs: Sequence[Callable]) -> Callable:
    """(x1, x2, constants of both, leaves of both) -> (y1, y2)."""

    def forward(x1, x2, consts, layers):
        def layer(x, slices):
            y1 = x[0] + runs[0](x[1], consts[0], slices[0])
            return (y1, x[1] + runs[1](y1, consts[1], slices[1])), None

        return lax.scan(layer, (x1, x2), layers)[0]

    def keep(*args):
        values = jax.tree.map(lambda p: p.value, args, is_leaf=_is_primal)
        # Flags as structure: what is kept must be arrays.
        wanted = jax.tree.map(
            lambda p: () if p.perturbed else None, args[2:], is_leaf=_is_primal
        )
        y = forward(*values)
        return y, (y, values[2:], wanted)

    def backward(kept, dy):
        y, (consts, layers), wanted = kept
        with jax.named_scope("jaxmem.reversible"):
            return _backward(runs, y, dy, consts, layers, wanted)

    op = jax.custom_vjp(forward)
    # A frozen parameter is known by its symbolic zero. There is nothing for
    # `optimize_remat`: the rule computes what the function does.
    op.defvjp(keep, backward, symbolic_zeros=True)
    return op


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(runs, y, dy, consts, layers, wanted):
    """Cotangents of streams, constants and layers; None for what is frozen."""
    flags = [[_Wanted(tuple(p is not None for p in ps)) for ps in w] for w in wanted]
    of_consts, of_layers = flags
    pairs = zip(y, dy, strict=True)
    dy = [jnp.zeros_like(a) if isinstance(d, SymbolicZero) else d for a, d in pairs]

    def undo(i, into, of, d_into, d_of, slices):
        """The input to which branch i of `of` was added to give `into`; gradients."""
        c, c_still = of_consts[i].split(consts[i])
        p, p_still = of_layers[i].split(slices[i])

        def branch(of, c, p):
            args = of_consts[i].join(c, c_still), of_layers[i].join(p, p_still)
            return runs[i](of, *args)

        out, pull = jax.vjp(branch, of, c, p)
        d, d_consts, d_layer = pull(d_into)
        return into - out, d_of + d, d_consts, d_layer

    def layer(carry, slices):
        (y1, y2), (d1, d2), sums = carry
        x2, d1, cg, pg = undo(1, y2, y1, d2, d1, slices)
        x1, d2, cf, pf = undo(0, y1, x2, d1, d2, slices)
        sums = jax.tree.map(jnp.add, sums, [cf, cg])
        return ((x1, x2), (d1, d2), sums), [pf, pg]

    zeros = [
        [jnp.zeros_like(c) for c in w.split(cs)[0]]
        for w, cs in zip(of_consts, consts, strict=True)
    ]
    start = tuple(y), tuple(dy), zeros
    (_, dx, sums), grads = lax.scan(layer, start, layers, reverse=True)
    nothing = lambda w: [None] * w.flags.count(False)
    filled = lambda ws, ds: [w.join(d, nothing(w)) for w, d in zip(ws, ds, strict=True)]
    return *dx, filled(of_consts, sums), filled(of_layers, grads)
