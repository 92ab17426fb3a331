"""`examples/eight_tables.py`: a step touches rows of the large tables alone."""

import runpy

import jax
import numpy as np
import pytest

import jaxmem
from tests.docs_code import DOCS


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(DOCS.parent / "examples" / "eight_tables.py"))


@pytest.fixture(autouse=True)
def plain_promotion():
    """As users run it."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_temporaries_are_those_of_the_batch(example):
    params = jax.eval_shape(example["init"], jax.random.key(0))
    state = jax.eval_shape(example["tx"].init, params)
    batch = next(example["batches"]())
    report = jaxmem.estimate(example["train_step"], params, state, batch)
    bags = sum(bag for _, bag in example["FIELDS"].values())
    rows = example["BATCH"] * bags * example["WIDTH"] * 4
    tables = sum(count for count, _ in example["FIELDS"].values())
    assert report.temp_bytes < 4 * rows < tables * example["WIDTH"] * 4 / 8


@pytest.mark.slow
def test_it_learns(example):
    losses = example["main"](100)
    first, last = np.mean(losses[:10]), np.mean(losses[-10:])
    assert last < 0.9 * first
