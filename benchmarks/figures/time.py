"""The figures of docs/time.md: predicted seconds beside measured ones and XLA's own."""

from benchmarks.figures.rows import Row, figures, rows, table

JAX = "jax0.11.2"


def steps() -> list[Row]:
    return [row for row in rows("time", JAX) if row["of"] == "step, ms"]


@figures("time")
def by_step() -> str:
    """Steps, measured and predicted."""
    head = ("step", "measured ms", "predicted ms", "predicted / measured")
    columns = ("what", "measured", "predicted", "ratio")
    return table(head, [tuple(row[name] for name in columns) for row in steps()])


@figures("time, steps")
def how_many() -> str:
    return str(len(steps()))


@figures("time, off")
def furthest() -> str:
    """Of all steps the largest difference to what was measured, in percent."""
    return f"{100 * max(abs(float(row['ratio']) - 1) for row in steps()):.0f}"


@figures("time, our kernels")
def our_kernels() -> str:
    """What steps took with our attention, of what they took with XLA's blocks."""
    took = {row["what"]: float(row["measured"]) for row in steps()}
    ours = [what for what in took if what.endswith(", our kernels")]
    whole = {what.replace("our kernels", "XLA"): what for what in ours}
    shares = [
        f"{took[ours] / took[plain]:.2f} ({plain.split(',')[0]})"
        for plain, ours in whole.items()
    ]
    return ", ".join(shares)


@figures("time, XLA's kernels")
def by_kind_on_a_gpu() -> str:
    """Kernels of an H100 by kind, by XLA's own cost model and predicted."""
    head = ("kernels", "XLA's ms", "predicted ms", "predicted / XLA's, median")
    columns = ("what", "measured", "predicted", "median ratio")
    found = [row for row in rows("time", JAX) if row["of"] == "XLA's kernels, ms"]
    return table(head, [tuple(row[name] for name in columns) for row in found])


@figures("time, fills")
def what_fills_take() -> str:
    """Steps with zeros in the stacks of their scanned layers, and without."""
    columns = {
        "model": "model",
        "how": "how",
        "predicted ms": "predicted ms",
        "fills: ms": "of these, zeros",
        "with the option: predicted ms": "with the option",
    }
    cells = [[row[name] for name in columns] for row in rows("fills")]
    return table(tuple(columns.values()), cells)


def of_xla() -> list[Row]:
    return [row for row in rows("time", JAX) if row["of"] == "XLA's step, ms"]


@figures("time, TPUs")
def by_step_of_tpus() -> str:
    """Steps for TPUs, by XLA's own cycles and predicted."""
    head = ("chip", "step", "XLA's ms", "predicted ms", "predicted / XLA's")
    columns = ("chip", "what", "measured", "predicted", "ratio")
    return table(head, [tuple(row[name] for name in columns) for row in of_xla()])


@figures("time, TPUs off")
def furthest_of_tpus() -> str:
    """Of all steps for TPUs the largest difference to XLA's own, in percent."""
    return f"{100 * max(abs(float(row['ratio']) - 1) for row in of_xla()):.0f}"


MAKERS = ("tpu-recipes", "JAX-Toolbox", "maxtext")  # of recipes, in addresses


@figures("time, published")
def by_published_step() -> str:
    """Steps that others have timed, with the addresses of their figures."""
    head = ("chip", "step", "source", "published s", "predicted s", "ratio")
    lines = []
    for row in rows("published"):
        maker = next(name for name in MAKERS if name in row["source"])
        cells = {**row, "source": f"[{maker}]({row['source']})"}
        lines.append(tuple(cells[name] for name in head))
    return table((*head[:-1], "predicted / published"), lines)


@figures("time, published within")
def how_many_are_near() -> str:
    """How many of them are predicted to within a quarter."""
    found = [abs(float(row["ratio"]) - 1) <= 0.25 for row in rows("published")]
    return f"{sum(found)} of {len(found)}"


@figures("time, CPU")
def on_the_cpu() -> str:
    """Steps on the CPU that was at hand, the median ratio, and how they rank."""
    columns = ("step", "measured ms", "predicted ms", "ratio")
    lines = [tuple(row[name] for name in columns) for row in rows("cpu_seconds")]
    return table((*columns[:-1], "predicted / measured"), lines)
