"""The tables of docs/ that compare a technique with the plain step."""

from benchmarks.figures.rows import (
    PEAK_AND_MS,
    TEMP_AND_MS,
    Row,
    beside_older,
    figures,
    rows,
    table,
    with_ms,
)

CHIPS = {"h100": "H100", "tpu-v5e": "TPU v5e"}
# what is compared: the benchmark's stack, the plain layer, the lean ones
NORMS = tuple(f"layer_norm, save={what}" for what in ("input", "output"))
ATTENTION = "flax.linen, dropout 0.1", "the same in jax.checkpoint"
STACKS = {
    "GELU MLP, 8 layers": (
        "mlp",
        *("jax.nn.gelu", "gelu, save=input", "gelu, save=output"),
    ),
    "SiLU MLP, 8 layers": ("mlp", "jax.nn.silu", "silu, save=output"),
    "ReLU MLP, 8 layers": ("mlp", "jax.nn.relu", "relu"),
    "norm and dense, 8 layers": ("pre-norm", "flax.linen.LayerNorm", *NORMS),
    "attention, 8 layers, 8 x 512": (
        "attention, B 8 S 512",
        *(*ATTENTION, "dot_product_attention"),
    ),
    "attention, one layer, 1 x 4096": (
        "attention, B 1 S 4096, one layer",
        *(*ATTENTION, "dot_product_attention"),
    ),
}


@figures("ops, bytes")
def ops() -> str:
    """Stacks of layers with the functions of JAX and Flax, and with lean ops."""
    lines = []
    for title, (stack, *layers) in STACKS.items():
        for layer in layers:
            where = {"stack": stack, "layer": layer}
            cells = [
                beside_older("layers", TEMP_AND_MS, {**where, "target": chip})
                for chip in CHIPS
            ]
            lines.append((title, f"`{layer}`", *cells))
    heads = (f"{chip}, MiB / predicted ms" for chip in CHIPS.values())
    return table(("stack", "function", *heads), lines)


@figures("release, bytes")
def release() -> str:
    """Peaks / predicted ms of one Adam step, as it is and as `schedule` returns it."""
    lines = []
    for remat, title in {"a layer": "around each layer", "none": "none"}.items():
        for substituted in ("no", "yes"):
            case = {"remat": remat, "substituted": substituted}
            cells = [
                beside_older(
                    "release",
                    {f"{who}: {c}": form for c, form in PEAK_AND_MS.items()},
                    {**case, "target": chip},
                )
                for chip in CHIPS
                for who in ("XLA", "scheduled")
            ]
            lines.append((title, substituted, *cells))
    ways = [
        f"{chip}, {how}" for chip in CHIPS.values() for how in ("plain", "released")
    ]
    return table(("`jax.checkpoint`", "substituted", *ways), lines)


@figures("accumulation, bytes")
def accumulation() -> str:
    """Peaks / predicted ms of eight micro-batches, by every way of accumulating."""
    ways = dict.fromkeys(r["variant"] for r in rows("accumulation"))
    peak = lambda way, chip: beside_older(
        *("accumulation", PEAK_AND_MS),
        {"variant": way, "N": "8", "target": chip},
    )
    lines = [(way, *(peak(way, chip) for chip in CHIPS)) for way in ways]
    heads = (with_ms("accumulation", f"{chip}, MiB") for chip in CHIPS.values())
    return table(("way", *heads), lines)


@figures("published peaks")
def published() -> str:
    """Compiled peaks and their ms beside what the papers measured with PyTorch."""
    keys, both = ("model", "how", "target"), {"peak GiB": ".2f", "predicted ms": ",.0f"}
    lines = []
    for r in rows("optimizers_published"):
        where = {key: r[key] for key in keys}
        compiled = beside_older("optimizers_published", both, where)
        lines.append((*where.values(), compiled, r["published GiB"]))
    compiled = with_ms("optimizers_published", "compiled: GiB")
    return table(("model", "step", "chip", compiled, "published, GiB"), lines)


@figures("norms, bytes")
def norms() -> str:
    """A scan over norms and dense layers, by what the norm keeps."""
    plain = {"layer": "flax.linen.LayerNorm", "target": "h100"}
    stack = {"stack": "norm and dense"}
    lines = [
        ("`flax.linen.LayerNorm`", beside_older("layers", TEMP_AND_MS, plain)),
        *(
            (
                f"`{title}`",
                beside_older("storage", TEMP_AND_MS, {**stack, "kept": kept}),
            )
            for title, kept in (
                ('layer_norm(save="output")', "save=output"),
                ("ms_layer_norm", "ms_layer_norm"),
            )
        ),
    ]
    return table(("norm", "H100, MiB / predicted ms"), lines)


@figures("tables, bytes")
def tables() -> str:
    """Peaks / predicted ms of a step over a large table."""
    lines = dict.fromkeys(
        (r["rule"], r["columns"], r["variant"]) for r in rows("tables")
    )
    finer = PEAK_AND_MS | {"predicted ms": ",.2f"}  # steps of less than one
    peak = lambda key, chip: beside_older(
        *("tables", finer),
        dict(zip(("rule", "columns", "variant"), key, strict=True)) | {"target": chip},
    )
    cells = [(*key, *(peak(key, chip) for chip in CHIPS)) for key in sorted(lines)]
    heads = (f"{chip}, MiB / predicted ms" for chip in CHIPS.values())
    return table(("rule", "columns", "gradient", *heads), cells)


@figures("memory layers")
def memory_layers() -> str:
    """Peaks / predicted ms of a step whose layers read one pool of values."""
    found = rows("memory_layers")
    lines = dict.fromkeys((r["layers"], r["gradient"]) for r in found)
    cell = {(r["layers"], r["gradient"], r["target"]): both(r) for r in found}
    cells = [(*key, *(cell[*key, chip] for chip in CHIPS)) for key in lines]
    heads = (f"{chip}, MiB / predicted ms" for chip in CHIPS.values())
    return table(("layers", "gradient", *heads), cells)


@figures("memformer")
def memformer() -> str:
    """The peak and the time of a step over segments, in three forms."""
    titles = {
        "plain": "plain",
        "own replay": "its own replay, `jax.checkpoint` of a segment",
        "schedule": "plain, through `jaxmem.schedule`",
    }
    found = {r["form"]: both(r) for r in rows("memformer")}
    lines = [(title, found[form]) for form, title in titles.items()]
    return table(("step", "peak, MiB / predicted ms"), lines)


def both(r: Row) -> str:
    """The peak and the time of a row, in MiB and ms."""
    return f"{float(r['peak MiB']):,.0f} / {float(r['predicted ms']):.1f}"
