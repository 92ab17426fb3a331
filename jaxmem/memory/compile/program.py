"""The compiled program itself, for those who read its text."""

from dataclasses import dataclass
from typing import Any

from jaxmem.chips import Target
from jaxmem.memory.compile.call import FlatCall
from jaxmem.memory.compile.lower import lower
from jaxmem.memory.compile.pool import pool


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler makes of a step for a target."""

    target: str  # its name
    hlo: str  # the text of the optimized program
    temp_bytes: int  # bytes of its temporaries on one device
    aliased: frozenset[int]  # the leaves of the call whose buffers outputs reuse


def compile_program(
    jitted: Any, traced: Any, call: FlatCall, target: Target, timeout: float
) -> CompiledProgram:
    """Compiles a traced step to the end."""
    lowered = lower(jitted, traced, call, target)
    result = pool().submit(lowered.request, timeout).result()
    aliased = frozenset(leaf for _, leaf in result["aliases"])
    temp_bytes = result["memory"]["temp"]
    return CompiledProgram(target.name, result["dump"]["hlo"], temp_bytes, aliased)
