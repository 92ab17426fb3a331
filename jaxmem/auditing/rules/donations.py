"""A donated argument is given to one output, of its size, and no other is written.

The runtime takes the table of aliases at its word: an argument that is written without
being in it is destroyed although the caller still has it, and two outputs with one
argument's buffer are one output.
"""

from collections import Counter
from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.memory.buffers.assignment import Allocation

_WAY_ROUND = "compile the step without donating this argument"


def donations(module: Module) -> Iterator[AuditFinding]:
    """Finds aliases that are double, of two sizes, or not those of the buffers."""
    numbers = [number for _, number in module.aliases]
    for number, count in Counter(numbers).items():
        if count > 1:
            what = f"{count} outputs have the buffer of parameter {number}"
            yield _finding(module, number, what)
    for place, count in Counter(place for place, _ in module.aliases).items():
        if count > 1:
            what = f"output {list(place)} has the buffers of {count} parameters"
            yield _finding(module, dict(module.aliases)[place], what)
    asked = module.step.donated
    for number in set(numbers) - (set(numbers) if asked is None else asked):
        what = f"an output has the buffer of parameter {number}, which is not donated"
        yield _finding(module, number, what)
    for allocation in module.allocations:
        if allocation.parameter is not None and allocation.kind == "parameter":
            yield from _of_parameter(module, allocation)


def _of_parameter(module: Module, allocation: Allocation) -> Iterator[AuditFinding]:
    number = allocation.parameter
    assert number is not None
    places = [place for place, n in module.aliases if n == number]
    if not places and allocation.live_out:
        yield _finding(module, number, f"parameter {number} is written, not donated")
    for place in places:
        root = module.hlo.roots.get(module.hlo.entry, "")
        key = module.flow.value(root, place)
        value = None if key is None else module.values[key]
        if value is not None and value not in allocation.values:
            what = f"output {list(place)} is not in the buffer of parameter {number}"
            yield _finding(module, number, f"{what}, whose alias it is")
        elif value is not None and (value.offset, value.size) != (0, allocation.size):
            what = f"output {list(place)} has {value.size} bytes in a buffer of "
            yield _finding(module, number, f"{what}{allocation.size}")


def _finding(module: Module, number: int, what: str) -> AuditFinding:
    made = next(
        (
            one
            for one in module.hlo.body(module.hlo.entry)
            if one.opcode == "parameter" and one.element == number
        ),
        None,
    )
    name = made.name if made else f"parameter {number}"
    return module.finding("donations", name, what, _WAY_ROUND)
