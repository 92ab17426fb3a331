"""One way to name a function and its arguments, for all commands."""

import jax
import pytest
import typer

from jaxmem.cli._app import Failed, one_line
from jaxmem.cli._functions import find, load


@pytest.mark.parametrize(
    "spec, args",
    [
        ("user_steps:plain", None),
        ("user_steps:step", None),
        ("user_steps.py:step", None),
        ("user_steps:Trainer.step", "args"),
        ("user_steps:step", "user_steps:args"),
        ("./user_steps.py:step", "user_steps.py:args"),
    ],
)
def test_a_function_that_returns_the_step_or_the_step_itself(steps, spec, args):
    found = load(spec, args, None)
    assert found.fn.__name__ == "step"
    assert [x.shape for x in found.make_args(None)] == [(64, 64), (64, 64)]


def test_step_and_arguments_of_one_file_come_from_one_module(steps):
    """Else its classes would be there twice."""
    found = load("user_steps.py:step", "user_steps.py:args", None)
    again = load("user_steps.py:step", "args", None)
    assert found.fn is again.fn


def test_a_batch_size_goes_to_what_makes_the_arguments(steps):
    for spec, args in (("user_steps:step", "sized"), ("user_steps:sized_step", None)):
        found = load(spec, args, 16)
        assert found.make_args(16)[1].shape == (16, 64)
        assert found.make_args(48)[1].shape == (48, 64)
        assert found.options == ({} if args else {"donate_argnums": (0,)})


@pytest.mark.parametrize(
    "spec, args, batch, message",
    [
        ("user_steps", None, None, "MODULE:FUNCTION"),
        ("user_steps:plain", "missing", None, "no function 'missing'"),
        ("user_steps:step", "not_a_function", None, "int, no function"),
        ("user_steps:step", "listed", None, "tuple of arguments, got list"),
        ("user_steps:step", "sized", None, "give --batch"),
        ("user_steps:step", "args", 8, "no parameter named 'batch'"),
        ("user_steps:step", "loss", None, "needs w, x"),
        ("user_steps:returns_none", None, None, "name the function that makes its"),
        ("user_linen:step", "init.x", None, "no function 'init.x'"),
        ("user_linen:init", None, None, "returned TrainState"),
    ],
)
def test_wrong_use_says_what_is_wrong(steps, spec, args, batch, message):
    with pytest.raises(typer.BadParameter, match=message):
        load(spec, args, batch).make_args(batch)


def test_a_step_without_arguments_beside_it_says_what_to_write(steps):
    (steps / "user_broken.py").write_text("def step(state, batch): ...")
    with pytest.raises(typer.BadParameter, match=r"write a function args\(\) beside"):
        load("user_broken:step", None, None)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("user_broken:step", "No module named 'no_such_library'"),
        ("user_broken.py:step", "No module named 'no_such_library'"),
        ("user_exits:step", "SystemExit: 0"),
        ("user_steps:broken", "RuntimeError: no weights"),
    ],
)
def test_what_the_users_code_raises_is_a_failure(steps, spec, message):
    with pytest.raises(Failed, match=message):
        load(spec, None, None)


def test_a_jitted_step_without_a_signature_takes_arguments(steps, monkeypatch):
    user_steps = find("user_steps:step")[0]
    monkeypatch.setattr(user_steps, "step", jax.jit(user_steps.step))
    assert load("user_steps:step", None, None).fn is user_steps.step


def test_long_errors_are_cut():
    assert one_line("a\n  b\n") == "a b"
    assert one_line("x" * 2000).endswith("x ... (--traceback shows all)")
