"""What tells one step from another: a hash that is the same in every process.

A plan holds positions of operations, and was compiled for a donation: for a step that
is wired, typed, donated or clipped otherwise it would be another plan.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.scheduling.plan.plan import Axes, Plan
from jaxmem.scheduling.search.result import SearchResult


def fingerprint(closed, donated: Sequence[int] = (), clip: str | None = None) -> str:
    """A short hash of a step, of the positions of its donated inputs, and of `clip`."""
    digest = hashlib.sha256(f"{sorted(donated)} {clip}".encode())
    for line in _lines(closed):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def _lines(body) -> Iterator[str]:
    """Every equation with its operands numbered, those of nested bodies within."""
    jaxpr, _ = jaxprs.split(body)
    # in the order in which they come: a variable has no name that lasts
    numbers: dict[Any, int] = {}

    def number(v) -> str:
        if isinstance(v, _compat.Literal):
            return f"{v.val!r}:{_type(v.aval)}"
        return f"%{numbers.setdefault(v, len(numbers))}"

    for v in [*jaxpr.constvars, *jaxpr.invars]:
        yield f"{number(v)}:{_type(v.aval)}"
    for eqn in jaxpr.eqns:
        reads = " ".join(map(number, eqn.invars))
        makes = " ".join(f"{number(v)}:{_type(v.aval)}" for v in eqn.outvars)
        params = " ".join(f"{k}={_text(v)}" for k, v in sorted(eqn.params.items()))
        yield f"{makes} = {eqn.primitive.name}[{params}] {reads}"
        for inner in jaxprs.bodies(eqn):
            yield "{"
            yield from _lines(inner)
            yield "}"
    yield "return " + " ".join(map(number, jaxpr.outvars))


def _type(aval) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return f"{weak}{aval.str_short()}"


def _text(value: Any) -> str:
    """A parameter as text, without addresses; bodies have their own lines."""
    if jaxprs.is_body(value):
        return "body"
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(_text, value)))}}}"  # sets have no order
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{k}:{_text(v)}' for k, v in value.items()))}}}"
    text = repr(value)
    # a function's text has its address, which every process chooses anew
    if " at 0x" not in text:
        return text
    return getattr(value, "__qualname__", type(value).__qualname__)


def loaded(plan: Plan, fingerprint: str, mesh: Axes | None = None) -> SearchResult:
    """The choice of a plan; ValueError where it is of another step, mesh, or jax.

    `mesh`: what the arguments are sharded over; None where nobody knows.
    """
    if plan.jax_version != jax.__version__:
        raise ValueError(
            f"plan: made with jax {plan.jax_version or 'unknown'}, this is jax "
            f"{jax.__version__}, which may trace and compile the step otherwise: plan "
            "again"
        )
    if not plan.fingerprint:
        raise ValueError(
            "plan: does not tell which step it was made for, as plans of jaxmem 0.1.0 "
            "made without a budget and a target: plan again"
        )
    if plan.fingerprint != fingerprint:
        raise ValueError(
            f"plan: made for another step ({plan.fingerprint}) than this "
            f"one ({fingerprint}): for other operations, shapes, types, donated "
            "arguments or another clip: plan again"
        )
    if mesh is not None and plan.mesh != mesh:
        raise ValueError(
            f"plan: made for arguments {_on(plan.mesh)}, and these are {_on(mesh)}, "
            "where a device takes other bytes: plan again"
        )
    return SearchResult(plan.choice, plan.budget, fingerprint=fingerprint)


def _on(mesh: Axes) -> str:
    return f"on a mesh of {dict(mesh)}" if mesh else "on one device"
