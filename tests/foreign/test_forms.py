"""Single cases: a ViT of the usual size, and tunix in its own form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from benchmarks.models.foreign import (
    KEY,
    REAL,
    SMALL,
    build,
    cross_entropy,
    state,
    train_step,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.foreign,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("width", [384, 512])
def test_a_vit_of_usual_size_is_estimated_and_scheduled(width):
    """197 tokens, which no tile of the compiler's divides (head sizes 48 and 64)."""
    pytest.importorskip("transformers", reason="pip install '.[foreign]'")
    size = dataclasses.replace(REAL, width=width, dtype=jnp.bfloat16)
    assert (size.image, size.batch) == (224, 8)
    model = build("transformers", "vit", size)
    args = (jax.eval_shape(lambda: state(model)), model.batch, KEY)
    step = train_step(model.loss)
    plain = jax.jit(step, donate_argnums=0)
    plain = jaxmem.estimate(plain, *args, target="h100").temp_bytes
    step = jaxmem.schedule(step, target="h100", donate_argnums=0, progress=False)
    assert 0 < jaxmem.estimate(step, *args, target="h100").temp_bytes <= plain


def test_tunix_trains_in_its_own_form():
    """An `nnx.jit` step with nnx's optimizer, on a substituted Llama."""
    pytest.importorskip("tunix", reason="pip install '.[foreign]'")
    from benchmarks.models.foreign_tunix import FAMILIES

    family = FAMILIES["llama3"]
    batch = family.build(SMALL).batch
    given = (batch["tokens"], batch["positions"], None, batch["mask"])

    @nnx.jit
    def step(model, optimizer):
        def scored(model):
            return cross_entropy(model(*given)[0], batch["labels"])

        loss, grads = nnx.value_and_grad(scored)(model)
        optimizer.update(model, grads)
        return loss

    def losses(step, change=lambda model: model):
        model = change(family.make(SMALL))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return [float(step(model, optimizer)) for _ in range(3)]

    plain, scheduled = losses(step), jaxmem.schedule(step, donate_argnums=(0, 1))
    assert plain[2] < plain[1] < plain[0]
    allowed = 64 * np.finfo("f4").eps
    np.testing.assert_allclose(losses(scheduled), plain, rtol=allowed)
    lean = losses(scheduled, jaxmem.substitute)
    np.testing.assert_allclose(lean, plain, rtol=allowed)
