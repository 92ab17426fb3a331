"""Which values are in memory when, from the texts that XLA dumps."""

from jaxmem.memory.buffers.hlo import Hlo as Hlo
from jaxmem.memory.buffers.hlo import Instruction as Instruction
from jaxmem.memory.buffers.hlo import parse_hlo as parse_hlo
