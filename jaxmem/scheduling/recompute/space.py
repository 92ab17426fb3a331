"""What can be varied in a step: loops, or else lists of equations outside of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.chips import is_gpu, is_timed, rates_of
from jaxmem.cost.host_traffic import waiting_for_host
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._searched import SearchedStep
from jaxmem.scheduling.recompute.branches import InBranches, in_parts
from jaxmem.scheduling.recompute.pairs import Pair, pairs
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.segments_rewrite import InSegments
from jaxmem.scheduling.recompute.unrolled import Unrolled, has_both_passes
from jaxmem.scheduling.recompute.unrolled_cut import unrolled
from jaxmem.scheduling.search.traced_step import TracedStep


@dataclass(frozen=True)
class SearchSpace:
    """What can be varied in a space."""

    scans: Sequence[Pair]  # its pairs of forward and backward scans
    # lists of equations with a forward and a backward pass; none where most of what is
    # kept is kept by scans
    unrolled: Sequence[Pair]
    target: str  # the chip whose rates count
    named: bool = False  # whether only what has a `checkpoint_name` can be kept
    offload: float = 0  # bytes of what scans keep that may wait in the host's memory
    # seconds in which the step waits for the link to the host anyway, as for moments
    # that lie there: so much recomputation takes no longer
    waiting: float = 0.0
    branches: Sequence[
        Pair
    ] = ()  # what its `cond`s leave for those of the backward pass
    reductions: bool = False  # as `Recompute.reductions`
    layer_inputs: int = 0  # as `Unrolled.layer_inputs`

    @property
    def is_unrolled(self) -> bool:
        """Whether equations outside of loops are recomputed."""
        return bool(self.unrolled)

    @property
    def before_sequences(self) -> bool:
        """Whether a search asks for recomputed layers first, for sequences last."""
        # XLA:GPU fuses most, and a sequence has more barriers than a recomputed layer
        return self.is_unrolled and is_gpu(self.target)

    def longer(self, seconds: float, less: int) -> float:
        """What a step takes longer than one that keeps all.

        Args:
          seconds: of recomputation.
          less: bytes that are not kept, and so neither written nor read.
        """
        # a list outside of loops makes its arrays anyway, kept or not
        moved = 0.0 if self.is_unrolled else self.moved(less)
        return max(0.0, seconds - self.waiting) - moved

    def moved(self, size: int) -> float:
        """Seconds in which so many bytes are written, and read once."""
        # where no seconds of a compiled step are predicted, nothing would confirm it
        known = is_timed(self.target)
        return 2 * size / rates_of(self.target).bandwidth if known else 0.0

    @property
    def layers(self) -> int:
        """Of the longest scans; 1 where there are none, or all must do the same."""
        if self.named:
            return 1
        return max((pair.length for pair in self.scans), default=1)


def scans_in(step: Rewritten) -> tuple[Pair, ...]:
    """The pairs of scans as they are before anything is recomputed."""
    levels = step.entered(InSegments)
    return tuple(p for level in levels for p in pairs(level.jaxpr, level.shardings))


def branches_in(step: Rewritten) -> tuple[Pair, ...]:
    """What forward `cond`s leave for backward ones, all being kept."""
    found = (level.looked_at(in_parts) for level in step.entered(InBranches))
    return tuple(pair for both in found if both is not None for pair in both[1:])


def lists_in(step: Rewritten) -> tuple[Any, ...]:
    """The lists of equations that may hold both passes, before the same.

    Each with how its inputs are sharded over devices.
    """
    both = filter(has_both_passes, step.entered(Unrolled))
    return tuple((level.jaxpr, level.shardings) for level in both)


def space_in(
    step: Rewritten, named: bool = False, offload: float = 0, waiting: float = 0.0
) -> SearchSpace:
    """What can be varied in a step, of which nothing is recomputed yet."""
    lists = () if named else lists_in(step)
    how = named, offload, waiting, branches_in(step)
    return space_of(scans_in(step), lists, step.target, *how)


def space_of_step(step: SearchedStep) -> SearchSpace:
    """What a search can vary in its step."""
    key = "space", step.named, step.offload
    return step.traced.known.get(key, (), lambda: _space_of_step(step))


def _space_of_step(step: SearchedStep) -> SearchSpace:
    choice = Choice(step.target, (Recompute(named=step.named),))
    first = step.traced.rewritten(choice)
    about = first.unordered, rates_of(step.target), step.traced.shardings
    return space_in(first, step.named, step.offload, waiting_for_host(*about))


def space_at_sight(step: TracedStep) -> SearchSpace:
    """What may be varied in a step, before its operations are put in order."""
    first = step.rewritten(Choice(step.target), ordered=False)
    find = lambda: space_in(first)
    return step.known.get("space at sight", (first.jaxpr,), find)


def space_of(
    scans: Sequence[Pair],
    lists: Sequence[Any],
    target: str,
    named: bool = False,
    offload: float = 0,
    waiting: float = 0.0,
    branches: Sequence[Pair] = (),
) -> SearchSpace:
    """What can be varied: loops, or else what is outside of them."""
    # `lists`: closed jaxprs whose equations, outside of loops, may hold both passes,
    # and how their inputs are sharded over devices.
    found = (unrolled(closed, given) for closed, given in lists)
    written_out = [pair for pair in found if pair is not None]
    stacked = sum(pair.length * pair.bytes for pair in scans)
    few = sum(pair.bytes for pair in written_out) <= stacked
    free = () if few else written_out
    branches = () if named else branches  # names are looked for in scans
    # XLA:GPU has one kernel for a whole softmax, its sums included
    sums = bool(free) and is_gpu(target)
    return SearchSpace(scans, free, target, named, offload, waiting, branches, sums)
