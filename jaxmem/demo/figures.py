"""The picture of the demonstration: two loss curves, and the bytes by module."""

from pathlib import Path

from jaxmem.demo.comparison import Comparison
from jaxmem.pages import import_figure

# color, line width, marker size and place of the bars of each run
_STYLES = {"plain": ("#b9c2cf", 5, 90, -0.2), "substituted": ("#0f6e84", 1.3, 22, 0.2)}
_MODULES_SHOWN = 7


def draw(result: Comparison, path: str | Path) -> None:
    """Draws both loss curves, and beside them the bytes by module.

    Args:
        result: what `compare` returned.
        path: file to write; its ending gives the format, as in matplotlib.

    Raises:
        ImportError: without matplotlib; the message has the line that installs it.
    """
    figure = import_figure()(figsize=(11, 4.4), layout="constrained", dpi=150)
    losses, bytes_ = figure.subplots(1, 2, width_ratios=(1, 1.05))
    _draw_losses(losses, result)
    _draw_bytes(bytes_, result)
    for axes in (losses, bytes_):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_losses(axes, result: Comparison) -> None:
    for name, (color, width, size, _) in _STYLES.items():
        outcome = getattr(result, name)
        last, label = (
            len(outcome.losses),
            f"{name}, validation {outcome.validation:.3f}",
        )
        steps = range(1, last + 1)
        axes.plot(steps, outcome.losses, color=color, lw=width, label=label)
        axes.scatter(last, outcome.validation, size, color, marker="D", zorder=3)
    title = f"The same loss: never more than {result.loss_gap:.0e} apart"
    if result.settings.dropout:
        title = "Losses, each run with dropout masks of its own"
    elif result.settings.optimizer != "adamw":
        title = f"Losses: adamw (plain), {result.settings.optimizer} (substituted)"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend(frameon=False)


def _draw_bytes(axes, result: Comparison) -> None:
    """Of the first accelerator compiled for, else of cpu."""
    plain, lean = result.plain.compiled, result.substituted.compiled
    targets = sorted(
        plain.keys() & lean.keys(), key=lambda t: (t == "cpu", [*plain].index(t))
    )
    if not targets:
        axes.set_title("Nothing could be compiled", loc="left", fontsize=11)
        return
    both = {"plain": plain[targets[0]], "substituted": lean[targets[0]]}
    held = [run.by_module for run in both.values()]
    most = {m: max(h.get(m, 0) for h in held) for h in held for m in h}
    modules = sorted(most, key=most.__getitem__, reverse=True)[:_MODULES_SHOWN]
    for name, (color, _, _, shift) in _STYLES.items():
        sizes = [both[name].by_module.get(module, 0) / 2**20 for module in modules]
        places = [row + shift for row in range(len(modules))]
        bars = axes.barh(places, sizes, height=0.38, color=color, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks(range(len(modules)), modules)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("MiB held at the peak")
    before, after = (run.temp_bytes / 2**20 for run in both.values())
    title = f"Temporary bytes on {targets[0]}: {before:,.0f} MiB to {after:,.0f} MiB"
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower right")
