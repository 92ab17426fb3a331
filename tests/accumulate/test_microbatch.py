"""The step against accumulation written out: values, weights, keys, state, donation."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.accumulate import _accumulators, microbatch
from jaxmem.optim import adama
from jaxmem.optim.accumulation import states
from tests.accumulate import problem
from tests.accumulate.problem import LR, RTOL, assert_close, assert_same, copy
from tests.sets import some_fast

PARAMS = problem.params()
BATCH = problem.batch()


def one_step(tx, n, loss=problem.loss, batch=BATCH, rng=None, params=PARAMS, **options):
    """(params, opt_state, metrics) after a step from a fresh state."""
    step = microbatch(loss, tx, n, donate=False, **options)
    return step(params, tx.init(params), batch, rng)


def plain_step(tx, params, opt_state, grads):
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.parametrize("n", some_fast([1, 2, 16], 1, 2))
@pytest.mark.parametrize("tx", [optax.sgd(LR), optax.adam(LR)], ids=["sgd", "adam"])
def test_other_optimizers_see_the_mean_gradient(tx, n):
    step = microbatch(problem.loss, tx, n, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    want, want_state = params, state
    for seed in range(3):
        batch = problem.batch(seed=seed)
        grads = problem.mean_gradient(want, batch, n)
        want, want_state = plain_step(tx, want, want_state, grads)
        params, state, metrics = step(params, state, batch, None)
        before = np.mean(problem.per_example(want, batch["x"]))
        assert metrics["loss"] > before  # of the parameters before the update
    # three steps of at most LR times a gradient under 10, each with RTOL
    assert_close(params, want, atol=3 * 10 * LR * RTOL)
    assert_close(state, want_state, rtol=4 * RTOL)


@pytest.mark.fast("paper-2", "ema-2", "fractional-8")
@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("mode", ["paper", "ema", "fractional"])
def test_adama_is_adama_called_micro_batch_by_micro_batch(n, mode):
    tx = adama(LR, weight_decay=0.1, micro_batches=n, mode=mode)
    step = microbatch(problem.loss, tx, n, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    want, want_state = params, state
    for seed in range(3):
        batch = problem.batch(seed=seed)
        for grads in problem.gradients(want, batch, n):
            updates, want_state = tx.update(grads, want_state, want)
            want = optax.apply_updates(want, updates)
        params, state, _ = step(params, state, batch, None)
    assert int(state[0].count) == (3 * n if mode == "ema" else 3)
    assert int(state[0].micro_step) == 0
    assert_close(params, want, atol=3 * LR * RTOL)
    assert_close(state, want_state, rtol=4 * RTOL)


def test_adama_is_the_papers_sum_of_squares():
    """Moments from the formulas, in float64 from the gradients."""
    n, b1, b2 = 4, 0.9, 0.999
    tx = adama(LR, b1, b2)
    _, state, _ = one_step(tx, n)
    grads = [
        np.asarray(g["w"], np.float64) for g in problem.gradients(PARAMS, BATCH, n)
    ]
    assert_close(state[0].mu["w"], (1 - b1) * sum(grads) / n)
    assert_close(state[0].nu["w"], (1 - b2) * sum((g / n) ** 2 for g in grads))
    assert int(state[0].micro_batches) == n


@pytest.mark.parametrize("tx", [adama(LR), adama(LR, nesterov=True), optax.adam(LR)])
def test_one_micro_batch_is_the_plain_step(tx):
    @jax.jit
    def plain(params, state, batch):
        grads = jax.grad(problem.loss)(params, batch, None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    want = plain(PARAMS, state, BATCH)
    params, state, metrics = one_step(tx, 1)
    assert_close((params, state), want)
    assert_close(metrics["loss"], problem.loss(PARAMS, BATCH, None))


def test_clipping_before_adama_is_of_each_micro_batch():
    n, top = 4, 1.0
    tx = optax.chain(optax.clip_by_global_norm(top), adama(LR))
    _, state, _ = one_step(tx, n)
    grads = problem.gradients(PARAMS, BATCH, n)
    norms = [float(optax.tree.norm(g)) for g in grads]
    assert min(norms) > top
    want = sum(np.asarray(g["w"]) * top / r for g, r in zip(grads, norms, strict=True))
    assert_close(state[1][0].mu["w"], 0.1 * want / n)


@pytest.mark.parametrize("tx", [optax.sgd(1.0), adama(LR)], ids=["sgd", "adama"])
def test_weights_are_shares_of_the_gradient(tx):
    n = 4
    batch = BATCH | {"tokens": jnp.arange(16, dtype=jnp.int32)}

    def loss(params, batch, rng):
        tokens = batch["tokens"].astype(jnp.float32)
        each = problem.per_example(params, batch["x"])
        return (each * tokens).sum() / tokens.sum()

    weight = lambda batch: batch["tokens"].sum()
    params, state, metrics = one_step(tx, n, loss, batch, weight_fn=weight)
    whole, grads = jax.value_and_grad(loss)(PARAMS, batch, None)
    assert_close(metrics["loss"], whole)
    if isinstance(tx, type(optax.sgd(1.0))) and len(state) == 2:
        assert_close(params, jax.tree.map(lambda p, g: p - g, PARAMS, grads))
        return
    assert_close(state[0].mu, jax.tree.map(lambda g: 0.1 * g, grads))
    shares = np.arange(16).reshape(4, n).sum(0) / 120
    each = problem.gradients(PARAMS, batch, n, loss)
    square = sum((s * g["w"]) ** 2 for s, g in zip(shares, each, strict=True))
    assert_close(state[0].nu["w"], 0.001 * square)


def test_a_micro_batch_of_no_weight_is_left_out():
    """Its mean over no tokens is 0/0."""
    n = 4
    mask = jnp.ones((16,)).at[1::n].set(0.0)

    def loss(params, batch, rng):
        each = problem.per_example(params, batch["x"]) * batch["mask"]
        return each.sum() / batch["mask"].sum()

    batch = BATCH | {"mask": mask}
    weight = lambda batch: batch["mask"].sum()
    told = r"`div` at .*sum over all examples(.|\n)*weight_fn"
    with pytest.warns(UserWarning, match=told):
        assert not np.isfinite(one_step(adama(LR), n, loss, batch)[2]["loss"])
    _, state, metrics = one_step(adama(LR), n, loss, batch, weight_fn=weight)
    whole, grads = jax.value_and_grad(loss)(PARAMS, batch, None)
    assert_close(metrics["loss"], whole)
    assert_close(state[0].mu, jax.tree.map(lambda g: 0.1 * g, grads))


def noisy(params, batch, rng):
    return problem.loss(params, batch, None), jax.random.uniform(rng, (2,))


def test_each_micro_batch_has_a_key_of_its_own():
    n = 4
    keep = lambda rng: one_step(optax.sgd(LR), n, noisy, rng=rng, has_aux=True)[2]
    key = jax.random.key(3)
    want = jnp.stack([jax.random.uniform(k, (2,)) for k in jax.random.split(key, n)])
    assert len(np.unique(want)) == 2 * n
    assert_close(keep(key)["aux"], want.mean(0))
    assert_same(keep(key), keep(key))
    assert_same(keep(jax.random.PRNGKey(3)), keep(key))
    assert not np.allclose(keep(jax.random.key(4))["aux"], want.mean(0), rtol=1e-3)


def test_one_micro_batch_has_the_key_itself():
    key = jax.random.key(3)
    _, _, metrics = one_step(optax.sgd(LR), 1, noisy, rng=key, has_aux=True)
    assert_same(metrics["aux"], jax.random.uniform(key, (2,)))


def test_rng_may_be_a_tree_of_keys():
    def loss(params, batch, rng):
        seen = {name: jax.random.uniform(key) for name, key in rng.items()}
        return problem.loss(params, batch, None), seen

    keys = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}
    _, _, metrics = one_step(optax.sgd(LR), 2, loss, rng=keys, has_aux=True)
    each = lambda k: np.mean([jax.random.uniform(x) for x in jax.random.split(k)])
    assert_close({k: metrics[k] for k in keys}, {k: each(v) for k, v in keys.items()})


def test_aux_is_averaged_in_float32_under_its_names():
    def loss(params, batch, rng):
        x = batch["x"]
        aux = {"sum": x.sum(0).astype(jnp.bfloat16), "large": (x > 1).sum()}
        return problem.loss(params, batch, None), aux

    _, _, metrics = one_step(optax.sgd(LR), 4, loss, has_aux=True)
    each = [b["x"] for b in problem.micro_batches(BATCH, 4)]
    sums = np.mean(
        [np.asarray(x.sum(0).astype(jnp.bfloat16), np.float32) for x in each], 0
    )
    # XLA may keep the excess precision of a sum that is rounded to bfloat16
    assert_close(metrics["sum"], sums, rtol=2**-8)
    assert metrics["sum"].dtype == jnp.float32
    assert float(metrics["large"]) == np.mean([(x > 1).sum() for x in each])


@pytest.mark.parametrize("n", [1, 4])
def test_aux_may_be_anything_with_numbers(n):
    def loss(params, batch, rng):
        return problem.loss(params, batch, rng), (1.5, {"top": batch["x"][0] < 9}, None)

    _, _, metrics = one_step(optax.sgd(LR), n, loss, has_aux=True)
    assert_same(metrics["aux"], (1.5, {"top": np.ones(3, np.float32)}, None))


def test_model_state_goes_from_micro_batch_to_micro_batch():
    def loss(params, state, batch, rng):
        mean = 0.5 * state["mean"] + 0.5 * batch["x"].mean(0)
        value = problem.loss(params, batch, None) + mean.sum()
        return value, {"mean": mean, "steps": state["steps"] + 1}

    start = {"mean": jnp.ones((3,)), "steps": jnp.int32(0)}
    tx = adama(LR)
    step = microbatch(loss, tx, 4, has_model_state=True, donate=False)
    params, _, state, metrics = step(PARAMS, tx.init(PARAMS), start, BATCH, None)
    want, losses = start, []
    for b in problem.micro_batches(BATCH, 4):
        value, want = loss(PARAMS, want, b, None)
        losses.append(value)
    assert_close(state, want)
    assert_close(metrics["loss"], np.mean(losses))
    # the model state moves the loss, not the gradient
    assert_close(params, one_step(tx, 4)[0])


def test_model_state_and_aux_together():
    def loss(params, state, batch, rng):
        return problem.loss(params, batch, None), (state + 1, {"seen": state})

    step = microbatch(
        loss, optax.sgd(LR), 2, has_model_state=True, has_aux=True, donate=False
    )
    state = optax.sgd(LR).init(PARAMS)
    *_, count, metrics = step(PARAMS, state, jnp.float32(3), BATCH, None)
    assert float(count) == 5 and float(metrics["seen"]) == 3.5


@pytest.mark.parametrize(
    "remat", [True, jax.checkpoint_policies.dots_saveable], ids=["true", "policy"]
)
def test_remat_changes_what_is_kept_and_not_the_step(remat):
    tx = adama(LR)
    got = one_step(tx, 4, remat=remat)
    assert_close(got, one_step(tx, 4), atol=LR * RTOL)
    step = microbatch(problem.loss, tx, 4, remat=remat)
    text = str(step.trace(PARAMS, tx.init(PARAMS), BATCH, None).jaxpr)
    assert ("checkpoint" in text) or ("remat" in text)


@pytest.mark.usefixtures("strict_promotion")
def test_bfloat16_parameters_add_up_in_float32():
    """In bfloat16, 16 + 1/16 is 16."""
    params = {"b": jnp.zeros((3,), jnp.bfloat16), "w": jnp.zeros((3, 4), jnp.bfloat16)}
    batch = {"x": jnp.ones((16, 3)).at[0].set(256.0)}
    sums = [
        -one_step(optax.sgd(1.0), 16, batch=batch, params=params, **options)[0]["b"]
        for options in ({}, {"accumulator_dtype": jnp.bfloat16})
    ]
    assert all(x.dtype == jnp.bfloat16 for x in sums)
    want = jnp.full((3,), (256 + 15) / 16).astype(jnp.bfloat16)
    assert (sums[0] == want).all() and (sums[1] == 16).all()


@pytest.mark.usefixtures("strict_promotion")
def test_the_accumulator_has_the_dtype_that_was_asked_for():
    tx = optax.sgd(LR)
    for dtype in (None, jnp.bfloat16):
        step = microbatch(problem.loss, tx, 2, accumulator_dtype=dtype)
        text = str(step.trace(PARAMS, tx.init(PARAMS), BATCH, None).jaxpr)
        assert ("bf16[3,4]" in text) == (dtype is not None)
    got = one_step(tx, 2, accumulator_dtype=jnp.bfloat16)[0]
    want = one_step(tx, 2)[0]
    # two roundings of shares and one of the sum, gradients under 10
    assert_close(got, want, atol=3 * 2**-8 * 10 * LR)


@pytest.mark.parametrize("tx", [adama(LR), optax.adam(LR)], ids=["adama", "adam"])
def test_donation(tx):
    step = microbatch(problem.loss, tx, 4)
    params, state = copy(PARAMS), tx.init(PARAMS)
    given = jax.tree.leaves((params, state))
    new_params, new_state, _ = step(params, state, BATCH, None)
    assert all(x.is_deleted() for x in given)
    assert not any(x.is_deleted() for x in jax.tree.leaves(BATCH))
    kept = jax.tree.leaves((new_params, new_state))
    microbatch(problem.loss, tx, 4, donate=False)(new_params, new_state, BATCH, None)
    assert not any(x.is_deleted() for x in kept)


def test_the_log_tells_once_what_an_accumulator_costs(caplog):
    _accumulators.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jaxmem"):
        for _ in range(2):
            one_step(optax.sgd(LR), 2)
        one_step(adama(LR), 2)
    sums = [m for m in caplog.messages if "summed in an accumulator" in m]
    assert len(sums) == 1 and "60 B" in sums[0]  # 3 + 12 float32
    copies = [m for m in caplog.messages if "donate=False" in m]
    assert len(copies) == 2  # of two optimizers' bytes


def test_an_own_state_is_not_read_again(monkeypatch):
    reads = []
    monkeypatch.setattr(states, "_check_values", lambda s, n, k: reads.append(n))
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 2)
    params, state = copy(PARAMS), tx.init(PARAMS)
    for _ in range(3):
        params, state, _ = step(params, state, BATCH, None)
    assert reads == [2]
    step(params, copy(state), BATCH, None)
    assert reads == [2, 2]


def test_traced_lowered_and_estimated_as_a_jitted_function():
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 2)
    args = jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS), BATCH, jax.random.key(0)))
    shapes = step.eval_shape(*args)
    assert jax.tree.map(lambda x: x.shape, shapes[0]) == {"b": (3,), "w": (3, 4)}
    info = step.trace(*args).args_info[0]
    donated = [all(x.donated for x in jax.tree.leaves(arg)) for arg in info]
    assert donated == [True, True, False, False]
    report = jaxmem.estimate(step, *args, target="cpu", cache=False)
    # parameters and both moments of 15 float32 are updated in place
    assert report.alias_bytes >= 3 * 15 * 4


@pytest.mark.slow
def test_inside_another_jit():
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 4)
    got = jax.jit(lambda *args: step(*args))(PARAMS, tx.init(PARAMS), BATCH, None)
    assert_close(got, one_step(tx, 4), atol=LR * RTOL)
