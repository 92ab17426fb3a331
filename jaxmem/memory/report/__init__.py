"""`MemoryReport`, how it is printed and drawn, and its notes on donation."""

from jaxmem.memory.report.donation import unused_donations as unused_donations
from jaxmem.memory.report.donation import updated_arguments as updated_arguments
from jaxmem.memory.report.donation import whole_bytes as whole_bytes
from jaxmem.memory.report.plot import plot_both as plot_both
from jaxmem.memory.report.report import MemoryReport as MemoryReport
from jaxmem.memory.report.sent import sent_line as sent_line
