"""How a search ended, as another process can read it."""

import functools
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmem.memory.compile import cache, caller_flags
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.plan.fingerprint import fingerprint
from jaxmem.scheduling.search.result import BudgetError, SearchResult


@dataclass(frozen=True)
class SearchOutcome:
    """A result, or that the budget is out of reach."""

    result: SearchResult | None  # None where the budget is out of reach
    message: str = ""  # of the error, then
    least: int | None = None  # bytes, as `BudgetError` has them
    rewritten: str = ""  # fingerprint of the step as the choice makes it

    @property
    def is_final(self) -> bool:
        """Whether another search would find the same."""
        return self.result is None or not self.result.stopped

    def get(self) -> SearchResult:
        """The result; raises `BudgetError` where there is none."""
        if self.result is None:
            raise BudgetError(self.message, self.least)
        return self.result

    def to_bytes(self, report: bool = True) -> bytes:
        """For `from_bytes`; with the compiler's report of what was chosen, or not."""
        result = self.result
        if result is not None:
            tried = tuple(replace(t, report=None) for t in result.tried)
            kept = result.report if report else None
            result = replace(result, tried=tried, rewritten=None, report=kept)
        return pickle.dumps(replace(self, result=result), protocol=5)

    @classmethod
    def from_bytes(
        cls, data: bytes, rewritten: Callable[[Choice], Rewritten]
    ) -> "SearchOutcome | None":
        """What `to_bytes` gave; None where the choice makes another step here.

        Args:
          data: from `to_bytes`, of jaxmem alone: it is unpickled.
          rewritten: makes the step under a choice.
        """
        outcome = pickle.loads(data)
        if outcome.result is None:
            return outcome
        here = rewritten(outcome.result.choice)
        if fingerprint(here.jaxpr) != outcome.rewritten:
            return None
        return replace(outcome, result=replace(outcome.result, rewritten=here))


def outcome_of(search: Callable[[], SearchResult]) -> SearchOutcome:
    """Runs a search; a budget out of reach is an outcome too."""
    try:
        result = search()
    except BudgetError as error:
        return SearchOutcome(None, str(error), error.least)
    assert result.rewritten is not None
    return SearchOutcome(result, rewritten=fingerprint(result.rewritten.jaxpr))


def search_key(*values: Any) -> str:
    """What a search depends on besides these: the compiler's versions and this code.

    Args:
      *values: the step and what is asked for, with a `repr` that is the same in every
        process.
    """
    return cache.key_of("search", _code(), caller_flags(), *values)


@functools.cache
def _code() -> str:
    """A hash of this package: other code may find another choice."""
    package = Path(__file__).parents[2]
    digest: Any = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
