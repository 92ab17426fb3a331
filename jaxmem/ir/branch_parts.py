"""A `cond` taken apart into one for each operation of its branches, and put together.

What a branch leaves for the backward pass is read in the same branch of another `cond`.
A pass that decides for each operation whether it is done a second time sees a `cond` as
one operation. In parts, the other branches of each have nothing to give.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.body_parts import BodyParts, Run
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.joined import JoinedGroup, OnlyOnce, Reads, read_elsewhere
from jaxmem.ir.part_marks import is_part, marked
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import JaxprEqn, Var


def can_be_taken_apart(eqn: JaxprEqn) -> bool:
    """Whether it is a choice by a value, and not by the platform."""
    return not eqn.params.get("branches_platforms")


def taken_apart(
    eqn: JaxprEqn, bodies: Sequence[Any], args: Sequence[Any], wanted: Sequence[int]
) -> list[Any]:
    """What a `cond` gives, the outputs at the positions `wanted` by parts.

    `bodies`: its branches, or others that do the same.
    """
    index, *operands = args
    graphs = [JaxprGraph(body) for body in bodies]
    outs = [[g.outvars[k] for k in wanted] for g in graphs]
    pairs = zip(graphs, outs, strict=True)
    branches = [BodyParts.of(g, atoms, {*g.invars}) for g, atoms in pairs]
    rest = [k for k in range(len(eqn.outvars)) if k not in wanted]
    needed = [v for one in branches for v in one.needed]
    avals = [eqn.outvars[k].aval for k in rest] + [v.aval for v in needed]

    def whole(graph: JaxprGraph) -> Run:
        def run(xs: list) -> list:
            values = Values(graph, graph.inputs(xs))
            # branches of a `cond` give the same: what only another one makes is empty
            # here
            own = [values.read(v) if v in graph.maker else empty(v) for v in needed]
            return [*(values.read(graph.outvars[k]) for k in rest), *own]

        return run

    found, known = [], [dict(zip(g.arguments, operands, strict=True)) for g in graphs]
    # first, in one `cond`, what only whole branches can make: the parts read it
    if avals:
        found = _bound(eqn, index, operands, list(map(whole, graphs)))
    for j, one in enumerate(branches):
        known[j].update(zip(needed, found[len(rest) :], strict=True))
        _add_parts(eqn, index, j, one, known[j])
    one = partial(_chosen, branches, outs)
    given = [b.given_to(atoms) for b, atoms in zip(branches, outs, strict=True)]
    arrays = [known[j][v] for j, vs in enumerate(given) for v in vs]
    chosen = marked(eqn, _bound, eqn, index, arrays, one(given)) if wanted else []
    every = dict(zip([*rest, *wanted], [*found[: len(rest)], *chosen], strict=True))
    return [every[k] for k in range(len(eqn.outvars))]


def _add_parts(
    eqn: JaxprEqn, index: jax.Array, j: int, parts: BodyParts, known: dict[Any, Any]
) -> None:
    """The values that the parts of branch `j` make."""
    for i in parts.eqns:
        one, outs = parts.graph.eqns[i], parts.made(i)
        given = parts.given_to(one.invars)

        def run(xs: list, given: list[Any] = given, outs: list[Any] = outs) -> list:
            return parts.run(dict(zip(given, xs, strict=True)), outs)

        # where another branch is taken nobody reads what this part gives
        runs: list[Run] = [lambda _, outs=outs: list(map(empty, outs))]
        runs = [run if k == j else runs[0] for k in range(_count(eqn))]
        arrays = [known[v] for v in given]
        made = marked(one, _bound, eqn, index, arrays, runs)
        known.update(zip(outs, made, strict=True))


def _chosen(
    branches: Sequence[BodyParts],
    outs: Sequence[Sequence[Any]],
    given: Sequence[Sequence[Any]],
) -> list[Run]:
    """The outputs of each branch, of what its parts have made."""
    runs, start = [], 0
    for one, atoms, own in zip(branches, outs, given, strict=True):

        def run(
            xs: list,
            one: BodyParts = one,
            atoms: Sequence[Any] = atoms,
            own: Sequence[Any] = own,
            start: int = start,
        ) -> list:
            here = xs[start : start + len(own)]
            return one.run(dict(zip(own, here, strict=True)), atoms)

        runs.append(run)
        start += len(own)
    return runs


def _count(eqn: JaxprEqn) -> int:
    return len(jaxprs.bodies(eqn))


def empty(v: Var) -> Any:
    """An array of the type of a variable, which nobody reads."""
    return _compat.typed_as(lax.empty(v.aval.shape, v.aval.dtype), v.aval)


def _bound(
    eqn: JaxprEqn, index: jax.Array, arrays: Sequence[Any], runs: Sequence[Run]
) -> list[Any]:
    """A `cond` like that of `eqn` with other branches, of these arrays."""
    avals = list(map(jax.typeof, arrays))
    made = [jax.make_jaxpr(lambda *xs, r=r: r(list(xs)))(*avals) for r in runs]
    branches = tuple(map(_compat.without_dead_code, made))
    # its other parameters stay as they were
    params = eqn.params | {"branches": branches}
    outs = eqn.primitive.bind(index, *arrays, **eqn.primitive.get_bind_params(params))
    return as_one(branches, outs)


def as_one(branches: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The results of a `cond`, those that are one value in every branch as one."""
    first: dict[Any, Any] = {}
    results = zip(*(jaxprs.split(one)[0].outvars for one in branches), strict=True)
    keys = (tuple(map(id, variables)) for variables in results)
    return [first.setdefault(key, x) for key, x in zip(keys, outs, strict=True)]


# -- put together


class Branches:
    """`cond`s by one predicate."""

    def key(self, eqn: JaxprEqn) -> Any:
        if not primitives.is_branch(eqn) or _compat.has_side_effects(eqn):
            return None
        known = is_var(eqn.invars[0]) and can_be_taken_apart(eqn)
        return (eqn.invars[0], _count(eqn)) if known else None

    def reads(self, eqn: JaxprEqn) -> Reads:
        return ((v, None) for v in eqn.invars)

    def makes(self, eqn: JaxprEqn) -> Reads:
        return ((v, None) for v in eqn.outvars)

    def is_part(self, eqn: JaxprEqn) -> bool:
        return is_part(eqn)

    def belongs(self, group: JoinedGroup, i: int) -> bool:
        fits = not group.has_whole or group.alone_reads(i)
        return fits and not group.would_repeat(i)

    def pays(self, graph: JaxprGraph, group: Sequence[int]) -> bool:
        """Whether there is a part, or one of which the others alone read."""
        elsewhere = {*read_elsewhere(graph, group)}
        outs = [graph.eqns[i].outvars for i in group]
        parts = any(is_part(graph.eqns[i]) for i in group)
        return parts or any(elsewhere.isdisjoint(vs) for vs in outs)

    def joined(
        self, values: Values, group: Sequence[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, outputs) of a group's `cond`s, done in one."""
        eqns = [values.graph.eqns[i] for i in group]
        made = {v for e in eqns for v in e.outvars}
        read = (v for e in eqns for v in e.invars[1:] if is_var(v))
        given = [v for v in dict.fromkeys(read) if v not in made]
        wanted = read_elsewhere(values.graph, group)

        def branch(j: int, xs: list) -> list:
            env, once = dict(zip(given, xs, strict=True)), OnlyOnce()
            for eqn in eqns:
                ins = [env[v] if is_var(v) else v.val for v in eqn.invars[1:]]
                outs = jaxprs.evaluate(jaxprs.bodies(eqn)[j], ins, once)
                env.update(zip(eqn.outvars, outs, strict=True))
            return [env[v] for v in wanted]

        # under the scopes of one that the user wrote, where there is one
        lead = ([e for e in eqns if not is_part(e)] or eqns)[-1]
        index, arrays = values.read(lead.invars[0]), [values.read(v) for v in given]
        runs = [partial(branch, j) for j in range(_count(lead))]
        outs = _compat.in_context_of(lead, _bound, lead, index, arrays, runs)
        known = dict(zip(wanted, outs, strict=True))
        for i, eqn in zip(group, eqns, strict=True):
            yield i, [known.get(v) for v in eqn.outvars]


BRANCHES = Branches()
