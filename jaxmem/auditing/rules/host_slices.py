"""Slices of the host's memory walk as their index does.

A GPU copies a slice in a loop along a line of addresses that XLA has worked out.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.ir.host_slices import COPIES, WHAT_TO_DO
from jaxmem.memory.buffers import WrongSlice, wrong_slices

_REPORT = "https://github.com/openxla/xla/issues/46231"


def host_slices(module: Module) -> Iterator[AuditFinding]:
    """Finds slices of the host's arrays that are taken from another place."""
    if COPIES in module.step.options:
        return  # the line stays in the text, and nothing is copied along it
    yield from map(of_slice, wrong_slices(module.hlo))


def of_slice(one: WrongSlice) -> AuditFinding:
    """The finding on a slice that is taken from another place."""
    place = one.instruction, one.operation, one.source
    return AuditFinding("host_slices", one.told, *place, _REPORT, WHAT_TO_DO)
