"""Gradients that are scattered into zeros, as XLA:GPU compiles them.

To a scattered gradient something else is often added: then XLA scatters into that, and
there are no zeros. Where there are, one kernel makes those of a shape for all scatters,
since they read the same number: they exist from the first of them on. (With jax 0.12
each scatter has its zeros made right before it.)
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmem import _compat
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var

_SCATTERS = ("scatter-add", "scatter_add")
_SUMS = ("add", "add_any")
AT_ONCE = jax.__version_info__ < (0, 12)


def folded(graph: JaxprGraph) -> dict[int, int]:
    """Position of a scatter into zeros -> of the sum that scatters instead."""
    found: dict[int, int] = {}
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name not in _SCATTERS or not _are_zeros(graph, eqn.invars[0]):
            continue
        (out,) = eqn.outvars
        users = graph.users.get(out, ())
        if len(users) != 1 or out in graph.outputs or users[0] in found.values():
            continue
        total = graph.eqns[users[0]]
        others = [v for v in total.invars if v is not out and is_var(v)]
        if total.primitive.name in _SUMS and others:
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
    if eqn.primitive.name != "broadcast_in_dim":
        return None
    (atom, *rest) = eqn.invars
    if rest or not isinstance(atom, _compat.Literal):
        return None
    return np.asarray(atom.val).tobytes()


def _are_zeros(graph: JaxprGraph, v) -> bool:
    i = graph.maker.get(v) if is_var(v) else None
    number = None if i is None else _number(graph.eqns[i])
    return number is not None and not any(number)
