"""Which formulas of a graph are replaced: each pattern in turn, the outermost first."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.rewriting._fold import folded
from jaxmem.rewriting._graph import Frame, Graph, Node, Value
from jaxmem.rewriting._match import Bound, Matcher, State, head
from jaxmem.rewriting._pattern import Pattern, Spec
from jaxmem.rewriting._signature import signatures
from jaxmem.rewriting._views import MOVES, neutral

Positions = tuple[int | None, ...]


@dataclass(frozen=True)
class Argument:
    """A value handed to a lean function, and how its dimensions are laid out there."""

    value: Value
    positions: Positions
    shape: tuple[int, ...]
    full: tuple[int, ...]
    dtype: Any

    def build(self, x):
        """The array as the lean function takes it; dimensions that broadcast are 1."""
        x = x if x.dtype == self.dtype else jax.lax.convert_element_type(x, self.dtype)
        placed = [(p, i) for i, p in enumerate(self.positions) if p is not None]
        order = [i for _, i in sorted(placed)]
        if order != sorted(order):
            rest = [i for i in range(len(self.positions)) if i not in order]
            x = jax.lax.transpose(x, (*rest, *order))
        x = x if x.shape == self.shape else jax.lax.reshape(x, self.shape)
        return x if self.shape == self.full else jnp.broadcast_to(x, self.full)


@dataclass(frozen=True, eq=False)
class Match:
    """One formula found, and what takes its place."""

    pattern: Pattern
    root: Node
    arguments: tuple[Argument, ...]
    scalars: dict[str, Any]
    covered: frozenset[Node]
    frame: Frame
    opened: frozenset[Frame]

    def run(self, env: dict[Value, Any]):
        """The output of the lean function."""
        arrays = [a.build(env[a.value]) for a in self.arguments]
        out = self.pattern.lean(*arrays, **self.scalars)
        aval = self.root.outs[0].aval
        same = out.dtype == aval.dtype
        return out if same else jax.lax.convert_element_type(out, aval.dtype)


@dataclass(frozen=True)
class Refusal:
    """A formula that was recognised and left."""

    pattern: Pattern
    root: Node
    why: str


@dataclass
class Plan:
    """What is done to one graph, and to the graphs of the bodies inside it."""

    graph: Graph
    matches: dict[Node, Match] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    skipped: set[Node] = field(default_factory=set)
    opened: set[Frame] = field(default_factory=set)
    changed: set[Frame] = field(default_factory=set)
    inner: "dict[Node, list[Plan]]" = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        return bool(self.changed)


def plan(graph: Graph, patterns: Sequence[Pattern], absent=None) -> Plan:
    """Finds the patterns in a graph and its bodies.

    `absent` collects (pattern, signature) where a pattern cannot be.
    """
    made = Plan(graph)
    absent = set() if absent is None else absent
    looks = signatures(graph)
    claimed: set[Node] = set()
    by_head: dict[str, list[Node]] = defaultdict(list)
    for node in _candidates(graph):
        by_head[head(node.outs[0])].append(node)
    for node in graph.nodes:
        if node.bodies and not _is_lean(node):
            made.inner[node] = [plan(b, patterns, absent) for b in node.bodies]
    for pattern in patterns:
        for root in by_head[pattern.head]:
            look = (pattern, looks[root])
            if root not in claimed and look not in absent:
                if not _try(made, pattern, root, claimed):
                    absent.add(look)
    made.refused = [r for r in made.refused if r.root not in claimed]
    _settle(made)
    return made


def _candidates(graph: Graph) -> list[Node]:
    """Nodes that a formula may end in, the last first: alive, and differentiable."""
    active = {v for v in graph.top.ins if _is_float(v)}
    found = []
    for node in graph.nodes:
        closed_over = (v for v in node.ins if v.known is not None and v.shape)
        if not active.intersection(node.ins) and not any(map(_is_float, closed_over)):
            continue
        outs = [v for v in node.outs if _is_float(v)]
        active.update(outs)
        alive = outs and _is_alive(node, graph)
        single = len(node.outs) == 1 and node.name != "broadcast_in_dim"
        if alive and single and not _is_lean(node):
            found.append(node)
    return found[::-1]


def _is_lean(node: Node) -> bool:
    """Whether the node is part of one of our own ops: each works in a named scope."""
    eqns = (node.eqn, *(f.eqn for f in node.frame.path() if f.eqn is not None))
    return any("jaxmem." in _compat.name_stack(eqn) for eqn in eqns)


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _try(made: Plan, pattern: Pattern, root: Node, claimed: set[Node]) -> bool:
    """Replaces the pattern if it ends in `root`; False if none that looks so is it."""
    found = find_at(pattern, root, made.graph, claimed)
    if isinstance(found, Match):
        made.matches[root] = found
        claimed.update(n for n in found.covered if not _is_free(n))
        claimed.add(root)
    elif isinstance(found, Refusal):
        made.refused.append(found)
    return found is not None


# The operations fit, and what they are applied to does not.
ELSEWHERE = "elsewhere"


def find_at(pattern, root: Node, graph: Graph, claimed) -> Match | Refusal | str | None:
    """The pattern with its output at `root`, if it is there and may be replaced."""
    target = root.outs[0]
    batch = len(target.shape) - pattern.rank
    if batch < 0 or (batch > 0 and not pattern.variadic):
        return None
    if pattern.params and root.name != pattern.head:  # not a view of it
        return None
    refusal = None
    seen: list[dict[str, int]] = []
    rough_matcher = _matcher(pattern, batch, None)
    assert rough_matcher is not None  # without sizes there is always one
    for rough in islice(rough_matcher.run(target), 4):
        if rough.sizes in seen:
            continue
        seen.append(rough.sizes)
        strict = _matcher(pattern, batch, rough.sizes)
        for state in islice(strict.run(target), 4) if strict else ():
            judged = _judge(pattern, batch, state, root, graph, claimed)
            if isinstance(judged, Match):
                return judged
            refusal = refusal or judged
    return refusal or (ELSEWHERE if seen or rough_matcher.conflicts else None)


def _matcher(pattern: Pattern, batch: int, sizes) -> Matcher | None:
    """None where the plain function cannot have these sizes."""
    traced = pattern.trace(batch, sizes)
    return Matcher(traced, sizes is None, sizes or {}) if traced else None


def _judge(
    pattern, batch, state: State, root, graph, claimed
) -> Match | Refusal | None:
    traced = pattern.trace(batch, state.sizes)
    assert traced is not None
    inputs = (state.inputs.get(v) for v in traced.inputs)
    bound = [b for b in inputs if b is not None]
    holes = traced.holes.items()
    scalars = {n: state.holes[v].value for n, v in holes if v in state.holes}
    if len(bound) != len(traced.inputs) or len(scalars) != len(traced.holes):
        return None
    scalars |= {name: root.params[name] for name in pattern.params}
    if not pattern.when(**scalars):
        return None
    interior = state.covered - {root}
    if any(n in claimed for n in interior):
        return None
    frame, opened = _frames(state.covered | {root}, root)
    arguments = []
    for i, (b, spec) in enumerate(zip(bound, pattern.specs, strict=True)):
        full = tuple(state.sizes.get(n, 1) for n, _ in spec.names(batch))
        argument = _argument(b, spec, full, batch, frame, i in pattern.uncast)
        if argument is None:
            return None
        arguments.append(argument)
    if root.name in MOVES and not all(map(_in_order, arguments)):
        return None
    used = _used_elsewhere(interior, root, state.covered, graph)
    if used is not None:
        why = f"its {used.name} is also used elsewhere"
        return Refusal(pattern, root, why)
    opened |= {f for a in arguments for f in _calls_around(a.value, frame)}
    if not _whole_rules(opened | set(frame.path()), state.covered | {root}, graph):
        return Refusal(pattern, root, "inside a function with its own derivative")
    match = Match(
        pattern,
        root,
        tuple(arguments),
        scalars,
        state.covered,
        frame,
        frozenset(opened),
    )
    return _with_dtype(match)


def _frames(covered, root: Node) -> tuple[Frame, set[Frame]]:
    """The innermost frame that holds all, and the frames inside it that are touched."""
    paths = [n.frame.path() for n in covered]
    common = 0
    while all(len(p) > common and p[common] is paths[0][common] for p in paths):
        common += 1
    frame = paths[0][common - 1]
    while frame.has_own_rule or any(f.has_own_rule for f in frame.path()):
        frame = frame.parent
    depth = len(frame.path())
    return frame, {f for p in paths for f in p[depth:]}


def _calls_around(value: Value, frame: Frame) -> Iterator[Frame]:
    """The calls in `frame` that a value is inside of, and of which it is no result."""
    inner = value.node.frame.path() if value.node is not None else []
    if frame in inner and value not in frame.ins:
        for call in inner[inner.index(frame) + 1 :]:
            if value in call.outs:
                return
            yield call


def _is_alive(node: Node, graph: Graph) -> bool:
    return any(v.users or v in graph.top.outs for v in node.outs)


def _whole_rules(frames, covered, graph: Graph) -> bool:
    """Whether functions with their own derivative are replaced as a whole or not."""
    for frame in frames:
        if frame.has_own_rule:
            alive = [n for n in frame.nodes() if _is_alive(n, graph)]
            if not all(n in covered or _is_free(n) for n in alive):
                return False
    return True


def _visible(value: Value, frame: Frame) -> bool:
    if value.node is not None:
        return frame in value.node.frame.path() or value in frame.ins
    return value in frame.ins or value.known is not None


def _argument(b: Bound, spec: Spec, full, batch, frame, uncast) -> Argument | None:
    choices = [c for c in b.choices if _visible(c[0], frame)]
    if not choices:
        return None
    if uncast:
        value, positions = choices[-1]
        if value.dtype == b.choices[0][0].dtype or positions != tuple(range(len(full))):
            return None
    else:
        value, positions = min(choices, key=functools.partial(_cost, full=full))
    shape = [1] * len(full)
    for n, p in zip(value.shape, positions, strict=True):
        if p is not None:
            shape[p] = n
    frees = [free for _, free in spec.names(batch)]
    whole = tuple(
        n if free else f for n, free, f in zip(shape, frees, full, strict=True)
    )
    return Argument(value, positions, tuple(shape), whole, value.dtype)


def _cost(choice: tuple[Value, Positions], full) -> tuple:
    value, positions = choice
    size = getattr(value.dtype, "itemsize", 1) * math.prod(value.shape)
    return size, positions != tuple(range(len(full)))


def _in_order(argument: Argument) -> bool:
    known = [p for p in argument.positions if p is not None]
    return known == sorted(known)


def _is_free(node: Node) -> bool:
    """Costs nothing to keep: a cast, a view, a number, or made of numbers alone."""
    small = all(math.prod(o.shape) == 1 for o in node.outs)
    made = all(folded(v) is not None for v in node.ins)
    made |= neutral(node) is not None
    return small or made or node.name in MOVES or node.name == "iota"


def _used_elsewhere(interior, root, covered, graph) -> Node | None:
    inside = covered | {root}
    for node in interior:
        if _is_free(node):
            continue
        for out in node.outs:
            if out in graph.top.outs or any(u not in inside for u in out.users):
                return node
    return None


def _with_dtype(match: Match) -> Match | Refusal:
    """The match with arguments such that its output is as precise as the plain one."""
    want = match.root.outs[0].aval
    wider = tuple(
        replace(a, dtype=want.dtype) if i == 0 and _widens(a.dtype, want.dtype) else a
        for i, a in enumerate(match.arguments)
    )
    all_wider = tuple(
        replace(a, dtype=want.dtype) if _widens(a.dtype, want.dtype) else a
        for a in match.arguments
    )
    options = [match.arguments, *([] if match.pattern.uncast else [wider, all_wider])]
    for arguments in dict.fromkeys(options):
        got = _shape_of(match, arguments)
        if got is None or got.shape != want.shape:
            continue
        if got.dtype == want.dtype or _widens(want.dtype, got.dtype):
            return replace(match, arguments=arguments)
    why = f"the lean function does not give {want.dtype}{list(want.shape)}"
    return Refusal(match.pattern, match.root, why)


def _widens(narrow, wide) -> bool:
    if not all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide)):
        return False
    return jnp.finfo(narrow).bits < jnp.finfo(wide).bits


def _shape_of(match: Match, arguments):
    """Shape and dtype of what the lean function gives; None if it refuses."""
    built = tuple((a.full, a.dtype) for a in arguments)
    return _lean_shape(match.pattern, built, tuple(sorted(match.scalars.items())))


@functools.lru_cache(maxsize=4096)
def _lean_shape(pattern: Pattern, arrays, scalars):
    avals = [jax.ShapeDtypeStruct(*a) for a in arrays]
    try:
        return jax.eval_shape(lambda *xs: pattern.lean(*xs, **dict(scalars)), *avals)
    except (NotImplementedError, TypeError, ValueError):
        return None


def _settle(made: Plan) -> None:
    """Works out what is skipped, which calls are laid open and which are made anew."""
    for match in made.matches.values():
        made.opened |= match.opened
        made.changed |= set(match.frame.path())
    for node, plans in made.inner.items():
        if any(p.changes for p in plans):
            made.changed |= set(node.frame.path())
    if not made.changes:
        return
    made.changed |= {f for o in made.opened for f in o.path()}
    covered = {n for m in made.matches.values() for n in m.covered}
    needed = _needed(made, covered)
    for node in reversed(made.graph.nodes):
        if node in made.matches or node not in covered:
            continue
        if needed.intersection(node.outs):
            needed.update(node.ins)
        else:
            made.skipped.add(node)


def _needed(made: Plan, covered: set[Node]) -> set[Value]:
    """Values that something other than a covered node reads."""
    needed = {a.value for m in made.matches.values() for a in m.arguments}

    def visit(frame: Frame) -> None:
        needed.update(frame.outs if frame not in made.opened else ())
        for item in frame.items:
            if isinstance(item, Node):
                needed.update(() if item in covered else item.ins)
            elif item not in made.changed:
                needed.update(item.ins)
            else:
                needed.update(item.ins if item not in made.opened else ())
                visit(item)

    visit(made.graph.top)
    return needed
