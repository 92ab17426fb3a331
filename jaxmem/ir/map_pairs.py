"""A `shard_map` that was differentiated outside of it, as one list of equations.

JAX makes two of it: one of the forward pass, and a transposed one that reads what the
first leaves for it. As one body they are to a pass what they would be without the map.
What then is of the backward pass, or needs what comes from outside between the two, is
the second `shard_map` again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values, is_transposed, late_of
from jaxmem.ir.map_parts import MAPS, as_rank, lifted, like_map
from jaxmem.ir.scans import is_var, size_of
from jaxmem.ir.types import JaxprEqn

Shards = tuple[Any, PartitionSpec]  # a variable of a body, and how it is handed over


@dataclass(frozen=True, eq=False)
class MapPair:
    """Two `shard_map`s of one list of equations.

    Attributes:
      forward: that of the forward pass.
      backward: that which reads its results.
      handed: position of an input of the second -> of the output of the first.
      outs: positions of the outputs of the first that others read.
    """

    forward: Any
    backward: Any
    handed: dict[int, int]
    outs: tuple[int, ...]

    @property
    def given(self) -> list[int]:
        """Positions of the inputs of the second that come from elsewhere."""
        return [k for k in range(len(self.backward.invars)) if k not in self.handed]

    @cached_property
    def joined(self) -> Any:
        """A `shard_map` that does both, of the inputs of both."""
        first, second = self.forward, self.backward
        count = len(first.invars)

        def body(*shards: Any) -> tuple[Any, ...]:
            inner = jaxprs.bodies(first)[0]
            # each under its own scopes, by which the passes tell the backward pass
            made = _compat.in_context_of(first, jaxprs.evaluate, inner, shards[:count])
            rest = iter(shards[count:])
            inner = jaxprs.bodies(second)[0]
            ins = [
                made[self.handed[k]] if k in self.handed else next(rest)
                for k in range(len(second.invars))
            ]
            ins = [
                _compat.typed_as(x, v.aval)
                for x, v in zip(ins, inner.invars, strict=True)
            ]
            outs = _compat.in_context_of(second, jaxprs.evaluate, inner, ins)
            return (*(made[k] for k in self.outs), *outs)

        atoms = [*first.invars, *(second.invars[k] for k in self.given)]
        one = like_map(first, body, self.in_specs, self.out_specs)
        return jax.make_jaxpr(one)(*(v.aval for v in atoms)).eqns[0]

    @property
    def in_specs(self) -> list[PartitionSpec]:
        """How the inputs of both are sharded."""
        own = self.backward.params["in_specs"]
        return [*self.forward.params["in_specs"], *(own[k] for k in self.given)]

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """How the outputs of both are sharded."""
        own = self.forward.params["out_specs"]
        return [*(own[k] for k in self.outs), *self.backward.params["out_specs"]]

    @property
    def bytes(self) -> int:
        """Bytes that the first leaves for the second, on one device."""
        outs = jaxprs.bodies(self.forward)[0].outvars
        left = {outs[k] for k in self.handed.values() if k not in self.outs}
        return sum(map(size_of, filter(is_var, left)))


def map_pairs(graph: JaxprGraph) -> Iterator[MapPair]:
    """The pairs of a list of equations; none is in two of them."""
    taken: set[int] = set()
    for j, eqn in enumerate(graph.eqns):
        if not is_transposed(eqn) or MAPS.key(eqn) is None:
            continue
        read = (v for v in eqn.invars if is_var(v) and v in graph.maker)
        for i in dict.fromkeys(graph.maker[v] for v in read):
            pair = None if i in taken else _pair(graph, i, j)
            if pair is not None:
                # another backward map that reads it stays as it is
                taken.add(i)
                yield pair
                break


def _pair(graph: JaxprGraph, i: int, j: int) -> MapPair | None:
    first, second = graph.eqns[i], graph.eqns[j]
    if is_transposed(first) or MAPS.key(first) != MAPS.key(second):
        return None
    made = {pair: k for k, pair in enumerate(MAPS.makes(first))}
    reads = enumerate(MAPS.reads(second))
    handed = {k: made[pair] for k, pair in reads if is_var(pair[0]) and pair in made}
    if not handed:
        return None
    own = {first.outvars[k] for k in handed.values()}
    between = {
        k: set(graph.users.get(v, ())) - {j} or v in graph.outputs
        for k, v in enumerate(first.outvars)
    }
    outs = [k for k, v in enumerate(first.outvars) if between[k] or v not in own]
    return MapPair(first, second, handed, tuple(outs))


@dataclass(frozen=True)
class MapHalves:
    """A body of `MapPair.joined`, or one that does the same, as the two maps again."""

    pair: MapPair
    graph: JaxprGraph

    @cached_property
    def late(self) -> set[int]:
        """The equations of the second map."""
        # what comes from outside between the two maps is there for the second alone
        own = self.graph.arguments[len(self.pair.forward.invars) :]
        late, made = late_of(self.graph), set(own)
        for i, eqn in enumerate(self.graph.eqns):
            again = _compat.RECOMPUTED in _compat.name_stack(eqn)
            if i in late or again or any(v in made for v in _variables(eqn.invars)):
                late.add(i)
                made.update(eqn.outvars)
        # but what the first one returns is made in it, whatever its scopes say
        return late - self.graph.cone(_variables(self._outs(first=True)))

    def _outs(self, first: bool) -> list[Any]:
        n = len(self.pair.outs)
        return list(self.graph.outvars[:n] if first else self.graph.outvars[n:])

    @cached_property
    def left(self) -> list[Any]:
        """What the first map makes and the second reads."""
        read = [v for i in sorted(self.late) for v in self.graph.eqns[i].invars]
        read = dict.fromkeys(_variables([*read, *self._outs(first=False)]))
        maker = self.graph.maker
        return [v for v in read if v in maker and maker[v] not in self.late]

    @property
    def bytes(self) -> int:
        """Bytes of that, on one device."""
        return sum(map(size_of, self.left))

    @property
    def are_apart(self) -> bool:
        """Whether the first map can be done before what comes from outside is there."""
        # a loop may do a part of the forward pass together with the backward one
        arguments = self.graph.arguments
        made = [*_variables(self._outs(first=True)), *self.left]
        own = arguments[len(self.pair.forward.invars) :]
        return self._read(set(arguments), made).isdisjoint(own)

    @cached_property
    def _lifted(self) -> list[PartitionSpec]:
        # as JAX hands a residual on
        return [lifted(self.pair.forward, v) for v in self.left]

    def first(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs of the first map that others read, and what it leaves."""
        count = len(self.pair.forward.invars)
        given = list(
            zip(self.graph.arguments[:count], self.pair.in_specs, strict=False)
        )
        outs, specs = self._outs(first=True), self.pair.out_specs[: len(self.pair.outs)]
        wanted = [*zip(outs, specs, strict=True)]
        wanted += zip(self.left, self._lifted, strict=True)
        made = self._run(self.pair.forward, given, args, wanted)
        return made[: len(outs)], made[len(outs) :]

    def second(self, args: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """The outputs of the second map, of the inputs of both."""
        given = [
            *zip(self.graph.arguments, self.pair.in_specs, strict=True),
            *zip(self.left, self._lifted, strict=True),
        ]
        outs, specs = (
            self._outs(first=False),
            self.pair.out_specs[len(self.pair.outs) :],
        )
        wanted = list(zip(outs, specs, strict=True))
        return self._run(self.pair.backward, given, [*args, *left], wanted)

    def _run(
        self,
        eqn: JaxprEqn,
        given: list[Shards],
        arrays: Sequence[Any],
        wanted: list[Shards],
    ) -> list[Any]:
        """`wanted` in a `shard_map`, of those of the arrays given that it reads."""
        read = self._read({v for v, _ in given}, [v for v, _ in wanted])
        pairs = zip(given, arrays, strict=True)
        taken = [(v, spec, x) for (v, spec), x in pairs if v in read]

        def body(*shards: Any) -> tuple[Any, ...]:
            known = zip(taken, shards, strict=True)
            env = {v: as_rank(x, v.aval.ndim) for (v, _, _), x in known}
            values = Values(self.graph, env)
            outs = [values.read(v) for v, _ in wanted]
            ranks = [max(v.aval.ndim, len(spec)) for v, spec in wanted]
            return tuple(map(as_rank, outs, ranks))

        specs = [spec for _, spec, _ in taken], [spec for _, spec in wanted]
        one: Callable = like_map(eqn, body, *specs)
        return list(_compat.in_context_of(eqn, one, *(x for _, _, x in taken)))

    def _read(self, known: set[Any], wanted: Sequence[Any]) -> set[Any]:
        """Which of the known variables are needed to make what is wanted."""
        todo, seen = list(_variables(wanted)), set()
        while todo:
            v = todo.pop()
            if v not in seen:
                seen.add(v)
                if v not in known:
                    eqn = self.graph.eqns[self.graph.maker[v]]
                    todo += _variables(eqn.invars)
        return seen & known


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if is_var(v)]


@dataclass(eq=False)
class DoneInHalves:
    """What the two maps of a pair give in one trace, the first before the second."""

    halves: MapHalves
    given: list[Any] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)

    def __call__(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        pair = self.halves.pair
        if eqn is pair.forward:
            self.given = list(args)
            outs, self.left = self.halves.first(args)
            made = dict(zip(pair.outs, outs, strict=True))
            # what only the second map read has no value
            return [made.get(k) for k in range(len(eqn.outvars))]
        rest = [args[k] for k in pair.given]
        return self.halves.second([*self.given, *rest], self.left)
