"""Errors of memory are explained where they are raised; others are left alone."""

import traceback

import jax
import jax.numpy as jnp
import pytest

import jaxmem

OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.00GiB. "
    "[executable_name='jit_step']"
)


def fail(text: str = OUT_OF_MEMORY):
    raise RuntimeError(text)


def test_a_note_tells_what_it_means_and_what_is_alive():
    params = {"w": jnp.ones((17, 3))}
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        with jaxmem.explained(lambda: {"params": params}, target="l4"):
            fail()
    (note,) = caught.value.__notes__
    assert "step (test_explained.py:" in note and "out of memory on a GPU" in note
    assert "f32[17,3]" in note and "live arrays: " in note
    assert note in "".join(traceback.format_exception(caught.value))


def test_as_a_decorator_and_nested_it_tells_once():
    with pytest.raises(RuntimeError) as caught, jaxmem.explained():
        jaxmem.explained()(fail)()
    assert len(caught.value.__notes__) == 1


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="^nan$") as caught, jaxmem.explained():
        fail("nan")
    assert not hasattr(caught.value, "__notes__")
    with jaxmem.explained():
        pass


def test_the_error_is_never_replaced():
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        with jaxmem.explained(lambda: {"params": undefined}):  # noqa: F821
            fail()
    (note,) = caught.value.__notes__
    assert "jit_step" not in note and "(not told: NameError" in note


def test_a_backend_that_cannot_begin_is_explained(monkeypatch):
    """JAX looks for a backend to list the arrays of, and raises its error once more."""
    monkeypatch.setattr(jax, "live_arrays", lambda: fail("no backend"))
    assert jaxmem.explain(RuntimeError(OUT_OF_MEMORY)).notes == ()


def test_an_exception_is_explained_with_what_is_alive():
    x = jnp.ones((100, 100))
    (note,) = jaxmem.explain(RuntimeError(OUT_OF_MEMORY)).notes
    assert "Alive in this process now" in note and "jaxmem.live_arrays(" in note
    assert jaxmem.explain(OUT_OF_MEMORY).notes == ()
    del x
