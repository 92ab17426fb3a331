"""The pass that releases gradients: every update that can be moved into its scan is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import Aliases, JaxprGraph, Values, of_variables
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_var, xs_of, ys_of
from jaxmem.ir.shards import InputShardings
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.plan.rows import Description, Gradient, gradient
from jaxmem.scheduling.release.after_scan import HINT, blockers
from jaxmem.scheduling.release.analysis import Stack, releases
from jaxmem.scheduling.release.rewrite import release

# A trust ratio with a safe norm needs two passes before the one that updates.
PASSES = 3


@dataclass(frozen=True)
class GradientRelease:
    """Whether a first backward pass may find numbers made of all gradients."""

    name: ClassVar[str] = "release"
    two_pass: bool = False


@dataclass(frozen=True)
class Released:
    """A jaxpr with updates in its backward scans, and what became of every stack."""

    jaxpr: Any
    stacks: tuple[Stack, ...]
    given: InputShardings | None = None  # how the inputs are sharded over devices


class ReleaseGradients(Pass[GradientRelease, Released]):
    """Updates are moved into the backward scans that make their gradients."""

    config = GradientRelease

    def analyse(self, level: Level, config: GradientRelease) -> Iterator[Released]:
        about = level.aliases, level.shardings
        closed, stacks = _release_all(level.jaxpr, *about)
        if config.two_pass:
            closed, stacks = _twice(closed, *about, stacks)
            stacks = [replace(s, why=s.why.replace(HINT, "")) for s in stacks]
        yield Released(closed, tuple(stacks), level.shardings)

    def apply(self, level: Level, rewrite: Released):
        return rewrite.jaxpr

    def describe(self, rewrite: Released, target: str) -> Description:
        def row(s: Stack) -> Gradient:
            shards = shardings_in(s.within, rewrite.given).shards(s.var)
            return gradient(s.var.aval, s.maker, s.released, s.why, shards)

        return Description(gradients=tuple(map(row, rewrite.stacks)))


def _release_all(
    closed, aliases: Aliases, given: InputShardings | None
) -> tuple[Any, list[Stack]]:
    """Everything that can be released, and what became of every stacked gradient."""
    stacks: list[Stack] = []
    while (plan := _first_that_pays(closed, aliases, given)) is not None:
        stacks += [replace(s, within=closed) for s in plan.stacks if s.released]
        closed = _compat.without_dead_code(release(closed, plan))
    for plan in releases(closed, of_variables(closed, aliases), given):
        if _is_backward(closed, plan.scan):
            stacks += [replace(s, within=closed) for s in plan.stacks]
    return closed, stacks


def _first_that_pays(closed, aliases: Aliases, given: InputShardings | None):
    plans = releases(closed, of_variables(closed, aliases), given)
    return next((plan for plan in plans if plan.moved), None)


def _is_backward(closed, scan: int) -> bool:
    """Whether a scan reads what another one has stacked: residuals."""
    graph = JaxprGraph(closed)
    scans = (e for e in graph.eqns if primitives.is_scan(e))
    stacked = {v for eqn in scans for v in ys_of(eqn)}
    return any(v in stacked for v in xs_of(graph.eqns[scan]) if is_var(v))


def _twice(
    closed, aliases: Aliases, given: InputShardings | None, stacks: list[Stack]
) -> tuple[Any, list[Stack]]:
    """The scans that wait for such numbers done twice, where that releases more."""
    tried, before = closed, stacks
    for _ in range(PASSES - 1):
        blocked = blocked_scans(tried)
        if not blocked:
            break
        tried, found = _release_all(two_pass(tried, blocked[0]), aliases, given)
        if _unreleased(found) < _unreleased(stacks):
            if not _unreleased(found):
                # the first passes have the same stacks, which count once
                found = [replace(s, released=True, why="") for s in before]
            closed, stacks = tried, found
    return closed, stacks


def _unreleased(stacks: list[Stack]) -> int:
    return sum(jaxprs.elements(s.var.aval.shape) for s in stacks if not s.released)


def blocked_scans(closed) -> list[int]:
    """Positions of the scans that some number over all layers holds up."""
    graph = JaxprGraph(closed)
    return [
        i
        for i, eqn in enumerate(graph.eqns)
        if primitives.is_scan(eqn)
        and not _compat.has_side_effects(eqn)
        and blockers(graph, i)
    ]


def two_pass(closed, scan: int):
    """The jaxpr with the scan done twice, the first time for what holds it up."""
    # Clipping by the global norm needs every gradient before the first update: the
    # first scan drops the gradients, the second knows the number (Lv et al. 2023, LOMO,
    # 3.2).
    graph = JaxprGraph(closed)
    first = blockers(graph, scan)
    later = graph.after(scan)
    cone = sorted({scan, *graph.cone(first, later)})

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(scan)
        numbers = Values(graph, dict(values.env), set(values.done))
        for i in cone:
            numbers.evaluate(i)
        values.env |= {v: numbers.env[v] for v in first}
        made = (all(v in values.env for v in graph.eqns[i].outvars) for i in cone)
        values.done |= {i for i, known in zip(cone, made, strict=True) if known}
        return values.all_outputs()

    return _compat.without_dead_code(jaxprs.retrace(closed, run))
