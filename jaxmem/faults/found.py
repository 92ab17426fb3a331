"""Which rows of the table a traced step has, and which a compiled module."""

from collections.abc import Iterable, Iterator

from jaxmem.faults.program import TracedProgram
from jaxmem.faults.record import FoundFault, KnownFault
from jaxmem.faults.versions import standing
from jaxmem.memory.buffers import Hlo


def findings_in_module(hlo: Hlo, faults: Iterable[KnownFault]) -> Iterator[FoundFault]:
    """What those of these that are found in a module find.

    Where it is no proof, of faults alone that this version of jax has.
    """
    for fault in faults:
        if fault.in_module is not None and (fault.is_proof or _is_affected(fault)):
            for name, what in fault.in_module(hlo):
                yield FoundFault(fault, name, what)


def _is_affected(fault: KnownFault) -> bool:
    return any(standing(fault, p) == "affected" for p in fault.platforms)


def findings_in_program(
    program: TracedProgram, faults: Iterable[KnownFault]
) -> Iterator[FoundFault]:
    """What those of these that are found in a jaxpr find, whatever the version."""
    for fault in faults:
        if fault.in_program is not None:
            for eqn, what in fault.in_program(program):
                yield FoundFault(fault, eqn, what)
