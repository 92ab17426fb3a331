"""Two values that are alive together have no byte in common.

Else the one that is written last destroys the other before its last reader. An update
in place is none of these: the operand's last reader is the instruction that writes the
value over it, at the same place and of the same size.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._pairs import overlapping
from jaxmem.auditing._report import AuditFinding

_WAY_ROUND = (
    "put jax.lax.optimization_barrier around the operation, and report the module to "
    "the compiler's makers: its values cannot be trusted"
)


def shared_bytes(module: Module) -> Iterator[AuditFinding]:
    """Finds values that are written over while they are still to be read."""
    for pair in overlapping(module):
        if pair.together or pair.updated:
            continue
        what = (
            f"{pair.new.name} is written over {pair.old.name}, which is still "
            f"to be read"
        )
        yield module.finding("shared_bytes", pair.new.name, what, _WAY_ROUND)
