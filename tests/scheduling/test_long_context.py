"""The example of one sequence on several devices, and the models of its benchmark."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from benchmarks.models import pi0
from benchmarks.steps.long_context import AXIS, WRITTEN, step_of
from benchmarks.steps.published import Model
from tests.docs_code import DOCS
from tests.memory.test_estimate import needs_h100

pytestmark = pytest.mark.usefixtures("standard_jax")  # as users run it
SMALL = Model(2, 256, 512, 8, 8, 1024, norms=True)


@pytest.mark.slow
def test_the_example_trains_as_without_a_budget():
    example = runpy.run_path(str(DOCS.parent / "examples" / "long_context.py"))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((example["DEVICES"],), (example["AXIS"],), auto)
    step, args = example["make_step"](mesh), example["shapes"](mesh, example["TOKENS"])
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    scheduled = jaxmem.schedule(step, example["BUDGET"], **how)
    before = jaxmem.estimate(step, *args, donate_argnums=0).peak_bytes
    assert scheduled.plan(*args).scheduled.peak_bytes < before / 2
    losses = example["train"](scheduled, mesh)
    plain = example["train"](jax.jit(step, donate_argnums=0), mesh)
    np.testing.assert_allclose(losses, plain, rtol=1e-2)  # in bfloat16


@pytest.mark.slow
def test_all_ways_to_write_a_long_step_have_one_loss(monkeypatch):
    """Where cuDNN is not: the same attention by XLA."""
    attend = jax.nn.dot_product_attention
    plain = lambda *args, implementation, **how: attend(*args, **how)
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    mesh = jax.make_mesh((8,), (AXIS,), (jax.sharding.AxisType.Auto,))
    losses = []
    for code in WRITTEN.keys() - {"offload, chunks"}:
        for unrolled in (False, True):
            made = step_of(SMALL, mesh, 256, code, unrolled=unrolled)
            losses.append(jax.jit(made.step)(*map(_filled, made.args))[1])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-2)


def _filled(tree):
    """Arrays of these types: the same small numbers in each layer."""

    def fill(x):
        row = np.linspace(-0.1, 0.1, int(np.prod(x.shape[-2:])), dtype=np.float32)
        values = np.broadcast_to(row.reshape(x.shape[-2:]), x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(fill, tree)


@needs_h100
@pytest.mark.slow
def test_attention_lies_on_heads_and_all_else_on_tokens():
    mesh = jaxmem.target_mesh("h100", (8,), (AXIS,))
    made = step_of(SMALL, mesh, 8192)
    how = {"target": "h100", "donate_argnums": made.donate}
    plain = jaxmem.estimate(made.step, *made.args, **how)
    kinds = {c.kind for c in plain.collectives}
    assert "all-to-all" in kinds
    step = jaxmem.schedule(made.step, target="h100", donate_argnums=made.donate)
    found = step.plan(*made.args).scheduled
    assert found.peak_bytes < plain.peak_bytes
    assert found.sent_bytes <= plain.sent_bytes


@pytest.mark.parametrize("way", ["all", "adapters"])
def test_a_small_pi0_learns_a_batch(way):
    sizes, tx = {"layers": 1, "images": 1}, optax.sgd(1e-2)
    make = pi0.full_step if way == "all" else pi0.lora_step
    made = make(tx, 1, **sizes)
    shapes = jax.eval_shape(made.step, *made.args)
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(made.args[0])
    assert shapes[1].shape == ()
    if way == "adapters":  # nothing of the frozen transformers is in the state
        trained = made.args[0][0]
        assert {"language", "expert", "table"}.isdisjoint(trained[0])
