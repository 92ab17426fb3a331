"""A plan as JSON text, and back: the rows, the choice, and two numbers for readers."""

import dataclasses
import json
from typing import Any, TypeVar

from jaxmem._checks import from_plain
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import CONFIGS
from jaxmem.scheduling.plan.data import PlanData

# properties that the JSON has as well
_DERIVED = ("lower_bound", "budget_met")
P = TypeVar("P", bound=PlanData)


def as_json(plan: PlanData, indent: int | None = None) -> str:
    """The JSON text of a plan."""
    fields = dataclasses.asdict(plan)
    fields |= {name: getattr(plan, name) for name in _DERIVED}
    # a choice is written pass by pass, and without what is as by default
    fields["choice"] = plan.choice.to_dict()
    for row, trial in zip(fields["tried"], plan.tried, strict=True):
        row["choice"] = trial.choice.to_dict()
    return json.dumps(fields, indent=indent)


def plan_of(kind: type[P], text: str) -> P:
    """The plan, of class `kind`, that `as_json` wrote.

    Raises:
      ValueError: the text is not a plan.
    """
    try:
        plain = json.loads(text)
        if isinstance(plain, dict):
            plain = {k: v for k, v in plain.items() if k not in _DERIVED}
        return from_plain(kind, plain, "plan", {Choice: _choice})
    except (TypeError, ValueError) as error:
        raise ValueError(f"text: not a plan: {error}") from error


def _choice(plain: Any, name: str) -> Choice:
    return Choice.from_dict(plain, CONFIGS, name)
