"""Products of groups of rows, which XLA for GPUs makes of copies for each group."""

from collections.abc import Iterator

from jaxmem.chips import is_gpu
from jaxmem.ir.ragged import copied_rows, groups, is_ragged
from jaxmem.ir.scans import size_of
from jaxmem.linting._subject import LEAST, Finding, Subject, array, levels, place


def ragged_copies(subject: Subject) -> Iterator[Finding]:
    """Finds each `jax.lax.ragged_dot` of a step for a GPU, of the step as it is."""
    if subject.target is None or not is_gpu(subject.target):
        return
    for level in levels(subject.live):
        for eqn in filter(is_ragged, level.graph.eqns):
            copied = [eqn.invars[k] for k in copied_rows(eqn)]
            size = groups(eqn) * sum(map(size_of, copied))
            if size < LEAST:
                continue
            of = " and ".join(array(v.aval) for v in copied)
            yield Finding(
                check="ragged copies",
                severity="warning",
                what=f"ragged_dot of {of}: XLA for GPUs copies them for each of "
                f"{groups(eqn)} groups, and multiplies all rows by each group's matrix",
                bytes=size,
                remedy=(
                    "give the step to jaxmem.schedule, which multiplies blocks of rows "
                    "of one group each; where arrays are sharded, call ragged_dot "
                    "inside jax.shard_map"
                ),
                **place(level, eqn),
            )
