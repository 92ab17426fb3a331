"""Adam's update on GPUs: parameter and moments are overwritten in one pass.

A leaf is flat. A program loads a block of elements into registers, updates them and
writes them back over the old ones: the arrays are references, so that no other array of
their size exists. What is left after the last whole block is less than a block; plain
jax computes it and puts it into its place.

Memory traffic in elements: p, m, v and g read, p, m and v written (7 a parameter);
without p 5, without g 4.

Limits: a leaf of few elements costs a launch of its own. With random bits each
parameter costs a division, to find its row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.adam import reference
from pallas_kernels.gpu import THREADS, update_in_place
from pallas_kernels.hashing import random_bits

_VECTOR = 4  # elements that a thread loads at a time: 16 bytes of float32
# 8 elements a thread, of four arrays. By ptxas a thread takes 64 registers, so that a
# multiprocessor holds eight programs; with twice the elements it holds four.
_BLOCK = 1024
_F32 = jnp.finfo(jnp.float32)


def update(old, factors, seed=None, *, block_size=None):
    """The new leaves: a dict with those of "p", "m" and "v" that change.

    Args:
      old: "m", "v", and one or both of "p" and "g": without "p" only the moments are
        updated, without "g" only the parameter is.
      factors: vector of `reference.Factors`.
      seed: uint32[2], for random rounding of bfloat16; None rounds to nearest.
      block_size: elements of a program, a multiple of 512.

    Under `vmap` the reference runs instead.

    Raises:
      NotImplementedError: for another dtype or size.
    """
    reference.check_leaf(old, ("float32", "bfloat16", "float16"))
    if old["m"].size >= 2**31:
        size = old["m"].size
        raise NotImplementedError(f"leaves of less than 2**31 elements, not {size}")
    block = block_size or _BLOCK
    if block % (THREADS * _VECTOR):
        raise NotImplementedError(f"blocks in multiples of 512, not {block}")
    seed = seed if reference.uses_bits(old, seed) else None
    names = reference.written(old)
    args, tree = jax.tree.flatten((old, factors, seed))

    def of_arrays(update):
        def run(*args):
            new = update(*tree.unflatten(args))
            return tuple(new[k] for k in names)

        return run

    run = of_arrays(functools.partial(_update, block=block))
    plain = of_arrays(reference.update_leaf)
    new = _compat.traced_late(run, jax.vmap(plain), *args)
    return dict(zip(names, new, strict=True))


def _update(old, factors, seed, block: int) -> dict:
    shape, size = old["m"].shape, old["m"].size
    factors = factors.astype(jnp.float32)
    arrays = {k: x.reshape(size) for k, x in old.items()}
    names = reference.written(old)
    whole = size - size % block

    def place(index):
        return reference.flat_positions(index, shape[-1] if shape else 1, len(shape))

    if whole:
        numbers = jnp.zeros(2, jnp.uint32) if seed is None else seed
        inputs = {"factors": factors, "seed": numbers, **arrays}
        body = functools.partial(
            _body, list(arrays), names, block, None if seed is None else place
        )
        grid = {"program": whole // block}
        arrays |= update_in_place("jaxmem_adam", body, inputs, names, grid)
    if whole < size:
        # This reads the arrays after the kernel, which has not touched these elements.
        # If it read them before the kernel, XLA would have to copy them.
        rest = {k: x[whole:] for k, x in arrays.items()}
        index = jnp.arange(whole, size, dtype=jnp.uint32)
        new = reference.update_leaf(rest, factors, seed, place(index))
        arrays |= {k: arrays[k].at[whole:].set(new[k]) for k in names}
    return {k: arrays[k].reshape(shape) for k in names}


def _body(inputs, names, block: int, place, refs) -> None:
    """Updates a block; `place` gives rows and columns if it rounds at random."""
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=_VECTOR)
    start = lax.axis_index("program") * block
    here = pl.ds(start, block)
    tiles = {k: _compat.with_layout(refs[k][here], layout) for k in inputs}
    factors = reference.read_factors(refs["factors"])
    bits = None
    if place is not None:
        index = lax.broadcasted_iota(jnp.uint32, (block,), 0)
        index = _compat.with_layout(index, layout) + start.astype(jnp.uint32)
        bits = random_bits(refs["seed"], *place(index))
    new = reference.update_tile(tiles, factors, bits, _sqrt)
    for name in names:
        refs[name][here] = new[name]


def _sqrt(x):
    """The square root; numbers below the least normal one give themselves."""
    # Their root would be below `eps` as well, to which it is added.
    normal = (x >= _F32.tiny) & (x <= _F32.max)
    return jnp.where(normal, x * lax.rsqrt(x), x)
