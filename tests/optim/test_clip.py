"""Clipping by layer, against NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.optim import accumulate_step, adama, clip_by_layer_norm
from tests.arrays import array

LAYERS = 3
MASK = {"embed": False, "decoder": {"layers": True, "norm": False}, "head": False}


def in_layers(path):
    return path.startswith("decoder/layers/")


def draw(dtype=jnp.float32):
    r = np.random.default_rng(0)
    normal = lambda *shape: array(r.standard_normal(shape), dtype)
    layers = {"w": normal(LAYERS, 4, 5), "b": normal(LAYERS, 5), "s": normal(LAYERS)}
    return {
        "embed": normal(7, 4),
        "decoder": {"layers": layers, "norm": normal(4)},
        "head": {"w": normal(4, 2), "b": normal(2)},
    }


def clipped(arrays, max_norm):
    """One layer's arrays, scaled down alike."""
    arrays = [np.asarray(a, np.float64) for a in arrays]
    norm = np.sqrt(sum((a**2).sum() for a in arrays))
    return [a * min(1.0, max_norm / norm) for a in arrays]


def reference(grads, max_norm):
    layers, head = grads["decoder"]["layers"], grads["head"]
    rows = [clipped([x[i] for x in layers.values()], max_norm) for i in range(LAYERS)]
    stacked = {k: np.stack([r[j] for r in rows]) for j, k in enumerate(layers)}
    return {
        "embed": clipped([grads["embed"]], max_norm)[0],
        "decoder": {
            "layers": stacked,
            "norm": clipped([grads["decoder"]["norm"]], max_norm)[0],
        },
        "head": dict(zip(head, clipped(head.values(), max_norm), strict=True)),
    }


def update(tx, grads):
    return jax.jit(tx.update)(grads, tx.init(grads))[0]


near = functools.partial(np.testing.assert_allclose, rtol=2e-6)


STACKED = {
    "function": in_layers,
    "mask": MASK,
    "branch": "decoder/layers",
    "pattern": "decoder/layers/**",
    "anywhere": "**/layers",
    "several": ["decoder/layers/[wb]", re.compile("layers/s$")],
    "mixed": ("decoder/layers/w", lambda path: path.endswith(("layers/b", "layers/s"))),
    "expression": re.compile("/layers/"),
}


@pytest.mark.parametrize("stacked", STACKED.values(), ids=STACKED)
@pytest.mark.parametrize("max_norm", [0.5, 2.5, 4.0, 100.0])
def test_equals_the_reference(stacked, max_norm):
    grads = draw()
    got = update(clip_by_layer_norm(max_norm, stacked), grads)
    jax.tree.map(near, got, reference(grads, max_norm))
    if max_norm == 100.0:
        jax.tree.map(np.testing.assert_array_equal, got, grads)


def test_without_stacks_a_layer_is_a_top_level_child():
    grads = draw()
    got = update(clip_by_layer_norm(1.0), grads)
    for name, part in grads.items():
        want = clipped(jax.tree.leaves(part), 1.0)
        for g, w in zip(jax.tree.leaves(got[name]), want, strict=True):
            near(g, w)


def test_bfloat16_is_summed_in_float32():
    grads = {"x": jnp.full((4096,), 1.0, jnp.bfloat16)}
    got = update(clip_by_layer_norm(1.0), grads)["x"]
    assert got.dtype == jnp.bfloat16
    # a bfloat16 sum would have stopped at 256
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1 / 64)


def test_zeros_and_odd_trees():
    tx = clip_by_layer_norm(1.0)
    grads = {"x": jnp.zeros(3), "none": None, "e": jnp.zeros((0, 2)), "s": jnp.ones(())}
    got = update(tx, grads)
    jax.tree.map(np.testing.assert_array_equal, got, grads)
    near(update(tx, jnp.full((4,), 3.0)), 0.5)
    near(update(clip_by_layer_norm(jnp.float32(1.0)), jnp.full((4,), 3.0)), 0.5)


def test_a_layer_of_a_scan_can_be_clipped_alone():
    """What lets it move into the backward pass: layer i needs only layer i."""
    grads, tx = draw(), clip_by_layer_norm(0.7, in_layers)
    whole = update(tx, grads)["decoder"]["layers"]
    for i in range(LAYERS):
        one = jax.tree.map(lambda x, i=i: x[i], grads["decoder"]["layers"])
        alone = update(clip_by_layer_norm(0.7), {"layer": one})["layer"]
        jax.tree.map(lambda w, a, i=i: near(w[i], a), whole, alone)


def test_in_a_masked_chain_before_adama():
    grads = draw()
    only = {"embed": True, "decoder": True, "head": False}
    clip = optax.masked(clip_by_layer_norm(0.5, in_layers), only)
    tx = optax.chain(clip, adama(1e-3))
    state = accumulate_step(tx, grads, tx.init(grads), grads, micro_batches=1)
    want = reference(grads, 0.5) | {"head": grads["head"]}
    jax.tree.map(lambda m, w: near(m, 0.1 * np.asarray(w)), state[1][0].mu, want)


@pytest.mark.parametrize(
    ("grads", "shapes"),
    [
        ({"a": {"x": jnp.ones((2, 3)), "y": jnp.ones((4,))}}, r"\(2, 3\), \(4,\)"),
        ({"a": {"x": jnp.ones(())}}, r"\(\)"),
    ],
)
def test_stacks_that_do_not_fit(grads, shapes):
    tx = clip_by_layer_norm(1.0, lambda path: True)
    with pytest.raises(ValueError, match=r"stacked leaves of \['a'\].*" + shapes):
        tx.update(grads, tx.init(grads))


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), float("inf")])
def test_bad_norm(max_norm):
    with pytest.raises(ValueError, match="max_norm=.* more than 0"):
        clip_by_layer_norm(max_norm)


@pytest.mark.parametrize("stacked", [3, 1.0, {"a": "layers"}, {"a": None}, ["a", True]])
def test_what_is_no_mask_is_refused_at_the_call(stacked):
    with pytest.raises(TypeError, match="stacked must be path patterns"):
        clip_by_layer_norm(1.0, stacked)


@pytest.mark.parametrize(
    ("stacked", "text"),
    [
        ("layers", r"'layers' matches no path; '\*\*/layers' would match"),
        (["decoder/layers", "decoder/blocks"], "'decoder/blocks' matches no path"),
        ("", "'' matches no path"),
        ([], "prefix of it"),
        ({"embed": True}, "prefix of it"),
    ],
)
def test_what_selects_nothing_is_refused(stacked, text):
    grads, tx = draw(), clip_by_layer_norm(1.0, stacked)
    with pytest.raises(ValueError, match=f"clip_by_layer_norm: stacked.*{text}"):
        tx.update(grads, tx.init(grads))
