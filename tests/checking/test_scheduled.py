"""Scheduled steps: right ones agree, a wrong pass is named, `verify` raises."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.checking import VerifyError, _verify
from tests.checking import steps
from tests.checking.faults import wrong_release


def scheduled(step=steps.step, **how):
    return jaxmem.schedule(step, donate_argnums=0, **how)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("step", (steps.step, steps.in_micro_batches, steps.unrolled))
def test_a_scheduled_step_agrees(step, dtype):
    report = jaxmem.check(scheduled(step), step, *steps.arguments(dtype), steps=2)
    assert report and not report.guilty


def test_the_guilty_pass_is_named():
    with wrong_release():
        step = scheduled()
        report = jaxmem.check(step, steps.step, *steps.arguments(), steps=1)
        assert {"RecomputeResiduals"} < set(step.applied_passes(*steps.arguments()))
    assert not report and report.guilty == ("ReleaseGradients",)
    assert "the pass that causes it: ReleaseGradients" in str(report)


def test_the_step_itself_may_be_guilty():
    step = scheduled(steps.sign_of_a_gradient)
    report = jaxmem.check(step, steps.step, *steps.arguments(), steps=1)
    assert not report and report.guilty == ()
    assert any("no pass makes the difference" in note for note in report.notes)


@pytest.mark.slow
def test_a_scheduled_step_in_a_budget_agrees():
    room = jaxmem.estimate(steps.step, *steps.arguments()).peak_bytes * 3 // 4
    try:
        step = scheduled(budget=room, target="cpu")
        step.plan(*steps.arguments())
    except jaxmem.scheduling.BudgetError as error:
        step = scheduled(budget=error.least, target="cpu")
    assert jaxmem.check(step, steps.step, *steps.arguments())


# -- verify


def test_verify_is_done_once_for_each_shape(caplog):
    caplog.set_level(logging.INFO, "jaxmem")
    step = scheduled(verify=True)
    for seed, rows, told in ((0, 24, 1), (1, 24, 1), (0, 16, 2)):
        state, x = steps.arguments(seed=seed)
        want = steps.step(state, x[:rows])
        got = step(state, x[:rows])
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        messages = [r.message for r in caplog.records if "verify" in r.message]
        assert len(messages) == told and "agrees with" in messages[-1]
    assert jax.tree.leaves(state)[0].is_deleted()  # by the call itself


def test_nothing_is_verified_without_being_asked(caplog, monkeypatch):
    monkeypatch.setattr("jaxmem.scheduling._scheduled.verify", None)
    scheduled()(*steps.arguments())
    inside = jax.jit(scheduled(verify=True))
    inside(*steps.arguments())


def test_a_wrong_step_is_not_run():
    state, x = steps.arguments()
    with wrong_release(), pytest.raises(VerifyError) as raised:
        scheduled(verify=True)(state, x)
    assert "ReleaseGradients" in str(raised.value) and "result[0]" in str(raised.value)
    assert not raised.value.report
    assert np.isfinite(np.asarray(state[0]["up"])).all()  # nothing was donated


def test_verify_on_a_slice(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxmem")
    sizes = iter((2.0, 2.0, 0.0))
    monkeypatch.setattr(_verify, "room", lambda: 1)
    monkeypatch.setattr(_verify, "needed_bytes", lambda *_: next(sizes))
    scheduled(verify=True)(*steps.arguments())
    (message,) = [r.message for r in caplog.records if "verify" in r.message]
    assert "on the first 6 examples of 24" in message


def test_what_cannot_be_sliced_is_said(monkeypatch):
    monkeypatch.setattr(_verify, "room", lambda: 1)
    monkeypatch.setattr(_verify, "needed_bytes", lambda *_: 2)
    step = scheduled(verify=True)
    with pytest.warns(UserWarning, match="step was not verified: the original"):
        step(*steps.arguments())


def test_bytes_that_a_check_takes():
    """By the compiler: arguments twice, and what is made."""
    from jaxmem.checking._room import needed_bytes, room
    from jaxmem.checking._runs import Runner

    arguments = steps.arguments(), {}
    held = sum(x.nbytes for x in jax.tree.leaves(arguments))
    assert 3 * held < needed_bytes(Runner(steps.step), arguments) < 100 * held
    assert room() > 2**30


# -- the script


def run(path):
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_written_script_finds_the_difference_again(tmp_path):
    path = tmp_path / "again.py"
    wrong, right = steps.swapped_slice, steps.step
    jaxmem.check(right, right, *steps.arguments(), steps=1, script=path)
    assert not path.exists()
    report = jaxmem.check(wrong, right, *steps.arguments(), steps=1, script=path)
    assert not report and path.with_suffix(".npz").exists()
    code, said = run(path)
    assert code == 1 and "swapped_slice differs from step" in said
    first = report.different[0]
    assert f"{first.name} {first.array}" in said


def test_a_script_of_a_scheduled_step(tmp_path):
    path = tmp_path / "again.py"
    step = scheduled()
    jaxmem.check(step, steps.step, *steps.arguments(), steps=1).write_script(path)
    code, said = run(path)
    assert code == 0 and "agrees with" in said, said


def test_a_script_says_what_to_fill_in(tmp_path):
    path = tmp_path / "again.py"
    x = steps.batch()
    key = jax.random.key(0)
    step = lambda x, key, n: x * n
    report = jaxmem.check(step, step, x, key, 2, static_argnums=2, steps=1)
    report.write_script(path)
    text = path.read_text()
    assert "fill in the step: " in text and "static_argnums=[2]" in text
    compile(text, str(path), "exec")


def test_large_arrays_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.checking._script.MOST_BYTES", 1000)
    path = tmp_path / "again.py"
    jaxmem.check(steps.step, steps.step, *steps.arguments(), steps=1).write_script(path)
    assert not path.with_suffix(".npz").exists()
    code, said = run(path)
    assert code == 0 and "step agrees with step" in said, said
