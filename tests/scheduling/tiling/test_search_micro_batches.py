"""Micro-batches under a budget: where they clearly pay, and what forbids them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import estimate, schedule
from jaxmem.scheduling import BudgetError, Plan, _finder
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import space_at_sight
from jaxmem.scheduling.tiling.micro_batch_front import (
    in_fewest,
    in_least_seconds,
    in_micro_batches,
    why_not,
)
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from tests.scheduling.tiling.whole_steps import rewritten

pytestmark = pytest.mark.usefixtures("standard_jax")

LAYERS, WIDTH, ROWS = 4, 64, 4096
SDS = jax.ShapeDtypeStruct
ARGS = (
    SDS((LAYERS, WIDTH, WIDTH), jnp.float32),
    SDS((ROWS, WIDTH), jnp.float32),
    SDS((ROWS, WIDTH), jnp.float32),
)
RESIDUAL = 4 * ROWS * WIDTH


def layer(h, w):
    """Its residuals are wide, and products alone make them."""
    return h + jnp.sin(jnp.sin(h @ w) @ w.T), None


def loss(w, x, y):
    return jnp.square(jax.lax.scan(layer, x, w)[0] - y).mean()


def contrastive(w, x, y):
    h = jax.lax.scan(layer, x, w)[0]
    return jax.nn.logsumexp(h[:1] @ h.T, axis=-1).mean() + jnp.square(h - y).mean()


def step_of(loss):
    def step(w, x, y):
        value, grad = jax.value_and_grad(loss)(w, x, y)
        return w - 0.1 * grad, value

    return step


@pytest.fixture(scope="module")
def budget():
    """A quarter of the temporaries."""
    plain = estimate(step_of(loss), *ARGS, donate_argnums=0)
    return plain.peak_bytes - plain.temp_bytes * 3 // 4


def scheduled(loss, budget, **options):
    how = {"target": "cpu", "donate_argnums": 0, "progress": False}
    return schedule(step_of(loss), budget, **how, **options)


@pytest.fixture
def traced(monkeypatch):
    """Gives a step as the search is given it; nothing is compiled."""

    def of(step, *args):
        seen = []

        def search(step, *how):
            seen.append(step)
            raise InterruptedError

        monkeypatch.setattr(_finder, "search", search)
        with pytest.raises(InterruptedError):
            schedule(step, 1, target="h100", donate_argnums=0).find(args, {})
        return seen[0]

    return of


# -- what is looked at


def test_the_least_number_that_is_predicted_to_fit(traced):
    step = traced(step_of(loss), *ARGS)
    plain = Choice("h100")
    peak = lambda n: step.predicted(plain.having(MicroBatches(n)))
    for n in (2, 4, 8):
        first, *others = in_micro_batches(step, room=peak(n))
        assert first.choice.get(MicroBatches).n == n
        assert first.bytes <= peak(n) < peak(n // 2)
        rows = step.rewritten(first.choice).description.tiles
        assert first.seconds <= sum(row.seconds for row in rows)
        assert {one.choice.get(MicroBatches).n for one in others} <= {n}


def test_the_fewest_that_do_nothing_else(traced):
    step = traced(step_of(loss), *ARGS)
    parts = lambda n: Choice("h100", (MicroBatches(n),))
    for n in (2, 4):
        (one,) = in_fewest(step, step.predicted(parts(n)), math.inf)
        assert one.choice == parts(n) and one.bytes == step.predicted(parts(n))
        assert not in_fewest(step, step.predicted(parts(n)), one.seconds)
    assert not in_fewest(step, 1, math.inf)


@pytest.mark.slow
def test_micro_batches_that_take_more_than_is_asked_for_are_none(traced):
    step = traced(step_of(loss), *ARGS)
    assert not in_micro_batches(step, room=1, below=1)
    assert not in_least_seconds(step, room=1, most=math.inf, fastest=-math.inf)


@pytest.mark.slow
def test_the_number_that_takes_least_with_what_its_parts_recompute(traced):
    """In few parts much is recomputed, in many nothing is: what is between counts."""
    step = traced(step_of(loss), *ARGS)
    rooms = [step.predicted(Choice("h100", (MicroBatches(n),))) for n in (8, 4, 2)]
    fastest = pareto_front(space_at_sight(step))[0].seconds
    soonest = functools.partial(in_least_seconds, step, fastest=fastest)
    for room in np.linspace(rooms[0], rooms[-1], 5):
        found = soonest(room, most=math.inf)
        (n,) = {one.choice.get(MicroBatches).n for one in found}
        least = seconds_within(found, room)
        assert least == min(seconds_within(fronts(step, m), room) for m in (2, 4, 8))
        assert fronts(step, n) == found
        # nor is there any that takes less than it does
        assert not soonest(room, most=least)
        assert soonest(room, most=least + 0.01 * abs(least)) == found


def fronts(step, n):
    """The front in `n` parts: what is chosen where everything else takes too long."""
    plain = step.predicted(Choice("h100", (MicroBatches(n),)))
    return in_micro_batches(step, room=plain)


def seconds_within(front, room):
    if front[-1].bytes > room:
        return math.inf
    kept, seconds = [c.bytes for c in front], [c.seconds for c in front]
    return float(np.interp(room, kept[::-1], seconds[::-1]))


@pytest.mark.slow
def test_numbers_divide_the_examples(traced):
    w, *data = ARGS
    args = w, *(SDS((45, 32, WIDTH), x.dtype) for x in data)
    step = traced(step_of(loss), *args)
    (first, *_) = in_micro_batches(step, room=-math.inf)
    assert first.choice.get(MicroBatches).n in (3, 5, 9, 15, 45)


def test_the_operation_where_examples_meet_is_named(traced):
    assert not why_not(traced(step_of(loss), *ARGS))
    step = traced(step_of(contrastive), *ARGS)
    assert not in_micro_batches(step, room=1)
    (why,) = why_not(step)
    assert "micro-batches: examples meet in `slice` at " in why
    assert "(contrastive)" in why


def test_what_a_part_does_is_counted_for_every_part():
    """As many products are recomputed as without micro-batches."""
    n, every = 4, Recompute(1e9)
    step = step_of(loss)
    parts = rewritten(step, ARGS, MicroBatches(n), every).description.recomputed
    whole = rewritten(step, ARGS, every).description.recomputed
    assert {row.times for row in parts} == {n * LAYERS}
    assert {row.times for row in whole} == {LAYERS}
    flops = lambda rows: sum(row.flops for row in rows)
    assert flops(parts) == flops(whole) > 0


# -- what is taken


@pytest.mark.slow
def test_they_are_taken_where_recomputation_takes_longer(budget):
    step = scheduled(loss, budget)
    plan = step.plan(*ARGS)
    assert plan.choice.get(MicroBatches).n == 4
    assert plan.scheduled.peak_bytes <= budget and len(plan.tried) <= 12
    assert not plan.recomputed
    (row,) = plan.tiles
    assert row.path == "the whole step"
    assert Plan.from_json(plan.to_json()) == plan
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, x: jax.random.normal(key, x.shape, x.dtype) / WIDTH
    args = [draw(key, x) for key, x in zip(keys, ARGS, strict=True)]
    want = jax.jit(step_of(loss))(*args)
    got = step(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        # sums over the rows, in another order
        most = ROWS * 2.0**-24 * float(jnp.abs(a).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=most)


@pytest.mark.slow
def test_none_without_tiles(budget):
    with pytest.raises(BudgetError) as error:
        scheduled(loss, budget, tile=False).plan(*ARGS)
    assert "micro-batches" not in str(error.value)
    with pytest.raises(BudgetError, match="examples meet in `slice` at"):
        scheduled(contrastive, budget).plan(*ARGS)


@pytest.mark.slow
def test_the_least_is_found_again():
    """The budget that the error names is reached."""
    with pytest.raises(BudgetError) as error:
        scheduled(loss, 1).plan(*ARGS)
    plan = scheduled(loss, error.value.least).plan(*ARGS)
    assert plan.scheduled.peak_bytes <= error.value.least
    assert plan.choice.get(MicroBatches).n > 1
