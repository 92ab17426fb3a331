"""A step is searched once, and its outcome kept on disk for what is the very same."""

import dataclasses
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.memory.compile import cache
from jaxmem.scheduling import BudgetError, _finder
from jaxmem.scheduling.search import search as searching
from tests.sets import some_fast

LAYERS, WIDTH, BATCH = 6, 32, 64
W = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH
X = jnp.ones((BATCH, WIDTH))
ROOM = "200KiB"


def step(w, x):
    def layer(h, w):
        return jnp.tanh(jnp.sin(h @ w)), None

    loss = lambda w: jnp.square(jax.lax.scan(layer, x, w)[0]).sum()
    return w - 0.1 * jax.grad(loss)(w)


def scheduled(fn=step, room=ROOM, **options):
    options = {"target": "cpu", "donate_argnums": 0, "progress": False} | options
    return jaxmem.schedule(fn, room, **options)


@pytest.fixture
def searches(monkeypatch):
    """The budgets that were searched for."""
    seen, search = [], searching.search

    def counted(step, budget, *args):
        seen.append(budget)
        return search(step, budget, *args)

    monkeypatch.setattr(_finder, "search", counted)
    return seen


def test_a_second_process_would_find_it(outcomes, searches):
    """Another `schedule` of the same step makes no search, and the same step."""
    first, second = scheduled(), scheduled()
    want, have = first.plan(W, X), second.plan(W, X)
    assert len(searches) == 1
    assert have.choice == want.choice and have.scheduled == want.scheduled
    assert have.tried == want.tried
    assert any("found by an earlier search" in note for note in have.notes)
    assert not any("found by an earlier search" in note for note in want.notes)
    np.testing.assert_array_equal(first(W * 1, X), second(W * 1, X))


@pytest.mark.slow
def test_a_spec_with_nones_at_its_end_is_the_one_without(outcomes, searches):
    """XLA drops them from results: the second step of a loop would search anew."""
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    first, second = scheduled(room="1MiB"), scheduled(room="1MiB")
    first.plan(put(W, None, "data", None), put(X, "data", None))
    for again in (first, second):  # in this process, and by what is on disk
        again.plan(put(W, None, "data"), put(X, "data"))
    assert len(searches) == 1
    second.plan(put(W, None, None, "data"), put(X, "data"))
    assert len(searches) == 2


@pytest.mark.slow
def test_a_budget_out_of_reach_is_remembered(outcomes, searches):
    errors = []
    for _ in range(2):
        with pytest.raises(BudgetError, match="cannot be reached") as caught:
            scheduled(room=1000)(W * 1, X)
        errors.append(caught.value)
    assert len(searches) == 1
    assert str(errors[0]) == str(errors[1]) and errors[0].least == errors[1].least


other = lambda w, x: step(w, x * 2.0)
OTHERS = {
    "wiring": (dict(fn=other), X),
    "shape": ({}, jnp.ones((2 * BATCH, WIDTH))),
    "budget": (dict(room="65MiB"), X),
    "tile": (dict(tile=False), X),
    "donation": (dict(donate_argnums=()), X),
    "cache": (dict(cache=False), X),
}


@pytest.mark.parametrize("case", some_fast(OTHERS, *({*OTHERS} - {"tile", "cache"})))
def test_what_differs_is_searched_anew(outcomes, searches, case):
    how, x = OTHERS[case]
    scheduled(room="64MiB").plan(W, X)  # which is found at once
    scheduled(**{"room": "64MiB"} | how).plan(W, x)
    assert len(searches) == 2


@pytest.mark.slow
def test_shardings_differ(outcomes, searches):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    put = lambda x, *spec: jax.device_put(
        x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    for x in (X, put(X, "data"), put(X, None, "data"), put(X, "data")):
        scheduled(room="2MiB").plan(put(W), x)
    assert len(searches) == 3


def test_one_that_another_code_made_is_not_taken(outcomes, searches, monkeypatch):
    """The choice must make the very step that was compiled."""
    scheduled().plan(W, X)
    from jaxmem.scheduling.search import outcome

    real = outcome.fingerprint
    monkeypatch.setattr(outcome, "fingerprint", lambda jaxpr: "x" + real(jaxpr))
    scheduled().plan(W, X)
    assert len(searches) == 2


def test_a_damaged_file_is_searched_anew(outcomes, searches):
    """One warning, and the entry is whole from then on."""
    cache._warn_once.cache_clear()
    first = scheduled().plan(W, X)
    for path in outcomes.glob("*.pickle"):
        data = path.read_bytes()
        path.write_bytes(data[:200] + bytes(100) + data[300:])
    with pytest.warns(UserWarning, match="damaged"):
        second = scheduled().plan(W, X)
    third = scheduled().plan(W, X)
    assert len(searches) == 2
    assert first.choice == second.choice == third.choice


def test_one_that_was_stopped_is_not_kept(outcomes, monkeypatch):
    """A search out of time has more to find."""
    search = searching.search
    stopped = lambda *args: dataclasses.replace(search(*args), stopped=True)
    monkeypatch.setattr(_finder, "search", stopped)
    scheduled().plan(W, X)
    monkeypatch.setattr(_finder, "search", search)
    assert not any("earlier" in note for note in scheduled().plan(W, X).notes)


def test_what_there_is_to_say_is_kept(outcomes, monkeypatch):
    """Notes of a search that was done."""
    notes, search = ("the batch stays whole",), searching.search
    noted = lambda *args: dataclasses.replace(search(*args), notes=notes)
    monkeypatch.setattr(_finder, "search", noted)
    assert notes[0] in scheduled().plan(W, X).notes
    again = scheduled().plan(W, X).notes
    assert notes[0] in again and any("found by an earlier" in note for note in again)


def test_threads_make_one_search(outcomes, searches):
    plans = []
    run = lambda: plans.append(scheduled().plan(W, X))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(searches) == 1
    assert len({plan.choice for plan in plans}) == 1


def test_a_folder_that_cannot_be_written(outcomes, searches, monkeypatch):
    """It is searched, and said once that nothing is kept."""
    blocked = outcomes / "file"
    blocked.write_text("")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(blocked))
    with pytest.warns(UserWarning, match="cannot store"):
        scheduled().plan(W, X)
    assert len(searches) == 1


CODE = """
from tests.scheduling.test_outcomes import *
plan = scheduled().plan(W, X)
print(sum("earlier" in note for note in plan.notes), plan.scheduled.peak_bytes)
"""


@pytest.mark.slow
def test_processes_make_one_search(outcomes):
    """Two that start together: one waits for the other."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = lambda: subprocess.Popen(
        [sys.executable, "-c", CODE],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = [process.communicate()[0].split() for process in (run(), run())]
    (first, peak), (second, same) = sorted(found)
    assert (first, second) == ("0", "1") and peak == same
