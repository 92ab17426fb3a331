"""Heads over the vocabulary in steps that XLA partitions: values, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.ir import jaxprs
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.arrays import array
from tests.scheduling.tiling.roundings import longest
from tests.scheduling.tiling.test_sharded_micro_batches import rewritten
from tests.scheduling.tiling.test_sharded_tiles import (
    WIDTH,
    WORDS,
    after,
    arguments,
    assert_same,
    mesh_of,
    normal,
    pinned,
    sent,
    step_of,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

# way, how the table is sharded; None as it is for that way
TABLES = {
    "data": ("data", None),
    "FSDP, width": ("FSDP", None),
    "FSDP, words": ("FSDP", P("data", None)),
    "tensor parallel": ("FSDP and tensor parallel", None),
    "words over both": ("FSDP and tensor parallel", P(("model", "data"), None)),
}
# of 3 the last block has fewer words
CASES = [(table, n) for table in TABLES for n in (3, 4)]


@pytest.mark.parametrize("case", some_fast(CASES, ("FSDP, words", 4)), ids=str)
def test_values_and_no_new_collective(case):
    name, n = case
    way, spec = TABLES[name]
    mesh = mesh_of(way)
    step, (params, tokens) = step_of(pinned(mesh)), arguments(way, mesh)
    if spec is not None:
        table = jax.device_put(params["table"], NamedSharding(mesh, spec))
        params = {**params, "table": table}
    args = params, tokens
    whole, _ = rewritten(step, args)
    run, found = rewritten(step, args, VocabularyTiles(n=n))
    assert found.did(VocabularyTiles)
    # the sum of exponentials is rescaled in each block
    roundings = 3 * n + longest(
        jaxprs.trace(functools.partial(after, step), *args).jaxpr
    )
    assert_same(after(jax.jit(step), *args), after(run, *args), roundings)
    before, now = sent(whole, args), sent(run, args)
    del before["in tiles"], now["in tiles"]
    assert all(now[kind] <= before[kind] for kind in {*before, *now}), (before, now)


@pytest.mark.parametrize("n", some_fast((2, 3, 4), 3))
def test_each_device_has_blocks_of_its_own_words(n):
    """Labels, and the most likely words, are found on the device that has them."""

    def step(w, x, labels):
        def loss(w, x):
            logits = x @ w
            log_probs = jax.nn.log_softmax(logits)
            picked = jnp.take_along_axis(log_probs, labels[:, None], -1)[:, 0]
            right = jnp.argmax(logits, -1) == labels
            return -picked.mean(), right

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)

    mesh = mesh_of("FSDP and tensor parallel")
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rows = 32
    w, x = normal(WIDTH, WORDS), normal(rows, WIDTH)
    labels = np.random.default_rng(0).integers(WORDS, size=rows)
    labels[::2] = np.argmax(x @ w, -1)[::2]
    args = put(w, None, "model"), put(x, "data"), put(array(labels, jnp.int32), "data")
    run, found = rewritten(step, args, VocabularyTiles(n=n))
    assert found.did(VocabularyTiles)
    roundings = 3 * n + longest(jaxprs.trace(step, *args).jaxpr)
    (value, right), grads = jax.jit(step)(*args)
    (own_value, own_right), own_grads = run(*args)
    assert_same((value, grads), (own_value, own_grads), roundings)
    assert right.sum() >= rows // 2
    np.testing.assert_array_equal(own_right, right)
    before, now = sent(jax.jit(step), args), sent(run, args)
    # the weights stay where they are, and so do the words of a block
    assert now["all-gather"] <= before["all-gather"]
