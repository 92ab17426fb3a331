"""What a compile has left in its folder, read: bytes, texts, errors."""

import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem._bytes import parse_bytes
from jaxmem.chips import compiler_versions
from jaxmem.memory.buffers.assignment import assigned_bytes

_LAST_LINES = 15
_USED = re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm")
_TELLS_BUFFERS = 0, 0, 51  # the version of libtpu since which it tells assigned bytes
_DUMPS = {
    "buffer_assignment": "*buffer-assignment.txt",
    "live_range": "*live-range.txt",
    "memory_usage_report": "*memory-usage-report.txt",
    "hlo": "*after_optimizations.txt",
}


class CompileError(RuntimeError):
    """A step that cannot be lowered or compiled for a chip: why, or how that died."""


class DoesNotFit(CompileError):
    """The compiler refused the step: it needs more memory than the target has."""

    @property
    def needed_bytes(self) -> int | None:
        """What the step needs, where the compiler tells: to a hundredth of a unit."""
        found = _USED.search(str(self))
        if found is None:
            return None
        # what was rounded down may be half of that more
        return parse_bytes(f"{float(found[1]) + 0.005}{found[2]}iB")


def read_answer(
    folder: str, how: str, request: dict[str, Any]
) -> dict[str, Any] | None:
    """`memory`, `cost`, `dump` and `aliases`; None where the texts do not agree."""
    dump = {kind: _largest(folder, form) for kind, form in _DUMPS.items()}
    if how == "assigned":
        # A killed compile may have left texts that are not complete.
        texts = dump["buffer_assignment"], dump["memory_usage_report"]
        memory, cost = assigned_bytes(*texts), {}
        if memory is None:
            return None
    else:
        result = _result(folder, how, request)
        memory, cost = _of_buffers(result["memory"], request, dump), result["cost"]
        dump["hlo"] = dump["hlo"] or result["hlo"]
    aliases = aliases_of(dump["hlo"], request["used"])
    return {"memory": memory, "cost": cost, "dump": dump, "aliases": aliases}


def _of_buffers(
    memory: dict[str, int], request: dict[str, Any], dump: dict[str, str]
) -> dict[str, int]:
    """What was told; of an older libtpu no more temporaries than it has assigned.

    It tells others: of the same buffers of 536 MiB 571 or 634, by its version. What it
    holds against the chip's memory are the buffers.
    """
    version = dict(compiler_versions()).get("libtpu", "")
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    if request["target"]["platform"] != "tpu" or numbers >= _TELLS_BUFFERS:
        return memory
    assigned = assigned_bytes(dump["buffer_assignment"], dump["memory_usage_report"])
    if assigned is None:
        return memory
    return memory | {"temp": min(memory["temp"], assigned["temp"])}


def _result(folder: str, how: str, request: dict[str, Any]) -> dict[str, Any]:
    path, target = os.path.join(folder, "answer"), request["target"]["name"]
    if not os.path.exists(path):
        log = os.path.join(folder, "log")
        raise compiler_died(request, f"({how})", log)
    with open(path, "rb") as file:
        answer = pickle.load(file)
    if "result" in answer:
        return answer["result"]
    text = answer["error"]
    if "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text:
        raise DoesNotFit(f"{request['name']!r} does not fit on {target}: {text}")
    raise CompileError(
        f"compiling {request['name']!r} for {target} failed: {answer['type']}: {text}"
    )


def compiler_died(request: dict[str, Any], how: str, log: str) -> CompileError:
    """An error that shows the end of what the compiler has printed."""
    try:
        with open(log, errors="replace") as file:
            lines = file.read().splitlines()[-_LAST_LINES:]
    except FileNotFoundError:
        lines = []
    return CompileError(
        f"the compiler for {request['target']['name']} died {how} on "
        f"{request['name']!r}; its last lines were:\n"
        + "\n".join(f"  {line}" for line in lines)
    )


def aliases_of(hlo: str, used: Sequence[int]) -> list[tuple[str, int]]:
    """(output index, leaf) of each input buffer that an output reuses."""
    # The program's parameters are the leaves that it uses, in their order.
    start = hlo.find("input_output_alias={")
    if start < 0:
        return []
    line = hlo[start : hlo.find("\n", start)]
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", line)
    return [(out, used[int(number)]) for out, number in pairs]


def _largest(folder: str, pattern: str) -> str:
    """The text of the largest file of a kind: XLA compiles small helpers beside."""
    paths = list(Path(folder, "dump").glob(pattern))
    if not paths:
        return ""
    return max(paths, key=os.path.getsize).read_text(errors="replace")
