"""Tiles of steps that XLA partitions: values, and what the devices send each other.

In float64 a step in tiles may be off by m u of the largest result, where m counts the
roundings on the longest path of three steps (`roundings`) and u is half of eps.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import count
from jaxmem import schedule
from jaxmem.ir import jaxprs
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.arrays import array
from tests.scheduling.tiling.roundings import longest

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

LAYERS, WIDTH, HIDDEN, WORDS, TOKENS, HEADS = 2, 16, 32, 64, 16, 4
EACH = 4  # examples of a device along the data
STEPS = 3
# way -> shape of the mesh, names of its axes
WAYS: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
    "data": ((8,), ("data",)),
    "FSDP": ((8,), ("data",)),
    "FSDP and tensor parallel": ((4, 2), ("data", "model")),
}
COLUMNS, ROWS = ("qkv", "up"), ("out", "down")


def spec_of(way: str, name: str) -> P:
    tensor = "model" if way == "FSDP and tensor parallel" else None
    if way == "data":
        return P()
    if name == "table":
        return P(tensor, "data")
    return P(None, "data", tensor) if name in COLUMNS else P(None, tensor, "data")


def mesh_of(way: str, kind: AxisType = AxisType.Auto):
    shape, names = WAYS[way]
    return jax.make_mesh(shape, names, (kind,) * len(shape))


def layer(x, w):
    """Causal attention, whose mask counts tokens, and an MLP."""
    qkv = jnp.split(x @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in qkv)
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    x = x + jnp.einsum("bhst,bthd->bshd", p, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(place, params, tokens):
    """The mean over examples, each of which has a weight by its number."""
    x = place(params["table"][tokens[:, :-1]])
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    log_probs = jax.nn.log_softmax(x @ params["table"].T)
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
    number = lax.broadcasted_iota(picked.dtype, picked.shape, 0)
    return -jnp.mean(picked * (1 + number / len(tokens)))


def step_of(place):
    def step(params, tokens):
        value, grads = jax.value_and_grad(functools.partial(loss, place))(
            params, tokens
        )
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    return step


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    return rng.standard_normal(shape) * shape[-2] ** -0.5


def arguments(way: str, mesh, dtype=jnp.float64):
    shapes = {
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    made = lambda name, shape: put(array(normal(*shape), dtype), spec_of(way, name))
    layers = {name: made(name, shape) for name, shape in shapes.items()}
    params = {"layers": layers, "table": made("table", (WORDS, WIDTH))}
    shape = EACH * WAYS[way][0][0], TOKENS + 1
    words = np.random.default_rng(1).integers(WORDS, size=shape)
    return params, put(array(words, jnp.int32), P("data"))


def pinned(mesh):
    where = NamedSharding(mesh, P("data"))
    return lambda x: lax.with_sharding_constraint(x, where)


def rewritten(step, args, tiles: Tiles):
    """The step with nothing kept of the layers, in tiles or not."""
    choice = Choice("h100", (Recompute(1e-3), tiles))
    found = schedule(step, donate_argnums=()).rewritten(choice, *args)
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*args):
        leaves = jaxprs.evaluate(found.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(tree, leaves)

    return jax.jit(run), found


def after(step, params, tokens) -> tuple:
    """(parameters, losses) of a few steps."""
    losses = []
    for _ in range(STEPS):
        params, value = step(params, tokens)
        losses.append(value)
    return params, losses


def assert_same(wanted, got, roundings: int) -> None:
    """To roundings of the largest number: where terms cancel, theirs is left."""
    pairs = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
    scale = max(float(jnp.abs(x).max()) for x, _ in pairs)
    error = max(float(jnp.abs(x - y).max()) for x, y in pairs) / scale
    assert 0 < error <= roundings * 2.0**-53, error


def test_values():
    for way in WAYS:
        for n in (2, 4, 8):
            step = step_of(pinned(mesh_of(way)))
            args = arguments(way, mesh_of(way))
            run, found = rewritten(step, args, Tiles(limit=0, n=n))
            print(way, n, [(t.n, t.axis, t.shape) for t in found.description.tiles])
            closed = jaxprs.trace(functools.partial(after, step), *args).jaxpr
            assert_same(after(jax.jit(step), *args), after(run, *args), longest(closed))
            a = count_of(jax.jit(step).lower(*args).compile().as_text())
            base, _ = rewritten(step, args, Tiles())
            b = count_of(base.lower(*args).compile().as_text())
            c = count_of(run.lower(*args).compile().as_text())
            print(a)
            print(b)
            print(c)


def count_of(text):
    found = Counter()
    for c in count(text):
        found[c.opcode, c.in_loop] += c.times * c.bytes
    return dict(found)
