"""A `scan` taken apart into what its carries need and one for each other operation.

What a scan stacks for the backward pass is mostly elementwise of its carries and of a
few products. A pass that decides for each operation whether it is done a second time
sees a scan as one operation. In parts, each reads and makes stacks of all iterations.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.body_parts import BodyParts
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.joined import JoinedGroup, OnlyOnce, Reads, read_elsewhere
from jaxmem.ir.part_marks import is_part, marked
from jaxmem.ir.scans import is_var, scan_like, split
from jaxmem.ir.types import Jaxpr, JaxprEqn


def taken_apart(
    eqn: JaxprEqn, body: Jaxpr, args: Sequence[Any], wanted: Sequence[int]
) -> list[Any]:
    """What a scan gives, the stacks at the positions `wanted` by parts.

    `body`: that of the scan, or one that does the same.
    """
    graph = JaxprGraph(body)
    consts, init, xs = split(eqn, args)
    own = split(eqn, graph.arguments)
    rows = [v for k, v in enumerate(graph.outvars) if k in wanted]
    # without the carries: for a part there is no iteration before
    parts = BodyParts.of(graph, rows, {*graph.constants, *own[0], *own[2]})
    rest = [k for k in range(len(init), len(graph.outvars)) if k not in wanted]

    # one scan makes the carries, the other stacks, and what parts need of each layer
    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        values = Values(graph, graph.inputs([*consts, *carry, *x]))
        ends = [values.read(v) for v in graph.outvars[: len(init)]]
        ys = [values.read(graph.outvars[k]) for k in rest]
        return ends, (ys, [values.read(v) for v in parts.needed])

    ends, (ys, needed) = scan_like(eqn, step, init, xs)
    whole = dict(zip(own[0], consts, strict=True))
    stacks = dict(zip([*own[2], *parts.needed], [*xs, *needed], strict=True))
    for i in parts.eqns:
        one, outs = graph.eqns[i], parts.made(i)
        made = _part(eqn, one, parts, one.invars, outs, whole, stacks)
        stacks.update(zip(outs, made, strict=True))
    for v in rows:
        if not is_var(v) or v not in stacks:  # the same in each iteration
            (stacks[v],) = _part(eqn, eqn, parts, [v], [v], whole, stacks)
    found = dict(zip(rest, ys, strict=True))
    found |= {k: stacks[graph.outvars[k]] for k in wanted}
    return [*ends, *(found[k] for k in range(len(init), len(graph.outvars)))]


def _part(
    eqn: JaxprEqn,
    one: JaxprEqn,
    parts: BodyParts,
    atoms: Sequence[Any],
    outs: Sequence[Any],
    whole: Mapping[Any, Any],
    stacks: Mapping[Any, Any],
) -> list[Any]:
    """Stacks of `outs`, which are made of `atoms`, in a scan like that of `eqn`."""
    given = parts.given_to(atoms)
    same = {v: whole[v] for v in given if v in whole}
    sliced = [v for v in given if v not in whole]

    def step(_: tuple[()], x: Sequence[Any]) -> tuple[Any, Any]:
        return (), parts.run(same | dict(zip(sliced, x, strict=True)), outs)

    length, reverse, unroll = (eqn.params[k] for k in ("length", "reverse", "unroll"))
    scan = partial(lax.scan, length=length, reverse=reverse, unroll=unroll)
    return marked(one, scan, step, (), [stacks[v] for v in sliced])[1]


# -- put together

_WHOLE, _ROW, _END = "whole", "row", "end"


class Scans:
    """Scans of one length and direction, which hand each other rows."""

    def key(self, eqn: JaxprEqn) -> Any:
        if not primitives.is_scan(eqn) or _compat.has_side_effects(eqn):
            return None
        return tuple(eqn.params[k] for k in ("length", "reverse", "unroll"))

    def reads(self, eqn: JaxprEqn) -> Reads:
        consts, carry, xs = split(eqn, eqn.invars)
        yield from ((v, _WHOLE) for v in [*consts, *carry])
        yield from ((v, _ROW) for v in xs)

    def makes(self, eqn: JaxprEqn) -> Reads:
        ends = _compat.scan_counts(eqn)[1]
        yield from ((v, _END if k < ends else _ROW) for k, v in enumerate(eqn.outvars))

    def is_part(self, eqn: JaxprEqn) -> bool:
        return is_part(eqn)

    def belongs(self, group: JoinedGroup, i: int) -> bool:
        eqn = group.graph.eqns[i]
        # in a scan that the user wrote a part is done only if nobody else reads it
        if is_part(eqn):
            return not group.has_whole or group.alone_reads(i)
        shared = any(is_var(v) and v in group.read for v in [*eqn.invars, *eqn.outvars])
        return shared and not group.has_whole

    def pays(self, graph: JaxprGraph, group: Sequence[int]) -> bool:
        return any(is_part(graph.eqns[i]) for i in group)

    def joined(
        self, values: Values, group: Sequence[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, outputs) of a group's scans, done in one."""
        eqns = [values.graph.eqns[i] for i in group]
        rows = {v for e in eqns for v in e.outvars[_compat.scan_counts(e)[1] :]}
        wanted = [v for v in read_elsewhere(values.graph, group) if v in rows]
        own = [split(e, e.invars) for e in eqns]
        whole = [[values.read(v) for v in consts] for consts, _, _ in own]
        init = [[values.read(v) for v in carry] for _, carry, _ in own]
        sliced = dict.fromkeys(v for _, _, xs in own for v in xs if v not in rows)

        def step(carries: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
            env, once, ends = dict(zip(sliced, x, strict=True)), OnlyOnce(), []
            for eqn, consts, carry, (_, _, xs) in zip(
                eqns, whole, carries, own, strict=True
            ):
                ins = [*consts, *carry, *(env[v] for v in xs)]
                outs = jaxprs.evaluate(eqn.params["jaxpr"], ins, once)
                ends.append(outs[: len(carry)])
                env.update(
                    zip(eqn.outvars[len(carry) :], outs[len(carry) :], strict=True)
                )
            return ends, [env[v] for v in wanted]

        lead = next((e for e in eqns if not is_part(e)), eqns[-1])
        ends, ys = scan_like(lead, step, init, [values.read(v) for v in sliced])
        known = dict(zip(wanted, ys, strict=True))
        for i, eqn, end in zip(group, eqns, ends, strict=True):
            yield i, [*end, *(known.get(v) for v in eqn.outvars[len(end) :])]


SCANS = Scans()
