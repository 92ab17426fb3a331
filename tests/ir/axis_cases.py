"""Operations with their labels as in einsum, for `test_axis_labels`.

Their operands are NumPy's, which compiles nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem import _compat


def normal(*shape, dtype=jnp.float32, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def integers(*shape, below=100):
    return np.asarray(np.random.default_rng(1).integers(0, below, shape), jnp.int32)


class Case(NamedTuple):
    """One operation; its labels for two parts as in einsum, "." where there is none."""

    text: str
    fn: Callable
    args: tuple[Any, ...] = ()


def equation(case: Case):
    (eqn,) = jax.make_jaxpr(case.fn)(*case.args).eqns
    return eqn


def operands(case: Case) -> list:
    """The values of the equation's operands, literals among them."""
    jaxpr = jax.make_jaxpr(case.fn)(*case.args).jaxpr
    given = dict(zip(jaxpr.invars, case.args, strict=True))
    literal = lambda v: isinstance(v, _compat.Literal)
    return [v.val if literal(v) else given[v] for v in jaxpr.eqns[0].invars]


X, FLAG = normal(2, 4, 6), np.asarray(True)


def elementwise():
    yield Case("abc,abc->abc", lax.add, (X, X))
    yield Case("ab.,abc->abc", lax.mul, (X[..., :1], X))
    yield Case("ab,.b->ab", lax.sub, (X[0], X[0, :1]))
    yield Case("a.,.b->ab", lax.add, (X[0, :, :1], X[0, :1]))  # each part meets all
    yield Case("abc,->abc", lambda x: lax.mul(x, 3.0), (X,))
    yield Case(",ab,ab->ab", lax.select_n, (FLAG, X[0], X[1]))
    yield Case("ab,ab,ab->ab", lax.select_n, (X[0] > 0, X[0], X[1]))
    yield Case(",abc,->abc", lambda x: lax.clamp(-0.5, x, 0.5), (X,))
    yield Case("abc->abc", lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,))
    yield Case("abc->abc", lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,))
    yield Case("abc->abc", lambda x: checkpoint_name(x, "x"), (X,))
    yield Case("ab,ab->ab", lax.complex, (X[0], X[1]))
    positive = np.abs(X[0]) + 0.5
    for fn in (lax.igamma, lax.igammac, lax.igamma_grad_a, lax.zeta, lax.polygamma):
        yield Case("ab,ab->ab", fn, (np.floor(positive) + 2, positive))
    for fn in (lax.bessel_i0e, lax.bessel_i1e):
        yield Case("ab->ab", fn, (positive,))
    yield Case("ab->ab", lax.clz, (integers(4, 6),))
    yield Case(
        "ab,ab,ab->ab", lax.betainc, (positive, positive, 1 / (1 + np.exp(-X[0])))
    )
    yield Case("ab->ab", lax.conj, (X[0] + 1j * X[1],))
    yield Case("abc->abc", lax.optimization_barrier, (X,))


def reshapes():
    re = lambda *shape: lambda x: lax.reshape(x, shape)
    yield Case("a.b->ab", re(8, 6), (X,))
    yield Case("ab.->ab", re(2, 24), (X,))
    yield Case("a..->a", re(48), (X,))
    yield Case("a->a..", re(2, 4, 6), (normal(48),))
    yield Case("ab->a.b", re(4, 2, 6), (normal(8, 6),))
    yield Case("a.b->.a.b", re(1, 8, 1, 6), (X,))
    yield Case(".a.b->ab", re(4, 6), (normal(1, 4, 1, 6),))
    yield Case("..a->a...", re(4, 1, 1, 1), (normal(1, 1, 4),))
    yield Case("a.->a.", re(4, 9), (normal(6, 6),))  # rows of 3 x 6 are 2 x 9
    yield Case("...->..", re(3, 5), (normal(1, 3, 5),))
    yield Case("..->..", re(3, 0), (normal(0, 2),))
    yield Case("a->.a", re(1, 4), (normal(4),))
    moved = lambda x: lax.reshape(x, (6, 8), dimensions=(2, 0, 1))
    yield Case("a.b->ba", moved, (X,))


def moves():
    bc = lambda shape, dims: lambda x: lax.broadcast_in_dim(x, shape, dims)
    yield Case("ab->cab", bc((2, 4, 6), (1, 2)), (X[0],))
    yield Case("a.->ab", bc((4, 6), (0, 1)), (normal(4, 1),))
    yield Case("->ab", bc((4, 6), ()), (jnp.float32(2),))
    yield Case("abc->cab", lambda x: lax.transpose(x, (2, 0, 1)), (X,))
    yield Case(".ab.->ab", lambda x: lax.squeeze(x, (0, 3)), (normal(1, 4, 6, 1),))
    yield Case("->ab", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1))
    yield Case("->a", lambda: lax.iota(jnp.float32, 6))
    yield Case("ab.->ab.", lambda x: lax.slice(x, (0, 0, 1), (2, 4, 5)), (X,))
    yield Case("a.b->a.b", lambda x: lax.slice(x, (0, 0, 0), X.shape, (1, 2, 1)), (X,))
    at = jnp.int32(1)
    read = lambda x, i: lax.dynamic_slice_p.bind(x, i, i, slice_sizes=(2, 6))
    yield Case(".a,,->.a", read, (X[0], at))
    write = lambda x, y, i: lax.dynamic_update_slice_p.bind(x, y, i, i)
    yield Case(".a,.a,,->.a", write, (X[0], normal(2, 6, seed=2), at))
    pad = lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 2, 1), (0, 0, 0)))
    yield Case("a.b,->a.b", pad, (X,))
    yield Case("a.b,a.b->a.b", lambda *x: lax.concatenate(x, 1), (X, X + 1))
    of_numpy = lambda *x: lax.concatenate(x, np.int64(1))
    yield Case("a.b,a.b->a.b", of_numpy, (X, X + 1))
    yield Case("a.b->a.b,a.b", lambda x: lax.split(x, (1, 3), axis=1), (X,))
    yield Case("ab,ab->a.b", lambda *x: jnp.stack(x, 1), (X[0], X[1]))
    yield Case("a.b->a.b", lambda x: jnp.tile(x, (1, 2, 1)), (X,))
    yield Case("a.b->ab,ab,ab,ab", lambda x: tuple(jnp.unstack(x, axis=1)), (X,))
    yield Case("a..->a..", lambda x: lax.rev(x, (1, 2)), (X,))
    pair = lambda x, y: lax.sort((x, y), dimension=1, num_keys=1)
    yield Case("a.b,a.b->a.b,a.b", pair, (X, integers(*X.shape)))
    yield Case("ab.->ab.,ab.", lambda x: lax.top_k(x, 2), (X,))
    yield Case("ab.->ab.,ab.", lambda x: lax.approx_max_k(x, 2), (X,))


def reductions():
    numbers = {"sum": X, "max": X, "min": X, "prod": X}
    ints = integers(2, 4, 6)
    for name, x in (numbers | {"and": ints, "or": ints > 50, "xor": ints}).items():
        fn = getattr(lax, f"reduce_{name}")
        yield Case("abc->b", functools.partial(fn, axes=(0, 2)), (x,))
    for fn in (lax.argmax, lax.argmin):
        index = functools.partial(fn, axis=1, index_dtype=jnp.int32)
        yield Case("a.b->ab", index, (X,))
    for fn in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        yield Case("a.b->a.b", functools.partial(fn, axis=1, reverse=True), (X,))
    pool = dict(window_dimensions=(1, 2, 1), window_strides=(1, 2, 1), padding="VALID")
    most = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **pool)
    yield Case("a.b->a.b", most, (X,))
    yield Case("a.b->a.b", lambda x: lax.reduce_window(x, 0.0, lax.add, **pool), (X,))
    least = lambda x: lax.reduce_window(x, jnp.inf, lax.min, **pool)
    yield Case("a.b->a.b", least, (X,))
    shape = dict(pool, padding=((0, 0),) * 3)
    put = lambda y, x: lax.select_and_scatter_add_p.bind(
        y, x, select_prim=lax.ge_p, **shape
    )
    yield Case("a.b,a.b->a.b", put, (X[:, ::2], X))
    tangent = lambda y, x: lax.select_and_gather_add_p.bind(
        *(y, x),
        select_prim=lax.ge_p,
        base_dilation=(1, 1, 1),
        window_dilation=(1, 1, 1),
        **shape,
    )
    yield Case("a.b,a.b->a.b", tangent, (X + 1, X))


def dot(a, b, *dims):
    product = lambda a, b: lax.dot_general(a, b, dims, precision="highest")
    return product, (a, b)


def products():
    yield Case("ab,bc->ac", *dot(X[0], normal(6, 4), ((1,), (0,)), ((), ())))
    yield Case("abc,cd->abd", *dot(X, normal(6, 8), ((2,), (0,)), ((), ())))
    yield Case("abc,acd->abd", *dot(X, normal(2, 6, 4), ((2,), (1,)), ((0,), (0,))))
    swapped = ((1, 3), (0, 1)), ((2, 0), (3, 2))
    heads = normal(4, 6, 2, 8), normal(6, 8, 4, 2)
    yield Case("abcd,bdac->ca", *dot(*heads, *swapped))
    yield Case("abc,abd->cd", *dot(X, X[..., :4], ((0, 1), (0, 1)), ((), ())))
    yield Case("a,b->ab", *dot(X[0, 0], X[0, :, 0], ((), ()), ((), ())))


def conv(images, kernels, numbers=("NHWC", "HWIO", "NHWC"), **groups):
    def run(x, w):
        return lax.conv_general_dilated(
            *(x, w, (1, 1), "SAME"),
            dimension_numbers=numbers,
            precision="highest",
            **groups,
        )

    return run, (images, kernels)


def convolutions():
    x = normal(2, 3, 3, 4)
    yield Case("a..b,..bc->a..c", *conv(x, normal(3, 3, 4, 6)))
    first = ("NCHW", "OIHW", "NCHW")
    args = normal(2, 4, 3, 3), normal(6, 4, 3, 3)
    yield Case("ab..,cb..->ac..", *conv(*args, first))
    alone = normal(3, 3, 1, 8)  # two of each feature's own
    yield Case("a..b,...b->a..b", *conv(x, alone, feature_group_count=4))
    pairs = normal(3, 3, 2, 6)
    yield Case("a..b,...b->a..b", *conv(x, pairs, feature_group_count=2))
    threes = normal(2, 3, 3, 6), normal(3, 3, 2, 6)
    yield Case("a...,....->a...", *conv(*threes, feature_group_count=3))
    batches = normal(8, 3, 3, 6), normal(3, 3, 6, 4)
    yield Case("a..b,..ba->...a", *conv(*batches, batch_group_count=4))


def decomposed():
    square = X[:, :4, :4] @ X[:, :4, :4].mT + 4 * np.eye(4, dtype="f4")
    both = lambda a: lax.linalg.eigh(a, symmetrize_input=False)
    yield Case("a..->a..", lax.linalg.cholesky_p.bind, (square,))
    yield Case("a..->a..,a.", both, (square,))
    yield Case("a..->a..,a.,a.", lax.linalg.lu, (square,))
    yield Case("a..->a..,a..", lax.linalg.qr, (square,))
    yield Case("a..->a.,a..,a..", lax.linalg.svd, (square,))
    reflect = lax.linalg.householder_product
    yield Case("a..,a.->a..", reflect, (square, normal(2, 4)))
    solve = functools.partial(lax.linalg.triangular_solve, left_side=True, lower=True)
    yield Case("a..,a..->a..", solve, (square, X))
    wave = lambda x: lax.fft_p.bind(x, fft_type=lax.FftType.FFT, fft_lengths=(6,))
    yield Case("ab.->ab.", wave, (X + 1j * X,))


ROWS = integers(4, 2, 1, below=4)  # indices of rows: some meet each other


def gathers():
    def take(dims, sizes, mode="clip"):
        numbers = lax.GatherDimensionNumbers(**dims)
        return lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode)

    rows = dict(collapsed_slice_dims=(1,), start_index_map=(1,))
    every = rows | dict(offset_dims=(0, 3))
    yield Case("a.b,cd.->acdb", take(every, (2, 1, 6)), (X, ROWS))
    yield Case("a.b,cd.->acdb", take(every, (2, 1, 6), "fill"), (X, ROWS - 1))
    yield Case("a..,bc.->abc.", take(every, (2, 1, 3)), (X, ROWS))
    each = dict(operand_batching_dims=(0,), start_indices_batching_dims=(1,))
    each |= rows | dict(offset_dims=(2,))
    yield Case("a.b,ca.->cab", take(each, (1, 1, 6)), (X, ROWS))
    both = dict(offset_dims=(2,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
    pairs = integers(4, 2, 2, below=2)
    yield Case("..a,bc.->bca", take(both, (1, 1, 6)), (X, pairs))
    moved = dict(offset_dims=(1, 2, 3), collapsed_slice_dims=(), start_index_map=(1,))
    # the axis has full size, yet starts where an index says: outside it is filled
    yield Case("a.b,c.->ca.b", take(moved, (2, 4, 6), "fill"), (X, ROWS[:, 0]))


def scatters():
    def put(fn, dims, **kwargs):
        numbers = lax.ScatterDimensionNumbers(**dims)
        return lambda x, i, y: fn(x, i, y, numbers, mode="drop", **kwargs)

    rows = dict(inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,))
    every = rows | {"update_window_dims": (0, 3)}
    new = normal(2, 4, 2, 6, seed=5)
    each = dict(operand_batching_dims=(0,), scatter_indices_batching_dims=(1,))
    each |= rows | {"update_window_dims": (2,)}
    for name in ("add", "min", "max", "sub", "mul"):
        fn = getattr(lax, f"scatter_{name}")
        whole = name in ("sub", "mul")
        text = "a.b,...,a..b->a.b" if whole else "a.b,cd.,acdb->a.b"
        yield Case(text, put(fn, every), (X, ROWS, new))
        args = X, ROWS, np.moveaxis(new, 0, 2)[:, :, 0]
        text = "a.b,.a.,.ab->a.b" if whole else "a.b,ca.,cab->a.b"
        yield Case(text, put(fn, each), args)
    # two rows, which are not the same
    first = np.arange(2, dtype=np.int32)[None, :, None]
    alone = X, first, new[:, :1]
    yield Case("a.b,...,a..b->a.b", put(lax.scatter, every), alone)
    args = X, ROWS[:1], np.moveaxis(new, 0, 2)[:1, :, 0]
    yield Case("a.b,.a.,.ab->a.b", put(lax.scatter, each), args)


def loops():
    each = lambda w, x: lax.map(lambda one: (one @ w, one.sum()), x)
    yield Case("..,a..->a..,a", each, (X[0].T, X))


def random():
    """Keys; bits of a part of the keys, and of the places of one key or of each."""
    key, some = jax.random.key(0), jax.random.split(jax.random.key(1), (2, 4))
    words = np.asarray(jax.random.key_data(some))
    yield Case("ab.->ab", jax.random.wrap_key_data, (words,))
    yield Case("ab->ab.", jax.random.key_data, (some,))
    yield Case("ab->ab", jax.vmap(jax.vmap(jax.random.key)), (words[..., 0],))
    yield Case("ab->ab.", jax.vmap(jax.vmap(jax.random.split)), (some,))
    fold = jax.vmap(jax.vmap(jax.random.fold_in))
    yield Case("ab,ab->ab", fold, (some, words[..., 0]))
    for width in (8, 16, 32):
        draw = functools.partial(jax.random.bits, dtype=jnp.dtype(f"uint{width}"))
        yield Case("->abc", functools.partial(draw, shape=(4, 6, 2)), (key,))
    yield Case("ab->abcd", lambda k: _bits_of_each(k, (4, 6)), (some,))
    counters = words[0, :, 0], words[0, :, 1], words[1, :, 0], words[1, :, 1]
    yield Case("a,a,a,a->a,a", lambda *xs: _compat.threefry2x32(*xs), counters)


def _bits_of_each(keys, shape):
    one = lambda key: jax.random.bits(key, shape)
    return jax.vmap(jax.vmap(one))(keys)


CASES = [
    *(*elementwise(), *reshapes(), *moves(), *reductions(), *products()),
    *(*convolutions(), *decomposed(), *gathers(), *scatters(), *loops()),
    *random(),
]
