"""Steps on meshes of explicit axes: values, types and bytes as on Auto axes.

A schedule changes the order of sums alone, so after `STEPS` steps in float64 parameters
are those of the plain step to far less than the rounding of float32.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.ir.auto_axes import explicit_types, on_auto_axes, without_types
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.docs_code import DOCS, blocks, run
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")
LAYERS, WIDTH, HIDDEN, WORDS, BATCH, TOKENS, STEPS = 3, 32, 64, 128, 32, 8, 3
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (EXPLICIT, AUTO),
}
WAYS = {"data": (None, None), "FSDP": ("data", None), "tensor": (None, "model")}


class Sizes(NamedTuple):
    layers: int = LAYERS
    width: int = WIDTH
    hidden: int = HIDDEN
    words: int = WORDS
    batch: int = BATCH
    tokens: int = TOKENS


SMALL = Sizes()


class Training(NamedTuple):
    """A step, its arguments, and the mesh in which it is called."""

    step: Callable
    args: tuple[Any, Any]
    context: Callable


def training(way: str, kinds: str, mesh=None, sizes=SMALL) -> Training:
    """Layers of an MLP and a head, as users write them for these kinds of axes.

    On a mesh of absent chips the arguments are types.
    """
    types = KINDS[kinds]
    here = mesh is None
    mesh = jax.make_mesh((4, 2), ("data", "model"), types) if here else mesh
    shard, tensor = WAYS[way]
    # over an axis that is Auto, a type says nothing
    said = tensor if types[1] is EXPLICIT or types[0] is AUTO else None

    def held(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def gathered(w, spec, own):
        """A weight on all devices that share examples; its gradient is as it is."""
        if types[0] is EXPLICIT:
            return reshard(w, P(*spec))
        gather = jax.custom_vjp(lambda w: held(w, *spec))
        gather.defvjp(lambda w: (held(w, *spec), ()), lambda _, g: (held(g, *own),))
        return gather(w)

    def product(x, w):
        if types[0] is EXPLICIT:
            return jnp.dot(x, w, out_sharding=P("data", None, None))
        return held(x @ w, "data")

    def layer(x, w):
        up = gathered(w["up"], (None, said), (shard, said))
        down = gathered(w["down"], (said, None), (said, shard))
        return x + product(jnp.tanh(x @ up), down), None

    def loss(params, x):
        x, _ = lax.scan(layer, x, params["layers"])
        scores = x @ gathered(params["head"], (None, None), (None, shard))
        return jax.nn.logsumexp(scores, -1).mean() - scores.mean()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def put(seed, shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        if not here:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        x = np.random.default_rng(seed).standard_normal(shape)
        return jax.device_put(x * shape[-2] ** -0.5, sharding)

    s = sizes
    layers = {
        "up": put(0, (s.layers, s.width, s.hidden), None, shard, tensor),
        "down": put(1, (s.layers, s.hidden, s.width), None, tensor, shard),
    }
    params = {"layers": layers, "head": put(2, (s.width, s.words), None, shard)}
    x = put(3, (s.batch, s.tokens, s.width), "data")
    context = jax.set_mesh if here else use_abstract_mesh
    return Training(step, (params, x), functools.partial(context, mesh))


def trained(run: Callable, params, x) -> list[Any]:
    params = jax.tree.map(jnp.copy, params)
    for _ in range(STEPS):
        params, value = run(params, x)
    return [*jax.tree.leaves(params), value]


def assert_trained_alike(run: Callable, own: Training) -> None:
    wanted = trained(jax.jit(own.step), *own.args)
    for x, y in zip(trained(run, *own.args), wanted, strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kinds", some_fast(("explicit", "mixed"), "explicit"))
@pytest.mark.parametrize("way", some_fast(WAYS, "FSDP"))
def test_within_a_budget(way, kinds):
    """Half of what the step takes beside its arguments."""
    own = training(way, kinds, sizes=Sizes(tokens=64))
    how = {"target": "cpu", "donate_argnums": 0}
    with own.context():
        report = jaxmem.estimate(own.step, *own.args, **how)
        own_bytes = report.argument_bytes
        budget = own_bytes + (report.peak_bytes - own_bytes) // 2
        step = jaxmem.schedule(own.step, budget=budget, tile=True, cache=False, **how)
        plan = step.plan(*own.args)
        assert plan.scheduled.peak_bytes <= budget
        assert plan.residuals or plan.tiles
        assert_trained_alike(step, own)


CASES = [(way, kinds) for way in WAYS for kinds in ("explicit", "mixed")]
CONFIGS: dict[str, tuple[Any, ...]] = {
    "recomputed": (Recompute(1e-3),),
    "tiles": (Recompute(1e-3), Tiles(limit=0, n=2)),
    "vocabulary": (VocabularyTiles(n=4),),
    "micro-batches": (MicroBatches(2),),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_budget(case):
    own = training(*case)
    with own.context():
        step = jaxmem.schedule(own.step, donate_argnums=0)
        assert step.plan(*own.args).released_bytes
        assert_trained_alike(step, own)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", some_fast(CASES, ("FSDP", "explicit")), ids=str)
def test_each_pass(case, config):
    own = training(*case)
    configs = CONFIGS[config]
    with own.context():
        step = jaxmem.schedule(own.step, donate_argnums=())
        found = step.rewritten(Choice("h100", configs), *own.args)
        assert all(found.did(type(one)) for one in configs)
        tree = jax.tree.structure(jax.eval_shape(own.step, *own.args))
        leaves = lambda args: found.run(jax.tree.leaves(args))
        run = jax.jit(lambda *args: jax.tree.unflatten(tree, leaves(args)))
        assert_trained_alike(run, own)


def test_without_a_mesh_in_context():
    """The types of arguments name the mesh."""
    mesh = jax.make_mesh((8,), ("data",), (EXPLICIT,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rng = np.random.default_rng(0)
    params = put(rng.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH)
    x = put(rng.standard_normal((BATCH, WIDTH)), "data")

    def step(params, x):
        def loss(params):
            x_, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)
            return jnp.square(x_).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    own = Training(step, (params, x), contextlib.nullcontext)
    assert_trained_alike(jaxmem.schedule(step, donate_argnums=0), own)


def test_inside_another_jit_types_tell_how_arguments_are_sharded():
    own = training("FSDP", "explicit")
    plans = []

    def outer(params, x):
        step = jaxmem.schedule(own.step, donate_argnums=0)
        plans.append(step.plan(params, x))
        return step(params, x)

    with own.context():
        assert_trained_alike(jax.jit(outer), own)
        alone = jaxmem.schedule(own.step, donate_argnums=0).plan(*own.args)
    assert plans[0].released_bytes == alone.released_bytes


def test_jitted_with_shardings_of_an_explicit_mesh():
    own = training("FSDP", "explicit")
    shardings = jax.tree.map(lambda x: x.sharding, own.args)
    jitted = jax.jit(own.step, in_shardings=shardings, donate_argnums=0)
    with own.context():
        assert_trained_alike(jaxmem.schedule(jitted), own)


@pytest.mark.parametrize("way", WAYS)
def test_predicted_as_on_auto_axes(way):
    def predicted(kinds):
        own = training(way, kinds)
        with own.context():
            how = {"target": "h100", "donate_argnums": 0}
            return jaxmem.scheduling.predict(own.step, *own.args, **how)

    auto, explicit, mixed = map(predicted, KINDS)
    for found in (explicit, mixed):
        assert found.argument_bytes == auto.argument_bytes
        assert found.peak_bytes == pytest.approx(auto.peak_bytes, rel=0.01)


def test_what_types_say_beside_operations_becomes_a_constraint():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (EXPLICIT, EXPLICIT))
    put = lambda shape, *spec: jax.device_put(
        jnp.ones(shape), NamedSharding(mesh, P(*spec))
    )

    def step(x, w):
        y = jnp.sin(x) @ reshard(w, P(None, "model"))
        z = jnp.cos(y) + jnp.dot(y, w, out_sharding=P("data", "model"))
        return reshard(z, P(None, ("data", "model"))).sum(0)

    with jax.set_mesh(mesh):
        args = put((8, 8), "data"), put((8, 8), "data", "model")
        closed = jax.make_jaxpr(step)(*args)
        types = explicit_types(closed)
        assert types is not None
        bare = without_types(closed, types)
        with on_auto_axes():
            assert explicit_types(bare) is None
        held = [e for e in jaxprs.walk(bare) if e.primitive.name.startswith("shard")]
        asked = [e.params["sharding"].spec for e in held]
        own = [P(None, "model"), P("data", "model"), P("data", "model")]
        assert asked == [*own, P(None, ("data", "model"))]
        got = jax.jit(lambda *xs: types.run(bare, xs))(*args)
        assert jax.typeof(got[0]) == jax.typeof(jax.jit(step)(*args))


def forms(mesh) -> dict[str, Callable]:
    """Losses that are not layers of products alone."""
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    scale = put(np.random.default_rng(9).standard_normal((BATCH, WIDTH)), "data")
    shared = lambda w, x: jnp.tanh(x @ w) + lax.pmean(x, "data")

    def mapped(x, w, axes):
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        run = jax.shard_map(lambda x, w: shared(w, x), axis_names=axes, **specs)
        return run(x, reshard(w, P()))

    def dropped(x, w):
        shape = {"shape": x.shape, "out_sharding": P("data", None)}
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, **shape)
        return jnp.where(keep, jnp.tanh(x @ w), 0.0)

    def looked_up(x, w):
        rows = (jnp.abs(x[:, 0]) * 8).astype(int) % WIDTH
        return w.at[rows].get(out_sharding=P("data", None)) * x

    def branched(x, w):
        branches = lambda x, w: jnp.tanh(x @ w), lambda x, w: x @ w
        return lax.cond(w.sum() > 0, *branches, x, w)

    by_auto = jax.sharding.auto_axes(
        lambda x, w: jnp.tanh(x @ w), out_sharding=P("data", None)
    )
    return {
        "a map": lambda x, w: mapped(x, w, {"data", "model"}),
        "a map over one axis": lambda x, w: mapped(x, w, {"data"}),
        "random bits": dropped,
        "a table": looked_up,
        "a branch": branched,
        "an inner jit": jax.jit(lambda x, w: jnp.tanh(x @ w)),
        "remat": jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w))),
        "auto axes inside": by_auto,
        "an array of its own": lambda x, w: jnp.tanh(x @ w) * scale,
    }


FORMS = (
    *("a map", "a map over one axis", "random bits", "a table", "a branch"),
    *("an inner jit", "remat", "auto axes inside", "an array of its own"),
)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_layer_is_made_of(form):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (EXPLICIT, EXPLICIT))
    layer = forms(mesh)[form]

    def step(params, x):
        def loss(params):
            y, _ = lax.scan(lambda x, w: (x + layer(x, w), None), x, params)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rng = np.random.default_rng(0)
    params = put(rng.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH)
    args = params, put(rng.standard_normal((BATCH, WIDTH)), "data")
    own = Training(step, args, functools.partial(jax.set_mesh, mesh))
    with own.context():
        assert_trained_alike(jaxmem.schedule(step, donate_argnums=0), own)


@pytest.mark.slow
def test_the_example_of_the_page_runs(capsys):
    page = blocks(DOCS / "many_devices.md")
    typed = next(block for block in page if "AxisType" in block)
    run(f"{page[0]}\n{typed}", {}, "many_devices")
    assert "8 devices" in capsys.readouterr().out


SIZES = Sizes(layers=4, width=256, hidden=1024, words=2048, batch=64, tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["explicit", "mixed"])
@pytest.mark.parametrize("way", WAYS)
def test_absent_chips(way, kinds):
    """Predicted as on Auto axes, and scheduled into half of what can be saved."""
    predicted = {}
    for one in ("auto", kinds):
        axes = ("data", "model")
        mesh = jaxmem.target_mesh("h100", (4, 2), axes, axis_types=KINDS[one])
        own = training(way, one, mesh, SIZES)
        how = {"target": "h100", "donate_argnums": 0}
        with own.context():
            predicted[one] = jaxmem.scheduling.predict(own.step, *own.args, **how)
            report = jaxmem.estimate(own.step, *own.args, **how)
            rest = report.peak_bytes - report.argument_bytes
            budget = report.argument_bytes + rest // 2
            step = jaxmem.schedule(own.step, budget=budget, tile=True, **how)
            plan = step.plan(*own.args)
            found = jaxmem.lint(own.step, *own.args, donate_argnums=0)
        checks = {finding.check for finding in found}
        assert one == "auto" or "lost batch axis" not in checks
        assert plan.scheduled.peak_bytes <= budget
    about = pytest.approx(predicted["auto"].peak_bytes, rel=0.01)
    assert predicted[kinds].peak_bytes == about
