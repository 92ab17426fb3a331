"""`examples/memformer.py`: a step over segments in three forms."""

import jax
import numpy as np
import pytest

from examples import memformer
from tests.nn.compare import assert_close

SIZES = memformer.SMALL


@pytest.fixture(scope="module", autouse=True)
def plain_promotion():
    """As users run it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def start():
    return jax.jit(lambda: memformer.make_state(SIZES))()


def trained(step, state, steps=4):
    """Losses, and the gradient of the first step, of which Adam has a tenth."""
    state, losses = jax.tree.map(lambda x: x.copy(), state), []
    for i in range(steps):
        state, loss = step(state, memformer.draw_text(SIZES))
        losses.append(loss)
        if not i:
            first = jax.tree.map(np.array, state[1][0].mu)
    return losses, first


def bytes_of(compiled):
    found = compiled.memory_analysis()
    inputs_too = found.argument_size_in_bytes + found.output_size_in_bytes
    return inputs_too - found.alias_size_in_bytes + found.temp_size_in_bytes


@pytest.fixture(scope="module")
def runs(start):
    """What each form gives, and its bytes; a form is compiled once for both."""
    args, found = memformer.shapes(SIZES), {}
    for name, wrap in (("plain", memformer.plain), ("own replay", memformer.REPLAY)):
        step = jax.jit(memformer.make_step(SIZES, wrap), donate_argnums=0)
        run = step.lower(*args).compile()
        found[name] = (*trained(run, start), bytes_of(run))
    scheduled = memformer.forms(SIZES, found["own replay"][-1])["schedule"]
    peak = scheduled.plan(*args).scheduled.peak_bytes
    found["schedule"] = (*trained(scheduled, start), peak)
    return found


@pytest.mark.parametrize("form", ["own replay", "schedule"])
def test_losses_and_gradients_are_those_of_the_plain_step(runs, form):
    losses, gradient, _ = runs["plain"]
    assert losses[-1] < losses[0] - 0.3  # of a text that it has seen
    others, other, _ = runs[form]
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    # sums over 16 segments in another order
    assert_close(gradient, other, roundings=16 * 64)


def test_schedule_takes_no_more_than_the_own_replay(runs):
    plain, own, scheduled = (peak for *_, peak in runs.values())
    assert scheduled <= own < plain / 8


def test_slots_remember_what_they_read_and_forget_it(start):
    """Two texts that differ in the first segment alone lead to other slots."""
    params, model = start[0], memformer.Memformer(SIZES)

    @jax.jit
    def slots(text):
        read = lambda memory, part: model.apply({"params": params}, memory, part)[0]
        segment = lambda memory, part: (read(memory, part),) * 2
        memory = model.apply({"params": params}, text.shape[1], method="start")
        return jax.lax.scan(segment, memory, text)[1]

    text = memformer.draw_text(SIZES)[..., :-1]
    other = text.at[0].set((text[0] + 1) % SIZES.words)
    apart = np.abs(slots(text) - slots(other)).max((1, 2, 3))
    np.testing.assert_allclose(np.linalg.norm(slots(text), axis=-1), 1, rtol=1e-5)
    assert apart[1] > 1e-3  # from the second segment on only the slots differ
    assert apart[-1] < 0.1 * apart[0]
