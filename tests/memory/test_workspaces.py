"""Workspaces of cuDNN's attention, in bytes that an H200's modules have."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory.compile.workspaces import workspace

BACKWARD = "__cudnn$fmhaSoftmaxBackward"


@pytest.mark.parametrize(
    "shape, size",
    [
        ((4, 16, 1024, 64), 17_039_616),
        ((2, 32, 2048, 64), 34_078_976),
        ((1, 16, 8192, 128), 67_633_408),
    ],
)
def test_bytes_are_those_of_a_device(shape, size):
    assert workspace(BACKWARD, [shape]) == size
    assert workspace("__cudnn$fmhaSoftmax", [shape]) == 256
    assert workspace("__cublas$gemm", [shape]) is None


def test_an_absent_gpu_has_it_too():
    q = jax.ShapeDtypeStruct((4, 1024, 16, 64), jnp.bfloat16)

    alone = lambda q, k, v: (
        jaxmem.ops.dot_product_attention(q, k, v).astype(jnp.float32).sum()
    )
    report = jaxmem.estimate(jax.grad(alone, (0, 1, 2)), q, q, q, target="h100")
    kept = 2 * q.size * q.dtype.itemsize  # the output and its gradient
    assert 17_039_616 <= report.temp_bytes <= 17_039_616 + kept + 2**20
