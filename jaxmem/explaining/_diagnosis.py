"""The cause, from the figures of a log."""

from collections.abc import Callable
from typing import Literal

from jaxmem._bytes import format_bytes
from jaxmem.explaining._facts import Facts

Diagnosis = Literal[
    "true peak",
    "padding",
    "constants",
    "fragmentation",
    "live arrays",
    "another process",
    "pool limit",
    "no room for libraries",
    "autotuning",
    "kernel memory",
    "host memory",
    "unknown",
]
_CONSTANTS = 0.25  # of what is needed, from which constants are the cause
DEFAULT_SHARE = 0.75  # of a GPU, which JAX takes by default
_OTHERS = 0.1  # of the device, from which another process counts
# A program for training that takes less is not what fills an accelerator, and one that
# takes more may well be.
_SMALL, _LARGE = 2**30, 4 * 2**30


def diagnose(facts: Facts) -> Diagnosis:
    """The cause of an error; "unknown" where the log does not tell it."""
    by_stage: dict[str, Callable[[Facts], Diagnosis]] = {
        "compile": _of_compile,
        "kernel": lambda facts: "kernel memory",
        "library": _of_library,
        "host": lambda facts: "host memory",
        "start": lambda facts: "another process",
    }
    if facts.autotuning:
        return "autotuning"
    if facts.device == "CPU":
        return "host memory"
    return by_stage.get(facts.stage, _of_allocation)(facts)


def held_by_others(facts: Facts) -> int:
    """Of the device, what neither this process has nor anybody, as far as is known."""
    if facts.device_free is None or facts.device_total is None:
        return 0
    return max(facts.device_total - facts.device_free - (facts.in_use or 0), 0)


def excess(facts: Facts) -> int:
    """By how much what is needed is more than what there is."""
    if facts.needed is None or facts.limit is None:
        return 0
    return max(facts.needed - facts.limit, 0)


def reason(diagnosis: Diagnosis, facts: Facts) -> str:
    """The cause in one sentence."""
    return _REASONS[diagnosis](facts)


def _of_compile(facts: Facts) -> Diagnosis:
    listed = sum(b.padding_bytes for b in facts.largest)
    padding = listed if facts.padding is None else facts.padding
    if padding >= max(excess(facts), 1):
        return "padding"
    return "constants" if _has_constants(facts) else "true peak"


def _of_library(facts: Facts) -> Diagnosis:
    return "no room for libraries" if facts.refused is None else "another process"


def _of_allocation(facts: Facts) -> Diagnosis:
    asked = facts.requested or 0
    if _has_constants(facts):
        return "constants"
    if facts.limit is not None and max(asked, facts.needed or 0) > facts.limit:
        return "true peak"
    if facts.device_total is not None:
        return _of_device(facts, asked)
    if facts.refused is not None:
        return "another process"
    if facts.free is not None and 0 < asked <= facts.free:
        return "fragmentation"
    if facts.in_use is not None and facts.in_use < asked:
        return "true peak"  # one program takes most of the memory
    if facts.in_use is not None or facts.free is not None:
        return "live arrays"
    return _of_program(facts)


def _of_program(facts: Facts) -> Diagnosis:
    """Where the log does not say what else was in memory."""
    if max(facts.needed or 0, facts.requested or _LARGE) < _SMALL:
        return "live arrays"
    return "true peak" if (facts.needed or 0) >= _LARGE else "unknown"


def _of_device(facts: Facts, asked: int) -> Diagnosis:
    """Where CUDA has told how much of the device is free."""
    total, free = facts.device_total or 0, facts.device_free or 0
    if asked > total:
        return "true peak"
    if asked <= free:
        within = facts.free is not None and asked <= facts.free
        return "fragmentation" if within else "pool limit"
    others = held_by_others(facts)
    if others > _OTHERS * total and asked <= free + others:
        return "another process"
    return "live arrays" if (facts.in_use or 0) >= asked else "true peak"


def _has_constants(facts: Facts) -> bool:
    whole = facts.needed or facts.limit or facts.requested or 0
    listed = [b.bytes for b in facts.largest if b.operation == "constant"]
    constants = max(facts.constants or 0, sum(listed))
    return constants > 0 and constants >= _CONSTANTS * whole


def _of(facts: Facts, size: int | None, words: str) -> str:
    del facts
    return words if size is None else f"{words} ({format_bytes(size)})"


def _peak(facts: Facts) -> str:
    asked, in_use = facts.requested, facts.in_use
    if facts.temporaries_alone and facts.needed is not None:
        return (
            "the temporaries of the program alone are more than its arguments and "
            "outputs leave"
        )
    if facts.needed is not None and facts.limit is None:
        size = format_bytes(facts.needed)
        return (
            f"the program takes {size} by itself; the log does not say how much "
            "memory there is, nor what else was in it"
        )
    if facts.needed is not None and facts.needed > (facts.limit or 0):
        return "the program alone needs more memory than there is"
    if asked is None or in_use is None:
        return "the program needs more memory than there is"
    size, rest = format_bytes(asked), format_bytes(in_use)
    return f"the program asks for {size} at once, on top of {rest} that are in use"


def _padding(facts: Facts) -> str:
    size = facts.padding or sum(b.padding_bytes for b in facts.largest)
    return (
        f"{format_bytes(size)} are padding: a TPU stores the last two axes in tiles of "
        "8 x 128 (16 x 128 of 16 bits), and short axes are filled up to them"
    )


def _fragmentation(facts: Facts) -> str:
    free = _of(facts, facts.free, "enough is free in all")
    piece = facts.largest_free
    if piece is None:
        return f"{free}, but not in one piece"
    return f"{free}, but the largest piece has {format_bytes(piece)}"


def _live(facts: Facts) -> str:
    arguments = facts.arguments or 0
    if facts.arguments is not None and (facts.in_use or 0) > arguments:
        other = format_bytes((facts.in_use or 0) - arguments)
        return (
            f"the program would fit alone: {other} are arrays that are not its "
            "arguments, or results of other programs"
        )
    if facts.stage == "load":
        return "arrays and other programs leave too little for what this one works in"
    what = "arrays that are alive fill the memory: arguments, and what else is kept"
    if facts.device == "GPU" and facts.in_use is None:
        return f"{what}; or another process has it"
    return what


def _others(facts: Facts) -> str:
    size = held_by_others(facts)
    who = "another process has" if not size else f"others have {format_bytes(size)} of"
    return f"{who} the memory of this GPU, or an earlier run that has not ended"


def _pool(facts: Facts) -> str:
    if facts.of_chip and facts.needed is not None:
        size = format_bytes(facts.needed)
        return f"{size} are more than the 75 % of the GPU that JAX takes by default"
    return "the GPU has enough, JAX's own limit is below that"


def _library(facts: Facts) -> str:
    free = facts.free
    if free is not None and free > 2**30:
        return (
            f"{format_bytes(free)} of the GPU were free, which a handle does not need: "
            "the version of the library or of the driver is the more likely cause"
        )
    return (
        "libraries (cuDNN, cuBLAS, cuSolver, NCCL) take memory beside what JAX "
        "reserves, and too little was left for one of them"
    )


def _host(facts: Facts) -> str:
    if facts.pinned:
        return "the host's memory that a GPU reads (pinned) has a limit of its own"
    if facts.device == "CPU":
        return "the program runs on the CPU, and the host has no more memory"
    return "the process had no more memory of the host, not of an accelerator"


_REASONS: dict[Diagnosis, Callable[[Facts], str]] = {
    "true peak": _peak,
    "padding": _padding,
    "constants": lambda facts: _of(
        facts,
        facts.constants,
        "a large array is a constant of the program: the step closes over it, so that "
        "it is in memory as often as the step is compiled",
    ),
    "fragmentation": _fragmentation,
    "live arrays": _live,
    "another process": _others,
    "pool limit": _pool,
    "no room for libraries": _library,
    "autotuning": lambda facts: (
        "XLA tried out kernels on buffers of their own while the program's arrays were "
        "in memory; the program itself may fit"
    ),
    "kernel memory": lambda facts: (
        "one kernel takes more than the memory beside the processing units: its blocks "
        "are too large"
    ),
    "host memory": _host,
    "unknown": lambda facts: "the log does not say what else was in memory",
}
