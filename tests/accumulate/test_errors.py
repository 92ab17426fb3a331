"""Bad input: an error at the call that says what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.accumulate import microbatch
from jaxmem.optim import adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, copy

PARAMS = problem.params()
BATCH = problem.batch()


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((None, optax.sgd(LR), 2), {}, "loss_fn=None: a function"),
        ((problem.loss, LR, 2), {}, "tx=0.01: an optax"),
        ((problem.loss, optax.sgd(LR), 0), {}, "n=0"),
        ((problem.loss, optax.sgd(LR), 2.0), {}, "n=2.0"),
        ((problem.loss, optax.sgd(LR), True), {}, "n=True"),
        ((problem.loss, optax.sgd(LR), 2), {"skip_nonfinite": "nan"}, "skip_nonfinite"),
        ((problem.loss, optax.sgd(LR), 2), {"remat": "dots"}, "remat='dots'"),
        ((problem.loss, optax.sgd(LR), 2), {"weight_fn": 1.0}, "weight_fn=1.0"),
        ((problem.loss, optax.sgd(LR), 2), {"clip": 1.0}, "clip=1.0"),
        ((problem.loss, optax.sgd(LR), 2), {"donate": (0, 1)}, "donate="),
        (
            (problem.loss, optax.sgd(LR), 2),
            {"accumulator_dtype": int},
            "a floating or complex dtype",
        ),
        ((problem.loss, optax.sgd(LR), 2), {"axis": 1}, "axis"),
    ],
)
def test_options(args, options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        microbatch(*args, **options)


@pytest.mark.parametrize(
    ("loss", "how", "text"),
    [
        (
            lambda model, batch: 0.0,
            {},
            r"loss_fn\(model, batch\): .*params, batch, rng",
        ),
        (lambda batch: 0.0, {}, r"loss_fn\(batch\): .*params, batch, rng"),
        (lambda p, s, batch, rng: 0.0, {}, r"missing a required argument: 'rng'"),
        (problem.loss, {"has_model_state": True}, "params, model_state, batch, rng"),
    ],
)
def test_a_loss_that_cannot_be_called_as_one(loss, how, text):
    with pytest.raises(TypeError, match=text):
        microbatch(loss, optax.sgd(LR), 2, **how)


def test_a_loss_may_take_what_it_is_given_in_any_form():
    for loss in (lambda *args: 0.0, lambda params, batch, rng=None: 0.0, jnp.sum):
        microbatch(loss, optax.sgd(LR), 2)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), np.float32("inf")])
def test_a_weight_that_is_known_and_is_none(weight):
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 2, weight_fn=lambda batch: weight)
    with pytest.raises(ValueError, match=r"weight_fn\(batch\)=.*at least 0"):
        step(PARAMS, tx.init(PARAMS), BATCH, None)


@pytest.mark.fast("tx0--1.0", "tx0-nan", "tx1-inf")
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("tx", [adama(LR), optax.sgd(LR, momentum=0.9)])
def test_with_a_weight_that_turns_out_to_be_none_nothing_is_updated(tx, weight):
    """It is the value of an array: the loss is NaN, and tells."""
    x = BATCH | {"w": jnp.ones(16).at[0].set(weight)}
    loss = lambda params, batch, rng: problem.loss(
        params, {k: v for k, v in batch.items() if k != "w"}, rng
    )
    step = microbatch(loss, tx, 2, weight_fn=lambda b: b["w"][0], donate=False)
    state = tx.init(PARAMS)
    params, new_state, metrics = step(PARAMS, state, x, None)
    assert jnp.isnan(metrics["loss"])
    for before, after in ((PARAMS, params), (state, new_state)):
        jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("tx", [adama(LR), optax.sgd(LR, momentum=0.9)])
def test_a_state_of_parameters_of_other_shapes(tx):
    other = jax.tree.map(lambda x: jnp.ones((*x.shape, 2)), PARAMS)
    step = microbatch(problem.loss, tx, 2)
    with pytest.raises(ValueError, match=r"opt_state.*=float32.*tx\.init\(params\)"):
        step(PARAMS, tx.init(other), BATCH, None)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (problem.batch(15), r"n=2 .* batch\['x'\]: it has 15 examples"),
        (problem.batch(0), "0 examples"),
        (BATCH | {"y": jnp.ones((8,))}, r"batch\['x'\] has 16 .* batch\['y'\] has 8"),
        (BATCH | {"y": jnp.float32(1)}, r"batch\['y'\] is a scalar"),
        ({}, "no arrays"),
    ],
)
def test_batches(batch, text):
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 2)
    with pytest.raises(ValueError, match=text):
        step(PARAMS, tx.init(PARAMS), batch, None)


def returns(out):
    return lambda params, batch, rng: out(problem.loss(params, batch, rng))


@pytest.mark.parametrize(
    ("out", "options", "text"),
    [
        (lambda x: x[None], {}, r"floating scalar.*float32\[1\]"),
        (lambda x: x.astype(jnp.int32), {}, r"floating scalar.*int32\[\]"),
        (lambda x: (x, {}), {}, "a tuple of 2: a loss alone"),
        (lambda x: {"loss": x}, {}, "a scalar loss, got a dict"),
        (lambda x: x, {"has_aux": True}, r"must return \(loss, aux\)"),
        (lambda x: (x, 1, 2), {"has_aux": True}, r"\(loss, aux\), got a tuple of 3"),
        (lambda x: (x, {"loss": x}), {"has_aux": True}, r"\['loss'\]"),
        (lambda x: x, {"weight_fn": lambda b: b["x"].sum(0)}, "must return a scalar"),
    ],
)
def test_what_the_loss_function_returns(out, options, text):
    tx = adama(LR)
    step = microbatch(returns(out), tx, 2, **options)
    with pytest.raises((ValueError, TypeError), match=text):
        step(PARAMS, tx.init(PARAMS), BATCH, None)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (lambda x, s: x, r"\(loss, model_state\), got"),
        (lambda x, s: (x, {"a": s["a"]}), r"\['b'\]: float32\[2\] in, nothing out"),
        (
            lambda x, s: (x, s | {"a": s["b"]}),
            r"\['a'\]: .*int32\[\].* float32\[2\] out",
        ),
        (lambda x, s: (x, [*s.values()]), "structure"),
    ],
)
def test_what_becomes_of_the_model_state(out, text):
    def loss(params, state, batch, rng):
        return out(problem.loss(params, batch, rng), state)

    tx = adama(LR)
    step = microbatch(loss, tx, 2, has_model_state=True)
    state = {"a": jnp.int32(0), "b": jnp.ones((2,))}
    with pytest.raises((ValueError, TypeError), match=text):
        step(PARAMS, tx.init(PARAMS), state, BATCH, None)


@pytest.mark.parametrize(
    "rng", [0, 1.0, jnp.zeros((2,)), jax.random.split(jax.random.key(0))]
)
def test_no_key(rng):
    tx = adama(LR)
    with pytest.raises((TypeError, ValueError), match="rng=.*is not a key"):
        microbatch(problem.loss, tx, 2)(PARAMS, tx.init(PARAMS), BATCH, rng)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "takes params"),
        ((PARAMS,), "missing a required argument: 'opt_state'"),
        ((PARAMS, {}), "missing a required argument: 'batch'"),
        ((PARAMS, {}, {}, BATCH, None), "opt_state, batch, rng=None.*too many"),
    ],
)
def test_the_number_of_arguments(args, text):
    with pytest.raises(TypeError, match=text):
        microbatch(problem.loss, adama(LR), 2)(*args)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)]
)
def test_a_state_of_another_n(wrap):
    tx = wrap(adama(LR))
    first, other = (microbatch(problem.loss, tx, n) for n in (4, 2))
    params, state, _ = first(copy(PARAMS), tx.init(PARAMS), BATCH, None)
    with pytest.raises(ValueError, match="n=2, but .* mini-batches of 4"):
        other(params, state, BATCH, None)
    restored = jax.tree.map(np.asarray, state)
    with pytest.raises(ValueError, match="n=2, but .* mini-batches of 4"):
        other(params, restored, BATCH, None)
    first(params, restored, BATCH, None)


def test_a_fresh_state_has_no_n_yet():
    tx = adama(LR, micro_batches=8)
    microbatch(problem.loss, tx, 2)(copy(PARAMS), tx.init(PARAMS), BATCH, None)


def test_a_state_in_the_middle_of_a_mini_batch():
    tx = adama(LR, micro_batches=4)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="middle of a mini-batch: 1 micro-batches"):
        microbatch(problem.loss, tx, 4)(PARAMS, state, BATCH, None)


def test_no_accumulator_to_have_a_dtype():
    tx = adama(LR)
    step = microbatch(problem.loss, tx, 2, accumulator_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="AdamA has no accumulator"):
        step(PARAMS, tx.init(PARAMS), BATCH, None)


def test_a_gradient_that_no_adama_takes_in():
    tx = optax.partition({"a": adama(LR), "s": optax.sgd(LR)}, {"b": "s", "w": "a"})
    with pytest.raises(ValueError, match="lost"):
        microbatch(problem.loss, tx, 2)(PARAMS, tx.init(PARAMS), BATCH, None)
