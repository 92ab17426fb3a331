"""An activation right behind a batch or group norm keeps nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from benchmarks.models.vision import ResNet, ResNetConfig
from jaxmem import ops
from jaxmem.rewriting import auto_save
from tests.arrays import array

SHAPE, CHANNELS = (4, 6, 6, 8), 8
RNG = np.random.default_rng(0)
normal = lambda *shape: array(RNG.normal(size=shape), np.float32)
X, KERNEL, WEIGH = normal(*SHAPE), normal(CHANNELS, 5), normal(*SHAPE[:-1], 5)
SCALE, BIAS = normal(CHANNELS) + 1, normal(CHANNELS)
ACTS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}
NORMS = {
    "batch_norm": lambda x, *p: ops.batch_norm(x, *p)[0],
    "group_norm": lambda x, *p: ops.group_norm(x, *p, num_groups=2),
}


def product(x, kernel):
    return jnp.einsum("...c,cd->...d", x, kernel)


def lean(norm, act, x, scale, bias, kernel):
    normed = NORMS[norm](x, scale, bias)
    return product(getattr(ops, act)(normed, save="auto"), kernel)


def plain(norm, act, x, scale, bias, kernel):
    groups = 2 if norm == "group_norm" else 1
    axes = (1, 2, 4) if norm == "group_norm" else (0, 1, 2)
    wide = x.astype(jnp.float32)
    wide = wide.reshape(*x.shape[:-1], groups, -1) if groups > 1 else wide
    mean = wide.mean(axes, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(wide.var(axes, keepdims=True) + EPS[norm])
    scale, bias = scale[None, None, None], bias[None, None, None]
    y = wide.reshape(x.shape) * scale + bias
    return product(ACTS[act](y.astype(x.dtype)), kernel)


EPS = {"batch_norm": 1e-5, "group_norm": 1e-6}


def inputs(dtype="float32"):
    return X.astype(dtype), SCALE, BIAS, KERNEL.astype(dtype)


def gradients(fn, norm, act, args):
    loss = lambda *args: jnp.sum(fn(norm, act, *args).astype("float32") * WEIGH)
    return jax.jit(jax.value_and_grad(loss, range(4)))(*args)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_plain_jax(norm, act, dtype):
    args = inputs(dtype)
    chosen = lambda *rest: auto_save(lambda *args: lean(*rest[:2], *args))(*rest[2:])
    got, want = (gradients(f, norm, act, args) for f in (chosen, plain))
    # sums of some hundreds of products, rounded to the dtype on the way
    tolerance = 32 * float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("norm", NORMS)
def test_nothing_is_kept_but_what_the_norm_and_the_product_keep(norm, act):
    seen, x = [], inputs()[0]
    fn = lambda *args: lean(norm, act, *args)
    kept = jaxmem.residuals(auto_save(fn, on_choice=seen.append), *inputs())
    assert {choice.keeps for choice in seen} == {"nothing"}
    # beside the arguments the activation's output, for the kernel, and statistics
    assert x.nbytes <= kept.total_bytes <= x.nbytes + 1024


def test_with_given_statistics_it_follows_its_reader():
    seen, (x, scale, bias, kernel) = [], inputs()

    def fn(x, kernel):
        given = dict(mean=jnp.zeros(CHANNELS), var=jnp.ones(CHANNELS))
        normed = ops.batch_norm(x, scale, bias, **given)
        return product(ops.silu(normed, save="auto"), kernel)

    jaxmem.residuals(auto_save(fn, on_choice=seen.append), x, kernel)
    assert {choice.keeps for choice in seen} == {"output"}


@jax.numpy_dtype_promotion("standard")  # flax's batch norm mixes them
def test_a_convolutional_net_is_not_slower_once_it_is_substituted():
    """On an H100, by the compiled step: no barrier keeps gradients from fusing."""
    net = ResNet(ResNetConfig((2, 2, 2, 2)))
    x = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.bfloat16)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)

    def step_of(net):
        def loss(variables, x):
            y, _ = net.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean(y.astype("float32") ** 2)

        return jax.grad(loss)

    nets = net, jaxmem.substitute(net)
    before, after = (
        jaxmem.estimate(step_of(n), variables, x, target="h100") for n in nets
    )
    assert after.seconds <= 1.01 * before.seconds
    assert after.temp_bytes <= 1.01 * before.temp_bytes


def stack(fn, x, kernel):
    """Three layers in a scan, each under a checkpoint."""
    layer = jax.checkpoint(
        lambda x: x + fn("group_norm", "silu", x, SCALE, BIAS, kernel @ kernel.T)
    )
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]


TRANSFORMS = {
    "scan": lambda f: jax.grad(f, (0, 1)),
    "frozen": jax.grad,
    "vmap": lambda f: lambda x, w: jax.vmap(jax.grad(f), (0, None))(x[:, None], w),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w))[1],
    "second": lambda f: lambda x, w: jax.jvp(jax.grad(f, 1), (x, w), (x, w))[1],
}


@pytest.mark.parametrize("how", TRANSFORMS)
def test_under_transformations(how):
    lean_stack = auto_save(lambda x, w: jnp.sin(stack(lean, x, w)).sum())
    plain_stack = lambda x, w: jnp.sin(stack(plain, x, w)).sum()
    fns = (jax.jit(TRANSFORMS[how](f)) for f in (lean_stack, plain_stack))
    got, want = (f(X, KERNEL / 4) for f in fns)
    # sums of some thousands of products through three layers
    tolerance = 256 * float(jnp.finfo("float32").eps)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())
