"""Residuals of a forward scan that the backward scan can make itself.

What the backward pass of a `scan` reads of the forward one is stacked, a layer on a
layer. Some of it need not be: a cast or a transpose of a parameter's slice, a reshape
of another residual, a layer's output that is the next layer's input, which the
backward scan, coming from the end, has read one turn before. All of these are made
where they are read, by casts and moves alone, so the values are the same to the bit.

Residuals that come from one value by such operations are grouped under it, their root;
one of them is kept (or the root, or something between), whatever is the smallest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Graph, Values
from jaxmem.scheduling._layer_axis import CHEAP
from jaxmem.scheduling._scans import is_var, scan_like, size_of, split, xs_of


@dataclass(frozen=True)
class Chain:
    """How a residual is made in the body of the forward scan: `eqns` applied to `root`.

    Attributes:
      slot: position among the xs of the backward scan.
      root: a variable of the forward body.
      eqns: cheap operations on one array, in order.
      carry: number of the carry that the root is, as input or output of the layer.
      late: whether the root is the carry's output.
    """

    slot: int
    root: Any
    eqns: tuple[Any, ...]
    carry: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Source:
    """What a group of residuals is made of.

    Attributes:
      chains: the residuals that are made again.
      steps: how many of their operations are done before it is kept, by each alike.
      kept: the variable of the forward body that is stacked, or None where the root is
        an input of the forward scan and nothing is.
      outer: that input.
    """

    chains: tuple[Chain, ...]
    steps: int = 0
    kept: Any = None
    outer: Any = None

    @property
    def carried(self) -> bool:
        return any(c.late for c in self.chains)


@dataclass(frozen=True)
class Remake:
    """One pair of scans, and what the second makes itself."""

    forward: int
    backward: int
    sources: tuple[Source, ...]
    stacks: tuple[Any, ...]  # the xs of the backward scan

    @property
    def slots(self) -> set[int]:
        return {c.slot for s in self.sources for c in s.chains}

    def described(self) -> Iterator[tuple[Any, Any, str]]:
        """(variable, its equation, what it is made of) of each residual saved."""
        for source in self.sources:
            saved = [c for c in source.chains if _end(c) is not source.kept]
            if source.kept is not None and len(saved) == len(source.chains):
                saved = saved[1:]  # what is kept in its place is no larger
            for chain in saved:
                maker = chain.eqns[-1] if chain.eqns else None
                yield self.stacks[chain.slot], maker, _in_words(source, chain)


def remakes(closed) -> Iterator[Remake]:
    """The pairs of scans in which something can be saved."""
    graph = Graph(closed)
    for b, eqn in enumerate(graph.eqns):
        if eqn.primitive.name != "scan" or _compat.has_side_effects(eqn):
            continue
        made = (v for v in xs_of(eqn) if is_var(v) and v in graph.maker)
        for f in sorted({graph.maker[v] for v in made}):
            if _is_forward_of(graph.eqns[f], eqn):
                sources = tuple(_sources(graph, f, b))
                if sources:
                    yield Remake(f, b, sources, tuple(xs_of(eqn)))


# -- analysis


def _is_forward_of(first, eqn) -> bool:
    same = first.primitive.name == "scan" and not _compat.has_side_effects(first)
    return (
        same
        and first.params["length"] == eqn.params["length"]
        and first.params["reverse"] != eqn.params["reverse"]
    )


def _sources(graph: Graph, f: int, b: int) -> Iterator[Source]:
    forward, backward = graph.eqns[f], graph.eqns[b]
    body = _jaxpr.split(forward.params["jaxpr"])[0]
    groups: dict[Any, list[Chain]] = {}
    for slot, v in enumerate(xs_of(backward)):
        if v in forward.outvars and not _read_elsewhere(graph, v, b):
            chain = _chain(forward, body, slot, body.outvars[forward.outvars.index(v)])
            if chain is not None:
                key = chain.root if chain.carry is None else chain.carry
                groups.setdefault(key, []).append(chain)
    for chains in groups.values():
        source = _from_input(forward, body, chains) or _from_kept(body, chains)
        if source is not None:
            yield source


def _read_elsewhere(graph: Graph, v, b: int) -> bool:
    return v in graph.outputs or any(u != b for u in graph.users.get(v, ()))


def _chain(forward, body, slot: int, residual) -> Chain | None:
    if not is_var(residual):
        return None
    n_consts, n_carry = _compat.scan_counts(forward)
    maker = {v: e for e in body.eqns for v in e.outvars}
    late = {v: k for k, v in enumerate(body.outvars[:n_carry]) if is_var(v)}
    early = {v: k for k, v in enumerate(body.invars[n_consts : n_consts + n_carry])}
    v, eqns = residual, []
    while v not in late and v in maker and _is_cheap(maker[v]):
        eqns.insert(0, maker[v])
        v = maker[v].invars[0]
    if v in late and v not in early:
        return Chain(slot, v, tuple(eqns), late[v], True)
    return Chain(slot, v, tuple(eqns), early.get(v))


def _is_cheap(eqn) -> bool:
    one = len(eqn.invars) == 1 and is_var(eqn.invars[0])
    return one and eqn.primitive.name in CHEAP


def _from_input(forward, body, chains: Sequence[Chain]) -> Source | None:
    """Made of an array that the forward scan was given: nothing is kept."""
    n_consts, n_carry = _compat.scan_counts(forward)
    root = chains[0].root
    if root not in body.invars or chains[0].carry is not None:
        return None
    position = body.invars.index(root)
    outer = forward.invars[position]
    if not is_var(outer) or n_consts <= position < n_consts + n_carry:
        return None
    return Source(tuple(chains), outer=(outer, position >= n_consts))


def _from_kept(body, chains: Sequence[Chain]) -> Source | None:
    """The smallest value that all of them pass through, if keeping it alone pays."""
    early = [c for c in chains if not c.late]
    if not early:  # the layer's output is kept, its input is not: nothing to share
        return None
    shared = _common_prefix([c.eqns for c in chains])
    path = [early[0].root, *(e.outvars[0] for e in early[0].eqns[:shared])]
    sizes = [size_of(v) for v in path]
    steps = sizes.index(min(sizes))
    ends = {v: None for c in early for v in [_end(c)]}
    late = sum(size_of(_end(c)) for c in chains if c.late)
    if sizes[steps] >= sum(map(size_of, ends)) + late:
        return None
    return Source(tuple(chains), steps, path[steps])


def _in_words(source: Source, chain: Chain) -> str:
    if chain.late:
        return "the next layer's input, which the backward scan has just read"
    if source.outer is not None:
        return "an input of the forward scan"
    return "another residual"


def _end(chain: Chain):
    return chain.eqns[-1].outvars[0] if chain.eqns else chain.root


def _common_prefix(chains: Sequence[Sequence[Any]]) -> int:
    same = 0
    for eqns in zip(*chains, strict=False):
        if not all(_alike(eqns[0], e) for e in eqns):
            break
        same += 1
    return same


def _alike(a, b) -> bool:
    return a.primitive is b.primitive and a.params == b.params


# -- the new jaxpr


def remake(closed, plan: Remake):
    """The jaxpr with these residuals made in the backward scan."""
    graph = Graph(closed)
    forward, backward = graph.eqns[plan.forward], graph.eqns[plan.backward]

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(plan.forward)
        ins = [values.read(v) for v in forward.invars]
        outs, kept = _run_forward(forward, ins, plan)
        values.put(plan.forward, outs)
        values.evaluate_before(plan.backward)
        ins = [values.read(v) for v in backward.invars]
        given = _Given(plan.sources, forward, values.env, iter(kept))
        values.put(plan.backward, _run_backward(backward, ins, plan, given))
        return values.all_outputs()

    return _jaxpr.retrace(closed, run)


def _run_forward(eqn, values: list, plan: Remake) -> tuple[list, list]:
    """Outputs of the forward scan, and the stacks of what the sources keep."""
    consts, init, xs = split(eqn, values)
    wanted = [s.kept for s in plan.sources if s.kept is not None]
    closed = eqn.params["jaxpr"]

    def step(carry, x):
        args = [*consts, *carry, *x]
        seen = dict(zip(_jaxpr.split(closed)[0].invars, args, strict=True))

        def watch(inner, ins):
            outs = _compat.bind(inner, ins)
            seen.update(zip(inner.outvars, outs, strict=True))
            return outs

        outs = _jaxpr.evaluate(closed, args, watch)
        return outs[: len(init)], (outs[len(init) :], [seen[v] for v in wanted])

    ends, (ys, kept) = scan_like(eqn, step, init, xs)
    return [*ends, *ys], kept


def _run_backward(eqn, values: list, plan: Remake, given: "_Given") -> list:
    consts, init, xs = split(eqn, values)
    stays = [i for i in range(len(xs)) if i not in plan.slots]

    def step(carry, slices):
        inner, before = carry
        x = dict(zip(stays, slices[0], strict=True))
        roots = given.roots(slices[1])
        for source, root in zip(plan.sources, roots, strict=True):
            for chain in source.chains:
                value = before[given.carried.index(source)] if chain.late else root
                x[chain.slot] = _apply(chain.eqns[source.steps :], value)
        args = [*consts, *inner, *(x[i] for i in range(len(xs)))]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], args)
        after = [r for s, r in zip(plan.sources, roots, strict=True) if s.carried]
        return (outs[: len(init)], after), outs[len(init) :]

    slices = [xs[i] for i in stays], given.slices
    (ends, _), ys = scan_like(eqn, step, (init, given.first()), slices)
    return [*ends, *ys]


@dataclass
class _Given:
    """What the backward scan is given in the place of the residuals."""

    sources: Sequence[Source]
    forward: Any
    env: dict[Any, Any]
    kept: Iterator[Any]
    slices: list[Any] = field(init=False)

    def __post_init__(self):
        self.slices = [
            next(self.kept) if s.outer is None else self.env[s.outer[0]]
            for s in self.sources
            if s.outer is None or s.outer[1]
        ]

    @property
    def carried(self) -> list[Source]:
        return [s for s in self.sources if s.carried]

    def roots(self, slices: Sequence[Any]) -> list[Any]:
        """The value of each source in this turn; constants come whole."""
        turn = iter(slices)
        return [
            self.env[s.outer[0]] if s.outer and not s.outer[1] else next(turn)
            for s in self.sources
        ]

    def first(self) -> list[Any]:
        """What the last layer put out, as far as it is kept of an input."""
        ends = []
        for source in self.carried:
            chain = next(c for c in source.chains if c.late)
            value = self.env[self.forward.outvars[chain.carry]]
            ends.append(_apply(chain.eqns[: source.steps], value))
        return ends


def _apply(eqns: Sequence[Any], value):
    for eqn in eqns:
        (value,) = _compat.bind(eqn, [value])
    return value
