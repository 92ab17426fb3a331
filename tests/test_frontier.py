"""The policies that the frontier compares with keep what they are called after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import blocks, frontier
from benchmarks.models import named, wrapped
from jaxmem.ir import jaxprs
from tests.scheduling.test_scan_residuals import stacked

LLAMA = "Llama-1B blocks, 2 x 2048"
ON_DEVICE = frontier.here(LLAMA)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    made, smaller = frontier.made, blocks.smaller
    wide = lambda config: dataclasses.replace(smaller(config), dtype=jnp.float32)
    monkeypatch.setattr(blocks, "smaller", wide)
    of = lambda name, policy=None: made(name, policy, small=True)
    monkeypatch.setattr(frontier, "made", of)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def names_in(policy: str) -> set[str]:
    step, args = frontier.stack_under(LLAMA, policy)
    found = jaxprs.walk(jax.make_jaxpr(step)(*args))
    return {e.params["name"] for e in found if e.primitive.name == "name"}


def test_products_are_marked_as_maxtext_marks_them():
    every = {*named.OUTPUTS.values(), "context"}
    assert names_in("save_qkv_proj") == every
    assert not names_in("nothing_saveable")


def test_what_experts_give_is_marked_too():
    config, layer, _ = frontier.LARGE["Mixtral blocks, fused, 2 x 2048"]
    config = dataclasses.replace(blocks.smaller(config), fused=False)
    model = blocks.Stack(config, layer)
    step, args = blocks.gradient_of_stack(model, (2, 64))
    eqns = jaxprs.walk(jax.make_jaxpr(named.with_names(step))(*args))
    assert "mlpwo" in {e.params["name"] for e in eqns if e.primitive.name == "name"}


def kept(policy: str) -> int:
    """Bytes that the forward scan hands to the backward one."""
    step, args = frontier.stack_under(LLAMA, policy)
    return sum(stacked(jax.make_jaxpr(step)(*args)))


def test_policies_keep_the_products_that_they_list():
    """Beyond a layer's input: batch 2, 64 positions, float32, two layers."""
    config = blocks.smaller(blocks.LLAMA_1B)
    row = lambda channels: 2 * 2 * 64 * channels * 4
    keys = 2 * config.width * config.kv_heads // config.heads
    least, out = kept("nothing_saveable"), row(config.width)
    assert least == out
    qkv = row(config.width + keys)
    assert kept("save_out_proj") - least == out
    assert kept("save_qkv_proj") - least == qkv
    assert kept("save_dot_except_mlp") - least == qkv + out
    assert kept("save_dot_with_context_except_mlp") - least == qkv + 2 * out
    # nothing needs the output of the MLP, which is only added
    assert kept("save_dot_except_mlpwi") - least == qkv + out


@pytest.mark.fast("plain", "save_qkv_proj", "nn.remat, every second layer")
@pytest.mark.parametrize("policy", ON_DEVICE)
def test_each_is_the_same_gradient(policy):
    step, (params, x, key) = frontier.stack_under(LLAMA, policy)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    drawn = lambda s: jax.random.normal(next(keys), s.shape, s.dtype) * 0.05
    params, x = jax.tree.map(drawn, params), drawn(x)
    key = jax.random.key_data(jax.random.key(1))
    got = step(params, x, key)
    if policy == frontier.EVERY_SECOND:
        got, params = one_after_another(got), one_after_another(params)
    want = frontier.stack_under(LLAMA, "plain")[0](params, x, key)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # some dozens of roundings of float32, in units of the largest
        np.testing.assert_allclose(g, w, atol=2**-17 * np.abs(w).max(), rtol=0)


SMALL = {
    "ResNet": lambda policy: wrapped.resnet(policy, (1, 1), 8, 2, 32),
    "U-Net": lambda policy: wrapped.unet(policy, 8, 2, 16),
    "graph network": lambda policy: wrapped.graph(policy, "small"),
    "LSTM": lambda policy: wrapped.lstm(policy, 1, 12, 2, 8),
    "LSTM, in chunks": lambda policy: wrapped.lstm(policy, 4, 12, 2, 8),
}


def by_name(tree) -> dict[str, jax.Array]:
    """Leaves by their paths; `nn.remat` gives a module another name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p).replace("Checkpoint", ""): x for p, x in leaves}


def values(name: str, policy) -> tuple[dict[str, jax.Array], int]:
    """What a model gives in small, and how often its trace has `jax.checkpoint`."""
    step, args = SMALL[name](policy)
    leaves, treedef = jax.tree.flatten(args)
    names = list(by_name(args))

    def drawn(s, name):
        if not isinstance(s, jax.ShapeDtypeStruct):
            return s
        at = np.random.default_rng(sum(name.encode()))
        return jnp.asarray(at.normal(0.1, 0.2, s.shape), s.dtype)

    args = jax.tree.unflatten(treedef, map(drawn, leaves, names))
    eqns = jaxprs.walk(jax.make_jaxpr(step)(*args))
    found = sum(e.primitive.name in ("checkpoint", "remat2") for e in eqns)
    return by_name(step(*args)), found


@pytest.mark.fast("graph network")
@pytest.mark.parametrize("name", SMALL)
def test_blocks_under_a_policy_have_the_same_gradient(name):
    want, without = values(name, None)
    got, some = values(name, jax.checkpoint_policies.nothing_saveable)
    assert some and not without
    assert got.keys() == want.keys()
    # the ResNet is in bfloat16; some gradients are zero but for rounding
    largest = max(np.abs(w).max() for w in want.values())
    for k, w in want.items():
        np.testing.assert_allclose(got[k], w, atol=2**-6 * largest, rtol=0)


def one_after_another(tree):
    """Stacks of layers of those of one pair."""
    first, second = (tree["layers"][name] for name in ("first", "second"))
    both = lambda a, b: np.concatenate([a, b])
    return {"layers": jax.tree.map(both, first, second)}
