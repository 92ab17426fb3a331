"""Checked: steps that are timed give what their plain form gives on this device.

By `jaxmem.check`, whose tolerances are what roundings do to the plain form. Arguments
are those that are timed, with smaller floats: of normal weights, activations are so
large that a net passes nothing on. Jobs of their own, so that no timing waits for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import blocks
from benchmarks.device import on_device, steps, true
from benchmarks.device.job import Job, Rows
from benchmarks.steps.kernels import filled
from jaxmem.checking import StepComparison, compared

_SCALE = 0.05


def jobs() -> Iterator[Job]:
    for name in steps.MODELS:
        yield Job(f"checked: {name}", partial(model, name), seconds=200, value=350)
    yield Job("checked: micro-batches", micro_batches, seconds=150, value=240)


def model(name: str, small: bool) -> Rows:
    """A model's gradient under stock policies, substituted, and scheduled."""
    plain, args = steps.gradient(name, small)
    beside = Checks.beside(plain, args)
    for policy, rule in blocks.POLICIES.items():
        if rule is not None:
            step, _ = steps.gradient(name, small, rule)
            yield {"side": policy, **beside.row(step)}
    for what in steps.OURS:
        step, _ = steps.gradient(name, small, substituted="substitute" in what)
        if "schedule" in what:
            step = jaxmem.schedule(step, donate_argnums=())
        yield {"side": what, **beside.row(step, exact="substitute" not in what)}


def micro_batches(small: bool) -> Rows:
    """The two forms of Adam; AdamA is another rule.

    By hand with the micro-batches that `microbatch` makes, of every fourth example: of
    others, dropout masks fall on other examples, which is more than rounding.
    """
    plain, same, _ = true.VARIANTS
    step, args, carried = true.accumulated(plain, small)
    other, *_ = true.accumulated(same, small)

    def by_hand(params, state, tokens, key):
        parts = tokens.reshape(-1, true.MICRO_BATCHES, tokens.shape[-1]).swapaxes(0, 1)
        return step(params, state, parts.reshape(tokens.shape), key)[:carried]

    # what they return beside the state, each names in its own way
    beside = Checks.beside(by_hand, args, carried)
    yield {"side": same, **beside.row(lambda *args: other(*args)[:carried])}


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

        Not `exact`: the ratio is told, and may be above 1, as where an op of the step
        states an error of its own, such as the derivative of gelu from its output.
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
