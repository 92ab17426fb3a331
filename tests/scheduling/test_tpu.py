"""What a TPU's compiler does otherwise, in the graph of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from benchmarks.models import zoo
from jaxmem.ir import jaxprs
from jaxmem.memory.buffers.rows import FRAGMENTATION
from jaxmem.scheduling import predict
from jaxmem.scheduling.predict.operations import operations_of
from tests.scheduling.test_operations import SQUARE, made, pooled, square


def graph_of(fn, *args, tpu=True):
    return operations_of(jaxprs.trace(fn, *args).jaxpr, tpu=tpu)


def images(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def convolution(x, features: int):
    """Three by three, with a constant kernel."""
    kernel = jnp.asarray(np.ones((3, 3, x.shape[-1], features)), x.dtype)
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def twice(x, features: int):
    y = convolution(x, features)
    return convolution(jax.nn.relu(y), 8)


def test_a_product_computes_what_it_reads():
    fn = lambda x, u, v: jax.nn.gelu(x @ u) @ v
    args = [square(seed) for seed in range(3)]
    ops = graph_of(fn, *args)
    assert made(ops) == ["dot_general", "dot_general"]
    first = ops.graph.operations[0].outputs
    assert ops.graph.bytes_of(first) == SQUARE
    assert set(first) < set(ops.graph.operations[1].inputs)
    assert made(graph_of(fn, *args, tpu=False)) == ["dot_general", "mul", "dot_general"]


def test_so_it_does_in_a_loop():
    def fn(x, ws):
        step = lambda x, w: ((y := x @ w) + jax.nn.gelu(y) @ w, None)
        return lax.scan(step, x, ws)[0]

    args = square(), jnp.stack([square(1), square(2)])
    scratch = {}
    for tpu in (False, True):
        (loop,) = graph_of(fn, *args, tpu=tpu).graph.operations
        scratch[tpu] = loop.scratch
    assert scratch[True] <= scratch[False] - SQUARE
    found = {t: predict(fn, *args, target=t) for t in ("h100", "tpu-v5e", "tpu-v5p")}
    assert found["tpu-v5e"] == found["tpu-v5p"]
    assert found["h100"].temp_bytes - found["tpu-v5e"].temp_bytes == (
        scratch[False] - scratch[True]
    )


# As compiled MobileNetV2, VGG16 and ResNet-50 have them, in bytes of their elements.
TILES = [
    ((32, 112, 112, 96), 128 / 96),
    ((32, 224, 224, 64), 2),
    ((32, 56, 56, 24), 4),  # 32 images in 128 lanes
    ((32, 28, 28, 192), 256 / 192),
    ((32, 14, 14, 576), 640 / 576),
    ((1, 56, 56, 64), 2),
    ((1, 112, 112, 32), 128 / 112),  # a row of an image in 128 lanes
]


@pytest.mark.parametrize(("shape", "times"), TILES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_images_lie_in_tiles(shape, times, dtype):
    def fn(x):
        y = convolution(x, shape[-1])
        return convolution(jax.nn.relu(y), 8), jnp.sum(y)

    ops = graph_of(fn, images(*shape[:-1], 8, dtype=dtype))
    (made_first,) = ops.graph.operations[0].outputs
    size = np.dtype(dtype).itemsize * np.prod(shape)
    assert ops.graph.values[made_first].bytes == pytest.approx(size * times)


def test_what_convolutions_alone_read_is_rounded():
    """To bfloat16: they multiply no more than that."""
    ops = graph_of(lambda x: twice(x, 128), images(32, 16, 16, 8))
    assert made(ops) == ["conv_general_dilated"] * 2
    (made_first,) = ops.graph.operations[0].outputs
    assert ops.graph.values[made_first].bytes == 2 * 32 * 16 * 16 * 128


def test_of_few_images_what_lies_between_is_written():
    ops = graph_of(lambda x: twice(x, 128), images(4, 16, 16, 8))
    assert made(ops) == ["conv_general_dilated", "max", "conv_general_dilated"]
    sizes = [ops.graph.bytes_of(o.outputs) for o in ops.graph.operations[:2]]
    assert sizes == [4 * 4 * 16 * 16 * 128] * 2


def test_kernels_are_no_images():
    """Nor are their gradients, though a convolution makes them."""

    def fn(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.sum(y**2)

    kernel, x = images(3, 3, 8, 24), images(32, 16, 16, 8)
    ops = graph_of(lambda k, x: jax.grad(fn)(k, x) * 2, kernel, x)
    gradients = [
        ops.graph.values[n].bytes
        for n, v in enumerate(ops.variables)
        if v is not None and v.aval.shape == kernel.shape
    ]
    assert set(gradients) == {4 * 3 * 3 * 8 * 24}


def test_pools_make_no_zeros():
    fn = jax.grad(pooled, argnums=(0, 1))
    args = images(3, 3, 4, 8), images(1, 1, 1, 8), images(2, 16, 16, 4)
    names = {
        tpu: [v.name for v in graph_of(fn, *args, tpu=tpu).graph.values]
        for tpu in (False, True)
    }
    assert "zeros" in names[False]
    assert "zeros" not in names[True]


def test_a_target_that_there_is_not():
    with pytest.raises(ValueError, match="unknown target 'tpu-v9'.*tpu-v5e"):
        predict(jnp.sin, 1.0, target="tpu-v9")


@pytest.mark.slow
@pytest.mark.parametrize("name", [("vit_b", 1, True), ("alexnet", 32, False)])
def test_predicted_peaks_are_those_of_the_compiler(name, standard_jax):
    step, args, donate = zoo.step(*name)
    how = {"target": "tpu-v5e", "donate_argnums": donate}
    report = jaxmem.estimate(step, *args, **how)
    found = predict(step, *args, **how)
    # holes between buffers are the compiler's, and differ between versions of libtpu
    rows = report.at_peak
    holes = sum(r.bytes for r in rows if r.operation == FRAGMENTATION)
    assert found.peak_bytes == pytest.approx(report.peak_bytes - holes, rel=0.1)
