"""`max_batch`: the right answer, in few compiles."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.memory import _max_batch, estimate, max_batch, parse_bytes
from jaxmem.memory._max_batch import BatchSearch

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
    assert len(search.known) <= 4


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: n * n,
        lambda n: 1000 * (n // 7),
        lambda n: float("inf") if n > 333 else 1,
        lambda n: 10 if n < 50 else 20000 + n,
        lambda n: 4000 + 2**0.5 * n**0.5,
    ],
)
def test_crooked_lines_still_end_at_a_border(peak):
    search = run(BatchSearch(peak, 10000, 1 << 12))
    assert search.fits == 1 << 12 or peak(search.fits + 1) > 10000
    assert peak(search.fits) <= 10000
    assert len(search.known) < 30


def test_running_out_of_memory_means_that_it_does_not_fit(monkeypatch):
    class Report:
        def __init__(self, peak):
            self.peak_bytes = peak

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
