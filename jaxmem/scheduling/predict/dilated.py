"""Convolutions whose dilated input XLA:GPU writes: a transposed convolution is one.

cuDNN knows no dilated input. It has the gradient of a convolution by its input, which
is one of a dilated input and a reversed kernel; where the kernel is not reversed, XLA
puts zeros between the elements of the input first. Of what reads it, an array of
that many times as many rows and columns is then there. Source: openxla/xla,
xla/service/gpu/transforms/conv_rewriter.cc and conv_padding_legalization.cc.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.scheduling.predict.written_out import written_out

_CONVOLUTION = "conv_general_dilated"


def with_dilated_inputs(closed, tpu: bool):
    """A closed jaxpr in which such inputs are arrays of their own; not those of loops.

    What is predicted is of it; what is compiled has the convolutions as they are.
    """
    if tpu or not any(map(_has_dilated_input, jaxprs.walk(closed))):
        return closed
    closed = written_out(closed)
    graph = JaxprGraph(closed)
    written = {id(eqn) for eqn in graph.eqns if _is_written(graph, eqn)}
    if not written:
        return closed
    made: dict[Hashable, tuple[Any, Any]] = {}  # with the input, so that its id stays

    def rule(eqn, args: list) -> list[Any] | None:
        if id(eqn) not in written:
            return None
        image, kernel = args
        padding = tuple(_padding(eqn))
        # XLA merges two of one image: what is padded alike is written once
        key = id(image), padding
        if key not in made:
            made[key] = _compat.in_context_of(eqn, _padded, image, padding), image
        none = ((0, 0),) * len(eqn.params["padding"])
        without = {"lhs_dilation": (1,) * len(none), "padding": none}
        return _compat.bind(eqn, [made[key][0], kernel], eqn.params | without)

    return jaxprs.rewritten(closed, rule)


def _has_dilated_input(eqn) -> bool:
    is_convolution = primitives.is_convolution(eqn)
    return is_convolution and any(by > 1 for by in eqn.params["lhs_dilation"])


def _is_written(graph: JaxprGraph, eqn) -> bool:
    if not _has_dilated_input(eqn):
        return False
    if min(low for pair in eqn.params["padding"] for low in pair) < 0:
        return False
    image, kernel = (_space(eqn, side) for side in (0, 1))
    # a kernel of one element is its own reverse: cuDNN takes both as gradients
    if elements(kernel) == 1 or _is_reversed(graph, eqn.invars[1]):
        return False
    # XLA swaps the operands of what has a kernel larger than its input, as the
    # gradient of a kernel has: the input dilates the kernel then.
    grouped = max(eqn.params[f"{of}_group_count"] for of in ("feature", "batch")) > 1
    return grouped or elements(kernel) <= elements(image)


def _space(eqn, side: int) -> list[int]:
    """The sizes of an operand along the axes of space."""
    numbers = eqn.params["dimension_numbers"]
    spec = (numbers.lhs_spec, numbers.rhs_spec)[side]
    return [eqn.invars[side].aval.shape[axis] for axis in spec[2:]]


def _is_reversed(graph: JaxprGraph, v) -> bool:
    """Whether a kernel is another one reversed, views looked through."""
    while is_var(v) and v in graph.maker:
        eqn = graph.eqns[graph.maker[v]]
        if eqn.primitive.name == "rev":
            return True
        if not primitives.of(eqn).rearranges:
            return False
        v = eqn.invars[0]
    return False


def _padding(eqn) -> Iterator[tuple[int, int, int]]:
    """What is put before, behind and between the elements of each axis of the input."""
    space = eqn.params["dimension_numbers"].lhs_spec[2:]
    pairs = zip(eqn.params["padding"], eqn.params["lhs_dilation"], strict=True)
    found = {axis: (*of, by - 1) for axis, (of, by) in zip(space, pairs, strict=True)}
    return (found.get(a, (0, 0, 0)) for a in range(eqn.invars[0].aval.ndim))


def _padded(image, padding):
    zero = jax.numpy.zeros((), image.dtype)
    return jax.lax.pad(image, zero, padding)
