"""The processes of a job make one search; each other step is told by its arguments."""

import logging
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmem.scheduling import BudgetError
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.search import heartbeat, in_job
from jaxmem.scheduling.search.outcome import SearchOutcome, outcome_of
from tests.scheduling.test_outcomes import W, X, scheduled, searches

__all__ = ["searches"]  # a fixture

ABOUT = {"[0]['w']": "float32[8,4] PartitionSpec('fsdp',)", "[1]": "float32[16,4]"}


class Shared:
    """What the coordination service does, in one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, name, value):
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()

    def wait(self, name, seconds):
        with self.changed:
            self.changed.wait_for(lambda: name in self.values, seconds)
            return self.values.get(name)

    def under(self, folder):
        return {k: v for k, v in self.values.items() if k.startswith(folder)}


@pytest.fixture
def process(monkeypatch):
    """Sets the index of this process."""
    monkeypatch.setattr(in_job, "_POLL", 0.01)
    monkeypatch.setattr(in_job, "_PATIENCE", 0.1)
    monkeypatch.setattr(in_job, "_USED", set())
    return lambda index: monkeypatch.setattr(jax, "process_index", lambda: index)


@pytest.fixture(scope="module")
def found():
    """A search's result, with what it rewrites to."""
    step = scheduled()
    result = step.find((W, X), {})
    return result, lambda choice: step.rewritten(choice, W, X)


def ask(key, rewritten, search, store, about=ABOUT, first=0):
    return in_job.in_job(key, "step", about, rewritten, search, first, store)


def refused():
    raise AssertionError("this process must not search")


def test_the_first_searches_and_the_others_read(process, found):
    result, rewritten = found
    store = Shared()
    process(0)
    told = ask("k", rewritten, lambda: outcome_of(lambda: result), store)
    process(1)
    read = ask("k", rewritten, refused, store)
    assert told.get() is result
    assert read.get().choice == result.choice
    assert read.get().seconds == result.seconds
    assert str(read.get().rewritten.jaxpr) == str(result.rewritten.jaxpr)


def test_a_budget_out_of_reach_is_told(process):
    def out_of_reach():
        raise BudgetError("budget=1 B cannot be reached", 7)

    store = Shared()
    for index, search in ((0, lambda: outcome_of(out_of_reach)), (1, refused)):
        process(index)
        with pytest.raises(BudgetError, match="cannot be reached") as caught:
            ask("k", lambda choice: None, search, store).get()
        assert caught.value.least == 7


def test_a_failure_is_told(process):
    def failing():
        raise KeyboardInterrupt

    store = Shared()
    process(0)
    with pytest.raises(KeyboardInterrupt):
        ask("k", lambda choice: None, failing, store)
    process(3)
    with pytest.raises(RuntimeError, match="process 0 has failed: KeyboardInterrupt"):
        ask("k", lambda choice: None, refused, store)


def test_another_step_is_named(process):
    """By its arguments, once the first process is known to search for another."""
    store = Shared()
    process(0)
    ask("theirs", lambda choice: None, lambda: SearchOutcome(None, "no"), store)
    process(1)
    about = ABOUT | {"[1]": "float32[32,4]"}
    text = r"process 1 has another step than process 0.*\n  \[1\]: float32\[32,4\] here"
    with pytest.raises(ValueError, match=text):
        ask("ours", lambda choice: None, refused, store, about)


def test_a_first_process_that_is_late_is_waited_for(process):
    """Also where it has searched for other steps, which this one has read, before."""
    store, outcome = Shared(), SearchOutcome(None, "no")
    process(0)
    ask("before", lambda choice: None, lambda: outcome, store)
    process(1)
    ask("before", lambda choice: None, refused, store)
    late = threading.Timer(
        0.5, lambda: in_job._told("k", "step", ABOUT, lambda: outcome, store)
    )
    late.start()
    assert ask("k", lambda choice: None, refused, store) == outcome
    late.join()


def test_a_first_process_that_never_asks_is_told(process, found, caplog):
    """Once: it may only be late."""
    result, rewritten = found
    store = Shared()
    process(1)
    begin = lambda: in_job._told(
        "k", "step", ABOUT, lambda: outcome_of(lambda: result), store
    )
    late = threading.Timer(0.5, begin)
    late.start()
    with caplog.at_level(logging.WARNING, "jaxmem"):
        assert ask("k", rewritten, refused, store).get().choice == result.choice
    late.join()
    (line,) = caplog.messages
    assert "process 1 has waited" in line and "for process 0, which has not" in line


def test_a_first_process_that_searches_is_waited_for_while_it_lives(
    process, monkeypatch
):
    monkeypatch.setattr(heartbeat, "_EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.3)
    store, outcome, over = Shared(), SearchOutcome(None, "no"), threading.Event()
    search = lambda: over.wait(5) and outcome
    told = threading.Thread(
        target=in_job._told, args=("k", "step", ABOUT, search, store)
    )
    told.start()
    process(1)
    threading.Timer(1.0, over.set).start()  # much longer than the silence
    assert ask("k", lambda choice: None, refused, store) == outcome
    told.join()


def test_a_first_process_that_is_gone_is_named(process, monkeypatch):
    """Here it announces its search, beats, and is no more."""
    monkeypatch.setattr(heartbeat, "SILENCE", 0.3)
    store = Shared()
    store.set(f"{in_job._FOLDER}/steps/step/k", b"")
    store.set(f"{in_job._FOLDER}/alive/k/beat", b"7 host3, pid 41")
    process(1)
    text = r"process 0 \(host3, pid 41\) has begun to search .* it has ended"
    with pytest.raises(RuntimeError, match=text):
        ask("k", lambda choice: None, refused, store)


def test_another_program_is_refused(process, found):
    """Processes that ran different programs would wait for each other for ever."""
    result, rewritten = found
    store = Shared()
    process(0)
    ask("k", rewritten, lambda: outcome_of(lambda: result), store)
    process(1)
    plain = Choice("cpu", unchanged=True)
    other = lambda choice: rewritten(replace(plain, target=choice.target))
    with pytest.raises(RuntimeError, match="another program in process 1"):
        ask("k", other, refused, store)


def sharded(x, *spec):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    return jax.device_put(x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))


def test_arrays_of_one_process_are_its_own_affair():
    one = sharded(X, "data").sharding
    assert in_job.first_process((one, None)) is None
    assert in_job.first_process(()) is None


@pytest.mark.slow
def test_inside_of_another_jit_a_sharded_step_is_as_it_was_planned(searches):
    """A trace does not know where its arguments are; the plan before it did."""
    w, x = sharded(W), sharded(X, "data")
    step = scheduled(room="1MiB")
    outside = step(w * 1, x)
    inside = jax.jit(step)(w, x)
    np.testing.assert_allclose(outside, inside, rtol=1e-6)
    assert len(searches) == 1
