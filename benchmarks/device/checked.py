"""Checked: a step that is timed gives what its plain form gives on this device.

By `jaxmem.check`, whose tolerances are what roundings do to the plain form. Arguments
are those that are timed, with smaller floats: of normal weights, activations are so
large that a net passes nothing on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device import on_device
from benchmarks.kernel_cases import filled
from jaxmem.checking import StepComparison, compared

_SCALE = 0.05


@dataclass(frozen=True)
class Checks:
    """The checks of several steps beside one plain form, which is run once."""

    comparison: StepComparison

    @classmethod
    def beside(cls, plain: Callable, args: tuple, carried: int = 0) -> "Checks":
        """`args` may be shapes; the first `carried` of them are results, too."""
        made = jax.tree.map(_smaller, on_device.possible(filled(args, on_device.WORDS)))
        carry = tuple(range(carried))
        return cls(StepComparison(plain, (made, {}), (), 2 if carried else 1, carry))

    def row(self, step: Callable, exact: bool = True) -> dict[str, Any]:
        """A column of a step's row; RuntimeError where a result differs.

        Not `exact`: an op of the step states an error of its own, as the derivative of
        gelu that is recovered from its output; the ratio is told, and may be above 1.
        """
        try:
            report = compared(step, self.comparison)
        except jax.errors.JaxRuntimeError as error:
            if not on_device.out_of_memory(error):
                raise
            return {"checked": "no room on this device"}
        if exact and not report.passed:
            raise RuntimeError(str(report))
        return {"checked": max(leaf.ratio for leaf in report.leaves)}


def _smaller(x: jax.Array) -> jax.Array:
    return _SCALE * x if jnp.issubdtype(x.dtype, jnp.floating) else x
