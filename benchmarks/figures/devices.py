"""The figures of docs/many_devices.md."""

from benchmarks._common import TOO_LARGE
from benchmarks.figures.results import NAMES
from benchmarks.figures.rows import (
    TEMP_AND_MS,
    VERSION,
    Row,
    beside_older,
    figures,
    rows,
    table,
    with_ms,
)


@figures("devices")
def devices() -> str:
    """Bytes and time of an H100, how far predictions are off, and bytes sent."""
    compiled, scheduled = (
        with_ms("devices", f"{which}: MiB") for which in ("compiled", "scheduled")
    )
    head = ("step", compiled, "off %", "sent", scheduled, "off % then", "sent then")
    lines = (
        (
            r["step"],
            *_of_device(r, "compiled"),
            *_of_device(r, "scheduled", " scheduled"),
        )
        for r in rows("devices")
        if r["chip"] == "h100"
    )
    return table(head, lines)


def _of_device(r: Row, which: str, scheduled: str = "") -> tuple[str, ...]:
    """A cell of bytes and time, one of the prediction, one of the bytes sent."""
    size = {f"{which} MiB": ",.0f", f"{which}: predicted ms": ",.1f"}
    sent, off = {f"sent{scheduled} MiB": ",.0f"}, float(r[f"off{scheduled} %"])
    where = {key: r[key] for key in ("step", "chip")}
    both, alone = (beside_older("devices", columns, where) for columns in (size, sent))
    return both, f"{off:+.1f}", alone


@figures("devices, TPU")
def devices_of_tpus() -> str:
    """The same of a TPU v5p, on the jax that its compiles of minutes were made with."""
    lines = (
        (
            r["step"],
            f"{float(r['compiled MiB']):,.0f}",
            f"{float(r['off %']):+.1f}",
            f"{float(r['sent MiB']):,.0f}",
        )
        for r in rows("devices", VERSION)
        if r["chip"] == "tpu-v5p"
    )
    return table(("step", "compiled", "off %", "sent"), lines)


@figures("sent_by_microbatch")
def sent_by_microbatch() -> str:
    """What a device sends in a step of micro-batches, its temporaries and time."""
    found = [r for r in rows("collectives") if r["step"].endswith(", microbatch")]
    lines = []
    for r in found:
        where = {key: r[key] for key in ("step", "under")}
        columns = {"MiB sent": ",.0f"}, TEMP_AND_MS
        cells = (beside_older("collectives", c, where) for c in columns)
        lines.append((r["step"].removesuffix(", microbatch"), r["under"], *cells))
    head = ("gradients in", "under", "MiB sent", "MiB of temporaries / predicted ms")
    return table(head, lines)


@figures("pod")
def pod() -> str:
    """Steps of a pod: plain, checkpointed, and scheduled into the memory of a chip."""
    head = ("step", "devices", "batch", "plain", "checkpoint", "recomputed %", "sent")
    head += ("scheduled", "recomputed %", "seconds of that", "sent")
    return table(head, map(_pod_line, rows("pod")))


def _pod_line(r: Row) -> tuple[str, ...]:
    """Cells of bytes have the predicted milliseconds of the step besides."""
    where = {key: r[key] for key in ("step", "chip")}
    cell = lambda columns: beside_older("pod", columns, where)
    sizes = [
        {f"{which} MiB": ",.0f", f"{which}: predicted ms": ",.0f"}
        for which in ("plain", "checkpoint", "scheduled")
    ]
    plain = TOO_LARGE if r["plain MiB"] == TOO_LARGE else cell(sizes[0])
    sent = [cell({f"sent {c} MiB": ",.0f"}) for c in ("checkpoint", "scheduled")]
    checkpoint = cell(sizes[1]), r["recomputed %"], sent[0]
    more = r["recomputed scheduled %"], r["recomputed scheduled s"]
    scheduled = cell(sizes[2]), *more, sent[1]
    devices = f"{r['devices']} {NAMES[r['chip']]}"
    return r["step"], devices, r["batch"], plain, *checkpoint, *scheduled
