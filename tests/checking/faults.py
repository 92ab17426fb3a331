"""Passes that write something wrong."""

import contextlib

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.scheduling.release.released import ReleaseGradients


def apply_wrongly(self, level, rewrite, right=ReleaseGradients.apply):
    """The pass's own rewrite, whose backward scan gives one percent more."""
    closed = right(self, level, rewrite)

    def rule(eqn, args):
        if eqn.primitive.name == "scan" and eqn.params["reverse"]:
            outs = _compat.bind(eqn, args)
            return [x * 1.01 if x.dtype == jnp.float32 else x for x in outs]
        return None

    return jaxprs.retrace(closed, lambda args: jaxprs.evaluate(closed, args, rule))


@contextlib.contextmanager
def wrong_release():
    """Gradients are released wrongly while it is open."""
    right = ReleaseGradients.apply
    ReleaseGradients.apply = apply_wrongly
    try:
        yield
    finally:
        ReleaseGradients.apply = right
