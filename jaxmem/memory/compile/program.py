"""The compiled program itself, for those who read its text."""

from dataclasses import dataclass
from typing import Any

from jaxmem.chips import Target
from jaxmem.memory.compile.call import FlatCall
from jaxmem.memory.compile.lower import lower
from jaxmem.memory.compile.pool import pool


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler makes of a step for a target.

    Attributes:
      target: its name.
      hlo: the text of the optimized program.
      temp_bytes: bytes of its temporaries on one device.
      aliased: the leaves of the call whose buffers outputs reuse.
    """

    target: str
    hlo: str
    temp_bytes: int
    aliased: frozenset[int]


def compile_program(
    jitted: Any, traced: Any, call: FlatCall, target: Target, timeout: float
) -> CompiledProgram:
    """Compiles a traced step to the end.

    Args:
      jitted: the `flat_function`.
      traced: its `trace`.
      call: the call of both.
      target: the chip.
      timeout: seconds.

    Raises:
      ValueError: the step cannot be lowered for the chip.
      CompileError: the compiler failed or died.
      TimeoutError: the compile took longer than `timeout`.
    """
    lowered = lower(jitted, traced, call, target)
    result = pool().submit(lowered.request, timeout).result()
    aliased = frozenset(leaf for _, leaf in result["aliases"])
    temp_bytes = result["memory"]["temp"]
    return CompiledProgram(target.name, result["dump"]["hlo"], temp_bytes, aliased)
