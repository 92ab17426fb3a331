"""From the results of devices: the passes that `implementation=None` takes a kernel in.

A kernel enters with a chip, a dtype and a pass if every look at its values there has
passed, and from the smallest size on from which it is no slower than XLA: the upper
quarter of its times is at most the median of XLA's, at this size and at all larger
ones, in every case that was timed. What was not measured never enters.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._common import RESULTS
from benchmarks._figures_of import table
from benchmarks.device import results
from benchmarks.device.job import Job
from benchmarks.device.jobs import jobs as all_jobs
from benchmarks.device.results import DONE, Record
from pallas_kernels import measured
from pallas_kernels.chips import GPUS, TPUS
from pallas_kernels.measured import Measured

PAGE = RESULTS.parent.parent / "docs" / "device.md"
BLOCK = re.compile(r"(<!-- times -->\n).*?(<!-- end of times -->)", re.DOTALL)
SILENT = (None, "not here", "timed out", "stopped")
PASSES = {"forward": False, "backward": True}
HEADER = ("case", "chip", "dtype", "pass", "elements", "kernel ms", "XLA ms", "ratio")


def write(folder: pathlib.Path = RESULTS, path: pathlib.Path = measured.PATH) -> None:
    """Writes the list that the library reads."""
    found = entries(folder)
    path.write_text(text(found))
    print(f"{path.name}: {len(found)} entries")
    for entry in found:
        print(*entry)
    PAGE.write_text(on_page(PAGE.read_text(), folder))


def text(entries: Iterable[Measured]) -> str:
    """An entry a line."""
    lines = [json.dumps(entry._asdict()) for entry in entries]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def entries(folder: pathlib.Path = RESULTS) -> list[Measured]:
    """Of all chips, sorted."""
    known = list(all_jobs().values())
    found = []
    for chip, seen in newest(folder).items():
        if chip in (*GPUS, *TPUS):
            found += of_chip(chip, seen, known)
    return sorted(found)


def newest(folder: pathlib.Path = RESULTS) -> dict[str, dict[str, Record]]:
    """Of each chip the file with the latest line: drivers and versions do not mix."""
    best: dict[str, tuple[str, dict[str, Record]]] = {}
    for machine, seen in results.every(folder):
        seen = {name: record for name, record in seen.items() if not record["small"]}
        if not seen:
            continue
        last = max(record["when"] for record in seen.values())
        if last > best.get(machine["chip"], ("", {}))[0]:
            best[machine["chip"]] = last, seen
    return {chip: seen for chip, (_, seen) in best.items()}


def of_chip(
    chip: str, seen: dict[str, Record], known: Sequence[Job]
) -> Iterable[Measured]:
    for kernel in sorted({job.kernel for job in known if job.kernel}):
        mine = [job for job in known if job.kernel == kernel]
        if not _right(mine, seen):
            continue
        for dtype, rows in _timed(mine, seen).items():
            for which, backward in PASSES.items():
                size = smallest(r for r in rows if r["pass"] == which)
                if size is not None:
                    yield Measured(kernel, chip, dtype, size, backward)


def _right(mine: Sequence[Job], seen: dict[str, Record]) -> bool:
    """Every look was done; a sanitizer may be missing or slow, but not complain."""
    looks = [job for job in mine if job.piece == "right"]
    status = {job: seen.get(job.name, {}).get("status") for job in looks}
    return bool(looks) and all(
        found == DONE or (job.under and found in SILENT)
        for job, found in status.items()
    )


def _timed(
    mine: Sequence[Job], seen: dict[str, Record]
) -> dict[str, list[dict[str, Any]]]:
    """Rows by dtype, of dtypes in which every case was timed to the end."""
    found: dict[str, list[dict[str, Any]]] = {}
    for dtype in {job.dtype for job in mine if job.piece == "fast"}:
        records = [
            seen.get(job.name)
            for job in mine
            if job.piece == "fast" and job.dtype == dtype
        ]
        if all(record and record["status"] == DONE for record in records):
            rows = [row for record in records if record for row in record["rows"]]
            found[dtype] = rows
    return found


def smallest(rows: Iterable[dict[str, Any]]) -> int | None:
    """The size from which on the kernel is no slower, None if it is at the largest."""
    sides: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if row["side"] in ("kernel", "XLA") and "ms" in row:
            sides.setdefault((row["elements"], row["case"]), {})[row["side"]] = row
    won: dict[int, bool] = {}
    for (size, _), pair in sides.items():
        no_slower = len(pair) == 2 and pair["kernel"]["high"] <= pair["XLA"]["ms"]
        won[size] = won.get(size, True) and no_slower
    least = None
    for size in sorted(won, reverse=True):
        if not won[size]:
            break
        least = size
    return least


def times(folder: pathlib.Path = RESULTS) -> list[tuple]:
    """Rows for the docs: kernels beside XLA at the sizes that were timed."""
    found = []
    for chip, seen in newest(folder).items():
        for name, record in sorted(seen.items()):
            if name.startswith("fast: ") and record["rows"]:
                found += _pairs(chip, record["rows"])
    return found


def on_page(page: str, folder: pathlib.Path = RESULTS) -> str:
    """The page with the times that there are."""
    lines = [
        (*row[:4], f"{row[4]:,}", f"{row[5]:.3f}", f"{row[6]:.3f}", f"{row[7]:.2f}")
        for row in times(folder)
    ]
    body = table(HEADER, lines) if lines else "No device has run it yet."
    return BLOCK.sub(lambda found: f"{found[1]}{body}\n{found[2]}", page)


def _pairs(chip: str, rows: Sequence[dict[str, Any]]) -> list[tuple]:
    at = lambda row: (row.get("case"), row.get("dtype"), row["pass"], row["elements"])
    timed = [row for row in rows if "ms" in row and "case" in row]
    plain = {at(row): row["ms"] for row in timed if row["side"] == "XLA"}
    mine = [row for row in timed if row["side"] == "kernel" and at(row) in plain]
    return [
        (row["case"], chip, row["dtype"], row["pass"], row["elements"], row["ms"])
        + (plain[at(row)], row["ms"] / plain[at(row)])
        for row in mine
    ]
