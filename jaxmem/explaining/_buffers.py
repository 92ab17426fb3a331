"""The lists of buffers in a log: those of TPUs, of GPUs, and of the allocator."""

import os
import re

from jaxmem._module_path import parse_op_name
from jaxmem.explaining._facts import LargeBuffer
from jaxmem.explaining._sizes import SIZE, last_size, size_of

_BEGIN = re.compile(r"^\s*(?:\d+\. (?=Size: )|Buffer \d+:\s*$)", re.M)
_ARRAY = re.compile(r"Shape: \(?(\w+\[[\d,]*\])|Subshape: \(?(\w+\[[\d,]*\])")
_OP_NAME = re.compile(r'op_name="(.*?)"', re.DOTALL)
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# of older jax: `jit(f)/jit(main)/concatenate[dimension=0]`
_OLDER = re.compile(r"/jit\(main\)|\[.*", re.DOTALL)
_CHUNKS = re.compile(r"(\d+) Chunks of size (\d+) totalling")
# what is listed in place of an operation
_WITHOUT = {
    "argument": re.compile(r"Entry Parameter|Allocation type:.*(?:argument|parameter)"),
    "constant": re.compile(r"Allocation type:.*constant|XLA [Ll]abel: constant"),
}


def listed(text: str) -> tuple[LargeBuffer, ...]:
    """The buffers of the last list, the largest first."""
    parts = _BEGIN.split(text[max(map(text.rfind, _TITLES)) :])[1:]
    found: dict[LargeBuffer, int] = {}
    for part in parts:
        if buffer := _buffer(part.split("=====")[0]):
            found[buffer] = found.get(buffer, 0) + 1
    merged = (_times(buffer, n) for buffer, n in found.items())
    return tuple(sorted(merged, key=lambda b: -b.bytes))


_TITLES = "Largest program allocations in hbm", "Peak buffers:"


def chunks(text: str) -> tuple[LargeBuffer, ...]:
    """The pieces in use of an allocator's summary, those that take most first."""
    found = [
        LargeBuffer(int(n) * int(size), operation="allocated", count=int(n))
        for n, size in _CHUNKS.findall(text)
    ]
    least = sum(b.bytes for b in found) / 100
    large = (buffer for buffer in found if buffer.bytes > least)
    return tuple(sorted(large, key=lambda b: -b.bytes))


def array_of(text: str) -> str:
    """The type of the array that a description has."""
    match = _ARRAY.search(text)
    return (match[1] or match[2]) if match else ""


def _buffer(text: str) -> LargeBuffer | None:
    size = re.search(rf"Size: {SIZE}", text)
    if size is None:
        return None
    name, source = _OP_NAME.search(text), _SOURCE.search(text)
    op = parse_op_name(_OLDER.sub("", name[1]) if name else "")
    instead = [word for word, form in _WITHOUT.items() if form.search(text)]
    return LargeBuffer(
        size_of(size[1]),
        array_of(text),
        instead[0] if instead else op.operation,
        op.module_path,
        f"{os.path.basename(source[1])}:{source[2]}" if source else "",
        last_size(rf"Extra memory due to padding: {SIZE}", text) or 0,
    )


def _times(buffer: LargeBuffer, n: int) -> LargeBuffer:
    bytes_, padding = buffer.bytes * n, buffer.padding_bytes * n
    names = buffer.array, buffer.operation, buffer.module, buffer.source
    return LargeBuffer(bytes_, *names, padding, n)
