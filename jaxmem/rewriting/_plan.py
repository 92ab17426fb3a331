"""Which formulas of a graph are replaced: pattern after pattern, outermost first."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.rewriting._dequantized import dequantized_products
from jaxmem.rewriting._find import Match, Refusal, find_at, is_alive, is_free, is_open
from jaxmem.rewriting._flat_graph import (
    FlatGraph,
    FlatValue,
    Frame,
    Node,
    inputs_of,
    made_of,
)
from jaxmem.rewriting._fold import folded
from jaxmem.rewriting._match import DEPTH, head
from jaxmem.rewriting._pattern import Pattern
from jaxmem.rewriting._views import below


@dataclass
class RewritePlan:
    """What is done to one graph, and to the graphs of the bodies inside it."""

    graph: FlatGraph
    matches: dict[Node, Match] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    skipped: set[Node] = field(default_factory=set)
    # Inside a formula, but read by others too; each with what it is made of there: they
    # keep nothing but the formula's arguments.
    recomputed: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    opened: set[Frame] = field(default_factory=set)
    changed: set[Frame] = field(default_factory=set)
    inner: "dict[Node, list[RewritePlan]]" = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        return bool(self.changed)


def plan_rewrites(
    graph: FlatGraph, patterns: Sequence[Pattern], absent=None
) -> RewritePlan:
    """Finds the patterns in a graph and its bodies."""
    rewrites = RewritePlan(graph)
    # (pattern, signature) where a pattern cannot be
    absent = set() if absent is None else absent
    for node in graph.nodes:
        if node.bodies and not _is_lean(node):
            rewrites.inner[node] = [
                plan_rewrites(b, patterns, absent) for b in node.bodies
            ]
    claimed: set[Node] = set()
    if patterns:
        for found in dequantized_products(graph):
            if not _is_lean(found.root):
                _claim(rewrites, found, claimed)
    _find_all(rewrites, patterns, claimed, absent)
    # what is a part of a formula that was replaced, is not left
    rewrites.refused = [
        r for r in rewrites.refused if not claimed.intersection(r.covered)
    ]
    settle(rewrites)
    return rewrites


def _find_all(
    rewrites: RewritePlan, patterns: Sequence[Pattern], claimed: set[Node], absent: set
) -> None:
    """Tries each pattern at each node that its formula may end in."""
    looks = signatures(rewrites.graph)
    by_head: dict[str, list[Node]] = defaultdict(list)
    for node in _candidates(rewrites.graph):
        by_head[head(node.outs[0])].append(node)
    gates: dict = {}
    tries = ((p, root) for p in patterns for root in by_head[p.head])
    for pattern, root in tries:
        look = (pattern, looks[root])
        if root in claimed or look in absent:
            continue
        possible = _may_be(pattern.gate, root, looks[root], gates)
        if not (possible and _try(rewrites, pattern, root, claimed)):
            absent.add(look)


def _candidates(graph: FlatGraph) -> list[Node]:
    """Nodes that a formula may end in, the last first: alive, and differentiable."""
    active = {v for v in graph.top.ins if _is_float(v)}
    found, far = [], _far_views(graph)
    for node in graph.nodes:
        closed_over = (v for v in node.ins if v.known is not None and v.shape)
        if not active.intersection(node.ins) and not any(map(_is_float, closed_over)):
            continue
        outs = [v for v in node.outs if _is_float(v)]
        active.update(outs)
        alive = outs and is_alive(node, graph)
        single = len(node.outs) == 1 and node.name != "broadcast_in_dim"
        if alive and single and node not in far and not _is_lean(node):
            found.append(node)
    return found[::-1]


def _far_views(graph: FlatGraph) -> set[Node]:
    """Views behind more views than any formula ends in."""
    behind: dict[FlatValue, int] = {}
    for node in graph.nodes:
        operand = below(node.outs[0]) if len(node.outs) == 1 else None
        if operand is not None:
            behind[node.outs[0]] = behind.get(operand, 0) + 1
    return {v.node for v, n in behind.items() if v.node is not None and n > DEPTH}


def _is_lean(node: Node) -> bool:
    # Whether the node is part of one of our own ops: each works in a named scope.
    eqns = (node.eqn, *(f.eqn for f in node.frame.path() if f.eqn is not None))
    return any("jaxmem." in _compat.name_stack(eqn) for eqn in eqns)


def _is_float(value: FlatValue) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _may_be(gate: Pattern | None, root: Node, look: int, known: dict) -> bool:
    """Whether the gate of a pattern is open at a node, or at one that looks so."""
    if gate is None:
        return True
    if (gate, look) not in known:
        known[gate, look] = is_open(gate, root)
    return known[gate, look]


def _try(
    rewrites: RewritePlan, pattern: Pattern, root: Node, claimed: set[Node]
) -> bool:
    """Replaces the pattern if it ends in `root`; False if none that looks so is it."""
    found = find_at(pattern, root, rewrites.graph, claimed)
    if isinstance(found, Match):
        _claim(rewrites, found, claimed)
    elif isinstance(found, Refusal):
        rewrites.refused.append(found)
    return found is not None


def _claim(rewrites: RewritePlan, found: Match, claimed: set[Node]) -> None:
    rewrites.matches[found.root] = found
    claimed.update(n for n in found.covered if not is_free(n))
    claimed.add(found.root)


def settle(rewrites: RewritePlan) -> None:
    """Works out what is skipped, which calls are inlined and which are rebuilt."""
    for match in rewrites.matches.values():
        rewrites.opened |= match.opened
        rewrites.changed |= set(match.frame.path())
    for node, plans in rewrites.inner.items():
        if any(p.changes for p in plans):
            rewrites.changed |= set(node.frame.path())
    if not rewrites.changes:
        return
    rewrites.changed |= {f for o in rewrites.opened for f in o.path()}
    _settle_covered(rewrites)


def _settle_covered(rewrites: RewritePlan) -> None:
    """Which of the nodes inside formulas go, and which are recomputed for others."""
    covered = {n: m for m in rewrites.matches.values() for n in m.covered}
    needed = _needed(rewrites, set(covered))
    for node in reversed(rewrites.graph.nodes):
        if node in rewrites.matches or node not in covered:
            continue
        if not needed.intersection(node.outs):
            rewrites.skipped.add(node)
        elif is_free(node):
            needed.update(node.ins)
        else:
            inside = made_of(node, _with_views(rewrites.graph, covered[node]))
            rewrites.recomputed[node] = tuple(inside)
            needed.update(inputs_of(inside))


def _with_views(graph: FlatGraph, match: Match) -> frozenset[Node]:
    """What a match covers, and the casts and views before it: no copy is kept."""
    frames = {match.frame, *match.opened}
    views = (n for n in graph.nodes if n.record.rearranges and n.frame in frames)
    return match.covered.union(views)


def _needed(rewrites: RewritePlan, covered: set[Node]) -> set[FlatValue]:
    """Values that something other than a covered node reads."""
    needed = {v for match in rewrites.matches.values() for v in match.values}

    def visit(frame: Frame) -> None:
        needed.update(frame.outs if frame not in rewrites.opened else ())
        for item in frame.items:
            if isinstance(item, Node):
                needed.update(() if item in covered else item.ins)
            elif item not in rewrites.changed:
                needed.update(item.ins)
            else:
                needed.update(item.ins if item not in rewrites.opened else ())
                visit(item)

    visit(rewrites.graph.top)
    return needed


# Larger integers are what random keys are folded with: another one in each layer.
_SEED = 2.0**20
_TELLING = (
    *("axes", "broadcast_dimensions", "dimension", "dimension_numbers", "new_sizes"),
    *("permutation", "precision", "shape", "y"),
)


def signatures(graph: FlatGraph) -> dict[Node, int]:
    """The signature of every node, from the `DEPTH` operations above it."""
    nodes = graph.nodes
    number = {node: i for i, node in enumerate(nodes)}
    leaves: list[int] = []
    ins = [[_source(v, number, leaves) for v in node.ins] for node in nodes]
    own = [_own(node) for node in nodes]
    now = own
    for _ in range(DEPTH):
        now = [
            hash((mine, *[now[i] if i >= 0 else leaves[~i] for i in above]))
            for mine, above in zip(own, ins, strict=True)
        ]
    return dict(zip(nodes, now, strict=True))


def _source(value: FlatValue, number: dict[Node, int], leaves: list[int]) -> int:
    """The index of the node that makes a value, or ~index among the leaves."""
    if value.node is not None and folded(value) is None:
        return number[value.node]
    number_there = folded(value)
    if number_there is not None and abs(number_there.value) > _SEED:
        number_there = None
    leaves.append(hash((value.shape, str(value.dtype), number_there)))
    return ~(len(leaves) - 1)


def _own(node: Node) -> int:
    params = tuple(str(node.params[k]) for k in _TELLING if k in node.params)
    shapes = tuple((v.shape, str(v.dtype)) for v in node.outs)
    return hash((node.name, params, shapes, tuple(map(folded, node.outs))))
