"""Some equations of a jaxpr done in another form, wherever they are nested."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.shard_maps import done_inside
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn

# what an equation gives, of itself and its arguments
Form = Callable[[JaxprEqn, list], list[Any]]


def in_other_forms(closed: ClosedJaxpr, forms: Mapping[int, Form]) -> ClosedJaxpr:
    """The jaxpr with some equations done otherwise; `forms`: by their identity."""

    def rule(eqn: JaxprEqn, args: list) -> list[Any] | None:
        if id(eqn) in forms:
            return forms[id(eqn)](eqn, args)
        inside = jaxprs.bodies(eqn)
        if not any(id(e) in forms for body in inside for e in jaxprs.walk(body)):
            return None
        if primitives.is_shard_map(eqn):
            return done_inside(eqn, args, partial(in_other_forms, forms=forms))
        bodies = (_compat.ClosedJaxpr(*jaxprs.split(body)) for body in inside)
        return jaxprs.rebind(eqn, args, [in_other_forms(b, forms) for b in bodies])

    return jaxprs.rewritten(closed, rule)
