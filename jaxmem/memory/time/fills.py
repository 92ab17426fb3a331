"""Kernels that fill the stacks of loops, which each iteration then writes a part of."""

from collections.abc import Iterator, Sequence

from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.time.schedule import TimedKernel

# XLA:GPU's own, off by default: it replaces the fill by memory of any content.
OPTION = "xla_gpu_enable_dus_accumulator_zero_init_elimination"


def fills(hlo: Hlo, kernels: Sequence[TimedKernel]) -> list[TimedKernel]:
    """Those that read nothing, and whose results are what a while loop begins with."""
    begins = {made.name for loop in _loops(hlo) for made in _begins_with(hlo, loop)}
    return [one for one in kernels if one.name in begins and _reads_nothing(hlo, one)]


def _loops(hlo: Hlo) -> Iterator[Instruction]:
    for name, (_, line) in hlo.lines.items():
        if " while(" in line:
            loop = hlo.instruction(name)
            assert loop is not None
            yield loop


def _begins_with(hlo: Hlo, loop: Instruction) -> Iterator[Instruction]:
    """What makes the arrays that a loop carries, before its first iteration."""
    carried = hlo.instruction(loop.operands[0])
    for name in carried.operands if carried is not None else ():
        made = hlo.instruction(name)
        if made is not None and made.opcode == "get-tuple-element":
            made = hlo.instruction(made.operands[0])
        if made is not None:
            yield made


def _reads_nothing(hlo: Hlo, kernel: TimedKernel) -> bool:
    made = hlo.instruction(kernel.name)
    if made is None or made.opcode not in ("fusion", "broadcast"):
        return False
    reads = (hlo.instruction(name) for name in made.operands)
    return all(one is not None and one.opcode == "constant" for one in reads)
