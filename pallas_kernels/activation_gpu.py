"""GELU, SiLU and their gated units on GPU; `_activation.py` tells what is kept.

Arrays are flat. A program takes eight stretches that follow each other, four elements
of each to a thread: element i of stretch j is bit j of byte i, so a byte is made of
eight registers of one thread, and no thread asks another. What is left after the last
whole block is less than a block; it is computed apart and put into its place.
For arrays of 16 bits `exp`, `log` and `rsqrt` are the chip's quick ones, right to
2**-21 or so.

The backward pass writes over references: the cotangent, and the gate of a gated unit.

Not optimal: loads wait in registers, without TMA; what hides them are programs that
run at the same time, of 64 to 137 registers a thread. The derivative from an output is
some hundred operations an element: in bfloat16 that is more than an H100 has while it
reads and writes it.

Through memory go, for n elements of s bytes and codes of b bits: forward n (2 s + b/8);
backward n (2 s + b/8), and n s more where the output was kept; gated unit forward
3 n s, backward 5 n s.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _activation, _outputs
from pallas_kernels._activation import Function, float32
from pallas_kernels._compat import traced_late, with_layout
from pallas_kernels.bits_gpu import THREADS, pack_eight, unpack_eight

DTYPES = ("float32", "bfloat16", "float16")
_VECTOR = 4  # elements that a thread loads at once; 8 of bfloat16 fill its registers
_BLOCK = 8 * THREADS * _VECTOR
_GATED = 4 * THREADS * _VECTOR  # of up to three arrays


def forward(
    x: jax.Array,
    *,
    value: Function,
    code: Function,
    bits: int,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`value(x)`, and the bits of `code(x)` as uint8 of `packed_shape(x.shape, bits)`.

    Args:
      value, code: of a float32 tile; `code` gives int32 below 2**bits.
      bits: 1 to 4.
      block: elements of a program, a multiple of 4096. The backward pass must have
        the same.
    """
    _activation.check(DTYPES, x, bits=bits)
    shape = _activation.packed_shape(x.shape, bits)
    block = block or _BLOCK
    spare = math.prod(shape) - bits * -(-x.size // 8)
    run = functools.partial(
        _forward, step=(value, code, bits), spare=spare, block=block
    )
    y, packed = _flat(run, spare == 0 and x.size % block == 0, x.reshape(-1))
    return y.reshape(x.shape), packed.reshape(shape)


def backward(
    g: jax.Array,
    packed: jax.Array,
    *kept: jax.Array,
    slope: Function,
    block: int | None = None,
) -> jax.Array:
    """`slope(code, *kept) * g` in place of g; kept are arrays like g."""
    bits = packed.shape[0]
    _activation.check(DTYPES, g, *kept, bits=bits)
    block = block or _BLOCK
    run = functools.partial(_backward, slope=slope, bits=bits, block=block)
    flat = [array.reshape(-1) for array in (g, packed, *kept)]
    joins = 8 * packed.size == bits * g.size and g.size % block == 0
    (dx,) = _flat(run, joins, *flat)
    return dx.reshape(g.shape)


def gated_forward(
    gate: jax.Array, up: jax.Array, *, value: Function, block: int | None = None
) -> jax.Array:
    """`value(gate) * up`."""
    _activation.check(DTYPES, gate, up)
    step = lambda gate, up: (_activation.gated_forward(gate, up, value=value),)
    block = block or _GATED
    run = functools.partial(_gated_forward, step=step, block=block)
    flat = [array.reshape(-1) for array in (gate, up)]
    (y,) = _flat(run, gate.size % block == 0, *flat)
    return y.reshape(gate.shape)


def gated_backward(
    g: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    both: Function,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of gate and up, in place of gate and g.

    `both` gives value and slope of a float32 tile of the gate.
    """
    _activation.check(DTYPES, g, gate, up)
    step = lambda *tiles: _activation.gated_backward(*tiles, both=both)[::-1]
    block = block or _GATED
    run = functools.partial(_gated_backward, step=step, block=block)
    flat = [array.reshape(-1) for array in (g, gate, up)]
    d_up, d_gate = _flat(run, g.size % block == 0, *flat)
    return d_gate.reshape(gate.shape), d_up.reshape(up.shape)


def _forward(x, *, step, spare, block):
    value, code, bits = step
    nbytes = bits * -(-x.size // 8) + spare
    whole = x.size - x.size % block

    def both(stretches):
        wide = float32(*stretches)
        planes = pack_eight([code(w) for w in wide], bits)
        return [value(w).astype(x.dtype) for w in wide], planes

    def body(x_ref, y_ref, packed_ref):
        stretches, bytes_, layout = _place(block, bits)
        ys, planes = both([with_layout(x_ref[at], layout) for at in stretches])
        for at, y in zip(stretches, ys, strict=True):
            y_ref[at] = y
        for at, plane in zip(bytes_, planes, strict=True):
            packed_ref[at] = plane.astype(jnp.uint8)

    outs = _outputs.like(x, x.shape, x.dtype), _outputs.like(x, (nbytes,), "u1")
    y, packed = (jnp.zeros(o.shape, o.dtype) for o in outs)
    if whole:
        y, packed = plgpu.kernel(
            body,
            out_type=outs,
            grid=(whole // block,),
            grid_names=("block",),
            compiler_params=_params(x.dtype),
            kernel_name="jaxmem_activation",
        )(x)
    if whole < x.size:
        ys, planes = both(_eighths(x[whole:]))
        y = y.at[whole:].set(jnp.concatenate(ys)[: x.size - whole])
        tail = jnp.concatenate(planes).astype(jnp.uint8)
        packed = lax.dynamic_update_slice(packed, tail, (whole // 8 * bits,))
    return y, packed


def _backward(g, packed, *kept, slope, bits, block):
    whole = g.size - g.size % block

    def products(gs, planes, *kept):
        codes = unpack_eight([plane.astype(jnp.int32) for plane in planes])
        args = zip(gs, codes, *kept, strict=True)
        return [_scaled(slope, *arg) for arg in args]

    def body(g_ref, packed_ref, *kept_refs):
        stretches, bytes_, layout = _place(block, bits)
        load = lambda ref, places: [with_layout(ref[at], layout) for at in places]
        planes, gs = load(packed_ref, bytes_), load(g_ref, stretches)
        new = products(gs, planes, *(load(ref, stretches) for ref in kept_refs))
        for at, dx in zip(stretches, new, strict=True):
            g_ref[at] = dx

    if whole:
        (g,) = _in_place(body, whole // block, [g], packed, *kept)
    if whole < g.size:
        # read after the kernel, which has not touched it: before, g would be copied
        tail = _eighths(g[whole:])
        start, width = whole // 8 * bits, tail[0].size
        planes = packed[start : start + bits * width].reshape(bits, width)
        new = products(tail, list(planes), *(_eighths(k[whole:]) for k in kept))
        g = g.at[whole:].set(jnp.concatenate(new)[: g.size - whole])
    return (g,)


def _scaled(slope, g, code, *kept):
    wide, *kept = float32(g, *kept)
    return (slope(code, *kept) * wide).astype(g.dtype)


def _gated_forward(gate, up, *, step, block):
    programs = gate.size // block
    y = jnp.zeros_like(gate)
    if programs:
        (y,) = _gated(step, block, programs, 1, gate, up)
    return _with_rest([y], step, block, gate, up)


def _gated_backward(g, gate, up, *, step, block):
    programs = g.size // block
    if programs:
        body = _gated_body(step, block, 3)
        g, gate = _in_place(body, programs, [g, gate], up)
    return _with_rest([g, gate], step, block, g, gate, up)


def _gated_body(step, block, inputs: int):
    """A kernel that writes what `step` gives over its first inputs, or into outputs."""

    def body(*refs):
        at, layout = _stretch(block)
        new = step(*(with_layout(ref[at], layout) for ref in refs[:inputs]))
        for ref, tile in zip(refs[inputs:] or refs, new, strict=False):
            ref[at] = tile

    return body


def _gated(step, block, programs: int, count: int, *arrays):
    """`count` new arrays: `step` of the first blocks of others."""
    like = arrays[0]
    return plgpu.kernel(
        _gated_body(step, block, len(arrays)),
        out_type=[_outputs.like(like, like.shape, like.dtype)] * count,
        grid=(programs,),
        grid_names=("block",),
        compiler_params=_params(like.dtype),
        kernel_name="jaxmem_gated",
    )(*arrays)


def _with_rest(outs, step, block, *arrays) -> tuple:
    """`outs`, and in them what `step` gives after the last whole block.

    By the kernel: plain jax is done again wherever it is read, and an array that is
    written over in between is copied for it.
    """
    size = arrays[0].size
    whole = size - size % block
    if whole == size:
        return tuple(outs)
    rest = [jnp.pad(x[whole:], (0, block + whole - size)) for x in arrays]
    new = _gated(step, block, 1, len(outs), *rest)
    pairs = zip(outs, new, strict=True)
    return tuple(x.at[whole:].set(part[: size - whole]) for x, part in pairs)


def _in_place(body, programs, written, *read):
    """`written`, once `body` of references to them and to `read` has run."""
    refs = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in written]
    mesh = plgpu.Mesh(grid=(programs,), grid_names=("block",))
    params = _params(written[0].dtype)
    run = pl.kernel(
        body, out_type=(), mesh=mesh, compiler_params=params, name="jaxmem_activation"
    )
    run(*refs, *read)
    return [jax.freeze(ref) for ref in refs]


def _place(block: int, bits: int):
    """A program's eight stretches, where its planes of bytes lie, and their layout."""
    width = block // 8
    number = lax.axis_index("block")
    stretches = [pl.ds(number * block + j * width, width) for j in range(8)]
    bytes_ = [pl.ds((number * bits + b) * width, width) for b in range(bits)]
    return stretches, bytes_, _layout(width)


def _stretch(block: int):
    return pl.ds(lax.axis_index("block") * block, block), _layout(block)


def _params(dtype):
    return plgpu.CompilerParams(approx_math=dtype.itemsize == 2)


def _layout(width: int):
    return plgpu.Layout.WG_STRIDED((width,), vec_size=_VECTOR)


def _eighths(x) -> list:
    """A few elements as eight stretches, with zeros at the end."""
    width = -(-x.size // 8)
    return list(jnp.pad(x, (0, 8 * width - x.size)).reshape(8, width))


def _flat(run, joins: bool, *arrays):
    """`run` of flat arrays; under `vmap` of examples one after the other.

    Examples that join (of whole blocks, in bytes without spare ones) are run as one
    long array, others in turn.
    """

    def under_vmap(*rows):
        if not joins:
            return jax.lax.map(lambda row: _flat(run, joins, *row), rows)
        outs = _flat(run, joins, *(x.reshape(-1) for x in rows))
        return tuple(x.reshape(len(rows[0]), -1) for x in outs)

    return traced_late(run, under_vmap, *arrays)
