"""Who makes, uses and overwrites the variables of a jaxpr, and their values."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.placements.labels import Labels
from jaxmem.ir.placements.rules import labels
from jaxmem.ir.scans import is_on_host, is_var
from jaxmem.ir.types import Atom, Body, ClosedJaxpr, JaxprEqn, Var


class JaxprGraph:
    """A closed jaxpr with its makers and users, equations named by position."""

    def __init__(self, closed: Body) -> None:
        jaxpr, consts = jaxprs.split(closed)
        self.constants = dict(zip(jaxpr.constvars, consts, strict=True))
        self.eqns: Sequence[Any] = jaxpr.eqns
        self.arguments: Sequence[Any] = jaxpr.invars
        self.invars = [*jaxpr.constvars, *jaxpr.invars]
        self.outvars = jaxpr.outvars
        self.outputs = set(filter(is_var, jaxpr.outvars))
        # of those who look for placements, the same is asked again and again
        self._labels: dict[tuple[int, int], Labels | str] = {}
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.users: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in filter(is_var, eqn.invars):
                self.users.setdefault(v, []).append(i)

    def labels(self, i: int, n: int) -> Labels | str:
        """The labels of an equation's axes, for `n` parts."""
        if (i, n) not in self._labels:
            self._labels[i, n] = labels(self.eqns[i], n)
        return self._labels[i, n]

    def inputs(self, args: Sequence[Any]) -> dict[Any, Any]:
        """The values that are there before the first equation."""
        return self.constants | dict(zip(self.arguments, args, strict=True))

    def is_given(self, v: Var) -> bool:
        """Whether a variable is an input, or one that is constrained to a sharding."""
        while v in self.maker:
            eqn = self.eqns[self.maker[v]]
            # a constraint says where an array lies, and leaves what it is
            if not primitives.is_constraint(eqn):
                return False
            v = eqn.invars[0]
        return True

    def after(self, i: int) -> set[Any]:
        """The variables that need equation `i` to have been done."""
        return self.behind({i}, range(i, len(self.eqns)))

    def behind(self, starts: Set[int], among: Iterable[int]) -> set[Any]:
        """The variables that need one of some equations, by way of others in order."""
        found: set[Any] = set()
        # one pass is enough: an equation stands behind what it needs
        for i in among:
            eqn = self.eqns[i]
            if i in starts or any(is_var(v) and v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def cone(self, starts: Iterable[Any], within: Set[Any] | None = None) -> set[int]:
        """The equations that make `starts`, as far back as variables of `within` go."""
        todo, found = list(starts), set()
        while todo:
            i = self.maker.get(todo.pop())
            if i is not None and i not in found:
                found.add(i)
                ins = filter(is_var, self.eqns[i].invars)
                todo += [w for w in ins if within is None or w in within]
        return found


@dataclass
class Values:
    """The values of a graph's variables; an equation is done when first needed."""

    graph: JaxprGraph
    env: dict[Any, Any]
    done: set[int] = field(default_factory=set)

    def read(self, atom: Any) -> Any:
        """The value of a variable or literal."""
        if not is_var(atom):
            return atom.val
        if atom not in self.env:
            self.evaluate(self.graph.maker[atom])
        return self.env[atom]

    def evaluate(self, i: int) -> None:
        """Equation `i`, and before it what it needs, unless they have been done."""
        for k in operands_first(i, self._missing):
            if k not in self.done:
                self.done.add(k)
                self.apply(k)

    def _missing(self, i: int) -> list[int]:
        """The equations to do before this one."""
        if i in self.done:
            return []
        atoms = (v for v in self.graph.eqns[i].invars if is_var(v))
        makers = (self.graph.maker[v] for v in atoms if v not in self.env)
        return [k for k in dict.fromkeys(makers) if k not in self.done]

    def apply(self, i: int) -> None:
        """What evaluating an equation is: here, to bind it as it is."""
        eqn = self.graph.eqns[i]
        self.put(i, _compat.bind(eqn, [self.read(v) for v in eqn.invars]))

    def put(self, i: int, outs: Sequence[Any]) -> None:
        self.done.add(i)
        self.env.update(zip(self.graph.eqns[i].outvars, outs, strict=True))

    def recompute(self, positions: Iterable[int]) -> None:
        """Equations that were done before, by name scopes as `jax.checkpoint` does."""
        with jax.named_scope(_compat.RECOMPUTED):
            for i in positions:
                self.evaluate(i)

    def evaluate_before(self, end: int) -> None:
        """Every equation before `end`, in order."""
        for i in range(end):
            self.evaluate(i)

    def all_outputs(self) -> list[Any]:
        """The values of the outputs, with every equation done."""
        # those that no output needs too: they may have side effects
        self.evaluate_before(len(self.graph.eqns))
        return [self.read(v) for v in self.graph.outvars]


def done_otherwise(
    closed: ClosedJaxpr, graph: JaxprGraph, instead: Mapping[int, Callable]
) -> ClosedJaxpr:
    """The jaxpr of a graph, where `instead` of an equation gives its outputs."""
    # It is a function of the values, with all that comes before done.

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        for i in sorted(instead):
            if i in values.done:  # something else needed it earlier
                continue
            values.evaluate_before(i)
            values.put(i, instead[i](values))
        return values.all_outputs()

    return _compat.without_dead_code(jaxprs.retrace(closed, run))


def with_bodies(
    closed: ClosedJaxpr, graph: JaxprGraph, bodies: Mapping[int, Sequence[Any]]
) -> ClosedJaxpr:
    """The jaxpr of a graph, some of whose equations have other bodies."""

    def rebound(eqn: JaxprEqn, new: Sequence[Any], values: Values) -> list[Any]:
        return jaxprs.rebind(eqn, [values.read(v) for v in eqn.invars], new)

    made = {i: partial(rebound, graph.eqns[i], new) for i, new in bodies.items()}
    return done_otherwise(closed, graph, made)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether the backward pass made an equation; its name scopes tell."""
    return "transpose(" in _compat.name_stack(eqn)


def late_of(graph: JaxprGraph) -> set[int]:
    """The equations of the backward pass and of all that comes after it."""
    found: set[int] = set()
    made: set[Any] = set()
    for i, eqn in enumerate(graph.eqns):
        # an update has no scope of its own: it is known by what it reads
        if is_transposed(eqn) or any(is_var(v) and v in made for v in eqn.invars):
            found.add(i)
            made.update(eqn.outvars)
    return found


Aliases = Mapping[int, int]  # position of an output -> of the input in its memory


def by_shape(closed: Body, inputs: Iterable[int]) -> Aliases:
    """Output -> input in whose memory it will be: the first of its kind, as in jit."""
    return _matched(closed, inputs, lambda v: (_shape(v), is_on_host(v)))


def of_variables(closed: Body, aliases: Aliases) -> dict[Any, Any]:
    """Output variable -> the input variable in whose memory it will be."""
    # An output may be a literal, such as a number that the step leaves as it was: no
    # equation makes it, and it is no key of a table.
    jaxpr = jaxprs.split(closed)[0]
    pairs = ((jaxpr.outvars[o], jaxpr.invars[i]) for o, i in aliases.items())
    return {out: given for out, given in pairs if is_var(out)}


def across_memories(closed: Body, inputs: Iterable[int]) -> Aliases:
    """Those outputs that jit on one device puts in an input of another memory."""
    # It compares memories only where `out_shardings` name them, and XLA's CPU backend
    # aborts the process where they differ.
    outs, ins = jaxprs.split(closed)[0].outvars, jaxprs.split(closed)[0].invars
    found = _matched(closed, inputs, _shape)
    return {o: i for o, i in found.items() if is_on_host(outs[o]) != is_on_host(ins[i])}


def _shape(v: Atom) -> tuple[Any, Any]:
    return v.aval.shape, v.aval.dtype


def _matched(closed: Body, inputs: Iterable[int], kind: Callable) -> Aliases:
    jaxpr = jaxprs.split(closed)[0]
    free: dict[Any, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i in inputs:
        free[kind(jaxpr.invars[i])].append(i)
    found = {}
    for o, v in enumerate(jaxpr.outvars):
        if queue := free.get(kind(v)):
            # jit pairs donated inputs and outputs in the order in which they come
            found[o] = queue.popleft()
    return found
