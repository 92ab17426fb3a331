"""A `shard_map` round a net, differentiated outside of it: little is kept."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling._passes import rewrite

DEVICES, LAYERS, ROWS, WIDTH = 8, 12, 64, 16
MESH = jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
# float32: a few roundings of each of the layers, of values of about one
RTOL = 8 * LAYERS * 2.0**-24


def layer(h, w):
    a = jnp.sin(h @ w)
    b = jnp.cos(a) * a
    return jnp.tanh(b) * b + h, jnp.mean(b)


def net(p, x):
    h, means = jax.lax.scan(layer, x, p)
    return h, jnp.sum(means)[None]


def mapped(check_vma=True):
    specs = {"in_specs": (P(), P("data")), "out_specs": (P("data"), P("data"))}
    return jax.shard_map(net, mesh=MESH, check_vma=check_vma, **specs)


def step_of(fn):
    def step(p, x):
        def loss(p):
            h, means = fn(p, x)
            return jnp.mean(h**2) + jnp.mean(means)

        value, g = jax.value_and_grad(loss)(p)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, p, g)

    return step


def arguments(devices=DEVICES):
    r = np.random.default_rng(0)
    p = jnp.asarray(r.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.float32)
    x = jnp.asarray(r.standard_normal((devices * ROWS, WIDTH)), jnp.float32)
    return p, x


def stacked(closed) -> int:
    """How many arrays the forward scan stacks that are as large as a layer's input."""
    scans = [e for e in jaxprs.walk(closed) if e.primitive.name == "scan"]
    forward = next(e for e in scans if not e.params["reverse"])
    outs = (v.aval.shape for v in forward.outvars)
    return sum(shape == (LAYERS, ROWS, WIDTH) for shape in outs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_keeps_what_the_net_alone_keeps(check_vma):
    plain = jax.make_jaxpr(step_of(net))(*arguments(devices=1))
    inside = jax.make_jaxpr(step_of(mapped(check_vma)))(*arguments())
    least = stacked(rewrite(plain, {}).jaxpr)
    assert least < stacked(plain) <= stacked(inside)
    assert stacked(rewrite(inside, {}).jaxpr) == least


@pytest.mark.parametrize("check_vma", [True, False])
def test_computes_the_same(check_vma):
    step = step_of(mapped(check_vma))
    args = arguments()
    traced = jax.make_jaxpr(step)(*args)
    ours = rewrite(traced, {}).jaxpr
    assert stacked(ours) < stacked(traced)
    want = jax.jit(step)(*args)
    got = jax.jit(lambda *xs: jaxprs.evaluate(ours, xs))(*args)
    chex.assert_trees_all_close(got, list(want), rtol=RTOL, atol=RTOL)


def test_the_compiled_step_is_smaller():
    step, args = step_of(mapped()), arguments()
    ours = jaxmem.schedule(step).lower(*args).compile().memory_analysis()
    plain = jax.jit(step).lower(*args).compile().memory_analysis()
    one = LAYERS * ROWS * WIDTH * 4  # a stack of the layers, on one device
    assert ours.temp_size_in_bytes <= plain.temp_size_in_bytes - 4 * one


def test_what_others_read_of_it_stays():
    """The net's output is a residual of the loss, too."""

    def step(p, x):
        loss = lambda p: jnp.mean(jnp.tanh(mapped()(p, x)[0]))
        value, back = jax.vjp(loss, p)
        return value, mapped()(p, x)[0], *back(jnp.ones_like(value))

    args = arguments()
    ours = rewrite(jax.make_jaxpr(step)(*args), {}).jaxpr
    got = jax.jit(lambda *xs: jaxprs.evaluate(ours, xs))(*args)
    chex.assert_trees_all_close(got, list(jax.jit(step)(*args)), rtol=RTOL, atol=RTOL)
