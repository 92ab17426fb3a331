"""`save_quantized`: any function, keeping some of its arguments as codes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem._checks import check_callable, check_key, check_numbers, wrong_value
from jaxmem.ir.jaxprs import exchanged
from jaxmem.ops.codes.quantization import Quantization
from jaxmem.ops.codes.stored import (
    Rng,
    Stored,
    StoredCodes,
    codes_of,
    linearized_at,
    seed_of,
)


def save_quantized(
    fn: Callable[..., Any],
    *,
    bits: int = 8,
    argnums: int | Sequence[int] = 0,
    block_size: int = 128,
    symmetric: bool = False,
    dtype: DTypeLike | None = None,
    rng: Rng = None,
) -> Callable[..., Any]:
    """The function `fn`, which keeps codes of some arguments for its backward pass.

    The forward pass is bitwise that of `fn`. The backward pass is that of `fn` at
    the arguments the codes stand for: what it would have kept of them and of anything
    made from them is recomputed. Good for matrix products, convolutions, and whatever
    is cheap to recompute from its arguments; of a function with products inside,
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
        dtype: None for codes that are integers; `jnp.float8_e4m3fn` for floating ones.
        rng: a key for stochastic rounding, another each step; None: to the nearest.

    Returns:
        A function with the arguments of `fn`; keyword arguments are not coded.

    Raises:
        ValueError: bits or block_size out of range, an argnum beyond the arguments.
        TypeError: a named argument without floating arrays, an output that is none.

    Saves:
        bits / 8 byte an element of the coded arguments, a step and an offset a block,
        instead of what `fn` keeps of them; other arguments as they are. Nothing of
        what a derivative does not need.

    Example::

        product = jaxmem.ops.save_quantized(jnp.matmul, argnums=(0, 1), rng=key)
        y = product(x, params["head"])

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3; unbiased by stochastic rounding:
        ActNN, Chen et al., arXiv 2104.14129, section 3.
    """
    check_callable("fn", fn)
    if rng is not None:
        check_key("rng", rng)
    quantization = Quantization(bits, block_size, symmetric, dtype)
    chosen = check_numbers("argnums", argnums)
    if not chosen:
        raise wrong_value("argnums", argnums, "at least one position")
    name = getattr(fn, "__name__", type(fn).__name__)

    def wrapped(*args, **kwargs):
        with jax.named_scope(f"jaxmem.save_quantized.{name}"):
            leaves, rebuild = _arrays(args, kwargs, _places(name, args, chosen))
            kept = [
                _kept(leaf, coded, quantization, seed_of(rng, i))
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
        return jax.tree.unflatten(tree, exchanged(leaves, found, xs))

    return [(leaves[i], owners[i] in places) for i in found], rebuild


def _kept(
    leaf: Any, coded: bool, quantization: Quantization, seed
) -> StoredCodes | None:
    if _is_stored(leaf):
        return leaf.codes
    return codes_of(leaf, quantization, seed) if coded else None


def _check_output(name: str, out: Any) -> None:
    for leaf in jax.tree.leaves(out):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"save_quantized({name}): an output has dtype "
                f"{jnp.result_type(leaf)}, floating ones are needed"
            )
