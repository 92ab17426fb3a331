"""Zeros into which XLA:GPU scatters gradients, and when it makes them."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var

POOL, GRADIENT = "reduce_window_max", "select_and_scatter_add"


def early_zeros(graph: JaxprGraph) -> dict[int, Any]:
    """Position of a pool, or of its gradient -> the array that both read."""
    # That gradient is scattered into zeros. Where what is pooled is the relu of a
    # convolution and its bias, one kernel makes them together with those that the relu
    # compares with, and they wait for the backward pass. (Read off compiled AlexNet and
    # VGG; nothing of the kind is seen with a batch norm in between, or where the relu
    # is there anyway.)
    found: dict[int, Any] = {}
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name != GRADIENT:
            continue
        pooled = eqn.invars[1]
        readers = {_name(graph, u): u for u in graph.users[pooled]}
        others = (primitives.named(name) for name in readers.keys() - {POOL, GRADIENT})
        alone = all(known.elementwise for known in others)
        if POOL in readers and alone and _is_relu_of_convolution(graph, pooled):
            found |= {readers[POOL]: pooled, i: pooled}
    return found


def _is_relu_of_convolution(graph: JaxprGraph, v) -> bool:
    """Whether `v` is max(convolution + bias, 0)."""
    for name in ("max", "add"):
        eqn = _made_by(graph, v, name)
        ins = [] if eqn is None else eqn.invars
        # the bias is broadcast, or of one row; the zero is a literal
        same = [w for w in ins if is_var(w) and w.aval.shape == v.aval.shape]
        made = [w for w in same if not _made_by(graph, w, "broadcast_in_dim")]
        if len(made) != 1:
            return False
        v = made[0]
    return _made_by(graph, v, "conv_general_dilated") is not None


def _made_by(graph: JaxprGraph, v, name: str):
    i = graph.maker.get(v)
    return None if i is None or _name(graph, i) != name else graph.eqns[i]


def _name(graph: JaxprGraph, i: int) -> str:
    return graph.eqns[i].primitive.name


# One kernel makes the zeros of a shape for all scatters, since they read the same
# number: they exist from the first on. jax 0.12 makes them right before each scatter.
AT_ONCE = jax.__version_info__ < (0, 12)


def folded(graph: JaxprGraph) -> dict[int, int]:
    """Position of a scatter into zeros -> of the sum that scatters instead."""
    # what else is added to a scattered gradient takes the place of the zeros
    found: dict[int, int] = {}
    for i, eqn in enumerate(graph.eqns):
        if not primitives.is_scatter_add(eqn) or not _are_zeros(graph, eqn.invars[0]):
            continue
        (out,) = eqn.outvars
        users = graph.users.get(out, ())
        if len(users) != 1 or out in graph.outputs or users[0] in found.values():
            continue
        total = graph.eqns[users[0]]
        others = [v for v in total.invars if v is not out and is_var(v)]
        if primitives.is_sum(total) and others:
            found[i] = users[0]
    return found


def same_zeros(
    graph: JaxprGraph, positions: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Among equations that are kernels by themselves, those that are one kernel."""
    found: dict[Any, list[int]] = {}
    for i in positions:
        eqn = graph.eqns[i]
        number = _number(eqn)
        if number is not None:
            aval = eqn.outvars[0].aval
            found.setdefault((aval.shape, aval.dtype, number), []).append(i)
    return (tuple(same) for same in found.values() if len(same) > 1)


def _number(eqn) -> bytes | None:
    """The number that an equation broadcasts, if it does nothing else."""
    if not primitives.is_broadcast(eqn):
        return None
    (atom, *rest) = eqn.invars
    if rest or not isinstance(atom, _compat.Literal):
        return None
    return np.asarray(atom.val).tobytes()


def _are_zeros(graph: JaxprGraph, v) -> bool:
    i = graph.maker.get(v) if is_var(v) else None
    number = None if i is None else _number(graph.eqns[i])
    return number is not None and not any(number)
