"""What a module was compiled to: its kernels by module and operation, counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.origin import Tracer
from jaxmem.memory.buffers.rows import operation_of

# What runs nothing by itself.
NO_KERNEL = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all iota partition-id"
    " replica-id add-dependency optimization-barrier opt-barrier".split()
)


@dataclass(frozen=True)
class CompiledOperation:
    """The instructions of one kind that one operation of a module was compiled to.

    Attributes:
        module: the label of its module, with a star instead of each layer's number.
        what: the operation in one or two words.
        opcode: XLA's operation, of a fusion with its kind: `"fusion kLoop"`.
        backward: whether the backward pass runs it.
        count: how many there are; those in the body of a loop count once.
    """

    module: str
    what: str
    opcode: str
    backward: bool
    count: int

    @property
    def label(self) -> str:
        """The operation in one line."""
        backward = " (backward)" if self.backward else ""
        return f"{self.module}: {self.what}{backward} [{self.opcode}]"


def compiled_operations(hlo: Hlo) -> tuple[CompiledOperation, ...]:
    """The kernels of a module, most first; what is inside a fusion is no kernel."""
    tracer, counts = Tracer(hlo), Counter[tuple[str, str, str, bool]]()
    for made in _kernels(hlo, hlo.entry):
        origin = tracer.kernel(made.name)
        name = origin.name
        what = operation_of(name.module_path, name.operation, origin.opcode)
        counts[origin.group, what, _opcode(made), name.backward] += 1
    modules = merge_numbered(module for module, *_ in counts)
    merged = Counter[tuple[str, str, str, bool]]()
    for (module, what, opcode, backward), count in counts.items():
        merged[modules[module], what, opcode, backward] += count
    return tuple(CompiledOperation(*key, count) for key, count in merged.most_common())


def _kernels(hlo: Hlo, computation: str) -> Iterator[Instruction]:
    for made in hlo.body(computation):
        if made.opcode in ("while", "call", "conditional"):
            for called in made.called:
                yield from _kernels(hlo, called)
        elif made.opcode not in NO_KERNEL and not made.opcode.endswith("-done"):
            yield made


def _opcode(made: Instruction) -> str:
    opcode = made.opcode.removesuffix("-start")
    if opcode != "fusion":
        return opcode
    _, found, kind = made.attributes.partition("kind=")
    return f"{opcode} {kind.split(',')[0].split()[0]}" if found else opcode
