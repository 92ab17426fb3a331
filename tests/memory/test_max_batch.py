"""`max_batch`: the right answer, in few compiles."""

import json
import pickle
import types

import jax
import jax.numpy as jnp
import pytest

from jaxmem.memory import (
    REFUSED,
    BatchSearch,
    _max_batch,
    best_batch,
    estimate,
    max_batch,
    parse_bytes,
)
from jaxmem.memory._batch_search import FURTHER

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))


def sgd(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def args(batch):
    return W, jax.ShapeDtypeStruct((batch, 64), jnp.float32)


def test_the_answer_fits_and_the_next_does_not():
    best = max_batch(sgd, args, memory="1MiB", donate_argnums=0)
    peak = lambda n: estimate(sgd, *args(n), donate_argnums=0).peak_bytes
    assert peak(best) <= 2**20 < peak(best + 1)
    assert max_batch(sgd, args, memory="1MiB", multiple_of=8) % 8 == 0


def test_nothing_fits():
    assert max_batch(sgd, args, memory=100) == 0


def run(search):
    for units in search.steps():
        search.measure(units)
    return search


@pytest.mark.parametrize("room", [2, 7, 64, 1000, 123456])
def test_a_line_takes_few_compiles(room):
    search = run(BatchSearch(lambda n: 5 * n + 1, room * 5 + 3, 1 << 20))
    assert search.fits == room
    # two for the line, what it says in round numbers, the answer and the one after it
    assert len(search.known) <= 5 + len(FURTHER)


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: n * n,
        lambda n: 1000 * (n // 7),
        lambda n: REFUSED if n > 333 else 1,
        lambda n: 10 if n < 50 else 20000 + n,
        lambda n: 4000 + 2**0.5 * n**0.5,
    ],
)
def test_crooked_lines_still_end_at_a_border(peak):
    search = run(BatchSearch(peak, 10000, 1 << 12))
    assert search.fits == 1 << 12 or peak(search.fits + 1) > 10000
    assert peak(search.fits) <= 10000
    assert len(search.known) < 30


@pytest.mark.parametrize("many", [32, 256])
def test_sizes_that_the_hardware_divides_may_fit_beyond_others_that_do_not(many):
    """As XLA has it for GPUs, where other kernels take what is a multiple of `many`."""
    peak = lambda n: n * (200 if n % many == 0 else 256)
    search = run(BatchSearch(peak, 2**20, 1 << 20))
    assert search.fits > 2**20 / 256 + many  # beyond the first that does not fit
    assert peak(search.fits) <= 2**20 < peak(search.fits + 1)
    assert len(search.known) < 16


def test_what_the_compiler_recomputes_by_itself_is_found():
    """A step that would not fit the chip is compiled to less."""
    search = run(BatchSearch(lambda n: n * (5 if n <= 200 else 4), 1000, 1 << 20))
    assert search.fits == 250


def test_a_limit_that_ends_the_search_is_told(monkeypatch):
    sized = lambda fn, n, **how: types.SimpleNamespace(peak_bytes=n, seconds=None)
    monkeypatch.setattr(_max_batch, "estimate", sized)
    ended = max_batch(sgd, lambda n: n, memory=1000, limit=100, multiple_of=3)
    assert ended == 99
    assert ended.at_limit
    assert str(ended) == f"{ended}" == "99 (the limit: larger ones were not tried)"
    again = pickle.loads(pickle.dumps(ended))
    assert (again, again.at_limit) == (99, True)
    found = max_batch(sgd, lambda n: n, memory=90, limit=100, multiple_of=3)
    assert not found.at_limit
    assert (found, str(found), json.dumps(found)) == (90, "90", "90")
    assert not max_batch(sgd, lambda n: n, memory=1, multiple_of=2, limit=2).at_limit


def test_seconds_of_the_largest_batch_are_told(monkeypatch):
    sized = lambda fn, n, **how: types.SimpleNamespace(peak_bytes=n, seconds=0.002 * n)
    monkeypatch.setattr(_max_batch, "estimate", sized)
    found = max_batch(sgd, lambda n: n, "h100", memory=90)
    assert (found, found.seconds, found.per_second) == (90, 0.18, 500.0)
    assert str(found) == "90 (predicted 180 ms a step, 500 examples a second)"
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.seconds) == (90, 0.18)


def test_best_batch_has_the_most_examples_a_second(monkeypatch):
    """Tiles of 16: what is over the last full one takes a whole one more."""
    seconds = lambda n: 1.0 + -(-n // 16)
    sized = lambda fn, n, **how: types.SimpleNamespace(peak_bytes=n, seconds=seconds(n))
    monkeypatch.setattr(_max_batch, "estimate", sized)
    best = best_batch(sgd, lambda n: n, "h100", memory=100)
    assert max_batch(sgd, lambda n: n, "h100", memory=100) == 100
    assert best == 96 == max(range(1, 101), key=lambda n: n / seconds(n))
    assert best.seconds == 7.0 and not best.at_limit
    assert best_batch(sgd, lambda n: n, "h100", memory=100, multiple_of=12) % 12 == 0
    assert best_batch(sgd, lambda n: 1000, "h100", memory=100) == 0
    with pytest.raises(ValueError, match="target='cpu': no rates"):
        best_batch(sgd, lambda n: n, "cpu", memory=100)


def test_running_out_of_memory_means_that_it_does_not_fit(monkeypatch):
    class Report:
        def __init__(self, peak):
            self.peak_bytes, self.seconds = peak, None

    def fake(fn, n, *, target):
        if n > 20:
            raise _max_batch.DoesNotFit("no")
        return Report(n)

    monkeypatch.setattr(_max_batch, "estimate", fake)
    assert max_batch(sgd, lambda n: n, memory=1000) == 20


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("memory of target 'cpu' is not known", lambda: max_batch(sgd, args)),
        ("memory='much'", lambda: max_batch(sgd, args, memory="much")),
        ("multiple_of=0", lambda: max_batch(sgd, args, memory="1GiB", multiple_of=0)),
        ("memory=0", lambda: max_batch(sgd, args, memory=0)),
    ],
)
def test_bad_arguments(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_sizes_are_read_as_people_write_them():
    assert parse_bytes("14GiB") == 14 * 2**30
    assert parse_bytes("16 GB") == 16 * 10**9
