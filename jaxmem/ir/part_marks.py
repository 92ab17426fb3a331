"""Equations with bodies of which each does one operation of a larger one.

A `scan` or a `cond` is taken apart (`scan_parts`, `branch_parts`) so that a pass can
decide for each of its operations whether it is done a second time; what is left of the
parts is put together again (`joined`). A name scope tells them from a user's own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.map_operations import operations_of
from jaxmem.ir.types import JaxprEqn

_SCOPE = "jaxmem_part"


def marked(eqn: JaxprEqn, fn: Callable, *args: Any) -> Any:
    """`fn(*args)` as a part that does what `eqn` does, under its line and scopes."""

    def run(*args: Any) -> Any:
        with jax.named_scope(_SCOPE):
            return fn(*args)

    return _compat.in_context_of(eqn, run, *args)


def is_part(eqn: JaxprEqn) -> bool:
    named = primitives.is_scan(eqn) or primitives.is_branch(eqn)
    return named and _SCOPE in _compat.name_stack(eqn)


def innermost_operations(eqn: JaxprEqn) -> Iterator[Any]:
    """The operations in a part, a `shard_map` or a call; else the equation itself."""
    # XLA writes calls out: jax 0.12 has the exponential of exact gelu's derivative in a
    # `custom_jvp_call`
    if is_part(eqn) or primitives.of(eqn).calls:
        inside = [e for b in jaxprs.bodies(eqn) for e in jaxprs.split(b)[0].eqns]
    else:
        inside = operations_of(eqn)
    for one in inside:
        yield from [one] if one is eqn else innermost_operations(one)


def scopes_of(eqn: JaxprEqn) -> str:
    """The name scopes (module path) of an equation, as the user named them."""
    scopes = _compat.name_stack(eqn).split("/")
    return "/".join(scope for scope in scopes if scope != _SCOPE)
