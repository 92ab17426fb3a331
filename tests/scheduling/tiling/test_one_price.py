"""Tiles, heads and micro-batches are priced alike, and for one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.scheduling import schedule
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.sets import some_fast

N, LAYERS, TOKENS, WIDTH, WORDS = 8, 2, 512, 64, 4096
PASSES = {
    "tiles": Tiles(limit=0, n=4),
    "heads": VocabularyTiles(limit=0, n=4),
    "micro-batches": MicroBatches(n=4),
}


@pytest.fixture(scope="module")
def mesh():
    return jaxmem.target_mesh("h100", (N,), ("data",))


def mlp(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def written_out(params, x):
    for layer in zip(*params["layers"].values(), strict=True):
        x, _ = mlp(x, dict(zip(params["layers"], layer, strict=True)))
    return x


def scanned(params, x):
    return lax.scan(mlp, x, params["layers"])[0]


def step_of(layers):
    def step(params, x, labels):
        def loss(params):
            logits = layers(params, x) @ params["head"]
            own = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return step


def arguments(tokens: int, mesh=None):
    """The same weights on each device, and its share of the tokens."""

    def put(shape, dtype, *spec):
        where = None if mesh is None else NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    narrow = jnp.bfloat16
    layers = {
        "up": put((LAYERS, WIDTH, 4 * WIDTH), narrow),
        "down": put((LAYERS, 4 * WIDTH, WIDTH), narrow),
    }
    params = {"layers": layers, "head": put((WIDTH, WORDS), narrow)}
    x = put((tokens, WIDTH), narrow, "data")
    return params, x, put((tokens,), jnp.int32, "data")


def rows(step, args, *configs, target="h100"):
    found = schedule(step, donate_argnums=0, progress=False)
    return found.rewritten(Choice(target, configs), *args).tiles


@pytest.mark.fast("tiles-scanned", "heads-scanned")
@pytest.mark.parametrize(
    "layers", some_fast([written_out, scanned], scanned), ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", PASSES)
def test_eight_devices_have_the_rows_of_one_with_its_share(mesh, name, layers):
    step = step_of(layers)
    alone = rows(step, arguments(TOKENS), PASSES[name])
    spread = rows(step, arguments(N * TOKENS, mesh), PASSES[name])
    figures = lambda found: [(r.n, r.bytes_before, r.bytes_after) for r in found]
    # numbers of the step, such as how many tokens there are, are on each device
    assert np.allclose(figures(alone), figures(spread), rtol=1e-5) and alone
    assert [r.seconds for r in spread] == pytest.approx([r.seconds for r in alone])
    assert sum(row.seconds for row in alone) > 0  # of launches, at these sizes


def test_all_parts_count_the_bytes_of_the_same_step():
    """Each holds what the step holds while the head runs, before."""
    step = step_of(written_out)
    found = [rows(step, arguments(TOKENS), config) for config in PASSES.values()]
    assert len({max(row.bytes_before for row in of_pass) for of_pass in found}) == 1
    wide = 4 * TOKENS * WORDS  # logits and their gradients in bfloat16
    for of_pass in found:
        assert wide / 2 <= max(row.bytes for row in of_pass) <= wide
