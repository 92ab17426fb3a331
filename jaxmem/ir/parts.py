"""An operation on a part of its arrays."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from jaxmem import _compat
from jaxmem.ir.axis_labels import Axis, resized


def on_part(
    eqn,
    args: Sequence[Any],
    ins: Sequence[Axis],
    outs: Sequence[Axis],
    length: Callable[[int], int],
    start: Callable[[int], Any],
) -> list[Any]:
    """What an equation gives of parts of its operands.

    Args:
      eqn: an equation with labels (`axis_labels.labels`).
      args: what there is of each operand.
      ins: along which axis each operand is cut; None for one that is whole.
      outs: the same for the outputs.
      length: of an axis of this length in the equation, the length of its part.
      start: of the same, where the part starts; it may be traced. Where the part is of
        several places, a number for each of its elements.
    """
    new = _compat.bind(eqn, list(args), resized(eqn, ins, outs, length))
    if eqn.primitive.name == "iota" and outs[0] == eqn.params["dimension"]:
        first = start(eqn.outvars[0].aval.shape[outs[0]]).astype(new[0].dtype)
        new = [new[0] + _along(first, outs[0], new[0].ndim)]
    return new


def _along(x, axis: int | None, rank: int):
    """A number as it is; an array of them along an axis of an array of this rank."""
    others = [d for d in range(rank) if d != axis]
    return lax.expand_dims(x, others) if x.ndim else x
