"""Predicted seconds for TPUs: against XLA's own cycles, and what they are made of."""

import dataclasses

import pytest

from benchmarks import time
from jaxmem.chips import rates_of
from jaxmem.cost.kernel import Arithmetic, KernelWork, Product, Traffic
from jaxmem.cost.roofline import product_seconds, seconds
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed
from jaxmem.memory.time.traffic import traffic_of
from tests.memory.time import modules

V5E = rates_of("tpu-v5e")
WITHIN = 0.25  # reached: 0.14, of a v5p, to which nothing was fitted, 0.08
RANKED = 0.9 - 1e-9  # of five policies two neighbours may have changed places
KINDS = {"products": 0.1, "fusions": 0.1, "by themselves": 0.15}
UNKNOWN = 0.03  # of what is predicted is of operations that XLA does not estimate

PREDICT = """
import json
from benchmarks import time
from benchmarks.readings.xla_costs import CYCLES, costed
steps = costed(CYCLES)
print(json.dumps([[one.chip, one.name, *time.estimated(one)] for one in steps]))
"""


@pytest.fixture(scope="module")
def estimated():
    return modules.printed(PREDICT)


def by_chip(estimated):
    return {
        chip: [row[1:] for row in estimated if row[0] == chip] for chip, *_ in estimated
    }


def test_there_are_nineteen_steps_for_three_chips(estimated):
    steps = {chip: len(rows) for chip, rows in by_chip(estimated).items()}
    assert steps == {"tpu-v5e": 9, "tpu-v5p": 5, "tpu-v6e": 5}


def test_each_step_is_near_the_cycles_of_xla(estimated):
    for chip, name, of_xla, said, _ in estimated:
        assert said == pytest.approx(of_xla, rel=WITHIN), (chip, name)


def test_policies_of_a_model_have_their_order(estimated):
    ranked = 0
    for steps in by_chip(estimated).values():
        for pairs in time.by_model([row[:3] for row in steps]).values():
            if len(pairs) > 2:
                ranked += 1
                assert time.rank_correlation(*zip(*pairs, strict=True)) >= RANKED
    assert ranked == 4


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_a_kind_in_all_steps(estimated, kind):
    sums = [sums[kind] for *_, sums in estimated if kind in sums]
    assert len(sums) == len(estimated)
    of_xla, said = map(sum, zip(*sums, strict=True))
    assert said == pytest.approx(of_xla, rel=KINDS[kind])


def test_what_xla_does_not_estimate_is_little(estimated):
    unknown = sum(sums["not estimated"][1] for *_, sums in estimated)
    assert 0 < unknown < UNKNOWN * 1e-3 * sum(said for *_, said, _ in estimated)


# -- mechanisms


def kernels(entry, *computations):
    return timed(parse_hlo(modules.text(entry, *computations)), V5E).kernels


def negated(space_in="", space_out=""):
    """A fusion of 4 Mi elements, each array in a memory of its own."""
    inside = modules.computation(
        "f",
        "%p = bf16[4096,1024]{1,0} parameter(0)\n"
        f"ROOT %n = bf16[4096,1024]{{1,0{space_out}}} negate(%p)",
    )
    entry = (
        f"%x = bf16[4096,1024]{{1,0{space_in}}} parameter(0)\n"
        f"ROOT %y = bf16[4096,1024]{{1,0{space_out}}} fusion(%x), kind=kLoop, calls=%f"
    )
    (kernel,) = kernels(entry, inside)
    return kernel


def test_a_fusion_loads_and_stores_wherever_its_arrays_lie():
    size = 2 * 2 * 4096 * 1024
    near = negated(":S(1)", ":S(1)")
    assert near.bytes == 0
    assert near.seconds == pytest.approx(V5E.launch + size / V5E.vector)
    far = negated()
    assert far.bytes == size
    assert near.seconds <= far.seconds
    assert far.bytes / V5E.bandwidth < far.seconds


def test_an_operation_by_itself_waits_for_each_window():
    line = "ROOT %y = f32[4096,1024]{1,0} broadcast(%x), dimensions={}"
    (kernel,) = kernels(f"%x = f32[] parameter(0)\n{line}")
    launches = 4096 * 1024 / V5E.window
    assert launches == 32
    expected = launches * V5E.launch + (4 * 4096 * 1024 + 4) / V5E.bandwidth
    assert kernel.seconds == pytest.approx(expected)


@pytest.mark.parametrize("size, count", [(1, 0), (1024, 0), (2048, 1)])
def test_a_few_numbers_are_no_kernel(size, count):
    entry = f"%x = f32[{size}]{{0}} parameter(0)\nROOT %y = f32[{size}]{{0}} negate(%x)"
    assert len(kernels(entry)) == count


def product(k):
    return product_seconds(Product(16, 1024, 1024, k, 16, "bf16"), V5E)


def test_matrix_units_share_a_sum():
    whole = 128 * V5E.processors
    assert product(64) == product(whole) == pytest.approx(product(2 * whole) / 2)
    peak = 2 * 16 * 1024 * 1024 * whole / V5E.narrow
    assert product(whole) == pytest.approx(peak)


def test_arithmetic_that_takes_longest_hides_the_rest():
    traffic = Traffic((("x", 64 * 2**20),), 0)
    one = Product(1, 4096, 4096, 1024, 16, "bf16")
    work = KernelWork((one,), traffic, Arithmetic())
    products, memory = product_seconds(one, V5E), traffic.bytes / V5E.bandwidth
    assert memory < products
    took, bound = seconds(work, V5E)
    assert bound == "products"
    assert took == pytest.approx(V5E.launch + products + V5E.exposed * memory)
    long = dataclasses.replace(work, arithmetic=Arithmetic(3 * products * V5E.floating))
    took, bound = seconds(long, V5E)
    assert bound == "arithmetic"
    assert took == pytest.approx(V5E.launch + 3 * products)


def test_a_shift_is_an_instruction_of_a_tpu_and_part_of_a_gpus_rotation():
    work = KernelWork((), Traffic((), 0), Arithmetic(shifts=1e9))
    gpu = rates_of("h100")
    assert seconds(work, V5E)[0] == pytest.approx(V5E.launch + 1e9 / V5E.floating)
    assert seconds(work, gpu)[0] == gpu.launch


def test_an_asynchronous_copy_moves_what_it_copies_once():
    entry = (
        "%x = f32[4194304]{0} parameter(0)\n"
        "%s = (f32[4194304]{0:S(1)}, f32[4194304]{0}, u32[]) copy-start(%x)\n"
        "ROOT %d = f32[4194304]{0:S(1)} copy-done(%s)"
    )
    (kernel,) = kernels(entry)
    assert kernel.bytes == 16 * 2**20


# libtpu's form of an all-gather that goes on while fusions of products run
GATHERED = "bf16[4096,8192]{1,0}"
ENDS = tuple(
    modules.computation(
        f"f.{at}",
        "%p = bf16[512,8192]{1,0} parameter(0)\n"
        f"%g.{at} = {GATHERED} all-gather(%p), channel_id=7, "
        "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true\n"
        f"ROOT %c.{at} = {GATHERED} custom-call(%g.{at}), "
        f'custom_call_target="AsyncCollective{at}"',
    )
    for at in ("Start", "Done")
)
PRODUCT = modules.computation(
    "f.product",
    "%l = bf16[8192,8192]{1,0} parameter(0)\n%r = bf16[8192,8192]{1,0} parameter(1)\n"
    "ROOT %m = bf16[8192,8192]{1,0} convolution(%l, %r), dim_labels=bf_io->bf",
)


@pytest.mark.parametrize("products", [0, 1, 8])
def test_a_collective_in_fusions_runs_beside_the_products_between(products):
    between = "".join(
        f"%k{i} = bf16[8192,8192]{{1,0}} fusion(%w, %w), kind=kOutput, "
        "calls=%f.product\n"
        for i in range(products)
    )
    entry = (
        "%x = bf16[512,8192]{1,0} parameter(0)\n"
        "%w = bf16[8192,8192]{1,0} parameter(1)\n"
        f"%s = {GATHERED} fusion(%x), kind=kCustom, calls=%f.Start\n{between}"
        f"ROOT %d = {GATHERED} fusion(%x), kind=kCustom, calls=%f.Done"
    )
    text = modules.text(entry, *ENDS, PRODUCT).replace(
        "is_scheduled=true", "is_scheduled=true, num_partitions=8", 1
    )
    found = timed(parse_hlo(text), V5E).kernels
    beside = sum(k.seconds for k in found if k.name.startswith("k"))
    assert bool(beside) == bool(products)
    # alone: seven eighths of it come over the links, an eighth at each step
    gathered = modules.text(
        "%x = bf16[512,8192]{1,0} parameter(0)\n"
        f"ROOT %g = {GATHERED} all-gather(%x), channel_id=7, "
        "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true"
    ).replace("is_scheduled=true", "is_scheduled=true, num_partitions=8", 1)
    (alone,) = timed(parse_hlo(gathered), V5E).kernels
    assert alone.bound == "collective" and alone.seconds > 0
    whole = sum(k.seconds for k in found)
    assert whole == pytest.approx(max(alone.seconds, beside))


def test_what_a_collective_hands_on_through_a_fusion_is_not_its_traffic():
    product, carried = "bf16[1024,1024]{1,0}", f"bf16[512,8192]{{1,0}}, {GATHERED}"
    middle = modules.computation(
        "f.middle",
        f"%l = {product} parameter(0)\n"
        "%p = bf16[512,8192]{1,0} parameter(1)\n"
        f"%q = {GATHERED} parameter(2)\n"
        f"%m = {product} convolution(%l, %l), dim_labels=bf_io->bf\n"
        f"%g = {GATHERED} all-gather(%p), channel_id=7, "
        "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true\n"
        f"ROOT %t = ({product}, {carried}, {GATHERED}) tuple(%m, %p, %q, %g)",
    )
    entry = (
        f"%w = {product} parameter(0)\n"
        "%x = bf16[512,8192]{1,0} parameter(1)\n"
        f"%y = {GATHERED} parameter(2)\n"
        f"ROOT %r = ({product}, {carried}, {GATHERED}) fusion(%w, %x, %y), "
        "kind=kOutput, calls=%f.middle"
    )
    hlo = parse_hlo(modules.text(entry, middle))
    made = hlo.instruction("r")
    assert made is not None
    # one matrix is read, and one written
    assert traffic_of(hlo, made).bytes == 2 * 2 * 1024**2
