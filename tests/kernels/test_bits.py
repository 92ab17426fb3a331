"""Packing kernels give the very bytes of XLA's, and take them back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._bits import pack_bits, unpack_bits
from pallas_kernels import simulated
from pallas_kernels.bits import gpu as bits_gpu
from pallas_kernels.bits import tpu as bits_tpu
from tests.arrays import array
from tests.sets import some_fast

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
MODULES = {"tpu": bits_tpu, "cuda": bits_gpu}
TARGETS = {"tpu": "tpu-v5e", "cuda": "h100"}


def draw(shape, dtype):
    values = 3 * np.random.default_rng(0).standard_normal(shape)
    return array(values > 0 if dtype == "bool" else values, dtype)


def above(x):
    return x > 0


CASES = [("tpu", (2, 40, 130), "bfloat16"), ("cuda", (2, 31, 128), "bfloat16")]
MORE = [
    *(("tpu", (27, 24), "bool"), ("cuda", (16, 384), "bool")),
    *(("tpu", (300, 700), dtype) for dtype in ("float32", "int8", "uint8")),
    *(("cuda", (3, 15, 128), dtype) for dtype in ("float16", "int32", "int8")),
    ("tpu", (4, 5, 24, 16), "float32"),
]


@pytest.mark.parametrize(
    "platform, shape, dtype",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_equals_xla(platform, shape, dtype):
    module, x = MODULES[platform], draw(shape, dtype)
    mask = x if dtype == "bool" else above(x)
    holds = module.is_set if dtype == "bool" else above

    def there_and_back(x):
        packed = module.pack(x, holds)
        return packed, module.unpack(packed, shape[-2])

    with simulated(platform):
        packed, back = jax.jit(there_and_back)(x)
    want = pack_bits(mask)
    np.testing.assert_array_equal(packed, want)
    np.testing.assert_array_equal(back, mask)
    np.testing.assert_array_equal(back, unpack_bits(want, shape))


@pytest.mark.slow
@pytest.mark.parametrize("platform", MODULES)
def test_under_x64_with_blocks_of_another_size(platform):
    module = MODULES[platform]
    block = {"tpu": (256, 128), "cuda": 128}[platform]
    with jax.enable_x64(True), simulated(platform):
        mask = draw((20, 256), "bool")
        packed = jax.jit(lambda m: module.pack(m, block=block))(mask)
        back = jax.jit(lambda p: module.unpack(p, 20, block=block))(packed)
        np.testing.assert_array_equal(packed, pack_bits(mask))
        np.testing.assert_array_equal(back, mask)


def test_what_they_do_not_do_is_said():
    with pytest.raises(NotImplementedError, match="two axes or more"):
        bits_tpu.pack(draw((8,), "float32"))
    with pytest.raises(NotImplementedError, match="not float16"):
        bits_tpu.pack(draw((8, 128), "float16"))
    with pytest.raises(NotImplementedError, match="the last a multiple of 128"):
        bits_gpu.pack(draw((8, 100), "float32"))
    for module in MODULES.values():
        with pytest.raises(NotImplementedError, match="uint8"):
            module.unpack(jnp.zeros((1, 128), jnp.int32), 8)


@pytest.mark.parametrize("platform", some_fast(MODULES, "cuda"))
@pytest.mark.parametrize(
    "shape",
    [(512, 1024), *(pytest.param(s, marks=pytest.mark.slow) for s in [(4, 197, 768)])],
)
def test_compiles_and_allocates_nothing(platform, shape):
    target, module = TARGETS[platform], MODULES[platform]
    if target not in AVAILABLE:
        pytest.skip("targets extra")
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    packed = jax.eval_shape(pack_bits, jax.ShapeDtypeStruct(shape, bool))
    pack = jax.jit(lambda x: module.pack(x, above))

    def masked(packed, g):
        return jnp.where(module.unpack(packed, shape[-2]), g, 0)

    with jax.enable_x64(True):  # so that no index is an int64 unawares
        assert jaxmem.estimate(pack, x, target=target).temp_bytes < 1024
        report = jaxmem.estimate(jax.jit(masked), packed, x, target=target)
    assert report.temp_bytes <= x.size + 2**16  # the mask, a byte an element
