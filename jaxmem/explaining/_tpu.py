"""The errors of TPUs: what does not compile, and what does not fit when it runs."""

import re

from jaxmem.explaining._buffers import listed
from jaxmem.explaining._facts import Facts
from jaxmem.explaining._program import program_of
from jaxmem.explaining._sizes import SIZE, last_size, size_of

IN_HBM = (
    rf"Ran out of memory in memory space hbm\W+Used {SIZE} of {SIZE}"
    rf"|total memory required for HLO temporaries \({SIZE}\) exceeds available HBM "
    rf"\({SIZE}\)|CompileTimeHbmOom"
)
IN_KERNEL = (
    r"Ran out of memory in memory space (?:vmem|smem|cmem)|Scoped allocation with size"
    r"|CompileTimeScopedVmemOom"
)
WHEN_RUN = (
    rf"Attempting to (?:allocate|reserve) {SIZE}|RuntimeBufferAllocationFailure"
    r"|RuntimeProgramAllocationFailure"
)
_PADDED = rf"Unpadded \({SIZE}\) Padded \({SIZE}\)"


def compiled(text: str, match: re.Match[str]) -> Facts:
    """A program that takes more than the chip has.

    What libtpu calls "HLO temporaries" has arguments and outputs in it: a step with
    none but these, compiled for a v5e, was refused with their sum.
    """
    used, limit, temporaries, available = match.groups()
    size = lambda found: None if found is None else size_of(found)
    padded = re.findall(_PADDED, text)
    return Facts(
        "compile",
        "TPU",
        program_of(text),
        needed=size(used or temporaries),
        limit=size(limit or available),
        arguments=last_size(rf"^\s*arguments\s+{SIZE}", text),
        outputs=last_size(rf"Output size {SIZE}; shares", text),
        shared=last_size(rf"; shares {SIZE} with arguments", text),
        padding=size_of(padded[-1][1]) - size_of(padded[-1][0]) if padded else None,
        constants=last_size(rf"^\s*(?:HLO )?constants?\s+{SIZE}", text),
        largest=listed(text),
    )


def kernel(text: str, match: re.Match[str]) -> Facts:
    """A kernel that takes more than the memory beside the processing units."""
    del match
    scoped = re.findall(rf"allocation with size {SIZE} and limit {SIZE}", text)
    used = re.findall(rf"[Uu]sed {SIZE} of {SIZE} [vsc]mem", text)
    needed, limit = (scoped or used or [(None, None)])[-1]
    return Facts(
        "kernel",
        "TPU",
        program_of(text),
        needed=needed and size_of(needed),
        limit=limit and size_of(limit),
        largest=listed(text),
    )


def allocated(text: str, match: re.Match[str]) -> Facts:
    """An array, or the temporaries of a program, for which there is no room now."""
    program, text = program_of(text), text[match.start() :]
    loads = "reserve " in match[0] or "ProgramAllocation" in match[0]
    piece = rf"contiguous region of free memory is {SIZE}|and {SIZE} reservable"
    pieces = [a or b for a, b in re.findall(piece, text)]
    return Facts(
        "load" if loads else "run",
        "TPU",
        program,
        requested=last_size(rf"Attempting to (?:allocate|reserve) {SIZE}", text),
        free=last_size(rf"There are {SIZE} free", text),
        largest_free=size_of(pieces[-1]) if pieces else None,
    )
