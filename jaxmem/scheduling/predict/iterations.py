"""One iteration of a scan, as XLA runs it: on whole stacks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.scans import is_on_host, split

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)  # of the iteration


def iteration_atoms(eqn) -> tuple[Any, ...]:
    """What goes into an iteration, as `iteration_of` has it; of stacks, the results."""
    constants, carry, xs = split(eqn, eqn.invars)
    stacks = (v for v in eqn.outvars[len(carry) :] if not is_on_host(v))
    number = _compat.Literal(0, core.ShapedArray((), jnp.int32))
    return number, *constants, *carry, *xs, *stacks


def iteration_of(eqn) -> tuple[Any, dict[int, int]]:
    """One iteration of a scan on whole stacks: (jaxpr, output -> input it replaces)."""
    # It takes the iteration's number, constants, carry, what it slices, and the stacks,
    # and gives the new carry and the stacks with a slice written; not those on the
    # host.
    body = jaxprs.bodies(eqn)[0]
    constants, carry, xs = split(eqn, eqn.invars)
    here = [k for k, v in enumerate(eqn.outvars[len(carry) :]) if not is_on_host(v)]
    avals = [v.aval for v in iteration_atoms(eqn)[1:]]
    ends = list(itertools.accumulate(map(len, (constants, carry, xs))))

    def iteration(i, *args):
        held, whole, old = args[: ends[1]], args[ends[1] : ends[2]], args[ends[2] :]
        slices = [lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in whole]
        outs = jaxprs.evaluate(body, [*held, *slices])
        ys = outs[len(carry) :]
        new = [
            lax.dynamic_update_index_in_dim(stack, ys[k], i, 0)
            for stack, k in zip(old, here, strict=True)
        ]
        return *outs[: len(carry)], *new

    closed = jax.make_jaxpr(iteration)(_NUMBER, *avals)
    places = [*range(1 + ends[0], 1 + ends[1]), *range(1 + ends[2], 1 + len(avals))]
    return closed, dict(enumerate(places))
