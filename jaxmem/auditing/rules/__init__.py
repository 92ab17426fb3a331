"""The rules, a file each: a module in, findings out."""

from jaxmem.auditing.rules.collectives import collectives
from jaxmem.auditing.rules.donations import donations
from jaxmem.auditing.rules.host_slices import host_slices
from jaxmem.auditing.rules.host_slices import of_slice as of_slice
from jaxmem.auditing.rules.known_faults import known_faults
from jaxmem.auditing.rules.read_after_update import read_after_update
from jaxmem.auditing.rules.read_elsewhere import read_elsewhere
from jaxmem.auditing.rules.read_unwritten import read_unwritten
from jaxmem.auditing.rules.shared_bytes import shared_bytes
from jaxmem.auditing.rules.two_outputs import two_outputs

RULES = (
    shared_bytes,
    read_after_update,
    read_elsewhere,
    read_unwritten,
    two_outputs,
    donations,
    host_slices,
    collectives,
    known_faults,
)
