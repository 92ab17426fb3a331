"""A plan as JSON text, and back: the rows, the choice, and two numbers for readers."""

import dataclasses
import json
from typing import Any, TypeVar

from jaxmem._checks import from_plain
from jaxmem.chips import version_of
from jaxmem.memory import MemoryReport
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import CONFIGS
from jaxmem.scheduling.plan.data import PlanData

# properties that the JSON has as well
_DERIVED = ("lower_bound", "budget_met")
_VERSION = "jaxmem_version"  # of the jaxmem that wrote the text
_REPORTS = ("plain", "scheduled")
P = TypeVar("P", bound=PlanData)


def as_json(plan: PlanData, indent: int | None = None) -> str:
    """The JSON text of a plan."""
    told = {name: _as_told(getattr(plan, name)) for name in _REPORTS}
    fields = dataclasses.asdict(dataclasses.replace(plan, **told))
    fields |= {name: getattr(plan, name) for name in _DERIVED}
    fields[_VERSION] = version_of("jaxmem")
    # a choice is written pass by pass, and without what is as by default
    fields["choice"] = plan.choice.to_dict()
    for row, trial in zip(fields["tried"], plan.tried, strict=True):
        row["choice"] = trial.choice.to_dict()
    return json.dumps(fields, indent=indent)


def _as_told(report: MemoryReport | None) -> MemoryReport | None:
    """A report with its advice if somebody has read it.

    To ask for advice takes about as long as a search.
    """
    if report is None:
        return None
    return dataclasses.replace(report, advice=vars(report).get("advice", ()))


def plan_of(kind: type[P], text: str) -> P:
    """The plan, of class `kind`, that `as_json` wrote.

    Raises:
      ValueError: the text is not a plan, or one that this version cannot read; names
        the version of jaxmem that wrote it.
    """
    writer = ""
    try:
        plain = json.loads(text)
        if isinstance(plain, dict):
            writer = _other_writer(plain.get(_VERSION))
            left_out = (*_DERIVED, _VERSION)
            plain = {k: v for k, v in plain.items() if k not in left_out}
        return from_plain(kind, plain, "plan", {Choice: _choice})
    except (TypeError, ValueError) as error:
        raise ValueError(f"text: not a plan: {error}{writer}") from error


def _other_writer(version: Any) -> str:
    """For a message: which jaxmem wrote a plan; empty where it was this one."""
    own = version_of("jaxmem")
    if version == own:
        return ""
    by = "it names no version, as plans of jaxmem 0.1.0 do"
    by = by if version is None else f"jaxmem {version} wrote it"
    return f" ({by}; this is jaxmem {own})"


def _choice(plain: Any, name: str) -> Choice:
    return Choice.from_dict(plain, CONFIGS, name)
