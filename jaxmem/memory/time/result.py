"""Predicted seconds: the result, one line of a report, and the table it prints as."""

from dataclasses import dataclass

from jaxmem.cost.roofline import Bound
from jaxmem.memory.time.spans import TimeSpan
from jaxmem.pages import aligned

_LEAST = 0.005  # shares below it are not printed
_MODULES = 12  # rows that are printed
_OPERATIONS = 16
HEAD = ("ms", "%", "times", "waits for", "operation", "module", "source")


@dataclass(frozen=True)
class OperationTime:
    """The kernels of one line of the user's that wait for the same.

    Attributes:
        seconds: in a step.
        times: kernels in a step.
        bound: what they wait for: "products", "memory", "arithmetic", "launch",
            "host" or "collective".
        flops: of matrix products in a step.
        bytes: read and written in a step.
        what: the operation in one or two words.
        module: the label of its module.
        source: `file:line` of the innermost line outside installed libraries.
        backward: whether the backward pass runs it.
    """

    seconds: float
    times: int
    bound: Bound
    flops: float
    bytes: int
    what: str
    module: str
    source: str
    backward: bool


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, predicted by a roofline over its compiled module.

    Twenty-three steps on an H200 took 0.97 to 1.10 times what is predicted; other chips
    have not been timed; TPUs are compared with XLA's own cost model. Each kernel takes
    a launch and the longest of its matrix products at the chip's peak, its bytes at the
    memory's bandwidth or as fast as its threads get at them, and its elementwise
    instructions; collectives and copies to and from the host run beside kernels, and
    what is left of them is waited for.

    Attributes:
        seconds: of one step on one device.
        by_bound: (what is waited for, seconds), most first; they add up.
        by_module: (module path, seconds), most first; they add up.
        operations: the slowest, most seconds first.
        kernels: how many run in a step.
        flops: of all matrix products, recomputed ones too.
        recomputed_flops: of those that `jax.checkpoint`, a schedule or fused attention
            does a second time.
        bytes: that all kernels read and write.
        peak_flops: what the chip does at most in these seconds, in 16 bits.
        spans: what runs one after the other, by module, in the schedule's order.
        notes: what the module does not tell: loops without a trip count, custom calls
            of which nobody knows the cost.
    """

    seconds: float
    by_bound: tuple[tuple[Bound, float], ...]
    by_module: tuple[tuple[str, float], ...]
    operations: tuple[OperationTime, ...]
    kernels: int
    flops: float
    bytes: int
    peak_flops: float
    recomputed_flops: float = 0.0
    spans: tuple[TimeSpan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hfu(self) -> float:
        """The hardware's flops utilization: products done over those at the peak."""
        return self.flops / self.peak_flops if self.peak_flops else 0.0

    @property
    def mfu(self) -> float:
        """The model's flops utilization: without what is recomputed."""
        done = self.flops - self.recomputed_flops
        return done / self.peak_flops if self.peak_flops else 0.0

    def __str__(self) -> str:
        return table(self)


def milliseconds(seconds: float) -> str:
    """Seconds as "41.7 ms"."""
    ms = 1e3 * seconds
    return f"{ms:.3g} ms" if abs(ms) < 100 else f"{ms:.0f} ms"


def time_line(time: StepTime) -> str:
    """The predicted seconds and their shares, in one line."""
    parts = [
        f"{name} {100 * seconds / time.seconds:.0f} %"
        for name, seconds in time.by_bound
        if seconds >= _LEAST * time.seconds
    ]
    text = f"predicted {milliseconds(time.seconds)} a step: {', '.join(parts)}"
    return f"{text}; MFU {100 * time.mfu:.0f} %, HFU {100 * time.hfu:.0f} %"


def table(time: StepTime) -> str:
    """What `print(report.time)` shows."""
    lines = [time_line(time), f"  {time.kernels} kernels", "", "By module:"]
    lines += [
        f"{milliseconds(seconds):>10}  {100 * seconds / time.seconds:4.1f} %  {module}"
        for module, seconds in time.by_module[:_MODULES]
    ]
    rows = [HEAD, *(cells(row, time) for row in time.operations[:_OPERATIONS])]
    lines += ["", "The slowest operations:", *aligned(rows)]
    lines += [f"  - {note}" for note in time.notes]
    return "\n".join(line.rstrip() for line in lines)


def cells(row: OperationTime, time: StepTime) -> tuple[str, ...]:
    """A row of the table."""
    share = f"{100 * row.seconds / time.seconds:.1f}"
    what = f"{row.what} (backward)" if row.backward else row.what
    ms, times = f"{1e3 * row.seconds:.3f}", str(row.times)
    return ms, share, times, row.bound, what, row.module, row.source
