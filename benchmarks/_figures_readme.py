"""The README's tables."""

from benchmarks._figures_of import figures, row, rows, table, whole

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
            whole(
                "layers", "temp MiB", {"stack": stack, "layer": layer, "target": chip}
            )
            for chip in CHIPS
            for layer in pair
        ]
        for title, stack, *pair in stacks
    ]
    bert = [
        whole("bert", "temp MiB", {"model": model, "target": chip})
        for chip in CHIPS
        for model in ("plain", "substituted")
    ]
    lines.append(["BERT-Large in Flax, B 8 S 512, `substitute` alone", *bert])
    title = "MiB of temporaries, loss gradient"
    return table((title, "H100", "ours", "TPU v5e", "ours"), lines)


@figures("blocks")
def blocks() -> str:
    """Loss gradients of whole models under what JAX offers, and ours."""
    variants = ("plain", "dots_saveable", "dots_with_no_batch_dims_saveable")
    variants = (*variants, "schedule", "substitute, schedule")
    models = dict.fromkeys(r["model"] for r in rows("blocks"))
    cells = lambda model: [
        whole("blocks", "temp MiB", {"model": model, "how": how}) for how in variants
    ]
    policies = [f"`{variant}`" for variant in variants[1:3]]
    head = ("MiB of temporaries on H100", "plain", *policies)
    ours = "`schedule` alone", "`substitute` too"
    return table((*head, *ours), [[model, *cells(model)] for model in models])


@figures("budgets")
def budgets() -> str:
    """What unmodified models recompute in as many bytes as the stock policies take."""
    lines = []
    for r in rows("budget"):
        its = float(r["its temp MiB"])
        if abs(float(r["budget MiB"]) - its) > 1:
            continue
        temp, recomputed = r["temp MiB"], r["recomputes %"]
        ours = (f"{float(temp):,.0f}", f"{float(recomputed):.1f}")
        policy = f"{r['model']}, `{r['stock policy']}`"
        stock = f"{its:,.0f}", f"{float(r['its recomputes %']):.1f}"
        lines.append((policy, *stock, *(ours if temp else ("out of reach", "–"))))
    title = "unmodified, a budget of what a stock policy takes on H100"
    ours = "`schedule`: MiB", "recomputes %"
    return table((title, "its MiB", "it recomputes %", *ours), lines)


@figures("steps")
def steps() -> str:
    """Whole train steps: the peak as XLA compiles them, and ours."""
    one = {"remat": "a layer", "substituted": "no"}
    batch = [
        whole("release", f"{who}: peak MiB", one | {"target": chip})
        for chip in CHIPS
        for who in ("XLA", "scheduled")
    ]
    eight = [
        whole(
            "accumulation", "peak MiB", {"variant": variant, "N": "8", "target": chip}
        )
        for chip in CHIPS
        for variant in ("accumulation by hand, Adam", "microbatch, AdamA")
    ]
    plain = row("release", one | {"target": "h100"})
    state = float(plain["XLA: peak MiB"]) - float(plain["XLA: temp MiB"])
    title = f"MiB of peak, BERT-Large with Adam ({state:,.0f} of state)"
    lines = (
        ("one batch, B 8 S 128, remat a layer: `schedule` alone", *batch),
        ("8 micro-batches of it: `microbatch` with `adama`", *eight),
    )
    return table((title, "H100", "ours", "TPU v5e", "ours"), lines)
