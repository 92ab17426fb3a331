"""The only file that touches `jax._src` or `jax.extend`.

Everything here is private to JAX and may move; `tests/test_compat.py` calls each
function, so that a new JAX fails there, loudly, and not in a user's step.
"""

from typing import Any

import jax
from jax.extend import core as jex_core

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Var = jex_core.Var


def saved_residuals(fn, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """(aval, source text) of each value that the backward pass of `fn` keeps."""
    from jax._src.ad_checkpoint import saved_residuals as impl

    return impl(fn, *args, **kwargs)
