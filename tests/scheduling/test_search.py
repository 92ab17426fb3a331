"""A search as its caller sees it: what it compiles, when it ends, what it remembers."""

import contextlib
import dataclasses
import math
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import schedule
from jaxmem.chips import rates_of
from jaxmem.cost.kernel import Product
from jaxmem.cost.roofline import product_seconds
from jaxmem.memory import CompileError, estimate, targets
from jaxmem.memory.compile import pool as pooling
from jaxmem.memory.report.report import CompilerTexts
from jaxmem.scheduling import BudgetError, Choice, _finder
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._searched import Candidate, SearchedStep
from jaxmem.scheduling.order import order_operations as _sequences
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.predict.operations import compiled_peak, operations_of
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search import compiles as _compiles
from jaxmem.scheduling.search import search as _search
from jaxmem.scheduling.search import traced_step
from jaxmem.scheduling.search.result import ReportedTrial, by_peak_and_time
from jaxmem.scheduling.search.trials import Trials
from tests.scheduling.test_budget import CANDIDATES, Fake, problem

SDS = jax.ShapeDtypeStruct
AVAILABLE = {t.name for t in targets() if t.available}
needs_tpu = pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")
needs_h100 = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """One for all tests of this file: they search for the same step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.mktemp("reports")))
        yield


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))


@pytest.fixture
def submitted(monkeypatch):
    """The compiles that a worker was asked for."""
    seen = []
    submit = pooling.Pool.submit

    def count(self, *args, **kwargs):
        seen.append(submit(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(pooling.Pool, "submit", count)
    return seen


@pytest.fixture
def told(monkeypatch):
    """The lines of progress; `told.then` is called with each."""
    seen = SimpleNamespace(lines=[], then=lambda text: None)

    @contextlib.contextmanager
    def spinner(show, title):
        def tell(text):
            seen.lines.append(text)
            seen.then(text)

        yield tell

    monkeypatch.setattr(_finder, "spinner", spinner)
    return seen


@pytest.fixture
def searches(monkeypatch):
    """How many searches were begun."""
    seen = []
    search = _finder.search

    def count(*args):
        seen.append(args)
        return search(*args)

    monkeypatch.setattr(_finder, "search", count)
    return seen


def in_budget(share, **options):
    """A step in a share of its temporaries, and its arguments."""
    fn, args = problem()
    plain = estimate(fn, *args)
    room = plain.peak_bytes - plain.temp_bytes + int(share * plain.temp_bytes)
    return schedule(fn, room, target="cpu", donate_argnums=(), **options), args


def out_of_reach():
    """A step in less than its arguments, soon searched: it keeps one array."""

    def fn(w, x):
        return jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    args = jnp.ones((16, 16)), jnp.ones((64, 16))
    return schedule(fn, 1000, target="cpu", donate_argnums=()), args


# The second compile is the first that fits, and a later one is better.
SHARE = 0.5


# -- how many compiles


def test_a_plan_compiles_nothing_that_estimate_has_compiled(submitted, empty_cache):
    fn, args = problem()
    step = schedule(fn, donate_argnums=())
    estimate(fn, *args)
    estimate(step, *args)
    assert len(submitted) == 2
    plan = step.plan(*args, target="cpu")
    assert plan.plain is not None and plan.scheduled is not None
    assert len(submitted) == 2


def test_one_program_has_one_key_whoever_asks(submitted, empty_cache):
    """Jitted or not, called or searched for, another function of the same name."""
    fn, args = problem()
    estimate(fn, *args)
    estimate(jax.jit(fn), *args)
    estimate(problem()[0], *args)
    assert len(submitted) == 1
    schedule(fn, target="cpu", donate_argnums=()).plan(*args)
    count = len(submitted)
    estimate(schedule(fn, target="cpu", donate_argnums=()), *args)
    assert len(submitted) == count


def test_the_first_that_fits_within_a_slack_ends_the_search():
    counts = {}
    for slack in (0.0, 2.5, 100.0):
        fake = Fake(CANDIDATES, 24)
        best = fake.search(3000, slack)
        assert best.peak <= 3000
        counts[slack] = fake.count
        # of those that would fit, in whole layers, the best has 4 s
        assert best.seconds <= 4.0
    assert counts[0.0] > counts[2.5] > counts[100.0] == 2


@pytest.mark.slow
def test_a_per_cent_of_the_step_is_not_worth_a_compile(monkeypatch):
    step, args = in_budget(SHARE)
    best = step.find(args, {})
    fits = [t for t in best.tried if t.peak <= best.budget]
    assert len(fits) > 1
    monkeypatch.setattr(traced_step, "ENOUGH", 1e3)  # anything that fits is enough
    first = in_budget(SHARE)[0].find(args, {})
    assert len(first.tried) < len(best.tried)
    assert first.tried[-1].peak <= first.budget
    assert first.choice == fits[0].choice


def test_a_quick_search_takes_the_first_that_fits():
    """It is guessed by what the graph tells, which on a CPU may be off at first."""
    step, args = in_budget(SHARE, quick=True)
    found = step.find(args, {})
    *above, last = [t.peak <= found.budget for t in found.tried]
    assert last and not any(above) and len(above) <= 1
    # some bytes are spared, and not all that can be
    assert 1e-3 < found.choice.get(Recompute).rate < math.inf


def test_a_quick_search_needs_a_budget():
    with pytest.raises(ValueError, match="quick=True: needs a budget"):
        schedule(lambda x: x, target="cpu", quick=True)


def test_slack_is_a_per_cent_of_the_products():
    """512 x 512 x 512, as long as their tiles take an H100's float32 units."""
    x = SDS((512, 512), jnp.float32)
    seen = []
    made = lambda choice: SimpleNamespace(jaxpr=jax.make_jaxpr(jnp.matmul)(x, x))
    step = traced_step.TracedStep(made, seen, None, None, (), (), {}, "h100", "")
    one = Product(1, 512, 512, 512, 32, "float32", library=True)
    seconds = product_seconds(one, rates_of("h100"))
    assert math.isclose(step.slack(), 0.01 * seconds)


def test_candidates_are_compiled_two_at_a_time(submitted, told, empty_cache):
    """The next one is under way when the first is asked for, and no third."""
    under_way = []

    def count(text):
        folders = (c.folder for c in submitted if os.path.exists(c.folder))
        under_way.append(sum(not os.path.exists(f + "/ended") for f in folders))

    told.then = count
    step, args = in_budget(SHARE)
    found = step.find(args, {})
    assert max(under_way) <= 2
    # what was foreseen wrongly is at most one for each that was tried
    assert len(found.tried) < len(submitted) <= 2 * len(found.tried) + 1


# -- what does not compile, or not fit


@pytest.fixture
def failing(monkeypatch):
    """The compiler fails on those that `failing.on` says, by their number."""
    seen = SimpleNamespace(count=0, on=lambda n: False)
    result = _compiles.Compiles._result

    def fails(self, pending):
        seen.count += 1
        if seen.on(seen.count):
            pending.cancel()
            raise CompileError("no config for a fusion\nand more")
        return result(self, pending)

    monkeypatch.setattr(_compiles.Compiles, "_result", fails)
    return seen


def test_a_choice_that_the_compiler_fails_on_is_not_taken(failing):
    failing.on = lambda n: n == 2
    step, args = in_budget(SHARE, cache=False)
    found = step.find(args, {})
    first = next(t for t in found.tried if math.isinf(t.peak))
    assert found.choice != first.choice and found.report.peak_bytes <= found.budget
    assert "failed on 1 choice, which could not be taken: no config" in found.notes[0]


def test_what_the_compiler_fails_on_is_named_where_nothing_fits(failing):
    failing.on = lambda n: n > 1
    step, args = in_budget(SHARE, cache=False)
    said = "(?s)cannot be reached.*failed on .* choices.*no config for a fusion"
    with pytest.raises(BudgetError, match=said):
        step.find(args, {})


def test_that_the_step_as_it_is_does_not_compile_is_an_error(failing):
    failing.on = lambda n: True
    fn, args = problem()
    with pytest.raises(CompileError, match="no config for a fusion"):
        schedule(fn, target="cpu", donate_argnums=(), cache=False).find(args, {})


@needs_tpu
def test_a_plain_step_that_the_compiler_refuses_is_a_row_of_the_plan():
    huge = SDS((1 << 17, 1 << 16), jnp.float32)
    plan = schedule(lambda x: x @ x.T, donate_argnums=()).plan(huge, target="tpu-v5e")
    assert plan.plain is None
    assert re.search(r"does not fit .*the original step, on tpu-v5e", str(plan))
    assert jaxmem.scheduling.Plan.from_json(plan.to_json()) == plan


@needs_h100
def test_a_plain_step_larger_than_the_chip_is_a_row_of_the_plan():
    huge = SDS((1 << 15, 1 << 20), jnp.float32)
    plan = schedule(lambda x: x + 1, donate_argnums=()).plan(huge, target="h100")
    assert plan.plain.peak_bytes == 2 * 4 << 35
    assert re.search(r"does not fit +256 GiB .*original step, on h100", str(plan))


@pytest.mark.slow
def test_after_a_step_that_is_refused_at_the_end_the_next_is_looked_for(
    monkeypatch, empty_cache
):
    """Its buffers fit, and yet the compiler gives up on it."""
    asked = []
    settled = _compiles.Compiles.settled

    def refuse_first(self, choice):
        asked.append(choice)
        return settled(self, choice) if len(asked) > 1 else None

    monkeypatch.setattr(_compiles.Compiles, "settled", refuse_first)
    step, args = in_budget(SHARE)
    found = step.find(args, {})
    assert len(asked) == 2 and found.choice == asked[1] != asked[0]
    assert found.report.peak_bytes <= 0.95 * found.budget


REFUSAL = (
    "'step' does not fit on tpu-v5e: RESOURCE_EXHAUSTED: XLA:TPU compile permanent "
    "error. Ran out of memory in memory space hbm. Used 16.04G of 15.75G hbm. Exceeded "
    "hbm capacity by 303.91M."
)


def test_what_a_refused_step_needs_is_read_from_the_refusal():
    needed = jaxmem.memory.DoesNotFit(REFUSAL).needed_bytes
    assert 16.04 * 2**30 < needed < 16.05 * 2**30
    assert jaxmem.memory.DoesNotFit("'step' does not fit").needed_bytes is None


def test_the_limit_goes_down_by_what_was_needed_beside_the_buffers():
    GIB = 2**30
    trial = lambda peak, **how: ReportedTrial(Choice("tpu-v5e"), peak, None, 0.0, **how)
    found, trials = trial(14 * GIB), Trials(15 * GIB)
    trials.missed(found, trial(math.inf, needed=int(15.5 * GIB)))
    assert trials.limit == 13.5 * GIB
    # where nothing is told, a twentieth of the budget below what was refused
    trials.missed(found, trial(math.inf))
    assert 13.24 * GIB < trials.limit < 13.26 * GIB


# -- when to end


@pytest.mark.slow
def test_progress_shows_the_best_so_far(told):
    step, args = in_budget(SHARE)
    found = step.find(args, {})
    fits = next(t for t in found.tried if t.peak <= found.budget)
    later = told.lines[found.tried.index(fits) + 1]
    assert f"best so far {jaxmem.memory.format_bytes(fits.peak)}" in later
    assert not any("best so far" in line for line in told.lines[:1])


@pytest.fixture
def interruptible():
    """As in a terminal: a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(told, words):
    def then(text):
        if words in text:
            told.then = lambda text: None
            signal.raise_signal(signal.SIGINT)

    told.then = then


def test_an_interrupt_takes_the_best_so_far(told, interruptible):
    interrupt_at(told, "best so far")
    step, args = in_budget(SHARE)
    plan = step.plan(*args)
    assert plan.scheduled.peak_bytes <= plan.budget
    count = len(plan.tried)
    assert plan.notes[0] == (
        f"the search was interrupted after {count} compiles: the best so far"
    )
    assert plan.notes[0] in str(plan)
    assert len(in_budget(SHARE)[0].find(args, {}).tried) > count
    step(*args)  # and is what is run


@pytest.mark.slow
def test_an_interrupt_before_anything_fits_is_one(told, interruptible):
    interrupt_at(told, "compile 1")
    step, args = in_budget(SHARE)
    with pytest.raises(KeyboardInterrupt):
        step.find(args, {})
    # the next call searches, as if nothing had been
    assert step.find(args, {}).report.peak_bytes <= step._options.budget


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a search, as the test says."""
    now = SimpleNamespace(seconds=0.0)
    fake = SimpleNamespace(
        monotonic=lambda: now.seconds, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(_search, "time", fake)
    monkeypatch.setattr(_compiles, "time", fake)
    return now


def test_search_seconds_take_the_best_so_far(told, clock):
    def late(text):
        clock.seconds += 1e4 * ("best so far" in text)

    told.then = late
    step, args = in_budget(SHARE, search_seconds=1e3)
    plan = step.plan(*args)
    assert plan.scheduled.peak_bytes <= plan.budget
    assert "out of time" in plan.notes[0] and "the best so far" in plan.notes[0]
    assert step.find(args, {}).stopped


def test_search_seconds_without_a_fit_are_an_error(told, clock):
    def late(text):
        clock.seconds += 1e4 * ("compile 2" in text)

    told.then = late
    step, args = in_budget(SHARE, search_seconds=1e3)
    with pytest.raises(TimeoutError, match=r"search_seconds: nothing .* in 1 compiles"):
        step.find(args, {})


def test_order_has_no_more_time_than_the_search(monkeypatch):
    """Half of what is left for each of its two searches, when it is short.

    What a search with all its time has found is not looked for once more.
    """
    asked = []
    monkeypatch.setattr(_sequences, "_SEQUENCES", {})
    found = lambda *args: asked.append(args[3]) or [(OperationOrder(), 0, 0.0)]
    monkeypatch.setattr(_sequences, "sequences", found)
    fn, args = problem(scanned=False)
    closed = jax.make_jaxpr(fn)(*args)
    made = rewrite(closed, {}, choice=Choice("cpu"))
    given = lambda jaxpr: {}, None, None, (), (), {}, "cpu", "of this step"
    for most in (1.0, None, None):
        deadline = None if most is None else time.monotonic() + most
        step = traced_step.TracedStep(lambda choice: made, *given)
        left = _compiles.Compiles(None, deadline).left
        one = SearchedStep(step, left=left)
        (only,) = _sequences.OrderOperations().front(one, Choice("cpu"))
        assert only.choice == Choice("cpu")
    assert 0 < asked[0] <= 0.5 and asked[1:] == [_sequences.PATIENCE]


@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_an_order_that_keeps_products_apart_is_not_vain(target, monkeypatch):
    """XLA:GPU would merge both, and hold weights and results side by side."""
    n = 256
    x = SDS((n, n), jnp.float32)
    closed = jax.make_jaxpr(lambda x, u, v: jnp.tanh(x @ u) * jnp.tanh(x @ v))(x, x, x)
    made = SimpleNamespace(unordered=closed)
    given = lambda jaxpr: {}, None, None, (), (), {}, target, ""
    step = traced_step.TracedStep(lambda choice: made, *given)
    least = compiled_peak(operations_of(closed, tpu=target != "h100").graph)
    plain = Choice(target)
    step.known.get(("sequences", plain), (), lambda: [Candidate(plain, least, 0.0)])
    nothing = lambda self, step: iter(())
    monkeypatch.setattr(_sequences.RecomputeBehindBarriers, "free", nothing)
    is_vain = _sequences.OrderOperations().is_vain(SearchedStep(step, limit=1))
    assert is_vain == (target != "h100")


# -- once


def in_three_threads(step, args):
    """What each found, or the error that says that there is nothing."""
    start, found = threading.Barrier(3), []

    def look():
        start.wait()
        try:
            found.append(step.find(args, {}))
        except BudgetError as error:
            found.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_share_one_search(searches):
    step, args = in_budget(SHARE)
    found = in_three_threads(step, args)
    assert len(searches) == 1
    assert not isinstance(found[0], BudgetError)
    assert len(found) == 3 and found[0] is found[1] is found[2]


def test_threads_share_one_search_that_fails(searches):
    step, args = out_of_reach()
    errors = in_three_threads(step, args)
    assert len(searches) == 1
    assert all(isinstance(e, BudgetError) for e in errors)
    assert len({(str(e), e.least) for e in errors}) == 1 and len(errors) == 3
    assert errors[0].least > step._options.budget


def test_a_budget_out_of_reach_is_searched_for_once(searches):
    step, args = out_of_reach()
    for _ in range(3):
        with pytest.raises(BudgetError, match="cannot be reached"):
            step(*args)
    assert len(searches) == 1
    with pytest.raises(BudgetError):
        step(args[0], args[1][:8])  # other shapes are another question
    assert len(searches) == 2


def test_estimate_says_that_a_budget_is_out_of_reach():
    """As the step itself does, and not that its arguments are wrong."""
    step, args = out_of_reach()
    with pytest.raises(BudgetError, match="^budget=.* cannot be reached") as caught:
        jaxmem.estimate(step, *args)
    assert caught.value.least > step._options.budget


def test_other_errors_are_not_remembered(searches, monkeypatch):
    step, args = in_budget(SHARE)
    with monkeypatch.context() as patch:
        patch.setattr(_search, "start_worker", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.find(args, {})
    assert step.find(args, {}).report is not None
    assert len(searches) == 2


def test_a_search_reads_no_report(monkeypatch):
    """Who holds the bytes is found out for the plan alone, and only when it is read."""
    read = []
    rows = CompilerTexts.rows
    count = lambda self: read.append(self) or rows(self)
    monkeypatch.setattr(CompilerTexts, "rows", count)
    step, args = in_budget(SHARE)
    plan = step.plan(*args)
    assert len(plan.tried) > 2 and not read
    assert plan.scheduled.at_peak
    assert len(read) == 1


def test_few_bytes_are_not_taken_for_much_time():
    """Where times are predicted of all; what does not fit the chip comes last."""
    peaks_and_times = [(1000, 2.0), (990, 2.1), (500, 2.5), (math.inf, None)]
    trials = [
        ReportedTrial(Choice("h100"), peak, None, 0.0, seconds)
        for peak, seconds in peaks_and_times
    ]
    first, second, *_, last = sorted(trials, key=by_peak_and_time(trials))
    assert (first.peak, second.peak, last.peak) == (500, 1000, math.inf)
    trials[0] = dataclasses.replace(trials[0], step_seconds=None)
    by_bytes = sorted(trials, key=by_peak_and_time(trials))
    assert [t.peak for t in by_bytes] == [500, 990, 1000, math.inf]
