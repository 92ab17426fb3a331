"""The tables of docs/."""

import functools
import math
from collections.abc import Callable, Mapping

from benchmarks.figures.results import NAMES
from benchmarks.figures.rows import (
    NEWEST,
    TEMP_AND_MS,
    VERSION,
    Row,
    beside_older,
    figures,
    row,
    rows,
    table,
    value,
    with_older,
)
from pallas_kernels.chips import AMPERE, GPUS

TWO_CHIPS = ("h100", "tpu-v5e")


def of_both(name: str, where: Mapping[str, str]) -> list[str]:
    """MiB of temporaries / predicted ms on either chip."""
    return [
        beside_older(name, TEMP_AND_MS, {**where, "target": chip}) for chip in TWO_CHIPS
    ]


def sizes_and_ms(ways: Mapping[str, str]) -> list[dict[str, str]]:
    """The columns of a cell, and how they are written: a column of bytes -> its ms."""
    return [{size: ",.0f", ms: ",.1f"} for size, ms in ways.items()]


@figures("depth")
def depth() -> str:
    """MiB of temporaries / predicted ms."""
    columns = sizes_and_ms(
        {
            "plain MiB": "plain: predicted ms",
            "a layer: MiB": "a layer: predicted ms",
            "segments: MiB": "segments: predicted ms",
        }
    )
    head = ("layers", "plain", "one input for each layer", "segments")
    lines = [
        (
            r["layers"],
            *(beside_older("depth", pair, {"layers": r["layers"]}) for pair in columns),
            r["layers in one"].replace(" / ", ", of "),
        )
        for r in rows("depth")
    ]
    return table((*head, "layers in a segment, and in those inside of it"), lines)


@figures("cross entropy")
def cross_entropy() -> str:
    variants = {
        "whole logits": "whole logits",
        "8 chunks of tokens in `jax.checkpoint`": "checkpointed chunks",
        "`linear_cross_entropy`": "linear_cross_entropy",
        "with every option": "the same, all options",
        "`accumulator_dtype=bfloat16`": "the same, bfloat16 accumulator",
        "`block_size=4096`": "the same, blocks of 4,096 words",
    }
    lines = [
        (title, *of_both("cross_entropy", {"loss": loss}))
        for title, loss in variants.items()
    ]
    kernels = {"loss": "the same, kernels", "target": "tpu-v5e"}
    by_kernels = beside_older("cross_entropy", TEMP_AND_MS, kernels)
    lines.append(('`implementation="pallas"`', "no kernel", by_kernels))
    heads = (f"{chip}, MiB / predicted ms" for chip in ("H100", "TPU v5e"))
    return table(("", *heads), lines)


def by_depth(drift: bool, head: str, cell: Callable[[Row], str]) -> str:
    """The rows of reversible blocks: a column for each depth."""
    found = [r for r in rows("reversible") if (r["what"] == "drift") == drift]
    depths = dict.fromkeys(r["layers"] for r in found)
    cells: dict[str, list[str]] = {}
    for r in found:  # in the order of depths
        cells.setdefault(r["form"], []).append(cell(r))
    lines = ((form, *line) for form, line in cells.items())
    return table((head, *(f"{depth} layers" for depth in depths)), lines)


@figures("reversible, bytes")
def reversible_bytes() -> str:
    head = (
        "temporaries, MiB / predicted ms, H100: blocks of 4 x 1024 tokens, width 1024"
    )
    return by_depth(False, head, lambda r: with_older(r, r, TEMP_AND_MS))


@figures("reversible, drift")
def reversible_drift() -> str:
    head = "error of the gradient / rounding, relative: f and g, streams"
    return by_depth(True, head, lambda r: f"{r['error']} / {r['rounding']}")


@figures("few bits, bytes")
def few_bit_bytes() -> str:
    variants = {"`jax.nn.gelu`": "jax.nn.gelu"}
    variants |= {
        f'`gelu(x, save="{w}")`': f"gelu, save={w}" for w in ("output", "input")
    }
    variants |= {f"`gelu(x, save={n})`": f"gelu, save={n}" for n in (4, 3, 2)}
    title = "eight layers x → gelu(x W) V in a scan, V frozen, 4096 tokens, 1024 → 4096"
    lines = [
        (title, *of_both("fewbit-scan", {"activation": variant}))
        for title, variant in variants.items()
    ]
    heads = (f"{chip}, MiB / predicted ms" for chip in ("H100", "TPU v5e"))
    return table((f"{title}, bfloat16", *heads), lines)


@figures("few bits, errors")
def few_bit_errors() -> str:
    functions = ("gelu_erf", "silu", "tanh", "softplus")
    error = lambda name, bits: value(
        "fewbit-tables", "squared error", {"activation": name, "bits": bits}
    )
    lines = [
        (bits, *(f"{error(name, bits):#.3g}" for name in functions)) for bits in "1234"
    ]
    return table(("bits", "GELU", "SiLU", "tanh", "softplus"), lines)


def trained(titles: Mapping[str, str], units: bool) -> str:
    """Held-out losses of the small GPT and ViT; `titles`: title -> technique."""
    lines = []
    for title, technique in titles.items():
        r = row("training", {"technique": technique})
        losses = f"{float(r['GPT mean']):.4f}", f"{float(r['ViT mean']):.3f}"
        lines.append((title, *losses, f"{float(r['right %']):.1f}"))
    head = ("GPT, nats a byte", "ViT, nats a digit") if units else ("GPT", "ViT")
    return table(("", *head, "right, %"), lines)


@figures("few bits, training")
def few_bit_training() -> str:
    variants = {f"{n} bit{'s' * (n > 1)}": f"bits-{n}" for n in (1, 2, 3, 4)}
    return trained({"plain": "plain", **variants, "ReGELU2": "regelu2"}, units=False)


@figures("storage, training")
def storage_training() -> str:
    names = {"8 bits": "8", "float8": "float8", "4 bits": "4"}
    variants = {kept: f"storage-{name}" for kept, name in names.items()}
    return trained({"plain": "plain", **variants}, units=True)


@figures("sampled, training")
def sampled_training() -> str:
    sampled = {"4 bits alone": "bits-4", "4 bits and `SampledDense`": "wta-crs"}
    return trained({"plain": "plain", **sampled}, units=True)


@figures("storage, bytes")
def storage_bytes() -> str:
    both = functools.partial(beside_older, "storage", TEMP_AND_MS)
    bert = lambda kept: both({"stack": "BERT-Large", "kept": kept})
    norm = lambda kept: both({"stack": "norm and dense", "kept": kept})
    outputs = "outputs (exact but for rounding)", bert("outputs"), norm("save=output")
    blocks = "8 bits in blocks of 256", bert("8 bits, blocks of 256"), ""
    eight, four = ((w, bert(w), norm(w)) for w in ("8 bits", "4 bits"))
    head = (
        f"{stack}: MiB / predicted ms" for stack in ("BERT-Large", "norm and dense")
    )
    return table(("kept", *head), (outputs, eight, blocks, four))


@figures("sampled, bytes")
def sampled_bytes() -> str:
    variants = {
        "jax.nn.gelu": "jax.nn.gelu",
        '`gelu(save="output")`': "gelu, save=output",
        '`gelu(save="input")`, both layers sampled at 0.3': (
            "gelu, save=input, sampled at 0.3"
        ),
        "`gelu(save=3)`, both layers plain": "gelu, save=3",
        "`gelu(save=3)`, both layers sampled at 0.3": "gelu, save=3, sampled at 0.3",
    }
    stack = {"stack": "sampled MLP"}
    lines = [
        (title, beside_older("storage", TEMP_AND_MS, {**stack, "kept": kept}))
        for title, kept in variants.items()
    ]
    return table(("activation and layers", "H100, MiB / predicted ms"), lines)


PART = ("model", "gradients of")


def of_parts(name: str) -> str:
    """Plain / substituted, a row a part that is trained, a column a model."""
    models = list(dict.fromkeys(r["model"] for r in rows(name)))
    lines = {r["gradients of"]: [""] * len(models) for r in rows(name)}
    both = {f"{variant}, MiB": ",.0f" for variant in ("plain", "substituted")}
    for r in rows(name):
        cell = beside_older(name, both, {key: r[key] for key in PART})
        lines[r["gradients of"]][models.index(r["model"])] = cell
    cells = [[part, *figures] for part, figures in lines.items()]
    return table(("gradients of", *models), cells)


@figures("frozen, kept")
def frozen_kept() -> str:
    return of_parts("frozen")


@figures("frozen, compiled")
def frozen_compiled() -> str:
    return of_parts("frozen_h100")


@figures("frozen, peaks")
def frozen_peaks() -> str:
    """A row for each model and part: plain, substituted, and scheduled besides."""
    ways = ("plain", "substituted", "scheduled too")
    columns = sizes_and_ms({f"{w}, peak MiB": f"{w}: predicted ms" for w in ways})

    def line(r: Row) -> list[str]:
        where = {key: r[key] for key in PART}
        cells = (beside_older("frozen_h100", pair, where) for pair in columns)
        return [*where.values(), *cells]

    return table((*PART, *ways), map(line, rows("frozen_h100")))


@figures("frozen, left")
def frozen_left() -> str:
    """What is kept with LoRA, and with everything trained, in MiB."""
    found = [r for r in rows("frozen") if r["gradients of"] in ("all", "LoRA")]
    found = [r for r in found if not r["model"].startswith("ResNet")]
    cells = ([r["model"], r["gradients of"], r["left, MiB"]] for r in found)
    return table(("model", "gradients of", "kept for the backward pass, MiB"), cells)


@figures("quantized base")
def quantized_base() -> str:
    """A row for each model and base, in whole MiB, with the predicted ms of steps."""
    kept = ("wide, plain (MiB)", "wide, substituted (MiB)")
    steps = ("plain", "substituted", "scheduled", "both")
    sizes: list[dict[str, str]] = [{c: ",.0f"} for c in ("arguments (MiB)", *kept)]
    sizes += sizes_and_ms({f"temp {s} (MiB)": f"{s}: predicted ms" for s in steps})
    head = ("model", "base", "arguments", "kept, plain", "kept, substituted", *steps)

    def line(r: Row) -> list[str]:
        where = {key: r[key] for key in ("model", "base")}
        cells = (beside_older("quantized_base", size, where) for size in sizes)
        return [*where.values(), *cells]

    return table(head, map(line, rows("quantized_base")))


@figures("kernels")
def kernels() -> str:
    """Every column but the commit; those of which no device has told are left out."""
    found = rows("kernels")
    columns = [c for c in found[0] if c != "commit" and any(r[c] for r in found)]
    lines = [[shown(r[c]) for c in columns] for r in found]
    return table(columns, lines)


@figures("kernels, chips")
def kernels_on_chips() -> str:
    """What each chip gets; chips that get the same share a column."""
    old, new = (rows("kernels_chips", version) for version in (VERSION, NEWEST))
    targets = [c for c in old[0] if c not in ("kernel", "commit")]
    cells = {t: [gets(t, r, s) for r, s in zip(old, new, strict=True)] for t in targets}
    alike: dict[tuple[str, ...], list[str]] = {}
    for target, column in cells.items():
        alike.setdefault(tuple(column), []).append(NAMES[target])
    head = ("", *map(", ".join, alike.values()))
    lines = zip([r["kernel"] for r in old], *alike, strict=True)
    return table(head, lines)


def gets(target: str, old: Row, new: Row) -> str:
    """The kernel where it compiles, or what else there is, of a row in two versions."""
    if old["kernel"] != new["kernel"]:
        raise ValueError(f"kernels_chips: {old['kernel']} is not {new['kernel']}")
    if old[target] == "compiles":
        return "kernel"
    if new[target] == "compiles":
        return "kernel from jax 0.12 on, else XLA"
    if not old["kernel"].startswith("attention") or GPUS[target] < AMPERE:
        return "XLA"
    return "XLA" if "dropout" in old["kernel"] else "cuDNN or tokamax"


@figures("kernels, clocks")
def clocks_of_attention() -> str:
    columns = "loop registers programs/SM tensor issue ALU MUFU busiest/tensor".split()
    found = [r for r in rows("kernels_sass") if r["kernel"].startswith("attention")]
    short = lambda name: name.removeprefix("attention, ").removeprefix("S 8192")
    name = lambda r: short(r["kernel"]).strip(", ") or "plain"
    lines = ([name(r), *(r[c] for c in columns)] for r in found)
    return table(("attention", *columns), lines)


def shown(cell: str) -> str:
    """A number with one decimal; anything else as it is."""
    try:
        return f"{float(cell):,.1f}"
    except ValueError:
        return cell


# -- predictions

WITHIN = 10  # per cent
CHIPS = {"H100": ("h100",), "TPU v5e, or v5p": ("tpu-v5e", "tpu-v5p")}


@figures("predictions")
def predictions() -> str:
    """How many are near, with the state in the peaks and without, and which are not."""
    lines = []
    for title, targets in CHIPS.items():
        found = [r for r in rows("predict") if r["target"] in targets]
        compiled = [r for r in found if r["off %"]]
        near = (sum(abs(off(r, s)) <= WITHIN for r in compiled) for s in (True, False))
        shares = [f"{n} of {len(compiled)}" for n in near]
        lines.append((title, *shares, str(len(found) - len(compiled)), far(compiled)))
    head = ("with the state", "without it", "left out", "furthest off, with the state")
    return table(("", *head), lines)


def off(r: Row, state: bool) -> float:
    """Per cent of the compiled bytes, with the state or of the rest."""
    base = 0.0 if state else float(r["state MiB"])
    compiled, predicted = float(r["compiled MiB"]), float(r["predicted MiB"])
    if compiled == base:  # of a TPU that has all the rest on the chip
        return 0.0 if predicted == base else math.inf
    return 100 * ((predicted - base) / (compiled - base) - 1)


def far(compiled: list[Row]) -> str:
    """Those that are not near, by name."""
    found = [r for r in compiled if abs(off(r, True)) > WITHIN]
    found.sort(key=lambda r: -abs(off(r, True)))
    return "; ".join(f"{r['step']}: {off(r, True):+.0f} %" for r in found) or "none"


@figures("foreign")
def foreign() -> str:
    variants, keys = (
        ("plain", "substituted", "scheduled", "both"),
        ("library", "family"),
    )
    pairs = [
        {f"{variant} (MiB)": ",.1f", f"{variant}: predicted ms": ",.2f"}
        for variant in variants
    ]

    def line(r: Row) -> list[str]:
        where = {key: r[key] for key in keys}
        return [*where.values(), *(beside_older("foreign", p, where) for p in pairs)]

    return table((*keys, *variants), map(line, rows("foreign")))


@figures("foreign_batches")
def largest_batches() -> str:
    """A line a model, a column a chip; what was not measured is left empty."""
    chips = ("t4", "l4", "h100")
    found = {(r["library"], r["model"], r["chip"]): r for r in rows("foreign_batches")}
    names = dict.fromkeys(key[:2] for key in found)

    def cell(r: Row | None) -> str:
        if r is None:
            return ""
        batches = r["plain"], r["substituted"], r["scheduled"]
        return "0" if batches[:2] == ("0", "0") else " → ".join(filter(None, batches))

    def line(name: tuple[str, str]) -> list[str]:
        of = [found.get((*name, chip)) for chip in chips]
        first = next(r for r in of if r is not None)
        state = f"{float(first['state (GiB)']):.1f}"
        return [*name, first["an example"], state, *map(cell, of)]

    head = ("library", "model", "an example", "state (GiB)", "T4", "L4", "H100")
    return table(head, map(line, names))


@figures("foreign_checkpoints")
def own_checkpoints() -> str:
    """A line a model: GiB, with the predicted ms of steps."""
    ways = ("plain", "own option", "own option, substituted", "scheduled")
    pairs = [{f"{w} (GiB)": ",.2f", f"{w}: predicted ms": ",.0f"} for w in ways]

    def line(r: Row) -> list[str]:
        sizes = [with_older(r, r, pair) for pair in pairs]
        name = f"{r['library']} {r['model']}", f"{r['batch']} of {r['an example']}"
        return [*name, *sizes, r["ratio"]]

    head = ("model", "batch", *ways, "ratio of ms")
    return table(head, map(line, rows("foreign_checkpoints")))


@figures("foreign_budgets")
def within_budgets() -> str:
    """A line a model and a chip: GiB, with the predicted ms of steps."""
    columns = ("arguments", "plain", "substituted", "budget", "scheduled")
    pairs = [
        {f"{column} (GiB)": ",.1f", f"{column}: predicted ms": ",.0f"}
        for column in columns
    ]

    def line(r: Row) -> list[str]:
        where = {key: r[key] for key in ("library", "model", "chip")}
        sizes = [beside_older("foreign_budgets", pair, where) for pair in pairs]
        if r["fits"] != "yes":
            sizes[-1] = f"{r['fits']} {sizes[-1]}".strip()
        sizes[3] += f" ({r['of the temporaries']})"
        examples = f"{r['batch']} of {r['an example']}"
        recomputed = r["recomputed (%)"] and f"{float(r['recomputed (%)']):.0f}"
        names = f"{r['library']} {r['model']}", examples, r["chip"].upper()
        return [*names, *sizes, recomputed]

    head = ("model", "batch", "chip", *columns, "recomputed, %")
    return table(head, map(line, rows("foreign_budgets")))
