"""Equations of a kind that are put together, where at least one of them is a part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values, is_transposed
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn

Reads = Iterable[tuple[Any, Any]]  # (operand or result, how it is handed over)


class JoinableKind(Protocol):
    """What has to be known of a primitive to put several equations of it together."""

    def key(self, eqn: JaxprEqn) -> Any:
        """What those have in common that can be joined; None for anything else."""
        ...

    def reads(self, eqn: JaxprEqn) -> Reads:
        """(operand, how it is read), as far as one equation can hand it to another."""
        ...

    def makes(self, eqn: JaxprEqn) -> Reads:
        """(result, how it is handed on)."""
        ...

    def is_part(self, eqn: JaxprEqn) -> bool: ...

    def belongs(self, group: "JoinedGroup", i: int) -> bool:
        """Whether an equation should be in a group, if it can."""
        ...

    def pays(self, graph: JaxprGraph, group: Sequence[int]) -> bool:
        """Whether a group is worth joining."""
        ...

    def joined(
        self, values: Values, group: Sequence[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, outputs) of a group's equations, done in one."""
        ...


def put_together(closed: ClosedJaxpr, kind: JoinableKind) -> Any:
    """The jaxpr with its equations of a kind joined to those around them."""
    graph = JaxprGraph(closed)
    groups = [g for g in _groups(graph, kind) if len(g) > 1 and kind.pays(graph, g)]
    if not groups:
        return closed
    of = {i: group for group in groups for i in group}

    def run(args: list) -> list[Any]:
        inputs = graph.inputs(args)
        return _Joined(graph, inputs, kind=kind, groups=of).all_outputs()

    return jaxprs.retrace(closed, run)


@dataclass
class _Joined(Values):
    """Values of which those of a group are made together, when the first is needed."""

    kind: JoinableKind = field(kw_only=True)
    groups: Mapping[int, Sequence[int]] = field(kw_only=True)

    def apply(self, i: int) -> None:
        if i in self.groups:
            for k, outs in self.kind.joined(self, self.groups[i]):
                self.put(k, outs)
        else:
            super().apply(i)


def _groups(graph: JaxprGraph, kind: JoinableKind) -> Iterator[list[int]]:
    """Positions of equations that nothing else lies between."""
    # from the end, since a part is to be done where it is read
    found: list[JoinedGroup] = []
    forward = _forward_keys(graph, kind)
    for i in reversed(range(len(graph.eqns))):
        key = kind.key(graph.eqns[i])
        same = [] if key is None else [g for g in found if g.key == key]
        # first the group that alone reads it: nobody else waits for it then
        same.sort(key=lambda group: not group.alone_reads(i))
        own = next((g for g in same if kind.belongs(g, i) and g.takes(i)), None)
        if own is None and key is not None:
            own = JoinedGroup(graph, kind, key, has_forward=key in forward)
            found.insert(0, own)
        for group in found:
            group.add(i) if group is own else group.pass_by(i)
    for group in found:
        yield group.positions[::-1]


def _forward_keys(graph: JaxprGraph, kind: JoinableKind) -> set[Any]:
    """The keys of what the forward pass does for more than others of that key."""
    keys = [kind.key(eqn) for eqn in graph.eqns]
    found = set()
    for eqn, key in zip(graph.eqns, keys, strict=True):
        if key is None or kind.is_part(eqn) or is_transposed(eqn):
            continue
        users = (k for v in eqn.outvars for k in graph.users.get(v, ()))
        outside = not graph.outputs.isdisjoint(filter(is_var, eqn.outvars))
        if outside or any(keys[k] != key for k in users):
            found.add(key)
    return found


@dataclass
class JoinedGroup:
    """Equations that can be one, from the last to the first.

    Attributes:
      graph: that they are in.
      kind: theirs.
      key: what they have in common.
      positions: theirs.
      has_whole: whether one of them is no part.
      has_forward: whether the forward pass has one like them that it needs itself.
      is_late: whether one of them is of the backward pass.
      read: what they read, and how.
      ahead: variables of which something else makes what they read.
    """

    graph: JaxprGraph
    kind: JoinableKind
    key: Any
    positions: list[int] = field(default_factory=list)
    has_whole: bool = False
    has_forward: bool = False
    is_late: bool = False
    read: dict[Any, set[Any]] = field(default_factory=dict)
    ahead: set[Any] = field(default_factory=set)

    def pass_by(self, i: int) -> None:
        eqn = self.graph.eqns[i]
        if any(v in self.read or v in self.ahead for v in eqn.outvars):
            self.ahead.update(filter(is_var, eqn.invars))

    def alone_reads(self, i: int) -> bool:
        """Whether the group is the only reader of an equation's results."""
        outs = self.graph.eqns[i].outvars
        users = {k for v in outs for k in self.graph.users.get(v, ())}
        return bool(users) and users <= {*self.positions}

    def would_repeat(self, i: int) -> bool:
        """Whether a part is kept from the forward pass, which does the same itself."""
        eqn = self.graph.eqns[i]
        again = is_transposed(eqn) or _compat.RECOMPUTED in _compat.name_stack(eqn)
        return (
            self.is_late and self.has_forward and self.kind.is_part(eqn) and not again
        )

    def takes(self, i: int) -> bool:
        """Whether nothing between needs an equation, and it gives as they read."""
        return all(
            v not in self.ahead and self.read.get(v, set()) <= {how}
            for v, how in self.kind.makes(self.graph.eqns[i])
        )

    def add(self, i: int) -> None:
        eqn = self.graph.eqns[i]
        self.positions.append(i)
        self.has_whole |= not self.kind.is_part(eqn)
        self.is_late |= is_transposed(eqn)
        for v, how in self.kind.reads(eqn):
            if is_var(v):
                self.read.setdefault(v, set()).add(how)


def read_elsewhere(graph: JaxprGraph, group: Sequence[int]) -> list[Any]:
    """The results of a group that others read."""
    made = (v for i in group for v in graph.eqns[i].outvars)
    inside = {*group}
    return [
        v for v in made if v in graph.outputs or not {*graph.users.get(v, ())} <= inside
    ]


def done_once(closed: ClosedJaxpr) -> Any:
    """The jaxpr with no operation done twice on the same values."""
    return _compat.without_dead_code(jaxprs.rewritten(closed, OnlyOnce()))


class OnlyOnce:
    """A rule for `jaxprs.evaluate` that does no operation twice on the same values."""

    def __init__(self) -> None:
        # the values are kept too: an id is only theirs while they are there
        self._done: dict[Any, tuple[list[Any], list[Any]]] = {}

    def __call__(self, eqn: JaxprEqn, args: list) -> list[Any]:
        key = self._key(eqn, args)
        if key is None:
            return _compat.bind(eqn, args)
        if key not in self._done:
            self._done[key] = args, _compat.bind(eqn, args)
        return self._done[key][1]

    def _key(self, eqn: JaxprEqn, args: list) -> Any:
        """None for an operation that may not be left out, or cannot be compared."""
        if _compat.has_side_effects(eqn):
            return None
        given = (_identity(v, x) for v, x in zip(eqn.invars, args, strict=True))
        key = eqn.primitive, tuple(sorted(eqn.params.items())), tuple(given)
        try:
            # a parameter may be an array, which nothing can be compared with
            hash(key)
        except TypeError:
            return None
        return key


def _identity(atom: Any, value: Any) -> Any:
    if is_var(atom):
        return id(value)
    # a literal is another object in each equation
    return atom.aval.dtype, atom.aval.weak_type, np.asarray(value).item()
