"""Which updates of a large leaf can be done in the loop over its rows.

A low-bit optimizer goes through a large leaf in chunks of rows where the compiler would
else make arrays of the leaf's size. The loop ends with an array of updates, for the
parameter is written by the caller. That array is never made if the operations on it, up
to the new parameter, are in the loop too.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, of_variables
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.placements import REPLICATE, Placements, Shard
from jaxmem.ir.placements.layers import made_of, placements_of
from jaxmem.ir.placements.propagate import Propagation, Worklist
from jaxmem.ir.row_chunks import MARK, Chunks, chunks_of
from jaxmem.ir.scans import is_var

ROWS = Shard(0)


@dataclass(frozen=True)
class LeafUpdate:
    """A leaf's update and what is moved into its loop.

    Attributes:
      jaxpr: the step, in which the update is written out; closed.
      moved: positions of the equations that are done in the loop.
      placements: what each of them has of the rows.
      pairs: variable that something else reads -> the buffer in whose place it is.
      made: variables whose rows the loop computes of rows of inputs.
      read: other variables of which the loop reads rows.
      chunks: the rows of an iteration.
      platforms: on which there is a loop.
    """

    jaxpr: Any
    moved: tuple[int, ...]
    placements: Mapping[int, Placements]
    pairs: Mapping[Any, Any]
    made: frozenset[Any]
    read: tuple[Any, ...]
    chunks: Chunks
    platforms: tuple[str, ...]


def leaf_updates(closed, aliases: Mapping[int, int]) -> list[LeafUpdate]:
    """The updates whose loop can take the parameter's update, too.

    All are written out in one and the same jaxpr, and no other.
    """
    targets = [_Target(eqn) for eqn in jaxprs.split(closed)[0].eqns if _is_marked(eqn)]
    targets = [one for one in targets if one.chunks is not None]
    while targets:
        found = _plans(_written_out(closed, targets), aliases, targets)
        if len(found) == len(targets):
            return list(found.values())
        targets = [targets[k] for k in found]  # the others stay as they are
    return []


@dataclass(frozen=True)
class _Target:
    """The choice between platforms that makes a large leaf's update."""

    eqn: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return max((v.aval.shape for v in self.eqn.outvars), key=len)

    @property
    def chunks(self) -> Chunks | None:
        return chunks_of(self.shape)

    @property
    def platforms(self) -> tuple[str, ...]:
        *platforms, _ = self.eqn.params["branches_platforms"]
        return tuple(name for group in platforms for name in group)


def _is_marked(eqn) -> bool:
    by_platform = primitives.is_branch(eqn) and eqn.params.get("branches_platforms")
    return bool(by_platform) and MARK in _compat.name_stack(eqn)


# The scope of what is written out of a target: MARK, and below it which one it is.
_LEAF = "leaf"
_NUMBERED = re.compile(rf"{re.escape(MARK)}/{_LEAF}(\d+)(?:/|$)")


def _written_out(closed, targets: Sequence[_Target]):
    """The jaxpr with the last branch of each target, without a loop, in its place."""
    number = {id(one.eqn): k for k, one in enumerate(targets)}

    def rule(eqn, args: list) -> list[Any] | None:
        if id(eqn) not in number:
            return None
        scope = f"{_LEAF}{number[id(eqn)]}"
        whole = jax.named_scope(scope)(jaxprs.evaluate)
        return _compat.in_context_of(eqn, whole, eqn.params["branches"][-1], args[1:])

    return _compat.without_dead_code(jaxprs.rewritten(closed, rule))


def _plans(
    closed, aliases: Mapping[int, int], targets: Sequence[_Target]
) -> dict[int, LeafUpdate]:
    """What is moved into the loops of the targets, by their numbers."""
    graph, own = JaxprGraph(closed), of_variables(closed, aliases)
    cores = _cores(graph)
    found: dict[int, LeafUpdate] = {}
    moved: set[int] = set()  # equations of loops found so far
    used: set[int] = set()  # and what these loops compute of their own
    for k, target in enumerate(targets):
        search = _Search(graph=graph, rows=target.shape[0], core=cores.get(k, []))
        plan = _plan(closed, own, search, target)
        if plan is None:
            continue
        makers = {graph.maker[v] for v in plan.made} | set(plan.moved)
        if moved.isdisjoint(makers) and used.isdisjoint(plan.moved):
            found[k] = plan
            moved.update(plan.moved)
            used |= makers
    return found


def _cores(graph: JaxprGraph) -> dict[int, list[int]]:
    """The equations of each update that is written out, by the number of its target."""
    cores: dict[int, list[int]] = defaultdict(list)
    for i, eqn in enumerate(graph.eqns):
        number = _NUMBERED.search(_compat.name_stack(eqn))
        if number and eqn.primitive.name not in ("cond", "platform_index"):
            cores[int(number[1])].append(i)
    return cores


def _plan(
    closed, own: Mapping[Any, Any], search: "_Search", target: _Target
) -> LeafUpdate | None:
    chunks = target.chunks
    if chunks is None or not search.understand():
        return None
    moved = search.up_to([v for v in search.of if v in own])
    needed = search.needed(moved)
    pairs = {v: search.buffer_of(v, own, moved) for v in needed}
    if None in pairs.values() or not search.pays(moved, needed):
        return None
    made, read = search.operands(moved)
    read = tuple(v for v in read if v not in set(pairs.values()))
    how = {i: search.placed[i] for i in moved}
    about = frozenset(made), read, chunks, target.platforms
    return LeafUpdate(closed, tuple(moved), how, pairs, *about)


@dataclass
class _Search(Propagation):
    """What works on each row of a leaf alone, from its update on."""

    graph: JaxprGraph = field(kw_only=True)
    rows: int = field(kw_only=True)
    core: list[int] = field(kw_only=True)  # the equations of the update
    seeds: set[Any] = field(init=False)  # what it reads by rows
    later: set[Any] = field(default_factory=set)  # what is made of the update
    remade: dict[Any, bool] = field(default_factory=dict)  # as far as known

    def __post_init__(self) -> None:
        made = {v for i in self.core for v in self.graph.eqns[i].outvars}
        self.seeds = {
            v
            for i in self.core
            for v in filter(is_var, self.graph.eqns[i].invars)
            if v not in made and v.aval.shape[:1] == (self.rows,)
        }
        self.of.update(dict.fromkeys(self.seeds, ROWS))

    def understand(self) -> bool:
        """Finds the rest; False if the update itself does more than treat rows."""
        core, seen, todo = set(self.core), set(self.core), Worklist()
        for i in core:
            todo.push(i, i)
        for i in todo:
            eqn = self.graph.eqns[i]
            ins = list(filter(is_var, eqn.invars))
            by_rows = any(v in self.of for v in ins)
            if by_rows or any(v in self.later for v in ins):
                self.later.update(eqn.outvars)
                users = {u for v in eqn.outvars for u in self.graph.users.get(v, ())}
                for u in users - seen:
                    todo.push(u, u)
                seen |= users
            placements = self._placements_of(eqn) if by_rows else None
            if placements is not None:
                self.place(i, eqn, placements)
            elif by_rows and i in core:
                return False
        return bool(self.core)

    def _placements_of(self, eqn) -> Placements | None:
        if primitives.of(eqn).heavy:  # it stays where it is
            return None
        ins = self.all_at(eqn.invars)
        placements = placements_of(eqn, ins)
        if isinstance(placements, str) or {*placements.outs} != {ROWS}:
            return None
        for v, have, want in zip(eqn.invars, ins, placements.ins, strict=True):
            waits = is_var(v) and have == REPLICATE and v in self.later
            if waits or want not in (have, ROWS):
                return None
        return placements

    def up_to(self, ends: list[Any]) -> list[int]:
        """The update, and what leads from it to these variables."""
        cone = self.graph.cone(ends, self.later)
        return [i for i in self.placed if i in self.core or i in cone]

    def needed(self, moved: list[int]) -> list[Any]:
        """What is made by these equations and read by others, or put out."""
        inside = set(moved)
        return [
            v
            for i in moved
            for v in self.graph.eqns[i].outvars
            if v in self.graph.outputs
            or any(u not in inside for u in self.graph.users.get(v, ()))
        ]

    def buffer_of(self, v, own: Mapping[Any, Any], moved: list[int]) -> Any:
        """A buffer that `v` may overwrite row by row, or None."""
        inside = set(moved)

        def is_free(w) -> bool:
            same = w.aval.shape == v.aval.shape and w.aval.dtype == v.aval.dtype
            users = [u for u in self.graph.users.get(w, ()) if u not in inside]
            after = any(
                x in self.later for u in users for x in self.graph.eqns[u].outvars
            )
            return same and not after and w not in self.graph.outputs

        return own[v] if v in own and is_free(own[v]) else None

    def pays(self, moved: list[int], needed: list[Any]) -> bool:
        """Whether some array of the update's is no longer made."""
        core, kept, inside = set(self.core), set(needed), set(moved)
        return any(
            v not in kept and any(u in inside and u not in core for u in users)
            for i in self.core
            for v in self.graph.eqns[i].outvars
            if (users := self.graph.users.get(v, ()))
        )

    def operands(self, moved: list[int]) -> tuple[set[Any], list[Any]]:
        """What the loop makes of rows of inputs, and what it reads rows of."""
        made: set[Any] = set()
        read: dict[Any, None] = {}
        inside = set(moved)
        for i in moved:
            eqn = self.graph.eqns[i]
            for v, axis in self.placed[i].operands(eqn):
                if (
                    is_var(v)
                    and axis is not None
                    and self.graph.maker.get(v) not in inside
                ):
                    self._source(v, made, read)
        return made, list(read)

    def _source(self, v, made: set[Any], read: dict[Any, None]) -> None:
        todo = [v]
        while todo:
            v = todo.pop()
            if not self._is_remade(v):
                read[v] = None
            elif v not in made:
                made.add(v)
                todo += reversed(self._rows(v) or ())

    def _is_remade(self, v) -> bool:
        """Whether rows of inputs are all that rows of `v` are made of."""
        for w in operands_first(v, self._undecided):
            if w not in self.remade:
                rows = self._rows(w)
                ready = lambda u: self.graph.is_given(u) or self.remade[u]
                self.remade[w] = rows is not None and all(map(ready, rows))
        return self.remade[v]

    def _undecided(self, v) -> list[Any]:
        """What is to be known before it is of `v`."""
        rows = () if v in self.remade else self._rows(v) or ()
        return [w for w in rows if w not in self.remade and not self.graph.is_given(w)]

    def _rows(self, v) -> list[Any] | None:
        """The variables whose rows make those of `v`, if cheap operations do."""
        found = None if v in self.seeds else made_of(self.graph, v, 0)
        if found is None or any(p not in (REPLICATE, ROWS) for p in found.ins):
            return None
        pairs = found.operands(self.graph.eqns[self.graph.maker[v]])
        return [w for w, axis in pairs if axis is not None and is_var(w)]
