"""Micro-batches that are not finite: left out, counted, and without a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.accumulate import microbatch
from jaxmem.optim import adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, assert_close, assert_same

N = 4
PARAMS = problem.params()
OPTIMIZERS = pytest.mark.parametrize(
    "tx",
    [adama(LR), adama(LR, mode="ema"), optax.adam(LR)],
    ids=["adama", "ema", "adam"],
)


def bad_loss(params, state, batch, rng):
    """NaN where a micro-batch says so; its model state as well."""
    value = problem.loss(params, batch, None) + batch["bad"].sum()
    return value, state + 1 + batch["bad"].sum()


def bad_gradient(params, state, batch, rng):
    """A finite loss with the gradient of sqrt at 0 where a micro-batch says so."""
    rest = jnp.where(jnp.isnan(batch["bad"]).any(), 0.0, 1.0) * params["b"][0]
    value = problem.loss(params, batch, None) + jnp.sqrt(rest)
    return value, state + 1


def batch(bad):
    """Micro-batches whose numbers are in `bad` hold a NaN."""
    marks = np.zeros((4, N), np.float32)
    marks[1, list(bad)] = np.nan
    return problem.batch(4 * N) | {"bad": jnp.asarray(marks.reshape(-1))}


def run(tx, loss, skip, bad, n=N):
    step = microbatch(
        loss, tx, n, has_model_state=True, skip_nonfinite=skip, donate=False
    )
    return step(PARAMS, tx.init(PARAMS), jnp.float32(0), batch(bad), None)


def reference(tx, loss, good):
    """The others' gradients, each still 1/N."""
    state = tx.init(PARAMS)
    each = problem.micro_batches(batch(()), N)
    grads = [
        jax.grad(loss, has_aux=True)(PARAMS, jnp.float32(0), b, None)[0] for b in each
    ]
    grads = [grads[i] for i in good]
    if isinstance(state[0], optax.ScaleByAdamState):
        mean = jax.tree.map(lambda *gs: sum(gs) / N, *grads)
        updates, state = tx.update(mean, state, PARAMS)
        return optax.apply_updates(PARAMS, updates), state
    for g in grads:
        state = tx.update(g, state, PARAMS, phase="accumulate", micro_batches=N)[1]
    updates, state = tx.update(PARAMS, state, PARAMS, phase="apply")
    return optax.apply_updates(PARAMS, updates), state


@pytest.mark.fast(
    "bad_loss-loss-adama",
    "bad_loss-loss-adam",
    "bad_gradient-gradients-ema",
)
@OPTIMIZERS
@pytest.mark.parametrize(
    ("loss", "skip"),
    [
        (bad_loss, "loss"),
        pytest.param(bad_loss, "gradients", marks=pytest.mark.slow),
        (bad_gradient, "gradients"),
    ],
)
def test_the_others_count_as_they_did(tx, loss, skip, bad=(0, 2)):
    params, state, model_state, metrics = run(tx, loss, skip, bad)
    good = [i for i in range(N) if i not in bad]
    want, want_state = reference(tx, loss, good)
    assert_close(params, want, atol=LR * problem.RTOL)
    assert_close(state, want_state)
    assert float(model_state) == len(good)
    assert int(metrics["skipped"]) == len(bad)
    each = problem.micro_batches(batch(()), N)
    losses = [loss(PARAMS, jnp.float32(0), each[i], None)[0] for i in good]
    assert_close(metrics["loss"], np.mean(losses))


@pytest.mark.fast("1-adam", "4-adama", "4-ema")
@OPTIMIZERS
@pytest.mark.parametrize("n", [1, N])
def test_nothing_changes_where_all_are_left_out(tx, n):
    for loss, skip in ((bad_loss, "loss"), (bad_gradient, "gradients")):
        params, state, model_state, metrics = run(tx, loss, skip, range(N), n)
        assert_same((params, state), (PARAMS, tx.init(PARAMS)))
        assert float(model_state) == 0
        assert int(metrics["skipped"]) == n
        assert np.isnan(metrics["loss"])


def test_a_finite_loss_says_nothing_of_the_gradients():
    params, _, _, metrics = run(adama(LR), bad_gradient, "loss", (1,))
    assert int(metrics["skipped"]) == 0 and np.isnan(params["b"]).any()


def test_nothing_is_left_out_unasked():
    params, _, _, metrics = run(adama(LR), bad_loss, False, (1,))
    assert "skipped" not in metrics and np.isnan(metrics["loss"])


def test_random_keys_in_the_state_stay_too():
    """`optax.add_noise` keeps one."""
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(LR))
    state = run(tx, bad_loss, "loss", range(N))[1]
    assert (state[0].rng_key == tx.init(PARAMS)[0].rng_key).all()
    moved = run(tx, bad_loss, "loss", (0,))[1]
    assert not (moved[0].rng_key == tx.init(PARAMS)[0].rng_key).all()
