"""How a GPU's kernels get at their bytes: loops, sums, transpositions, tiles."""

import pytest

from jaxmem.chips import rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.emitters import access_of
from jaxmem.memory.time.schedule import timed
from jaxmem.memory.time.traffic import traffic_of
from tests.memory.time import modules

H200 = rates_of("h200")


def fusion(shape: str, body: str, kind: str, operand: str, more: str = ""):
    """(module, instruction) of a fusion of one operand."""
    inside = modules.computation("f", body)
    entry = (
        f"%a = {operand} parameter(0)\n"
        f"ROOT %r = {shape} fusion(%a), kind={kind}, calls=%f{more}"
    )
    hlo = parse_hlo(modules.text(entry, inside))
    return hlo, hlo.instruction("r")


def access(*of, **how):
    hlo, made = fusion(*of, **how)
    return access_of(hlo, made, traffic_of(hlo, made))


def seconds(*of, **how) -> float:
    hlo, _ = fusion(*of, **how)
    (kernel,) = timed(hlo, H200).kernels
    return kernel.seconds


def loop(dtype: str, elements: int = 2**26):
    shape = f"{dtype}[{elements}]{{0}}"
    body = f"%p = {shape} parameter(0)\nROOT %n = {shape} negate(%p)"
    return shape, body, "kLoop", shape


def test_a_loop_starts_a_block_for_512_elements():
    assert access(*loop("f32", 2**20)).blocks == 2048


def test_narrow_elements_do_not_reach_the_bandwidth():
    # measured: 125 us in 32 bits, 81 us in 16
    wide, narrow = (seconds(*loop(dtype)) for dtype in ("f32", "bf16"))
    assert wide == pytest.approx(125e-6, rel=0.05)
    assert narrow == pytest.approx(81e-6, rel=0.05)


def turned(kind: str):
    """A result whose neighbours are far apart in the operand."""
    body = (
        "%p = f32[2048,2048]{1,0} parameter(0)\n"
        "ROOT %t = f32[2048,2048]{1,0} transpose(%p), dimensions={1,0}"
    )
    return "f32[2048,2048]{1,0}", body, kind, "f32[2048,2048]{1,0}"


def test_a_transposition_is_done_in_tiles_but_not_in_a_loop():
    tiles, loops = access(*turned("kInput")), access(*turned("kLoop"))
    assert tiles.near == tiles.scattered == loops.near == 0
    assert loops.scattered == 32 * 2048 * 2048  # a sector for each element


def test_two_transpositions_in_a_loop_undo_each_other():
    body = (
        "%p = f32[2048,2048]{1,0} parameter(0)\n"
        "%t = f32[2048,2048]{1,0} transpose(%p), dimensions={1,0}\n"
        "ROOT %u = f32[2048,2048]{1,0} transpose(%t), dimensions={1,0}"
    )
    shape = "f32[2048,2048]{1,0}"
    assert access(shape, body, "kLoop", shape).scattered == 0
    # in tiles one of them is done, and the other reads element by element
    assert access(shape, body, "kInput", shape).near == 32 * 2048 * 2048


def total(axis: int, both: bool):
    """The sum of a matrix along an axis, with a result of the matrix's size, or not."""
    matrix, sums = "f32[4096,1024]{1,0}", f"f32[{(1024, 4096)[axis]}]{{0}}"
    body = (
        f"%p = {matrix} parameter(0)\n%z = f32[] constant(0)\n"
        f"%n = {matrix} negate(%p)\n"
        f"%s = {sums} reduce(%n, %z), dimensions={{{axis}}}, to_apply=%add\n"
        f"ROOT %t = ({sums}, {matrix}) tuple(%s, %n)"
    )
    if not both:
        body = body.replace(f"ROOT %t = ({sums}, {matrix}) tuple(%s, %n)", "")
        body = body.replace("%s =", "ROOT %s =")
    return f"({sums}, {matrix})" if both else sums, body, "kInput", matrix


def test_a_sum_of_columns_takes_its_rows_in_turn():
    found = access(*total(0, both=False))
    assert (found.rows, found.columns, found.loads) == (4096 // 32, 1024 // 32, 1)
    assert not found.stores
    assert access(*total(1, both=False)).rows == 0


def test_what_is_written_for_each_row_makes_loads_wait():
    # measured: 12 us alone, 48 to 52 with another array read and one written
    alone, both = (seconds(*total(0, both)) for both in (False, True))
    assert alone == pytest.approx(12e-6, rel=0.15)
    assert both > 2 * alone


TILE = (
    ', backend_config={{"fusion_backend_config":{{"block_level_fusion_config":'
    '{{"num_warps":"4","output_tiles":[{{"sizes":[{}]}}]}},"kind":"__triton"}}}}'
)


def test_a_narrow_tile_takes_a_part_of_each_sector():
    shape = "bf16[1024,1024]{1,0}"
    body = f"%p = {shape} parameter(0)\nROOT %n = {shape} negate(%p)"
    found = [
        access(shape, body, "kCustom", shape, more=TILE.format(tile))
        for tile in ('"8","1024"', '"128","8"')
    ]
    assert [one.blocks for one in found] == [128, 1024]
    assert [one.scattered for one in found] == [0, 2 * 2 * 2**20]  # 16 of 32 bytes


def test_a_sort_goes_through_stages():
    shape = "f32[8192,1024]{1,0}"
    entry = (
        f"%a = {shape} parameter(0)\nROOT %r = {shape} sort(%a), "
        "dimensions={1}, to_apply=%less"
    )
    hlo = parse_hlo(modules.text(entry))
    made = hlo.instruction("r")
    found = access_of(hlo, made, traffic_of(hlo, made))
    assert (found.rows, found.columns) == (10 * 11 // 2, 8192)
