"""Two outputs of one instruction have two buffers.

A fusion writes them side by side, so that in one buffer the second one is left.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._pairs import overlapping
from jaxmem.auditing._report import AuditFinding

_REPORT = "https://github.com/jax-ml/jax/issues/39100"
_WAY_ROUND = (
    "compile with compiler_options={'xla_disable_hlo_passes': 'priority-fusion'}: a "
    "barrier between the two does not help"
)


def two_outputs(module: Module) -> Iterator[AuditFinding]:
    """Finds outputs of one instruction that have bytes in common."""
    for pair in overlapping(module):
        if not pair.together:
            continue
        outputs = f"{list(pair.old.index)} and {list(pair.new.index)}"
        what = f"outputs {outputs} of {pair.new.name} have one buffer"
        yield module.finding("two_outputs", pair.new.name, what, _WAY_ROUND, _REPORT)
