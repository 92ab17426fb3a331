"""tunix's trainer on a scheduled step; it needs the extra `foreign`."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmem.demo import data

pytest.importorskip("tunix", reason="pip install '.[foreign]'")
recipe = pytest.importorskip("examples.recipes.tunix_trainer")
peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")

pytestmark = [
    *(pytest.mark.slow, pytest.mark.foreign),
    # it uses names that jax and flax deprecate
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS = 3


def _losses(kind, **how):
    """Of the trainer's own loop, on the same batches."""
    text = data.standard_library(200_000).train
    trainer = recipe.make_trainer(recipe.make_model(), STEPS, kind)
    trainer.train(recipe.batches(text, STEPS), **how)
    return trainer.metrics_logger.get_metric_history("", "loss", "train"), trainer


def test_the_trainer_takes_the_same_steps_within_the_budget():
    want, plain = _losses(peft_trainer.PeftTrainer)
    got, trainer = _losses(recipe.Trainer, skip_jit=True)
    assert len(got) == len(want) > 0
    np.testing.assert_allclose(got, want, rtol=1e-4)
    pairs = zip(
        *(jax.tree.leaves(nnx.state(t.model, nnx.Param)) for t in (trainer, plain)),
        strict=True,
    )
    # a step of Adam moves a weight by the rate, whatever the size of its gradient
    for a, b in pairs:
        assert np.mean(np.abs(a - b)) < 1e-2 * STEPS / 10


def test_the_plan_meets_the_budget_of_which_the_plain_step_takes_twice():
    trainer = recipe.make_trainer(recipe.make_model(), STEPS)
    example = next(recipe.batches(data.standard_library(200_000).train, 1))
    plan = trainer.scheduled.plan(trainer.model, trainer.optimizer, example)
    assert plan.budget_met
    assert plan.plain.peak_bytes > 1.5 * plan.scheduled.peak_bytes
