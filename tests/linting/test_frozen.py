"""Gradients of what is not trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

SDS = jax.ShapeDtypeStruct
LAYERS, BATCH, WIDTH = 3, 8, 32
SQUARE = WIDTH * WIDTH * 4
X = SDS((BATCH, WIDTH), jnp.float32)
PARAMS = {"base": SDS((WIDTH, WIDTH), jnp.float32), "head": X.update(shape=(WIDTH, 16))}
STACK = {"base": SDS((LAYERS, WIDTH, WIDTH), jnp.float32), "head": PARAMS["head"]}


def loss(params, x):
    base = params["base"]
    for w in base if base.ndim == 3 else [base]:
        x = jnp.tanh(x @ w)
    return jnp.sum((x @ params["head"]) ** 2)


def scanned_loss(params, x):
    step = lambda x, w: (jnp.tanh(x @ w), None)
    y = jax.lax.scan(step, x, params["base"])[0]
    return jnp.sum((y @ params["head"]) ** 2)


def training(tx, change=lambda grads: grads, loss=loss):
    def step(params, state, x):
        grads = change(jax.grad(loss)(params, x))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def of(step, tx, params=PARAMS):
    state = jax.eval_shape(tx.init, params)
    return jaxmem.lint(step, params, state, X, donate_argnums=(0, 1)).of(
        "unused gradient"
    )


PARTED = optax.multi_transform(
    {"train": optax.adam(1e-3), "freeze": optax.set_to_zero()},
    {"base": "freeze", "head": "train"},
)
ADAM = optax.adam(1e-3)


def thrown_away(grads):
    return {**grads, "base": jnp.zeros_like(grads["base"])}


def times_zero(grads):
    return {**grads, "base": grads["base"] * 0.0}


def times_mask(grads):
    mask = {"base": np.zeros((), np.float32), "head": np.ones((), np.float32)}
    return jax.tree.map(jnp.multiply, grads, mask)


@pytest.mark.parametrize("change", [thrown_away, times_zero, times_mask])
def test_a_gradient_thrown_away_or_multiplied_by_zero(change):
    found = of(training(ADAM, change), ADAM)
    # the gradient of the base, and the cotangent that only it needs
    assert max(f.bytes for f in found) == SQUARE
    assert all(f.severity == "warning" and "(loss)" in f.where for f in found)


def test_set_to_zero():
    found = of(training(PARTED), PARTED)
    assert max(f.bytes for f in found) == SQUARE


@pytest.mark.parametrize("loss", [loss, scanned_loss])
def test_stacked_layers(loss):
    """The gradients of all layers count, a product of a scan for each iteration."""
    step = training(ADAM, thrown_away, loss)
    found = of(step, ADAM, STACK)
    assert sum(f.bytes for f in found) >= LAYERS * SQUARE


@pytest.mark.parametrize("params", [PARAMS, STACK], ids=["one", "stack"])
@pytest.mark.parametrize("loss", [loss, scanned_loss])
def test_what_is_trained_is_no_finding(params, loss):
    if params is PARAMS and loss is scanned_loss:
        pytest.skip("a scan needs a stack")
    assert not of(training(ADAM, loss=loss), ADAM, params)
    half = lambda grads: jax.tree.map(lambda g: g * 0.5, grads)
    assert not of(training(ADAM, half, loss), ADAM, params)


def test_a_jitted_update():
    change = jax.jit(times_zero)
    assert of(jax.jit(training(ADAM, change)), ADAM)
    assert not of(jax.jit(training(ADAM, jax.jit(lambda g: g))), ADAM)


def test_the_remedy_leaves_no_finding():
    trained, frozen = jaxmem.trainable(PARAMS, {"base": False, "head": True})
    tx = optax.adam(1e-3)

    def step(trained, state, frozen, x):
        grads = jax.grad(lambda t: loss(frozen.merge(t), x))(trained)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    state = jax.eval_shape(tx.init, trained)
    report = jaxmem.lint(step, trained, state, frozen, X, donate_argnums=(0, 1))
    assert not report.of("unused gradient")


def test_a_mask_that_is_an_argument_is_not_known():
    def step(params, mask, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g * mask, params, grads)

    mask = SDS((), jnp.float32)
    report = jaxmem.lint(step, PARAMS, mask, X, donate_argnums=0)
    assert not report.of("unused gradient")


def test_a_carry_that_only_later_turns_read():
    """The cotangent of a scan's carry is needed by the iteration before."""

    def step(params, x):
        return jax.grad(scanned_loss)(params, x)["base"]

    found = jaxmem.lint(step, STACK, X).of("unused gradient")
    # nothing but the head's gradient, thrown away
    assert [f.bytes for f in found] == [WIDTH * 16 * 4]
