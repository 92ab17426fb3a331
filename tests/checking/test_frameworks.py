"""Steps of all frameworks, in the form that their users write."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from tests.frameworks.forms import FORMS, MAIN, NNX, losses, mean_square

BF16 = jnp.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:no argument is donated")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_step_of_a_framework(form):
    args = form.make()
    report = jaxmem.check(jaxmem.schedule(form.step), form.step, *args, steps=2)
    assert report and len(report.leaves) >= 4 and report.steps == 2, str(report)
    # the user's own state is what it was
    kept = form._replace(make=lambda: args)
    assert losses(form.jitted, kept) == losses(form.jitted, form)


@pytest.mark.parametrize("form", [FORMS[kind] for kind in MAIN], ids=MAIN)
def test_a_wrong_step_of_a_framework(form):
    def wrong(*args):
        return form.step(*args[:-1], 1.001 * args[-1])

    report = jaxmem.check(wrong, form.step, *form.make(), steps=1)
    assert not report and len(report.different) >= 4


def test_verify_of_an_nnx_step():
    step = jaxmem.schedule(NNX.step, donate_argnums=(0, 1), verify=True)
    assert losses(step, NNX) == losses(NNX.jitted, NNX)


def test_the_first_module_of_an_nnx_model():
    def wrong_loss(model, x):
        for i, layer in enumerate(model.layers):
            x = x + (1.01 if i else 1.0) * jnp.tanh(layer(x))
        return mean_square(x)

    def wrong(model, optimizer, x):
        loss, grads = nnx.value_and_grad(wrong_loss)(model, x)
        optimizer.update(model, grads)
        return loss

    report = jaxmem.check(wrong, NNX.step, *NNX.make(), steps=1)
    names = [leaf.name for leaf in report.different]
    assert any("layers[1].kernel" in name for name in names), names
    assert report.module == "", report.module  # the factor is in no module of its own
    assert np.isfinite([leaf.ratio for leaf in report.leaves]).all()


class Residual(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + dense(32)(nn.gelu(dense(64)(h)))


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_a_substituted_model_agrees(dtype):
    def gradient(model):
        mean = lambda p, x: jnp.mean(model.apply(p, x).astype(jnp.float32) ** 2)
        return jax.value_and_grad(mean)

    x = jax.random.normal(jax.random.key(0), (4, 32, 32)).astype(dtype)
    model = Residual(dtype)
    params = model.init(jax.random.key(1), x)
    lean = gradient(jaxmem.substitute(model))
    report = jaxmem.check(lean, gradient(model), params, x, carry=())
    assert report and any(leaf.largest > 0 for leaf in report.leaves), str(report)
