"""Qwen3-8B from 4,096 tokens to a million: what a step takes, and what was typed.

    python -m benchmarks.long_context              # every row
    python -m benchmarks.long_context 1,048,576    # rows that have the word

One sequence a step, on one H100 or on eight, cuDNN's attention, all parameters trained.
On one H100 parameters are in bfloat16 with stochastic rounding and moments in 8 bits,
on eight both are in float32. GB (10^9) of the peak of one device; "plain" is the model
under `jax.jit`. Tokens a second are those of one device, by the predicted time.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jaxmem
from benchmarks._common import publish_some
from benchmarks.published_rows import H100, gigabytes, typed
from benchmarks.steps.long_context import AXIS, QWEN3_8B, step_of
from benchmarks.steps.tiles import BF16, Made
from jaxmem.optim import adamw, stochastic_rounding

COLUMNS = (
    *("tokens", "H100s", "plain GB", "plain: predicted ms", "GB", "predicted ms"),
    *("host GB", "tokens a second", "typed", "compiles", "search s"),
)


class Row(NamedTuple):
    """A length, the chips that it runs on, and what `jaxmem.schedule` is given."""

    tokens: int
    devices: int
    budget: str | None
    how: Mapping[str, Any]

    def made(self) -> Made:
        mesh = jaxmem.target_mesh(H100, (self.devices,), (AXIS,))
        if self.devices > 1:
            return step_of(QWEN3_8B, mesh, self.tokens)
        tx = stochastic_rounding(adamw(1e-5))
        return step_of(QWEN3_8B, mesh, self.tokens, tx=tx, dtype=BF16)


HOST: Mapping[str, Any] = {"offload": True, "host_budget": "160GB"}
ROWS = (
    Row(4_096, 1, None, {}),
    Row(32_768, 1, "72GB", {}),
    Row(131_072, 1, "72GB", HOST),
    Row(262_144, 8, "72GB", {}),
    Row(1_048_576, 8, "72GB", HOST),
)


def measured(row: Row) -> Sequence:
    made = row.made()
    how = {"target": H100, "donate_argnums": made.donate, "progress": False}
    plan = jaxmem.schedule(made.step, row.budget, **how, **row.how).plan(*made.args)
    plain, ours = plan.plain, plan.scheduled
    assert plain is not None and ours is not None
    (size, ms, host), before = gigabytes(ours), gigabytes(plain)[:2]
    rate = row.tokens / row.devices / (ms / 1e3)
    how_often = len(plan.tried), plan.planning_seconds
    return *before, size, ms, host, rate, typed(row.budget, row.how), *how_often


def main() -> None:
    cases = {
        (f"{row.tokens:,}", str(row.devices)): functools.partial(measured, row)
        for row in ROWS
    }
    publish_some("long_context", COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
