"""An activation right behind a norm that keeps its input: it keeps nothing itself.

What it needs is made once more of what the norm keeps, elementwise, in the kernels of
the norm's own gradient. Its output, and a bit, would be another array that they read.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives

# Those whose statistics are of many elements a channel: what they keep is their input.
_NORMS = ("jaxmem.batch_norm", "jaxmem.group_norm")


def is_norm(eqn: Any) -> bool:
    """Whether an equation is a norm that keeps its input for its own gradient."""
    # With given statistics there is no policy: then only a trained scale keeps it.
    if not primitives.is_remat(eqn) or eqn.params["policy"] is None:
        return False
    stack = _compat.name_stack(eqn)
    return any(name in stack for name in _NORMS)


def behind(norm: Any, activation: Any, tell: Callable[[], None]) -> Callable:
    """The activation's function of (its input, the inputs of the norm before it).

    `tell` is called when it is differentiated.
    """

    def again(values):
        # inlined: a checkpoint in a checkpoint would forget the statistics by name
        return _jaxpr.evaluate(norm.params["jaxpr"], values)[0]

    def value(x):
        return _compat.bind(activation, [x])[0]

    def tangent(values, t):
        return jax.jvp(value, (again(values),), (t,))[1]

    policy = norm.params["policy"]
    scaled = jax.checkpoint(tangent, prevent_cse=False, policy=policy)

    @jax.custom_jvp
    def op(x, *values):
        return value(x)

    @op.defjvp
    def _(primals, tangents):
        tell()
        # what the norm's inputs have of tangents comes through x
        return value(primals[0]), scaled(primals[1:], tangents[0])

    return op
