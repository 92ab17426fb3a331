"""A step traced once, to be compiled under several choices."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem.chips import rates_of
from jaxmem.cost.equations import product_seconds, seconds
from jaxmem.frameworks import Place
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import Aliases
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import InputShardings
from jaxmem.memory import Pending, begin
from jaxmem.scheduling._arguments import jit_with
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.predict.operations import (
    as_compiled,
    compiled_peak,
    operations_of,
)
from jaxmem.scheduling.predict.tpu import is_tpu

# Of the seconds of the step, or of its own products: less is not worth another compile.
ENOUGH = 0.01
# How far a predicted peak may be above the compiled one: that of one step in 88 of
# `benchmarks.predict` is further above, by 0.6 %.
OFF = 1.1


@dataclass(frozen=True)
class TracedStep:
    # under a choice; with `ordered=False` as it is before operations are put in order
    rewritten: Callable[..., Rewritten]
    aliases: Callable[[Any], Aliases]
    out_tree: Any
    given: Callable
    donated: tuple[Place, ...]
    args: tuple
    kwargs: dict[str, Any]
    target: str
    fingerprint: str
    compiler_options: dict[str, Any] | None = None
    known: Remembered = field(default_factory=Remembered)  # of its lists of equations
    shardings: InputShardings | None = None  # how its inputs are sharded over devices

    def predicted(self, choice: Choice) -> int:
        """Bytes of the peak under a choice, without arguments, in the order of XLA."""
        return self.sizes_of(self.rewritten(choice, ordered=False).jaxpr)[1]

    def peak(self, choice: Choice) -> int:
        """The same with the arguments, as a compiler counts it."""
        return self.predicted(choice) + self.argument_bytes()

    def argument_bytes(self) -> int:
        """Bytes of what is there before the step."""
        plain = Choice(self.target)
        return self.sizes_of(self.rewritten(plain, ordered=False).jaxpr)[0]

    def sizes_of(self, jaxpr) -> tuple[int, int]:
        """Bytes of the arguments, and of the predicted peak without them."""
        return self.known.get("sizes", (jaxpr,), lambda: self._sizes(jaxpr))

    def _sizes(self, jaxpr) -> tuple[int, int]:
        tpu = is_tpu(self.target)
        ops = operations_of(
            jaxpr, self.aliases(jaxpr), tpu=tpu, shardings=self.shardings
        )
        there = ops.graph.bytes_of(ops.graph.arguments)
        return there, compiled_peak(as_compiled(ops, tpu))

    def begin(self, choice: Choice, **how: Any) -> Pending:
        """Starts its compile; `how`: as for `jaxmem.memory.begin`."""
        rewritten = self.rewritten(choice)

        # the same program as `Scheduled` makes, its name included: compiled once
        @functools.wraps(self.given)
        def step(*args, **kwargs):
            leaves = filter(jaxprs.is_array, jax.tree.leaves((args, kwargs)))
            return jax.tree.unflatten(self.out_tree, rewritten.run(list(leaves)))

        jitted = jit_with(step, self.donated)
        how |= {"target": self.target, "compiler_options": self.compiler_options}
        how["advised"] = choice.unchanged
        return begin(jitted, self.args, self.kwargs, **how)

    def slack(self) -> float:
        """Seconds of recomputation that are not worth another compile."""
        return ENOUGH * self.own_seconds()

    def own_seconds(self) -> float:
        """Seconds of the original step's products; of all if it has none."""
        jaxpr = self.rewritten(Choice(self.target, unchanged=True)).jaxpr
        eqns = jaxprs.split(jaxpr)[0].eqns
        # Of products alone where there are any: what else a step takes depends on how
        # the compiler fuses it, and would hide products that are computed twice.
        about = rates_of(self.target), shardings_in(jaxpr, self.shardings)
        products = sum(product_seconds(eqn, *about) for eqn in eqns)
        return products or sum(seconds(eqn, *about) or 0.0 for eqn in eqns)
