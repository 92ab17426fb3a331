"""Which rows of the table a compiled module has."""

from collections.abc import Iterable, Iterator

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
