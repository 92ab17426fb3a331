"""Tables of optimizers: bytes a parameter, and what a small GPT trains to."""

import functools
from collections.abc import Iterable, Mapping

from benchmarks.figures.rows import (
    PEAK_AND_MS,
    beside_older,
    figures,
    row,
    rows,
    table,
    value,
    with_ms,
)

MODEL = "Llama-7B"
# the demonstration's name -> the ledger's, as a README has them
TRAINED = {
    "adamw": "AdamW, float32",
    "adama": "AdamA",
    "adamw-8bit": "AdamW, 8-bit moments",
    "adamw-4bit": "AdamW, 4-bit moments",
    "adama-8bit": "AdamA, 8-bit moments",
    "adamw-host": "AdamW, moments on the host",
    "lion": "Lion",
    "lion-8bit": "Lion, 8-bit",
    "schedule-free": "Schedule-free AdamW",
    "schedule-free-8bit": "Schedule-free AdamW, 8-bit",
    "galore": "GaLore",
    "apollo": "APOLLO",
    "apollo-mini": "APOLLO-Mini",
    "fira": "Fira",
    "came": "CAME",
    "adam-mini": "Adam-mini",
    "sm3": "SM3",
    "adafactor": "Adafactor",
    "adalomo": "AdaLomo, bfloat16",
    "lomo": "LOMO, bfloat16",
}

# as a page of docs/optimizers has them
STOCHASTIC = "bfloat16, stochastic rounding"
FURTHER = {
    "adamw-8bit, bf16, split_master": "AdamW, 8-bit, bfloat16 + 8-bit master",
    "adamw-8bit, bf16, stochastic_rounding": f"AdamW, 8-bit, {STOCHASTIC}",
    "adamw-8bit, bf16, kahan_summation": "AdamW, 8-bit, bfloat16, Kahan",
    "lion-4bit": "Lion, 4-bit",
    "lion-8bit, bf16, stochastic_rounding": f"Lion, 8-bit, {STOCHASTIC}",
    "schedule-free-4bit": "Schedule-free AdamW, 4-bit",
    "schedule-free-8bit, bf16, stochastic_rounding": (
        f"Schedule-free AdamW, 8-bit, {STOCHASTIC}"
    ),
    "soap": "SOAP",
    "soap-8bit": "SOAP, 8-bit",
    "soap-one-sided-8bit": "SOAP, one-sided, 8-bit",
    "shampoo": "Shampoo",
    "shampoo-8bit": "Shampoo, 8-bit",
}


# a page of docs/optimizers -> those of TRAINED and FURTHER that it describes
FAMILIES = {
    "low bit": (
        *("adamw-8bit", "adamw-4bit", "adama-8bit"),
        *(name for name in FURTHER if name.startswith("adamw")),
    ),
    "lion": ("lion", "lion-8bit", "lion-4bit", *(n for n in FURTHER if "lion-8" in n)),
    "schedule-free": (
        *("schedule-free", "schedule-free-8bit", "schedule-free-4bit"),
        *(name for name in FURTHER if "free-8bit" in name),
    ),
    "preconditioned": tuple(
        name for name in FURTHER if name.startswith(("soap", "shampoo"))
    ),
    "low rank": ("galore", "apollo", "apollo-mini", "fira"),
    "factored": ("adafactor", "adalomo", "lomo", "came", "sm3", "adam-mini"),
}


@figures("optimizers")
def optimizers() -> str:
    return compared(TRAINED)


def compared(names: Iterable[str]) -> str:
    """State in a large model, and the loss of a small one beside AdamW's."""
    plain = value("optimizer_training", "mean", {"optimizer": "adamw"})
    lines = []
    for name in names:
        title = (TRAINED | FURTHER)[name]
        held = row("ledger", {"model": MODEL, "optimizer": title})
        trained = row("optimizer_training", {"optimizer": name})
        loss, rate = float(trained["mean"]), trained["rate"]
        host = float(held["host B/param"])
        beside = f" (host {host:.2f})" if host else ""
        state = float(held["moments"]) + float(held["masters"])
        lines.append(
            (title, f"{state:.2f}{beside}", held["device, 1 micro-batch"])
            + (held["device B/param"], f"{loss:.3f}", f"{loss - plain:+.3f}", rate)
        )
    head = ("Llama-7B, bytes a parameter", "optimizer state")
    head += ("state, weights and gradients", "the same with 8 micro-batches")
    more = "loss of a small GPT", "difference from AdamW", "rate, times AdamW's"
    return table((*head, *more), lines)


for _family, _names in FAMILIES.items():
    figures(f"optimizers, {_family}")(functools.partial(compared, ("adamw", *_names)))


@figures("what is lost")
def lost() -> str:
    """Loss, time of the update and bytes of one step, by the loss."""
    plain = value("optimizer_training", "mean", {"optimizer": "adamw"})
    found = {r["optimizer"]: r for r in rows("optimizer_training")}
    mean = lambda r: float(found[r["optimizer"]]["mean"])
    seeds = lambda name: [float(found[name][f"seed {i}"]) for i in range(3)]
    lines = [
        (
            r["optimizer"],
            f"{mean(r) - plain:+.3f}",
            r["predicted ms"],
            *(r[part] for part in ("weights", "gradients", "state")),
            r["bytes a parameter"],
        )
        for r in sorted(rows("optimizer_update"), key=mean)
    ]
    spread = max(seeds("adamw")) - min(seeds("adamw"))
    head = "optimizer", f"loss, difference from AdamW (its seeds: {spread:.3f})"
    more = ("predicted ms of the update", "weights", "gradients", "state", "together")
    return table((*head, *more), lines)


@figures("ledger")
def ledger() -> str:
    """All parts of the ledger, of the largest model but one."""
    parts = ("weights", "gradients", "accumulator", "moments", "masters")
    columns = (*parts, "device B/param", "host B/param")
    lines = [
        (r["optimizer"], *(f"{float(r[c]):.2f}" for c in columns))
        for r in rows("ledger")
        if r["model"] == MODEL
    ]
    return table((f"{MODEL}, 8 micro-batches, bytes a parameter", *columns), lines)


@figures("low_bit")
def low_bit() -> str:
    return peaks(on_host=False)


@figures("on host")
def on_host() -> str:
    return peaks(on_host=True)


def peaks(on_host: bool) -> str:
    """Peaks / predicted ms of steps with codes and masters, or state on the host."""
    case = ("model", "optimizer", "target")
    names = {"bert": "BERT-Large, B 8 S 128", "llama": "Llama-1B, B 1 S 512"}
    lines = [
        (
            names[r["model"]],
            r["optimizer"],
            r["target"],
            beside_older(
                *("low_bit", PEAK_AND_MS), {column: r[column] for column in case}
            ),
            f"{float(r['peak, bytes a parameter']):.2f}",
            f"{float(r['host, bytes a parameter']):.2f}",
        )
        for r in rows("low_bit")
        if (float(r["host, bytes a parameter"]) > 0) == on_host
    ]
    head = (
        "scheduled step, remat",
        "optimizer",
        "chip",
        with_ms("low_bit", "peak MiB"),
    )
    return table((*head, "bytes a parameter", "on the host"), lines)


@figures("muon, steps")
def muon_steps() -> str:
    """Peaks / predicted ms of a whole step, plain and scheduled."""
    lines = [
        (
            r["optimizer"],
            f"{float(r['state MiB']):,.0f}",
            *(_peak_and_ms(r, how) for how in ("", "scheduled: ")),
        )
        for r in rows("muon")
        if r["what"] == "step"
    ]
    head = "Llama of 16 layers, B 1 S 512, H100", "optimizer state, MiB"
    last = "peak MiB / predicted ms", "scheduled: peak MiB / predicted ms"
    return table((*head, *last), lines)


@figures("muon, devices")
def muon_devices() -> str:
    """What a device has and sends in an update of sharded parameters."""
    lines = [
        (r["optimizer"], *(f"{float(r[c]):,.0f}" for c in ("temp MiB", "sent MiB")))
        + (f"{float(r['predicted ms']):,.1f}",)
        for r in rows("muon")
        if r["what"] != "step"
    ]
    head = "update of the same parameters on 8 H100, a device", "temporaries, MiB"
    return table((*head, "sent, MiB", "predicted ms"), lines)


def _peak_and_ms(r: Mapping[str, str], how: str) -> str:
    peak, ms = (float(r[how + column]) for column in PEAK_AND_MS)
    return f"{peak:,.0f} / {ms:,.1f}"


@figures("moment codes")
def moment_codes() -> str:
    """Errors of updates by the spread of gradients, and what a small GPT trains to."""
    losses = {r["optimizer"]: float(r["mean"]) for r in rows("optimizer_training")}
    trained = {"companding": "8bit", "4-bit dynamic": "4bit", "dynamic": ""}
    lines: dict[str, list[str]] = {}
    for r in rows("moment_codes"):
        line = lines.setdefault(r["code"], [f"`{r['code']}`"])
        line.append(f"{float(r['error']):.2f}, {float(r['largest update']):,.1f}")
    for code, line in lines.items():
        loss = losses.get(f"adamw-{trained.get(code, code)}")
        line.append("" if loss is None else f"{loss - losses['adamw']:+.3f}")
    kinds = dict.fromkeys(r["gradients"] for r in rows("moment_codes"))
    return table(("code", *kinds, "loss, difference from AdamW"), lines.values())
