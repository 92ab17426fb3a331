"""A plan as HTML: a headline, what was done, both reports, the table, remarks."""

from dataclasses import replace

from jaxmem.pages import body_of, page
from jaxmem.pages.markup import Markup, together
from jaxmem.scheduling.plan import table, text
from jaxmem.scheduling.plan.data import PlanData

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
