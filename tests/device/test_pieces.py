"""One job of each piece in small, on a CPU: no first run on a device is the first."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.device import attention_rules, fast, forms, jobs, on_device, right
from benchmarks.device.job import NotHere
from benchmarks.steps import kernels as kernel_cases

JOBS = jobs.jobs()
FAST = (*("offload: on_host", "offload: a policy of JAX"),)
ONE_FORM = "forms: attention, 512, bare"  # in small the others are of the same size
WHOLE = {x for x in JOBS if not x.startswith("forms") or x == ONE_FORM}


pytestmark = pytest.mark.usefixtures("standard_jax")


@pytest.mark.parametrize("name", FAST)
def test_a_job_of_each_piece(name):
    rows = list(JOBS[name].rows(True))
    assert rows and all(row.get("right", True) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WHOLE - set(FAST)))
def test_every_job(name):
    """Refused is an answer: of libraries that are missing, dtypes, budgets."""
    job = JOBS[name]
    if job.under:
        pytest.skip("the same as without the sanitizer")
    try:
        assert list(job.rows(True))
    except NotHere as reason:
        assert str(reason)


def test_a_kernel_that_is_off_is_found(monkeypatch):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    off = {"xla": 0.0, "pallas": 1e-3}
    fn = lambda how: lambda x: x * (1 + off[how])
    case = kernel_cases.Case("op", fn, (x,), (0,), 1)
    with pytest.raises(right.Off, match="results 0, 1"):
        list(right.compared(case))
    off["pallas"] = float("nan")
    with pytest.raises(right.Off):
        list(right.compared(case))
    off["pallas"] = 0.0
    assert all(row["right"] for row in right.compared(case))


def test_an_error_that_is_no_refusal_is_raised():
    with pytest.raises(ValueError, match="shapes"):
        right.refusal(ValueError("shapes"))
    assert right.refusal(NotImplementedError("even alone")) == "even alone"


def test_operands_differ():
    case = kernel_cases.CASES["silu, 4 bits"](right.SMALL)
    g, x = kernel_cases.arguments_of(case)
    other = kernel_cases.arguments_of(case, seed=1)[1]
    assert all((x != y).mean() > 0.9 for y in (g, other))


@pytest.mark.parametrize("name", forms.FORMS)
def test_a_form_changes_the_kernels_and_changes_them_back(name):
    read = lambda: [
        getattr(m, x) for m, some in forms.FORMS[name].items() for x in some
    ]
    before = read()
    with forms.form(name, small=False):
        assert all(a is not b for a, b in zip(read(), before, strict=True))
    assert read() == before


def test_two_jobs_of_one_name_are_refused():
    job = JOBS["right: silu, 4 bits"]
    with pytest.raises(ValueError, match="two jobs are called 'right: silu, 4 bits'"):
        jobs.by_name([job, job])


def test_attention_has_every_rule():
    names = {name for rule, _ in attention_rules.RULES.values() for name in rule(8, 8)}
    assert {"is_causal", "local_window_size", "bias", "mask", "dropout_rate"} <= names
    assert {"query_segment_ids", "key_value_seq_lengths"} <= names


def test_passes_are_timed_apart():
    case = kernel_cases.CASES["rms_norm"](fast.SMALL)
    both = fast.passes(case, case.fn("xla"), True)
    assert set(both) == {"forward", "backward"} and all(f() > 0 for f in both.values())
    update = kernel_cases.CASES["adam, float32"](fast.SMALL)
    assert set(fast.passes(update, update.fn("xla"), True)) == {"forward"}


def test_a_step_carries_its_state():
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    step = on_device.ready(lambda n, x: (n + x, x), (x, x), 1)
    first = step.args[0]
    step()
    assert (step.args[0] == first + step.args[1]).all()
