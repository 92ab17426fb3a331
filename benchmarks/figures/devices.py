"""The figures of docs/many_devices.md."""

from benchmarks._common import TOO_LARGE
from benchmarks.figures.results import NAMES
from benchmarks.figures.rows import VERSION, figures, rows, table


@figures("devices")
def devices() -> str:
    """Bytes a device as compiled, how far predictions are off, and bytes sent."""
    head = ("step", "chip", "compiled", "off %", "sent")
    head += ("scheduled", "off % then", "sent then")
    return table(head, [_line(row) for row in rows("devices", VERSION)])


def _line(row) -> tuple[str, ...]:
    bytes_of = lambda name: f"{float(row[name]):,.0f}" if row[name] else ""
    off = lambda name: f"{float(row[name]):+.1f}" if row[name] else ""
    first = bytes_of("compiled MiB"), off("off %"), bytes_of("sent MiB")
    after = bytes_of("scheduled MiB"), off("off scheduled %")
    sent = bytes_of("sent scheduled MiB")
    return row["step"], NAMES[row["chip"]], *first, *after, sent


@figures("sent_by_microbatch")
def sent_by_microbatch() -> str:
    """What a device sends in a step of micro-batches, and its temporaries."""
    found = [r for r in rows("collectives") if r["step"].endswith(", microbatch")]
    size = lambda r, name: f"{float(r[name]):,.0f}"
    lines = [
        (
            r["step"].removesuffix(", microbatch"),
            r["under"],
            size(r, "MiB sent"),
            size(r, "temp MiB"),
        )
        for r in found
    ]
    return table(("gradients in", "under", "MiB sent", "MiB of temporaries"), lines)


@figures("pod")
def pod() -> str:
    """Steps of a pod: plain, checkpointed, and scheduled into the memory of a chip."""
    head = ("step", "devices", "batch", "plain", "checkpoint", "recomputed %", "sent")
    head += ("scheduled", "recomputed %", "seconds", "sent")
    return table(head, map(_pod_line, rows("pod")))


def _pod_line(row) -> tuple[str, ...]:
    size = lambda name: f"{float(row[name]):,.0f}"
    plain = row["plain MiB"]
    plain = plain if plain == TOO_LARGE else size("plain MiB")
    checkpoint = (
        size("checkpoint MiB"),
        row["recomputed %"],
        size("sent checkpoint MiB"),
    )
    more = row["recomputed scheduled %"], row["recomputed scheduled s"]
    scheduled = size("scheduled MiB"), *more, size("sent scheduled MiB")
    devices = f"{row['devices']} {NAMES[row['chip']]}"
    return row["step"], devices, row["batch"], plain, *checkpoint, *scheduled
