"""Steps for more chips than anybody here has, in their memory."""

from dataclasses import replace

import jax
import pytest

import jaxmem
from benchmarks.pod import products
from benchmarks.steps.pod import FSDP, LLAMA, step_of
from jaxmem.scheduling.recompute.residuals import Recompute
from tests.memory.test_estimate import AVAILABLE

GIB = 2**30
FEW = replace(LLAMA, layers=4)


def fewer_layers(chip, **how):
    return step_of(FEW, FSDP, chip, 256, **how)


@pytest.mark.slow
@pytest.mark.parametrize("chip, budget", [("h100", 15 * GIB), ("tpu-v5e", 7 * GIB)])
def test_layers_of_70b_parameters_in_a_budget(chip, budget, standard_jax):
    """Less is recomputed than by a checkpoint a layer, and the budget is used."""
    if chip not in AVAILABLE:
        pytest.skip("its compiler is not here")
    made, checkpoint = fewer_layers(chip), fewer_layers(chip, write=jax.checkpoint)
    how = {"target": chip, "donate_argnums": 0, "progress": False}
    found = jaxmem.schedule(made.step, budget, **how).find(made.args, {})
    assert 0.85 * budget < found.report.peak_bytes <= budget
    recomputed = sum(row.flops for row in found.rewritten.description.recomputed)
    devices = made.args[1].sharding.mesh.size
    work = products(made)
    assert 0 < devices * recomputed < 0.8 * (products(checkpoint) - work)
    if chip == "h100":  # which says what a step takes that does not fit
        plain = jaxmem.estimate(made.step, *made.args, target=chip, donate_argnums=0)
        assert plain.peak_bytes > budget
        # a weight more is gathered in the first layers, and no activation
        assert found.report.sent_bytes < 1.3 * plain.sent_bytes


@pytest.mark.slow
def test_residuals_on_the_host_are_sent_to_no_other_device(standard_jax):
    """XLA would gather what they multiply, where it may choose their shards."""
    if "h100" not in AVAILABLE:
        pytest.skip("its compiler is not here")
    made, checkpoint = fewer_layers("h100"), fewer_layers("h100", write=jax.checkpoint)
    how = {"target": "h100", "donate_argnums": 0}
    want = jaxmem.estimate(checkpoint.step, *checkpoint.args, **how)
    how |= {"offload": True, "quick": True, "progress": False}
    step = jaxmem.schedule(made.step, int(0.97 * want.peak_bytes), **how)
    found = step.find(made.args, {})
    assert found.choice.get(Recompute).offload is not None
    assert found.report.sent_bytes <= want.sent_bytes
    assert found.report.seconds < want.seconds
