"""Examples a second in so much memory: policies at their best batch, and `schedule`.

    python -m benchmarks.throughput
    python -m benchmarks.throughput 16GiB ViT schedule  # the rows that have all

Loss gradients on an H100 of which a program may use 16 or 80 GiB, everything counted:
parameters, gradients and temporaries. A policy has the batch with the most examples a
second that `jaxmem.best_batch` finds. Ours are the unmodified model under
`jaxmem.schedule`, and the same after `jaxmem.substitute`, each at batches that go up by
a half until one does not fit, or two in a row bring no more. Seconds are predicted
(`report.seconds`).
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator

import jax

import jaxmem
from benchmarks import bert
from benchmarks._common import publish_some
from benchmarks.blocks import POLICIES, STACKS, gradient_of_stack, made
from benchmarks.models import named
from jaxmem.scheduling import BudgetError

TARGET = "h100"
ROOMS = "16GiB", "80GiB"
MODELS = {  # -> (name in `blocks`, tokens of an example, what divides a batch)
    "BERT-Large": ("BERT-Large, 8 x 512", 512, 8),
    "ViT-L": ("ViT-L, 16 x 256", 256, 16),
    "Llama-1B blocks": ("Llama-1B blocks, 2 x 2048", 2048, 2),
}
THEIRS = {
    "dots_with_no_batch_dims_saveable": POLICIES["dots_with_no_batch_dims_saveable"],
    "nothing_saveable": POLICIES["nothing_saveable"],
    "minimal_flash": named.POLICIES["minimal_flash"],
}
OURS = ("schedule", "substitute, schedule")
COLUMNS = (
    *("model", "memory", "step", "batch", "predicted ms", "examples a second"),
    "of the best policy's",
)


def step_of(model: str, policy: str) -> tuple[Callable, Callable[[int], tuple]]:
    """(loss gradient, what makes its arguments for a batch)."""
    name, tokens, _ = MODELS[model]
    _, net = made(name, THEIRS.get(policy))
    net = jaxmem.substitute(net) if policy.startswith("substitute") else net
    if name in STACKS:
        step, (params, x, key) = gradient_of_stack(net, (1, tokens))
    else:
        step, (params, x, key) = bert.gradient(net)
    step = named.with_names(step) if policy in named.POLICIES else step
    batch = lambda n: jax.ShapeDtypeStruct((n, tokens, *x.shape[2:]), x.dtype)
    return step, lambda n: (params, batch(n), key)


@functools.cache
def of_policy(model: str, room: str, policy: str) -> tuple[int, float]:
    """(batch, seconds of a step) of a policy at its best."""
    step, make_args = step_of(model, policy)
    unit = MODELS[model][2]
    how = {"target": TARGET, "memory": room, "multiple_of": unit, "progress": False}
    found = jaxmem.best_batch(step, make_args, **how)
    return int(found), found.seconds or math.inf


def batches(model: str, room: str) -> Iterator[int]:
    """Batches that go up by about a half, from the best policy's on.

    Or from half of the largest, where that is less: ours may have it in less memory.
    """
    unit, found = MODELS[model][2], [of_policy(model, room, one) for one in THEIRS]
    fastest, _ = max(found, key=lambda one: one[0] / one[1])
    n = max(unit, min(fastest, max(n for n, _ in found) // 2))
    while True:
        n = unit * round(n / unit)
        yield n
        n = max(n + unit, 3 * n // 2)


@functools.cache
def of_ours(model: str, room: str, how: str) -> tuple[int, float]:
    """The same of a schedule, of the batches that fit.

    Two in a row without more examples a second end it: what is spared beyond that buys
    nothing.
    """
    step, make_args = step_of(model, how)
    found: dict[int, float] = {}
    for n in batches(model, room):
        best = max(found, key=lambda n: n / found[n], default=n)
        if sum(m > best for m in found) == 2:
            break
        scheduled = jaxmem.schedule(step, room, target=TARGET, donate_argnums=())
        try:
            report = scheduled.plan(*make_args(n)).scheduled
        except BudgetError:
            break
        found[n] = report.seconds
        print(model, room, how, n, report.seconds, n / report.seconds, flush=True)
    best = max(found, key=lambda n: n / found[n])
    return best, found[best]


def row(model: str, room: str, how: str) -> tuple:
    per_second = lambda one: one[0] / one[1]
    best = max(per_second(of_policy(model, room, policy)) for policy in THEIRS)
    measure = of_ours if how in OURS else of_policy
    batch, seconds = measure(model, room, how)
    return batch, 1e3 * seconds, batch / seconds, batch / seconds / best


def measures() -> dict[tuple[str, str, str], Callable[[], tuple]]:
    """The first cells of the rows -> what measures the rest."""
    return {
        (model, room, how): functools.partial(row, model, room, how)
        for model in MODELS
        for room in ROOMS
        for how in (*THEIRS, *OURS)
    }


if __name__ == "__main__":
    publish_some("throughput", COLUMNS, measures(), sys.argv[1:])
