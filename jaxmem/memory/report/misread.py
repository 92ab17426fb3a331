"""What there is to say of a step that takes the host's slices from other places."""

from collections.abc import Sequence

import jax

from jaxmem.ir.host_slices import WHAT_TO_DO
from jaxmem.memory.buffers import WrongSlice


def about_wrong_slices(found: Sequence[WrongSlice]) -> tuple[str, ...]:
    """A sentence, or none where there are none."""
    if not found:
        return ()
    one = found[0]
    done = "writes" if one.written else "reads"
    meant = "an unknown place" if one.wanted is None else f"byte {one.wanted:,}"
    slices = f"{len(found)} slice{'s' if len(found) > 1 else ''}"
    where = one.source or one.operation
    return (
        f"WRONG VALUES: XLA of jax {jax.__version__} takes {slices} of "
        f"arrays in the host's memory from wrong addresses; {where} "
        f"{done} byte {one.offset:,} in iteration {one.iteration} in place of {meant}. "
        f"{WHAT_TO_DO}",
    )
