"""From the results of devices: the passes that `implementation=None` takes a kernel in.

A kernel enters with a chip, a dtype and a pass if every look at its values there has
passed, and from the smallest size on from which it is no slower than XLA: at this size
and at all larger ones its time on the chip is at most XLA's, or where the profiler has
not been asked, the upper quarter of its times by the host's clock at most the median of
XLA's. That holds for every case that was timed: by itself, or in whole steps, with our
kernels and with XLA in their place. What was not measured never enters, and a norm or
an activation not without whole steps: by itself it does not show what XLA gains where
it puts it into one kernel with the operations beside it.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._common import RESULTS
from benchmarks.device import results
from benchmarks.device.job import Job
from benchmarks.device.jobs import jobs as all_jobs
from benchmarks.device.results import DONE, Record
from benchmarks.device.seconds import FUSED_BY_XLA
from benchmarks.figures.rows import table
from pallas_kernels import measured
from pallas_kernels.chips import GPUS, TPUS
from pallas_kernels.measured import Measured

PAGE = RESULTS.parent.parent / "docs" / "device.md"
BLOCK = re.compile(r"(<!-- times -->\n).*?(<!-- end of times -->)", re.DOTALL)
MASKS = "right: mask of "
SILENT = (None, "not here", "timed out", "stopped")
PASSES = {"forward": False, "backward": True}
WHOLE = ", whole"
# Steps of `seconds`: elements of a layer's input, and which kernels their layers can
# take; of attention the case whose rules theirs has.
_NORMS = ("layer_norm", "dropout_add_layer_norm", "gelu")
STEPS = {
    "BERT-Large, 8 x 512": (8 * 512 * 1024, ("attention, S 8192, dropout", *_NORMS)),
    "GPT-2 medium, 4 x 1024": (
        4 * 1024 * 1024,
        ("attention, S 8192, dropout", *_NORMS),
    ),
    "Llama-1B blocks, 2 x 2048": (
        2 * 2048 * 2048,
        ("attention, S 8192, causal", "rms_norm", "silu"),
    ),
}
# Two jobs of `seconds`, and what their steps are called: with XLA's, and with ours.
BY_XLA = ("seconds: substituted, XLA", "substitute, XLA")
BY_KERNELS = ("seconds: substituted, our kernels", "substitute, our kernels")
BY_NONE = ("seconds: substituted", "substitute")
BY_ALL = ("seconds: substituted, all our kernels", "substitute, all our kernels")
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
            whole = any(row["case"].endswith(WHOLE) for row in rows)
            if kernel in FUSED_BY_XLA and not whole:
                continue
            for which, backward in PASSES.items():
                size = smallest(r for r in rows if r["pass"] == which)
                if size is not None:
                    yield Measured(kernel, chip, dtype, size, backward)


def _right(mine: Sequence[Job], seen: dict[str, Record]) -> bool:
    """Every look was done; a sanitizer may be missing or slow, but not complain.

    So may a look at masks alone: that at values with dropout has compared them, too.
    """
    looks = [job for job in mine if job.piece == "right"]
    status = {job: seen.get(job.name, {}).get("status") for job in looks}
    return bool(looks) and all(
        found == DONE or (found in SILENT and (job.under or MASKS in job.name))
        for job, found in status.items()
    )


def _timed(
    mine: Sequence[Job], seen: dict[str, Record]
) -> dict[str, list[dict[str, Any]]]:
    """Rows by dtype, of dtypes in which every case was timed, at some size at least."""
    found: dict[str, list[dict[str, Any]]] = {}
    for dtype in {job.dtype for job in mine if job.piece == "fast"}:
        jobs = [j for j in mine if j.piece == "fast" and j.dtype == dtype]
        cases = [_rows_of(job, seen) for job in jobs]
        if all(cases):
            found[dtype] = [row for rows in cases for row in rows]
    return found


def _rows_of(job: Job, seen: dict[str, Record]) -> list[dict[str, Any]]:
    """Of a case: of sizes that were timed to the end, and of steps with it."""
    record = seen.get(job.name)
    rows = record["rows"] if record else []
    if record and record["status"] != DONE:
        ended = {row["elements"] for row in rows if row.get("pass") == "both"}
        rows = [row for row in rows if row.get("elements") in ended]
    case = job.name.removeprefix("fast: ").removesuffix(f", {job.dtype}")
    return [*rows, *_rows_of_steps(job, case, seen)]


def _rows_of_steps(job: Job, case: str, seen: dict[str, Record]) -> Iterable[Record]:
    """Whole steps with our kernels and without, as rows of both passes."""
    fused = job.kernel in FUSED_BY_XLA
    jobs = (BY_NONE, BY_ALL) if fused else (BY_XLA, BY_KERNELS)
    plain, ours = (_by_step(seen.get(name)) for name, _ in jobs)
    for model, (elements, with_kernels) in STEPS.items():
        of_xla, of_ours = (f"{model}, {what}" for _, what in jobs)
        pair = {"XLA": plain.get(of_xla), "kernel": ours.get(of_ours)}
        taken = (job.kernel if fused else case) in with_kernels
        if taken and job.dtype == "bfloat16" and all(pair.values()):
            for side, row in pair.items():
                for which in PASSES:
                    about = {"case": f"{model}{WHOLE}", "elements": elements}
                    yield {**row, **about, "side": side, "pass": which}


def _by_step(record: Record | None) -> dict[str, Record]:
    rows = record["rows"] if record else []
    return {row["step"]: row for row in rows if "ms" in row and "bound" not in row}


def smallest(rows: Iterable[dict[str, Any]]) -> int | None:
    """The size from which on the kernel is no slower, None if it is at the largest."""
    sides: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if row["side"] in ("kernel", "XLA") and "ms" in row:
            sides.setdefault((row["elements"], row["case"]), {})[row["side"]] = row
    won: dict[int, bool] = {}
    for (size, _), pair in sides.items():
        won[size] = won.get(size, True) and len(pair) == 2 and _no_slower(**pair)
    least = None
    for size in sorted(won, reverse=True):
        if not won[size]:
            break
        least = size
    return least


def _no_slower(kernel: dict[str, Any], XLA: dict[str, Any]) -> bool:
    """By their time on the chip, where both have it: small calls wait for the host."""
    by = "device ms"
    if by in kernel and by in XLA:
        return kernel[by] <= XLA[by]
    return kernel["high"] <= XLA["ms"]


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
