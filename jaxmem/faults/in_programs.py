"""Which rows of the table a traced step has."""

from collections.abc import Iterable, Iterator

from jaxmem.faults.program import TracedProgram
from jaxmem.faults.record import FoundFault, KnownFault


def findings_in_program(
    program: TracedProgram, faults: Iterable[KnownFault]
) -> Iterator[FoundFault]:
    """What those of these that are found in a jaxpr find, whatever the version."""
    for fault in faults:
        if fault.in_program is not None:
            for eqn, what in fault.in_program(program):
                yield FoundFault(fault, eqn, what)
