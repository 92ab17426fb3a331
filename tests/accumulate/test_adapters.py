"""The step called with a TrainState and with nnx objects."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmem
from jaxmem.accumulate import microbatch
from jaxmem.optim import LowBit, adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, assert_close, assert_same, copy

N = 4
BATCH = problem.batch()
OPTIMIZERS = pytest.mark.parametrize("make", [adama, optax.adam], ids=["adama", "adam"])
# BatchNorm subtracts means: gradients cancel to a few percent of their terms
NORM_RTOL = 100 * problem.RTOL


class WithStats(TrainState):
    batch_stats: Any


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def linen_loss(params, stats, batch, rng):
    variables = {"params": params, "batch_stats": stats}
    out, new = Linen().apply(
        variables, batch["x"], rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return (out**2).mean() + out.mean(), new["batch_stats"]


def linen_variables():
    key = jax.random.key(0)
    variables = Linen().init({"params": key, "dropout": key}, BATCH["x"])
    return variables["params"], variables["batch_stats"]


@pytest.mark.fast("adama")
@OPTIMIZERS
def test_train_state_with_batch_stats(make):
    tx, (params, stats) = make(LR), linen_variables()
    state = WithStats.create(
        apply_fn=Linen().apply, params=params, tx=tx, batch_stats=stats
    )
    step = microbatch(linen_loss, tx, N, has_model_state=True, donate=False)
    want = params, tx.init(params), stats
    for seed in range(2):
        key = jax.random.key(seed)
        state, metrics = step(state, BATCH, key)
        *want, want_metrics = step(*want, BATCH, key)
    assert_same((state.params, state.opt_state, state.batch_stats), tuple(want))
    assert_same(metrics, want_metrics)
    assert int(state.step) == 2 and type(state) is WithStats
    assert not np.allclose(state.batch_stats["BatchNorm_0"]["mean"], 0)


def test_train_state_is_donated_and_its_step_waits_with_the_others():
    tx = adama(LR)
    loss = lambda params, batch, rng: (
        problem.loss(params, batch, rng) / batch["on"].mean()
    )
    step = microbatch(loss, tx, N, skip_nonfinite=True)
    params = copy(problem.params())
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    off = BATCH | {"on": jnp.zeros((16,))}
    together = "takes the examples of a batch together"
    with pytest.warns(UserWarning, match=together):
        state, metrics = step(state, off, None)
    assert params["w"].is_deleted()
    assert int(metrics["skipped"]) == N and int(state.step) == 0
    with pytest.warns(UserWarning, match=together):
        state, metrics = step(state, BATCH | {"on": jnp.ones((16,))}, None)
    assert int(metrics["skipped"]) == 0 and int(state.step) == 1


def nnx_loss(model, batch, rng):
    out = model(batch["x"])
    return (out**2).mean() + out.mean()


def nnx_pair(make, **options):
    model = Nnx(nnx.Rngs(0))
    options = {"wrt": nnx.Param} | options
    return model, nnx.Optimizer(model, make(LR), **options)


@pytest.mark.fast("adama")
@OPTIMIZERS
def test_nnx_is_updated_in_place(make):
    """As flax itself does it, micro-batch by micro-batch."""
    model, optimizer = nnx_pair(make)
    step = microbatch(nnx_loss, optimizer.tx, N)
    want, reference = nnx_pair(make)
    state = nnx.as_pure(reference.opt_state)
    losses = []
    for seed in range(2):
        metrics = step(model, optimizer, problem.batch(seed=seed), None)
        grads = []
        for b in problem.micro_batches(problem.batch(seed=seed), N):
            loss, g = nnx.value_and_grad(nnx_loss)(want, b, None)
            losses.append(loss)
            grads.append(nnx.as_pure(g))
        params = nnx.as_pure(nnx.state(want, nnx.Param))
        if make is adama:
            for g in grads:
                state = reference.tx.update(
                    g, state, params, phase="accumulate", micro_batches=N
                )[1]
            updates, state = reference.tx.update(params, state, params, phase="apply")
        else:
            mean = jax.tree.map(lambda *gs: sum(gs) / N, *grads)
            updates, state = reference.tx.update(mean, state, params)
        nnx.update(want, optax.apply_updates(params, updates))
    assert_close(metrics["loss"], np.mean(losses[N:]), rtol=NORM_RTOL)
    rest = nnx.Not(nnx.Param)
    assert_close(
        nnx.as_pure(nnx.state(model, nnx.BatchStat)),
        nnx.as_pure(nnx.state(want, nnx.BatchStat)),
        rtol=NORM_RTOL,
        atol=NORM_RTOL,
    )
    assert int(model.dropout.rngs.count[...]) == 2 * N
    assert jax.tree.structure(nnx.state(model, rest)) == jax.tree.structure(
        nnx.state(want, rest)
    )
    got = nnx.as_pure(nnx.state(model, nnx.Param))
    want = nnx.as_pure(nnx.state(want, nnx.Param))
    # Adam divides a gradient by its own size: LR times the relative error of what is
    # no rounding error alone (the bias before a norm has a gradient of none)
    del got["dense"]["bias"], want["dense"]["bias"]
    assert_close(got, want, rtol=0, atol=2 * LR * NORM_RTOL)
    assert int(optimizer.step[...]) == 2
    assert int(nnx.as_pure(optimizer.opt_state)[0].count) == 2


def test_nnx_goes_on_with_moments_in_codes():
    """nnx takes the fields of a moment apart after the first step."""
    make = functools.partial(adama, bits=LowBit(8, block=4, least_size=1))
    model, optimizer = nnx_pair(make)
    step = microbatch(nnx_loss, optimizer.tx, N)
    before = jax.tree.structure(nnx.state(optimizer))
    losses = [step(model, optimizer, BATCH, None)["loss"] for _ in range(2)]
    assert losses[1] != losses[0]
    assert jax.tree.structure(nnx.state(optimizer)) == before


def test_nnx_trains_the_parameters_of_the_optimizer_alone():
    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    model, optimizer = nnx_pair(adama, wrt=kernels)
    before = copy(nnx.as_pure(nnx.state(model, nnx.Param)))
    step = microbatch(
        lambda model, batch, rng: (nnx_loss(model, batch, rng), {"one": 1.0}),
        optimizer.tx,
        N,
        has_aux=True,
    )
    metrics = step(model, optimizer, BATCH, None)
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    assert float(metrics["one"]) == 1.0
    assert_same(after["norm"], before["norm"])
    assert_same(after["dense"]["bias"], before["dense"]["bias"])
    assert not np.allclose(after["dense"]["kernel"], before["dense"]["kernel"])


@pytest.mark.slow
def test_nnx_is_estimated_as_it_is():
    model, optimizer = nnx_pair(adama)
    step = microbatch(nnx_loss, optimizer.tx, N)
    report = jaxmem.estimate(step, model, optimizer, BATCH, None, target="cpu")
    # kernel 12, three vectors of 4 and their moments, two running statistics of 4
    assert report.alias_bytes >= (3 * (12 + 3 * 4) + 2 * 4) * 4
    assert step.plan is not None


def test_another_transformation_than_the_states():
    tx, other = adama(LR), adama(LR)
    state = TrainState.create(apply_fn=None, params=problem.params(), tx=tx)
    with pytest.raises(ValueError, match="TrainState's own"):
        microbatch(problem.loss, other, N)(state, BATCH, None)
    model, optimizer = nnx_pair(adama)
    with pytest.raises(ValueError, match="nnx.Optimizer's own"):
        microbatch(nnx_loss, tx, N)(model, optimizer, BATCH, None)


def test_bad_faces():
    tx = adama(LR)
    state = TrainState.create(apply_fn=None, params=problem.params(), tx=tx)
    with pytest.raises(ValueError, match="field batch_stats"):
        microbatch(linen_loss, tx, N, has_model_state=True)(state, BATCH, None)
    model, optimizer = nnx_pair(adama)
    tx = optimizer.tx
    with pytest.raises(ValueError, match="holds its own"):
        with_state = lambda model, state, *rest: nnx_loss(model, *rest)
        microbatch(with_state, tx, N, has_model_state=True)(model, optimizer, BATCH)
    with pytest.raises(TypeError, match="its nnx.Optimizer, got tuple"):
        microbatch(nnx_loss, tx, N)(model, nnx.as_pure(optimizer.opt_state), BATCH)


def test_a_model_that_grows_state():
    class Grows(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return self.dense(x)

    model = Grows(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adama(LR), wrt=nnx.Param)
    with pytest.raises(ValueError, match="'seen'.*nothing in"):
        microbatch(nnx_loss, optimizer.tx, N)(model, optimizer, BATCH)
