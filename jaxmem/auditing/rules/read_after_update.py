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
        operation, where = module.described(pair.new.name)
        yield AuditFinding(
            rule="read_after_update",
            what=f"{pair.new.name} updates {pair.old.name} in place, which is read "
            "afterwards",
            instruction=pair.new.name,
            operation=operation,
            where=where,
            way_round=_WAY_ROUND,
        )
