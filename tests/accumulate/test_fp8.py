"""Flax's fp8 layers: scales and histories that their gradient overwrites.

Held to a loop by hand, one micro-batch after another, and for one micro-batch to
`TrainState.apply_gradients`. Both sides do the same operations in the same order, so
that no number is rounded to another code of eight bits.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

from jaxmem.accumulate import microbatch
from jaxmem.nn.nnx import SampledDense
from jaxmem.optim import accumulate_step, adama, apply_step
from tests.accumulate.problem import LR, assert_close, assert_same, micro_batches

KEY = fp8_ops.OVERWRITE_WITH_GRADIENT
WIDTH, HISTORY = 8, 4


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        product = lambda: fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=HISTORY)
        return nn.Dense(WIDTH, dot_general_cls=product)(x)


# examples of growing size, so that each micro-batch has another largest magnitude
BATCH = jax.random.normal(jax.random.key(0), (8, WIDTH)) * jnp.arange(1.0, 9.0)[:, None]
PARAMS = Model().init(jax.random.key(1), BATCH)


def loss(params, batch, rng):
    return (Model().apply(params, batch) ** 2).mean()


gradient = jax.jit(jax.grad(loss))


def by_hand(tx, batches):
    """(params, what each micro-batch gives), with AdamA."""
    params, over = PARAMS["params"], PARAMS[KEY]
    state = tx.init(params)
    for batch in batches:
        grads = gradient({"params": params, KEY: over}, batch, None)
        n = len(batches)
        state = accumulate_step(tx, grads["params"], state, params, micro_batches=n)
        over = grads[KEY]
    updates, _ = apply_step(tx, state, params)
    return {"params": optax.apply_updates(params, updates), KEY: over}


def run(tx, n, batch=BATCH, params=PARAMS, **options):
    step = microbatch(loss, tx, n, donate=False, **options)
    return step(params, tx.init(params["params"]), batch, None)


def history(params, count):
    """The last so many magnitudes of the input, in their order."""
    layer = params[KEY]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    return np.roll(np.asarray(layer["input_amax_history"]), -1)[-count:]


@pytest.mark.fast("1", "4")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_equals_a_loop_by_hand(n):
    tx, parts = adama(LR), micro_batches(BATCH, n)
    got, _, _ = run(tx, n)
    want = by_hand(tx, parts)
    assert_same(got[KEY], want[KEY])
    assert_close(got["params"], want["params"])
    largest = [float(jnp.abs(part).max()) for part in parts]
    assert_same(history(got, n), np.float32(largest))


@pytest.mark.fast("adama")
@pytest.mark.parametrize("make", [adama, optax.adam], ids=["adama", "adam"])
def test_one_micro_batch_is_a_step_of_the_train_state(make):
    tx = make(LR)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    want, got, plain = state, state, (PARAMS, tx.init(PARAMS["params"]))
    step = microbatch(loss, tx, 1, donate=False)
    by_flax = lambda s, b: s.apply_gradients(grads=gradient(s.params, b, None))
    for i in range(2):
        batch = BATCH * (i + 1)
        want = jax.jit(by_flax)(want, batch)
        got, _ = step(got, batch, None)
        plain = step(*plain, batch, None)[:2]
    assert_same(got.params[KEY], want.params[KEY])
    assert_close(got.params["params"], want.params["params"])
    assert_same(plain, (got.params, got.opt_state))
    assert int(got.step) == 2


def test_summed_gradients():
    """Of an optimizer without AdamA; the state goes the same way."""
    got, _, _ = run(optax.sgd(LR), 2)
    over, total = PARAMS[KEY], []
    for batch in micro_batches(BATCH, 2):
        grads = gradient({"params": PARAMS["params"], KEY: over}, batch, None)
        over, total = grads[KEY], [*total, grads["params"]]
    moved = lambda p, a, b: p - LR * (a + b) / 2
    assert_same(got[KEY], over)
    assert_close(got["params"], jax.tree.map(moved, PARAMS["params"], *total))


@pytest.mark.parametrize("skip", ["loss", "gradients"])
def test_a_micro_batch_left_out_leaves_no_trace(skip):
    # in the second of two; an infinity is clipped, and shows in the state alone
    bad = BATCH.at[1].set(jnp.inf if skip == "gradients" else jnp.nan)
    got, _, metrics = run(adama(LR), 2, bad, skip_nonfinite=skip)
    assert int(metrics["skipped"]) == 1
    first = gradient(PARAMS, micro_batches(BATCH, 2)[0], None)
    assert_same(got[KEY], first[KEY])


def test_over_devices_the_largest_is_taken():
    """As if each micro-batch had been that of all devices, what magnitudes go."""
    tx = adama(LR, axis_name="data")
    step = microbatch(loss, tx, 2, axis_name="data", donate=False)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    specs = jax.P(), jax.P(), jax.P("data"), jax.P()
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P()))
    got, _, _ = step(PARAMS, tx.init(PARAMS["params"]), BATCH, None)
    halves = [micro_batches(half, 2) for half in (BATCH[:4], BATCH[4:])]
    largest = [max(float(jnp.abs(h[i]).max()) for h in halves) for i in range(2)]
    assert_same(history(got, 2), np.float32(largest))


def test_frozen_dicts_stay_so():
    got, _, _ = run(adama(LR), 2, params=freeze(PARAMS))
    assert_same(got, freeze(run(adama(LR), 2)[0]))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({**PARAMS, "batch_stats": {}}, "batch_stats.*nothing else"),
        ({KEY: PARAMS[KEY]}, "they need 'params'"),
        ({"a": PARAMS, "b": {"w": jnp.ones(2)}}, rf"params\['a'\]\['{KEY}'\].*root"),
    ],
)
def test_trees_that_are_not_understood(params, text):
    tx = optax.sgd(LR)
    with pytest.raises(ValueError, match=text):
        microbatch(loss, tx, 2)(params, tx.init(params), BATCH, None)


def test_a_state_for_all_of_the_parameters():
    tx = adama(LR)
    with pytest.raises(TypeError, match=r"tx\.init\(params\['params'\]\)"):
        microbatch(loss, tx, 2)(PARAMS, tx.init(PARAMS), BATCH, None)


def test_nnx_has_nothing_for_a_cache_of_norms():
    """Its gradient would be its next value; `nnx.Optimizer` leaves it alone."""
    model = SampledDense(5, 3, norm_cache=(4, 2), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = microbatch(lambda m, x, key: jnp.mean(m(x) ** 2), optimizer.tx, 2)
    with pytest.raises(ValueError, match="norm_cache is of 'NormCache'"):
        step(model, optimizer, jnp.ones((8, 2, 5)), jax.random.key(0))


def test_nnx_has_nothing_for_it():
    model = nnx.bridge.ToNNX(Model(), rngs=nnx.Rngs(0))
    model = nnx.bridge.lazy_init(model, BATCH)
    optimizer = nnx.Optimizer(model, adama(LR), wrt=nnx.Param)
    step = microbatch(lambda model, batch, rng: model(batch).sum(), optimizer.tx, 2)
    with pytest.raises(ValueError, match=f"Dense_0.* is of '{KEY}'.*TrainState"):
        step(model, optimizer, BATCH, None)
