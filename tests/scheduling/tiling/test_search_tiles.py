"""Tiles under a budget: taken where nothing cheaper fits, and kept in the plan."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.steps import tile_ways
from jaxmem import estimate, schedule
from jaxmem.scheduling import BudgetError, Plan
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._searched import Candidate, SearchedStep
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.fronts import Fronts
from jaxmem.scheduling.search.result import ReportedTrial
from jaxmem.scheduling.search.trials import Trials
from jaxmem.scheduling.tiling import list_regions, tiled_front
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.memory.test_estimate import needs_h100

LAYERS, ROWS, WIDTH, WORDS = 2, 512, 32, 2048
SDS = jax.ShapeDtypeStruct


def loss_of_logits(logits, labels):
    logits = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def loss(params, x, labels):
    """Layers in a scan, and a head whose logits are larger than all else."""
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return loss_of_logits(x @ params["head"], labels)


GRADIENT = jax.value_and_grad(loss)
PARAMS = {
    "layers": SDS((LAYERS, WIDTH, WIDTH), jnp.float32),
    "head": SDS((WIDTH, WORDS), jnp.float32),
}
ARGS = PARAMS, SDS((ROWS, WIDTH), jnp.float32), SDS((ROWS,), jnp.int32)
LOGITS = 4 * ROWS * WORDS


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """One for all tests of this file: they search for the same step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.mktemp("reports")))
        yield


@pytest.fixture(scope="module")
def plain():
    return estimate(GRADIENT, *ARGS)


def rest(report):
    return report.peak_bytes - report.temp_bytes


def scheduled(budget, **options):
    return schedule(GRADIENT, budget, target="cpu", donate_argnums=(), **options)


def least(**options) -> int:
    with pytest.raises(BudgetError) as error:
        scheduled(1, **options).plan(*ARGS)
    return error.value.least


@pytest.fixture(scope="module")
def tiled(plain):
    """The step in a half of the logits, and its plan."""
    step = scheduled(rest(plain) + LOGITS // 2)
    return step, step.plan(*ARGS, target="cpu")


@pytest.mark.slow
def test_tiles_go_on_below_what_recomputation_reaches(plain, tiled):
    assert least(tile=False) > rest(plain) + LOGITS
    assert least() < rest(plain) + LOGITS // 2
    _, plan = tiled
    assert plan.scheduled.peak_bytes <= plan.budget
    assert plan.scheduled.temp_bytes <= LOGITS // 2
    assert len(plan.tried) <= 12
    assert not plan.recomputed  # nothing of it would help


@pytest.mark.slow
def test_a_plan_says_what_is_in_tiles(tiled):
    _, plan = tiled
    largest = plan.tiles[0]
    assert largest.shape == (ROWS, WORDS) and largest.axis == "tokens"
    assert largest.n > 1 and largest.bytes_after < largest.bytes_before
    assert largest.times == 1 and "test_search_tiles.py" in largest.line
    assert plan.tile_seconds == sum(row.seconds for row in plan.tiles)
    assert f"{largest.n} over tokens" in str(plan)
    best = next(t for t in plan.tried if t.choice == plan.choice)
    assert best.seconds == pytest.approx(plan.tile_seconds, abs=1e-12)


@pytest.mark.slow
def test_a_plan_with_tiles_is_loaded(tiled):
    step, plan = tiled
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan and loaded.choice.get(Tiles).limit is not None
    other = schedule(GRADIENT, plan=loaded, donate_argnums=())
    assert other.plan(*ARGS).tiles == plan.tiles
    assert estimate(other, *ARGS) == estimate(step, *ARGS)


@pytest.mark.slow
def test_tiles_compute_what_the_step_does(tiled):
    step, _ = tiled
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "head": jax.random.normal(keys[1], (WIDTH, WORDS)) / WIDTH**0.5,
    }
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    labels = jax.random.randint(keys[3], (ROWS,), 0, WORDS)
    want, got = jax.jit(GRADIENT)(params, x, labels), step(params, x, labels)
    # sums of ROWS or WORDS terms, in another order
    close = lambda a, b: np.testing.assert_allclose(
        a, b, rtol=0, atol=WORDS * 2.0**-24 * float(jnp.abs(b).max())
    )
    jax.tree.map(close, got, want)


@pytest.mark.slow
@needs_h100
def test_a_head_goes_over_the_vocabulary_where_tokens_do_not_reach():
    """Over tokens the float32 sum of the weights' gradient is there besides."""
    args = (
        SDS((1024, 512), jnp.bfloat16),
        SDS((512, 16_384), jnp.bfloat16),
        SDS((1024,), jnp.int32),
    )
    sums = 4 * 512 * 16_384
    head = lambda x, w, labels: loss_of_logits((x @ w).astype(jnp.float32), labels)
    gradient = jax.value_and_grad(head, argnums=(0, 1))
    how = {"target": "h100", "donate_argnums": ()}
    with pytest.raises(BudgetError) as error:
        schedule(gradient, 1, **how).plan(*args)
    plan = schedule(gradient, error.value.least, **how).plan(*args)
    assert plan.scheduled.temp_bytes < sums / 2 and len(plan.tried) <= 12
    assert [row.axis for row in plan.tiles] == ["vocabulary"]
    assert any("blocks of the vocabulary" in note for note in plan.notes)
    assert plan.choice.get(VocabularyTiles).limit is not None
    whole = schedule(gradient, error.value.least, tile=False, **how)
    with pytest.raises(BudgetError):
        whole.plan(*args)


def test_limits_share_what_is_found_of_a_list(monkeypatch):
    """What was looked at for one limit is not looked at for another."""
    looked_at = []
    find = list_regions.find
    spy = lambda graph, v, *how: (
        looked_at.append((id(graph), v, how)) or find(graph, v, *how)
    )
    monkeypatch.setattr(list_regions, "find", spy)
    closed = jax.make_jaxpr(GRADIENT)(*ARGS)
    known = Remembered()
    under = lambda limit: rewrite(
        closed, {}, choice=Choice("h100", (Tiles(limit=limit),)), known=known
    )
    first, count = under(LOGITS // 8), len(looked_at)
    assert first.did(Tiles) and count
    second = under(LOGITS // 4)
    assert second.description.tiles != first.description.tiles
    # of its own it looks at what comes after its first loop
    assert len(set(looked_at)) == len(looked_at) < 2 * count
    alone = rewrite(closed, {}, choice=Choice("h100", (Tiles(limit=LOGITS // 8),)))
    assert alone.description.tiles == first.description.tiles
    assert str(alone.jaxpr) == str(first.jaxpr)


def test_no_tiles_are_looked_for_where_the_slack_will_do():
    plain, other = Choice("h100"), Choice("h100", (Recompute(1.0),))
    flat = [Candidate(plain, 100, 0.0), Candidate(other, 50, 1.0)]
    for slack, fast in ((1.0, True), (0.9, False)):
        traced = SimpleNamespace(slack=lambda slack=slack: slack)
        step = SearchedStep(traced, limit=1060, front=flat)
        found = ReportedTrial(other, 1050.0, None, 1.0)
        assert Fronts(step, (), Trials(1060)).is_fast(found) == fast


@pytest.mark.parametrize(("limit", "fits"), [(1060, True), (955, True), (954, False)])
def test_recomputation_is_searched_first_where_it_may_do(limit, fits):
    plain, other = Choice("h100"), Choice("h100", (Recompute(1.0),))
    flat = [Candidate(plain, 100, 0.0), Candidate(other, 50, 1.0)]
    tried = [ReportedTrial(plain, 1100.0, None, 0.0)]
    step = SearchedStep(SimpleNamespace(), limit=limit, front=flat)
    assert Fronts(step, (), Trials(limit, tried))._may_fit() == fits


@pytest.mark.slow
def test_no_tile_where_nothing_needs_it(plain):
    assert not scheduled(plain.peak_bytes).plan(*ARGS).tiles
    step = schedule(GRADIENT, target="cpu", donate_argnums=())
    assert not step.plan(*ARGS).tiles
    step = scheduled(plain.peak_bytes, tile=False)
    assert not step.plan(*ARGS).tiles


def epochs(params, x):
    """Both passes, and an update, in each iteration of a loop."""

    def of_all(params):
        h = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"])
        return jnp.square(h @ params["third"]).mean()

    def epoch(params, _):
        value, grads = jax.value_and_grad(of_all)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return jax.lax.scan(epoch, params, length=2)


def test_lists_in_a_loop_run_in_tiles():
    """What is kept says nothing of the peak there, and no sequence is looked for."""
    rows, wide = 4096, 64
    shapes = {"first": (4, wide), "second": (wide, wide), "third": (wide, 4)}
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    args = params, jax.random.normal(keys[3], (rows, 4))
    hidden = 4 * rows * wide
    step = schedule(epochs, hidden, target="cpu", donate_argnums=())
    plan = step.plan(*args)
    assert plan.plain.peak_bytes > 3 * hidden >= 3 * plan.scheduled.peak_bytes
    assert [row for row in plan.tiles if row.n > 1]
    got, want = (jax.tree.leaves(fn(*args)) for fn in (step, jax.jit(epochs)))
    for a, b in zip(got, want, strict=True):
        # float32: means of 4,096 terms that are added up in another order
        np.testing.assert_allclose(a, b, rtol=2.0**-14, atol=2.0**-18)


@pytest.mark.slow
@needs_h100
@pytest.mark.usefixtures("standard_jax")
def test_a_layer_of_131072_tokens_fits_an_h100():
    """Its scores take 1 TiB, and six halvings of that are more than the chip has."""
    made = tile_ways.STEPS["one layer, 1 x 131,072"]("plain")
    how = {"target": "h100", "donate_argnums": made.donate, "progress": False}
    plan = schedule(made.step, "41.4GiB", **how).plan(*made.args)
    assert plan.scheduled.peak_bytes <= 41.4 * 2**30
    assert len(plan.tried) <= 8


def test_a_choice_of_tiles_has_no_sequence(monkeypatch):
    """Its positions are those of the step without tiles."""
    choice = Choice("cpu", (OperationOrder(planned=True, sequence=(1, 0)),))
    monkeypatch.setattr(tiled_front, "_cuts", lambda *args: iter([(Tiles(4),)]))
    monkeypatch.setattr(tiled_front, "_tile_seconds", lambda *args: 1.0)
    step = SimpleNamespace(predicted=lambda choice: 4)
    flat = [Candidate(choice, 8, 0.0)]
    found = tiled_front.in_tiles(step, flat, lambda limit: (Tiles(limit),))
    assert [one.choice.get(OperationOrder).sequence for one in found] == [(1, 0), ()]
    assert found[-1].choice.get(Tiles) == Tiles(4)
