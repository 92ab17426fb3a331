"""Which axes regions are cut along: odd lengths, and masks that nobody keeps.

In float64 what tiles change is the order of sums. No path from an input to a result of
these steps has 10,000 roundings, so results differ by less than 10,000 eps of the
largest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.ir import jaxprs
from jaxmem.ir.scans import size_of
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.tiling.tiles import Tile, TiledLists, Tiles

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

MOST = 1e4 * float(jnp.finfo(jnp.float64).eps)
WIDTH, WORDS = 8, 96


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float64)


def rewritten(step, args, config: Tiles) -> Rewritten:
    closed = jaxprs.trace(step, *args).jaxpr
    return rewrite(closed, {}, None, Choice("h100", (config,)))


def tiles_of(found: Rewritten) -> list[Tile]:
    done = [one for record in found.records for _, one in record.rewrites]
    return [tile for one in done if isinstance(one, TiledLists) for tile in one.tiles]


def largest(closed) -> int:
    """Bytes of the largest array that an equation makes, in loops too."""
    return max(size_of(v) for eqn in jaxprs.walk(closed) for v in eqn.outvars)


def assert_same_values(found: Rewritten, step, args, most: float = MOST) -> None:
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    run = jax.jit(functools.partial(jaxprs.evaluate, found.jaxpr))
    for x, y in zip(run(jax.tree.leaves(args)), wanted, strict=True):
        difference = np.abs(np.asarray(x - y)).max()
        assert difference <= most * np.abs(np.asarray(y)).max()


def head(rows: int):
    words = jnp.arange(rows) * 7 % WORDS

    def loss(x, w):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, words)
        return losses.mean()

    args = normal(rows, WIDTH), normal(WIDTH, WORDS)
    return jax.value_and_grad(loss, argnums=(0, 1)), args


@pytest.mark.fast("45-5")
@pytest.mark.parametrize("rows, n", [(45, 5), (49, 7)])
def test_rows_that_no_power_of_two_divides(rows, n):
    step, args = head(rows)
    # two arrays of this size live at one time: the others are fused into their readers
    found = rewritten(step, args, Tiles(limit=2 * rows * WORDS * 8 // 4))
    (tile,) = tiles_of(found)
    assert tile.found.region.n == n
    assert tile.found.region.axes[tile.found.seed] == 0
    assert_same_values(found, step, args)
    assert largest(found.jaxpr) <= max(rows * WORDS // n, rows * WIDTH, 768) * 8


def test_a_count_that_divides_no_axis():
    step, args = head(45)
    found = rewritten(step, args, Tiles(limit=0, n=7))
    assert not tiles_of(found)
    assert_same_values(found, step, args)


def test_attention_holds_no_mask():
    def loss(q, k, v):
        causal = {"is_causal": True, "implementation": "xla"}
        return jnp.square(jax.nn.dot_product_attention(q, k, v, **causal)).sum()

    rows, heads = 64, 2
    args = tuple(normal(1, rows, heads, WIDTH) + k for k in range(3))
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    found = rewritten(step, args, Tiles(limit=0, n=8))
    # the softmax is in float32, whatever its operands are: sums of 64 terms
    assert_same_values(found, step, args, rows * float(jnp.finfo(jnp.float32).eps))
    # neither scores nor a mask: an eighth of the rows
    assert largest(found.jaxpr) <= heads * rows * rows * 8 // 8
