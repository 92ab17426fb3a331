"""An AdamA in a `MultiSteps`, given to `microbatch`: k steps of n micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jaxmem.accumulate import microbatch
from jaxmem.optim import MultiSteps, accumulate_step, adama, apply_step
from tests.accumulate import problem
from tests.accumulate.problem import LR, assert_close, assert_same
from tests.sets import some_fast

PARAMS = problem.params()
BATCHES = [problem.batch(seed=seed) for seed in (1, 2)]


def run(tx, n, k=1, **options):
    """(params, state) after one mini-batch, and whether each step moved them."""
    step = microbatch(problem.loss, tx, n, donate=False, **options)
    params, state, moved = PARAMS, tx.init(PARAMS), []
    for batch in BATCHES[:k]:
        new, state, _ = step(params, state, batch, None)
        moved.append(bool((new["w"] != params["w"]).any()))
        params = new
    return params, state, moved


def by_hand(n, k, weights):
    """`accumulate_step` for each micro-batch of k batches, `apply_step` once."""
    tx = adama(LR)
    state = tx.init(PARAMS)
    grads = [g for b in BATCHES[:k] for g in problem.gradients(PARAMS, b, n)]
    for g, weight in zip(grads, weights, strict=True):
        state = accumulate_step(
            tx, g, state, PARAMS, micro_batches=n * k, weight=weight
        )
    updates, state = apply_step(tx, state, PARAMS)
    return optax.apply_updates(PARAMS, updates), state


FORMS = {
    "object": lambda tx: tx,
    "transformation": lambda tx: tx.gradient_transformation(),
    "chain": lambda tx: optax.chain(optax.identity(), tx.gradient_transformation()),
    "of an object": lambda tx: MultiSteps(tx, 1),
}


@pytest.mark.parametrize("n", some_fast([1, 4], 4))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_of_one_step_is_the_adama_itself(form, n):
    params, state, moved = run(form(MultiSteps(adama(LR), 1)), n)
    want, _, _ = run(adama(LR), n)
    assert_same(params, want)
    assert moved == [True]
    multi = jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "acc_grads"))
    assert {s.acc_grads for s in multi if hasattr(s, "acc_grads")} == {()}


@pytest.mark.parametrize("k", [2, lambda step: jnp.where(step > 3, 5, 2)])
def test_parameters_move_at_every_k_th_step(k):
    n = 4
    params, state, moved = run(MultiSteps(adama(LR), k), n, 2)
    want, want_state = by_hand(n, 2, [None] * 8)
    assert_close(params, want)
    assert_close(state.inner_opt_state, want_state)
    assert moved == [False, True]
    assert (int(state.gradient_step), int(state.mini_step)) == (1, 0)


def test_sums_of_steps():
    """Without the mean each step counts as a mini-batch of its own."""
    n = 4
    tx = MultiSteps(adama(LR), 2, use_grad_mean=False)
    assert_close(run(tx, n, 2)[0], by_hand(n, 2, [1 / n] * 8)[0])


@pytest.mark.parametrize("mean", [True, False])
def test_weights_are_shares_of_a_step(mean):
    n = 4
    weigh = lambda batch: batch["x"][0, 0]
    tx = MultiSteps(adama(LR), 2, use_grad_mean=mean)
    got = run(tx, n, 2, weight_fn=weigh)[0]
    shares = []
    for batch in BATCHES:
        weights = np.array([weigh(b) for b in problem.micro_batches(batch, n)])
        shares += list(weights / weights.sum() / (2 if mean else 1))
    assert_close(got, by_hand(n, 2, [float(s) for s in shares])[0])


def test_a_step_left_out_does_not_count():
    tx = MultiSteps(adama(LR), 2)
    step = microbatch(problem.loss, tx, 2, skip_nonfinite=True, donate=False)
    bad = {"x": jnp.full_like(BATCHES[0]["x"], jnp.nan)}
    params, state, metrics = step(PARAMS, tx.init(PARAMS), bad, None)
    assert int(metrics["skipped"]) == 2 and int(state.mini_step) == 0
    assert_same(params, PARAMS)


def test_in_a_train_state():
    tx = MultiSteps(adama(LR), 1)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state, _ = microbatch(problem.loss, tx, 2, donate=False)(state, BATCHES[0], None)
    assert_same(state.params, run(adama(LR), 2)[0])


@pytest.mark.slow
def test_a_state_from_elsewhere():
    """Restored in the middle of a mini-batch, by the step that made it or another."""
    tx = MultiSteps(adama(LR), 2)
    _, state, _ = run(tx, 4, 1)
    restored = jax.tree.map(np.asarray, state)
    step = lambda n: microbatch(problem.loss, tx, n, donate=False)
    new, _, _ = step(4)(PARAMS, restored, BATCHES[1], None)
    assert_same(new, run(tx, 4, 2)[0])
    with pytest.raises(ValueError, match="4 micro-batches are in it .* 2 are expected"):
        step(2)(PARAMS, restored, BATCHES[1], None)
    _, state, _ = run(tx, 4, 2)
    with pytest.raises(ValueError, match="n=16, but .* mini-batches of 8"):
        step(16)(PARAMS, jax.tree.map(np.asarray, state), BATCHES[1], None)


@pytest.mark.parametrize("form", [FORMS["object"], FORMS["transformation"]])
def test_that_of_optax_is_refused(form):
    """It keeps the gradients of micro-batches in sums that nothing reads."""
    with pytest.raises(ValueError, match=r"use jaxmem\.optim\.MultiSteps"):
        run(form(optax.MultiSteps(adama(LR), 2)), 4)


def test_that_of_optax_with_one_micro_batch_a_step():
    """Gradients are summed in its accumulator, and AdamA takes whole mini-batches."""
    tx = optax.MultiSteps(adama(LR), 2)
    params, state, moved = run(tx, 1, 2)
    assert moved == [False, True]
    step = microbatch(problem.loss, tx, 1, donate=False)
    step(params, jax.tree.map(np.asarray, state), BATCHES[0], None)


def test_other_optimizers_accumulate_twice():
    tx = MultiSteps(optax.sgd(LR), 2)
    params, _, moved = run(tx, 4, 2)
    assert moved == [False, True]
    both = jax.tree.map(lambda *xs: jnp.concatenate(xs), *BATCHES)
    grads = problem.mean_gradient(PARAMS, both, 1)
    assert_close(params, jax.tree.map(lambda p, g: p - LR * g, PARAMS, grads))


def test_not_over_devices():
    tx = MultiSteps(adama(LR, axis_name="data"), 2)
    step = microbatch(problem.loss, tx, 2, axis_name="data", donate=False)
    specs = jax.P(), jax.P(), jax.P("data"), jax.P()
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
    with pytest.raises(ValueError, match="MultiSteps around .*larger n"):
        step(PARAMS, tx.init(PARAMS), BATCHES[0], None)


def test_a_number_of_micro_batches_without_a_phase():
    tx = MultiSteps(adama(LR), 2)
    with pytest.raises(ValueError, match="micro_batches=4"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, micro_batches=4)
