"""One row of a table, in a loop, at an index that another loop in it has searched."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.faults.program import TracedProgram
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import elements, is_var

# What a value depends on: of arguments XLA does not try to follow it.
_GIVEN, _COUNTER, _LOOP = "given", "counter", "loop"
Marks = frozenset[str]
# name -> position of the first operand that is an index


def searched_slices(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds reads of one row whose index follows, by a loop, from a loop's counter."""
    jaxpr, _ = jaxprs.split(program.closed)
    yield from _walk(jaxpr, [frozenset({_GIVEN})] * len(jaxpr.invars))[1]


def _walk(body, marks: Sequence[Marks]) -> tuple[list[Marks], list[tuple[Any, str]]]:
    """What the results depend on, and the findings inside."""
    jaxpr, _ = jaxprs.split(body)
    env = dict(zip(jaxpr.invars, marks, strict=True))
    found: list[tuple[Any, str]] = []
    for eqn in jaxpr.eqns:
        ins = [_of(v, env) for v in eqn.invars]
        outs, inside = _results(eqn, ins)
        found += inside
        if _is_searched(eqn, ins):
            found.append(
                (
                    eqn,
                    "a row of a table is read in a loop at an index that another loop "
                    "in it finds (as searchsorted does): the compiler ends in an error",
                )
            )
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_of(v, env) for v in jaxpr.outvars], found


def _of(v, env: Mapping[Any, Marks]) -> Marks:
    return env.get(v, frozenset()) if is_var(v) else frozenset()


def _results(eqn, ins: list[Marks]) -> tuple[list[Marks], list[tuple[Any, str]]]:
    together = frozenset().union(*ins)
    if (body := jaxprs.called(eqn)) is not None:
        return _walk(body, ins)
    found: list[tuple[Any, str]] = []
    if primitives.is_scan(eqn):
        found = _walk(eqn.params["jaxpr"], _scanned(eqn, ins))[1]
    elif primitives.is_while(eqn):
        n = eqn.params["cond_nconsts"]
        found = _walk(eqn.params["body_jaxpr"], ins[n:])[1]
    if primitives.is_loop(eqn) or _is_search(eqn):
        together |= {_LOOP}
    return [together] * len(eqn.outvars), found


def _is_search(eqn) -> bool:
    """Whether it becomes a loop when it is lowered, as searchsorted does by default."""
    # jax 0.12 traces it as one operation
    name, how = _compat.operation(eqn)
    return name == "SearchSorted" and how["method"] == "scan"


def _scanned(eqn, ins: list[Marks]) -> list[Marks]:
    """Of the inputs of a scan's body."""
    consts, carries = _compat.scan_counts(eqn)
    body, _ = jaxprs.split(eqn.params["jaxpr"])
    marks = list(ins)
    for k in range(consts, len(ins)):
        counts = k < consts + carries and _counts(body, k, k - consts)
        is_row = k >= consts + carries
        own = {_COUNTER} if counts or is_row else {_GIVEN}
        # what has been searched outside of the loop is looked up
        marks[k] = (ins[k] - {_LOOP}) | own
    return marks


def _counts(body, place: int, out: int) -> bool:
    """Whether what a loop carries is a number that grows by a constant."""
    v = body.outvars[out]
    made = next((e for e in body.eqns if v in e.outvars), None)
    if made is None or made.primitive.name != "add":
        return False
    return body.invars[place] in made.invars and any(not is_var(w) for w in made.invars)


def _is_searched(eqn, ins: list[Marks]) -> bool:
    gathers = primitives.is_gather(eqn)
    if not (gathers or primitives.is_dynamic_slice(eqn)):
        return False
    if gathers and elements(eqn.invars[1].aval.shape[:-1]) != 1:
        return False
    index = frozenset().union(*ins[1:])
    return {_COUNTER, _LOOP} <= index and _GIVEN not in index
