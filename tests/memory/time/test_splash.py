"""What JAX's splash attention for TPUs costs, from texts as libtpu writes them."""

import pytest

from jaxmem.chips import rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.declared import declared_of
from jaxmem.memory.time.schedule import timed
from tests.memory.time import modules

BATCH, HEADS, GROUPS, TOKENS, WIDTH, SIDE = 3, 32, 8, 8192, 128, 2048
BLOCKS = TOKENS // SIDE
QUERIES = f"bf16[{BATCH},{HEADS},{TOKENS},{WIDTH}]{{3,2,1,0}}"
KEYS = f"bf16[{BATCH},{GROUPS},{TOKENS},{WIDTH}]{{3,2,1,0}}"
SCRATCH = f"f32[{BATCH},{SIDE},{WIDTH}]{{2,1,0}}"
PARTS = f"bf16[{BATCH},{BLOCKS},{HEADS},{TOKENS},{WIDTH}]{{4,3,2,1,0}}"
# kernel -> (its results, the names of its sides, how many products it does)
KERNELS = {
    "fwd_residuals": (QUERIES, ("q", "kv"), 2),
    "dkv_no_residuals": (f"{KEYS}, {KEYS}", ("q_dkv", "kv_dkv"), 4),
    "dkv_no_residuals, one pass": (f"{PARTS}, {KEYS}, {KEYS}", ("q_dkv", "kv_dkv"), 5),
    "dq_segmented_no_residuals": (QUERIES, ("q_dq", "kv_dq"), 3),
}
PAIRS = BATCH * HEADS * TOKENS * TOKENS
CAUSAL = (BLOCKS + 1) / (2 * BLOCKS)


def call(kernel: str, table: str = f"{BLOCKS},{BLOCKS}", scope: str = "") -> str:
    """A module of one kernel; its own metadata has line breaks, as in XLA's text."""
    results, sides, _ = KERNELS[kernel]
    said = "".join(rf"\"block_{side}\": {SIDE}, " for side in sides)
    said += r"\"block_kv_compute\": 512, \"q_layout\": 1, \"k_layout\": 1"
    mask = f"%m = s8[1,{table}]{{2,1,0}} constant({{...}})\n" if table else ""
    name = f"splash_mha_{kernel.split(',')[0]}"
    return modules.text(
        f"%q = {QUERIES} parameter(0)\n%k = {KEYS} parameter(1)\n{mask}"
        f"ROOT %{name}.1 = ({SCRATCH}, {results}) custom-call("
        f"{'%m, %m, ' if mask else ''}%q, %k, %k), "
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={'
        f'LINE"xprof_metadata":"{{{said}}}"LINE}}}}, '
        f'metadata={{op_name="jit(f)/{scope}/pallas_call" stack_frame_id=1}}'
    ).replace("LINE", "\n")


def cost(kernel: str, **how):
    hlo = parse_hlo(call(kernel, **how))
    return declared_of(hlo, hlo.instruction(hlo.roots["main"]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_causal_mask_leaves_blocks_on_and_below_the_diagonal(kernel):
    products = KERNELS[kernel][2]
    found = cost(kernel)
    assert found.flops == pytest.approx(2 * WIDTH * products * PAIRS * CAUSAL)
    assert found.transcendentals == pytest.approx(PAIRS * CAUSAL)
    assert found.bits == 16


@pytest.mark.parametrize("table, share", [("", 1), (f"{BLOCKS},2", 2 / BLOCKS)])
def test_without_a_mask_all_blocks_count_and_of_a_window_those_of_its_table(
    table, share
):
    found = cost("fwd_residuals", table=table)
    assert found.flops == pytest.approx(4 * WIDTH * PAIRS * share)


def test_it_waits_for_its_products_and_is_not_unknown():
    rates = rates_of("tpu-v6e")
    found = timed(parse_hlo(call("fwd_residuals")), rates)
    (one,) = found.kernels
    assert not found.unknown_calls
    assert one.bound == "products"
    assert one.flops == pytest.approx(4 * WIDTH * PAIRS * CAUSAL)
    assert one.seconds >= one.flops / (rates.between * rates.narrow)


def test_lines_within_an_instruction_do_not_end_it():
    hlo = parse_hlo(call("fwd_residuals", scope="attention"))
    made = hlo.instruction(hlo.roots["main"])
    assert made.metadata == {
        "op_name": "jit(f)/attention/pallas_call",
        "stack_frame_id": "1",
    }
    assert len(hlo.lines) == 4
