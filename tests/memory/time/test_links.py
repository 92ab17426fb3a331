"""Collectives by the links that their devices have, and those within fusions."""

import pytest

from jaxmem.chips import rates_of
from jaxmem.cost.links import links_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed
from tests.memory.time import modules

BYTES = 2 * 4096 * 4096


@pytest.mark.parametrize(
    "chip, devices, group, axes, steps",
    [
        ("tpu-v6e", 256, 256, 2, 30),  # both axes of 16 close
        ("tpu-v6e", 256, 16, 1, 15),
        ("tpu-v6e", 64, 64, 1, 14),  # two lines of 8
        ("tpu-v5p", 512, 512, 3, 21),
        ("tpu-v5p", 64, 16, 2, 6),
        ("tpu-v5p", 64, 4, 1, 3),
        ("h100", 8, 8, 1, 7),
    ],
)
def test_a_collective_has_the_links_of_the_axes_that_it_spans(
    chip, devices, group, axes, steps
):
    rates = rates_of(chip)
    found = links_of(group, devices, rates)
    assert found.rate == pytest.approx(axes * rates.link)
    assert found.steps == pytest.approx(steps)


def fused(result: str):
    """A fusion of an all-reduce among 256, as libtpu writes a reduce-scatter."""
    within = modules.computation(
        "all-reduce-scatter",
        "%p = bf16[4096,4096]{1,0} parameter(0)\n"
        "%r = bf16[4096,4096]{1,0} all-reduce(%p), replica_groups=[1,256]<=[256], "
        "to_apply=%add\n"
        f"ROOT %s = {result} copy(%r)",
    )
    entry = (
        "%x = bf16[4096,4096]{1,0} parameter(0)\n"
        f"ROOT %y = {result} fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    )
    text = modules.text(entry, within)
    hlo = parse_hlo(text.replace("HloModule m", "HloModule m, num_partitions=256"))
    (one,) = timed(hlo, rates_of("tpu-v6e")).kernels
    return one


@pytest.mark.parametrize(
    "result, times", [("bf16[16,4096]{1,0}", 1), ("bf16[4096,4096]{1,0}", 2)]
)
def test_a_fusion_waits_for_the_collective_in_it(result, times):
    rates = rates_of("tpu-v6e")
    one = fused(result)
    sent = times * BYTES * 255 / 256 / (2 * rates.link)
    assert one.bound == "collective"
    assert one.seconds == pytest.approx(sent + times * 30 * rates.hop)
