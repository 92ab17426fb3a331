"""The demonstration in small: data, both models, training, table, picture, JSON."""

import dataclasses
import functools
import io
import json
import math
import time
from itertools import islice
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxmem
from jaxmem.demo import (
    Settings,
    batches,
    compare,
    draw,
    measuring,
    models,
    report,
    standard_library,
    table,
    techniques,
    training,
)
from jaxmem.demo.measuring import Largest, largest_batch, rounded
from jaxmem.demo.optimizers import OPTIMIZERS
from jaxmem.demo.techniques import TECHNIQUES, Technique
from tests.arrays import array
from tests.sets import some_fast

TINY = Settings(steps=3, batch=2, layers=2, width=32, heads=2, context=64)
ADAMA = dataclasses.replace(TINY, optimizer="adama", batch=8)
FLAVOURS = ("nnx", "linen")


@pytest.fixture(scope="module", autouse=True)
def loose_promotion():
    """optax counts steps in int32 and multiplies them with floats."""
    before = jax.config.jax_numpy_dtype_promotion
    # Not the context manager, which the threads that compile would not see.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.fixture(scope="module", params=some_fast(FLAVOURS, "nnx"))
def result(request):
    return compare(dataclasses.replace(TINY, model=request.param), ("cpu",))


def test_text_is_the_same_each_time_and_split_by_file():
    text, repeated = standard_library(500_000), standard_library(500_000)
    assert np.array_equal(text.train, repeated.train)
    assert len(text.train) > 4 * len(text.validation) > 0
    assert b"import " in text.train.tobytes()
    head = text.validation[:200].tobytes()
    assert head not in text.train.tobytes()


def test_batches_are_crops_of_the_text_and_follow_the_seed():
    text = np.arange(200, dtype=np.uint8)
    first = list(islice(batches(text, 4, 16, seed=1), 3))
    repeated = list(islice(batches(text, 4, 16, seed=1), 3))
    other = list(islice(batches(text, 4, 16, seed=2), 3))
    assert all(b.shape == (4, 17) and b.dtype == np.int32 for b in first)
    assert all((np.diff(b) == 1).all() for b in first)
    assert np.array_equal(first, repeated) and not np.array_equal(first, other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "torch"},
        {"steps": 0},
        {"batch": 0},
        {"width": 30, "heads": 4},
        {"dropout": 1.0},
        {"optimizer": "sgd"},
        {"micro_batches": 0},
        {"micro_batches": 3},
        {"technique": "magic"},
        {"technique": "wta-crs"},
    ],
    ids=lambda w: next(iter(w)),
)
def test_settings_refuse_what_no_run_can_be_made_of(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(TINY, **wrong)


@pytest.mark.parametrize(
    "optimizer, batch, n",
    [("adamw", 8, 1), ("adama", 8, 8), ("adama", 12, 6), ("adama", 7, 7)],
)
def test_micro_batches_by_default(optimizer, batch, n):
    assert Settings(optimizer=optimizer, batch=batch).n == n
    assert Settings(optimizer=optimizer, batch=batch, micro_batches=1).n == 1


@pytest.mark.parametrize("flavour", some_fast(FLAVOURS, "nnx"))
def test_model_sees_no_later_byte(flavour):
    params, forward = _dropping_out(flavour)
    tokens = jnp.arange(32, dtype=jnp.int32)[None]
    changed = tokens.at[0, 20].set(99)
    a, b = forward(params, tokens)[0], forward(params, changed)[0]
    assert jnp.array_equal(a[:20], b[:20]) and not jnp.allclose(a[20:], b[20:])


def test_both_ways_to_the_loss():
    random = np.random.default_rng(0)
    draw = lambda *shape: array(random.standard_normal(shape), jnp.float32)
    head = {"kernel": draw(16, 256), "bias": draw(256)}
    params = {"embed": draw(256, 16), "head": head}
    hidden = lambda params, tokens, key: params["embed"][tokens]

    def logits(params, tokens, key):
        head = params["head"]
        return hidden(params, tokens, key) @ head["kernel"] + head["bias"][None, None]

    losses = (
        techniques.loss_from_hidden(hidden),
        techniques.loss_from_logits(logits),
    )
    got, want = (jax.jit(jax.value_and_grad(f))(params, _tokens(2)) for f in losses)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_plain_model_starts_at_a_guess_and_learns(flavour):
    settings = dataclasses.replace(TINY, steps=40, learning_rate=1e-2)
    one = training.start(*_model(flavour), settings)
    text = standard_library(300_000)
    training.train({"plain": one}, batches(text.train, 8, 64, 0), settings)
    # Logits of unit size add about half a nat to log 256.
    assert math.log(256) - 0.2 < one.losses[0] < math.log(256) + 1.0
    assert np.mean(one.losses[-5:]) < 3.4
    assert len(one.seconds) == settings.steps
    held_back = training.validate(one, batches(text.validation, 8, 64, 0), 2)
    assert held_back < 3.6


@pytest.mark.parametrize("flavour", some_fast(FLAVOURS, "nnx"))
def test_dropout_acts_in_training_alone(flavour):
    params, forward = _dropping_out(flavour)
    tokens = jnp.arange(32, dtype=jnp.int32)[None]
    still, repeated = forward(params, tokens), forward(params, tokens)
    a, b = (forward(params, tokens, jax.random.key(i)) for i in (0, 1))
    assert jnp.array_equal(still, repeated)
    assert not jnp.allclose(a, b) and not jnp.allclose(a, still)


@pytest.mark.slow
def test_accumulated_gradient_is_that_of_the_batch():
    params, loss = _model("linen", layers=1)
    tokens = _tokens(8)
    gradient = jax.value_and_grad(loss)
    whole = jax.jit(gradient)(params, tokens, None)
    summed = jax.jit(training.accumulated(gradient, 4))(params, tokens, None)
    # Sums of some 500 terms below 1 in another order: roundings of 6e-8 of each.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), whole, summed
    )
    assert jnp.abs(whole[1]["head"]["kernel"]).max() > 1e-2


_QUICK = ("adamw", "adama", "lomo", "came")


@pytest.mark.parametrize("name", some_fast(OPTIMIZERS, *_QUICK))
def test_every_optimizer_takes_a_step(name):
    """And is updated with the types that its state began with."""
    settings = dataclasses.replace(TINY, optimizer=name, width=64, model="linen")

    def step():
        run = training.start(*_model("linen"), settings, name)
        return run.state, *run.step(run.state, _tokens(settings.batch), 0)

    state, new, value = jax.eval_shape(step)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same, new, state)) and value.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_adama_releases_every_scanned_gradient_in_spite_of_clipping(flavour):
    params, loss = _model(flavour)
    optimizer = training.make_optimizer(ADAMA, "adama")
    args = params, optimizer.init(params), _tokens(8), None
    plans = [
        jaxmem.microbatch(loss, optimizer, ADAMA.n, clip=clip).plan(*args)
        for clip in (None, "two_pass")
    ]
    stacked = sum(x.nbytes for x in jax.tree.leaves(params["blocks"]))
    assert plans[0].kept_bytes >= stacked  # why the demo asks for two passes
    assert plans[1].kept_bytes == 0 and plans[1].released_bytes >= stacked


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["storage-8", "wta-crs"])
def test_technique_changes_gradients_and_not_the_loss(technique):
    settings = dataclasses.replace(TINY, model="linen", layers=1, technique=technique)
    key, found = training.step_key(settings, 0), []
    for params, loss in training.pair(settings).values():
        found += jax.jit(jax.value_and_grad(loss))(params, _tokens(2), key)
    value, grads, same, others = found
    assert float(value) == pytest.approx(float(same), rel=1e-5)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True)
    apart = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in pairs]
    assert 1e-4 < max(apart)  # else nothing was approximated
    assert np.median(apart) < 0.6


_FAST = [("exact", "linen")]

# The others differ from one of these by a number alone.
_EACH = [
    *((name, "linen") for name in TECHNIQUES if name[-1] not in "134"),
    *((name, "nnx") for name in ("ms-norm", "linear-cross-entropy", "frozen")),
]


def _setting(technique, flavour):
    """Its settings, and those of which the first run is to be compared with."""
    settings = dataclasses.replace(TINY, model=flavour, technique=technique)
    own = settings.draws or settings.how.trains is not True
    own = own or settings.how.first is not Technique.first
    plain = settings if own else dataclasses.replace(settings, technique="exact")
    return settings, plain


@functools.cache
def _traced(settings, name):
    """(bytes kept, shapes of the state before and after a step); nothing is run."""
    kept = []

    def step():
        run = training.start(*training.pair(settings)[name], settings)
        kept.append(measuring.residual_bytes(run, settings))
        return run.state, run.step(run.state, _tokens(2), 0)[0]

    before, after = jax.eval_shape(step)
    return kept[0], before, after


@pytest.mark.parametrize(
    "technique, flavour",
    [
        pytest.param(*each, marks=() if each in _FAST else pytest.mark.slow)
        for each in _EACH
    ],
)
def test_technique_keeps_less(technique, flavour):
    settings, plain = _setting(technique, flavour)
    lean, before, after = _traced(settings, "substituted")
    assert 0 < lean < _traced(plain, "plain")[0]
    assert before == after
    params, (_, moments, *_) = before
    part = jaxmem.trainable(params, settings.how.trains)
    assert _count(part.params) == _count(moments[0].mu) <= _count(params)


@functools.cache
def _short_run(settings, name):
    """(losses of three steps, parameters before and after)."""
    run = training.start(*training.pair(settings)[name], settings)
    step, (before, _) = jax.jit(run.step), run.state
    losses = []
    for number in range(3):
        run.state, loss = step(run.state, _tokens(settings.batch), np.int32(number))
        losses.append(float(loss))
    return losses, before, run.state[0]


@pytest.mark.slow
@pytest.mark.parametrize("technique, flavour", _EACH)
def test_technique_trains_what_it_says(technique, flavour):
    settings, plain = _setting(technique, flavour)
    losses, *_ = _short_run(plain, "plain")
    close, before, after = _short_run(settings, "substituted")
    assert losses[2] < losses[1] - 0.01  # the first step is of rate zero
    by_design = "approximate" in settings.how.note
    np.testing.assert_allclose(close, losses, rtol=2e-2 if by_design else 1e-5)
    (trained, frozen), (moved, still) = (
        jaxmem.trainable(params, settings.how.trains) for params in (before, after)
    )
    assert all(map(np.array_equal, *map(jax.tree.leaves, (frozen, still))))
    assert not any(map(np.array_equal, *map(jax.tree.leaves, (trained, moved))))


@pytest.mark.slow  # what is released is asked for each flavour above
def test_adama_against_accumulation():
    """One comparison for all three, which takes a quarter of a minute to make."""
    result = compare(dataclasses.replace(ADAMA, steps=12), ("cpu",))
    _takes_less(result)
    _learns_along_other_steps(result)
    _table_tells_of_adama_and_of_its_clipping(result)


def _takes_less(result):
    plain, lean = result.plain, result.substituted
    parameters = 4 * _count(_split("nnx")[0])
    saved = plain.compiled["cpu"].peak_bytes - lean.compiled["cpu"].peak_bytes
    residuals = plain.residual_bytes - lean.residual_bytes
    # The accumulator is gone, and what substitute() saves of one sequence's residuals;
    # a few buffers of the second pass come on top.
    assert saved > 0.8 * (parameters + residuals)
    assert not result.problems


def _learns_along_other_steps(result):
    plain, lean = result.plain.losses, result.substituted.losses
    assert lean[0] == pytest.approx(plain[0], abs=1e-4)  # before any step
    assert 1e-4 < result.loss_gap < 1.0
    assert lean[-1] < lean[0] - 0.5 and plain[-1] < plain[0] - 0.5


def _table_tells_of_adama_and_of_its_clipping(result):
    text = _printed(result)
    assert "in 8 micro-batches" in text and "plain, adamw" in text
    assert "two_pass" in text and "MiB at the peak" in text
    assert result.to_json()["settings"]["micro_batches"] == 8


@pytest.mark.slow
def test_adama_drops_out_with_masks_of_the_step():
    settings = dataclasses.replace(ADAMA, dropout=0.5, micro_batches=2)
    one = training.start(*_model("nnx", dropout=0.5), settings, "adama")
    step = jax.jit(one.step)
    losses = [float(step(one.state, _tokens(8), np.int32(i))[1]) for i in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_adama_ends_within_the_spread_of_seeds_of_adamw(capsys):
    """Each seed has its own initial values and data; one seed's runs share both."""
    ends = {kind: [_end(seed, *kind) for seed in range(3)] for kind in _KINDS}
    short = _end(0, True, "mean")
    with capsys.disabled():
        print(f"\nmean loss of the last 20 steps: {ends}; v_scale='mean': {short}")
    adamw, adama = (np.array(ends[kind]) for kind in _KINDS)
    assert adamw.min() <= adama.mean() <= adamw.max()
    # Of one seed the two differ by less than AdamW of one seed from AdamW of another;
    # with steps that are too short the difference is larger.
    width = adamw.max() - adamw.min()
    assert (np.abs(adama - adamw) < width).all()
    assert short - adamw[0] > width


_KINDS = (False, "paper"), (True, "paper")  # AdamA or not, and its v_scale


def _end(seed, adama, v_scale):
    settings = Settings(
        model="linen",
        seed=seed,
        steps=150,
        batch=16,
        layers=2,
        width=64,
        context=128,
        optimizer="adama" if adama else "adamw",
        micro_batches=8,
        v_scale=v_scale,
    )
    one = training.start(
        *training.pair(settings)["plain"], settings, settings.optimizer
    )
    text = standard_library().train
    crops = batches(text, settings.batch, settings.context, seed)
    training.train({"one": one}, crops, settings)
    return float(np.mean(one.losses[-20:]))


def test_substituted_trains_to_the_same_loss_in_fewer_bytes(result):
    # Both compute in f32 with other orders of summation: a few hundred roundings of
    # 6e-8 at a loss of 6, and three updates of 1e-3 along them.
    assert result.loss_gap < 1e-4
    assert result.plain.validation == pytest.approx(
        result.substituted.validation, abs=1e-3
    )
    assert 0 < result.substituted.residual_bytes < 0.7 * result.plain.residual_bytes
    assert not result.problems
    for outcome in (result.plain, result.substituted):
        assert outcome.compiled["cpu"].temp_bytes > 0
        assert outcome.seconds > 0


def test_bytes_by_module_name_the_parts_of_the_model(result):
    held = result.plain.compiled["cpu"].by_module
    assert {"attention", "mlp"} <= held.keys()
    assert sum(held.values()) <= 1.01 * result.plain.compiled["cpu"].temp_bytes


def test_json_holds_settings_figures_and_versions(result):
    content = json.loads(json.dumps(result.to_json()))
    assert content["settings"]["model"] == result.settings.model
    assert content["plain"]["losses"] == pytest.approx(list(result.plain.losses))
    assert content["versions"]["jax"] == jax.__version__


def test_picture_is_written(result, tmp_path):
    draw(result, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_table_says_that_masks_differ_with_dropout(result):
    plain = _printed(result)
    assert not any(w in plain for w in ("masks", "micro", "Adam", "at the peak"))
    masked = dataclasses.replace(result.settings, dropout=0.1)
    text = _printed(dataclasses.replace(result, settings=masked))
    assert "different dropout masks" in text
    assert "residuals" in text and "compiled for cpu" in text


def test_run_prints_and_writes(result, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "compare", lambda *args, **how: result)
    console = Console(file=io.StringIO(), width=120)
    report.run(TINY, ["cpu"], tmp_path / "new" / "folder", console)
    text = console.file.getvalue()
    assert "validation loss" in text and "demo.png" in text
    assert {p.name for p in (tmp_path / "new" / "folder").iterdir()} == {
        "demo.json",
        "demo.png",
    }


def test_what_fails_to_compile_costs_only_its_own_figures(result, monkeypatch):
    monkeypatch.setattr(jaxmem, "estimate", _estimate_of_a_line)
    runs = {"a": _idle(), "b": training.TrainingRun(jnp.sum, None, ({}, 0))}
    targets, told = ("cpu", "h100"), []
    monkeypatch.setattr(measuring, "residual_bytes", lambda *args: 1)
    found, problems = measuring.measure(
        runs, TINY, targets, time.monotonic() + 60, lambda *step: told.append(step)
    )
    assert (
        list(found["a"]["compiled"]) == ["cpu", "h100"] and not found["b"]["compiled"]
    )
    assert len(problems) == 2 and all("compiler died" in p for p in problems)
    # 2 MiB and 1 MiB a sequence in the 80,995 MiB of an H100, to two digits.
    assert found["a"]["largest_batch"] == {"h100": Largest(80_000, True)}
    assert told[-1][0] == 5 and told[-1][1] == 6
    text = _printed(dataclasses.replace(result, problems=problems))
    assert "compiler died [h100]" in text


def test_what_fails_for_one_reason_is_one_line(result):
    late = tuple(f"{run} for h100: no time left" for run in ("plain", "substituted"))
    text = _printed(dataclasses.replace(result, problems=(*late, "b for cpu: no")))
    lines = [line.rstrip() for line in text.splitlines()]
    both = "plain for h100, substituted for h100: no time left"
    assert lines[-2:] == [both, "b for cpu: no"]


def test_no_largest_batch_after_the_deadline(monkeypatch):
    with pytest.raises(TimeoutError, match="largest batch"):
        largest_batch(_idle(), TINY, "h100", 100, time.monotonic() - 1)


def test_largest_batch_is_one_that_the_micro_batches_divide(monkeypatch):
    monkeypatch.setattr(jaxmem, "estimate", _estimate_of_a_line)
    settings = dataclasses.replace(TINY, batch=7, micro_batches=7)
    args = "h100", 9 * 2**20, time.monotonic() + 60
    found = largest_batch(_idle(), settings, *args)
    assert found == Largest(80_000 // 7 * 7, True)


@pytest.mark.parametrize("exact, shown", [(7, 7), (80_993, 80_000), (2671, 2600)])
def test_batches_are_rounded_down_to_two_digits(exact, shown):
    assert rounded(exact) == shown


def test_cpu_is_always_a_default_target():
    assert report.default_targets()[0] == "cpu"


@pytest.mark.parametrize(
    "path, part",
    [
        ("GPT/blocks/attention/query", "attention"),
        ("GPT/blocks/norm_attention", "attention"),
        ("GPT/blocks/up", "mlp"),
        ("GPT/blocks/norm_mlp", "mlp"),
        ("GPT/blocks/jaxmem.gelu", "mlp"),
        ("GPT/head", "head and loss"),
        ("GPT/norm", "head and loss"),
        ("GPT/blocks", "gelu and sums"),
        ("", "update and the rest"),
    ],
)
def test_parts_of_module_paths(path, part):
    assert measuring.part(path) == part


def _split(flavour, **changes):
    settings = dataclasses.replace(TINY, model=flavour, **changes)
    return models.split(models.build(settings), settings)


@functools.cache
def _dropping_out(flavour):
    """Parameters and the compiled forward pass, in which a key has dropout act."""
    params, forward = _split(flavour, dropout=0.5)
    return params, jax.jit(forward)


def _model(flavour, **changes):
    """Parameters and loss of the plain model."""
    return training.pair(dataclasses.replace(TINY, model=flavour, **changes))["plain"]


def _tokens(batch):
    random = np.random.default_rng(0)
    return array(random.integers(0, 256, (batch, TINY.context + 1)), jnp.int32)


def _count(params):
    return sum(x.size for x in jax.tree.leaves(params))


def _idle():
    return training.TrainingRun(jnp.sum, lambda x: x, ({}, 0))


def _estimate_of_a_line(step, x, tokens, number, *, target, **options):
    if step is None:
        raise RuntimeError(f"the compiler died [{target}]")
    peak = (2 + tokens.shape[0]) * 2**20
    return SimpleNamespace(peak_bytes=peak, temp_bytes=peak, at_peak=())


def _printed(result):
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result))
    return console.file.getvalue()
