"""One formula at one place: what it is there, and whether it may be replaced."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ir.primitives import Kind
from jaxmem.rewriting._arguments import Argument, argument_of
from jaxmem.rewriting._flat_graph import FlatGraph, FlatValue, Frame, Node, made_of
from jaxmem.rewriting._fold import folded
from jaxmem.rewriting._match import Matcher, head
from jaxmem.rewriting._partial_match import PartialMatch
from jaxmem.rewriting._pattern import Pattern
from jaxmem.rewriting._views import neutral


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

    @property
    def values(self) -> list[FlatValue]:
        """What the arguments are made of."""
        return [part.value for a in self.arguments for part in a.parts]

    def run(self, env: dict[FlatValue, Any]):
        """The output of the lean function."""
        arrays = [a.build(env) for a in self.arguments]
        out = self.pattern.lean(*arrays, **self.scalars)
        aval = self.root.outs[0].aval
        same = out.dtype == aval.dtype
        return out if same else jax.lax.convert_element_type(out, aval.dtype)


@dataclass(frozen=True)
class Refusal:
    """A formula that was recognised and left."""

    pattern: Pattern
    root: Node
    covered: frozenset[Node]
    reason: str


# A statistic that other nodes read is recomputed for them: it must be so many times
# smaller than the formula's output, and made without such operations.
_SMALL = 8
_EXPENSIVE = (Kind.RANDOM, Kind.CUSTOM_VJP)
# The operations fit, and what they are applied to does not.
ELSEWHERE = "elsewhere"


def find_at(
    pattern, root: Node, graph: FlatGraph, claimed
) -> Match | Refusal | str | None:
    """The pattern with its output at `root`, if it is there and may be replaced."""
    target = root.outs[0]
    batch = _batch(pattern, root)
    if batch is None:
        return None
    if pattern.params and root.name != pattern.head:  # not a view of it
        return None
    refusal = None
    seen: list[dict[str, int]] = []
    rough_matcher = _matcher(pattern, batch, None)
    assert rough_matcher is not None  # without sizes there is always one
    # Ways that differ in what is not checked yet are many: the first few tell the
    # sizes.
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


def _batch(pattern: Pattern, root: Node) -> int | None:
    """How many dimensions `*` stands for; None where the ranks do not fit."""
    count = len(root.outs[0].shape) - pattern.rank
    return count if count == 0 or (count > 0 and pattern.variadic) else None


def is_open(gate: Pattern, root: Node) -> bool:
    """Whether a formula is roughly there, numbers and sizes apart."""
    batch = _batch(gate, root)
    if batch is None or gate.head != head(root.outs[0]):
        return False
    matcher = _matcher(gate, batch, None)
    assert matcher is not None  # without sizes there is always one
    return any(True for _ in matcher.run(root.outs[0]))


def _matcher(pattern: Pattern, batch: int, sizes) -> Matcher | None:
    """None where the plain function cannot have these sizes."""
    traced = pattern.trace(batch, sizes)
    return Matcher(traced, sizes is None, sizes or {}) if traced else None


def _judge(
    pattern, batch, state: PartialMatch, root, graph, claimed
) -> Match | Refusal | None:
    """The match that a state is, or why it may not be replaced; None for no match."""
    given = _given(pattern, batch, state, root)
    interior = state.covered - {root}
    if given is None or not interior.isdisjoint(claimed):
        return None
    bound, scalars = given
    frame, opened = frames_of(state.covered | {root})
    arguments = _arguments(pattern, batch, state, bound, frame)
    if arguments is None:
        return None
    if root.record.rearranges and not all(a.in_order() for a in arguments):
        return None
    used = _used_elsewhere(interior, root, state.covered, graph)
    refuse = functools.partial(Refusal, pattern, root, state.covered | {root})
    if not all(_is_statistic(node, root, state.covered) for node in used):
        return refuse(f"its {used[0].name} is also used elsewhere")
    values = [part.value for a in arguments for part in a.parts]
    opened |= {f for value in values for f in _calls_around(value, frame)}
    if not _whole_rules(opened | set(frame.path()), state.covered | {root}, graph):
        return refuse("inside a function with its own derivative")
    match = Match(
        *(pattern, root, tuple(arguments), scalars),
        *(state.covered, frame, frozenset(opened)),
    )
    out = root.outs[0]
    wrong_type = f"the lean function does not give {out.dtype}{list(out.shape)}"
    return _with_dtype(match) or refuse(wrong_type)


def _given(pattern, batch, state: PartialMatch, root: Node):
    """What the inputs and the scalars of a formula stand for, if that is allowed."""
    traced = pattern.trace(batch, state.sizes)
    assert traced is not None
    inputs = (state.inputs.get(v) for v in traced.inputs)
    bound = [b for b in inputs if b is not None]
    holes = traced.holes.items()
    scalars = {n: state.holes[v].value for n, v in holes if v in state.holes}
    if len(bound) != len(traced.inputs) or len(scalars) != len(traced.holes):
        return None
    scalars |= {name: root.params[name] for name in pattern.params}
    return (bound, scalars) if pattern.when(**scalars) else None


def _arguments(pattern, batch, state: PartialMatch, bound, frame: Frame):
    """The arguments of the lean function, if all can be had in `frame`."""
    arguments = []
    for i, (b, spec) in enumerate(zip(bound, pattern.specs, strict=True)):
        full = tuple(state.sizes.get(n, 1) for n, _ in spec.names(batch))
        argument = argument_of(b, spec, full, batch, frame, i in pattern.uncast)
        if argument is None:
            return None
        arguments.append(argument)
    return arguments


def frames_of(covered) -> tuple[Frame, set[Frame]]:
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


def _calls_around(value: FlatValue, frame: Frame) -> Iterator[Frame]:
    """The calls in `frame` that a value is inside of, and of which it is no result."""
    inner = value.node.frame.path() if value.node is not None else []
    if frame in inner and value not in frame.ins:
        for call in inner[inner.index(frame) + 1 :]:
            if value in call.outs:
                return
            yield call


def is_alive(node: Node, graph: FlatGraph) -> bool:
    return any(v.users or v in graph.top.outs for v in node.outs)


def _whole_rules(frames, covered, graph: FlatGraph) -> bool:
    """Whether functions with their own derivative are replaced as a whole or not."""
    for frame in frames:
        if frame.has_own_rule:
            alive = [n for n in frame.nodes() if is_alive(n, graph)]
            if not all(n in covered or is_free(n) for n in alive):
                return False
    return True


def is_free(node: Node) -> bool:
    """Costs nothing to keep: a cast, a view, a number, or made of numbers alone."""
    small = all(math.prod(o.shape) == 1 for o in node.outs)
    made = all(folded(v) is not None for v in node.ins)
    made |= neutral(node) is not None
    return small or made or node.record.rearranges or node.name == "iota"


def _used_elsewhere(interior, root, covered, graph) -> list[Node]:
    """The nodes inside a formula whose results others read too, if only as a view."""
    inside, outs = covered | {root}, set(graph.top.outs)

    def escapes(node: Node) -> bool:
        todo = [node]
        while todo:
            node = todo.pop()
            readers = {u for out in node.outs for u in out.users}
            if not outs.isdisjoint(node.outs) or not readers <= inside:
                return True
            todo += [u for u in readers if u in interior and is_free(u)]
        return False

    return [node for node in interior if not is_free(node) and escapes(node)]


def _is_statistic(node: Node, root: Node, covered) -> bool:
    """Whether a node is small beside the root, and made in it by cheap operations."""
    size, whole = (sum(math.prod(v.shape) for v in n.outs) for n in (node, root))
    if size * _SMALL > whole:
        return False
    inside = made_of(node, covered)
    expensive = lambda n: n.record.heavy or n.record.kind in _EXPENSIVE or n.bodies
    return not any(map(expensive, inside))


def _with_dtype(match: Match) -> Match | None:
    """The match with an output as precise as the plain one; None for another type."""
    want = match.root.outs[0].aval
    if match.pattern.typed:
        match = replace(match, scalars=match.scalars | {"dtype": want.dtype})
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
        built = tuple((a.full, a.dtype) for a in arguments)
        got = _lean_shape(match.pattern, built, tuple(sorted(match.scalars.items())))
        if got is None or got.shape != want.shape:
            continue
        if got.dtype == want.dtype or _widens(want.dtype, got.dtype):
            return replace(match, arguments=arguments)
    return None


def _widens(narrow, wide) -> bool:
    if not all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide)):
        return False
    return jnp.finfo(narrow).bits < jnp.finfo(wide).bits


@functools.lru_cache(maxsize=4096)
def _lean_shape(pattern: Pattern, arrays, scalars):
    """Shape and dtype of what the lean function gives; None if it refuses."""
    avals = [jax.ShapeDtypeStruct(*a) for a in arrays]
    try:
        return jax.eval_shape(lambda *xs: pattern.lean(*xs, **dict(scalars)), *avals)
    except (NotImplementedError, TypeError, ValueError):
        return None
