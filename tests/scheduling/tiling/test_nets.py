"""Nets that are written out, over the batch: in tiles and in micro-batches."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.scheduling.tiling.whole_steps import (
    RATE,
    check_values,
    descent,
    normal,
    rewritten,
    temporaries,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

BATCH, SIZE, WIDTH, PARTS = 8, 16, 8, 4
HOW = {"micro-batches": MicroBatches(PARTS), "tiles": Tiles(limit=0, n=PARTS)}


def mean_square(found, wanted):
    return ((found - wanted) ** 2).mean()


def conv(x, kernel, stride=1, **groups):
    names = ("NHWC", "HWIO", "NHWC")
    how = {"dimension_numbers": names, **groups}
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", **how)


def group_norm(x, groups=2):
    y = x.reshape(*x.shape[:-1], groups, -1)
    mean = y.mean((1, 2, 4), keepdims=True)
    variance = y.var((1, 2, 4), keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)


# -- a U-Net


def repeated(x, kernel):
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def resized(x, kernel):
    batch, height, width, features = x.shape
    return jax.image.resize(x, (batch, 2 * height, 2 * width, features), "linear")


def transposed(x, kernel):
    return lax.conv_transpose(x, kernel, (2, 2), "SAME")


def unet(up):
    """Two levels with skips, attention at the lowest; `up`: how it is made larger."""

    def loss(p, x, y):
        block = lambda x, kernel, *stride: jax.nn.silu(
            group_norm(conv(x, kernel, *stride))
        )
        first = block(x, p["in"])
        second = block(first, p["down"], 2)
        low = block(second, p["lowest"], 2)
        places = low.reshape(low.shape[0], -1, low.shape[-1])
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", places @ p["key"], places))
        low = low + (scores @ places).reshape(low.shape)
        second = block(jnp.concatenate([up(low, p["up"]), second], -1), p["back"])
        first = block(jnp.concatenate([up(second, p["up"]), first], -1), p["last"])
        return mean_square(conv(first, p["out"]), y)

    shapes = {
        **{"in": (3, 3, 3, WIDTH), "out": (3, 3, WIDTH, 3), "key": (WIDTH, WIDTH)},
        **dict.fromkeys(["down", "lowest"], (3, 3, WIDTH, WIDTH)),
        **dict.fromkeys(["back", "last"], (3, 3, 2 * WIDTH, WIDTH)),
        "up": (2, 2, WIDTH, WIDTH),
    }
    params = {name: normal(k, *shapes[name]) for k, name in enumerate(shapes)}
    return descent(loss), (params, images(1), images(2))


def images(seed: int, size: int = SIZE):
    return normal(seed, BATCH, size, size, 3)


# -- a ResNet


def frozen_batch_norm(x):
    mean, variance = jnp.linspace(-0.1, 0.1, WIDTH), jnp.linspace(1.0, 2.0, WIDTH)
    return (x - mean) * lax.rsqrt(variance)


def resnet(norm, pool):
    def loss(p, x, y):
        x = pool(jax.nn.relu(norm(conv(x, p["in"], 2))), (3, 3), (2, 2), "SAME")
        for first, second in zip(p["first"], p["second"], strict=True):
            inner = jax.nn.relu(norm(conv(x, first)))
            x = jax.nn.relu(x + norm(conv(inner, second)))
        return mean_square(x.mean((1, 2)) @ p["head"], y)

    params = {
        "in": normal(0, 7, 7, 3, WIDTH),
        "first": normal(1, 2, 3, 3, WIDTH, WIDTH),
        "second": normal(2, 2, 3, 3, WIDTH, WIDTH),
        "head": normal(3, WIDTH, 10),
    }
    return descent(loss), (params, images(4, 2 * SIZE), normal(5, BATCH, 10))


def depthwise():
    """Convolutions in groups, whose gradients are those of groups of the batch."""

    def loss(p, x, y):
        x = conv(x, p["in"])
        x = jax.nn.relu(group_norm(conv(x, p["depth"], feature_group_count=WIDTH)))
        x = conv(x, p["groups"], feature_group_count=2)
        return mean_square(x @ p["out"], y)

    params = {
        "in": normal(0, 3, 3, 3, WIDTH),
        "depth": normal(1, 3, 3, 1, WIDTH),
        "groups": normal(2, 3, 3, WIDTH // 2, WIDTH),
        "out": normal(3, WIDTH, 3),
    }
    return descent(loss), (params, images(4), images(5))


def gradients_of_examples():
    """Each example's own gradient, clipped: convolutions with a kernel an example."""

    def loss(p, x, y):
        return mean_square(conv(jnp.tanh(conv(x[None], p[0])), p[1])[0], y)

    def step(p, x, y):
        values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(p, x, y)
        norm = jnp.sqrt(sum((g**2).sum((1, 2, 3, 4)) for g in grads))
        share = 1 / jnp.maximum(1, norm)
        total = [jnp.einsum("b...,b->...", g, share) for g in grads]
        return [w - RATE * g / len(x) for w, g in zip(p, total, strict=True)], values

    params = [normal(0, 3, 3, 3, WIDTH), normal(1, 3, 3, WIDTH, 3)]
    return step, (params, images(2), images(3))


# -- a transformer


def transformer():
    def loss(p, x, y):
        mask = jnp.tril(jnp.ones((SIZE, SIZE), bool))
        for w in zip(p["qkv"], p["up"], p["down"], strict=True):
            q, k, v = jnp.split(_normed(x) @ w[0], 3, -1)
            scores = jnp.einsum("bshd,bthd->bhst", _heads(q), _heads(k))
            scores = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            x = x + jnp.einsum("bhst,bthd->bshd", scores, _heads(v)).reshape(x.shape)
            x = x + jax.nn.gelu(_normed(x) @ w[1]) @ w[2]
        return mean_square(x, y)

    params = {
        "qkv": normal(0, 2, WIDTH, 3 * WIDTH),
        "up": normal(1, 2, WIDTH, 4 * WIDTH),
        "down": normal(2, 2, 4 * WIDTH, WIDTH),
    }
    return descent(loss), (params, *(normal(k, BATCH, SIZE, WIDTH) for k in (3, 4)))


def _heads(x):
    return x.reshape(*x.shape[:2], 2, WIDTH // 2)


def _normed(x):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


NETS = {
    "unet, repeated": lambda: unet(repeated),
    "unet, resized": lambda: unet(resized),
    "unet, transposed": lambda: unet(transposed),
    "resnet, group norm": lambda: resnet(group_norm, nn.max_pool),
    "resnet, frozen norm": lambda: resnet(frozen_batch_norm, nn.avg_pool),
    "depthwise": depthwise,
    "gradients of examples": gradients_of_examples,
    "transformer": transformer,
}


@pytest.mark.fast("transformer-micro-batches")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", some_fast(NETS, "transformer"))
def test_a_net_takes_less_and_gives_the_same(name, how):
    step, args = NETS[name]()
    done = rewritten(step, args, HOW[how])
    assert done.did(type(HOW[how])), done.notes
    check_values(step, args, done)
    # an example of four takes a quarter; weights and the sums of gradients stay
    whole = jax.make_jaxpr(step)(*args)
    assert temporaries(done.jaxpr) < temporaries(whole) / 2


# -- operations that go through the places of an example


def pooled(h):
    return nn.max_pool(h, (2,), (1,), "SAME")


def routed(h):
    share, experts = lax.top_k(jax.nn.softmax(h), 2)
    chosen = jax.nn.one_hot(experts, h.shape[-1], dtype=h.dtype)
    return jnp.einsum("bske,bsk,bse->bse", chosen, share, h)


def windows_of_examples(h):
    read = lambda one: lax.dynamic_slice(one, (jnp.argmax(one[:, 0]), 0), (1, WIDTH))
    write = lambda one, row: lax.dynamic_update_slice(one, 2 * row, (3, 0))
    return jax.vmap(lambda one: write(one, read(one)))(h)


def linear_recurrence(h):
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return lax.associative_scan(combine, (jax.nn.sigmoid(h), h), axis=1)[1]


def solved(h):
    matrices = jnp.einsum("bsd,btd->bst", h, h) + 5 * jnp.eye(h.shape[1])
    return jnp.linalg.cholesky(matrices) @ h


def in_buckets(h):
    of = jnp.arange(h.shape[1]) % 3
    add = lambda one: jax.ops.segment_sum(one, of, 3)
    return h + jax.vmap(add)(h)[:, of]


def nearest_levels(h):
    levels = jnp.linspace(-1.0, 1.0, 5)
    return h + levels[jnp.searchsorted(levels, h, method="compare_all") % 5]


OPERATIONS = {
    "cumsum": lambda h: jnp.cumsum(h, 1),
    "cummax": lambda h: lax.cummax(h, 1),
    "sort": lambda h: jnp.sort(h, 1),
    "argsort": lambda h: jnp.take_along_axis(h, jnp.argsort(h, 1), 1),
    "update": lambda h: h.at[:, 2:4].set(3 * h[:, :2]),
    "scatter": lambda h: h.at[:, jnp.array([1, 3, 1])].add(h[:, :3]),
    "roll": lambda h: jnp.roll(h, 2, 1) + jnp.flip(h, 1),
    "fourier": lambda h: jnp.fft.fft(h, axis=1).real,
    "largest": lambda h: h + lax.approx_max_k(h, 1)[0],
    **{
        fn.__name__: fn
        for fn in (
            *(pooled, routed, windows_of_examples, linear_recurrence, solved),
            *(in_buckets, nearest_levels),
        )
    },
}


@pytest.mark.fast("routed-tiles")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", some_fast(OPERATIONS, "routed"))
def test_what_goes_through_the_places_of_an_example(name, how):
    loss = lambda p, x, y: mean_square(OPERATIONS[name](x @ p[0]) @ p[1], y)
    args = (
        normal(0, 2, WIDTH, WIDTH),
        normal(1, BATCH, 8, WIDTH),
        normal(2, BATCH, 8, WIDTH),
    )
    step = descent(loss)
    done = rewritten(step, args, HOW[how])
    assert done.did(type(HOW[how])), done.notes
    assert [row.n for row in done.description.tiles] == [PARTS]
    check_values(step, args, done)
