"""The pass that puts a head with its loss in loops over the vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.scheduling._choice import Bytes, Choice, Count
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._searched import Front, SearchBound, Searched, SearchedStep
from jaxmem.scheduling.plan.rows import Description, TiledRegion
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.tiling.prepared import prepared, with_whole_barriers
from jaxmem.scheduling.tiling.tiled_front import (
    UNCERTAIN,
    Room,
    candidates_in_tiles,
    clearly_smaller,
    in_tiles,
)
from jaxmem.scheduling.tiling.tiles import tiles_to
from jaxmem.scheduling.tiling.vocabulary import cut_axes
from jaxmem.scheduling.tiling.vocabulary_levels import loops_of
from jaxmem.scheduling.tiling.vocabulary_loop import in_blocks
from jaxmem.scheduling.tiling.vocabulary_plan import VocabularyLoops


@dataclass(frozen=True)
class VocabularyTiles:
    """Whether heads are computed block by block of the vocabulary.

    Attributes:
      limit: bytes that a head with its loss and their gradients may hold at a time; one
        that holds more is put in loops over the least number of blocks that holds less,
        or over the number that holds least. None: none is.
      n: the number of blocks, whatever they hold.
    """

    name: ClassVar[str] = "vocabulary_tiles"
    limit: Bytes | None = None
    n: Count | None = None


@dataclass(frozen=True)
class VocabularyTile:
    """A head in loops over the vocabulary.

    Attributes:
      jaxpr: the level, its calls written out; closed.
      plan: the equations and the loops.
      n: the number of blocks.
    """

    jaxpr: Any
    plan: VocabularyLoops
    n: int

    @property
    def product(self) -> Any:
        """The equation that makes the logits."""
        return self.plan.graph.eqns[self.plan.found.product]


class TileVocabulary(Searched[VocabularyTiles, VocabularyTile]):
    """Logits, loss and their gradients without an array of tokens by vocabulary."""

    config = VocabularyTiles
    in_parts = True
    # Products done twice must save that. A predicted step is off by up to a tenth
    # (`jaxmem.memory.StepTime`), so that two of them differ by twice that.
    margin = 0.2
    last = UNCERTAIN
    repeats = True

    def analyse(
        self, level: Level, config: VocabularyTiles
    ) -> Iterator[VocabularyTile]:
        closed, plans = _heads(level, config)
        for plan in plans:
            if isinstance(plan, VocabularyLoops):
                n = config.n or _least(plan, config.limit)
                if n is not None:
                    yield VocabularyTile(closed, plan, n)

    def apply(self, level: Level, rewrite: VocabularyTile):
        del level
        return with_whole_barriers(in_blocks(rewrite.jaxpr, rewrite.plan, rewrite.n))

    def describe(self, rewrite: VocabularyTile, target: str) -> Description:
        eqn, plan, n = rewrite.product, rewrite.plan, rewrite.n
        logits, path = eqn.outvars[0].aval, _compat.name_stack(eqn)
        before, after = plan.bytes(n)
        row = TiledRegion(
            shape=logits.shape,
            dtype=str(logits.dtype),
            path=path,
            line=_compat.source_line(eqn),
            axis="vocabulary",
            n=n,
            bytes_before=before,
            bytes_after=after,
            times=1,
            seconds=plan.seconds(n, target),
        )
        note = f"the logits {logits.str_short()} of {path} are computed {plan.times}"
        note += f" times, in {n} blocks of the vocabulary"
        return Description(notes=(note,), tiles=(row,))

    def left(self, level: Level, config: VocabularyTiles) -> Iterator[str]:
        for plan in _heads(level, config)[1]:
            if isinstance(plan, str):
                yield f"a softmax is not computed block by block: {plan}"

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        return candidates_in_tiles(step, _blocks_to, bound, alone=True)

    def nearly_free(self, step: SearchedStep) -> Iterator[VocabularyTiles]:
        # The logits are written and read a few times where they exist: what that takes
        # may be as long as to compute them twice.
        if _has_head(step.traced, step.front[0].choice):
            for (config,) in clearly_smaller(step, _head_to):
                yield config

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        least = step.front[-1:]
        if _has_head(step.traced, least[0].choice):
            for one in in_tiles(step.traced, least, _head_to, Room(enough)):
                yield one.bytes, "logits are computed twice"

    def unreached(self, step: SearchedStep, made: Rewritten) -> Sequence[str]:
        every = VocabularyTiles(limit=0)
        left = lambda level: list(self.left(level, every))
        levels = made.entered(VocabularyTiles)
        return [note for level in levels for note in level.looked_at(left)]


def _head_to(limit: int) -> tuple[Any, ...]:
    return (VocabularyTiles(limit=limit),)


def _has_head(step: TracedStep, choice: Choice) -> bool:
    """Whether any number of blocks does something, before many are looked at."""
    made = step.rewritten(choice.having(*_head_to(0)), ordered=False)
    return made.did(VocabularyTiles)


def _blocks_to(limit: int) -> tuple[Any, ...]:
    return *tiles_to(limit), *_head_to(limit)


def _heads(
    level: Level, config: VocabularyTiles
) -> tuple[Any, list[VocabularyLoops | str]]:
    """The level with its calls written out, and the loops of each head in it."""
    if config.limit is None and config.n is None:
        return None, []
    return level.known.get("heads", (level,), lambda: _found(level))


def _found(level: Level) -> tuple[Any, list[VocabularyLoops | str]]:
    in_scan = level.loop is not None and primitives.is_scan(level.loop)
    closed = prepared(level.jaxpr, in_scan)
    graph = JaxprGraph(closed)
    shardings = labelled_shardings(closed, level.shardings)
    loops = lambda found: (
        found if isinstance(found, str) else loops_of(graph, found, shardings)
    )
    return closed, list(map(loops, cut_axes(graph)))


def _least(plan: VocabularyLoops, limit: int | None) -> int | None:
    """The least number of blocks that holds less; else that which holds least."""
    if limit is None or plan.held_whole <= limit:
        return None
    best = None
    for n in plan.counts():
        if best is None or plan.held(n) < plan.held(best):
            best = n
        if plan.held(n) <= limit:
            break
    return best if best is not None and plan.held(best) < plan.held_whole else None
