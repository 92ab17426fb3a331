"""The picture of a plan: bytes over the compiled schedule, before and after."""

from os import PathLike

from jaxmem.memory.report import plot_both
from jaxmem.scheduling.plan.data import PlanData
from jaxmem.scheduling.plan.table import regions

_REGIONS = 6  # named below the picture


def plot_plan(plan: PlanData, path: str | PathLike[str]) -> None:
    """Draws it; a plan of which nothing was compiled has none.

    Raises:
      ValueError: nothing was compiled.
    """
    if plan.plain is None or plan.scheduled is None:
        why = "name a target, as in plan(target='h100')"
        if plan.target:
            why = f"the step does not fit {plan.target}, which has compiled nothing"
        raise ValueError(f"nothing to draw: {why}")
    below = regions(plan.tiles[:_REGIONS])
    plot_both(plan.plain, plan.scheduled, path, below, plan.budget)
