"""What a mask selects, in every form it may have, and the errors it may earn."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from tests.freezing.problem import PATHS, params

FLOATS = [path for path in PATHS if path != "codes"]
LORA = ["layers/up/lora_a", "layers/up/lora_b"]
HEAD = ["head/bias", "head/kernel"]
TREE = jax.tree.map(lambda _: False, params())
MASKS = {
    "branch": ("head", HEAD),
    "all on a branch": ("head/**", HEAD),
    "anywhere": ("**/lora_*", LORA),
    "one name": ("layers/*/lora_?", LORA),
    "in the middle": ("layers/**/[bs]*", ["layers/norm/scale", "layers/up/bias"]),
    "everything": ("**", FLOATS),
    "several": (["head", "**/lora_a"], [*HEAD, "layers/up/lora_a"]),
    "expression": (re.compile("bias$"), ["head/bias", "layers/up/bias"]),
    "function": (lambda path, leaf: leaf.ndim == 1, ["head/bias"]),
    "mixed": (["head/bias", lambda path, leaf: "lora" in path], ["head/bias", *LORA]),
    "tree": ({**TREE, "head": {"bias": True, "kernel": False}}, ["head/bias"]),
    "prefix": ({"layers": False, "head": True, "codes": True}, HEAD),
    "true": (True, FLOATS),
}


@pytest.mark.parametrize("name", MASKS)
def test_selects(name):
    mask, want = MASKS[name]
    part = jaxmem.trainable(params(), mask)
    assert sorted(part.sizes.trained) == sorted(want)


def test_lists_and_dataclasses_have_paths_too():
    state = nnx.State({"blocks": nnx.State({0: {"w": jnp.ones(3)}})})
    for tree, pattern in (([{"w": jnp.ones(3)}], "0/w"), (state, "blocks/0")):
        trained, frozen = jaxmem.trainable(tree, pattern)
        merged = frozen.merge(trained)
        assert jax.tree.structure(merged) == jax.tree.structure(tree)


BAD = [
    ("kernel", ValueError, r"'\*\*/kernel' would match 'head/kernel'"),
    ("layers/up/lora_c", ValueError, "nearest paths are 'layers/up/lora_"),
    (["head", "heads"], ValueError, "'heads' matches no path; .* 'head/"),
    (re.compile("lora$"), ValueError, "first paths are 'head/bias'"),
    ("codes", ValueError, "has no gradient, as 'codes' of dtype int8"),
    (lambda path, leaf: False, ValueError, "selects none of 8 arrays"),
    (False, ValueError, "selects none"),
    ([], ValueError, "a prefix of it"),
    ({"head": True}, ValueError, "a prefix of it"),
    (None, ValueError, "a prefix of it"),
    (3, TypeError, "got 3 instead"),
    (nnx.LoRAParam, TypeError, "LoRAParam"),
]


@pytest.mark.parametrize("mask,error,message", BAD, ids=[m for *_, m in BAD])
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=message):
        jaxmem.trainable(params(), mask)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no array of floats"):
        jaxmem.trainable({"step": jnp.zeros((), jnp.int32)}, "**")


def test_says_what_is_saved():
    part = jaxmem.trainable(params(), "**/lora_*")
    text = str(part)
    # 3 layers of 2 x 6 and 6 x 2; with 3 x (36 + 6 + 6) and 21 frozen, 4 bytes each
    assert "72 of 237 parameters trained (30.4 %), in 2 of 7 arrays" in text
    assert "gradients    948 B     288 B           660 B" in text
    assert "two moments  1.85 KiB  576 B           1.29 KiB" in text
    assert "trained: layers/up/lora_a, layers/up/lora_b" in text
    table = part.__rich__()
    assert [c.header for c in table.columns] == [
        "bytes", "of all", "of the trained", "saved"
    ]  # fmt: skip
    assert "and 1 more" in str(jaxmem.trainable(params(), "**"))


def test_shapes_are_enough():
    shapes = jax.eval_shape(params)
    part = jaxmem.trainable(shapes, "head")
    assert part.sizes == jaxmem.trainable(params(), "head").sizes
    assert jax.tree.leaves(part.frozen.merge(part.params)) == jax.tree.leaves(shapes)


# -- weights of few bits, as qwix has them


class Codes(NamedTuple):
    """The leaves of a `qwix.QArray`, by their names."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None


def quantized(dtype):
    """A layer with a quantised kernel beside a bias and an adapter."""
    kernel = Codes(jnp.zeros((8, 6), dtype), jnp.ones((1, 6)))
    return {"kernel": kernel, "bias": jnp.zeros(6), "lora_a": jnp.zeros((8, 2))}


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint4, jnp.float8_e4m3fn])
@pytest.mark.parametrize("mask", [True, lambda path, leaf: True, re.compile("")])
def test_scales_of_quantised_weights_are_not_trained(mask, dtype):
    part = jaxmem.trainable({"up": quantized(dtype)}, mask)
    assert part.sizes.trained == ("up/bias", "up/lora_a")
    assert part.sizes.quantized_parameters == 48
    assert part.sizes.quantized_bytes == 48 // (2 if dtype == jnp.uint4 else 1) + 24
    text = str(part)
    assert "22 of 70 parameters trained (31.4 %), in 2 of 3 arrays" in text
    assert text.endswith("B, which have no gradient")


def test_a_mask_of_quantised_weights_alone():
    with pytest.raises(ValueError, match="selects none of 4 arrays"):
        jaxmem.trainable(quantized(jnp.int8), "kernel")
