"""Stacks of loops that XLA fills with zeros before the loop writes them."""

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.memory.time.fills import OPTION
from tests.memory.test_estimate import needs_h100

W = jax.ShapeDtypeStruct((24, 1024, 1024), jnp.float32)
X = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def _scanned(w, x):
    layers = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.sum(jax.lax.scan(layers, x, w)[0] ** 2)


def _note(report):
    return [note for note in report.time.notes if OPTION in note]


@needs_h100
def test_a_report_says_what_filling_them_takes_and_the_option_spares_it():
    step = jax.grad(_scanned)
    report = jaxmem.estimate(step, W, X, target="h100")
    (note,) = _note(report)
    ms = float(note.split()[0])
    # gradients of 24 layers, and two residuals of each, or three: that is XLA's choice
    least, most = (4 * (W.size + n * 24 * X.size) / 3.35e12 for n in (2, 3))
    assert least < ms * 1e-3 < 1.2 * most
    spared = jaxmem.estimate(step, W, X, target="h100", compiler_options={OPTION: True})
    assert not _note(spared)
    assert report.seconds - spared.seconds > 0.7 * ms * 1e-3
    assert spared.temp_bytes <= 1.05 * report.temp_bytes


@needs_h100
def test_unrolled_layers_have_none():
    def loss(w, x):
        for i in range(4):
            x = jnp.tanh(x @ w[i])
        return jnp.sum(x**2)

    assert not _note(jaxmem.estimate(jax.grad(loss), W, X, target="h100"))
