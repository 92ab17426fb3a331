"""Slices of the host's arrays, at indices that XLA:GPU does not take for others.

XLA:GPU copies a slice in a loop along a line that it works out of the index. Until
openxla/xla#46308 it took the index of an asynchronous copy, as those from and to the
host's memory are, for the loop's counter wherever it followed from that: a backward
scan read its layers in the order of the forward scan. An index that follows from
something else besides is computed when the slice is taken. So a zero is added to it
which comes from outside of the loop. (A kernel takes the slice then, beside others as
before. Where the index is the counter, as in a forward scan, all is left as it is.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.scans import is_on_host, is_var, scan_like, split, xs_of, ys_of
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn

# a pass of XLA:GPU; `xla_disable_hlo_passes` with its name leaves all to kernels
COPIES = "fusion-dynamic-memcpy-rewriter"
WHAT_TO_DO = (
    "Give the step to jaxmem.schedule, which finds such slices by indices that XLA "
    "computes, or compile it with compiler_options="
    f"{{'xla_disable_hlo_passes': '{COPIES}'}} (jax.jit and jaxmem.estimate take them),"
    " or use jax 0.11.1 or newer"
)
AFFECTED = (0, 10, 2) <= jax.__version_info__ < (0, 11, 1)
_INSIDE = {"allow_negative_indices": False}

Hide = Callable[[Any], Any]


def hiding() -> Hide:
    """A function for use in a loop, to be made outside of it: the same index, hidden.

    That is, XLA:GPU cannot tell that it follows from the loop's counter.
    """
    if not AFFECTED:
        return lambda index: index
    # not even that it is zero is known before the program is nearly done
    zero = lax.optimization_barrier(jnp.int32(0))
    add = lambda index, zero: index + zero.astype(index.dtype)
    same = lambda index, zero: index
    choose = partial(lax.platform_dependent, cuda=add, rocm=add, default=same)
    return lambda index: choose(index, zero)


def with_hidden_indices(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr, with the indices of the host's slices in its loops hidden."""
    if not AFFECTED or not any(map(_may_be_misread, jaxprs.walk(closed))):
        return closed
    return jaxprs.rewritten(closed, _rule())


def walks_back(eqn: JaxprEqn) -> bool:
    """Whether a scan goes backwards through arrays in the host's memory."""
    if not primitives.is_scan(eqn) or not eqn.params["reverse"]:
        return False
    return any(is_var(v) and is_on_host(v) for v in (*xs_of(eqn), *ys_of(eqn)))


def _is_slice(eqn: JaxprEqn) -> bool:
    at_index = primitives.is_update(eqn) or primitives.is_dynamic_slice(eqn)
    return at_index and is_on_host(eqn.invars[0])


def _may_be_misread(eqn: JaxprEqn) -> bool:
    return walks_back(eqn) or _is_slice(eqn)


def _rule(hide: Hide | None = None) -> Callable:
    """What is done to equations; `hide`: made outside of the loop that they are in."""

    def rule(eqn: JaxprEqn, args: list) -> list[Any] | None:
        if hide is not None and _is_slice(eqn):
            n = 2 if primitives.is_update(eqn) else 1  # operands before the indices
            pairs = zip(eqn.invars[n:], args[n:], strict=True)
            at = [hide(x) if is_var(v) else x for v, x in pairs]
            return _compat.bind(eqn, [*args[:n], *at])
        inside = jaxprs.bodies(eqn)
        inner = (one for body in inside for one in jaxprs.walk(body))
        if not walks_back(eqn) and not any(map(_may_be_misread, inner)):
            return None
        if primitives.is_loop(eqn):
            loop = _scan if primitives.is_scan(eqn) else _while
            return loop(eqn, args, hiding())
        if primitives.is_shard_map(eqn):
            run = lambda args: jaxprs.evaluate(inside[0], args, _rule())
            return _compat.shard_map_again(eqn, run, args)
        if hide is not None and (body := jaxprs.called(eqn)) is not None:
            return jaxprs.evaluate(body, args, rule)
        closed = (_compat.ClosedJaxpr(*jaxprs.split(body)) for body in inside)
        return jaxprs.rebind(eqn, args, list(map(with_hidden_indices, closed)))

    return rule


def _scan(eqn: JaxprEqn, args: list, hide: Hide) -> list[Any]:
    """The scan; one that goes backwards finds the host's rows by its own index."""
    consts, init, xs = split(eqn, args)
    back = walks_back(eqn)
    read = {k for k, v in enumerate(xs_of(eqn)) if back and is_var(v) and is_on_host(v)}
    written = [k for k, v in enumerate(ys_of(eqn)) if back and is_on_host(v)]

    def step(
        carry: tuple[Any, Any, Any], item: dict[int, Any]
    ) -> tuple[Any, dict[int, Any]]:
        j, inner, stacks = carry
        at = hide(j)
        row = lambda x: lax.dynamic_index_in_dim(x, at, 0, keepdims=False, **_INSIDE)
        rows = [row(x) if k in read else item[k] for k, x in enumerate(xs)]
        args = [*consts, *inner, *rows]
        outs = jaxprs.evaluate(eqn.params["jaxpr"], args, _rule(hide))
        ys = dict(enumerate(outs[len(init) :]))
        new = zip(stacks, map(ys.pop, written), strict=True)
        put = lax.dynamic_update_index_in_dim
        stacks = [put(stack, y, at, 0, **_INSIDE) for stack, y in new]
        return (j - 1, outs[: len(init)], stacks), ys

    stacks = [_compat.empty_like(ys_of(eqn)[k].aval) for k in written]
    start = jnp.int32(eqn.params["length"] - 1), init, stacks
    rest = {k: x for k, x in enumerate(xs) if k not in read}
    (_, ends, stacks), ys = scan_like(eqn, step, start, rest)
    ys |= dict(zip(written, stacks, strict=True))
    return [*ends, *(ys[k] for k in sorted(ys))]


def _while(eqn: JaxprEqn, args: list, hide: Hide) -> list[Any]:
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    known, consts, init = args[:n], args[n : n + m], args[n + m :]
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    goes_on = lambda carry: jaxprs.evaluate(test, [*known, *carry])[0]
    step = lambda carry: jaxprs.evaluate(body, [*consts, *carry], _rule(hide))
    return list(_compat.in_context_of(eqn, lax.while_loop, goes_on, step, init))
