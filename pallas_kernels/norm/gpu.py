"""Norms on GPUs, with dropout and a residual sum in the same pass.

A warpgroup holds a row in its registers, does all its work, and goes on to the next of
its rows; several warpgroups on each multiprocessor hide each other's latency. The
backward pass recomputes the statistics from the rows it reads anyway: only the input is
saved for it. It runs in place: the gradient of the input is written over the incoming
one. The gradients of scale and bias are summed over a program's rows in shared memory.
Then the programs add their sums to a few shared ones (`shared_sums`), which XLA adds
up. Those that share one take turns, so that the result is the same in each run.

Memory traffic for N rows of D elements of b bytes and P programs:

    forward   N D b * 2, with a residual 4; and 8 N where the moments are wanted
    backward  N D b * 3, with dropout and residual 5; 4 N from the output; and 16 P D
              for the gradients of scale and bias, all of it in the cache

Limits: rows of more than 4096 elements fill the registers, so the next row cannot be
fetched ahead; of 8192 they spill up to 660 bytes a thread in the backward pass. Where
all programs end at once, the last of those that share a sum waits for the others, up to
eight where 4096 elements are a row. No simulator has semaphores, so the turns are not
tested: jax 0.10's runs programs in their order, and in later ones each program has a
sum of its own. Nothing here has been timed on a device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hashing
from pallas_kernels._compat import can_take_turns, traced_late, with_layout
from pallas_kernels.arrays import check_dtypes, float32, like
from pallas_kernels.chips import MULTIPROCESSORS
from pallas_kernels.gpu import THREADS, in_turn, update_in_place
from pallas_kernels.norm import arithmetic
from pallas_kernels.norm.arithmetic import NormRules

DTYPES = ("float32", "bfloat16", "float16")
WIDEST = 8192
_WIDEST_AHEAD = 4096

# Elements of rows that a multiprocessor works on at a time. By ptxas a program of 4096
# takes 131 registers a thread of the 512 that there are for each of 128, forward, and
# 227 backward, which reads two arrays; with dropout 187 and 255.
_ELEMENTS = 3 * 4096
_ROWS_FOR_A_SUM = 32  # so that a program's sums are a sixteenth of its rows' bytes
_SUM_BYTES = 2**19  # of the shared sums of one vector; XLA holds as much


def programs(rows: int, width: int, arrays: int, least_rows: int = 1) -> int:
    """As many as run at once, or have `least_rows`; no more than the rows need."""
    each = min(max(_ELEMENTS // (width * arrays), 2), 8)
    most = min(each * MULTIPROCESSORS, max(rows // least_rows, MULTIPROCESSORS))
    return -(-rows // -(-rows // most))


def shared_sums(width: int) -> int:
    """How many sums there are that programs share."""
    return max(_SUM_BYTES // (4 * width), 32)


def _sums(count: int, width: int) -> tuple[int, int]:
    """The shape of the sums of `count` programs."""
    return min(count, shared_sums(width)) if can_take_turns() else count, width


class _RowLayout:
    """The layout of a row of `ref` in the registers of a warpgroup."""

    def __init__(self, ref):
        self.width = width = ref.shape[1]
        vector = 16 // ref.dtype.itemsize  # elements of a thread's load
        while width % (vector * THREADS):
            vector //= 2
        self.layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)

    def place(self, x):
        return with_layout(x, self.layout)

    def vector(self, ref):
        return float32(self.place(ref[...]))

    def mean(self, x):
        return jnp.sum(x) / np.float32(self.width)

    def dropout(self, rules: NormRules, seed):
        """Dropout of a row as a function of its position and itself."""
        words = seed[0], seed[1]
        column = jax.lax.broadcasted_iota(jnp.uint32, (self.width,), 0)
        column = hashing.column_word(words, self.place(column))

        def dropped(r, x):
            keep = arithmetic.keep(rules, words, r.astype(jnp.uint32), column)
            return arithmetic.dropped(rules, keep, x)

        return dropped


def _loop(row: _RowLayout, count: int, refs: dict[str, Any], body) -> None:
    """`body(r, **rows)` for each of this program's rows `r`: every `count`-th one."""
    # While it works on a row, the next row of each of `refs` is being fetched, if the
    # registers have room for both.
    rows, first = next(iter(refs.values())).shape[0], jax.lax.axis_index("program")
    here = jax.lax.div(np.int32(rows - 1) - first, np.int32(count)) + np.int32(1)
    fetch = lambda r: {k: row.place(ref[r]) for k, ref in refs.items()}
    work = lambda r, now: body(r, **{k: float32(x) for k, x in now.items()})

    def step(i, now):
        r = first + i * np.int32(count)
        if now is None:
            return work(r, fetch(r))
        # After the last row this one is fetched once more: the rows behind it belong
        # to other programs, which may be writing them.
        after = r + np.int32(count)
        following = fetch(jnp.where(after < np.int32(rows), after, r))
        work(r, now)
        return following

    start = fetch(first) if row.width <= _WIDEST_AHEAD else None
    jax.lax.fori_loop(np.int32(0), here, step, start)


def _call(body, count: int, name: str, ins: dict[str, Any], outs: dict[str, Any], over):
    """The kernel in `count` programs; `over`: which output replaces which input.

    Under `vmap` it is launched for each example.
    """
    ins = {k: x for k, x in ins.items() if x is not None}
    new = {k: v for k, v in outs.items() if k not in over}

    def kernel(refs):
        made = {k: refs[f"new {k}"] for k in new} | {
            o: refs[i] for o, i in over.items()
        }
        body({k: refs[k] for k in ins}, made)

    def run(*arrays):
        held = dict(zip(ins, arrays, strict=True))
        types = {f"new {k}": v for k, v in new.items()}
        how = {"program": count}, types
        got = update_in_place(name, kernel, held, over.values(), *how)
        return tuple(got[over[k] if k in over else f"new {k}"] for k in outs)

    def one(arrays):
        return traced_late(run, lambda *many: jax.lax.map(one, many), *arrays)

    return dict(zip(outs, one(tuple(ins.values())), strict=True))


def _check(x, *others) -> None:
    check_dtypes(DTYPES, x, *others)
    if x.shape[1] % THREADS or x.shape[1] > WIDEST:
        raise NotImplementedError(
            f"rows of a multiple of {THREADS} elements, at most {WIDEST}"
        )
    if not 0 < x.size < 2**31:
        raise NotImplementedError("arrays of 1 to 2**31 - 1 elements")


def _vectors(row: _RowLayout, refs, *names):
    """Vectors, or None; read for each row, since registers cannot keep them."""
    return (row.vector(refs[n]) if n in refs else None for n in names)


def _forward_body(rules: NormRules, count: int, ins, outs) -> None:
    row = _RowLayout(ins["x"])
    dropout = row.dropout(rules, ins["seed"]) if rules.rate else None

    def one(r, x, residual=None):
        if residual is not None:
            if dropout is not None:
                x = float32(dropout(r, x).astype(ins["x"].dtype))
            total = (residual + x).astype(outs["total"].dtype)
            outs["total"][r] = total
            x = float32(total)
        off, mean, var = arithmetic.moments(rules, x, row.mean)
        scale, bias = _vectors(row, ins, "scale", "bias")
        y = arithmetic.affine(off, arithmetic.rstd(rules, var), scale, bias)
        outs["y"][r] = y.astype(outs["y"].dtype)
        for name, stat in (("mean", mean), ("var", var)):
            if name in outs:
                outs[name][r] = stat

    read = {k: ins[k] for k in ("x", "residual") if k in ins}
    _loop(row, count, read, one)


def forward(
    arrays: dict[str, Any], *, rules: NormRules, dtype, stats: bool = False,
    block: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As `norm.tpu.forward`; also float16; `block` is the number of programs.

    Rows of a multiple of 128 elements, at most 8192.
    """
    ins: dict[str, Any] = {
        k: arrays.get(k) for k in ("x", "residual", "seed", "scale", "bias")
    }
    x, residual = ins["x"], ins["residual"]
    _check(x, residual, ins["scale"], ins["bias"], jax.ShapeDtypeStruct((), dtype))
    rows = x.shape[0]
    count = min(block or programs(rows, x.shape[1], 1 + (residual is not None)), rows)
    outs = {"y": like(x, x.shape, dtype)}
    if residual is not None:
        outs["total"] = like(x, x.shape, residual.dtype)
    if stats:
        names = ("mean", "var")[not rules.centred :]
        outs |= {name: like(x, x.shape[:1], jnp.float32) for name in names}
    body = functools.partial(_forward_body, rules, count)
    return _call(body, count, "jaxmem_norm_forward", ins, outs, {})


def _backward_body(rules: NormRules, count: int, ins, outs) -> None:
    row = _RowLayout(ins["g"])
    names = [name for name in ("scale", "bias") if name in outs]
    dropout = row.dropout(rules, ins["seed"]) if "seed" in ins else None

    def one(sums, r, g, saved, g_total=None):
        var = ins["var"][r] if "var" in ins else None
        scale, shift, inverse = _vectors(row, ins, "scale", "shift", "inverse")
        output = var, shift, inverse
        xhat, var = arithmetic.normalised(rules, saved, output, row.mean)
        shares = {"scale": g * xhat, "bias": g}
        for name, ref in sums.items():
            ref[...] = row.vector(ref) + shares[name]
        if not {"residual", "x"} & set(outs):
            return
        u = g if scale is None else g * scale
        d = arithmetic.input_gradient(rules, u, xhat, var, row.mean)
        if g_total is not None:
            d = d + g_total
        if "residual" in outs:
            outs["residual"][r] = d.astype(outs["residual"].dtype)
        if "x" in outs:
            d = d if dropout is None else dropout(r, d)
            outs["x"][r] = d.astype(outs["x"].dtype)

    read = {k: ins[k] for k in ("g", "saved", "g_total") if k in ins}

    def whole(*refs):
        sums = dict(zip(names, refs, strict=True))
        for ref in refs:
            ref[...] = row.place(jnp.zeros(row.width, jnp.float32))
        _loop(row, count, read, functools.partial(one, sums))
        if sums:
            _add_up(row, sums, outs)

    pl.run_scoped(whole, *(plgpu.SMEM((row.width,), jnp.float32) for _ in names))


def _add_up(row: _RowLayout, sums, outs) -> None:
    """Adds this program's sums to those that it shares with others, in their order."""
    count = np.int32(next(outs[name].shape[0] for name in sums))
    program = jax.lax.axis_index("program")
    which, turn = jax.lax.rem(program, count), jax.lax.div(program, count)

    def add():
        for name, ref in sums.items():
            shared = outs[name].at[which]

            @pl.when(turn > 0)
            def _(ref=ref, shared=shared):
                ref[...] = row.vector(ref) + row.vector(shared)

            shared[...] = row.vector(ref)

    in_turn(int(count), which, turn, add)


def backward(
    arrays: dict[str, Any], output=None, *, rules: NormRules, outs: dict[str, Any],
    block: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As `norm.tpu.backward`; also float16; `block` is the number of programs.

    Rows of a multiple of 128 elements, at most 8192.
    """
    ins: dict[str, Any] = {k: arrays.get(k) for k in ("g", "g_total", "saved", "scale")}
    g = ins["g"]
    big = {k: like(g, g.shape, d) for k, d in outs.items() if k in ("x", "residual")}
    _check(*ins.values(), *big.values())
    rows = g.shape[0]
    arrays_read = 2 + (ins["g_total"] is not None)
    count = min(block or programs(rows, g.shape[1], arrays_read, _ROWS_FOR_A_SUM), rows)
    var, shift, inverse = (None,) * 3 if output is None else output
    ins |= {"var": var, "shift": shift, "inverse": inverse}
    ins["seed"] = arrays.get("seed") if rules.rate and "x" in outs else None
    shape = _sums(count, g.shape[1])
    sums = {k: like(g, shape, jnp.float32) for k in outs if k not in big}
    body = functools.partial(_backward_body, rules, count)
    over = arithmetic.donors(big, ins)
    got = _call(body, count, "jaxmem_norm_backward", ins, big | sums, over)
    return {
        k: x if k in big else jnp.sum(x, axis=0).astype(outs[k]) for k, x in got.items()
    }
