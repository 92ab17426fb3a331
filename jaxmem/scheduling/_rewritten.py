"""A step after the passes, and what they did."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir import jaxprs
from jaxmem.ir.auto_axes import ExplicitTypes
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.plan.rows import Description, TiledRegion


def name_of(one: Pass) -> str:
    """By which a pass is switched off."""
    return type(one).__name__


@dataclass(frozen=True)
class Record:
    # the level as each pass was given it, by the class of its configuration
    entered: Mapping[type, Level]
    rewrites: tuple[tuple[Pass, Any], ...]  # (pass, rewrite) in order
    notes: tuple[str, ...]  # sentences about what was not done
    unordered: Level  # before its operations were put in order
    times: int = 1  # how often it runs: in so many micro-batches


@dataclass(frozen=True)
class Rewritten:
    """A jaxpr after the passes, and what they did."""

    jaxpr: Any  # closed; computes what the original does
    written_out: Any  # the jaxpr before all passes, its calls written out
    # of its lists of equations, those of inner loops after the outer ones
    records: tuple[Record, ...] = ()
    target: str = "cpu"  # the chip whose rates count
    # gives the jaxpr of the step from that of the first list, where the step is one
    # `shard_map`
    whole: Callable[[Any], Any] = field(default=lambda closed: closed, repr=False)
    types: ExplicitTypes | None = None  # of the step on explicit axes

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The results of the step, of the types that they had."""
        if self.types is None:
            return jaxprs.evaluate(self.jaxpr, leaves)
        return self.types.run(self.jaxpr, leaves)

    @functools.cached_property
    def description(self) -> Description:
        rows = (
            one.describe(rewrite, self.target).repeated(record.times)
            for record in self.records
            for one, rewrite in record.rewrites
        )
        return sum(rows, Description())

    @functools.cached_property
    def tiles(self) -> tuple[TiledRegion, ...]:
        """The rows of the description for what runs in parts."""
        rows = (one.describe(r, self.target).tiles for one, r in self._in_parts)
        return tuple(row for found in rows for row in found)

    @property
    def _in_parts(self) -> Iterator[tuple[Pass, Any]]:
        done = (pair for record in self.records for pair in record.rewrites)
        return (pair for pair in done if pair[0].in_parts)

    def entered(self, config: type) -> Iterator[Level]:
        """The lists of equations as one pass was given them."""
        return (record.entered[config] for record in self.records)

    @property
    def unordered(self) -> Any:
        """The jaxpr before its operations were put in order."""
        return self.whole(self.records[0].unordered.jaxpr)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The lists of equations, before their operations were put in order."""
        return tuple(record.unordered for record in self.records)

    @property
    def notes(self) -> tuple[str, ...]:
        left = (note for record in self.records for note in record.notes)
        return (*self.description.notes, *left)

    @property
    def applied(self) -> tuple[str, ...]:
        """Names of the passes that have changed anything, in their order."""
        done = {one.config: one for r in self.records for one, _ in r.rewrites}
        order = self.records[0].entered if done else ()
        return tuple(name_of(done[config]) for config in order if config in done)

    def did(self, config: type) -> bool:
        """Whether the pass with configurations of this class has changed anything."""
        done = (one.config for record in self.records for one, _ in record.rewrites)
        return config in done
