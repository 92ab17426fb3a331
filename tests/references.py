"""One battery over all ops: an op equals its reference, and keeps what it says.

The reference is the plain function in float64 on the same (already rounded) inputs. The
lean op may be off by

    4 eps(dtype) max|reference|  +  2 max|plain at that dtype - reference|

The first term is four roundings of the largest element: the op rounds its output
once, and a backward rule written by hand rounds its residual, its cotangent and its
result. The second allows twice the plain function's own error, since ours has other
intermediate roundings, and no more of them. `derivative_error` adds the stated error
of an op that recovers its input from a rounded output, `recomputed` that of one whose
backward pass recomputes an intermediate of the forward pass, with its own rounding.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxmem import _compat
from tests.arrays import array

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Comparison:
    """A lean op and the plain function that it is held to.

    `args(shape, dtype, rng)` makes the positional arguments (`rng` is a numpy
    generator); the inexact ones among them must have dtype `dtype`, unless they are
    meant to stay float32. `diff` are the positions that can be differentiated;
    `saves(args, wanted)` the bytes kept beyond the arguments themselves when the
    positions in the frozenset `wanted` are differentiated (None: not checked).
    `derivative_error` maps a dtype's name to an absolute error of the derivative.
    `recomputed(args, cotangent)` gives an absolute error of each gradient, from the
    arguments of one example in float64.
    """

    name: str
    lean: Callable[..., Any]
    plain: Callable[..., Any]
    args: Callable[[tuple[int, ...], Any, np.random.Generator], tuple[Any, ...]]
    shapes: tuple[tuple[int, ...], ...] = ((8,), (3, 5, 13))
    diff: tuple[int, ...] = (0,)
    saves: Callable[[tuple[Any, ...], frozenset[int]], int] | None = None
    derivative_error: Mapping[str, float] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    recomputed: Callable[[Any, Any], list[float]] | None = None

    def __str__(self) -> str:
        return self.name


def unary_args(shape, dtype, rng):
    """One normal array of spread 2: reaches both tails of every activation."""
    return (array(2 * rng.standard_normal(shape), dtype),)


def nbytes(x) -> int:
    return int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize


def subsets(diff):
    """Every non-empty subset of the differentiable positions."""
    sizes = range(1, len(diff) + 1)
    return [frozenset(c) for n in sizes for c in itertools.combinations(diff, n)]


# -- transforms: each takes a function of one example's arguments and runs it on a
# stack of COPIES examples, so that all are compared against the same reference.

COPIES = 2


def _plain_loop(fn, *stacked):
    outs = [fn(*jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(COPIES)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


def _jit(fn, *stacked):
    return _plain_loop(jax.jit(fn), *stacked)


def _vmap(fn, *stacked):
    return jax.vmap(fn)(*stacked)


def _scan(fn, *stacked):
    return jax.lax.scan(lambda _, args: (None, fn(*args)), None, stacked)[1]


def _remat(fn, *stacked):
    return _scan(jax.checkpoint(fn), *stacked)


def _remat_unrolled(fn, *stacked):
    policy = jax.checkpoint_policies.nothing_saveable
    return _plain_loop(jax.checkpoint(fn, policy=policy), *stacked)


def _shard_map(fn, *stacked):
    mesh = jax.make_mesh((COPIES,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")

    def one(*shards):
        out = fn(*jax.tree.map(lambda x: x[0], shards))
        return jax.tree.map(lambda x: x[None], out)

    return jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)(*stacked)


TRANSFORMS = {
    "jit": _jit,
    "vmap": _vmap,
    "scan": _scan,
    "remat": _remat,
    "remat_unrolled": _remat_unrolled,
    "shard_map": _shard_map,
}


# -- checks


def _seed(*parts) -> np.random.Generator:
    return np.random.default_rng(abs(hash_text(" ".join(map(str, parts)))))


def hash_text(text: str) -> int:
    return functools.reduce(lambda h, c: (h * 31 + ord(c)) % 2**32, text, 7)


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _stack(examples):
    return tuple(
        jax.tree.map(lambda *xs: _stacked(xs), *e) for e in zip(*examples, strict=True)
    )


def _stacked(xs):
    """By numpy where it knows the dtype, which compiles nothing."""
    if jnp.issubdtype(xs[0].dtype, jax.dtypes.prng_key):
        return jnp.stack(xs)
    return array(np.stack(xs))


def _of_wanted(fn, args, wanted):
    """`fn` of the arguments at the `wanted` positions alone, and these."""
    order = sorted(wanted)

    def some(*values):
        full = list(args)
        for i, x in zip(order, values, strict=True):
            full[i] = x
        return fn(*full)

    return some, [args[i] for i in order]


def _vjp(run, args, wanted, cotangent):
    """Outputs and the gradients for the `wanted` positions."""
    some, values = _of_wanted(run, args, wanted)

    @jax.jit  # one program: half of what both passes by themselves take to compile
    def both(*values):
        out, pull = jax.vjp(some, *values)
        as_out = lambda o, c: jnp.asarray(c.astype(o.dtype))
        return out, pull(jax.tree.map(as_out, out, cotangent(out)))

    return both(*values)


def _float64(x):
    return np.asarray(x).astype("f8")


def _cotangent(out):
    """NumPy's, which compiles nothing."""
    noise = np.random.default_rng(5)
    return jax.tree.map(lambda o: noise.standard_normal(o.shape).astype("f4"), out)


def _stacked_args(comparison, shape, dtype):
    rng = _seed(comparison.name, shape, dtype)
    return _stack(
        [comparison.args(shape, jnp.dtype(dtype), rng) for _ in range(COPIES)]
    )


_EXPECTED: dict[tuple[str, tuple[int, ...], str], tuple[Any, Any]] = {}


def _expected(comparison, shape, dtype):
    """The reference's output and gradients, at `dtype` and in float64; made once."""
    key = (comparison.name, shape, dtype)
    if key not in _EXPECTED:
        stacked, wanted = (
            _stacked_args(comparison, shape, dtype),
            frozenset(comparison.diff),
        )
        run = functools.partial(_vmap, comparison.plain)
        plain = _vjp(run, stacked, wanted, _cotangent)
        with jax.enable_x64(True):
            wide = [array(_float64(x)) if _is_float(x) else x for x in stacked]
            reference = _vjp(run, wide, wanted, _cotangent)
            reference = jax.tree.map(np.asarray, reference)
        _EXPECTED[key] = plain, reference
    return _EXPECTED[key]


def _some(outcome, diff, wanted):
    """The outcome with the gradients of the `wanted` positions alone."""
    out, gradients = outcome
    pairs = zip(sorted(diff), gradients, strict=True)
    return out, tuple(g for i, g in pairs if i in wanted)


def _stated_errors(comparison, stacked, out, dtype) -> dict[str, float]:
    """What each gradient may be off by beyond roundings, by what is said of the op."""
    stated = (
        comparison.derivative_error.get(dtype, 0.0) * 4.0
    )  # |cotangent| stays below 4
    errors = [stated] * len(comparison.diff)
    if comparison.recomputed is not None:
        wide = [_float64(x) if _is_float(x) else np.asarray(x) for x in stacked]
        g = _float64(_cotangent(out).astype(jnp.dtype(dtype)))
        examples = ([x[i] for x in (*wide, g)] for i in range(COPIES))
        found = [comparison.recomputed(args, g) for *args, g in examples]
        errors = [stated + max(es) for es in zip(*found, strict=True)]
    names = (f"gradient of argument {i}" for i in sorted(comparison.diff))
    return dict(zip(names, errors, strict=True))


def check_equal(
    comparison: Comparison, shape, dtype: str, transform: str, wanted=None
) -> None:
    """Values and gradients of the lean op under `transform` against float64."""
    wanted = frozenset(comparison.diff) if wanted is None else wanted
    stacked = _stacked_args(comparison, shape, dtype)
    run = functools.partial(TRANSFORMS[transform], comparison.lean)
    lean = _vjp(run, stacked, wanted, _cotangent)
    plain, reference = (
        _some(outcome, comparison.diff, wanted)
        for outcome in _expected(comparison, shape, dtype)
    )
    stated = _stated_errors(comparison, stacked, plain[0], dtype)
    names = [f"output {i}" for i in range(len(jax.tree.leaves(lean[0])))]
    names += [f"gradient of argument {i}" for i in sorted(wanted)]
    leaves = zip(names, *map(jax.tree.leaves, (lean, plain, reference)), strict=True)
    for what, got, reference_got, want in leaves:
        extra = stated.get(what, 0.0)
        _assert_close(
            f"{comparison.name} {what}", got, reference_got, want, dtype, extra
        )


def _assert_close(what, got, reference_got, want, dtype, extra):
    assert got.dtype == reference_got.dtype, (
        f"{what}: {got.dtype}, reference {reference_got.dtype}"
    )
    assert got.shape == want.shape, f"{what}: {got.shape} for {want.shape}"
    if want.size == 0:
        return
    got, reference_got = _float64(got), _float64(reference_got)
    eps = float(jnp.finfo(dtype).eps)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=what)
    error = np.max(np.abs(got - want), where=finite, initial=0.0)
    allowed = (
        4 * eps * np.max(np.abs(want), where=finite, initial=0.0)
        + 2 * np.max(np.abs(reference_got - want), where=finite, initial=0.0)
        + extra
    )
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def kept_bytes(fn, args, wanted) -> int:
    """Bytes that the backward pass keeps beyond arguments and constants."""
    some, values = _of_wanted(fn, args, wanted)
    kept = _compat.saved_residuals(some, *values)
    own = ("from the argument", "from a constant")
    return sum(nbytes(aval) for aval, src in kept if not src.startswith(own))


def check_saves(comparison: Comparison, shape, dtype: str, wanted) -> None:
    """The `Saves:` line, in bytes, for one subset of differentiated inputs."""
    args = comparison.args(
        shape, jnp.dtype(dtype), _seed(comparison.name, shape, dtype)
    )
    got = kept_bytes(comparison.lean, args, wanted)
    want = comparison.saves(args, wanted)
    assert got == want, (
        f"{comparison.name}: keeps {got} bytes for {set(wanted)}, says {want}"
    )
