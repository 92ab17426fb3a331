"""Arrays that are mostly padding on a TPU, and the rewrites that `lint` tells."""

import jax
import jax.numpy as jnp
import pytest
from jax import random

import jaxmem
from benchmarks.models import zoo
from benchmarks.models.transformers import LlamaLayer, PreLNLayer, Stack, StackConfig
from tests.memory.test_estimate import needs_h100, needs_tpu

pytestmark = needs_tpu

CHECK, TARGET = "padded", "tpu-v5e"
BITS = jax.ShapeDtypeStruct((2,), jnp.uint32)
FLAT = jax.ShapeDtypeStruct((1 << 18,), jnp.float32)


def found(fn, *args, target=TARGET):
    return jaxmem.lint(fn, *args, target=target).of(CHECK)


def peak(fn, *args):
    return jaxmem.estimate(fn, *args, target=TARGET).peak_bytes


def initialised(shape, dtype=jnp.float32):
    """Weights of [768, 1025], drawn in `shape`."""
    return lambda bits: random.normal(bits, shape, dtype).reshape(768, 1025)


def test_an_initialisation_in_pairs():
    """EasyDeL#108 in small: 147 MiB of weights, drawn as f32[19298688,2], took 9.2 GiB.

    jax.random drew pairs then, and reshaped them.
    """
    pairs = initialised((384 * 1025, 2))
    (one,) = found(pairs, BITS)
    assert one.severity == "warning" and "[393600,2] takes 192 MiB" in one.what
    assert "64 times its elements: its axis of 2 is padded to 128" in one.what
    assert one.bytes == 63 * 8 * 393600
    assert "test_padded.py" in one.where
    assert "give jax.random the shape [768,1025] itself" in one.remedy
    itself = initialised((768, 1025))
    assert not found(itself, BITS)
    assert peak(pairs, BITS) > 50 * peak(itself, BITS)


@pytest.mark.slow
def test_an_initialisation_that_jax_draws_in_parts():
    """Without partitionable keys bfloat16 is drawn in words of four, and reshaped."""
    drawn = lambda bits: random.normal(bits, (1500, 1025), jnp.bfloat16)
    with jax.threefry_partitionable(False):
        (one,) = found(drawn, BITS)
        assert "[384375,4]" in one.what and "32 times" in one.what
        assert "jax_threefry_partitionable" in one.remedy
        before = peak(drawn, BITS)
    with jax.threefry_partitionable(True):
        assert not found(drawn, BITS)
        assert before > 30 * peak(drawn, BITS)


def rows(x, y):
    return jnp.stack([x, y], -1).reshape(512, -1)


def test_a_reshape_that_may_split_the_long_axis():
    (one,) = found(rows, FLAT, FLAT)
    assert "float32[262144,2] takes 128 MiB" in one.what and "(rows)" in one.where
    assert one.remedy == "have it as [512,512,2] before the reshape to [512,1024]"

    def rewritten(x, y):
        split = [v.reshape(512, 512) for v in (x, y)]
        return jnp.stack(split, -1).reshape(512, -1)

    assert not found(rewritten, FLAT, FLAT)
    assert peak(rows, FLAT, FLAT) > 20 * peak(rewritten, FLAT, FLAT)
    x, y = jnp.arange(1 << 18), -jnp.arange(1 << 18)
    assert (rows(x, y) == rewritten(x, y)).all()


def test_a_reshape_to_one_axis():
    (one,) = found(lambda x: x.reshape(-1), jax.ShapeDtypeStruct((1 << 18, 2), "f4"))
    assert "test_padded.py" in one.where
    assert one.remedy.startswith("have it as [2,262144], with a long axis last")
    assert not found(lambda x: x.reshape(-1), jax.ShapeDtypeStruct((2, 1 << 18), "f4"))


def test_an_argument_with_an_axis_of_1():
    x = jax.ShapeDtypeStruct((1 << 16, 3), jnp.float32)
    masked = lambda x, mask: x * mask
    (one,) = found(masked, x, jax.ShapeDtypeStruct((1 << 16, 1), bool))
    assert one.where == "mask" and "bool[65536,1]" in one.what
    assert one.remedy == "drop the axis: [65536] in place of [65536,1]"
    masked = lambda x, mask: x * mask[:, None]
    assert not found(masked, x, jax.ShapeDtypeStruct((1 << 16,), bool))


def test_what_the_compiler_pads_little_is_no_finding():
    """It puts the long axis last by itself."""
    x = jax.ShapeDtypeStruct((1 << 16, 3), jnp.float32)
    assert not found(lambda x: x + 1, x)


def test_without_a_tpu_there_is_none():
    assert not jaxmem.lint(rows, FLAT, FLAT).of(CHECK)
    assert not found(rows, FLAT, FLAT, target="cpu")


@needs_h100
def test_a_gpu_has_none():
    assert not found(rows, FLAT, FLAT, target="h100")


@pytest.mark.parametrize(
    "layer", [PreLNLayer, pytest.param(LlamaLayer, marks=pytest.mark.slow)]
)
def test_layers_of_transformers_have_none(layer):
    """Heads of 64 elements, in lanes of 128."""
    model = Stack(StackConfig(4, 512, 8, 8, 2048, 0.0), layer)
    x = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda params, x: jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)
    assert not found(jax.value_and_grad(loss), params, x)


@pytest.mark.slow
def test_a_step_of_gpt2_has_none():
    step, args, donated = zoo.step("gpt2_small", batch=4, scanned=True)
    report = jaxmem.lint(
        step, *args, donate_argnums=donated, target=TARGET, timeout=3600
    )
    assert not report.of(CHECK)
