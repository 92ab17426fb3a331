"""Writes the README's table of figures from the files in results/.

python -m benchmarks.readme            # rewrites README.md
python -m benchmarks.readme --check    # exits 1 if it would change
"""

import csv
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VERSION = "jax0.10.2"
BEGIN, END = "<!-- figures: python -m benchmarks.readme -->", "<!-- end of figures -->"


def rows(name: str) -> list[dict[str, str]]:
    text = (RESULTS / f"{name}-{VERSION}.csv").read_text()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return list(csv.DictReader(lines))


def temp(table: list[dict[str, str]], target: str, **where: str) -> str:
    """The temp MiB of the one row of these values."""
    return cell(table, "temp MiB", target=target, **where)


def cell(table: list[dict[str, str]], column: str, **where: str) -> str:
    """A column of the one row of these values; a dash where it was not measured."""
    found = [r for r in table if all(r[k] == v for k, v in where.items())]
    if not found:
        return "–"
    (row,) = found
    return f"{float(row[column]):,.0f}"


def figures() -> str:
    return f"{activations()}\n\n{blocks()}\n\n{budgets()}\n\n{steps()}"


def blocks() -> str:
    """Loss gradients of whole models under what JAX offers, and ours."""
    table = rows("blocks")
    lines = [
        "| MiB of temporaries on H100 | plain | `dots_saveable` | "
        "`dots_with_no_batch_dims_saveable` | `schedule` alone | `substitute` too |",
        "|---|---|---|---|---|---|",
    ]
    ways = ("plain", "dots_saveable", "dots_with_no_batch_dims_saveable")
    for model in dict.fromkeys(r["model"] for r in table):
        cells = [
            cell(table, "temp MiB", model=model, how=how)
            for how in (*ways, "schedule", "substitute, schedule")
        ]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def budgets() -> str:
    """What unmodified models recompute in as many bytes as the stock policies take."""
    lines = [
        "| unmodified, a budget of what a stock policy takes on H100 | its MiB | "
        "it recomputes % | `schedule`: MiB | recomputes % |",
        "|---|---|---|---|---|",
    ]
    for r in rows("budget"):
        its = float(r["its temp MiB"])
        if abs(float(r["budget MiB"]) - its) > 1:
            continue
        temp, again = r["temp MiB"], r["recomputes %"]
        ours = (
            f"{float(temp):,.0f} | {float(again):.1f}" if temp else "out of reach | –"
        )
        lines.append(
            f"| {r['model']}, `{r['stock policy']}` | {its:,.0f} | "
            f"{float(r['its recomputes %']):.1f} | {ours} |"
        )
    return "\n".join(lines)


def steps() -> str:
    """Whole train steps: the peak as XLA compiles them, and ours."""
    release, accumulation = rows("release"), rows("accumulation")
    batch = {"remat": "a layer", "substituted": "no"}
    eight = {"N": "8"}
    lines = [
        "| MiB of peak, BERT-Large with Adam (3,823 of state) | H100 | ours | TPU v5e "
        "| ours |",
        "|---|---|---|---|---|",
    ]
    cells = [
        cell(release, column, target=target, **batch)
        for target in ("h100", "tpu-v5e")
        for column in ("XLA: peak MiB", "scheduled: peak MiB")
    ]
    title = "one batch, B 8 S 128, remat a layer: `schedule` alone"
    lines.append(f"| {title} | {' | '.join(cells)} |")
    cells = [
        cell(accumulation, "peak MiB", target=target, way=way, **eight)
        for target in ("h100", "tpu-v5e")
        for way in ("accumulation by hand, Adam", "microbatch, AdamA")
    ]
    title = "8 micro-batches of it: `microbatch` with `adama`"
    return "\n".join([*lines, f"| {title} | {' | '.join(cells)} |"])


def activations() -> str:
    """What a loss gradient takes besides its arguments and outputs."""
    layers, bert = rows("layers"), rows("bert")
    short, long = "attention, B 8 S 512", "attention, B 1 S 4096, one layer"
    stock, ours = "flax.linen, dropout 0.1", "dot_product_attention"
    pairs = (
        ("GELU MLP, 8 layers", "mlp", "jax.nn.gelu", "gelu, save=output"),
        (
            "pre-LN, 8 layers",
            "pre-norm",
            "flax.linen.LayerNorm",
            "layer_norm, save=output",
        ),
        ("attention with dropout, 8 layers, S 512", short, stock, ours),
        ("attention with dropout, one layer, S 4096", long, stock, ours),
    )
    lines = [
        "| MiB of temporaries, loss gradient | H100 | ours | TPU v5e | ours |",
        "|---|---|---|---|---|",
    ]
    for title, stack, plain, lean in pairs:
        cells = [
            temp(layers, target, stack=stack, layer=layer)
            for target in ("h100", "tpu-v5e")
            for layer in (plain, lean)
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    cells = [
        temp(bert, target, model=model)
        for target in ("h100", "tpu-v5e")
        for model in ("plain", "substituted")
    ]
    title = "BERT-Large in Flax, B 8 S 512, `substitute` alone"
    return "\n".join([*lines, f"| {title} | {' | '.join(cells)} |"])


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    new = f"{head}{BEGIN}\n{figures()}\n{END}{tail}"
    if "--check" in sys.argv:
        sys.exit(new != text)
    path.write_text(new)


if __name__ == "__main__":
    main()
