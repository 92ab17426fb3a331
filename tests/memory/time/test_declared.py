"""What a custom call declares of its cost, in each form that XLA writes it."""

import pytest

from jaxmem.chips import rates_of
from jaxmem.cost.kernel import Declared
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.declared import declared_of
from jaxmem.memory.time.schedule import timed
from jaxmem.memory.time.step_time import step_time
from tests.memory.time import modules

H200 = rates_of("h200")
FLOPS, EXPONENTIALS, MIB = 10**12, 10**6, 2**20
FORMS = {
    "attributes": 'frontend_attributes={{bytes_accessed="{b}",flops="{f}",'
    'transcendentals="{t}"}}, metadata={{op_name="flops/1"}}',
    "Pallas on TPUs": 'backend_config={{"custom_call_config":{{"body":"Zmxvc",'
    '"cost_estimate":{{"flops":"{f}","transcendentals":"{t}",'
    '"bytes_accessed":"{b}"}}}}}}',
    "Pallas on GPUs": "backend_config={{cost_estimate_json = "
    r'"{{\22flops\22: {f}, \22transcendentals\22: {t}, \22bytes_accessed\22: {b}}}"}}',
}


def call(form: str = "attributes", bits: int = 16, size=MIB, flops=FLOPS, special=0):
    """A call that reads 64 Mi elements and writes as many."""
    shape = f"{'bf16' if bits == 16 else 'f32'}[67108864]{{0}}"
    said = FORMS[form].format(f=flops, t=special, b=size)
    return (
        f"%a = {shape} parameter(0)\n"
        f'ROOT %c = {shape} custom-call(%a), custom_call_target="mine", {said}'
    )


def kernel(entry: str, *computations: str):
    found = timed(parse_hlo(modules.text(entry, *computations)), H200)
    assert not found.unknown_calls
    (one,) = found.kernels
    return one


@pytest.mark.fast("16-attributes", "16-Pallas on TPUs", "32-Pallas on GPUs")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [16, 32])
def test_a_declaration_is_read(form, bits):
    hlo = parse_hlo(modules.text(call(form, bits, special=EXPONENTIALS)))
    found = declared_of(hlo, hlo.instruction("c"))
    assert found == Declared(FLOPS, EXPONENTIALS, MIB, bits)


def test_declared_products_run_at_the_peak_but_for_exponentials_between_them():
    plain, waits = (kernel(call(special=n)) for n in (0, EXPONENTIALS))
    fixed = H200.launch + H200.fill
    assert plain.flops == waits.flops == FLOPS
    assert plain.bound == waits.bound == "products"
    assert plain.seconds - fixed == pytest.approx(FLOPS / H200.narrow)
    assert waits.seconds - fixed == pytest.approx(FLOPS / H200.narrow / H200.between)


@pytest.mark.parametrize("size", [0, MIB, 2**40])
def test_a_kernel_moves_what_it_declares_but_no_more_than_its_arrays(size):
    arrays = 2 * 128 * MIB
    found = kernel(call(size=size, flops=0)).bytes
    assert found == pytest.approx(min(size or arrays, arrays), abs=2)


def test_a_call_in_a_fusion_declares_for_it():
    shape = "bf16[67108864]{0}"
    fused = (
        f"%b = {shape} parameter(0)\n"
        f"ROOT %f = {shape} fusion(%b), kind=kCustom, calls=%in"
    )
    inside = modules.computation("in", call())
    assert kernel(fused, inside).flops == FLOPS


def test_what_declares_nothing_is_named_with_its_share_of_the_bytes():
    shape = "bf16[67108864]{0}"
    entry = (
        f"%a = {shape} parameter(0)\n%b = {shape} negate(%a)\n"
        f'ROOT %c = {shape} custom-call(%b), custom_call_target="mine"'
    )
    (note,) = step_time(modules.text(entry), "h200").notes
    assert "custom calls" in note and "50.0 %" in note
