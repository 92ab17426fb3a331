"""Activation kernels for GPUs; `reference.py` describes what is computed and saved.

Arrays are flat. A program takes eight consecutive stretches, four elements of each to a
thread: element i of stretch j is bit j of byte i, so a byte is made of eight registers
of one thread, and threads exchange nothing. For 16-bit arrays `exp`, `log` and `rsqrt`
are the chip's fast approximations, right to about 2**-21.

The backward pass writes over references: the cotangent, and the gate of a gated unit.

Memory traffic for n elements of s bytes and codes of b bits: forward n (2 s + b/8);
backward n (2 s + b/8), and n s more where the output was saved; gated unit forward
3 n s, backward 5 n s.

Limits: loads go to registers without TMA, so only other programs of the same processor
(64 to 137 registers a thread) hide their latency. A derivative computed from an output
takes about a hundred operations an element; in bfloat16 an H100 is then bound by
arithmetic, not by memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import traced_late, with_layout
from pallas_kernels.activation import reference
from pallas_kernels.activation.reference import Function, float32
from pallas_kernels.arrays import like
from pallas_kernels.bits.gpu import pack_eight, unpack_eight
from pallas_kernels.gpu import THREADS, launch, update_in_place

DTYPES = ("float32", "bfloat16", "float16")
_VECTOR = 4  # elements of a thread's load; with 8 of bfloat16 registers would spill
_BLOCK = 8 * THREADS * _VECTOR
_GATED = 4 * THREADS * _VECTOR  # smaller, since a program holds up to three arrays


def forward(
    x: jax.Array, *, value: Function, code: Function, bits: int,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`value(x)`, and the bits of `code(x)`."""
    reference.check(DTYPES, x, bits=bits)
    shape = reference.packed_shape(x.shape, bits)
    block = block or _BLOCK
    spare = math.prod(shape) - bits * -(-x.size // 8)
    run = functools.partial(
        _forward, step=(value, code, bits), spare=spare, block=block
    )
    y, packed = _flat(run, spare == 0 and x.size % block == 0, x.reshape(-1))
    return y.reshape(x.shape), packed.reshape(shape)


def backward(
    g: jax.Array, packed: jax.Array, *saved: jax.Array, slope: Function,
    block: int | None = None,
) -> jax.Array:  # fmt: skip
    """`slope(code, *saved) * g`, written over g."""
    bits = packed.shape[0]
    reference.check(DTYPES, g, *saved, bits=bits)
    block = block or _BLOCK
    run = functools.partial(_backward, slope=slope, bits=bits, block=block)
    flat = [array.reshape(-1) for array in (g, packed, *saved)]
    joins = 8 * packed.size == bits * g.size and g.size % block == 0
    (dx,) = _flat(run, joins, *flat)
    return dx.reshape(g.shape)


def gated_forward(
    gate: jax.Array, up: jax.Array, *, value: Function, block: int | None = None
) -> jax.Array:
    """`value(gate) * up`."""
    step = lambda gate, up: (reference.gated_forward(gate, up, value=value),)
    return _gated(_gated_forward, step, block, gate, up)[0]


def gated_backward(
    g: jax.Array, gate: jax.Array, up: jax.Array, *, both: Function,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The cotangents of gate and up, written over gate and g."""
    step = lambda *tiles: reference.gated_backward(*tiles, both=both)[::-1]
    d_gate, d_up = _gated(_gated_backward, step, block, g, gate, up)
    return d_gate, d_up


def _gated(run, step, block: int | None, *arrays):
    reference.check(DTYPES, *arrays)
    block = block or _GATED
    run = functools.partial(run, step=step, block=block)
    flat = [array.reshape(-1) for array in arrays]
    outs = _flat(run, arrays[0].size % block == 0, *flat)
    return [x.reshape(arrays[0].shape) for x in outs]


# -- What is left after the last whole block is less than a block. It is computed
# separately and put into its place.


def _forward(x, *, step, spare, block):
    value, code, bits = step
    whole = x.size - x.size % block

    def both(stretches):
        wide = [float32(tile) for tile in stretches]
        planes = pack_eight([code(w) for w in wide], bits)
        return [value(w).astype(x.dtype) for w in wide], planes

    def body(refs):
        stretches, planes_at, layout = _place(block, bits)
        ys, planes = both([with_layout(refs["x"][at], layout) for at in stretches])
        for at, y in zip(stretches, ys, strict=True):
            refs["y"][at] = y
        for at, plane in zip(planes_at, planes, strict=True):
            refs["packed"][at] = plane.astype(jnp.uint8)

    size = bits * -(-x.size // 8) + spare
    outs = {"y": like(x, x.shape, x.dtype), "packed": like(x, (size,), jnp.uint8)}
    new = {name: jnp.zeros(out.shape, out.dtype) for name, out in outs.items()}
    if whole:
        how = outs, {"program": whole // block}, None, _params(x.dtype)
        new = launch("jaxmem_activation_forward", body, {"x": x}, *how)
    y, packed = new["y"], new["packed"]
    if whole < x.size:
        ys, planes = both(_eighths(x[whole:]))
        y = y.at[whole:].set(jnp.concatenate(ys)[: x.size - whole])
        tail = jnp.concatenate(planes).astype(jnp.uint8)
        packed = lax.dynamic_update_slice(packed, tail, (whole // 8 * bits,))
    return y, packed


def _backward(g, packed, *saved, slope, bits, block):
    whole = g.size - g.size % block

    def products(gs, planes, *saved):
        codes = unpack_eight([plane.astype(jnp.int32) for plane in planes])
        stretches = zip(gs, codes, *saved, strict=True)
        return [reference.scaled(slope, *tiles) for tiles in stretches]

    def body(refs):
        stretches, planes_at, layout = _place(block, bits)
        load = lambda ref, places: [with_layout(ref[at], layout) for at in places]
        planes, gs = load(refs["packed"], planes_at), load(refs["g"], stretches)
        new = products(gs, planes, *(load(refs[i], stretches) for i in names))
        for at, dx in zip(stretches, new, strict=True):
            refs["g"][at] = dx

    names = [f"saved{n}" for n in range(len(saved))]
    if whole:
        inputs = {"g": g, "packed": packed, **dict(zip(names, saved, strict=True))}
        how = whole // block, None, _params(g.dtype)
        name = "jaxmem_activation_backward"
        g = update_in_place(name, body, inputs, ("g",), *how)["g"]
    if whole < g.size:
        # This reads g after the kernel, which has not touched these elements. If it
        # read g before the kernel, XLA would have to copy g.
        tail = _eighths(g[whole:])
        start, width = whole // 8 * bits, tail[0].size
        planes = packed[start : start + bits * width].reshape(bits, width)
        new = products(tail, list(planes), *(_eighths(x[whole:]) for x in saved))
        g = g.at[whole:].set(jnp.concatenate(new)[: g.size - whole])
    return (g,)


def _gated_forward(gate, up, *, step, block):
    programs = gate.size // block
    y = jnp.zeros_like(gate)
    if programs:
        (y,) = _new_arrays(step, block, programs, 1, gate, up)
    return _with_rest([y], step, block, gate, up)


def _gated_backward(g, gate, up, *, step, block):
    if programs := g.size // block:
        inputs, written = {"g": g, "gate": gate, "up": up}, ("g", "gate")
        body = functools.partial(_gated_body, step, block, inputs, written)
        how = programs, None, _params(g.dtype)
        new = update_in_place("jaxmem_activation", body, inputs, written, *how)
        g, gate = new["g"], new["gate"]
    # the cotangent of `up` is in the place of g, that of the gate in its own
    return _with_rest([g, gate], step, block, g, gate, up)[::-1]


def _gated_body(step, block: int, inputs, written, refs) -> None:
    at, layout = pl.ds(lax.axis_index("program") * block, block), _layout(block)
    new = step(*(with_layout(refs[name][at], layout) for name in inputs))
    for name, tile in zip(written, new, strict=True):
        refs[name][at] = tile


def _new_arrays(step, block: int, programs: int, count: int, *arrays):
    """`count` new arrays: `step` of the first blocks of `arrays`."""
    inputs = {f"in{n}": x for n, x in enumerate(arrays)}
    outs = {f"out{n}": like(x, x.shape, x.dtype) for n, x in enumerate(arrays[:count])}
    body = functools.partial(_gated_body, step, block, inputs, outs)
    grid, params = {"program": programs}, _params(arrays[0].dtype)
    return launch("jaxmem_gated", body, inputs, outs, grid, params=params).values()


def _with_rest(outs, step, block, *arrays) -> tuple:
    """`outs`, and in them what `step` gives after the last whole block."""
    # The kernel computes it, on padded arrays. XLA would compute plain jax operations
    # anew wherever they are read, and copy an array that is overwritten in between.
    size = arrays[0].size
    whole = size - size % block
    if whole == size:
        return tuple(outs)
    rest = [jnp.pad(x[whole:], (0, block + whole - size)) for x in arrays]
    new = _new_arrays(step, block, 1, len(outs), *rest)
    pairs = zip(outs, new, strict=True)
    return tuple(x.at[whole:].set(part[: size - whole]) for x, part in pairs)


def _place(block: int, bits: int):
    """(a program's eight stretches, its planes of bytes, their layout)."""
    width = block // 8
    number = lax.axis_index("program")
    stretches = [pl.ds(number * block + j * width, width) for j in range(8)]
    planes = [pl.ds((number * bits + b) * width, width) for b in range(bits)]
    return stretches, planes, _layout(width)


def _params(dtype):
    # The fast approximations are exact enough for 16 bits only.
    return plgpu.CompilerParams(approx_math=dtype.itemsize == 2)


def _layout(width: int):
    return plgpu.Layout.WG_STRIDED((width,), vec_size=_VECTOR)


def _eighths(x) -> list:
    """Less than a block of elements as eight stretches, padded with zeros."""
    width = -(-x.size // 8)
    return list(jnp.pad(x, (0, 8 * width - x.size)).reshape(8, width))


def _flat(run, joins: bool, *arrays):
    """`run` of flat arrays. Under `vmap` examples that join are run as one long array.

    Examples join if they consist of whole blocks, and their bytes have no spare ones;
    others are run one after the other.
    """

    def under_vmap(*rows):
        if not joins:
            return jax.lax.map(lambda row: _flat(run, joins, *row), rows)
        outs = _flat(run, joins, *(x.reshape(-1) for x in rows))
        return tuple(x.reshape(len(rows[0]), -1) for x in outs)

    return traced_late(run, under_vmap, *arrays)
