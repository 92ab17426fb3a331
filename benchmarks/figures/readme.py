"""The README's tables."""

from benchmarks.figures.frontier import images
from benchmarks.figures.rows import (
    PEAK_AND_MS,
    TEMP_AND_MS,
    VERSION,
    Row,
    beside_older,
    figures,
    row,
    rows,
    table,
    with_ms,
    with_older,
)

CHIPS = ("h100", "tpu-v5e")


@figures("activations")
def activations() -> str:
    """What a loss gradient takes besides its arguments and outputs."""
    short, long = "attention, B 8 S 512", "attention, B 1 S 4096, one layer"
    stock, ours = "flax.linen, dropout 0.1", "dot_product_attention"
    norms = "flax.linen.LayerNorm", "layer_norm, save=output"
    stacks = (
        ("GELU MLP, 8 layers", "mlp", "jax.nn.gelu", "gelu, save=output"),
        ("pre-LN, 8 layers", "pre-norm", *norms),
        ("attention with dropout, 8 layers, S 512", short, stock, ours),
        ("attention with dropout, one layer, S 4096", long, stock, ours),
    )
    lines = [
        [title]
        + [
            beside_older(
                *("layers", TEMP_AND_MS),
                {"stack": stack, "layer": layer, "target": chip},
            )
            for chip in CHIPS
            for layer in pair
        ]
        for title, stack, *pair in stacks
    ]
    bert = [
        beside_older("bert", TEMP_AND_MS, {"model": model, "target": chip})
        for chip in CHIPS
        for model in ("plain", "substituted")
    ]
    lines.append(["BERT-Large in Flax, B 8 S 512, `substitute` alone", *bert])
    title = "gradient of the loss: MiB of temporaries / predicted ms"
    head = "H100, plain", "H100, jaxmem", "TPU v5e, plain", "TPU v5e, jaxmem"
    return table((title, *head), lines)


WAYS = {
    "plain": "plain",
    "dots_with_no_batch_dims_saveable": "`dots_with_no_batch_dims_saveable`",
    "nothing_saveable": "`nothing_saveable`",
    "schedule": "`schedule`",
    "substitute, schedule": "`substitute` and `schedule`",
    "substitute, schedule, budget": "both, in the bytes of `nothing_saveable`",
}


@figures("blocks")
def blocks() -> str:
    """Loss gradients of whole models under what JAX offers, and under jaxmem."""
    models = dict.fromkeys(r["model"] for r in rows("blocks"))
    head = ("gradient of the loss on an H100: MiB of temporaries / predicted ms",)
    lines = [[model, *(_bytes_and_ms(model, how) for how in WAYS)] for model in models]
    return table((*head, *WAYS.values()), lines)


def _bytes_and_ms(model: str, how: str) -> str:
    where = {"model": model, "how": how}
    if not any(r["model"] == model and r["how"] == how for r in rows("blocks")):
        return "–"
    return beside_older("blocks", TEMP_AND_MS, where)


@figures("blocks, BERT")
def bert_ms() -> str:
    """The predicted time of a gradient beside the plain one and the best policy."""
    model = "BERT-Large, 8 x 512"
    ms = {
        r["how"]: float(r["predicted ms"])
        for r in rows("blocks")
        if r["model"] == model
    }
    policies = [v for how, v in ms.items() if how.endswith("_saveable")]
    ours = ms["substitute, schedule"]
    plain, best = ms["plain"], min(policies)
    return f"{ours:.0f} ms instead of {plain:.0f} (best policy of JAX: {best:.0f})"


@figures("budgets, pictures")
def pictures() -> str:
    """An image for each model."""
    return "\n".join(
        images("budget", dict.fromkeys(r["model"] for r in rows("budget")))
    )


@figures("budgets")
def budgets() -> str:
    """What unmodified models take in as many bytes as the stock policies do."""
    older, lines = of_policies(VERSION), []
    for (model, policy), r in of_policies().items():
        old = older.get((model, policy), r)
        cells = [
            with_older(r, old, {f"{of}{c}": f for c, f in TEMP_AND_MS.items()})
            for of in ("its ", "")
        ]
        recomputed = [r[f"{of}recomputes %"] for of in ("its ", "")]
        if not r["temp MiB"]:
            cells[1], recomputed[1] = "out of reach", "–"
        lines.append((f"{model}, `{policy}`", *cells, *map(_percent, recomputed)))
    title = "model, and JAX's policy of `jax.checkpoint` that sets the budget"
    head = "the policy: MiB / predicted ms", "`schedule`: MiB / predicted ms"
    return table((title, *head, "the policy recomputes, %", "`schedule`, %"), lines)


@figures("budgets, slower")
def slower() -> str:
    """In how many rows the fastest policy that fits takes less time than ours."""
    found = [r for r in rows("budget") if r["temp MiB"]]
    return f"{sum(r['no slower'] == 'no' for r in found)} of {len(found)}"


def of_policies(version: str = "") -> dict[tuple[str, str], Row]:
    """(model, policy) -> its row at the bytes that the policy takes."""
    return {
        (r["model"], r["stock policy"]): r
        for r in rows("budget", version)
        if abs(float(r["budget MiB"]) - float(r["its temp MiB"])) <= 1
    }


def _percent(text: str) -> str:
    return f"{float(text):.1f}" if text[0].isdigit() else text


@figures("steps")
def steps() -> str:
    """Whole train steps, as XLA compiles them, and with jaxmem."""
    one = {"remat": "a layer", "substituted": "no"}
    batch = [
        beside_older(
            "release",
            {f"{who}: {c}": form for c, form in PEAK_AND_MS.items()},
            one | {"target": chip},
        )
        for chip in CHIPS
        for who in ("XLA", "scheduled")
    ]
    eight = [
        beside_older(
            *("accumulation", PEAK_AND_MS),
            {"variant": variant, "N": "8", "target": chip},
        )
        for chip in CHIPS
        for variant in ("accumulation by hand, Adam", "microbatch, AdamA")
    ]
    plain = row("release", one | {"target": "h100"})
    state = float(plain["XLA: peak MiB"]) - float(plain["XLA: temp MiB"])
    title = "train step of BERT-Large with Adam: "
    title = with_ms("release", f"{title}peak MiB ({state:,.0f} of state)")
    lines = (
        ("one batch of 8 x 128, `nn.remat` on each layer: `schedule`", *batch),
        ("8 micro-batches of that: `microbatch` with `adama`", *eight),
    )
    head = "H100, plain", "H100, jaxmem", "TPU v5e, plain", "TPU v5e, jaxmem"
    return table((title, *head), lines)
