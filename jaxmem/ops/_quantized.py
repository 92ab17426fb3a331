"""Functions whose backward pass reads some of their arguments from a few bits.

The forward pass is exact. The derivative is taken at the values that the codes stand
for: a `custom_jvp` whose tangent, under `jax.checkpoint`, is that of the plain function
at the recalled arguments. So codes are kept where a derivative needs the argument, and
nothing where it does not (a frozen kernel, a frozen input).

A tensor that several functions read (the input of the projections to query, key and
value) is stored once if it is coded once. `stored` gives an array together with its
codes, and functions that take `save=8` take it in the array's place; inside `sharing`,
as modules have it, codes are found again by the array itself.

Limits: a second derivative takes the codes for constants, and so lacks what the first
derivative's dependence on the coded arguments would give.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Key, UInt32

from jaxmem import _compat
from jaxmem.ops import _random
from jaxmem.ops._quantize import Quantization, as_quantization, dequantize, quantize

Rng = Key[Array, ""] | UInt32[Array, "..."] | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "bias"],
    meta_fields=["how", "via"],
)
@dataclass(frozen=True)
class Kept:
    """Codes, and what takes the coded values to those that were stored.

    A norm codes its normalised input and the next layer needs `scale` times that plus
    `bias` (vectors along the last axis, or None); an activation codes its input and the
    next layer needs `via` of it.
    """

    codes: Any
    how: Quantization
    scale: Any = None
    bias: Any = None
    via: Callable | None = None

    def recall(self, like: Any) -> Array:
        """What was stored, in shape and dtype of `like`."""
        x = dequantize(self.codes, self.how, like.shape)
        for p, apply in ((self.scale, jnp.multiply), (self.bias, jnp.add)):
            if p is not None:
                x = apply(x, jnp.broadcast_to(p.astype(x.dtype), x.shape))
        x = x.astype(like.dtype)
        return x if self.via is None else self.via(x)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "kept"], meta_fields=[]
)
@dataclass(frozen=True)
class Stored:
    """An array and its codes, to give to several functions that store it once.

    Made by `stored`. What is given one computes with `value` in the forward pass, and
    keeps the codes for the backward pass.

    Args:
        value: the array.
        kept: its codes.

    Saves:
        The codes, where a derivative needs the array.
    """

    value: Any
    kept: Any = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """That of the array."""
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.value.dtype

    def astype(self, dtype: Any) -> "Stored":
        """The array in another dtype, with the codes it has."""
        return replace(self, value=self.value.astype(dtype))


def seed_of(rng: Rng, stream: int = 0) -> UInt32[Array, "2"] | None:
    """Words for stochastic rounding, others for each stream; None without a key."""
    if rng is None:
        return None
    return _random.mix(_random.seed_words(rng) + np.uint32(stream))


def stored(
    x: Float[Array, "..."],
    save: int | Quantization = 8,
    *,
    rng: Rng = None,
) -> Stored:
    """`x` and its codes, for functions that shall share them.

    Args:
        x: any floating array.
        save: bits a value, or a `Quantization`.
        rng: a key for stochastic rounding, another each step; None: to the nearest.

    Returns:
        A `Stored`, to give in place of `x` to `dense` and to functions made by
        `save_quantized`.

    Raises:
        ValueError: bits out of range.
        TypeError: x is not floating, or `save` is not bits.

    Saves:
        The codes once, however many functions read them: bits / 8 byte an element, a
        step and an offset a block.

    Example::

        x = jaxmem.ops.stored(x, 8)
        q, k, v = (jaxmem.ops.dense(x, w) for w in (wq, wk, wv))

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3.
    """
    how = as_quantization(save)
    if how is None:
        raise TypeError(f"stored: save={save!r}, bits or a Quantization are needed")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"stored: x has dtype {x.dtype}, a floating dtype is needed")
    with jax.named_scope("jaxmem.stored"):
        return Stored(x, kept_of(x, how, seed_of(rng)))


# Pairs of an array and its codes, each with the trace that they belong to.
_shared: contextvars.ContextVar[list | None] = contextvars.ContextVar(
    "jaxmem_shared_codes", default=None
)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Inside, the codes of one and the same array are made once in each trace."""
    if _shared.get() is not None:
        yield
        return
    token = _shared.set([])
    try:
        yield
    finally:
        _shared.reset(token)


def remember(x: Any, kept: Kept | None) -> None:
    """Who stores `x` next inside `sharing` finds these codes of it."""
    shared = _shared.get()
    if shared is not None and isinstance(x, jax.core.Tracer):
        shared.append((x, _compat.trace_state(), kept))


def _remembered(x: Any, how: Quantization) -> Kept | None:
    """Codes of `x` of no fewer bits, made in this very trace."""
    shared: list[Any] = _shared.get() or []
    for y, trace, kept in reversed(shared):
        if x is y and trace == _compat.trace_state() and kept.how.bits >= how.bits:
            return kept
    return None


def kept_of(x: Array, how: Quantization, seed: Array | None = None) -> Kept | None:
    """The codes of `x`, apart from any derivative; None for nothing to code."""
    if x.size == 0:
        return None
    if (kept := _remembered(x, how)) is None:
        kept = coded(lax.stop_gradient(x), how, seed)
        remember(x, kept)
    return kept


def coded(
    x: Array, how: Quantization, seed: Array | None = None, stats: Any = None
) -> Kept:
    """New codes of `x`, under the name by which a remat policy may keep them."""
    return Kept(checkpoint_name(quantize(x, how, seed, stats), "jaxmem_codes"), how)


def is_nonzero(tangent: Any) -> bool:
    """Whether a tangent (of a rule with symbolic zeros) is there at all."""
    if tangent is None or isinstance(tangent, SymbolicZero):
        return False
    return tangent.dtype != jax.dtypes.float0


def linearized_at(
    fn: Callable[..., Any], args: Sequence[Array], kept: Sequence[Kept | None]
) -> Any:
    """`fn(*args)`; its derivative is that at what was kept of the arguments.

    `fn` takes arrays and returns floating ones. Where nothing was kept (None), the
    argument itself is, if a derivative needs it.
    """

    @jax.custom_jvp
    def op(args, kept):
        return fn(*args)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        args, kept = primals
        wanted = [i for i, t in enumerate(tangents[0]) if is_nonzero(t)]
        likes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]

        def tangent(plain, kept, dots):
            at = [
                x if k is None else k.recall(like)
                for x, k, like in zip(plain, kept, likes, strict=True)
            ]

            def some(*xs):
                full = list(at)
                for i, x in zip(wanted, xs, strict=True):
                    full[i] = x
                return fn(*full)

            return jax.jvp(some, [at[i] for i in wanted], dots)[1]

        plain = [x if k is None else None for x, k in zip(args, kept, strict=True)]
        dots = [tangents[0][i] for i in wanted]
        # With its barriers: else XLA recalls all codes of a layer before it needs any.
        return fn(*args), jax.checkpoint(tangent)(plain, kept, dots)

    return op(list(args), list(kept))


def read_from_codes(
    fn: Callable[..., Any],
    x: Any,
    how: Quantization | None,
    rng: Rng,
    *others: Array,
    own: bool = True,
) -> Any:
    """`fn(x, *others)`, storing codes of x where it is `Stored` or `how` is given.

    `own` allows a mark (see `marking`), which lives as long as `fn`.
    """
    if isinstance(x, Stored):
        return _read(fn, x.kept, x.value, *others)
    if how is None:
        return fn(x, *others)
    seed = seed_of(rng)
    if own and _marking.get() and _remembered(x, how) is None:
        seeds = () if seed is None else (seed,)
        reader = _reader(fn, how, len(seeds), len(others))
        return reader(x, *seeds, *others)
    return _read(fn, kept_of(x, how, seed), x, *others)


def _read(fn: Callable[..., Any], kept: Kept | None, x: Array, *others: Array) -> Any:
    return linearized_at(fn, (x, *others), (kept, *(None for _ in others)))


# What `jaxmem.rewriting` runs anew once a whole function is traced, and its number of
# arguments, by name.
MARKS: dict[str, tuple[Callable, int]] = {}
_marking: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxmem_marking", default=False
)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Inside, what stores codes leaves a mark, to find out later what it can share.

    A layer cannot see that its input is made by an activation written without a module.
    So it is traced as a `jax.jit` of a name in `MARKS`, right as it stands, and run
    again in the place of that when the activation before it is known.
    """
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def _marked(kind: str, fn: Callable, arity: int) -> Callable:
    name = f"jaxmem_{kind}_{len(MARKS)}"
    fn.__name__ = fn.__qualname__ = name
    MARKS[name] = fn, arity
    return jax.jit(fn)


@functools.cache
def _reader(fn: Callable, how: Quantization, seeds: int, others: int) -> Callable:
    def read(x, *rest):
        seed = rest[0] if seeds else None
        return _read(fn, kept_of(x, how, seed), x, *rest[seeds:])

    return _marked("reads_codes", read, 1 + seeds + others)


@functools.cache
def coded_activation(fn: Callable, how: Quantization) -> Callable:
    """The elementwise `fn`, marked, which keeps codes of its input.

    A function that stores its output next finds these codes for it.
    """

    def activation(x):
        kept = kept_of(x, how)
        y = _read(fn, kept, x)
        if kept is not None and kept.via is None:
            remember(y, replace(kept, via=fn))
        return y

    return _marked("coded_activation", activation, 1)


def save_quantized(
    fn: Callable[..., Any],
    *,
    bits: int = 8,
    argnums: int | Sequence[int] = 0,
    block_size: int = 128,
    symmetric: bool = False,
    rng: Rng = None,
) -> Callable[..., Any]:
    """The function `fn`, which keeps codes of some arguments for its backward pass.

    The forward pass is that of `fn`, to the bit. The backward pass is that of `fn` at
    the arguments the codes stand for: what it would have kept of them and of anything
    made from them is made again. Good for matrix products, convolutions, and whatever
    is cheap to make again from its arguments; of a function with products inside,
    these are repeated.

    Where `fn` is linear in each coded argument (a product of two activations, a
    convolution), the gradients are those of plain JAX plus an error with mean zero,
    given a key. Without one, and for other functions, the error has a bias of the
    order of the step squared (a step, without a key).

    Args:
        fn: a function of arrays (or trees of arrays) that returns floating arrays. It
            may close over arrays, also differentiated ones; they are kept as they are.
        bits: of a code, 1 to 8.
        argnums: the positional argument or arguments to store as codes; every floating
            array in them. An argument that is `Stored` needs no mention.
        block_size: neighbours along the last axis that share a step and an offset.
        symmetric: codes about zero, without an offset.
        rng: a key for stochastic rounding, another each step; None: to the nearest.

    Returns:
        A function with the arguments of `fn`; keyword arguments are not coded.

    Raises:
        ValueError: bits or block_size out of range, an argnum beyond the arguments.
        TypeError: a named argument without floating arrays, an output that is none.

    Saves:
        bits / 8 byte an element of the coded arguments, a step and an offset a block,
        in place of what `fn` keeps of them; other arguments as they are. Nothing of
        what a derivative does not need.

    Example::

        product = jaxmem.ops.save_quantized(jnp.matmul, argnums=(0, 1), rng=key)
        y = product(a, b)

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3; unbiased by stochastic rounding:
        ActNN, Chen et al., arXiv 2104.14129, section 3.
    """
    how = Quantization(bits, block_size, symmetric)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    name = getattr(fn, "__name__", type(fn).__name__)

    def wrapped(*args, **kwargs):
        with jax.named_scope(f"jaxmem.save_quantized.{name}"):
            leaves, rebuild = _arrays(args, kwargs, _places(name, args, chosen))
            kept = [
                _kept(leaf, coded, how, seed_of(rng, i))
                for i, (leaf, coded) in enumerate(leaves)
            ]
            values = [getattr(leaf, "value", leaf) for leaf, _ in leaves]

            def flat(*xs):
                args, kwargs = rebuild(xs)
                out = fn(*args, **kwargs)
                _check_output(name, out)
                return out

            flat, hoisted = jax.closure_convert(flat, *values)
            kept += [None] * len(hoisted)
            return linearized_at(flat, [*values, *hoisted], kept)

    return functools.wraps(fn)(wrapped) if hasattr(fn, "__name__") else wrapped


def _places(name: str, args: tuple, chosen: tuple[int, ...]) -> set[int]:
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"save_quantized({name}): argnums={i} for {len(args)} arguments"
            )
    return {i % len(args) for i in chosen}


def _is_stored(x: Any) -> bool:
    return isinstance(x, Stored)


def _floating(x: Any) -> bool:
    if _is_stored(x):
        return True
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _arrays(args: tuple, kwargs: dict, places: set[int]):
    """[(floating leaf, to be coded)], and the function that puts others in place."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_stored)
    owners = [
        i
        for i, arg in enumerate([*args, kwargs])
        for _ in jax.tree.leaves(arg, is_leaf=_is_stored)
    ]
    found = [i for i, x in enumerate(leaves) if _floating(x)]
    if missing := places - {owners[i] for i in found}:
        raise TypeError(
            f"save_quantized: argument {min(missing)} holds no floating array"
        )

    def rebuild(xs):
        full = list(leaves)
        for i, x in zip(found, xs, strict=True):
            full[i] = x
        return jax.tree.unflatten(tree, full)

    return [(leaves[i], owners[i] in places) for i in found], rebuild


def _kept(leaf: Any, coded: bool, how: Quantization, seed) -> Kept | None:
    if _is_stored(leaf):
        return leaf.kept
    return kept_of(leaf, how, seed) if coded else None


def _check_output(name: str, out: Any) -> None:
    for leaf in jax.tree.leaves(out):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"save_quantized({name}): an output has dtype "
                f"{jnp.result_type(leaf)}, floating ones are needed"
            )
