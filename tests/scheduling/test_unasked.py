"""Above what XLA plans with on a GPU, it recomputes unasked: a search stays below."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.chips import CHIPS
from jaxmem.chips import _table as table
from jaxmem.scheduling.search.trials import Trials

LAYERS, WIDTH = 8, 4096
PLANNED = CHIPS["h100"].planned_bytes


def stack(rows):
    """The gradient of dense layers with GELU, and its arguments."""

    def loss(weights, x):
        layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype("float32") ** 2)

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    return jax.grad(loss), (weights, jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16))


def plan(step, args, budget):
    scheduled = jaxmem.schedule(step, budget, target="h100", donate_argnums=())
    return scheduled.plan(*args)


def test_what_xla_plans_with_is_known_of_gpus_alone():
    assert PLANNED == 0.76 * CHIPS["h100"].memory_bytes
    assert all(CHIPS[name].planned_bytes > 1e18 for name in ("cpu", "tpu-v5e"))


def test_the_limit_is_what_xla_plans_with_until_nothing_is_found_there():
    trials = Trials(100, excess=10, planned=80)
    assert (trials.room, trials.limit) == (90, 80)
    trials.planned = float("inf")
    assert trials.limit == trials.room == 90


def test_a_budget_of_the_whole_chip_is_not_filled_where_that_takes_longer():
    step, args = stack(600_000)
    plain = jaxmem.estimate(step, *args, target="h100")
    assert PLANNED < plain.peak_bytes and any("unasked" in n for n in plain.time.notes)
    found = plan(step, args, "79GiB")
    assert found.scheduled.peak_bytes <= PLANNED
    assert found.scheduled.seconds < plain.seconds
    assert not any("unasked" in note for note in found.scheduled.time.notes)
    assert any("unasked" in note for note in found.notes)


@pytest.mark.slow
def test_where_nothing_is_below_the_budget_counts(monkeypatch):
    monkeypatch.setattr(table, "_PLANNED", 1e-6)
    step, args = stack(8_000)
    budget = jaxmem.estimate(step, *args, target="h100").peak_bytes
    found = plan(step, args, budget * 3 // 4)
    assert found.scheduled.peak_bytes <= budget * 3 // 4
    assert not any("unasked" in note for note in found.notes)
