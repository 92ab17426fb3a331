"""What a plan says first: the peak, the budget, and what each pass has saved."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.scheduling import Plan
from jaxmem.scheduling._choice import NO_CHOICE
from jaxmem.scheduling.plan.rows import (
    WHOLE_STEP,
    Gradient,
    RecomputedOperation,
    RecomputedResidual,
    TiledRegion,
)
from jaxmem.scheduling.search.result import Trial
from tests.memory import dumps
from tests.sets import some_fast

MIB = 2**20
STACK = (4, 512, 512), "float32", "Net/layers"


@functools.cache
def compiled():
    return dumps.report(dumps.compiled(jnp.tanh, jnp.ones((8, 8))))


def report(peak: int, memory: int | None = None):
    """Of a step with 2 MiB of arguments and results."""
    sizes = {"peak_bytes": peak, "temp_bytes": peak - 2 * MIB, "memory_bytes": memory}
    return dataclasses.replace(compiled(), **sizes)


def plan(before: int = 0, after: int = 0, **fields):
    rows = {"gradients": (), "residuals": ()} | fields
    if not before:
        return Plan(**rows, predicted_bytes=8 * MIB)
    both = {"plain": report(before * MIB), "scheduled": report(after * MIB)}
    return Plan(**rows | {"target": "h100"} | both)


def tile(saved: int, path: str = "Net/mlp", axis: str = "tokens", seconds: float = 0.0):
    before = 2 * saved * MIB
    about = STACK[:2] + (path, "net.py:3 (call)", axis, 4)
    return TiledRegion(*about, before, before - saved * MIB, 1, seconds)


RELEASED = Gradient(4 * MIB, *STACK, True)
KEPT = Gradient(3 * MIB, *STACK, False, "the step returns it")
RESIDUAL = RecomputedResidual(16 * MIB, *STACK, "elementwise of other residuals")
WAITING = RecomputedResidual(8 * MIB, *STACK, "itself, from the host's memory")
PRODUCT = RecomputedOperation("dot_general", *STACK, 4, 2e9, 3e-3)


def head(found: Plan) -> list[str]:
    """The lines before the rows, and nowhere a pass that did nothing."""
    text = str(found)
    assert not re.search(r"(?<![\d.])0 B|\b0 ms|\b0 flops|(?<!\d)0 \w+s\b", text), text
    lines = text.splitlines()
    short = lambda line: line.split(":")[0] in PASSES or line == lines[0]
    return [line for line in lines if short(line)]


PASSES = (
    *("released", "recomputed", "offloaded", "in tiles", "in blocks of the vocabulary"),
    "in 4 micro-batches",
)


def test_tiles_alone():
    found = plan(100, 38, tiles=(tile(50, seconds=2e-3), tile(20)))
    assert head(found) == [
        "h100: peak 100 MiB -> 38.0 MiB (62 % less)",
        "in tiles: up to 50.0 MiB less while running, 2 regions, about 2 ms more work",
    ]


def test_released_gradients_alone():
    found = plan(10, 6, gradients=(RELEASED, RELEASED, KEPT))
    assert head(found) == [
        "h100: peak 10.0 MiB -> 6.00 MiB (40 % less)",
        "released: 8.00 MiB of gradients, 2 arrays",
    ]
    assert "not released: 3.00 MiB of gradients; their rows say why" in str(found)


def test_each_pass_in_the_order_of_its_bytes():
    heads = tile(30, axis="vocabulary")
    found = plan(
        *(100, 20),
        gradients=(RELEASED,),
        residuals=(RESIDUAL, WAITING),
        recomputed=(PRODUCT,),
        offloaded_bytes=8 * MIB,
        tiles=(tile(2), heads, tile(40, path=WHOLE_STEP, axis="batch")),
    )
    assert [line.split(":")[0] for line in head(found)[1:]] == [
        "in 4 micro-batches",
        "in blocks of the vocabulary",
        "recomputed",
        "offloaded",
        "released",
        "in tiles",
    ]
    want = "recomputed: 16.0 MiB of residuals, 1 operation, 2e+09 flops"
    assert f"{want}, about 3 ms more work" in head(found)


def test_nothing_to_do():
    found = plan(10, 10, notes=("nothing is changed: it has no backward pass",))
    assert head(found) == ["h100: peak 10.0 MiB, as before"]
    assert str(found).endswith("nothing is changed: it has no backward pass")


def test_no_target():
    found = plan(gradients=(RELEASED,))
    first = "predicted peak 8.00 MiB: name a target, and it is compiled"
    assert head(found)[0] == first
    assert found.lower_bound == 0 and "a lower bound" not in str(found)
    on_four = dataclasses.replace(found, mesh=(("data", 2), ("model", 2)))
    assert head(on_four)[0] == first.replace(":", " on each of 4 devices:")


def test_whether_the_budget_is_met():
    met = plan(10, 6, budget=7 * MIB)
    assert head(met)[0].endswith("; budget 7.00 MiB: met, 1.00 MiB to spare")
    assert met.budget_met is True
    trial = Trial(NO_CHOICE, 5 * MIB, None, 0.0)
    missed = plan(10, 6, budget=4 * MIB, tried=(trial,))
    told = "; budget 4.00 MiB: missed by 2.00 MiB, the lowest peak found is 5.00 MiB"
    assert head(missed)[0].endswith(told) and missed.budget_met is False
    unknown = plan(budget=4 * MIB)
    assert head(unknown)[0].endswith("; budget 4.00 MiB: not compiled")
    assert unknown.budget_met is None and plan(10, 6).budget_met is None


def test_what_does_not_fit():
    large = report(20 * MIB, memory=16 * MIB)
    found = dataclasses.replace(plan(10, 6), plain=large)
    assert head(found)[0].startswith("h100: peak 20.0 MiB (does not fit) -> 6.00 MiB")
    refused = dataclasses.replace(found, plain=None)
    assert head(refused)[0] == "h100: peak that does not fit -> 6.00 MiB"


def test_the_page_and_the_json_say_the_same():
    found = plan(100, 38, tiles=(tile(50),), budget=40 * MIB)
    page = found._repr_html_()
    for line in head(found):
        assert line.replace(">", "&gt;") in page
    assert '"budget_met": true' in found.to_json()
    assert f'"lower_bound": {2 * MIB}' in found.to_json()
    assert Plan.from_json(found.to_json()) == found


# -- the bytes that no plan goes below


def chain(w, x):
    return jnp.sum(jnp.tanh(jnp.exp(jnp.sin(x @ w))))


def mlp(w, x):
    for _ in range(4):
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def scanned(w, x):
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=6)[0])


def softmax(w, x):
    return jnp.mean(jax.nn.log_softmax(x @ w, -1)[:, 0])


def reduced(w, x):
    return jnp.sum(jnp.max(x @ w, 0) - jnp.min(x, 0))


def unread(w, x):
    """Its examples are not looked at: XLA is not even given them."""
    return jnp.sum(w**2)


LOSSES = {f.__name__: f for f in (chain, mlp, scanned, softmax, reduced, unread)}


def printed_bound(found: Plan) -> int | None:
    """Whether the text tells a bound, which is then the attribute."""
    assert ("a lower bound" in str(found)) == bool(found.lower_bound)
    assert "below" not in str(found)
    return found.lower_bound or None


def bounds_hold(loss, target: str, donate, rows: int = 512) -> None:
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = like(64, 64), like(rows, 64)
    how = {"donate_argnums": donate, "target": target, "progress": False}
    found = jaxmem.schedule(step, **how).plan(*args)
    bound = printed_bound(found)
    assert bound, "nothing is printed"
    plain = jaxmem.estimate(step, *args, target=target, donate_argnums=donate)
    for report in (found.plain, found.scheduled, plain):
        assert bound <= report.peak_bytes


CASES = [(name, donate) for name in LOSSES for donate in ((), (0,))]


@pytest.mark.parametrize("case", some_fast(CASES, ("mlp", (0,))), ids=str)
def test_no_compiled_peak_is_below_what_is_printed(case):
    name, donate = case
    bounds_hold(LOSSES[name], "cpu", donate)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mlp, softmax], ids=lambda f: f.__name__)
def test_nor_on_a_gpu_which_fuses_more(loss):
    bounds_hold(loss, "h100", (0,), 2**16)
