"""The pass that does products of groups of rows in blocks, where XLA has none.

XLA:GPU makes `jax.lax.ragged_dot` of copies of all rows for each group, and multiplies
all of them: of 64 experts, 64 times the memory and the work of their tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxmem.chips import is_gpu, is_timed, rates_of
from jaxmem.cost.ragged_blocks import blocks_of
from jaxmem.ir import jaxprs
from jaxmem.ir.other_forms import in_other_forms
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.ragged import is_ragged
from jaxmem.ir.ragged_blocks import RowBlocks, in_blocks
from jaxmem.ir.scans import size_of
from jaxmem.ir.shards import InputShardings
from jaxmem.scheduling._pass import Level, Pass, has_level
from jaxmem.scheduling.plan.rows import Description

Forms = Mapping[int, RowBlocks]  # id of an equation -> its blocks


@dataclass(frozen=True)
class RaggedBlocks:
    """Whether products of groups of rows are done in blocks on a GPU."""

    name: ClassVar[str] = "ragged_blocks"
    enabled: bool = True


class RaggedInBlocks(Pass[RaggedBlocks, Forms]):
    """Each of them that is faster so by the rates of the chip."""

    config = RaggedBlocks

    def analyse(self, level: Level, config: RaggedBlocks) -> Iterator[Forms]:
        gpu = is_gpu(level.target) and is_timed(level.target)
        if not config.enabled or not gpu or not _any_ragged(level.jaxpr):
            return
        found = dict(_forms(level.jaxpr, level.target, level.shardings))
        if found:
            yield found

    def apply(self, level: Level, rewrite: Forms) -> Any:
        forms = {key: partial(_in_blocks, blocks) for key, blocks in rewrite.items()}
        return in_other_forms(level.jaxpr, forms)

    def describe(self, rewrite: Forms, target: str) -> Description:
        del target
        return Description(notes=(_done(len(rewrite)),))


def _in_blocks(blocks: RowBlocks, eqn, args: list) -> list[Any]:
    return [in_blocks(eqn, args, blocks)]


def _done(count: int) -> str:
    return (
        f"{count} ragged_dot product{'s' * (count > 1)} in blocks of rows: XLA for "
        "GPUs multiplies all rows by the matrix of each group, with a copy of the rows "
        "for each"
    )


def _any_ragged(body) -> bool:
    return any(map(is_ragged, jaxprs.walk(body)))


def _forms(
    body, target: str, given: InputShardings | None
) -> Iterator[tuple[int, RowBlocks]]:
    """The products of a list, and of what no other list of the passes is."""
    shardings = shardings_in(body, given)
    for eqn in jaxprs.split(body)[0].eqns:
        if is_ragged(eqn):
            # what XLA spreads over devices it would gather for blocks of all rows
            whole = all(shardings.bytes_of(v) == size_of(v) for v in eqn.invars)
            form = blocks_of(eqn, rates_of(target)) if whole else None
            if form is not None:
                yield id(eqn), form
        elif not has_level(eqn):
            for inner in filter(_any_ragged, jaxprs.bodies(eqn)):
                yield from _forms(inner, target, shardings.body(eqn))
