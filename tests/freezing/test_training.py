"""Steps that train a part: the same gradients, and nothing for the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import ops
from tests.freezing.problem import LAYERS, WIDTH, batch, loss, params

MASK = ["**/lora_*", "head/bias"]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want):
    """The same sums in another order: a few float32 roundings of numbers near one."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, want)


def only(tree, like):
    """The leaves of a whole tree where `like` has one."""
    gap = lambda x: x is None
    pick = lambda a, b: None if a is None else b
    return jax.tree.map(pick, like, tree, is_leaf=gap)


def test_merge_undoes_the_split():
    whole = params()
    trained, frozen = jaxmem.trainable(whole, MASK)
    assert_same(frozen.merge(trained), whole)
    assert len(jax.tree.leaves(trained)) == 3
    assert len(jax.tree.leaves(frozen)) == 5


def test_gradients_are_those_of_the_whole():
    trained, frozen = jaxmem.trainable(params(), MASK)
    got, grads = jax.jit(jaxmem.value_and_grad(loss))(trained, frozen, batch())
    whole = jax.jit(jax.value_and_grad(loss, allow_int=True))
    want, all_grads = whole(params(), batch())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_close(grads, only(all_grads, trained))


def test_has_aux_and_keywords():
    trained, frozen = jaxmem.trainable(params(), MASK)

    def with_aux(params, batch, *, scale):
        value = loss(params, batch)
        return scale * value, {"plain": value}

    run = jax.jit(jaxmem.value_and_grad(with_aux, has_aux=True))
    (value, aux), grads = run(trained, frozen, batch(), scale=2.0)
    assert value == 2 * aux["plain"]
    assert jax.tree.structure(grads) == jax.tree.structure(trained)


def masked_step(tx, whole, trained):
    """The same step by optax: zero gradients for the rest."""
    labels = only(jax.tree.map(lambda _: "train", whole), trained)
    gap = lambda x: x is None
    labels = jax.tree.map(lambda x: x or "freeze", labels, is_leaf=gap)
    return optax.multi_transform(
        {"train": tx, "freeze": optax.set_to_zero()}, labels
    )  # fmt: skip


def test_steps_are_those_of_optax_masks():
    tx = optax.adam(1e-2)
    whole = {k: v for k, v in params().items() if k != "codes"}
    full_loss = lambda p, b: loss({**p, "codes": params()["codes"]}, b)
    trained, frozen = jaxmem.trainable(whole, MASK)
    plain = masked_step(tx, whole, trained)

    @jax.jit
    def step(trained, state, frozen):
        _, grads = jaxmem.value_and_grad(full_loss)(trained, frozen, batch())
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    @jax.jit
    def whole_step(whole, state):
        grads = jax.grad(full_loss)(whole, batch())
        updates, state = plain.update(grads, state, whole)
        return optax.apply_updates(whole, updates), state

    state, plain_state = tx.init(trained), plain.init(whole)
    moments = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert moments == 2 * (LAYERS * 4 * WIDTH + 3)
    for _ in range(3):
        trained, state = step(trained, state, frozen)
        whole, plain_state = whole_step(whole, plain_state)
    assert_close(frozen.merge(trained), whole)


def test_donation_of_the_trained_part_alone():
    trained, frozen = jaxmem.trainable(params(), MASK)
    run = jaxmem.value_and_grad(loss)
    step = jax.jit(
        lambda trained, frozen: optax.apply_updates(
            trained, run(trained, frozen, batch())[1]
        ),
        donate_argnums=0,
    )
    given = jax.tree.leaves(trained)
    step(trained, frozen)
    assert all(x.is_deleted() for x in given)
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen))


def test_frozen_arrays_are_arguments_and_no_constants():
    trained, frozen = jaxmem.trainable(params(), MASK)
    traced = jax.jit(jaxmem.value_and_grad(loss)).trace(trained, frozen, batch())
    assert not traced.jaxpr.consts
    assert len(traced.jaxpr.in_avals) == 3 + 5 + 1


def test_in_a_scan_over_steps():
    trained, frozen = jaxmem.trainable(params(), MASK)
    run = jaxmem.value_and_grad(loss)

    def body(trained, x):
        value, grads = run(trained, frozen, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads), value

    batches = jnp.stack([batch()] * 3)
    got, losses = jax.jit(lambda t: jax.lax.scan(body, t, batches))(trained)
    want, one = trained, jax.jit(body)
    for x in batches:
        want, _ = one(want, x)
    assert_close(got, want)
    assert losses[0] > losses[2]


def test_under_microbatch():
    """The frozen part is a model state: carried on as it is."""

    def part_loss(trained, frozen, batch, rng):
        return loss(frozen.merge(trained), batch), frozen

    tx, n = optax.sgd(0.1), 4
    trained, frozen = jaxmem.trainable(params(), MASK)
    step = jaxmem.microbatch(part_loss, tx, n, has_model_state=True)
    got, _, carried, metrics = step(trained, tx.init(trained), frozen, batch(), None)
    assert_same(carried, jaxmem.trainable(params(), MASK).frozen)

    trained, frozen = jaxmem.trainable(params(), MASK)
    value, grads = jax.jit(jaxmem.value_and_grad(loss))(trained, frozen, batch())
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_close(got, jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads))

    tx = jaxmem.adama(1e-2)
    step = jaxmem.microbatch(part_loss, tx, n, has_model_state=True)
    state = jax.eval_shape(tx.init, trained)
    shapes = step.eval_shape(trained, state, frozen, batch(), None)
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(trained)


def test_under_schedule():
    tx = optax.adam(1e-2)
    trained, frozen = jaxmem.trainable(params(), MASK)

    def step(trained, state, frozen, batch):
        value, grads = jaxmem.value_and_grad(loss)(trained, frozen, batch)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, value

    want = jax.jit(step)(trained, tx.init(trained), frozen, batch())
    scheduled = jaxmem.schedule(step, donate_argnums=(0, 1))
    plan = scheduled.plan(trained, tx.init(trained), frozen, batch())
    assert plan.released_bytes == 4 * LAYERS * 4 * WIDTH  # the two stacks of LoRA
    assert_close(scheduled(trained, tx.init(trained), frozen, batch()), want)


# -- early layers frozen (side-tuning): nothing of them is kept


def deep(params, x, dense):
    """Layers that keep their input for the kernel's gradient, and their output."""
    for name in sorted(params):
        x = ops.tanh(dense(x, params[name]))
    return jnp.sum(x)


@pytest.mark.parametrize("frozen_layers", [0, 1, 3])
def test_nothing_is_kept_of_frozen_early_layers(frozen_layers):
    rows, width, layers = 32, 16, 4
    weights = {f"layer_{i}": jnp.eye(width) for i in range(layers)}
    late = [f"layer_{i}" for i in range(frozen_layers, layers)]
    trained, frozen = jaxmem.trainable(weights, late)
    run = lambda t, x: deep(frozen.merge(t), x, ops.dense)
    kept = jaxmem.residuals(run, trained, jnp.ones((rows, width)), argnums=0)
    # the inputs of the trained layers but that of the first layer, which is the
    # argument, and the last output; each is the output of the layer before
    arrays = (layers - frozen_layers) + (1 if frozen_layers else 0)
    assert kept.total_bytes == 4 * rows * width * arrays


def test_a_side_network_keeps_nothing_of_the_backbone():
    """A small network beside a frozen one, which it reads after every layer."""
    rows, width, side = 32, 16, 2
    weights = {
        "backbone": [jnp.eye(width) for _ in range(3)],
        "side": [jnp.ones((width, side)) for _ in range(3)],
    }

    def run(params, x):
        y = jnp.zeros((rows, side))
        for kernel, down in zip(params["backbone"], params["side"], strict=True):
            x = ops.tanh(ops.dense(x, kernel))
            y = ops.tanh(y + ops.dense(x, down))
        return jnp.sum(y)

    x = jnp.ones((rows, width))
    trained, frozen = jaxmem.trainable(weights, "side")
    kept = jaxmem.residuals(lambda t: run(frozen.merge(t), x), trained)
    # what the side network reads and writes; of the backbone no argument either
    assert kept.total_bytes == 3 * 4 * rows * (width + side)
    assert kept.argument_bytes == 0
    everything = jaxmem.residuals(lambda t: run(t, x), weights)
    assert everything.argument_bytes > 0


WAS = r"'{}' of shape \({}\), but an array of shape \({}\) was split off"

BAD_MERGES = [
    (lambda trained: {}, "'head/bias' is missing"),
    (lambda trained: params(), "'codes' is none of them"),
    (lambda trained: {**trained, "head": None}, "'head/bias' is missing"),
    (lambda trained: {**trained, "more": {}}, "split off"),
    (
        lambda trained: jax.tree.map(lambda x: x.T, trained),
        WAS.format("layers/up/lora_a", "2, 6, 3", "3, 6, 2"),
    ),
    (
        lambda trained: jax.tree.map(lambda x: x[..., :1], trained),
        WAS.format("head/bias", "1,", "3,"),
    ),
    (
        lambda trained: jax.tree.map(lambda x: x.ravel(), trained),
        WAS.format("layers/up/lora_a", "36,", "3, 6, 2"),
    ),
]


@pytest.mark.parametrize("change,message", BAD_MERGES)
def test_merge_of_something_else(change, message):
    trained, frozen = jaxmem.trainable(params(), MASK)
    with pytest.raises(ValueError, match=message):
        frozen.merge(change(trained))


def test_merge_in_the_body_of_a_map_over_both_parts():
    """Leading axes come and go, and of all arrays alike."""
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params())
    trained, frozen = jaxmem.trainable(stacked, MASK)
    ranks = jax.vmap(lambda t, f: jax.tree.map(jnp.ndim, f.merge(t)))(trained, frozen)
    assert jax.tree.map(lambda r: int(r[0]), ranks) == jax.tree.map(jnp.ndim, params())
    more = jax.tree.map(lambda x: x[None], (trained, frozen))
    merged = more[1].merge(more[0])
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(
        lambda x: (1, *x.shape), stacked
    )


def test_value_and_grad_without_the_frozen_part():
    trained, _ = jaxmem.trainable(params(), MASK)
    with pytest.raises(TypeError, match=r"\(params, frozen, \.\.\.\)"):
        jaxmem.value_and_grad(loss)(trained, batch())
