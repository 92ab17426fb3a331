"""Layer norm and RMS norm by kernels, alone or after dropout and a residual sum.

One `custom_vjp` for all: the sum is `x`, or `residual + dropout(x)`, and its norm is
taken over the last axis. It has no forward mode; XLA computes second derivatives.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.common.lean import widen
from jaxmem.ops.norms.from_output import guard, norm_tangent, recovery
from jaxmem.ops.norms.moments import Norm, affine, clipped, raw_moments
from jaxmem.ops.randomness.dropout import DropoutMask, masked, wait_for_gradient
from pallas_kernels import dispatch
from pallas_kernels.norm import NormRules
from pallas_kernels.partials import partial

NAMES = ("x", "residual", "scale", "bias")


class AddNorm(NamedTuple):
    """What is static."""

    name: str  # of the kernel
    norm: Norm
    save: str
    implementation: dispatch.Implementation | None
    rate: float = 0.0
    dtypes: tuple[Any, ...] = ()  # those of `NAMES`, None for what is not there


def unsupported(norm: Norm, ndim: int, mask, save) -> str | None:
    """What kernels do, if that is not this."""
    last = (ndim - 1,)
    if norm.axes != last or norm.features != last or norm.axis_name is not None:
        return "the last axis alone, and no axis_name"
    if mask is not None:
        return "no mask"
    return None if save in ("input", "output") else 'save="input" and save="output"'


def refused(name: str, implementation, reason: str, xla, *args):
    """`xla(*args)` where no kernel was asked for; else the error."""

    def kernel(*args):
        raise NotImplementedError(reason)

    return dispatch.dispatch(
        name, implementation, *args, xla=xla, tpu=kernel, gpu=kernel
    )


def add_norm(
    call: AddNorm, x, scale, bias, residual=None, seed=None
) -> tuple[jax.Array, Any]:
    """(the norm, the sum); without a residual that of `x`, and None."""
    given = (x, residual, scale, bias)
    dtypes = tuple(None if a is None else a.dtype for a in given)
    out: Any = _add_norm(call._replace(dtypes=dtypes), *vary_alike(*given, seed))
    return out


def _rules(call: AddNorm) -> NormRules:
    return NormRules(call.norm.epsilon, call.norm.centred, call.rate)


def _rows(x):
    return None if x is None else x.reshape(-1, x.shape[-1])


def _dropped(call: AddNorm, x, seed):
    return masked(DropoutMask(call.rate, ()), x, seed) if call.rate else x


def _dispatch(
    call: AddNorm, xla, kernel, arrays: dict[str, Any], *, backward: bool
) -> dict[str, Any]:
    """`xla(arrays)`, or `kernel(platform, arrays)`."""
    return dispatch.dispatch(
        *(call.name, call.implementation, arrays),
        xla=xla,
        tpu=partial(kernel, "tpu"),
        gpu=partial(kernel, "gpu"),
        sized_by=arrays["g" if backward else "x"],
        backward=backward,
        xla_derives=True,
    )


# -- forward: a dict of "y", "total" where there is a residual, "var" and "mean" where
# they are wanted


def _forward_xla(call: AddNorm, stats: bool, a) -> dict[str, Any]:
    x, out = a["x"], {}
    if a["residual"] is not None:
        x = _dropped(call, x, a["seed"]).astype(a["residual"].dtype)
        x = out["total"] = a["residual"] + x
    mean, var = raw_moments(call.norm, widen(x), None)
    out["y"] = affine(call.norm, x, mean, clipped(var), a["scale"], a["bias"])
    if stats:
        out |= {"var": var} if mean is None else {"var": var, "mean": mean}
    return out


def _forward_kernel(call: AddNorm, stats: bool, platform: str, a) -> dict[str, Any]:
    shape = a["x"].shape
    run = dispatch.kernel_module("norm", platform).forward
    rows = a | {"x": _rows(a["x"]), "residual": _rows(a["residual"])}
    out = run(rows, rules=_rules(call), dtype=call.norm.dtype, stats=stats)
    one = (*shape[:-1], 1)
    return {k: v.reshape(one if v.ndim == 1 else shape) for k, v in out.items()}


def _forward(call: AddNorm, stats: bool, arrays) -> dict[str, Any]:
    xla = partial(_forward_xla, call, stats)
    kernel = partial(_forward_kernel, call, stats)
    return _dispatch(call, xla, kernel, arrays, backward=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_norm(call: AddNorm, x, residual, scale, bias, seed):
    arrays = {"x": x, "residual": residual, "scale": scale, "bias": bias, "seed": seed}
    out = _forward(call, False, arrays)
    return out["y"], out.get("total")


def _add_norm_forward(call: AddNorm, *primals):
    inputs = dict(zip((*NAMES, "seed"), primals, strict=True))
    wanted = {k for k, p in inputs.items() if p is not None and p.perturbed}
    arrays: dict[str, Any] = {
        k: p.value if isinstance(p, CustomVJPPrimal) else p for k, p in inputs.items()
    }
    stats = call.save == "output" and bool(wanted - {"bias"})
    out = _forward(call, stats, arrays)
    total = out.get("total", arrays["x"])
    saved: dict[str, Any] = {}
    # `save="input"` keeps the sum alone: the backward pass recomputes the statistics
    # from the rows it reads.
    if wanted - {"bias"}:
        saved["scale"] = arrays["scale"]
        saved["kept"] = total
    if "x" in wanted and call.rate:
        saved["seed"] = arrays["seed"]
    if stats:
        norm, scale, bias = call.norm, arrays["scale"], arrays["bias"]
        var = checkpoint_name(out["var"], norm.stats_name)
        y = out["y"] = checkpoint_name(out["y"], f"jaxmem_{norm.name}_output")
        index, columns = guard(norm, total, out.get("mean"), var, scale, bias)
        saved |= {"kept": y, "bias": bias, "index": index, "columns": columns}
        saved["var"] = var if wanted & {"x", "residual"} else None
    # a dict of no arrays: residuals may carry their structure, not strings
    return (out["y"], out.get("total")), (dict.fromkeys(wanted), saved)


# -- backward: a dict of the gradients in `outs`, which maps names to dtypes; "residual"
# is that of the sum


def _recoverable(call: AddNorm, a):
    """What `_norm_output` recovers the normalised input from."""
    residuals = a["kept"], a["var"], a["index"], a["columns"]
    return residuals, a["scale"], a["bias"], float(jnp.finfo(call.norm.dtype).eps)


def _pull_xla(call: AddNorm, x_dtype, a):
    """Gradients of what was normalised, of scale and of bias."""
    norm, kept = call.norm, a["kept"]
    # alike over a mesh, or the gradients of what is new here were summed over it
    zeros = jnp.zeros(kept.shape[-1:], widen(kept).dtype)
    kept, zeros = vary_alike(kept, zeros)
    if call.save == "output":
        residuals, scale, bias, eps = _recoverable(call, a)
        tangent = lambda *dots: norm_tangent(
            norm, residuals, scale, bias, None, dots, eps
        )
        x = jnp.broadcast_to(zeros, kept.shape).astype(x_dtype)
        x = None if a["var"] is None else x
        return jax.vjp(tangent, x, zeros, zeros)[1](a["g"])

    def formula(x, scale, bias):
        mean, var = raw_moments(norm, widen(x), None)
        return affine(norm, x, mean, clipped(var), scale, bias)

    scale = zeros + 1 if a["scale"] is None else a["scale"]
    return jax.vjp(formula, kept, scale, zeros)[1](a["g"])


def _backward_xla(call: AddNorm, x_dtype, outs, a) -> dict[str, Any]:
    d, scale, bias = _pull_xla(call, x_dtype, a)
    if d is not None and a["g_total"] is not None:
        d = d + a["g_total"]
    grads: dict[str, Any] = {"residual": d, "scale": scale, "bias": bias}
    if "x" in outs:
        # else XLA finds that both passes make the same mask, and keeps it between them
        seed, d = a.get("seed"), grads["residual"].astype(outs["x"])
        seed, d = wait_for_gradient(seed, d) if call.rate else (seed, d)
        grads["x"] = _dropped(call, d, seed)
    return {k: grads[k].astype(dtype) for k, dtype in outs.items()}


def _backward_kernel(call: AddNorm, outs, platform: str, a) -> dict[str, Any]:
    kept, output, g = a["kept"], None, a["g"]
    if call.save == "output":
        kept, _, shift, inverse = recovery(call.norm, *_recoverable(call, a))
        var = None if a["var"] is None else a["var"].reshape(-1)
        output = var, shift, inverse
    rows = {"g": _rows(g), "g_total": _rows(a["g_total"]), "saved": _rows(kept)}
    rows |= {"seed": a.get("seed"), "scale": a["scale"]}
    run = dispatch.kernel_module("norm", platform).backward
    grads = run(rows, output, rules=_rules(call), outs=outs)
    return {k: x.reshape(g.shape) if x.ndim > 1 else x for k, x in grads.items()}


def _backward(call: AddNorm, x_dtype, outs, arrays) -> dict[str, Any]:
    xla = partial(_backward_xla, call, x_dtype, outs)
    kernel = partial(_backward_kernel, call, outs)
    return _dispatch(call, xla, kernel, arrays, backward=True)


def _gradients(call: AddNorm, wanted, saved, g, g_total) -> dict[str, Any]:
    dtypes = dict(zip(NAMES, call.dtypes, strict=True))
    outs = {k: dtypes[k] for k in NAMES if k in wanted}
    if wanted == {"bias"}:
        lead = tuple(range(g.ndim - 1))
        return {"bias": jnp.sum(widen(g), lead).astype(outs["bias"])}
    is_sum = dtypes["residual"] is not None
    sum_dtype = dtypes["residual" if is_sum else "x"]
    # without dropout x has the gradient of the sum
    same = "x" in outs and is_sum and not call.rate
    if same:
        outs = {"residual": sum_dtype} | {k: v for k, v in outs.items() if k != "x"}
    grads = _backward(call, sum_dtype, outs, saved | {"g": g, "g_total": g_total})
    return grads | ({"x": grads["residual"].astype(dtypes["x"])} if same else {})


def _add_norm_backward(call: AddNorm, residuals, g):
    wanted, saved = residuals
    g, g_total = g
    if isinstance(g, SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)  # pyright: ignore[reportArgumentType]
    g_total = None if isinstance(g_total, SymbolicZero) else g_total
    with jax.named_scope(f"jaxmem.{call.name}"):
        grads = _gradients(call, frozenset(wanted), saved, g, g_total)
    return *(grads.get(name) for name in NAMES), None


_add_norm.defvjp(_add_norm_forward, _add_norm_backward, symbolic_zeros=True)
