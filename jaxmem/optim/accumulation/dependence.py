"""Which outputs of a traced function depend on its inputs."""

from typing import Any


def depends_on_input(jaxpr: Any) -> list[bool]:
    """For each output of a closed jaxpr, whether it depends on any input."""
    inner = jaxpr.jaxpr
    return _tainted_outputs(inner, [True] * len(inner.invars))


def _tainted_outputs(jaxpr, tainted: list[bool]) -> list[bool]:
    # by identity: literals, which stand among the variables, are not hashable
    live = {id(v) for v, t in zip(jaxpr.invars, tainted, strict=True) if t}
    for eqn in jaxpr.eqns:
        outs = _through(eqn, [id(v) in live for v in eqn.invars])
        live |= {id(v) for v, t in zip(eqn.outvars, outs, strict=True) if t}
    return [id(v) in live for v in jaxpr.outvars]


def _through(eqn, tainted: list[bool]) -> list[bool]:
    """Output by output for a jitted function; all outputs alike for any other."""
    if eqn.primitive.name in ("jit", "pjit"):
        return _tainted_outputs(eqn.params["jaxpr"].jaxpr, tainted)
    return [any(tainted)] * len(eqn.outvars)
