"""Runs a module's schedule in time: kernels in their order, loops by their trip counts.

Asynchronous copies and collectives run beside what stands between their start and their
end; what is left of them at the end is waited for. Each runs after the one before it on
the same link.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxmem._module_path import share_taken
from jaxmem.chips import Rates
from jaxmem.cost.kernel import Arithmetic, KernelWork
from jaxmem.cost.links import links_of
from jaxmem.cost.roofline import Bound, seconds
from jaxmem.memory.buffers.collectives import KINDS, Collective, collective_of
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.instructions import NO_KERNEL
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.buffers.trips import trips
from jaxmem.memory.time.arithmetic import arithmetic_of
from jaxmem.memory.time.declared import declared_of
from jaxmem.memory.time.emitters import access_of
from jaxmem.memory.time.products import called_targets, products_of
from jaxmem.memory.time.reading import elements_of, inside, layout
from jaxmem.memory.time.traffic import traffic_of

_COSTED = ("__cublas$", "__cudnn$", "__gpu$TopK")  # the calls whose work is known
_MOVED = frozenset("dynamic-slice dynamic-update-slice slice custom-call".split())
_EMPTY = (
    *("AllocateBuffer", "ConcatBitcast", "Sharding"),
    "annotate_device_placement",
)


@dataclass(frozen=True)
class TimedKernel:
    """Something that a step runs, and what it takes.

    Attributes:
        name: XLA's name of it.
        times: how often it runs.
        seconds: of one time; of a collective or copy what is waited for.
        bound: what it waits for most.
        flops: of its products, one time.
        bytes: that it reads and writes, one time.
        repeated_flops: of its products, what it does a second time itself.
    """

    name: str
    times: float
    seconds: float
    bound: Bound
    flops: float
    bytes: int
    repeated_flops: float = 0.0


@dataclass
class Timed:
    """The kernels of a module, and what its text does not tell."""

    kernels: list[TimedKernel] = field(default_factory=list)
    unknown_trips: list[str] = field(default_factory=list)  # names of while loops
    unknown_calls: list[str] = field(default_factory=list)  # names of custom calls


def timed(hlo: Hlo, rates: Rates, trip_count: int | None = None) -> Timed:
    """The kernels of a module in the order of its schedule.

    Args:
        hlo: the text of the compiled module.
        rates: of the chip.
        trip_count: of loops whose text does not tell it; None takes one.
    """
    run = _Clock(hlo, rates, trip_count)
    run.computation(hlo.entry, 1.0)
    return run.found


class _Clock:
    """The clock of a module, and what is under way beside its kernels."""

    def __init__(self, hlo: Hlo, rates: Rates, trip_count: int | None):
        self.hlo, self.rates, self.trip_count = hlo, rates, trip_count
        self.found = Timed()
        self.clock = 0.0
        self.ends: dict[str, tuple[float, Bound, int]] = {}  # of what runs beside
        self.free: dict[Bound, float] = {}  # when a link is free
        self.traffic = 0  # bytes that have gone through the cache
        self.touched: dict[str, int] = {}  # value -> that figure when it was touched

    def computation(self, name: str, times: float) -> None:
        for made in self.hlo.body(name):
            self._instruction(made, times)

    def _instruction(self, made: Instruction, times: float) -> None:
        kind = made.opcode
        if kind in NO_KERNEL:
            return
        if kind == "while":
            self.computation(made.called[0], times * self._trips(made))
        elif kind == "call":
            self.computation(made.called[0], times)
        elif kind == "conditional":
            self._branches(made, times)
        elif kind.endswith("-start"):
            self._begin(made, times)
        elif kind.endswith("-done"):
            self._end(made, times)
        elif kind in KINDS:
            self._kernel(made, times, *self._collective(made))
        else:
            self._compute(made, times)

    def _trips(self, loop: Instruction) -> int:
        known = trips(self.hlo, loop)
        if not known:
            self.found.unknown_trips.append(loop.name)
        return known or self.trip_count or 1

    def _branches(self, made: Instruction, times: float) -> None:
        """The branch that takes longest, where nobody knows which one is taken."""
        # before either, the host has to know
        self._kernel(made, times, self.rates.branch, "launch")
        taken = share_taken(made.metadata.get("op_name", ""))
        if taken is not None and len(made.called) == 2:
            first = taken if "true_computation=" in made.attributes else 1 - taken
            for branch, share in zip(made.called, (first, 1 - first), strict=True):
                self.computation(branch, share * times)
            return
        outside, slowest = self.found.kernels, []
        for branch in made.called:
            self.found.kernels = []
            self.computation(branch, times)
            slowest = max(slowest, self.found.kernels, key=total)
        self.found.kernels = outside + slowest

    def _compute(self, made: Instruction, times: float) -> None:
        if self._is_small(made):
            return
        if self._continues(made, times):
            return
        work = work_of(self.hlo, made)
        for target in called_targets(self.hlo, made):
            if target in _EMPTY:
                return
            if not target.startswith(_COSTED) and work.declared is None:
                self.found.unknown_calls.append(made.name)
        took, bound = seconds(work, self.rates, self._cached(made, work))
        for sent in self._sent_within(made):
            took, bound = max((took, bound), (sent, "collective"))
        counted = work.flops, work.traffic.bytes, work.repeated_flops
        self._kernel(made, times, took, bound, *counted)

    def _continues(self, made: Instruction, times: float) -> bool:
        """Whether it only begins or ends a collective that libtpu has in fusions.

        Such a one goes on in the fusions of products between its start and its end.
        """
        targets = called_targets(self.hlo, made) if made.opcode == "fusion" else ()
        begins, ends = (f"AsyncCollective{at}" in targets for at in ("Start", "Done"))
        for one in inside(self.hlo, made) if begins or ends else ():
            if one.opcode not in KINDS:
                continue
            if begins:
                took, bound, _, size = self._collective(one)
                self._under_way(_channel(one), took, bound, size)
            else:
                self._wait(made, times, _channel(one))
        return begins or ends

    def _sent_within(self, made: Instruction) -> Iterator[float]:
        """Seconds of the collectives of a fusion, which its kernel runs beside.

        A TPU's reduce-scatter is a fusion of an all-reduce and its slice.
        """
        if made.opcode != "fusion":
            return
        for one in inside(self.hlo, made):
            if one.opcode in KINDS and _channel(one) not in self.ends:
                found = collective_of(self.hlo, one)
                if found.kind == "all-reduce" and _bytes_of(made) < found.bytes:
                    found = dataclasses.replace(found, kind="reduce-scatter")
                yield self._sending(found)

    def _is_small(self, made: Instruction) -> bool:
        """Whether it is no kernel: an operation by itself on a few numbers."""
        shapes = (made.shape, *map(self.hlo.shape_of, made.operands))
        few = all(elements_of(one) <= self.rates.few for one in shapes)
        return few and made.opcode not in ("fusion", "custom-call")

    def _cached(self, made: Instruction, work: KernelWork) -> int:
        """Bytes of what is read that were touched so lately that the cache has them."""
        room, found = self.rates.cache_bytes // 2, 0
        for name, size in work.traffic.reads:
            since = self.traffic - self.touched.get(name, -math.inf)
            found += size if since + size <= room else 0
        self.traffic += work.traffic.bytes
        for name in (made.name, *(name for name, _ in work.traffic.reads)):
            self.touched[name] = self.traffic
        return found

    def _kernel(
        self,
        made: Instruction,
        times: float,
        took: float,
        bound: Bound,
        flops: float = 0.0,
        size: int = 0,
        repeated: float = 0.0,
    ) -> None:
        self.clock += took
        one = TimedKernel(made.name, times, took, bound, flops, size, repeated)
        self.found.kernels.append(one)

    def _collective(self, made: Instruction) -> tuple[float, Bound, float, int]:
        one = collective_of(self.hlo, made)
        return self._sending(one), "collective", 0.0, one.bytes

    def _sending(self, one: Collective) -> float:
        """Seconds of a collective by itself."""
        links = links_of(one.devices, self.hlo.devices, self.rates)
        times = 2 if one.kind == "all-reduce" else 1
        return one.sent_once / links.rate + times * links.steps * self.rates.hop

    def _begin(self, made: Instruction, times: float) -> None:
        """Something that goes on beside the kernels until its end is waited for.

        A copy within a GPU's memory does not: it takes the bandwidth that they need.
        """
        inner = self._begun(made)
        if inner.opcode.removesuffix("-start") in KINDS:
            took, bound, _, size = self._collective(inner)
        else:
            work = work_of(self.hlo, inner)
            if self.rates.cache_bytes and not work.traffic.host:
                return self._compute(inner, times)
            work = dataclasses.replace(work, loaded=0, alone=0)
            took, bound = seconds(work, self.rates)
            size = work.traffic.bytes + work.traffic.host
        self._under_way(made.name, took, bound, size)

    def _under_way(self, name: str, took: float, bound: Bound, size: int) -> None:
        start = max(self.clock, self.free.get(bound, 0.0))
        self.free[bound] = start + took
        self.ends[name] = start + took, bound, size

    def _begun(self, made: Instruction) -> Instruction:
        """What runs between a start and its end; a slice that XLA starts is copied."""
        if made.opcode == "fusion-start":
            shape = self.hlo.shape_of(self.hlo.roots.get(made.called[0], ""))
            copied = made.attributes.replace("kind=kLoop", "kind=kCopy")
            return dataclasses.replace(
                made, opcode="fusion", shape=shape, attributes=copied
            )
        inside = (i for called in made.called for i in self.hlo.body(called))
        return next((i for i in inside if i.opcode not in NO_KERNEL), made)

    def _end(self, made: Instruction, times: float) -> None:
        start = made.operands[0].split("#")[0] if made.operands else ""
        self._wait(made, times, start)

    def _wait(self, made: Instruction, times: float, start: str) -> None:
        end, bound, size = self.ends.pop(start, (0.0, "memory", 0))
        waited = max(0.0, end - self.clock)
        if waited or size:
            self._kernel(made, times, waited, bound, 0.0, size)


def _channel(made: Instruction) -> str:
    """What the parts of one collective have in common."""
    found = re.search(r"channel_id=(\d+)", made.attributes)
    return found.group() if found else made.name


def _bytes_of(made: Instruction) -> int:
    """Of what an instruction makes."""
    return sum(one.bytes for one in arrays_of(made.shape))


def work_of(hlo: Hlo, made: Instruction) -> KernelWork:
    """What an instruction does."""
    products = tuple(products_of(hlo, made))
    traffic = traffic_of(hlo, made)
    access, arithmetic = access_of(hlo, made, traffic), arithmetic_of(hlo, made)
    declared = declared_of(hlo, made)
    if declared:
        traffic = traffic.at_most(declared.bytes or traffic.bytes)
        arithmetic += Arithmetic(special=declared.transcendentals)
    loaded, alone = 0, 0
    if made.opcode != "fusion" and traffic.bytes and not _only_moves(hlo, made):
        alone = max(map(elements_of, (made.shape, *map(hlo.shape_of, made.operands))))
    elif not products and not _only_moves(hlo, made):
        loaded = traffic.bytes + traffic.near
    return KernelWork(products, traffic, arithmetic, access, declared, loaded, alone)


def _only_moves(hlo: Hlo, made: Instruction) -> bool:
    """Whether values stay as they are, but for their place."""
    if made.opcode == "copy":
        return layout(made.shape) == layout(hlo.shape_of(made.operands[0]))
    return made.opcode in _MOVED


def total(kernels: list[TimedKernel]) -> float:
    """Seconds of all."""
    return sum(one.times * one.seconds for one in kernels)
