"""First screens of README.md and docs/index.md: a headline, models, and calls."""

import functools
from collections.abc import Mapping, Sequence

from benchmarks.figures.frontier import PLAIN, WITHOUT
from benchmarks.figures.readme import of_policies
from benchmarks.figures.rows import (
    TEMP_AND_MS,
    beside_older,
    figures,
    row,
    table,
    value,
    with_older,
)

H100 = {"target": "h100"}


def gib(column: str, step: str) -> str:
    """GiB of the step that the picture shows."""
    return f"{value('before_after', column, {'step': step}) / 1024:.1f} GiB"


figures("picture, before")(functools.partial(gib, "peak MiB", "plain"))
figures("picture, after")(functools.partial(gib, "peak MiB", "substituted, schedule"))


@figures("picture, ms")
def picture_ms() -> str:
    """The predicted time of both steps."""
    steps = ("plain", "substituted, schedule")
    ms = [value("before_after", "predicted ms", {"step": step}) for step in steps]
    return " to ".join(f"{x:.0f}" for x in ms) + " ms"


def from_to(
    name: str, column: str, before: Mapping[str, str], after: Mapping[str, str]
) -> str:
    """A figure in MiB before and after, and the predicted ms if the file has them."""
    found = [row(name, where) for where in (before, after)]
    mib, ms = ([r.get(c) for r in found] for c in (column, "predicted ms"))
    return _less(mib, ms)


def _less(mib: Sequence[str | None], ms: Sequence[str | None]) -> str:
    """ "9 → 4 MiB, 5.0 → 6.0 ms"; no milliseconds where a file has none."""
    joined = lambda cells, form: " → ".join(format(float(x), form) for x in cells)
    bytes_of = f"{joined(mib, ',.0f')} MiB"
    return f"{bytes_of}, {joined(ms, ',.1f')} ms" if all(ms) else bytes_of


def block(model: str, how: str) -> dict[str, str]:
    return {"model": model, "how": how}


@figures("headline, Llama")
def llama() -> str:
    name = "Llama-1B blocks, 2 x 2048"
    ways = "plain", "substitute, schedule"
    before, after = (value("blocks", "temp MiB", block(name, how)) for how in ways)
    return f"{after:,.0f} MiB instead of {before:,.0f} MiB"


FIRST = ("BERT-Large, 8 x 512", "GPT-2 medium, 4 x 1024", "ViT-L, 16 x 256")
FIRST += ("Llama-1B blocks, 2 x 2048",)
FIRST += ("ViT-L, fused, 16 x 256", "Llama-1B blocks, fused, 2 x 2048")


@figures("first screen")
def first_screen() -> str:
    """Models as they are, under the fastest policy, and with both of our calls."""
    head = "MiB / ms on an H100", "plain", "fastest policy", "jaxmem"
    return table(head, [_first(model) for model in FIRST])


def _first(model: str) -> tuple[str, ...]:
    told = [row("frontier", {"model": model, "policy": p}) for p in (PLAIN, WITHOUT)]
    ours = beside_older("blocks", TEMP_AND_MS, block(model, "substitute, schedule"))
    return model, *(with_older(r, r, TEMP_AND_MS) for r in told), ours


def _fits() -> tuple[str, str, str]:
    peak = value("before_after", "peak MiB", {"step": "plain"})
    example = f"BERT-Large with Adam, 8 x 512 tokens: {peak:,.0f} MiB"
    call = '`jaxmem.estimate(step, *args, target="h100")`'
    return call, "one compile; nothing is run", example


def _activations() -> tuple[str, str, str]:
    models = ({"model": m, **H100} for m in ("plain", "substituted"))
    cost = "rounding; elementwise operations and attention scores are recomputed"
    example = f"BERT-Large: {from_to('bert', 'temp MiB', *models)}"
    return "`jaxmem.substitute(model)`", cost, example


def _budget() -> tuple[str, str, str]:
    model, policy = "Llama-1B blocks, 2 x 2048", "dots_with_no_batch_dims_saveable"
    both = row("blocks", block(model, "plain")), of_policies()[model, policy]
    found = ([r.get(c) for r in both] for c in ("temp MiB", "predicted ms"))
    example = f"Llama-1B's blocks: {_less(*found)}"
    call = '`jaxmem.schedule(step, budget="14GiB", target="h100")`'
    return (
        call,
        "recomputation; of the compiled steps that fit, the fastest by prediction",
        example,
    )


def _gradients() -> tuple[str, str, str]:
    r = row("release", {"remat": "a layer", "substituted": "no", **H100})
    peaks, ms = (
        [r.get(f"{who}: {what}") for who in ("XLA", "scheduled")]
        for what in ("peak MiB", "predicted ms")
    )
    call = "`jaxmem.schedule(step, donate_argnums=0)`"
    return call, "rounding", f"BERT-Large with Adam: {_less(peaks, ms)}"


def _loss_apart(optimizer: str) -> str:
    where = ({"optimizer": name} for name in (optimizer, "adamw"))
    ours, plain = (value("optimizer_training", "mean", w) for w in where)
    return f"{ours - plain:+.3f} nats a byte after 100 steps of a small GPT"


def _moments() -> tuple[str, str, str]:
    names = "AdamW, float32", "AdamW, 8-bit moments"
    held = [
        value("ledger", "moments", {"model": "Llama-7B", "optimizer": n}) for n in names
    ]
    example = " → ".join(f"{x:.2f}" for x in held) + " bytes a parameter"
    cost = f"rounding of the moments: {_loss_apart('adamw-8bit')}"
    return "`jaxmem.optim.adamw(3e-4, bits=8)`", cost, example


def _accumulation() -> tuple[str, str, str]:
    ways = "accumulation by hand, Adam", "microbatch, AdamA"
    where = ({"variant": way, "N": "8", **H100} for way in ways)
    example = (
        f"BERT-Large, 8 micro-batches: {from_to('accumulation', 'peak MiB', *where)}"
    )
    cost = f"a different second-moment estimate: {_loss_apart('adama')}"
    return "`jaxmem.microbatch(loss_fn, jaxmem.adama(3e-4), n=8)`", cost, example


def _batch() -> tuple[str, str, str]:
    steps = ({"step": s} for s in ("plain", "substituted, schedule"))
    found = (value("batch", "largest batch", where) for where in steps)
    example = "BERT-Large in 16 GiB: " + " → ".join(f"{x:.0f}" for x in found)
    call = '`jaxmem.max_batch(step, make_args, target="l4")`'
    return call, "a few compiles; nothing is run", f"{example} sequences of 512 tokens"


def _frozen() -> tuple[str, str, str]:
    r = row("frozen_h100", {"model": "ResNet-101", "gradients of": "input alone"})
    both = (
        [r.get(f"{way}{column}") for way in ("plain", "substituted")]
        for column in (", MiB", ": predicted ms")
    )
    cost = "rounding; the frozen part has no gradients and no moments"
    example = f"ResNet-101 whose weights are frozen: {_less(*both)}"
    call = '`jaxmem.trainable(params, ["**/lora_*"])`, and `substitute`'
    return call, cost, example


def _head() -> tuple[str, str, str]:
    losses = ({"loss": x, **H100} for x in ("whole logits", "linear_cross_entropy"))
    example = from_to("cross_entropy", "temp MiB", *losses)
    call = "`jaxmem.ops.linear_cross_entropy(x, kernel, labels)`"
    return (
        call,
        "the logits are computed twice",
        f"8,192 tokens, 131,072 words: {example}",
    )


def _tiles() -> tuple[str, str, str]:
    step = {"step": "16 Llama-like layers, 8 x 2048", **H100}
    before, after = ({**step, "how": how} for how in ("remat", "3300 MiB"))
    found = from_to("tiles", "temp MiB", before, after)
    example = f"16 Llama-like layers, AdamW, instead of `jax.checkpoint`: {found}"
    measured = row("tiles", after)  # its budget is "at most", and what is no temporary
    columns = "peak MiB", "temp MiB", "at most"
    peak, temp, limit = (float(measured[column]) for column in columns)
    budget = f"{peak - temp + limit + 0.5:.0f}MiB"
    call = f'`jaxmem.schedule(step, budget="{budget}", target="h100")`'
    return call, "time: regions run in tiles, as few as fit the budget", example


def _long_scan() -> tuple[str, str, str]:
    r = row("depth", {"layers": "192"})
    mib = [r[c] for c in ("plain MiB", "segments: MiB")]
    ms = [r.get(f"{way}: predicted ms") for way in ("plain", "segments")]
    example = f"a scan of 192 layers: {_less(mib, ms)}"
    call = '`jaxmem.schedule(step, budget="2GiB", target="h100")`'
    return call, "one more forward pass, or two", example


def _table() -> tuple[str, str, str]:
    call = "`jaxmem.optim.rowwise(tx)`, `jaxmem.optim.value_and_row_grad`"
    cost = (
        "a different update rule from Adam: rows that are not in the batch keep their "
        "moments"
    )
    ways = (
        {"rule": "Adam", "variant": way, "columns": "128", **H100}
        for way in ("dense", "rows")
    )
    example = f"Adam on a table of 1 GiB: {from_to('tables', 'peak MiB', *ways)}"
    return call, cost, example


PROBLEMS = {
    ("Does my step fit a chip?", "measuring"): _fits,
    ("Activations fill the memory", "substitution"): _activations,
    ("The step must fit into a memory budget", "budget"): _budget,
    ("All gradients are live at once", "optimizers/gradient_release"): _gradients,
    ("The optimizer's moments are large", "optimizers/low_bit"): _moments,
    ("Gradient accumulation doubles the gradients", "optimizers/adama"): _accumulation,
    ("What is the largest batch?", "measuring"): _batch,
    ("Fine-tuning: most weights are frozen", "frozen"): _frozen,
    ("The logits of a large vocabulary", "cross_entropy"): _head,
    ("Attention scores or logits are the peak", "tiles"): _tiles,
    ("Deep stacks, LSTMs, backpropagation through time", "budget"): _long_scan,
    ("Embedding tables", "tables"): _table,
}


def problems(folder: str) -> str:
    lines = [
        (f"[{title}]({folder}{page}.md)", *describe())
        for (title, page), describe in PROBLEMS.items()
    ]
    example = "example (predicted times)"
    return table(("problem", "API", "cost", example), lines)


figures("problems")(functools.partial(problems, "docs/"))
figures("problems, docs")(functools.partial(problems, ""))
