"""The chain of operations that makes what is kept, in words."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def formulas(fn, *args):
    kept = jaxmem.residuals(fn, *args)
    return {e.formula for e in kept if e.kind == "intermediate"}


@pytest.mark.parametrize(
    ("fn", "formula"),
    [
        (lambda x: jnp.sin(x * jax.nn.sigmoid(-2.0 * x)), "sigmoid(-2 * x)"),
        (lambda x: jnp.sin(jnp.tanh(x) - (x - 1.0)), "cos(tanh(x) - (x - 1))"),
        (lambda x: jnp.exp(-(x**3) / 2.0), "exp(-x**3 / 2)"),
        (lambda x: jnp.sin(jnp.where(x > 0.0, x, 2.0 * x)), "x > 0"),
        (lambda x: jnp.sqrt(jnp.sum(x * x, -1)), "0.5 / sqrt(sum(x * x))"),
        (lambda x: jnp.sin(jax.jit(lambda x: x / 3.0)(x)), "cos(x / 3)"),
        (lambda x: jnp.exp(jax.lax.cumsum(x)), "exp(cumsum(x))"),
    ],
)
def test_words(fn, formula):
    found = formulas(fn, X)
    assert any(formula == f or f.startswith(formula) for f in found), found


def test_what_is_written_on_another_line_is_a_letter():
    def fn(x, w):
        y = jnp.tanh(x @ w)
        return jnp.exp(y * y)

    assert "exp(x * x)" in formulas(fn, X, W)
    assert "tanh(x @ y)" in formulas(fn, X, W) or "tanh(x)" in formulas(fn, X, W)


def test_a_long_chain_is_cut():
    def fn(x):
        return jnp.sin(
            jnp.tanh(jnp.sin(jnp.exp(jnp.cos(jnp.log1p(x + 2.0) * x) / x)) * x)
        )

    found = formulas(fn, X)
    assert found and all(0 < len(f) <= 60 for f in found)


def test_inside_a_scan_and_an_op_of_ours():
    def fn(ws, x):
        def step(x, w):
            x = jnp.sin(jaxmem.ops.gelu(x @ w) * 2.0)
            return x, None

        return jax.lax.scan(step, x, ws)[0]

    kept = jaxmem.residuals(fn, jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), X)
    assert any(e.formula == "cos(gelu(...) * 2)" for e in kept)
    own = [e for e in kept if "jaxmem.gelu" in e.path]
    assert all("test_formula.py" in e.line for e in kept if e.formula)
    assert not own or all(e.shape == (3, 8, 16) for e in own)


def test_the_module_and_the_users_line():
    def fn(x):
        with jax.named_scope("block"):
            return jax.nn.silu(x)

    (kept, *_) = [e for e in jaxmem.residuals(fn, X) if e.kind == "intermediate"]
    assert kept.path == "block" and "test_formula" in kept.line


def test_one_number_as_an_array():
    """The gradient of a masked array is zero where the mask is."""

    def fn(x):
        return jnp.sin(jnp.where(jnp.tril(jnp.ones((8, 16), bool)), x, 0.0))

    assert "full(0)" in formulas(fn, X) and "0" not in formulas(fn, X)


def test_what_an_op_makes_of_its_own_values_goes_by_its_name():
    key = jax.random.key(0)
    kept = formulas(lambda x: jnp.square(jaxmem.ops.dropout(x, 0.5, key)), X)
    assert any("dropout(...)" in f for f in kept), kept
    assert not any("where(" in f for f in kept), kept
