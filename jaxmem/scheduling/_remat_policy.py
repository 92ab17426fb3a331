"""The choice for a budget as names, for steps that use `jax.checkpoint` themselves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem._checks import (
    check_bool,
    check_callable,
    check_donated,
    check_static,
    wrong_type,
)
from jaxmem.memory import MemoryReport, Target
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._options import Options, check_seconds, room_and_target
from jaxmem.scheduling._scheduled import Scheduled
from jaxmem.scheduling.recompute.minimum_cut import price_at
from jaxmem.scheduling.recompute.pairs import Pair, cut_by_names, named
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import scans_in


@dataclass(frozen=True)
class RematPolicy:
    """A policy for `jax.checkpoint`: what to keep, by `checkpoint_name`.

    Attributes:
      names: what is kept.
      dropped: the other names of the step.
      report: the compiled step with this choice; by which the budget was met.
    """

    names: tuple[str, ...]
    dropped: tuple[str, ...]
    report: MemoryReport | None = field(default=None, compare=False, repr=False)

    def __call__(self, prim, *avals: Any, **params: Any) -> Any:
        """As `jax.checkpoint_policies.save_only_these_names(*names)`."""
        policy = jax.checkpoint_policies.save_only_these_names(*self.names)
        return policy(prim, *avals, **params)


def remat_policy(
    fn: Callable,
    budget: int | str,
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    search_seconds: float | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> RematPolicy:
    """Chooses which named values of a step's layers to save, so that it fits a budget.

    For steps that should not be rewritten: the layers, under `jax.lax.scan`, carry
    `jax.ad_checkpoint.checkpoint_name` where a value may be kept, and are wrapped in
    `jax.checkpoint(layer, policy=policy, prevent_cse=False)` with what this returns.
    `jaxmem.schedule` needs neither names nor wrapping, and has more to choose from:
    it keeps values that have no name, and can treat layers differently.

    Args:
      fn: the step with its gradient, its layers not wrapped in `jax.checkpoint`.
      budget: the peak that the compiled step may have on one device, arguments
        included, in bytes or as text like "14GiB".
      *args: arrays or `jax.ShapeDtypeStruct`.
      target: the chip that the budget is for; by default this process's first device.
      donate_argnums: positional arguments whose buffers the step may reuse.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      search_seconds: after which the best that fits so far is taken; by default the
        search goes on until nothing better is likely.
      progress: show a progress bar, where the output is a terminal.
      **kwargs: the step's keyword arguments.

    Returns:
      A `RematPolicy`.

    Raises:
      TypeError: `search_seconds` is no number.
      ValueError: no scanned layer has a name; the budget is no size, or not reachable
        with these names (`BudgetError`, which gives the lowest peak found and its
        largest buffers); `search_seconds` is not above 0.
      TimeoutError: nothing that fits was found in `search_seconds`.
      RuntimeError: this installation cannot compile for the target.

    Example::

      policy = jaxmem.remat_policy(step, "14GiB", state, batch, target="h100")
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    """
    check_callable("fn", fn)
    check_bool("progress", progress)
    donated = check_donated(donate_argnums, donate_argnames)
    static = check_static(static_argnums, static_argnames)
    if budget is None:
        raise wrong_type("budget", budget, "bytes, as a number or as text like '14GiB'")
    room, chip = room_and_target(budget, target)
    check_seconds(search_seconds)
    how = {"named": True, "search_seconds": search_seconds}
    options = Options(donated or None, static, None, room, chip, progress, **how)
    step = Scheduled(fn, options)
    choice = Choice(configs=(Recompute(named=True),))
    names = _names(scans_in(step.rewritten(choice, *args, **kwargs)))
    if not names:
        raise ValueError(
            "fn: no value of its scanned layers has a name: put "
            "jax.ad_checkpoint.checkpoint_name(x, 'name') where a value may be kept, "
            "or use jaxmem.schedule, which needs none"
        )
    found = step.find(args, kwargs)
    assert found.rewritten is not None
    price = price_at(found.choice.get(Recompute).rate, found.choice.target)
    kept = {
        named(pair).get(v)
        for pair in scans_in(found.rewritten)
        for v in cut_by_names(pair, price).variables
    }
    chosen = names & kept
    return RematPolicy(
        tuple(sorted(chosen)), tuple(sorted(names - chosen)), found.report
    )


def _names(pairs: Iterable[Pair]) -> set[str]:
    return {name for pair in pairs for name in named(pair).values()}
