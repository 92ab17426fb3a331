"""Which values are in memory when, from the texts that XLA dumps."""

from jaxmem.memory.buffers.attribute import buffers_at_peak as buffers_at_peak
from jaxmem.memory.buffers.collectives import KINDS as KINDS
from jaxmem.memory.buffers.collectives import Collective as Collective
from jaxmem.memory.buffers.collectives import collectives_of as collectives_of
from jaxmem.memory.buffers.collectives import sent_bytes as sent_bytes
from jaxmem.memory.buffers.hlo import Hlo as Hlo
from jaxmem.memory.buffers.hlo import Instruction as Instruction
from jaxmem.memory.buffers.hlo import parse_hlo as parse_hlo
from jaxmem.memory.buffers.instructions import CompiledOperation as CompiledOperation
from jaxmem.memory.buffers.instructions import (
    compiled_operations as compiled_operations,
)
from jaxmem.memory.buffers.padding import PaddedAxis as PaddedAxis
from jaxmem.memory.buffers.padding import padded_axes as padded_axes
from jaxmem.memory.buffers.rows import PeakBuffer as PeakBuffer
from jaxmem.memory.buffers.shapes import arrays_of as arrays_of
from jaxmem.memory.buffers.wrong_slices import WrongSlice as WrongSlice
from jaxmem.memory.buffers.wrong_slices import wrong_slices as wrong_slices
