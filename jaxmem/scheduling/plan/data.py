"""What a plan holds, and the numbers that follow from it."""

from dataclasses import dataclass
from typing import Annotated

from jaxmem._checks import OneOf
from jaxmem.chips import CHIPS, rates_of
from jaxmem.memory import MemoryReport
from jaxmem.pages import SavedResult
from jaxmem.scheduling._choice import NO_CHOICE, Choice, Count
from jaxmem.scheduling.plan.rows import (
    Gradient,
    RecomputedOperation,
    RecomputedResidual,
    TiledRegion,
)
from jaxmem.scheduling.search.result import Trial

Axes = tuple[tuple[str, int], ...]  # of a mesh: names and sizes


@dataclass(frozen=True)
class PlanData(SavedResult):
    """The fields of a `Plan`, which tells what they are, and sums of them."""

    gradients: tuple[Gradient, ...]
    residuals: tuple[RecomputedResidual, ...]
    recomputed: tuple[RecomputedOperation, ...] = ()
    choice: Choice = NO_CHOICE
    budget: Count | None = None
    tried: tuple[Trial, ...] = ()
    planning_seconds: float = 0.0
    plain: MemoryReport | None = None
    scheduled: MemoryReport | None = None
    predicted_bytes: int = 0
    fingerprint: str = ""
    offloaded_bytes: int = 0
    barriers: int = 0
    notes: tuple[str, ...] = ()
    jax_version: str = ""
    target: Annotated[str, OneOf(("", *CHIPS))] = ""
    host_traffic_bytes: int = 0
    tiles: tuple[TiledRegion, ...] = ()
    mesh: Axes = ()

    @property
    def lower_bound(self) -> int:
        """Bytes of arguments and results, as compiled, which no plan can go below.

        0 where nothing was compiled: what XLA makes of the rest its graph does not say.
        """
        report = self.scheduled
        return 0 if report is None else report.peak_bytes - report.temp_bytes

    @property
    def budget_met(self) -> bool | None:
        """Whether the compiled peak is within the budget; None where either is not."""
        if self.budget is None or self.scheduled is None:
            return None
        return self.scheduled.peak_bytes <= self.budget

    @property
    def host_seconds(self) -> float:
        """Seconds that the link to the host is busy, by the rate of the target."""
        return self.host_traffic_bytes / rates_of(self._chip).host

    @property
    def _chip(self) -> str:
        """What the plan was compiled for; else what the search assumed."""
        return self.target or self.choice.target

    @property
    def released_bytes(self) -> int:
        """Bytes of stacked gradients that are never made."""
        return sum(g.bytes for g in self.gradients if g.released)

    @property
    def kept_bytes(self) -> int:
        """Bytes of stacked gradients that are still made."""
        return sum(g.bytes for g in self.gradients if not g.released)

    @property
    def residual_bytes(self) -> int:
        """Bytes of residuals that are no longer kept, less what is kept instead."""
        return sum(r.bytes for r in self.residuals)

    @property
    def recomputed_flops(self) -> float:
        """Flops of matmuls and convolutions that are recomputed."""
        return sum(r.flops for r in self.recomputed)

    @property
    def recomputed_seconds(self) -> float:
        """Seconds that recomputation takes, by the rates of the target."""
        return sum(r.seconds for r in self.recomputed)

    @property
    def tile_seconds(self) -> float:
        """Seconds that tiles take longer, by the rates of the target."""
        return sum(r.seconds for r in self.tiles)
