"""For each row of the table a program that has it, and one with the way round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SDS = jax.ShapeDtypeStruct
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


class Case(NamedTuple):
    """A program: with the fault, or with the way round."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


# -- xla#49143: a table's gradient, summed in a loop

PARTS, VOCABULARY, WIDTH, EXAMPLES, LENGTH = 4, 96, 128, 32, 8


def table_loss(table, ids, cotangents):
    return jnp.mean(jnp.sum(table[ids] * cotangents, axis=-1))


def summed_tables(mesh, apart=False, direct=False):
    """The gradient of a table over parts of the examples, which devices share."""

    def step(table, ids, cotangents):
        def body(total, part):
            if direct:
                return total.at[part[0]].add(part[1]), None
            grad = jax.grad(table_loss)(table, *part)
            return total + (lax.optimization_barrier(grad) if apart else grad), None

        parts = lambda x: jnp.moveaxis(x.reshape(-1, PARTS, *x.shape[1:]), 1, 0)
        each = parts(ids), parts(cotangents)
        return lax.scan(body, jnp.zeros_like(table), each)[0]

    shape = EXAMPLES, LENGTH
    place = lambda *axes: NamedSharding(mesh, P(*axes))
    args = (
        SDS((VOCABULARY, WIDTH), F32, sharding=place()),
        SDS(shape, I32, sharding=place("data")),
        SDS((*shape, WIDTH), F32, sharding=place("data")),
    )
    return Case(step, args)


# -- xla#42481: rows of a table that is sharded by rows


def reduced_table(table, ids, cotangents):
    """The lookup of a table that is the same on all devices in the forward pass."""
    whole = jax.sharding.reshard(table, P(None, None, reduced={"model"}))
    rows = whole.at[ids].get(out_sharding=P(None, "model", None))
    return jnp.sum(rows * cotangents)


# -- jax#39100: pieces with margins

PIECES, OWN, BEFORE, BEHIND = 4, 2, 1, 2
PADDED = OWN + BEFORE + BEHIND


def with_margins(mesh, apart=False):
    """Pieces of an array are padded, scaled and put together, twice."""

    def widened(x):
        if apart:
            pieces = x.reshape(PIECES, OWN)
            return jnp.pad(pieces, ((0, 0), (BEFORE, BEHIND))).reshape(-1)
        padded = (jnp.pad(one, (BEFORE, BEHIND)) for one in jnp.split(x, PIECES))
        return jnp.concatenate(list(padded))

    def narrowed(x):
        if apart:
            pieces = x.reshape(PIECES, PADDED)
            return pieces[:, BEFORE : BEFORE + OWN].reshape(-1)
        own = (one[BEFORE : BEFORE + OWN] for one in jnp.split(x, PIECES))
        return jnp.concatenate(list(own))

    def step(x, weights):
        first = narrowed(widened(x) * weights)
        return first + narrowed(widened(narrowed(weights)))

    spread = NamedSharding(mesh, P("data"))
    sizes = PIECES * OWN, PIECES * PADDED
    return Case(step, tuple(SDS((n,), F32, sharding=spread) for n in sizes))


# -- xla#49119: an array that is updated, then rolled


def rolled_update(apart=False):
    def step(x, a, b, c, shift):
        sums = jnp.flip(jnp.cumsum(jnp.flip(x, 2), axis=2, dtype=I32), 2)
        sides = (-2, -1, 0), (1, 2, 0), (-1, -2, 0)
        cropped = lax.pad(sums, I32(0), sides)
        corner = lax.dynamic_slice(cropped, (0, 0, 0), (6, 4, 5)) * 2 + 1
        updated = lax.dynamic_update_slice(cropped, corner, (a, b, c))
        if apart:
            updated = lax.optimization_barrier(updated)
        return jnp.roll(updated, shift, axis=1)

    return Case(step, (SDS((16, 8, 12), I32), *[SDS((), I32)] * 4))


# -- xla#49176: rows that move on by one


def moved_rows(x):
    rows = x * 2
    return rows.at[1:].set(rows[:-1]).reshape(1, *x.shape)


def joined_rows(x):
    rows = x * 2
    return jnp.concatenate([rows[:1], rows[:-1]]).reshape(1, *x.shape)


ROWS = np.arange(128, dtype=np.int32).reshape(8, 16)
MOVED = Case(moved_rows, (ROWS,))
JOINED = Case(joined_rows, (ROWS,))

# -- jax#40101: a number in each iteration


def recurrence(x, trips):
    """Each element of the one before."""
    put = lambda i, x: x.at[i + 1].set(0.5 * x[i] + 1)
    return lax.fori_loop(0, trips, put, x)


def rows_written(x):
    """Rows of 512 bytes."""
    return lax.fori_loop(0, 1000, lambda i, x: x.at[i].set(x[i - 1] * 0.5 + 1), x)


NUMBERS = Case(lambda x: recurrence(x, x.size - 1), (SDS((2**15,), F32),), (0,))
STACKED = Case(
    lambda x: lax.scan(lambda c, _: (c + x, c), x, length=2**15)[1], (SDS((), F32),)
)
WIDE_ROWS = Case(rows_written, (SDS((1024, 128), F32),), (0,))

# -- xla#45912: a loop between two updates in place

SIZE, READS = 2**20, 7


def read_between(x):
    y = jnp.exp(x)
    add = lambda i, s: s + y[i * 1000]
    return y + lax.fori_loop(0, READS, add, F32(0))


def read_before(x):
    y = jnp.exp(x)
    rows = y[jnp.arange(READS) * 1000]
    return y + lax.fori_loop(0, READS, lambda i, s: s + rows[i], F32(0))


BETWEEN = Case(read_between, (SDS((SIZE,), F32),), (0,))
BEFORE_LOOP = Case(read_before, (SDS((SIZE,), F32),), (0,))

# -- jax#39025: the scatter of an eager gradient


def columns(x):
    return x[:, np.arange(8), :]


def scattered(cotangents):
    """What the eager gradient of `columns` compiles: one operation."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(0, 2),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
    )
    zeros = jnp.zeros_like(cotangents)
    ids = np.arange(8, dtype=np.int32)[:, None]
    return lax.scatter_add(zeros, ids, cotangents, dimensions)


def gradient_in_jit(x, cotangents):
    return jax.vjp(columns, x)[1](cotangents)[0] * 0.5 + x


_CUBE = SDS((256, 8, 128), F32)
EAGER = Case(scattered, (_CUBE,))
IN_JIT = Case(gradient_in_jit, (_CUBE, _CUBE))

# -- xla#49299: a number of a schedule, looked up in a loop

_LEVELS = np.linspace(1, 0, 17).astype(np.float32)
_EDGES = np.arange(17).astype(np.float32)
_TIMES = np.arange(10).astype(np.float32)


def looked_up(examples, method="scan"):
    """A scan over times, each of which is looked up for all examples."""

    def body(x, time):
        times = jnp.full((examples,), time)
        ids = jnp.searchsorted(_EDGES, times, method=method)
        return x * jnp.asarray(_LEVELS)[ids][:, None], None

    step = lambda x: lax.scan(body, x, _TIMES)[0]
    return Case(step, (SDS((examples, 4), F32),))


def searched_first():
    ids = lambda: jnp.searchsorted(_EDGES, _TIMES)
    body = lambda x, i: (x * jnp.asarray(_LEVELS)[i], None)
    return Case(lambda x: lax.scan(body, x, ids())[0], (SDS((1, 4), F32),))


# -- jax#40830: sums of which each device keeps a part


def parts_of_sums(mesh, size):
    part = lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
    step = jax.shard_map(part, mesh=mesh, in_specs=P(), out_specs=P("data"))
    return Case(step, (SDS((size,), F32),))


# -- cuDNN's attention


def attended(dtype=BF16, by=0, heads=64, bias=None, mask=None):
    """A gradient by the queries, or by the bias."""
    x = SDS((2, 128, 4, heads), dtype)

    def loss(x, bias):
        how = {"implementation": "cudnn"}
        allowed = None if mask is None else jnp.ones(mask, bool)
        out = jax.nn.dot_product_attention(x, x, x, bias=bias, mask=allowed, **how)
        return jnp.sum(out.astype(F32))

    return Case(jax.grad(loss, by), (x, bias))
