"""Donation that did not happen, was not asked for, or was asked for twice."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem

SDS = jax.ShapeDtypeStruct
W = SDS((64, 64), jnp.float32)
BYTES = 64 * 64 * 4


def sgd(params, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_an_updated_argument_that_is_not_donated():
    (found,) = jaxmem.lint(sgd, {"w": W}, W).of("not donated")
    assert found.bytes == BYTES and found.where == "params['w']"
    assert not jaxmem.lint(sgd, {"w": W}, W, donate_argnums=0).findings


def test_a_jitted_step_brings_its_donation_along():
    step = jax.jit(sgd, donate_argnums=0)
    assert not jaxmem.lint(step, {"w": W}, W).findings
    by_name = jax.jit(sgd, donate_argnames="params")
    assert not jaxmem.lint(by_name, params={"w": W}, x=W).findings


@pytest.mark.parametrize("target", [None, "cpu"])
def test_a_donation_that_is_not_used(target):
    def step(x, y, z):
        return x + jnp.sum(z)

    found = jaxmem.lint(
        step, W, W, W.update(shape=(64, 32)), donate_argnums=(0, 1, 2), target=target
    ).of("donation not used")
    reasons = {f.where: f.what for f in found}
    assert set(reasons) == {"y", "z"}
    assert "does not read it" in reasons["y"] and "no output has" in reasons["z"]
    assert [f.bytes for f in found] == [BYTES, BYTES // 2]


@pytest.mark.parametrize("target", [None, "cpu"])
def test_more_donated_than_returned(target):
    step = lambda x, y: x + y
    (found,) = jaxmem.lint(step, W, W, donate_argnums=(0, 1), target=target).of(
        "donation not used"
    )
    assert "another buffer" in found.what and found.bytes == BYTES


def test_one_buffer_donated_twice():
    x = jnp.zeros((64, 64))
    step = lambda a, b, c: (a + c, b - c)
    with pytest.raises(RuntimeError, match="same buffer twice"):
        jax.block_until_ready(jax.jit(step, donate_argnums=(0, 1))(x, x, x + 1))
    x = jnp.zeros((64, 64))
    (found,) = jaxmem.lint(step, x, x, x + 1, donate_argnums=(0, 1)).of("donated twice")
    assert found.where == "a, b" and found.severity == "error"
    report = jaxmem.lint(step, x, x, x + 1, donate_argnums=0)
    assert not report.of("donated twice") and len(report.of("donated and read")) == 1
    copies = x, jnp.copy(x), x + 1
    assert not jaxmem.lint(step, *copies, donate_argnums=(0, 1)).of("donated twice")


def test_shapes_are_no_buffers():
    step = lambda a, b: (a + 1, b + 1)
    assert not jaxmem.lint(step, W, W, donate_argnums=(0, 1)).findings


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: jnp.sum(p["w"] ** 2 * x),
        lambda p, x: jnp.sum(jnp.tanh(x * p["w"])),
        lambda p, x: jnp.sum(
            jaxmem.ops.layer_norm(x, p["w"][0], p["w"][1], save="output") ** 2
        ),
    ],
)
def test_a_gradient_is_no_updated_value(loss):
    """Also where it is elementwise in the parameter that it is the gradient of."""
    step = jax.value_and_grad(loss)
    params = {"w": W.update(shape=(64, 512))}
    x = SDS((64, 512), jnp.float32)
    assert not jaxmem.lint(step, params, x).of("not donated")

    def trains(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params, x)[1])

    assert jaxmem.lint(trains, params, x).of("not donated")
