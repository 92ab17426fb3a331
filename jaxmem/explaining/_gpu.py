"""The errors of GPUs: of the allocator, of CUDA, and of libraries without room."""

import re

from jaxmem.explaining._buffers import chunks, listed
from jaxmem.explaining._facts import Facts
from jaxmem.explaining._program import program_of
from jaxmem.explaining._sizes import SIZE, last_size, sizes

_REFUSED = rf"failed to allocate {SIZE}[^\n]*from device: CUDA_ERROR_OUT_OF_MEMORY"
_FAILED = (
    rf"[Oo]ut of memory while trying to allocate {SIZE}",
    rf"ran out of memory trying to allocate {SIZE}",
    rf"Failed to allocate request for {SIZE}",
    rf"cuMemAllocAsync failed to allocate {SIZE}",
)
_REMATERIALIZATION = r"Can't reduce memory use below [^\n]*by rematerialization"
WHEN_RUN = "|".join(
    [*_FAILED, _REFUSED, _REMATERIALIZATION]
    + [r"CUDA_ERROR_OUT_OF_MEMORY", r"cudaErrorMemoryAllocation"]
    + [r"RESOURCE_EXHAUSTED:[^\n]*out of memory", r"failed: out of memory"]
)
IN_LIBRARY = (
    r"(?i:could not create cud?nn handle|failed to create cublas handle)"
    r"|gpusolver\w*Create\(&handle\) failed|gpublasCreate\(&handle\) failed"
    r"|CU(?:DNN|BLAS|SOLVER)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|DNN library initialization failed"
)
_TUNING = re.compile(r"autotun|algorithm_picker|best cudnn convolution", re.I)
_ERROR = re.compile(r"^.*?\b\w*Error: ", re.M)


def allocated(text: str, match: re.Match[str]) -> Facts:
    """An array, or the temporaries of a program, for which there is no room now."""
    dump = text[max(text.rfind("ran out of memory trying to allocate"), 0) :]
    stats = {name: last_size(rf"^{name}:\s+{SIZE}", dump) for name in _STATS}
    limit = stats["Limit"] or last_size(rf"memory_limit_: {SIZE}", dump)
    pieces = sizes(rf"^Free\s+at \S+ of size {SIZE}", dump)
    assigned = _assigned(text)
    found = [x for x in (last_size(form, text) for form in _FAILED) if x is not None]
    refused = sizes(_REFUSED, text)
    return Facts(
        "start" if refused and not found else "run",
        "GPU",
        program_of(text),
        requested=found[0] if found else max(refused, default=None),
        needed=assigned["needed"],
        limit=limit or last_size(rf"reduce memory use below {SIZE}", text),
        in_use=stats["InUse"],
        free=_free(limit, stats["InUse"], pieces),
        largest_free=max(pieces, default=stats["LargestFreeBlock"] or None),
        device_free=last_size(rf"Free memory/Total memory: {SIZE}/", text),
        device_total=last_size(rf"Free memory/Total memory: \d+/{SIZE}", text),
        refused=max(refused, default=None),
        largest=listed(text) or chunks(dump),
        autotuning=_tuned(text, match),
        arguments=assigned["arguments"],
        outputs=assigned["outputs"],
        shared=assigned["shared"],
        constants=assigned["constants"],
        temporaries_alone=assigned["outputs"] is None,
    )


def library(text: str, match: re.Match[str]) -> Facts:
    """The handle of a library, which takes memory of its own beside the allocator."""
    del match
    return Facts(
        "library",
        "GPU",
        program_of(text),
        limit=last_size(rf" bytes free, {SIZE} total", text),
        free=last_size(rf"Memory usage: {SIZE} free", text),
        refused=max(sizes(_REFUSED, text), default=None),
    )


def _free(limit: int | None, in_use: int | None, chunks: list[int]) -> int | None:
    if limit is None or in_use is None:
        return sum(chunks) if chunks else None
    return max(limit - in_use, 0)


_STATS = "Limit", "InUse", "LargestFreeBlock"


def _assigned(text: str) -> dict[str, int | None]:
    """The program's own figures: its buffer assignment, or what was hoped for."""
    kind = lambda words: last_size(rf"{words} allocation:\s+{SIZE}", text)
    total, constants = kind("total"), kind("constant")
    arguments, outputs = kind("parameter"), kind("maybe_live_out")
    parts = arguments, outputs, constants, kind("preallocated temp")
    shared = None
    if total is not None and None not in parts:  # what lies in both counts in both
        shared = max(sum(part or 0 for part in parts) - total, 0)
    hoped = rf"only reduced to {SIZE}"
    captured = last_size(rf"constants were captured[^\n(]*\({SIZE}", text)
    return {
        "needed": last_size(hoped, text) if total is None else total,
        "arguments": arguments,
        "outputs": outputs,
        "shared": shared,
        "constants": max(constants or 0, captured or 0) or None,
    }


def _tuned(text: str, match: re.Match[str]) -> str:
    """What was tried when the error came; warnings of other trials stop nothing."""
    begins = [m.start() for m in _ERROR.finditer(text, 0, match.end())]
    error = text[begins[-1] if begins else match.start() : match.end() + 400]
    if "convolution" in error and _TUNING.search(error):
        return "convolution"
    return "product" if _TUNING.search(error) else ""
