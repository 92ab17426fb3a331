"""A budget in, a step out: what is recomputed at each, beside the stock policies.

    python -m benchmarks.budget [MODEL ...]

Loss gradients of the scanned, unmodified models of `benchmarks.blocks`. A budget is a
number of MiB of temporaries on an H100, which is given to `jaxmem.schedule` with the
arguments and outputs added. "stock" is the checkpoint policy that recomputes least
among those that fit. "recomputes" is in per cent of the forward pass's matmul flops.
"""

import functools
import sys

import jaxmem
from benchmarks._common import MIB, RESULTS, as_a_whole, publish, published
from benchmarks.blocks import POLICIES, TARGET, made, matmul_flops
from jaxmem.scheduling import BudgetError

MODELS = ("BERT-Large, 8 x 512", "GPT-2 medium, 4 x 1024", "Llama-1B blocks, 2 x 2048")
STEPS = 4  # budgets between full remat and keeping all, besides those of the policies
GIVEN = {"BERT-Large, 8 x 512": (2300,)}
COLUMNS = (
    *("model", "budget MiB", "temp MiB", "% of peak", "recomputes %", "stock policy"),
    *("its temp MiB", "its recomputes %", "no more", "compiles", "seconds"),
)


@functools.cache
def stock(name: str):
    """(policy, its temp in MiB, what it recomputes in per cent), by temp."""
    rows, plain = [], 0
    for policy, rule in POLICIES.items():
        gradient, model = made(name, rule)
        step, args = gradient(model)
        flops = matmul_flops(step, *args)
        plain = plain or flops
        temp = jaxmem.estimate(step, *args, target=TARGET).temp_bytes / MIB
        rows.append((policy, temp, 300 * (flops - plain) / plain))
    return sorted(rows, key=lambda row: row[1]), plain


def budgets(name: str) -> list[float]:
    """MiB: those of the policies, and some between."""
    temps = [temp for _, temp, _ in stock(name)[0]]
    low, high = temps[0], temps[2]
    steps = [low * (high / low) ** (k / (STEPS + 1)) for k in range(1, STEPS + 1)]
    return sorted({*(float(round(x)) for x in [*temps, *steps]), *GIVEN.get(name, ())})


def row(name: str, budget: float):
    gradient, model = made(name)
    step, args = gradient(model)
    plain = jaxmem.estimate(step, *args, target=TARGET)
    rest = plain.peak_bytes - plain.temp_bytes
    room = rest + round((budget + 0.5) * MIB)
    scheduled = jaxmem.schedule(step, room, target=TARGET, donate_argnums=())
    rows, flops = stock(name)
    fits = [r for r in rows if r[1] <= budget + 0.5]
    policy, temp, its = min(fits, key=lambda r: r[2]) if fits else ("none", 0.0, 1e3)
    try:
        plan = scheduled.plan(*args)
    except BudgetError as error:
        print(error)
        return (name, budget, "", "", "", policy, temp, its, "out of reach", "", "")
    recomputed = 300 * plan.recomputed_flops / flops
    peak = plan.scheduled.peak_bytes
    return (
        *(name, budget, plan.scheduled.temp_bytes / MIB, 100 * peak / room, recomputed),
        *(policy, temp, its, "yes" if recomputed <= its + 0.01 else "no"),
        *(len(plan.tried), plan.planning_seconds),
    )


def main() -> None:
    names = sys.argv[1:] or MODELS
    as_a_whole()
    for name in names:
        rows = [r for r in published("budget") if r[0] != name]
        for budget in budgets(name):
            rows.append(row(name, budget))
            print(*rows[-1], flush=True)
        rows.sort(key=lambda r: (r[0], float(r[1])))
        publish("budget", COLUMNS, rows)
        reached = [r for r in rows if r[2]]
        draw([[r[0], *map(float, r[1:5]), r[5], *map(float, r[6:8])] for r in reached])


def draw(rows) -> None:
    """Recomputation over bytes: ours, and the stock policies as points."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r[0] for r in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 4), squeeze=False
    )
    for ax, name in zip(axes[0], names, strict=True):
        ours = sorted((r[2], r[4]) for r in rows if r[0] == name)
        ax.plot(*zip(*ours, strict=True), marker="o", markersize=3, label="schedule")
        for policy, temp, recomputed in {
            (r[5], r[6], r[7]) for r in rows if r[0] == name
        }:
            if policy != "none":
                ax.plot(temp, recomputed, marker="x", linestyle="", label=policy)
        ax.set(title=name, xlabel="temporaries, MiB", xscale="log", ylim=(-3, None))
        ax.legend(fontsize=7)
    axes[0][0].set_ylabel("recomputed, % of the forward pass")
    figure.tight_layout()
    figure.savefig(RESULTS / "budget.png", dpi=120)


if __name__ == "__main__":
    main()
