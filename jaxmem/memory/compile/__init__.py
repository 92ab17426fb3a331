"""Compiling a step for a chip, in another process: no chip need be there."""

from jaxmem.memory.compile import cache as cache
from jaxmem.memory.compile.call import FlatCall as FlatCall
from jaxmem.memory.compile.call import flatten_call as flatten_call
from jaxmem.memory.compile.facts import StepFacts as StepFacts
from jaxmem.memory.compile.lower import TracedCall as TracedCall
from jaxmem.memory.compile.lower import flat_function as flat_function
from jaxmem.memory.compile.lower import trace as trace
from jaxmem.memory.compile.lower import traced_call as traced_call
from jaxmem.memory.compile.pool import CompiledProgram as CompiledProgram
from jaxmem.memory.compile.pool import caller_flags as caller_flags
from jaxmem.memory.compile.pool import compile_program as compile_program
