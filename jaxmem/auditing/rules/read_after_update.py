"""An operand that is updated in place is not read afterwards.

Whoever reads it later gets the updated value: the compiler has to copy it first.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._pairs import overlapping
from jaxmem.auditing._report import AuditFinding

_WAY_ROUND = (
    "read what is needed of the old value before the update, with "
    "jax.lax.optimization_barrier between the two"
)


def read_after_update(module: Module) -> Iterator[AuditFinding]:
    """Finds values that are updated in place before their last reader."""
    for pair in overlapping(module):
        if not pair.updated:
            continue
        what = (
            f"{pair.new.name} updates {pair.old.name} in place, which is read "
            "afterwards"
        )
        yield module.finding("read_after_update", pair.new.name, what, _WAY_ROUND)
