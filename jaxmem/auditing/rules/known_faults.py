"""What the table of known faults finds in a module, and no other rule does."""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.faults import FAULTS, findings_in_module


def known_faults(module: Module) -> Iterator[AuditFinding]:
    """Finds the rows of the table that have a finder of modules."""
    # the form is wrong whatever version has made it
    for one in findings_in_module(module.hlo, FAULTS):
        fault = one.fault
        yield module.finding(
            "known_faults", one.where, one.what, fault.way_round, fault.address
        )
