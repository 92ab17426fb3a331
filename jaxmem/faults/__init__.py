"""Known faults of compilers and libraries: a table, what finds them, the workaround."""

from jaxmem.faults.found import findings_in_module as findings_in_module
from jaxmem.faults.found import findings_in_program as findings_in_program
from jaxmem.faults.program import TracedProgram as TracedProgram
from jaxmem.faults.program import nested as nested
from jaxmem.faults.program import processes_are_joined as processes_are_joined
from jaxmem.faults.record import FoundFault as FoundFault
from jaxmem.faults.record import KnownFault as KnownFault
from jaxmem.faults.sums_apart import WHAT_IS_DONE as WHAT_IS_DONE
from jaxmem.faults.sums_apart import devices_of as devices_of
from jaxmem.faults.sums_apart import has_sums_apart as has_sums_apart
from jaxmem.faults.sums_apart import with_sums_apart as with_sums_apart
from jaxmem.faults.table import FAULTS as FAULTS
from jaxmem.faults.table import of_error as of_error
from jaxmem.faults.versions import standing as standing
