"""Gradient release: what follows a scan is done inside it, a layer at a time.

Where all that happens to a stacked output of the backward scan treats the layer axis as
a batch axis, it is moved into the scan's body, and the stack is never made. (Gradient
release, or optimizer in the backward pass: Lv et al. 2023, LOMO, section 3.1; here the
step is not changed by hand.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import Axis, Placements, Shard
from jaxmem.ir.placements.layers import made_of
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_on_host, is_rows_of_layers, is_var, split, xs_of, ys_of
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.memory import format_bytes
from jaxmem.scheduling.release.after_scan import AfterScan, after_scan

Place = tuple[Any, int]  # a variable and the axis along which it is cut


@dataclass(frozen=True)
class Stack:
    var: Any  # the variable
    maker: Any  # the equation that makes a layer of it, in the body; None for an input
    released: bool  # whether it is no more
    why: str = ""  # empty where it is released; else what prevents it
    within: Any = None  # the closed jaxpr whose variable it is


@dataclass(frozen=True)
class Release:
    """What is moved into the body of one scan of a jaxpr."""

    scan: int  # position of the scan among the equations
    # positions of the equations that are done in the body, in order
    moved: tuple[int, ...] = ()
    # for each of them, how it treats the layer axis
    placements: Mapping[int, Placements] = field(default_factory=dict)
    # along which axis a moved variable has the layers
    axis: Mapping[Any, int] = field(default_factory=dict)
    # moved variable -> the buffer that it replaces in place
    updated: Mapping[Any, Place] = field(default_factory=dict)
    # whole arrays from outside that the body reads or updates in slices
    buffers: tuple[Place, ...] = ()
    outputs: tuple[Any, ...] = ()  # moved variables that must still be stacked
    # the scan's stacked outputs, with what became of them
    stacks: tuple[Stack, ...] = ()


def releases(
    closed, aliases: Mapping[Any, Any], given: InputShardings | None = None
) -> Iterator[Release]:
    """What could be moved into each scan; nothing is moved where nothing is gained.

    Args:
      closed: a list of equations.
      aliases: output variable -> the input variable whose memory it will take.
      given: how the inputs are sharded over devices, of one of which memory counts.
    """
    graph = JaxprGraph(closed)
    for i, eqn in enumerate(graph.eqns):
        if primitives.is_scan(eqn) and not _compat.has_side_effects(eqn):
            yield _plan(graph, i, aliases, shardings_in(closed, given))


# -- analysis


def _plan(
    graph: JaxprGraph, scan: int, aliases: Mapping[Any, Any], shardings: Shardings
) -> Release:
    search = after_scan(graph, scan)
    stacked = ys_of(graph.eqns[scan])
    gradients = [v for v in stacked if not _is_of_a_table(graph, v)]
    groups = _groups(graph, search, gradients)
    chosen, stacks = [], []
    for group in groups:
        new = _writes(graph, scan, search, group, aliases)
        pays = _pays(new, group, shardings)
        chosen += [group] if pays else []
        for v in group.stacks:
            why = "" if pays else _why(graph, search, group, new, shardings, v)
            stacks.append(Stack(v, _maker(graph.eqns[scan], v), pays, why))
    if not chosen:
        return Release(scan, stacks=tuple(stacks))
    moved = sorted(i for g in chosen for i in g.moved)
    whole = Group(moved, [v for g in groups for v in g.members], stacked)
    pairs = _pairs(graph, scan, search, whole, aliases)
    return Release(
        scan,
        tuple(moved),
        {i: search.placed[i] for i in moved},
        search.axes,
        pairs,
        tuple(_buffers(graph, search, moved)),
        tuple(v for v in whole.needed(graph) if v not in pairs),
        tuple(stacks),
    )


def _is_of_a_table(graph: JaxprGraph, v) -> bool:
    """Whether a stack is what a table's rows are updated by, and no gradient."""
    users = (graph.eqns[u] for u in graph.users.get(v, ()))
    return any(map(is_rows_of_layers, users))


def _pays(writes: "Writes", group: "Group", shardings: Shardings) -> bool:
    """Whether new arrays take less when the group is moved into the body."""
    # They take nothing where they overwrite what the step may: an array of its own, or
    # a donated one in whose memory an output will be. Any other output needs memory of
    # its own either way, and as long as the update waits the gradient can lie there.
    new = _bytes([*writes.stacked, *writes.copied], shardings)
    return bool(group.moved) and new < _bytes(group.stacks, shardings)


class Writes(NamedTuple):
    """What a group's update writes into new memory."""

    stacked: list[Any]  # what replaces no array
    copied: list[Any]  # what replaces an argument that is not donated


def _writes(graph: JaxprGraph, scan: int, search: AfterScan, group: "Group", aliases):
    pairs = _pairs(graph, scan, search, group, aliases)
    owned = set(aliases.values())
    kept = [v for v, (w, _) in pairs.items() if graph.is_given(w) and w not in owned]
    return Writes([v for v in group.needed(graph) if v not in pairs], kept)


def _bytes(variables: Iterable[Any], shardings: Shardings) -> int:
    return sum(map(shardings.bytes_of, variables))


def _maker(eqn, v):
    """The equation of a scan's body that makes a layer of the stack `v`."""
    body = jaxprs.split(eqn.params["jaxpr"])[0]
    inner = body.outvars[eqn.outvars.index(v)]
    maker = _maker_in(body, inner)
    while maker is not None and len(bodies := jaxprs.bodies(maker)) == 1:
        body = jaxprs.split(bodies[0])[0]  # a call: remat, mostly
        inner = body.outvars[maker.outvars.index(inner)]
        deeper = _maker_in(body, inner)
        if deeper is None:
            break
        maker = deeper
    return maker


def _maker_in(body, v):
    return next((e for e in body.eqns if v in e.outvars), None)


def _why(
    graph: JaxprGraph, search: AfterScan, group: "Group", new: Writes, shardings, v
) -> str:
    found = [search.reasons[w] for w in group.members if w in search.reasons]
    if found:
        return found[0]
    if v in graph.outputs:
        return "the step returns it"
    if _pays(new._replace(copied=[]), group, shardings):
        size = format_bytes(_bytes(new.copied, shardings))
        return f"not donated: its update would write {size} beside what is updated"
    return "releasing it would not save memory"


# -- which of it to move


@dataclass
class Group:
    """Stacked outputs that moved operations tie together, and those operations."""

    moved: list[int]
    members: list[Any]
    stacks: list[Any]

    def needed(self, graph: JaxprGraph) -> list[Any]:
        """Variables with a layer axis that something outside the body reads."""
        moved, members = set(self.moved), set(self.members)
        made = [v for i in self.moved for v in graph.eqns[i].outvars if v in members]
        return [
            v
            for v in [*self.stacks, *made]
            if v in graph.outputs or any(u not in moved for u in graph.users.get(v, ()))
        ]


def _groups(
    graph: JaxprGraph, search: AfterScan, stacked: Sequence[Any]
) -> list[Group]:
    parent = {v: v for v in search.of}

    def root(v):
        while parent[v] is not v:
            v = parent[v]
        return v

    first: dict[int, Any] = {}
    for i in search.placed:
        eqn = graph.eqns[i]
        tied = [v for v in [*eqn.invars, *eqn.outvars] if is_var(v) and v in parent]
        first[i] = tied[0]
        for v in tied[1:]:
            parent[root(v)] = root(tied[0])
    groups: dict[Any, Group] = {}
    for v in search.of:
        groups.setdefault(root(v), Group([], [], [])).members.append(v)
    for v in stacked:
        groups[root(v)].stacks.append(v)
    for i, v in first.items():
        groups[root(v)].moved.append(i)
    return [g for g in groups.values() if g.stacks]


def _pairs(
    graph: JaxprGraph, scan: int, search: AfterScan, group: Group, aliases
) -> dict:
    """Which needed variable takes the memory of which array that the body reads."""
    ancestors = _ancestors(graph, search, group.moved)
    free = _free(graph, scan, search, set(group.moved))
    needed = [v for v in group.needed(graph) if v in ancestors]
    axis = search.axes
    pairs: dict[Any, Place] = {}
    taken: set[Any] = set()

    def take(v, places):
        for place in places:
            fits = place[0] not in taken and _fits(v, search, place)
            if v not in pairs and fits and free(place[0]):
                pairs[v] = place
                taken.add(place[0])

    slices = filter(is_var, xs_of(graph.eqns[scan]))
    read = [(v, 0) for v in slices if made_of(graph, v, 0) is None]
    for v in needed:  # what the compiler will alias anyway comes first
        if v in aliases:
            take(v, [(aliases[v], axis[v])])
    for v in sorted(needed, key=lambda v: len(ancestors[v])):
        take(v, [*ancestors[v], *read])
    return pairs


def _free(graph: JaxprGraph, scan: int, search: AfterScan, moved: set[int]):
    """Whether an array may be overwritten by the scan: nobody reads it afterwards."""
    eqn = graph.eqns[scan]
    consts, init, _ = split(eqn, eqn.invars)
    whole = set(filter(is_var, [*consts, *init]))

    def free(v) -> bool:
        afterwards = (
            u not in moved and any(w in search.later for w in graph.eqns[u].outvars)
            for u in graph.users.get(v, ())
            if u != scan
        )
        return v not in graph.outputs and v not in whole and not any(afterwards)

    return free


def _fits(v, search: AfterScan, place: Place) -> bool:
    w, axis = place
    a, b = w.aval, v.aval
    same = a.shape == b.shape and a.dtype == b.dtype and search.at(v) == Shard(axis)
    here = is_on_host(v) == is_on_host(w)  # a memory is not the other's
    return same and here and a.manual_axis_type == b.manual_axis_type


def _ancestors(
    graph: JaxprGraph, search: AfterScan, moved: Sequence[int]
) -> dict[Any, list]:
    """For each moved variable the arrays from outside that it is made of."""
    found: dict[Any, list[Place]] = {}
    for i in moved:
        eqn, places = graph.eqns[i], {}
        for v, axis in search.placed[i].operands(eqn):
            if not is_var(v):
                continue
            if v in search.of:
                places |= dict.fromkeys(found.get(v, ()))
            elif axis is not None:
                places |= dict.fromkeys(bases(graph, v, axis))
        found |= dict.fromkeys(eqn.outvars, list(places))
    return found


def bases(graph: JaxprGraph, v, axis: int) -> Iterator[Place]:
    """The arrays that a slice of `v` is made of by operations that cost nothing."""
    return ((w, a) for w, a in _sources(graph, v, axis) if a is not None)


def unsliced(graph: JaxprGraph, v, axis: int) -> Iterator[Any]:
    """Whole arrays (scalars, mostly) that go into the slices of `v`."""
    return (w for w, inner in _sources(graph, v, axis) if inner is None)


def _sources(graph: JaxprGraph, v, axis: int) -> Iterator[tuple[Any, Axis]]:
    """What a slice of `v` is made of, and the axis it is cut along; None for none."""
    todo: list[tuple[Any, Axis]] = [(v, axis)]
    seen: set[tuple[Any, Axis]] = set()
    while todo:
        w, inner = todo.pop()
        if (w, inner) in seen:
            continue
        seen.add((w, inner))
        placed = None if inner is None else made_of(graph, w, inner)
        if placed is None:
            yield w, inner
        else:
            pairs = placed.operands(graph.eqns[graph.maker[w]])
            todo += reversed([(u, a) for u, a in pairs if is_var(u)])


def _buffers(graph: JaxprGraph, search: AfterScan, moved) -> list[Place]:
    found: dict[Place, None] = {}
    for i in moved:
        for v, axis in search.placed[i].operands(graph.eqns[i]):
            if is_var(v) and axis is not None and v not in search.of:
                found |= dict.fromkeys(bases(graph, v, axis))
    return list(found)
