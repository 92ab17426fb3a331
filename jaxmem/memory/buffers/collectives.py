"""What devices send each other in a compiled step, from the text of its module.

A collective counts as often as the loops around it run, which the text says. Of a ring,
as NCCL has it, a device sends (n-1)/n of the whole array in an all-gather or a
reduce-scatter among n devices, and twice that in an all-reduce.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxmem.memory.buffers.device_groups import groups_of
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.buffers.trips import loops_around, trips

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
)


@dataclass(frozen=True)
class Collective:
    """One that a compiled step runs.

    Attributes:
        kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or
            "collective-permute".
        bytes: of its operands on one device, one time.
        devices: among how many devices.
        times: how often a step runs it; 0 where a loop does not say how often it runs.
        operation: the name scopes and the operation it was made for.
        source: where that is written, as `file:line (function)`; empty where unknown.
        waits: whether the device does nothing else meanwhile.
        arrays: how many arrays it sends: XLA combines collectives.
        loops: the name scopes of the loops that it runs in, the innermost first.
    """

    kind: str
    bytes: int
    devices: int
    times: int
    operation: str
    source: str
    waits: bool
    arrays: int = 1
    loops: tuple[str, ...] = ()

    @property
    def sent_once(self) -> float:
        """Bytes that a device sends each time."""
        return _ring(self.kind, self.devices) * self.bytes

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step."""
        return int(self.times * self.sent_once)


def sent_bytes(found: Iterable[Collective]) -> int:
    """Bytes that a device sends in a step, of all of them."""
    return sum(one.sent for one in found)


def collectives_of(hlo: Hlo) -> tuple[Collective, ...]:
    """The collectives of a compiled module, what sends most first."""
    marks = tuple(f" {kind}{end}(" for kind in KINDS for end in ("", "-start"))
    names = (n for n, (_, rest) in hlo.lines.items() if any(m in rest for m in marks))
    made = (hlo.instruction(name) for name in list(names))
    found = (collective_of(hlo, one) for one in made if one is not None)
    return tuple(sorted((c for c in found if c.bytes), key=lambda c: -c.sent))


def collective_of(hlo: Hlo, made: Instruction) -> Collective:
    """What an instruction sends."""
    caller = hlo.instruction(hlo.callers.get(made.computation, ""))
    wrapped = caller is not None and caller.opcode == "async-start"
    kind = made.opcode.removesuffix("-start")
    loops = list(loops_around(hlo, made))
    return Collective(
        kind,
        sum(a.bytes for o in made.operands for a in arrays_of(hlo.shape_of(o))),
        _group(made.attributes, kind) or hlo.devices,
        math.prod(trips(hlo, loop) for loop in loops),
        made.metadata.get("op_name", ""),
        hlo.source(made),
        not wrapped and not made.opcode.endswith("-start"),
        len(made.operands),
        tuple(loop.metadata.get("op_name", "") for loop in loops),
    )


def _ring(kind: str, devices: int) -> float:
    """Of a collective's operands, how many times their bytes a device sends."""
    if kind == "collective-permute":
        return 1.0
    if kind == "all-gather":
        return devices - 1.0
    share = 1 - 1 / max(1, devices)
    return 2 * share if kind == "all-reduce" else share


def _group(attributes: str, kind: str) -> int:
    """Among how many devices; 0 where the text does not say."""
    if kind == "collective-permute":
        return 2
    groups = groups_of(attributes, 0)
    return len(groups[0]) if groups else 0
