"""Equations of a kind that are put together, where at least one of them is a part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.jaxprs import is_var

Reads = Iterable[tuple[Any, Any]]  # (operand or result, how it is handed over)


class Kind(Protocol):
    """What has to be known of a primitive to put several equations of it together."""

    def key(self, eqn) -> Any:
        """What those have in common that can be joined; None for anything else."""
        ...

    def reads(self, eqn) -> Reads:
        """(operand, how it is read), as far as one equation can hand it to another."""
        ...

    def makes(self, eqn) -> Reads:
        """(result, how it is handed on)."""
        ...

    def is_part(self, eqn) -> bool: ...

    def follows(self, eqn, made: Mapping[Any, Any]) -> bool:
        """Whether one that is no part belongs to a group that has made this."""
        ...

    def pays(self, graph: JaxprGraph, group: Sequence[int]) -> bool:
        """Whether a group is worth joining."""
        ...

    def joined(
        self, values: Values, group: Sequence[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, outputs) of a group's equations, done in one."""
        ...


def put_together(closed, kind: Kind) -> Any:
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

    kind: Kind = field(kw_only=True)
    groups: Mapping[int, Sequence[int]] = field(kw_only=True)

    def apply(self, i: int) -> None:
        if i in self.groups:
            for k, outs in self.kind.joined(self, self.groups[i]):
                self.put(k, outs)
        else:
            super().apply(i)


def _groups(graph: JaxprGraph, kind: Kind) -> Iterator[list[int]]:
    """Positions of equations that nothing else lies between."""
    found: dict[Any, _Group] = {}
    for i, eqn in enumerate(graph.eqns):
        key = kind.key(eqn)
        for other, group in found.items():
            if other != key:
                group.pass_by(eqn)
        if key is None:
            continue
        if key in found and not found[key].takes(eqn):
            yield found.pop(key).positions
        found.setdefault(key, _Group(kind)).add(i, eqn)
    for group in found.values():
        yield group.positions


@dataclass
class _Group:
    """Equations that can be one.

    Attributes:
      kind: theirs.
      positions: theirs, in order.
      made: what they give, and how it is handed on.
      behind: variables that something else makes of it.
    """

    kind: Kind
    positions: list[int] = field(default_factory=list)
    made: dict[Any, Any] = field(default_factory=dict)
    behind: set[Any] = field(default_factory=set)

    def pass_by(self, eqn) -> None:
        if any(v in self.made or v in self.behind for v in filter(is_var, eqn.invars)):
            self.behind.update(eqn.outvars)

    def takes(self, eqn) -> bool:
        """Whether another one needs nothing but what the group has or is given."""
        belongs = self.kind.is_part(eqn) or self.kind.follows(eqn, self.made)
        return belongs and all(
            v not in self.behind and self.made.get(v, how) == how
            for v, how in self.kind.reads(eqn)
            if is_var(v)
        )

    def add(self, i: int, eqn) -> None:
        self.positions.append(i)
        self.made.update(self.kind.makes(eqn))


def read_elsewhere(graph: JaxprGraph, group: Sequence[int]) -> list[Any]:
    """The results of a group that others read."""
    made = (v for i in group for v in graph.eqns[i].outvars)
    inside = {*group}
    return [
        v for v in made if v in graph.outputs or not {*graph.users.get(v, ())} <= inside
    ]


class OnlyOnce:
    """A rule for `jaxprs.evaluate` that does no operation twice on the same values."""

    def __init__(self):
        # the values are kept too: an id is only theirs while they are there
        self._done: dict[Any, tuple[list[Any], list[Any]]] = {}

    def __call__(self, eqn, args: list) -> list[Any]:
        key = self._key(eqn, args)
        if key is None:
            return _compat.bind(eqn, args)
        if key not in self._done:
            self._done[key] = args, _compat.bind(eqn, args)
        return self._done[key][1]

    def _key(self, eqn, args: list) -> Any:
        """None for an operation that may not be left out, or cannot be compared."""
        if _compat.has_side_effects(eqn):
            return None
        given = (_identity(v, x) for v, x in zip(eqn.invars, args, strict=True))
        key = eqn.primitive, tuple(sorted(eqn.params.items())), tuple(given)
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _identity(atom, value) -> Any:
    if is_var(atom):
        return id(value)
    return atom.aval.dtype, atom.aval.weak_type, np.asarray(value).item()
