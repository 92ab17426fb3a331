"""Attention by other libraries: what they are given, and what they are refused."""

import sys

import jax
import jax.numpy as jnp
import pytest

from jaxmem.ops.attention.dot_product import dot_product_attention
from tests.ops.attention.test_attention import OPTIONS, Q, assert_same, normal, qkv
from tests.ops.attention.test_attention import value_and_grads as results


@pytest.fixture
def asked(monkeypatch):
    """The `implementation`s that `jax.nn` was asked for; it takes XLA instead."""
    plain, found = jax.nn.dot_product_attention, []

    def recorded(*args, implementation=None, **kwargs):
        found.append(implementation)
        return plain(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    return found


def check(library, args=(), **options):
    q, k, v = qkv()
    given = lambda how: (
        lambda q, k, v: dot_product_attention(
            *(q, k, v, *args), implementation=how, **options
        )
    )
    g = normal(*q.shape, seed=9)
    with jax.numpy_rank_promotion("allow"):
        found = results(given(library), (q, k, v), g)
    assert_same(found, results(given("xla"), (q, k, v), g))


@pytest.mark.fast("plain", "window of two sides", "causal window", "lengths")
@pytest.mark.parametrize("option", OPTIONS)
def test_cudnn_is_that_of_jax_nn(option, asked):
    check("cudnn", **OPTIONS[option])
    assert asked == ["cudnn"]


def test_cudnn_is_given_bias_and_mask(asked):
    mask = normal(1, 1, 13, 9, seed=5) > -1
    check("cudnn", (normal(2, 4, 1, 9, seed=4), mask))
    assert asked == ["cudnn"]


@pytest.mark.parametrize("option", ["plain", "causal", "scale"])
def test_tokamax(option, monkeypatch):
    pytest.importorskip("tokamax")
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # it reads its flags there
    check("tokamax", **OPTIONS[option])


def test_tokamax_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ImportError, match="pip install .*tokamax"):
        dot_product_attention(Q, Q, Q, implementation="tokamax")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate"),
        ({"save": 8}, "save"),
        ({"block_size": 4}, "block_size"),
        (
            dict.fromkeys(
                ("query_segment_ids", "key_value_segment_ids"), jnp.ones((2, 13), int)
            ),
            "query_segment_ids, key_value_segment_ids",
        ),
    ],
)
@pytest.mark.parametrize("library", ["cudnn", "tokamax"])
def test_what_libraries_do_not_take(library, options, name):
    with pytest.raises(ValueError, match=f"{library}' does not take {name}:"):
        dot_product_attention(Q, Q, Q, implementation=library, **options)
