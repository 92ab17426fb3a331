"""Kernels that fill the stacks of loops, which each iteration then writes a part of."""

from collections.abc import Iterator, Sequence

from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.time.schedule import TimedKernel

# XLA:GPU's own, off by default: it replaces the fill by memory of any content.
OPTION = "xla_gpu_enable_dus_accumulator_zero_init_elimination"


def fills(hlo: Hlo, kernels: Sequence[TimedKernel]) -> list[TimedKernel]:
    """Those that read nothing, and whose results are what a while loop begins with."""
    begins = {made.name for _, _, made in starts(hlo)}
    return [one for one in kernels if one.name in begins and _reads_nothing(hlo, one)]


def starts(hlo: Hlo) -> Iterator[tuple[Instruction, int, Instruction]]:
    """(while loop, a place of what it carries, what makes the array there at first)."""
    for start, name in hlo.loops.items():
        carried, loop = hlo.instruction(start), hlo.instruction(name)
        if carried is None or loop is None:
            continue
        for place, operand in enumerate(carried.operands):
            made = hlo.instruction(operand)
            if made is not None and made.opcode == "get-tuple-element":
                made = hlo.instruction(made.operands[0])
            if made is not None:
                yield loop, place, made


def _reads_nothing(hlo: Hlo, kernel: TimedKernel) -> bool:
    made = hlo.instruction(kernel.name)
    if made is None or made.opcode not in ("fusion", "broadcast"):
        return False
    reads = (hlo.instruction(name) for name in made.operands)
    return all(one is not None and one.opcode == "constant" for one in reads)
