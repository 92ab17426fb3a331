"""`examples/memformer.py`: a step over segments in three forms."""

import json
import re

import jax
import numpy as np
import optax
import pytest

from examples import memformer
from tests.nn.compare import assert_close

SIZES, RATE = memformer.SMALL, 0.5
ROOM = 2  # a search finds at once what fits; the script's own budget is without it


@pytest.fixture(scope="module", autouse=True)
def plain_promotion():
    """As users run it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def start():
    """The state, with an update that compiles in less time than Adam's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memformer, "TX", optax.sgd(RATE))
        yield jax.jit(lambda: memformer.make_state(SIZES))()


def trained(step, state, steps=4):
    """Losses, and the gradient of the first step."""
    before, losses = state[0], []
    state = jax.tree.map(lambda x: x.copy(), state)
    for i in range(steps):
        state, loss = step(state, memformer.draw_text(SIZES))
        losses.append(loss)
        if not i:
            change = lambda p, q: np.array((p - q) / RATE)
            first = jax.tree.map(change, before, state[0])
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
    budget = int(ROOM * found["own replay"][-1])
    scheduled = memformer.forms(SIZES, budget)["schedule"]
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


def test_both_take_a_part_of_the_bytes(runs):
    plain, own, scheduled = (peak for *_, peak in runs.values())
    assert scheduled <= ROOM * own < ROOM * plain / 8


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


@pytest.mark.slow
def test_the_script_runs(capsys, monkeypatch):
    """With Adam, and in the bytes of the own replay."""
    monkeypatch.setattr("sys.argv", ["memformer.py"])
    memformer.main()
    lines = capsys.readouterr().out.splitlines()
    losses = [json.loads(line.split("losses ")[1]) for line in lines]
    sizes = (re.search(r"peak ([\d,]+) bytes", line)[1] for line in lines)
    _, own, scheduled = (int(size.replace(",", "")) for size in sizes)
    assert scheduled <= own and losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-4)
