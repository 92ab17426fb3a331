"""Adam's update on GPU: parameter and moments are written over in one pass.

A leaf is flat. A program takes a block of elements from memory to registers, updates
them and writes them back over the old ones: the arrays are references, so that no
other of their size exists. What is left after the last whole block is less than a
block, and plain jax writes it into its place.

Not optimal: a leaf of few elements costs a launch of its own; with random bits there
is a division a parameter, to find its row.

Through memory go, in elements: p, m, v and g read, p, m and v written (7 a parameter);
without p 5, without g 4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _adam, _compat
from pallas_kernels.hashing import random_bits

_WARPGROUP = 128  # threads
_VECTOR = 4  # elements a thread reads at a time: 16 bytes of float32
_BLOCK = 2048  # 16 elements a thread, of four arrays: 64 registers
_F32 = jnp.finfo(jnp.float32)


def update(old, factors, seed=None, *, block_size=None):
    """The new leaves, a dict with those of "p", "m" and "v" that change.

    Args:
      old: "m", "v", and one or both of "p" and "g": without the parameter it waits,
        without the gradient the moments make a step.
      factors: vector of `_adam.Factors`.
      seed: uint32[2], for random rounding of bfloat16; None: to the nearest.
      block_size: elements of a program, a multiple of 512.

    Under `vmap` plain jax does it.
    """
    _adam.check_leaf(old, ("float32", "bfloat16", "float16"))
    if old["m"].size >= 2**31:
        size = old["m"].size
        raise NotImplementedError(f"leaves of less than 2**31 elements, not {size}")
    block = block_size or _BLOCK
    if block % (_WARPGROUP * _VECTOR):
        raise NotImplementedError(f"blocks in multiples of 512, not {block}")
    seed = seed if _adam.uses_bits(old, seed) else None
    names = _adam.written(old)
    args, tree = jax.tree.flatten((old, factors, seed))

    def run(*args):
        new = _update(*tree.unflatten(args), block_size=block)
        return tuple(new[k] for k in names)

    def plain(*args):
        new = _adam.update_leaf(*tree.unflatten(args))
        return tuple(new[k] for k in names)

    new = _compat.traced_late(run, jax.vmap(plain), *args)
    return dict(zip(names, new, strict=True))


def _update(old, factors, seed, block_size: int) -> dict:
    shape, size = old["m"].shape, old["m"].size
    factors = factors.astype(jnp.float32)
    arrays = {k: x.reshape(size) for k, x in old.items()}
    names = _adam.written(old)
    whole = size - size % block_size

    def place(index):
        return _adam.flat_positions(index, shape[-1] if shape else 1, len(shape))

    if whole:
        arrays |= _blocks(arrays, names, factors, seed, place, block_size)
    if whole < size:
        # The kernel has not touched these, so they can be read after it; before it,
        # its arrays would have to be copied.
        rest = {k: x[whole:] for k, x in arrays.items()}
        index = jnp.arange(whole, size, dtype=jnp.uint32)
        new = _adam.update_leaf(rest, factors, seed, place(index))
        arrays |= {k: arrays[k].at[whole:].set(new[k]) for k in names}
    return {k: arrays[k].reshape(shape) for k in names}


def _blocks(arrays, names, factors, seed, place, block: int) -> dict:
    """The arrays in `names` with all their whole blocks updated, in place."""
    refs = {k: jax.new_ref(arrays[k], memory_space=plgpu.GMEM) for k in names}
    body = functools.partial(
        _kernel,
        order=list(arrays),
        names=names,
        place=None if seed is None else place,
        block=block,
    )
    count = arrays["m"].size // block
    mesh = plgpu.Mesh(grid=(count,), grid_names=("block",))
    kernel: Any = pl.kernel(body, out_type=(), mesh=mesh, name="jaxmem_adam")
    seed = jnp.zeros(2, jnp.uint32) if seed is None else seed
    kernel(factors, seed, *(refs.get(k, x) for k, x in arrays.items()))
    return {k: jax.freeze(ref) for k, ref in refs.items()}


def _kernel(factors, seed, *refs, order, names, place, block):
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=_VECTOR)
    start = lax.axis_index("block") * block
    here = pl.ds(start, block)
    arrays = dict(zip(order, refs, strict=True))
    tiles = {k: _compat.with_layout(ref[here], layout) for k, ref in arrays.items()}
    f = _adam.Factors(*(factors[i] for i in range(len(_adam.Factors._fields))))
    bits = None
    if place is not None:
        index = lax.broadcasted_iota(jnp.uint32, (block,), 0)
        index = _compat.with_layout(index, layout) + start.astype(jnp.uint32)
        bits = random_bits(seed, *place(index))
    new = _adam.update_tile(tiles, f, bits, _sqrt)
    for name in names:
        arrays[name][here] = new[name]


def _sqrt(x):
    """For numbers under the least normal one, x: `eps` is more than their root."""
    normal = (x >= _F32.tiny) & (x <= _F32.max)
    return jnp.where(normal, x * lax.rsqrt(x), x)
