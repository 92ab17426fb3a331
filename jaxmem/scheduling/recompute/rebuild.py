"""A jaxpr with other scans in the place of a pair."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import is_var, split
from jaxmem.scheduling.recompute.minimum_cut import needed
from jaxmem.scheduling.recompute.pair_rewrite import PairRewrite


def rebuilt(closed, plan: PairRewrite, run_forward: Callable, run_backward: Callable):
    """The jaxpr with both scans replaced."""
    # `run_forward(equation, its values, plan)` gives its outputs, and what it keeps for
    # `run_backward(equation, its values, given, these outputs, what was kept)`.
    graph = JaxprGraph(closed)
    forward, backward = graph.eqns[plan.pair.forward], graph.eqns[plan.pair.backward]

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(plan.pair.forward)
        ins = [values.read(v) for v in forward.invars]
        outs, kept = run_forward(forward, ins, plan)
        values.put(plan.pair.forward, outs)
        values.evaluate_before(plan.pair.backward)
        own = given(forward, ins, plan)
        ins = [values.read(v) for v in backward.invars]
        values.put(plan.pair.backward, run_backward(backward, ins, own, outs, kept))
        return values.all_outputs()

    return jaxprs.retrace(closed, run)


class Given(NamedTuple):
    """Variables of the forward body: the same in every iteration, and stacked."""

    whole: dict[Any, Any]
    slices: dict[Any, Any]


def given(forward, values: list, plan: PairRewrite) -> Given:
    """The inputs of the forward scan that the backward body needs."""
    eqns = needed(plan.body, plan.wanted, plan.known)
    read = {v for i in eqns for v in plan.body.eqns[i].invars if is_var(v)}
    read |= set(plan.wanted)
    consts, _, xs = split(forward, list(zip(plan.body.arguments, values, strict=True)))
    whole, slices = ({v: x for v, x in part if v in read} for part in (consts, xs))
    return Given(plan.body.constants | whole, slices)
