"""The gradient of attention's bias by kernels of both platforms, as positions need it.

The reference is `implementation="xla"`. Simulated as in `test_attention.py` and
`test_attention_gpu.py`, in blocks of 128 and of 64; and compiled for an H100 and a TPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.memory import targets
from jaxmem.ops.attention.dot_product import dot_product_attention
from pallas_kernels import simulated
from pallas_kernels.attention.gpu import tables
from pallas_kernels.attention.tpu import blocks
from tests.arrays import array

AVAILABLE = {t.name for t in targets() if t.available}
BF16, F32 = jnp.bfloat16, jnp.float32
DROPPED = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(23)}
NAMES = "query", "key", "value", "bias"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setitem(tables.TILES, "forward", (64, 64))
    monkeypatch.setattr(blocks, "BLOCKS", (128,))


def normal(*shape, seed=0, dtype=F32):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def gradients(implementation, arrays, wanted, **kw):
    """Of the arrays named in `wanted`, under one jit."""
    g = normal(*arrays["query"].shape, seed=9, dtype=arrays["query"].dtype)

    def step(some):
        attend = lambda some: dot_product_attention(
            **(arrays | some), implementation=implementation, **kw
        )
        return jax.vjp(attend, some)[1](g)[0]

    some = {name: arrays[name] for name in wanted}
    return jax.block_until_ready(jax.jit(step)(some))


def check(platform, arrays, wanted=("bias",), **kw):
    """Four roundings of the dtype of the queries, of the size of the largest result.

    As in `test_attention_gpu.py`: both paths round output and probabilities. Kernels in
    float32 add up some 200 products in another order: `test_attention.py`'s 5e-6.
    """
    want = gradients("xla", arrays, wanted, **kw)
    with simulated(platform):
        got = gradients("pallas", arrays, wanted, **kw)
    dtype = arrays["query"].dtype
    for name in wanted:
        a, b = got[name], want[name]
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x.astype(F32)) for x in (a, b))
        eps = 5e-6 if dtype == F32 else 4 * float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(a, b, atol=eps * abs(b).max(), rtol=0)


def inputs(bias, b=2, t=128, s=128, n=2, k=2, h=64, dtype=BF16, bias_dtype=F32):
    sizes = (b, t, n, h), (b, s, k, h), (b, s, k, h)
    made = [normal(*x, seed=i, dtype=dtype) for i, x in enumerate(sizes)]
    made.append(normal(*bias, seed=5, dtype=bias_dtype))
    return dict(zip(NAMES, made, strict=True))


LENGTHS = {
    "query_seq_lengths": jnp.asarray([128, 40], jnp.int32),
    "key_value_seq_lengths": jnp.asarray([50, 128], jnp.int32),
}
SEGMENTS = {
    "query_segment_ids": jnp.arange(256, dtype=jnp.int32).reshape(2, 128) // 50,
    "key_value_segment_ids": jnp.arange(256, dtype=jnp.int32).reshape(2, 128) // 50,
}
MASK = {"mask": (jnp.arange(128) >= jnp.asarray([[70], [3]]))[:, None, None]}
PAIRS = {"mask": normal(1, 2, 128, 128, seed=7) > 0}
