"""A budget in, a step out: time and recomputation at each, beside the stock policies.

    python -m benchmarks.budget [MODEL ...]
    python -m benchmarks.budget --pictures   # the pictures alone

Loss gradients of the scanned, unmodified models of `benchmarks.blocks`. A budget is a
number of MiB of temporaries on an H100, which is given to `jaxmem.schedule` with the
arguments and outputs added. "stock" is the checkpoint policy that recomputes least
among those that fit, and beside it stands the fastest of these. "predicted ms" is
`report.seconds`; "recomputes" is in per cent of the forward pass's matmul flops.
"""

import functools
import math
import sys

import jaxmem
from benchmarks._common import (
    as_a_whole,
    peak_with,
    publish,
    published,
    size_and_ms,
)
from benchmarks._pictures import IMAGES, frontier, of_model
from benchmarks.blocks import POLICIES, TARGET, made, matmul_flops
from jaxmem.scheduling import BudgetError

MODELS = ("BERT-Large, 8 x 512", "GPT-2 medium, 4 x 1024", "Llama-1B blocks, 2 x 2048")
AXES = "temp MiB", "predicted ms"  # of the picture
STEPS = 4  # budgets between full remat and keeping all, besides those of the policies
GIVEN = {"BERT-Large, 8 x 512": (2300,)}
COLUMNS = (
    *("model", "budget MiB", "temp MiB", "predicted ms", "% of peak", "recomputes %"),
    *(
        "stock policy",
        "its temp MiB",
        "its predicted ms",
        "its recomputes %",
        "fastest policy",
        "the fastest's predicted ms",
        "no slower",
    ),
    *("compiles", "seconds"),
)


@functools.cache
def stock(name: str):
    """(policy, its temp in MiB, its ms, what it recomputes in per cent), by temp."""
    rows, plain = [], 0
    for policy, rule in POLICIES.items():
        gradient, model = made(name, rule)
        step, args = gradient(model)
        flops = matmul_flops(step, *args)
        plain = plain or flops
        taken = size_and_ms(jaxmem.estimate(step, *args, target=TARGET))
        rows.append((policy, *taken, 300 * (flops - plain) / plain))
    return sorted(rows, key=lambda row: row[1]), plain


def budgets(name: str) -> list[float]:
    """MiB: those of the policies, and some between."""
    temps = [temp for _, temp, *_ in stock(name)[0]]
    low, high = temps[0], temps[2]
    steps = [low * (high / low) ** (k / (STEPS + 1)) for k in range(1, STEPS + 1)]
    return sorted({*(float(round(x)) for x in [*temps, *steps]), *GIVEN.get(name, ())})


def row(name: str, budget: float):
    gradient, model = made(name)
    step, args = gradient(model)
    plain = jaxmem.estimate(step, *args, target=TARGET)
    room = peak_with(plain, budget)
    scheduled = jaxmem.schedule(step, room, target=TARGET, donate_argnums=())
    rows, flops = stock(name)
    fits = [r for r in rows if r[1] <= budget + 0.5]
    none = ("none", 0.0, math.inf, 1e3)
    policy, temp, ms, its = min(fits, key=lambda r: r[3]) if fits else none
    fastest, _, best, _ = min(fits, key=lambda r: r[2]) if fits else none
    try:
        plan = scheduled.plan(*args)
    except BudgetError as error:
        print(error)
        ours, theirs = ("",) * 4, (policy, temp, ms, its, fastest, best)
        return name, budget, *ours, *theirs, "out of reach", "", ""
    recomputed = 300 * plan.recomputed_flops / flops
    ours = plan.scheduled
    share = 100 * ours.peak_bytes / room
    return (
        *(name, budget, *size_and_ms(ours), share, recomputed),
        *(policy, temp, ms, its, fastest, best),
        "yes" if 1e3 * ours.seconds <= best else "no",
        *(len(plan.tried), plan.planning_seconds),
    )


def main() -> None:
    if "--pictures" in sys.argv[1:]:
        return draw(_with_cells(published("budget")))
    names = sys.argv[1:] or MODELS
    as_a_whole()
    for name in names:
        rows = [r for r in published("budget") if r[0] != name]
        for budget in budgets(name):
            rows.append(row(name, budget))
            print(*rows[-1], flush=True)
        rows.sort(key=lambda r: (r[0], float(r[1])))
        publish("budget", COLUMNS, rows)
        draw(_with_cells(rows))
    return None


def _with_cells(rows) -> list[dict]:
    """Rows of budgets that are reached, by column."""
    return [dict(zip(COLUMNS, r, strict=False)) for r in rows if r[2]]


def draw(rows) -> None:
    """Predicted time over bytes, a picture a model: ours, and the stock policies."""
    point = lambda r, of: tuple(float(r[f"{of}{c}"]) for c in AXES)
    for name in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == name]
        theirs = {r["stock policy"]: point(r, "its ") for r in own}
        theirs.pop("none", None)
        line = [point(r, "") for r in own]
        frontier(of_model(IMAGES / "budget", name), name, line, theirs)


if __name__ == "__main__":
    main()
