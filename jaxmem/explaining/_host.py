"""The memory of the host: processes that are killed, arrays of NumPy, the CPU's own."""

import re

from jaxmem.explaining._facts import Facts, LargeBuffer
from jaxmem.explaining._program import program_of
from jaxmem.explaining._sizes import SIZE, last_size

_SHORT = {"float": "f", "int": "s", "uint": "u", "complex": "c"}
_ARRAY = re.compile(r"for an array with shape \(([\d, ]*)\) and data type (\w+)")
_PINNED = r"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB|bytes on host|pinned host memory"
ON_CPU = rf"Out of memory allocating {SIZE}"
ON_HOST = (
    r"std::bad_alloc|\bMemoryError\b|Unable to allocate [\d.]+ [KMGT]iB for an array"
    r"|Killed process \d+|^\s*(?:\S+: )?(?:line \d+: )?(?:\d+ )?Killed\b|\bSIGKILL\b"
    r"|signal 9\b|exit(?:ed with)?(?: code| status)? 137\b|oom[-_ ]?kill"
    rf"|Cannot allocate memory|{_PINNED}"
)


def on_cpu(text: str, match: re.Match[str]) -> Facts:
    """A program of XLA's CPU backend."""
    del match
    requested = last_size(ON_CPU, text)
    return Facts("run", "CPU", program_of(text), requested=requested)


def on_host(text: str, match: re.Match[str]) -> Facts:
    """A process that has no more memory."""
    requested = (
        rf"Unable to allocate {SIZE}",
        rf"failed to alloc {SIZE} on host",
        rf"trying to allocate {SIZE}",
    )
    found = [x for x in (last_size(form, text) for form in requested) if x is not None]
    arrays = _ARRAY.findall(text)
    size = found[0] if found else None
    return Facts(
        "host",
        "host",
        program_of(text),
        requested=size,
        in_use=last_size(rf"anon-rss:{SIZE}", text),
        largest=(_listed(size or 0, *arrays[-1]),) if arrays else (),
        pinned=re.search(_PINNED, text[max(match.start() - 400, 0) :]) is not None,
    )


def _listed(size: int, shape: str, dtype: str) -> LargeBuffer:
    kind = re.match(r"[a-z]+", dtype)
    name = kind[0] if kind else dtype
    short = dtype.replace(name, _SHORT.get(name, name), 1)
    dimensions = shape.replace(" ", "").strip(",")
    return LargeBuffer(size, f"{short}[{dimensions}]", "NumPy's")
