"""A published figure, and what we set beside it.

A claim whose figure needs a device that nobody lent has no measure, and says so. Where
the paper's own work is not known to the letter, or cannot be had, `differs` says what
is other in ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks._common import MS
from benchmarks.figures.rows import row

Side = tuple[float, float | None]  # bytes or a count, and predicted ms of a step
Pair = tuple[Side, Side]
NO_DEVICE = "No step was timed on a GPU or TPU."


@dataclass(frozen=True)
class Measured:
    """Both sides of a row of ours.

    Attributes:
      unit: of both.
      before: as anyone writes it in JAX.
      after: with jaxmem.
      commit: at which they were measured, if not now.
      ms: predicted milliseconds of a step, before and after; None: it is of no step, or
        of steps on two chips.
    """

    unit: str
    before: float
    after: float
    commit: str = ""
    ms: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Claim:
    """A published figure, and what we have beside it.

    Attributes:
      source: the paper or project, as people call it.
      link: where the figure stands.
      says: what it is of.
      unit: of the published figures; "%" where only a share was published.
      before: without what the paper proposes.
      after: with it.
      work: what we compile or take instead, with the chip.
      differs: why the two are not, or not wholly, comparable.
      measure: both figures of ours; None: there are none.
      more: whether more is better, as of batches.
    """

    source: str
    link: str
    says: str
    unit: str
    before: float | None
    after: float | None
    work: str
    differs: str = ""
    measure: Callable[[], Measured] | None = None
    more: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.says

    def gain(self, before: float | None, after: float | None) -> float | None:
        """How many times less, or more where more is better."""
        if before is None or after is None:
            return None
        return after / before if self.more else before / after


def compiled(unit: str, run: Callable[..., Pair], *args) -> Callable[[], Measured]:
    """Both sides by compiling them now."""

    def measure() -> Measured:
        sizes, ms = zip(*run(*args), strict=True)
        return Measured(unit, *sizes, ms=ms)

    return measure


def of_file(
    unit: str,
    name: str,
    column: str,
    before: Mapping[str, str],
    after: Mapping[str, str],
    after_column: str | None = None,
    ms: tuple[str, str] | None = None,
) -> Callable[[], Measured]:
    """Both sides from a file of results/, which its own command wrote.

    `ms`: its columns of predicted milliseconds, before and after; files of an older jax
    do not have them.
    """

    def measure() -> Measured:
        first, last = row(name, before), row(name, after)
        figures = float(first[column]), float(last[after_column or column])
        columns = zip((first, last), ms or ("", ""), strict=True)
        took = (float(r[column]) if r.get(column) else None for r, column in columns)
        return Measured(unit, *figures, last["commit"], tuple(took))

    return measure


ARXIV = "https://arxiv.org/abs/"
BOTH_MS = (MS, MS)  # of files that have a row for each side
