"""What the passes that recompute residuals of scans have in common."""

from typing import Any, Protocol, TypeVar

from jaxmem.scheduling._pass import C
from jaxmem.scheduling._searched import Searched
from jaxmem.scheduling.plan.rows import Description, recomputed, residual
from jaxmem.scheduling.recompute.pairs import Pair


class RecomputingRewrite(Protocol):
    """A rewrite that tells what it saves, and what it recomputes."""

    @property
    def recomputed(self) -> list[tuple[Any, int]]: ...

    @property
    def offloaded_bytes(self) -> int: ...

    @property
    def pair(self) -> Pair: ...

    def described(self) -> Any: ...


MORE = "more is recomputed"  # what a remedy says of it

R = TypeVar("R", bound=RecomputingRewrite)


class Recomputation(Searched[C, R]):
    """Residuals of a pair of scans are recomputed, pair after pair."""

    repeats = True

    def describe(self, rewrite: R, target: str) -> Description:
        # stacks of a scan that was taken apart exist for one iteration at a time
        rows = () if rewrite.pair.of_parts else rewrite.described()
        return Description(
            residuals=tuple(residual(*row) for row in rows),
            recomputed=recomputed(rewrite.recomputed, target, rewrite.pair.inside()),
            offloaded_bytes=rewrite.offloaded_bytes,
        )
