"""A donated array that a loop reads between two updates of it in place."""

from collections.abc import Iterator
from typing import Any

from jaxmem.faults.program import ProgramLevel, TracedProgram, levels
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.scans import size_of

_LEAST = 2**20  # bytes of an array whose copy matters


def read_in_loops(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds loops that read what is computed of a donated array, which is used later.

    So that the array is needed behind the loop, as the result in its place is.
    """
    top = next(levels(program.closed))
    donated = {top.graph.arguments[i] for i in program.donated}
    of_donated = _elementwise(top, {v for v in donated if size_of(v) >= _LEAST})
    for i, eqn in enumerate(top.graph.eqns):
        if not primitives.is_loop(eqn):
            continue
        for v in dict.fromkeys(filter(is_var, eqn.invars)):
            if v in of_donated - donated and _becomes_result(top, v, i):
                yield (
                    eqn,
                    f"a loop reads {v.aval.dtype}{list(v.aval.shape)}, computed in the "
                    f"buffer of a donated argument, before it is updated: the compiler "
                    f"keeps {size_of(v):,} bytes of a copy",
                )


def _elementwise(level: ProgramLevel, start: set[Any]) -> set[Any]:
    """What is computed of these, element by element, in arrays of their types."""
    found = set(start)
    types = {(v.aval.shape, v.aval.dtype) for v in start}
    for eqn in level.graph.eqns:
        if primitives.of(eqn).elementwise and len(eqn.outvars) == 1:
            (out,) = eqn.outvars
            same = (out.aval.shape, out.aval.dtype) in types
            if same and any(is_var(v) and v in found for v in eqn.invars):
                found.add(out)
    return found


def _becomes_result(level: ProgramLevel, v, loop: int) -> bool:
    """Whether a result is computed of a value, element by element, behind a loop."""
    after = level.graph.after(loop)
    results = _elementwise(level, {v}) & level.graph.outputs & after
    return bool(results - {v})
