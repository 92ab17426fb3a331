"""LoRA over weights that qwix quantised: losses, residuals, compiled bytes, the table.

They need the extra `foreign`. `python -m benchmarks.quantized_base` makes the table.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from benchmarks.models.foreign import KEY, SMALL, train_step
from tests.foreign import checks

pytest.importorskip("qwix")
pytest.importorskip("tunix")
base = pytest.importorskip("benchmarks.quantized_base")
foreign_lora = pytest.importorskip("benchmarks.models.foreign_lora")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.foreign,
    # these libraries use names of jax and flax that newer versions deprecate
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MAKERS = {
    "linen": base.linen,
    **{
        family: functools.partial(base.tunix, family=base.FAMILIES[family])
        for family in ("llama3", "gemma", "gemma3")
    },
}
STEPS = 4
kinds = pytest.mark.parametrize("kind", ["int8", "NF4"])
models = pytest.mark.parametrize("name", MAKERS)


@functools.cache
def problem(name, kind):
    """A small one, with values."""
    return MAKERS[name](kind, SMALL, abstract=False, rank=4, tile_size=8)


def losses(made, variant):
    """Of some steps of a variant."""
    loss, (params, frozen) = made.of(variant)
    step = base.step_of(loss)
    wrap = jaxmem.schedule if variant in ("scheduled", "both") else jax.jit
    run = wrap(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    moments, found = base.OPTIMIZER.init(params), []
    for _ in range(STEPS):
        params, moments, value = run(params, moments, frozen, made.batch)
        found.append(float(value))
    return found


@models
@kinds
def test_the_losses_are_those_of_the_plain_step(name, kind):
    """To rounding: Adam takes a step of 1e-3 whatever the gradient's size."""
    made = problem(name, kind)
    want = losses(made, "plain")
    assert want[-1] < want[0]
    for variant in base.VARIANTS[1:]:
        np.testing.assert_allclose(losses(made, variant), want, rtol=1e-4)


@models
@kinds
def test_no_wide_weight_is_kept(name, kind):
    made = problem(name, kind)
    assert base.wide_bytes(made, "plain") > 0
    assert base.wide_bytes(made, "substituted") == 0


@models
@kinds
def test_the_table_counts_the_base(name, kind):
    split = problem(name, kind).split
    sizes = split.sizes
    assert all("lora" in path for path in sizes.trained)
    assert sizes.quantized and sizes.quantized_parameters > sizes.trained_parameters
    assert f"quantized: {sizes.quantized} arrays" in str(split)


@kinds
def test_a_mask_of_everything_leaves_the_scales(kind):
    params = problem("linen", kind).split.frozen.params
    part = jaxmem.trainable(params, True)
    assert not any("/array/" in path for path in part.sizes.trained)


@kinds
def test_the_adapters_of_a_published_size_are_a_model_like_others(kind):
    """As `benchmarks.foreign_batches` takes it: the base comes back as it was."""
    model = foreign_lora.build(kind, SMALL, base.LLAMA, rank=4, tile_size=8)
    params, frozen, _ = held = checks.shapes(model)
    checks.substituted_keeps_less(model)
    for loss in (model.loss, model.lean):
        step = train_step(loss)
        (new, same, _), value = jax.eval_shape(step, held, model.batch, KEY)
        assert value.shape == ()
        assert checks.alike(new, params) and checks.alike(same, frozen)


SIZE = replace(base.WIDTHS, layers=2)


@functools.cache
def temporaries(kind, variant):
    """Of a step for an H100."""
    made = base.tunix(kind, SIZE)
    step = base.wrapped(variant, made.of(variant)[0])
    args = base.arguments(made, variant)
    return jaxmem.estimate(step, *args, target=base.TARGET).temp_bytes


@kinds
def test_compiled_bytes(kind):
    """Few bits cost one wide weight at most, where the plain step has several."""
    weight = SIZE.width * 4 * SIZE.width * 4  # of the MLP, float32
    for variant in base.VARIANTS:
        more = temporaries(kind, variant) - temporaries("not quantized", variant)
        assert (more > weight) == (variant == "plain")


def test_a_budget_is_kept():
    """Two thirds of what the plain step takes, as compiled."""
    made = base.tunix("NF4", SIZE)
    args, step = base.arguments(made, "plain"), base.step_of(made.loss)
    options = {"donate_argnums": (0, 1), "target": base.TARGET}
    plain = jaxmem.estimate(jax.jit(step, donate_argnums=(0, 1)), *args, target="h100")
    budget = plain.peak_bytes * 2 // 3
    plan = jaxmem.schedule(step, budget=budget, **options).plan(*args)
    assert plan.scheduled.peak_bytes <= budget
    rows = [r for r in plan.residuals if "few bits" in r.how]
    assert sum(r.bytes for r in rows) >= 6 * SIZE.width * 4 * SIZE.width * 4
