"""`residuals`: what is kept, what it is called, and what frozen inputs free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxmem import _compat
from jaxmem.memory import residuals

SDS = jax.ShapeDtypeStruct
X, W = SDS((8, 16), jnp.float32), SDS((16, 4), jnp.float32)


def test_a_product_keeps_its_arguments_alone():
    found = residuals(lambda x, w: x @ w, X, W)
    assert found.total_bytes == 0
    assert found.argument_bytes == (8 * 16 + 16 * 4) * 4
    assert {e.operation for e in found} == {"x", "w"}
    assert {e.kind for e in found} == {"argument"}


@pytest.mark.parametrize(
    ("argnums", "kept"), [(0, {"w"}), (1, {"x"}), ((0, 1), {"x", "w"})]
)
def test_frozen_arguments_free_what_only_they_need(argnums, kept):
    found = residuals(lambda x, w: x @ w, X, W, argnums=argnums)
    assert {e.operation for e in found} == kept


def test_an_intermediate_has_its_operation_and_line():
    def loss(x, w):
        hidden = jnp.sin(x @ w)
        return jnp.sum(jnp.exp(hidden))

    found = residuals(loss, X, W)
    made = {e.operation: e for e in found if e.kind == "intermediate"}
    assert set(made) == {"cos", "exp"}
    assert found.total_bytes == 2 * 8 * 4 * 4
    assert made["exp"].shape == (8, 4) and made["exp"].dtype == "float32"
    assert "test_residuals.py" in made["cos"].source
    assert "loss)" in made["cos"].source


def test_inside_jit_scan_and_where_the_innermost_operation_is_named():
    def loss(ws, x):
        def body(x, w):
            return jnp.where(x > 0, jnp.tanh(x @ w), x), None

        return jnp.sum(jax.lax.scan(body, x, ws)[0])

    found = residuals(jax.jit(loss), SDS((3, 16, 16), jnp.float32), X)
    operations = {e.operation for e in found}
    assert "gt" in operations and not operations & {"jit", "scan", "where"}
    assert all(
        "test_residuals.py" in e.source for e in found if e.kind == "intermediate"
    )
    stacked = [e for e in found if e.shape == (3, 8, 16)]
    assert stacked and "ws" in operations


def test_a_value_used_twice_is_counted_once():
    found = residuals(lambda x: jnp.sum(jnp.exp(x)) + jnp.sum(jnp.exp(x) * 2), X)
    once = residuals(lambda x: jnp.sum((y := jnp.exp(x)) * y), X)
    assert once.total_bytes == 8 * 16 * 4
    assert found.total_bytes == 2 * 8 * 16 * 4  # two exps, until a compiler merges them


def test_names_and_remat():
    def block(x, w):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x @ w), "mine")))

    policy = jax.checkpoint_policies.save_only_these_names("mine")
    found = residuals(jax.checkpoint(block, policy=policy), X, W)
    assert found.total_bytes == 8 * 4 * 4
    assert [e.operation for e in found if e.kind != "argument"] == ["name 'mine'"]
    assert residuals(jax.checkpoint(block), X, W).total_bytes == 0


def test_constants_integers_keys_and_trees():
    table = np.ones((8, 4), np.float32)
    key = SDS((), jax.random.key(0).dtype)

    def loss(p, tokens, key, flag, *, scale):
        keep = jax.random.bernoulli(key, 0.5, (8, 4))
        assert flag == "yes"
        return jnp.sum(jnp.where(keep, p["w"][tokens] * table * scale, 0.0))

    tokens = SDS((8,), jnp.int32)
    found = residuals(loss, {"w": W}, tokens, key, "yes", scale=jnp.float32(2))
    kinds = {e.kind: e for e in found}
    assert kinds["constant"].bytes == 8 * 4 * 4
    assert "p['w']" not in {e.operation for e in found}


def test_it_agrees_with_jax_itself():
    def loss(x, w):
        return jnp.sum(jax.nn.gelu(x @ w))

    x, w = jnp.ones(X.shape), jnp.ones(W.shape)
    theirs = sorted(str(aval.shape) for aval, _ in _compat.saved_residuals(loss, x, w))
    ours = [str(e.shape) for e in residuals(loss, x, w)]
    # jax lists literals too, which take no memory
    assert sorted(s for s in ours if s != "()") == [s for s in theirs if s != "()"]


def test_the_table_has_the_largest_first():
    found = residuals(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x) @ w)), X, W)
    assert [e.bytes for e in found] == sorted((e.bytes for e in found), reverse=True)
    lines = str(found).splitlines()
    assert "kept for the backward pass" in lines[0] and "float32[8,16]" in lines[1]
    assert len(lines) == 1 + len(found)
    assert found.__rich__().row_count == len(found)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("argnums=5", lambda: residuals(jnp.sin, X, argnums=5)),
        ("no floating-point", lambda: residuals(jnp.abs, SDS((3,), jnp.int32))),
        ("does not take", lambda: residuals(lambda x, w: x @ w, X, X)),
    ],
)
def test_bad_arguments(words, call):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
