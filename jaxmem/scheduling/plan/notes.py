"""What a plan says in sentences: what was left as it was, and why."""

from collections.abc import Iterator

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.backward import is_transposed
from jaxmem.ir.flatten import is_jit, why_closed
from jaxmem.scheduling._passes import Rewritten
from jaxmem.scheduling.plan.fingerprint import fingerprint
from jaxmem.scheduling.plan.held import held_up, named

_BRANCHES = ("cond", "while", "custom_linear_solve", "xla_pmap")


def notes_of(rewritten: Rewritten, unchanged: bool) -> Iterator[str]:
    """Sentences on a rewritten step; `unchanged`: whether it was to stay as given."""
    for level in rewritten.levels:
        yield from held_up(level.jaxpr, level.aliases)
    closed = list(dict.fromkeys(_closed(rewritten)))
    yield from closed
    yield from dict.fromkeys(rewritten.notes)
    if unchanged:
        yield "nothing is changed: as it was given the step takes least"
    elif fingerprint(rewritten.written_out) == fingerprint(rewritten.jaxpr):
        said = closed or rewritten.notes
        why = "" if said else f": {_why_nothing(rewritten.written_out)}"
        yield f"nothing is changed{why}"


def _closed(rewritten: Rewritten) -> Iterator[str]:
    """Of equations that layers are in why nothing is done in them."""
    both = any(map(is_transposed, jaxprs.walk(rewritten.written_out)))
    for level in rewritten.levels:
        for eqn in level.jaxpr.jaxpr.eqns if both else ():
            if eqn.primitive.name == "scan" and _compat.has_side_effects(eqn):
                inner = next(e for e in jaxprs.walk(jaxprs.bodies(eqn)[0]) if _acts(e))
                yield f"a scan is left as it is: {named(inner)} has side effects"
            elif _holds_both(eqn):
                why = f": {why_closed(eqn)}" if is_jit(eqn) else ""
                yield f"{named(eqn)}, with the layers in it, is left as it is{why}"


def _holds_both(eqn) -> bool:
    """Whether a backward pass and the forward one are in an equation not opened."""
    if is_transposed(eqn) or not (is_jit(eqn) or eqn.primitive.name in _BRANCHES):
        return False
    inside = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
    return any(map(is_transposed, inside))


def _acts(eqn) -> bool:
    return _compat.has_side_effects(eqn) and not jaxprs.bodies(eqn)


def _why_nothing(closed) -> str:
    eqns = list(jaxprs.walk(closed))
    backward = list(filter(is_transposed, eqns))
    if not backward:
        return (
            "it has no backward pass; schedule the function that takes the gradient "
            "and updates the parameters"
        )
    if not any(e.primitive.name == "scan" for e in backward):
        return (
            "no layers are in a jax.lax.scan, and of those that are written out no "
            "update of a MiB or more is in place and followed by other gradients"
        )
    return "its scans keep nothing that can be recomputed from other residuals"
