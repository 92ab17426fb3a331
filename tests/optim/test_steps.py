"""A mini-batch in two halves, for AdamA anywhere in a transformation."""

import functools
from collections import OrderedDict

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.optim import (
    AdamAState,
    accumulate_step,
    accumulates,
    adama,
    apply_step,
    scale_by_adama,
)
from tests.optim.reference import (
    adama_tree,
    assert_near,
    assert_same,
    at,
    gradients,
    tree,
)

PARAMS = tree()
N, STEPS = 4, 5
GRADS = gradients(N, steps=STEPS)
LABELS = {"w": "one", "b": "two"}


def linear(count):
    return 1e-2 / (1 + jnp.asarray(count, float))


@functools.partial(jax.jit, static_argnums=0)
def train(tx, params, grads):
    """(params, state) after all mini-batches, and the state before the last step."""
    state = tx.init(params)
    for step in range(STEPS):

        def micro(state, g):
            new = accumulate_step(tx, g, state, params, micro_batches=N)  # noqa: B023
            return new, None

        state, _ = jax.lax.scan(micro, state, at(grads, step))
        before = state
        updates, state = apply_step(tx, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, before


def chained(lr):
    """adama as a chain of optax's own."""
    return optax.chain(
        scale_by_adama(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(lr),
    )


def injected(lr):
    return optax.inject_hyperparams(adama)(lr, weight_decay=0.1)


def partitioned(lr):
    groups = {"one": adama(lr, weight_decay=0.1), "two": chained(lr)}
    return optax.partition(groups, LABELS)


def masked_twice(lr):
    mask = lambda name: {k: k == name for k in PARAMS}
    return optax.chain(
        *(optax.masked(adama(lr, weight_decay=0.1), mask(k)) for k in PARAMS)
    )


def named(lr):
    return optax.named_chain(
        ("z", scale_by_adama()),
        ("a", optax.add_decayed_weights(0.1)),
        ("m", optax.scale_by_learning_rate(lr)),
    )


@pytest.mark.fast("adama", "inject", "partition", "masked", "deep")
@pytest.mark.parametrize(
    "make",
    [
        lambda lr: adama(lr, weight_decay=0.1),
        chained,
        injected,
        partitioned,
        masked_twice,
        named,
        lambda lr: optax.chain(optax.identity(), chained(lr)),
        lambda lr: optax.with_extra_args_support(chained(lr)),
        lambda lr: optax.inject_hyperparams(chained)(lr),
    ],
    ids="adama chain inject partition masked named nested extra deep".split(),
)
def test_holds_wherever_adama_is(make):
    """The formulas, with a schedule that counts mini-batches."""
    params, state, _ = train(make(linear), PARAMS, GRADS)
    want = adama_tree(PARAMS, GRADS, lr=lambda t: 1e-2 / (1 + t), weight_decay=0.1)
    assert_near(params, want[0], 1e-6)
    assert accumulates(state)
    assert not accumulates(optax.adam(1e-3).init(PARAMS))


def test_injected_schedule_counts_mini_batches():
    _, state, _ = train(injected(linear), PARAMS, GRADS)
    assert int(state.count) == STEPS
    assert int(state.hyperparams_states["learning_rate"].count) == STEPS
    assert int(state.inner_state[0].count) == STEPS


def clipped_adam(max_norm, accumulate):
    """What clipping of each micro-batch before AdamA comes to."""
    clip = optax.clip_by_global_norm(max_norm)
    flat = lambda step, i: clip.update(at(GRADS, step, i), clip.init(PARAMS))[0]
    clipped = [[flat(s, i) for i in range(N)] for s in range(STEPS)]
    rows = [jax.tree.map(lambda *x: jnp.stack(x), *row) for row in clipped]
    return accumulate(PARAMS, jax.tree.map(lambda *x: jnp.stack(x), *rows))


@pytest.mark.slow
def test_what_stands_before_sees_micro_batches():
    average = optax.ema(0.5, debias=False)
    tx = optax.chain(optax.clip_by_global_norm(1.0), average, adama(1e-3))
    _, state, before = train(tx, PARAMS, GRADS)
    assert int(state[1].count) == N * STEPS
    assert_same(state[1], before[1])  # not by the zeros of the step
    both = optax.named_chain(("z", average), ("a", adama(1e-3)))
    _, state, before = train(both, PARAMS, GRADS)
    assert int(state["z"].count) == N * STEPS
    assert_same(state["z"], before["z"])
    params, *_ = train(
        optax.chain(optax.clip_by_global_norm(1.0), adama(1e-3)), PARAMS, GRADS
    )
    assert_near(params, clipped_adam(1.0, adama_tree)[0], 1e-6)


def test_what_stands_after_sees_steps():
    tx = optax.chain(scale_by_adama(), optax.trace(0.9), optax.scale(-1e-3))
    _, state, before = train(tx, PARAMS, GRADS)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    heads = (jax.tree.map(lambda g, t=t: g[:t], GRADS) for t in range(STEPS + 1))
    steps = [adama_tree(zeros, head, lr=1.0)[0]["w"] for head in heads]
    trace = 0.0
    for t in range(STEPS):
        trace = 0.9 * trace + (steps[t] - steps[t + 1])
    # v / (1 - 0.999**t) in float32 has lost three digits
    assert_near(state[1].trace["w"], trace, 1e-4)
    assert [int(x) for x in before[0][:2]] == [STEPS - 1, N]
    assert [int(x) for x in state[0][:2]] == [STEPS, 0]


def test_frozen_groups():
    groups = {"one": adama(1e-3), "two": optax.set_to_zero()}
    params, *_ = train(optax.partition(groups, LABELS), PARAMS, GRADS)
    assert_same(params["b"], PARAMS["b"])
    only = {"w": PARAMS["w"]}
    assert_near(params["w"], adama_tree(only, GRADS)[0]["w"], 1e-6)


def test_weight_keep_and_micro_batches_arrive():
    tx = optax.inject_hyperparams(chained)(1e-3)
    state = tx.init(PARAMS)
    bad = jax.tree.map(lambda g: g * jnp.nan, at(GRADS, 0, 0))
    go = functools.partial(accumulate_step, tx, params=PARAMS, micro_batches=N)
    skipped = go(bad, state, keep=jnp.bool_(False)).inner_state[0]
    assert not any(x.any() for x in jax.tree.leaves((skipped.mu, skipped.nu)))
    assert [int(x) for x in skipped[:3]] == [0, 1, N]
    weighed = go(at(GRADS, 0, 0), state, weight=0.5).inner_state[0]
    half = jax.tree.map(lambda g: 0.1 * 0.5 * g, at(GRADS, 0, 0))
    assert_near(weighed.mu, half, 1e-6)


def test_under_jit_state_keeps_its_types():
    tx = optax.chain(optax.clip_by_global_norm(1.0), injected(linear))
    state = tx.init(PARAMS)
    new = accumulate_step(tx, at(GRADS, 0, 0), state, PARAMS, micro_batches=N)
    kinds = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), x.dtype), tree)
    assert kinds(new) == kinds(state)
    assert kinds(apply_step(tx, new, PARAMS)[1]) == kinds(state)


@pytest.mark.parametrize(
    ("tx", "text"),
    [
        (
            optax.partition({"one": adama(1e-3), "two": optax.sgd(1e-3)}, LABELS),
            r"gradients of \['b'\] .* without AdamA: \['two'\]",
        ),
        (
            optax.partition({"one": optax.adam(1e-3), "two": adama(1e-3)}, LABELS),
            r"gradients of \['w'\] .* without AdamA: \['one'\]",
        ),
        (
            optax.masked(adama(1e-3), {"w": True, "b": False}),
            r"gradients of \['b'\]",
        ),
        (optax.apply_if_finite(adama(1e-3), 3), "apply_if_finite: pass keep="),
        (
            optax.GradientTransformation(
                adama(1e-3, micro_batches=2).init,
                lambda g, s, p=None: adama(1e-3, micro_batches=2).update(g, s, p),
            ),
            "does not pass extra arguments",
        ),
        (
            optax.chain(
                optax.masked(adama(1e-3), {"w": True, "b": False}),
                optax.ema(0.9),
                optax.masked(adama(1e-3), {"w": False, "b": True}),
            ),
            "entry 1 of a chain has a state and stands between two",
        ),
        (optax.adam(1e-3), "holds no AdamAState"),
    ],
    ids="sgd adam masked finite wrapper between none".split(),
)
def test_what_cannot_be_accumulated(tx, text):
    state = tx.init(PARAMS)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match=text),
    ):
        accumulate_step(tx, at(GRADS, 0, 0), state, PARAMS, micro_batches=N)


def test_apply_step_needs_adama():
    tx = optax.sgd(1e-3)
    with pytest.raises(ValueError, match="holds no AdamAState"):
        apply_step(tx, tx.init(PARAMS), PARAMS)


def test_named_chain_state_is_an_ordered_dict():
    """The type by which a named chain is told from parallel groups."""
    state = named(1e-3).init(PARAMS)
    assert type(state) is OrderedDict and isinstance(state["z"], AdamAState)
    assert type(jax.tree.map(lambda x: x, state)) is OrderedDict
    assert type(optax.chain(optax.identity()).init(PARAMS)) is tuple
