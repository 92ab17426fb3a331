"""What is recomputed under a budget: values, bytes, and the search."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import _adviser, schedule
from jaxmem.chips import rates_of
from jaxmem.cost.equations import flops, seconds
from jaxmem.cost.kernel import Product
from jaxmem.cost.roofline import product_seconds
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.scheduling import BudgetError, Choice
from jaxmem.scheduling._passes import NO_CHOICE, rewrite
from jaxmem.scheduling._searched import Candidate
from jaxmem.scheduling.order.ordered import OperationOrder, sequences
from jaxmem.scheduling.recompute.first_layers import FirstLayers, in_some_layers
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import lists_in, scans_in, space_of
from jaxmem.scheduling.recompute.unrolled import Unrolled
from jaxmem.scheduling.search.budget import BudgetSearch
from jaxmem.scheduling.search.driver import Driver
from jaxmem.scheduling.search.result import trial_of
from jaxmem.scheduling.search.trials import Trials
from tests.scheduling.test_scan_residuals import same_bits, scans, stacked
from tests.sets import some_fast

L, B, D, F = 6, 32, 16, 64
EVERY_LAYER = Choice("h100", (Recompute(1e-3),))
HALF_OF_THEM = Choice("h100", (Recompute(math.inf), FirstLayers(1e-3, 0.5)))
WRITTEN_OUT = EVERY_LAYER.having(Unrolled(1e-3))
RATES = (float("inf"), 1e12, 1e10, 1e-3)


def weights(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    shapes = (L, D, F), (L, F, D)
    return [
        jax.random.normal(k, s) / s[1] ** 0.5 for k, s in zip(keys, shapes, strict=True)
    ]


def layer(x, w, key):
    """A matmul, a curve, dropout, a matmul, a sum over rows."""
    h = jnp.tanh(x @ w[0])
    key = jax.random.wrap_key_data(key)
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)
    y = x + h @ w[1]
    return y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True))


def loss(ws, x, keys, scanned=True):
    if scanned:
        step = lambda x, t: (layer(x, t[0], t[1]), None)
        return jnp.sum(jax.lax.scan(step, x, (ws, keys))[0] ** 3)
    for i in range(L):
        x = layer(x, [w[i] for w in ws], keys[i])
    return jnp.sum(x**3)


def problem(scanned=True):
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), L))
    args = weights(), jax.random.normal(jax.random.key(2), (B, D)), keys
    return lambda *args: jax.value_and_grad(loss)(*args, scanned), args


def rewritten(fn, args, choice):
    return rewrite(jax.make_jaxpr(fn)(*args), {}, None, choice)


def close(fn, closed, args):
    """The same to rounding: what XLA fuses in a branch may round less often."""
    got = jaxprs.evaluate(closed, jax.tree.leaves(args))
    for g, w in zip(got, jax.tree.leaves(fn(*args)), strict=True):
        # a dozen roundings of sums of 64, in units of the largest element
        np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max(), rtol=0)


# -- values


@pytest.mark.parametrize("rate", RATES)
def test_scans_give_the_same_at_every_rate(rate):
    fn, args = problem()
    made = rewritten(fn, args, Choice("h100", (Recompute(rate),)))
    want, leaves = jax.make_jaxpr(fn)(*args), jax.tree.leaves(args)
    same_bits(want, made.jaxpr, leaves)


@pytest.mark.parametrize("iterations", some_fast(range(1, L), 1, 4))
def test_some_of_the_layers(iterations):
    fn, args = problem()
    first = FirstLayers(1e-3, iterations / L)
    choice = Choice("h100", (Recompute(math.inf), first))
    made = rewritten(fn, args, choice)
    assert {row.times for row in made.description.recomputed} == {iterations}
    close(fn, made.jaxpr, args)


@pytest.mark.parametrize("rate", RATES)
def test_written_out_layers_give_the_same_at_every_rate(rate):
    """Each operation on its own: to the bit."""
    fn, args = problem(scanned=False)
    made = rewritten(fn, args, Choice("h100", (Recompute(rate), Unrolled(rate))))
    leaves = jax.tree.leaves(args)
    got = jaxprs.evaluate(made.jaxpr, leaves)
    want = jaxprs.evaluate(jax.make_jaxpr(fn)(*args), leaves)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.fixture(scope="module")
def in_sequences():
    """The step with its layers written out, and the sequences of its search."""
    fn, args = problem(scanned=False)
    closed = jax.make_jaxpr(fn)(*args)
    found = sequences(rewrite(closed, {}).unordered, {}, "h100")
    return closed, jax.tree.leaves(args), found


def test_operations_that_come_again_give_the_same(in_sequences):
    """Each operation on its own: to the bit, for every sequence of the search."""
    closed, leaves, candidates = in_sequences
    assert len(candidates) > 3
    sizes = [size for _, size, _ in candidates]
    assert sizes == sorted(set(sizes), reverse=True)
    want = jaxprs.evaluate(closed, leaves)
    for i in (0, len(candidates) // 2, -1):
        order = candidates[i][0]
        made = rewrite(closed, {}, None, Choice("h100", (order,)))
        repeats = bool(made.description.recomputed)
        assert repeats == (order is not candidates[0][0])
        got = jaxprs.evaluate(made.jaxpr, leaves)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


def barriers(closed):
    return [e for e in closed.eqns if e.primitive.name == "optimization_barrier"]


def test_who_reads_what_a_barrier_waits_for_reads_it_behind_the_barrier(in_sequences):
    """XLA drops the other operands, and recomputes at once what was to wait."""
    closed, _, found = in_sequences
    orders = [Choice("h100", (order,)) for order, _, _ in found]
    unrolled = Choice("h100", (Recompute(1e-3), Unrolled(1e-3)))
    for choice in (orders[len(orders) // 2], orders[-1], unrolled):
        made = rewrite(closed, {}, None, choice).jaxpr
        read = {v for e in made.eqns for v in e.invars if not hasattr(v, "val")}
        read |= {v for v in made.jaxpr.outvars if not hasattr(v, "val")}
        assert barriers(made)
        for eqn in barriers(made):
            assert read.issuperset(eqn.outvars)


@pytest.mark.slow
def test_written_out_layers_fit_a_budget_on_an_absent_chip():
    """16 layers whose hidden arrays are most of what is kept: a third of the bytes."""
    ws = [jax.ShapeDtypeStruct((256, 1024), jnp.float32) for _ in range(16)]
    x = jax.ShapeDtypeStruct((8192, 256), jnp.float32)

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w.T)
        return jnp.sum(x**2)

    step = jax.grad(loss)
    plain = jaxmem.estimate(step, ws, x, target="h100").peak_bytes
    how = {"target": "h100", "donate_argnums": (), "tile": False}
    plan = schedule(step, plain // 3, **how).plan(ws, x)
    assert plan.scheduled.peak_bytes <= plain // 3
    assert plan.recomputed_flops > 0
    loaded = jaxmem.scheduling.Plan.from_json(plan.to_json())
    assert loaded == plan


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_in_either_direction(reverse):
    def fn(ws, x):
        step = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None)
        return jax.lax.scan(step, x, ws, reverse=reverse)[0].sum()

    args = weights()[0], jax.random.normal(jax.random.key(2), (B, D))
    for choice in (EVERY_LAYER, HALF_OF_THEM):
        made = rewritten(jax.grad(fn), args, choice)
        assert made.description.recomputed
        close(jax.grad(fn), made.jaxpr, args)


def test_a_train_step_with_released_gradients():
    """Micro-batches, Adam in the backward scan, and layers recomputed: as plain."""
    tx = optax.adam(1e-3)

    def step(state, x, keys):
        ws, opt = state

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(ws, x, keys)), None

        zeros = jax.tree.map(jnp.zeros_like, ws)
        grads, _ = jax.lax.scan(add, zeros, x.reshape(2, B // 2, D))
        updates, opt = tx.update(grads, opt, ws)
        return optax.apply_updates(ws, updates), opt

    _, (ws, x, keys) = problem()
    args = (ws, tx.init(ws)), x, keys
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(step)(*args)
    leaves = jax.tree.leaves(args)
    aliases = by_shape(closed, range(len(jax.tree.leaves(args[0]))))
    want = jaxprs.evaluate(closed, leaves)
    for choice in (EVERY_LAYER, HALF_OF_THEM):
        made = rewrite(closed, aliases, None, choice)
        assert made.description.recomputed
        assert all(row.released for row in made.description.gradients)
        got = jaxprs.evaluate(made.jaxpr, leaves)
        for g, w in zip(got, want, strict=True):
            # sums over two micro-batches in another order, through 1 / sqrt(v)
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


# -- bytes


def test_masks_are_kept_in_bits():
    fn, args = problem()
    made = rewritten(fn, args, NO_CHOICE)
    kept = [v.aval for e in scans(made.jaxpr)[:1] for v in e.outvars]
    assert L * B * F // 8 in [x.size for x in kept if x.dtype == jnp.uint8]
    assert all(x.dtype != bool for x in kept)


def test_lower_rates_keep_less():
    fn, args = problem()
    kept = [
        sum(stacked(rewritten(fn, args, Choice("h100", (Recompute(rate),))).jaxpr))
        for rate in RATES
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 4 * L * B * D  # a layer's input


def test_the_front_is_convex_and_says_what_it_keeps():
    fn, args = problem()
    first = rewritten(fn, args, NO_CHOICE)
    candidates = pareto_front(space_of(scans_in(first), lists_in(first), "cpu"))
    assert candidates[0].bytes == sum(stacked(first.jaxpr))
    # those between two corners are the best at no rate
    corners = [c for c in candidates if not c.choice.get(Recompute).once]
    assert 2 < len(corners) < len(candidates)
    slopes = [
        (a.bytes - b.bytes) / (b.seconds - a.seconds)
        for a, b in itertools.pairwise(corners)
        if b.seconds > a.seconds
    ]
    assert slopes == sorted(slopes, reverse=True)


def test_what_is_faster_to_recompute_than_to_read_is_not_kept():
    """On a chip whose seconds are predicted, what is kept is written and read."""
    fn, (ws, _, keys) = problem()
    # so many rows that a product is written for longer than it is started
    args = ws, jax.ShapeDtypeStruct((2**16, D), jnp.float32), keys
    spaces = [space_of(scans_in(rewritten(fn, args, NO_CHOICE)), (), "h100")]
    spaces += [replace(spaces[0], target="cpu")]
    front, without = map(pareto_front, spaces)
    assert without[0].seconds == 0
    assert front[0].seconds < 0
    assert front[0].bytes < without[0].bytes
    assert front[-1].bytes == without[-1].bytes
    seconds = [one.seconds for one in front]
    assert seconds == sorted(set(seconds))
    # a byte is written once and read once
    moved = 2 * 1000 / rates_of("h100").bandwidth
    assert [one.longer(1.0, 1000) for one in spaces] == [1.0 - moved, 1.0]


@pytest.mark.parametrize("scanned", [True, False])
def test_what_is_done_again_is_counted(scanned):
    fn, args = problem(scanned)
    made = rewritten(fn, args, EVERY_LAYER if scanned else WRITTEN_OUT)
    rows = made.description.recomputed
    dots = [row for row in rows if row.operation == "dot_general"]
    assert 0 < sum(row.flops for row in dots) <= 2 * L * 2 * B * D * F


def test_flops_and_seconds():
    f = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)
    args = jnp.ones((3, 4, 5), jnp.bfloat16), jnp.ones((3, 5, 6), jnp.bfloat16)
    (eqn,) = (
        e
        for e in jaxprs.walk(jax.make_jaxpr(f)(*args))
        if e.primitive.name == "dot_general"
    )
    assert flops(eqn) == 2 * 3 * 4 * 5 * 6
    rates = rates_of("h100")
    tiles = product_seconds(Product(3, 4, 6, 5, 16, "bfloat16", library=True), rates)
    assert tiles > 2 * 3 * 4 * 6 / rates.bandwidth
    assert seconds(eqn, rates) == tiles + rates.launch + rates.fill
    # of few channels: as long as its output takes to be written
    written = 2 * 3 * 4 * 6 / 1e6
    slow = seconds(eqn, replace(rates, bandwidth=1e6))
    assert slow == written + rates.launch + rates.fill
    conv = lambda x, k: jax.lax.conv(x, k, (2, 2), "VALID")
    args = jnp.ones((2, 3, 9, 9)), jnp.ones((4, 3, 3, 3))
    (eqn,) = jax.make_jaxpr(conv)(*args).jaxpr.eqns
    assert flops(eqn) == 2 * (2 * 4 * 4 * 4) * 3 * 3 * 3
    one = Product(1, 2 * 4 * 4, 4, 3 * 3 * 3, 32, "float32", library=True)
    tiles = product_seconds(one, rates)
    assert seconds(eqn, rates) == tiles + rates.launch + rates.fill
    loop = lambda x: jax.lax.fori_loop(0, x.astype(int)[0], lambda i, y: y * 2, x)
    eqn = next(
        e
        for e in jax.make_jaxpr(loop)(jnp.ones(3)).jaxpr.eqns
        if e.primitive.name == "while"
    )
    assert seconds(eqn, rates_of("cpu")) is None


# -- the search


def answered(search, compiled, tried):
    """The best of a search, whose choices are compiled and added to what was tried."""
    trials = Trials(search.budget, tried)
    compiles = Mock(side_effect=compiled)
    return Driver(compiles, trials, lambda text: None).run(search.search())


def report_of(peak, step_seconds=None):
    return SimpleNamespace(
        peak_bytes=peak,
        target="cpu" if step_seconds is None else "h100",
        seconds=step_seconds,
        at_peak=(),
        host_bytes=0,
        compiler_texts=lambda: None,
    )


class Fake:
    """A compiler whose peaks are the kept bytes and something that depends on them."""

    def __init__(self, candidates, layers, extra=lambda kept: 100):
        self.candidates, self.layers, self.extra = candidates, layers, extra
        self.count, self.tried = 0, []

    def __call__(self, choice):
        self.count += 1
        first = choice.get(FirstLayers)
        if first.rate is None:
            kept = self.kept(choice.get(Recompute).rate)
        else:
            kept = self.kept(first.others)
            kept += round(first.fraction * (self.kept(first.rate) - kept))
        peak = kept + self.extra(kept)
        return report_of(peak)

    def kept(self, rate):
        return next(
            r.bytes for r in self.candidates if r.choice.get(Recompute).rate == rate
        )

    def search(self, budget, slack=0.0):
        between = lambda rich, poor: in_some_layers(rich, poor, self.layers)
        search = BudgetSearch(self.candidates, budget, slack=slack, between=between)
        return answered(search, self, self.tried)


def in_sequence(sequence):
    return Choice(configs=(OperationOrder(sequence=sequence),))


def kept_at(rate):
    return Choice(configs=(Recompute(rate),))


CANDIDATES = [
    Candidate(kept_at(None), 8000, 0.0),
    Candidate(kept_at(8.0), 6000, 1.0),
    Candidate(kept_at(4.0), 4000, 2.0),
    Candidate(kept_at(2.0), 2500, 4.0),
    Candidate(kept_at(1.0), 500, 9.0),
]
EXTRAS = [lambda kept: 100, lambda kept: (9000 - kept) // 9]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_search_fits_and_is_monotone(extra):
    last = 0
    for budget in range(1500, 8400, 300):
        fake = Fake(CANDIDATES, 24, extra)
        best = fake.search(budget)
        assert 0.95 * min(budget, 8100) <= best.peak <= budget
        assert best.peak >= last
        assert fake.count <= 7
        last = best.peak


def test_first_layers_that_recompute_nothing_more_are_tried_once():
    """At the rate of the next candidate nothing is worth it in them alone."""

    class Same(Fake):
        def __call__(self, choice):
            first = choice.get(FirstLayers)
            if first.rate is None:
                return super().__call__(choice)
            return super().__call__(kept_at(first.others))

    fake = Same(CANDIDATES, 24)
    best = fake.search(2800)
    assert best.choice == kept_at(2.0)
    tried = [t.choice.get(FirstLayers).rate for t in fake.tried]
    assert tried.count(None) == len(tried) - 1


def test_bytes_that_do_not_predict_the_peak():
    """A third of what is kept is at the peak, but for the first candidates."""
    candidates = [Candidate(kept_at(40.0 - i), 1000 * (20 - i), i) for i in range(20)]
    extra = lambda kept: 0 if kept > 15_000 else -2 * kept // 3
    for budget in range(1000, 5000, 250):
        fake = Fake(candidates, 1, extra)
        best = fake.search(budget)
        fit = (r.seconds for r in candidates if r.bytes + extra(r.bytes) <= budget)
        assert best.seconds == min(fit)
        assert fake.count <= 12


class Timed(Fake):
    """The same, which also says how long a step takes: by the kept bytes, in MB."""

    def __init__(self, step_seconds):
        super().__init__(CANDIDATES, 1)
        self.step_seconds = step_seconds

    def __call__(self, choice):
        peak = super().__call__(choice).peak_bytes
        return report_of(peak, self.step_seconds[peak - 100])


def test_the_fastest_by_the_compiled_steps_is_taken():
    """Predictions say where to look, compiled steps which of them is the fastest."""
    step_seconds = {8000: 10.0, 6000: 11.0, 4000: 15.0, 2500: 14.0, 500: 19.0}
    for fake, best in (Timed(step_seconds), 4.0), (Fake(CANDIDATES, 1), 2.0):
        fake.search(2600)
        again = BudgetSearch(CANDIDATES, 4100, tuple(fake.tried))
        assert answered(again, fake, fake.tried).seconds == best


def test_what_keeps_less_is_tried_where_what_fits_takes_longer_than_predicted():
    """As where layers wait for the host, which no prediction knows."""
    step_seconds = {8000: 10.0, 6000: 11.0, 4000: 12.0, 2500: 14.0, 500: 19.0}
    fake = Timed(step_seconds | {2500: 30.0})
    assert fake.search(4050).seconds == 9.0
    fake = Timed(step_seconds)
    assert fake.search(4050).seconds == 4.0
    assert min(trial.peak for trial in fake.tried) == 2600


def test_candidates_that_are_off_as_their_like_are_not_compiled():
    """The first of them takes 15 s more than predicted; something takes 12.5 s."""
    best = Choice(configs=(Recompute(3.0, named=True),))
    step_seconds = {8000: 10.0, 6000: 16.0, 4000: 17.0, 2500: 19.0, 500: 24.0}
    for fake, time, found, count in (
        (Timed(step_seconds), 12.5, 3.0, 1),
        # without seconds of the compiled steps the predictions count
        (Fake(CANDIDATES, 1), None, 2.0, 2),
    ):
        done = [trial_of(best, report_of(4000, time), seconds=3.0)]
        search = BudgetSearch(CANDIDATES, 6099, tuple(done), rest=100)
        assert answered(search, fake, done).seconds == found
        assert fake.count == count


@pytest.mark.parametrize(
    ("step_seconds", "more"),
    [
        ({8000: 10, 6000: 11, 4000: 12, 2500: 14, 500: 19}, True),
        # the same steps in products that take ten times as long
        ({8000: 100, 6000: 101, 4000: 102, 2500: 104, 500: 109}, False),
        (None, False),  # of a chip whose seconds nobody knows
    ],
)
def test_beyond_the_most_what_may_be_much_faster_is_compiled(step_seconds, more):
    """The first guess fits by far, and what is above it takes a second less."""
    plain = trial_of(CANDIDATES[0].choice, report_of(11100, 1.0))
    for spare in (0, 4):
        fake = Timed(step_seconds) if step_seconds else Fake(CANDIDATES, 1)
        about = {"most": 2, "more": spare, "slack": 0.5}
        search = BudgetSearch(CANDIDATES, 7200, (plain,), **about)
        answered(search, fake, [plain])
        assert fake.count == (2 if spare and more else 1)


def test_an_unreachable_budget_names_the_least():
    with pytest.raises(BudgetError, match=r"the lowest peak is 600 B"):
        Fake(CANDIDATES, 24).search(400)


def test_nothing_to_compute_again():
    fake = Fake(CANDIDATES[:1], 1)
    done = [trial_of(CANDIDATES[0].choice, fake(CANDIDATES[0].choice))]
    with pytest.raises(BudgetError, match="the lowest peak is 7.91 KiB"):
        answered(BudgetSearch(CANDIDATES[:1], 400, done), fake, done)
    assert fake.count == 1


def test_a_chip_that_is_too_small_for_most():
    fake = Fake(CANDIDATES, 24)
    rate = lambda choice: choice.get(Recompute).rate or 9
    small = lambda choice: fake(choice) if rate(choice) < 4 else None
    between = lambda rich, poor: in_some_layers(rich, poor, 24)
    search = BudgetSearch(CANDIDATES, 3000, between=between)
    assert answered(search, small, []).peak <= 3000


# -- the public function


def test_schedule_with_a_budget_on_this_machine():
    fn, args = problem()
    plain = jaxmem.estimate(fn, *args).peak_bytes
    step = schedule(fn, plain, donate_argnums=())
    want = jax.jit(fn)(*args)
    got = step(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    plan = step.plan(*args)
    assert plan.budget == plain
    assert plan.scheduled.peak_bytes <= plain
    assert plan.tried[0].choice.get(Recompute).rate is None
    assert "budget" in str(plan)


def test_a_plan_is_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(_adviser, "adviser", lambda step: ("some advice",))
    fn, args = problem()
    plan = schedule(fn, target="cpu", donate_argnums=()).plan(*args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    report = plan.scheduled
    given = report.argument_bytes + report.output_bytes - report.alias_bytes
    assert 0 < plan.lower_bound == given <= report.peak_bytes
    loaded = jaxmem.scheduling.Plan.from_json(plan.to_json())
    assert loaded == plan
    step = schedule(fn, plan=loaded, donate_argnums=())
    assert step.plan(*args).choice == plan.choice
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="plan: made for another step"):
        step(*problem()[1][:1], args[1][:5], args[2])
    with pytest.raises(ValueError, match="plan: it has its budget"):
        schedule(fn, "1GiB", plan=loaded)
    with pytest.raises(ValueError, match="text: not a plan"):
        jaxmem.scheduling.Plan.from_json("{}")


def test_bad_budgets():
    fn, _ = problem()
    with pytest.raises(ValueError, match="budget='14 apples': bytes"):
        schedule(fn, "14 apples")
    with pytest.raises(ValueError, match="budget=0: must be more than 0"):
        schedule(fn, 0)
    with pytest.raises(ValueError, match="unknown target 'h1000'"):
        schedule(fn, "1GiB", target="h1000")
    small = lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    with pytest.raises(BudgetError, match=r"budget=1.00 KiB .* the lowest peak is"):
        schedule(small, "1KiB", donate_argnums=())(jnp.ones((D, D)), jnp.ones((B, D)))
