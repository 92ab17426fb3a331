"""Where a whole step can run on some examples at a time, up to the gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shards import Shardings
from jaxmem.scheduling._choice import Count
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling.tiling.batch import Batch, find
from jaxmem.scheduling.tiling.batch_loop import is_batch_loop
from jaxmem.scheduling.tiling.batch_row import made_in_parts


@dataclass(frozen=True)
class MicroBatches:
    """In how many parts the examples of a step run."""

    name: ClassVar[str] = "micro_batches"
    n: Count = 1


def batch_in(level: Level, config: MicroBatches) -> Batch | str | None:
    """The region; why there is none; None where it was not asked for."""
    jaxpr = jaxprs.split(level.jaxpr)[0]
    if config.n == 1 or level.loop is not None or any(map(is_batch_loop, jaxpr.eqns)):
        return None
    found = find(level.jaxpr, config.n, _given(level), _shardings(level))
    if isinstance(found, Batch) and next(made_in_parts(found), None) is None:
        # as where a scan over micro-batches would be cut into shorter ones
        return "nothing that it makes would be smaller"
    return found


def left_whole(level: Level, config: MicroBatches) -> Iterator[str]:
    """A sentence on what keeps a step from running in micro-batches, if anything."""
    found = batch_in(level, config)
    if isinstance(found, str):
        yield f"the step does not run in {config.n} micro-batches: {found}"


def lengths(level: Level) -> set[int]:
    """How many examples there may be, in each shard, by the step's arguments."""
    given = [jaxprs.split(level.jaxpr)[0].invars[i] for i in _given(level)]
    shardings = _shardings(level)
    axes = ((v, axis) for v in given if v.aval.ndim for axis in {0, v.aval.ndim - 1})
    sizes = (v.aval.shape[axis] // shardings.count(v, axis) for v, axis in axes)
    return {size for size in sizes if size > 1}


def _shardings(level: Level) -> Shardings:
    run = lambda: labelled_shardings(level.jaxpr, level.shardings)
    return level.known.get("shardings", (level,), run)


def _given(level: Level) -> list[int]:
    # What comes out as it went in is state: parameters, moments.
    every = range(len(jaxprs.split(level.jaxpr)[0].invars))
    state = {*by_shape(level.jaxpr, every).values(), *level.aliases.values()}
    return [i for i in every if i not in state]
