"""What is known of a fault."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmem.faults.program import TracedProgram
from jaxmem.memory.buffers import Hlo

Version = tuple[int, ...]
Consequence = Literal[
    "wrong values", "slow", "memory", "does not compile", "crash", "no gradient"
]
# what is wrong where: an equation, with a sentence
InProgram = Callable[[TracedProgram], Iterator[tuple[Any, str]]]
# the name of an instruction, with a sentence
InModule = Callable[[Hlo], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class KnownFault:
    """A row of the table.

    Attributes:
      report: its name, as "xla#49143" or "jax#40101".
      platforms: of "cpu", "cuda" and "tpu", those that have it.
      affected: the first and the last version of jax that has it. A first of None: all
        before; a last of None: all up to the newest that was looked at. None: no
        version that was looked at has it.
      looked_at: the versions that were looked at, in order. Of newer ones nothing is
        said.
      how: what was looked at, and how.
      consequence: what the fault does to a step.
      what: what has it, in a sentence.
      way_round: what to do, in a sentence.
      options: of the compiler, with which it does not occur.
      in_program: finds it in a traced step.
      in_module: finds it in a compiled module, surer than `in_program` does.
      is_proof: whether what `in_module` finds is wrong, whatever version has made it.
      elsewhere: the rule of `audit` or the check of `lint` that finds it already.
      error: a pattern of the error that it ends in, where it ends in one.
    """

    report: str
    platforms: tuple[str, ...]
    affected: tuple[Version | None, Version | None] | None
    looked_at: tuple[Version, ...]
    how: str
    consequence: Consequence
    what: str
    way_round: str
    options: Mapping[str, str] = field(default_factory=dict)
    in_program: InProgram | None = None
    in_module: InModule | None = None
    is_proof: bool = False
    elsewhere: str = ""
    error: str = ""

    @property
    def address(self) -> str:
        """Where the report is."""
        name, _, number = self.report.partition("#")
        owner = {"jax": "jax-ml", "xla": "openxla"}[name]
        return f"https://github.com/{owner}/{name}/issues/{number}"


@dataclass(frozen=True)
class FoundFault:
    """A fault that a program or a module has.

    Attributes:
      fault: its row.
      where: the equation, or the name of the instruction.
      what: a sentence.
    """

    fault: KnownFault
    where: Any
    what: str
