"""A plan as HTML (headline, what was done, reports, table, remarks) and as picture."""

from dataclasses import replace
from os import PathLike

from jaxmem.memory.report import plot_both
from jaxmem.pages import body_of, page
from jaxmem.pages.markup import Markup, together
from jaxmem.scheduling.plan import table, text
from jaxmem.scheduling.plan.data import PlanData
from jaxmem.scheduling.plan.table import regions

_SHOWN = 1000  # rows


def as_html(plan: PlanData) -> Markup:
    """The body of a plan's page."""
    rows = [*table.rows(plan)]
    if plan.plain is None or plan.scheduled is None:
        both = ""
    else:
        compared = plan.plain.compare(plan.scheduled)
        both = body_of(replace(compared, budget=plan.budget))
    return together(
        page.headline(text.headline(plan), plan.budget_met),
        page.lines("What was done", text.done(plan)),
        both,
        page.table(table.HEAD, rows[:_SHOWN], numbers=[1]),
        page.lines("In short", table.below(plan, len(rows), _SHOWN)),
    )


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
