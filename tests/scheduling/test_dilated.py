"""The dilated inputs of convolutions, as XLA:GPU writes them."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling import predict
from jaxmem.scheduling.predict.dilated import with_dilated_inputs

S = jax.ShapeDtypeStruct
IMAGES, SIDE, WIDTH = 16, 16, 32
X = S((IMAGES, SIDE, SIDE, WIDTH), jnp.float32)
K = S((4, 4, WIDTH, 3), jnp.float32)
# 2 of padding on either side, and a zero between two elements
DILATED = 4 * IMAGES * WIDTH * (2 * SIDE - 1 + 4) ** 2


def up(x, k):
    """Twice as large images, of a product so that the input is not an argument."""
    return jax.lax.conv_transpose(
        jnp.sin(x @ x[0, 0, :WIDTH].T @ x[0, 0]), k, (2, 2), "SAME"
    )


def up_reversed(x, k):
    """The gradient of a convolution by its input, which cuDNN has."""
    return up(x, k[::-1, ::-1])


def predicted(fn):
    return predict(fn, X, K, target="h100").peak_bytes


def test_a_dilated_input_is_counted():
    assert predicted(up) - predicted(up_reversed) > DILATED / 2
    report = jaxmem.estimate(up, X, K, target="h100")
    assert report.peak_bytes > DILATED
    assert predicted(up) == pytest.approx(report.peak_bytes, rel=0.1)


def test_a_reversed_kernel_needs_none():
    report = jaxmem.estimate(up_reversed, X, K, target="h100")
    assert report.peak_bytes < DILATED
    assert predicted(up_reversed) == pytest.approx(report.peak_bytes, rel=0.1)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_the_values_stay(padding, strides):
    key = jax.random.key(0)
    x = jax.random.normal(key, (2, 5, 6, 3))
    k = jax.random.normal(key, (3, 4, 3, 2))

    def loss(x, k):
        y = jax.lax.conv_transpose(x, k, strides, padding)
        return jnp.square(y + jax.lax.conv_transpose(x, k, strides, padding)).sum()

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, k)
    written = with_dilated_inputs(closed, False)
    pads = [eqn for eqn in written.eqns if eqn.primitive.name == "pad"]
    assert len(pads) == 1  # one array for all that reads it
    found, wanted = (jaxprs.evaluate(c, [x, k]) for c in (written, closed))
    for new, old in zip(found, wanted, strict=True):
        # sums of some hundred terms, each rounded
        assert jnp.allclose(new, old, rtol=1e-4, atol=1e-4 * jnp.abs(old).max())


def test_nothing_changes_on_a_tpu_or_without_one():
    closed = jax.make_jaxpr(up)(X, K)
    assert with_dilated_inputs(closed, True) is closed
    plain = jax.make_jaxpr(jnp.sin)(X)
    assert with_dilated_inputs(plain, False) is plain
