"""The picture of the demonstration: two loss curves, and who holds the bytes."""

from pathlib import Path

from jaxmem.demo._compare import Comparison

_PLAIN, _LEAN, _INK = "#b9c2cf", "#0f6e84", "#2b2f36"
_MODULES_SHOWN = 7


def draw(result: Comparison, path: str | Path) -> None:
    """Writes the losses over each other and the bytes by module beside them.

    Args:
        result: what `compare` returned.
        path: file to write; its ending gives the format, as in matplotlib.

    Raises:
        ImportError: without matplotlib; the message has the line that installs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: pip install 'jaxmem[plot]'"
        ) from error
    figure = Figure(figsize=(11, 4.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    losses, bytes_ = figure.subplots(1, 2, width_ratios=(1, 1.05))
    _draw_losses(losses, result)
    _draw_bytes(bytes_, result)
    for axes in (losses, bytes_):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, length=3)
    figure.savefig(path)


def _draw_losses(axes, result: Comparison) -> None:
    last = len(result.plain.losses)
    for outcome, name, color, width, size in (
        (result.plain, "plain", _PLAIN, 5, 90),
        (result.substituted, "substituted", _LEAN, 1.3, 22),
    ):
        label = f"{name}, validation {outcome.validation:.3f}"
        axes.plot(
            range(1, last + 1), outcome.losses, color=color, lw=width, label=label
        )
        axes.scatter(
            last, outcome.validation, s=size, color=color, marker="D", zorder=3
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title(_loss_title(result), loc="left", fontsize=11, color=_INK)
    axes.grid(axis="y", color="#e8ebef")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


def _loss_title(result: Comparison) -> str:
    if result.settings.dropout:
        return "Losses, each run with dropout masks of its own"
    if result.settings.optimizer == "adama":
        return "Losses: AdamW accumulated (plain), AdamA (substituted)"
    return f"The same loss: never more than {result.loss_gap:.0e} apart"


def _draw_bytes(axes, result: Comparison) -> None:
    target = shown_target(result)
    if target is None:
        axes.set_title("Nothing could be compiled", loc="left", fontsize=11)
        return
    plain, lean = (
        o.compiled[target].by_module for o in (result.plain, result.substituted)
    )
    modules = largest(plain, lean)
    for held, color, shift, name in (
        (plain, _PLAIN, -0.2, "plain"),
        (lean, _LEAN, 0.2, "substituted"),
    ):
        sizes = [held.get(module, 0) / 2**20 for module in modules]
        places = [row + shift for row in range(len(modules))]
        bars = axes.barh(places, sizes, height=0.38, color=color, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, color=_INK)
    axes.set_yticks(range(len(modules)), modules)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("MiB held at the peak")
    totals = [o.compiled[target].temp_bytes for o in (result.plain, result.substituted)]
    before, after = (total / 2**20 for total in totals)
    title = f"Temporary bytes on {target}: {before:,.0f} MiB to {after:,.0f} MiB"
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.legend(frameon=False, loc="lower right")


def shown_target(result: Comparison) -> str | None:
    """The first accelerator compiled for, else cpu; None where nothing compiled."""
    both = [t for t in result.plain.compiled if t in result.substituted.compiled]
    return next((t for t in both if t != "cpu"), both[0] if both else None)


def largest(*held: dict[str, int]) -> list[str]:
    """The modules that hold most in any of the runs, most first."""
    most = {m: max(h.get(m, 0) for h in held) for h in held for m in h}
    return sorted(most, key=most.__getitem__, reverse=True)[:_MODULES_SHOWN]
