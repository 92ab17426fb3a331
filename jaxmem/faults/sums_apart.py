"""Sums of tables in a loop, in a form that devices do not lose (openxla/xla#49143).

A barrier keeps what a device has added to a table apart from the sum so far, so that it
is summed over the devices in each iteration. It is there on GPUs and TPUs alone: on
CPUs XLA does not move that sum.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.faults.finders.table_sums import loops_of_tables
from jaxmem.faults.table import SUMS_OF_TABLES
from jaxmem.faults.versions import standing
from jaxmem.ir.other_forms import in_other_forms

WHAT_IS_DONE = (
    "the gradient of a table that a loop adds up is kept apart from the sum by a "
    f"barrier: this version of XLA would lose rows of it ({SUMS_OF_TABLES.report})"
)


def with_sums_apart(closed, sharded: bool):
    """The jaxpr with such sums in the other form; itself where there are none.

    Args:
      closed: the jaxpr of a step.
      sharded: whether it may run on several devices: on one nothing is lost.
    """
    scatters = _lost(closed, sharded)
    forms = {key: _added if direct else _kept_apart for key, direct in scatters.items()}
    return in_other_forms(closed, forms) if forms else closed


def has_sums_apart(closed, sharded: bool) -> bool:
    """Whether `with_sums_apart` changes a step."""
    return bool(_lost(closed, sharded))


def devices_of(shardings: Iterable[Any]) -> int:
    """Over how many devices arrays are sharded, as their shardings say."""
    meshes = (getattr(s, "mesh", None) for s in shardings if s is not None)
    return max((m.size for m in meshes if m is not None), default=1)


def _lost(closed, sharded: bool) -> dict[int, bool]:
    """The scatters, by identity, and whether the step adds them into the sum itself."""
    hit = (standing(SUMS_OF_TABLES, p) == "affected" for p in SUMS_OF_TABLES.platforms)
    if not sharded or not any(hit):
        return {}
    return {id(eqn): direct for eqn, direct in loops_of_tables(closed)}


def _kept_apart(eqn, args: list) -> list[Any]:
    """A scatter-add into zeros, behind a barrier."""
    (table,) = _compat.bind(eqn, args)
    hold, same = lax.optimization_barrier, lambda x: x
    choose = partial(lax.platform_dependent, default=same)
    return [choose(table, cuda=hold, rocm=hold, tpu=hold)]


def _added(eqn, args: list) -> list[Any]:
    """A scatter-add into the sum so far, as one into zeros that is added to it."""
    total, *rows = args
    (apart,) = _kept_apart(eqn, [jnp.zeros_like(total), *rows])
    return [total + apart]
