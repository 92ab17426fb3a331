"""Small questions about variables and `scan` equations, and a scan like another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem import _compat
from jaxmem._bits import packed_nbytes
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import elements, evaluate
from jaxmem.ir.jaxprs import is_var as is_var
from jaxmem.ir.types import Atom, JaxprEqn

# Bytes from which a barrier or a write is worth what it costs: an L4 moves half of them
# in a launch, an H100 five times as many.
LARGE = 2**20


def size_of(v: Atom) -> int:
    """Bytes of a variable in the memory of the device."""
    return 0 if is_on_host(v) else elements(v.aval.shape) * v.aval.dtype.itemsize


def is_on_host(v: Atom) -> bool:
    return getattr(v.aval, "memory_space", None) == jax.memory.Space.Host


def host_bytes(v: Atom) -> int:
    """Bytes of a variable in the memory of the host."""
    return elements(v.aval.shape) * v.aval.dtype.itemsize if is_on_host(v) else 0


_MASK = 1024  # elements from which a mask is kept in bits


def is_mask(v: Atom) -> bool:
    """Whether a variable is kept with eight elements to the byte."""
    shape = v.aval.shape
    if not all(isinstance(d, int) for d in shape):
        return False  # bits are packed along axes of a known size
    return v.aval.dtype == bool and elements(shape) >= _MASK


def kept_size(v: Atom) -> int:
    """Bytes of a variable as it is kept from the forward to the backward pass."""
    return packed_nbytes(v.aval.shape) if is_mask(v) else size_of(v)


def split(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list, list, list]:
    """(constants, carry, xs) among what goes into a scan."""
    n_consts, n_carry = _compat.scan_counts(eqn)
    end = n_consts + n_carry
    return list(values[:n_consts]), list(values[n_consts:end]), list(values[end:])


def carried_aliases(eqn: JaxprEqn) -> dict[int, int]:
    """Output of a loop's body -> the input whose place it takes in the next one."""
    if primitives.is_while(eqn):
        consts = eqn.params["body_nconsts"]
        return {k: consts + k for k in range(len(eqn.outvars))}
    consts, carries = _compat.scan_counts(eqn)
    return {k: consts + k for k in range(carries)}


def iterations(eqn: JaxprEqn) -> int:
    """How often a body of an equation runs, as far as the jaxpr says it."""
    return eqn.params["length"] if primitives.is_scan(eqn) else 1


def xs_of(eqn: JaxprEqn) -> list[Any]:
    """The arrays of which a scan reads a slice in each iteration."""
    return split(eqn, eqn.invars)[2]


def ys_of(eqn: JaxprEqn) -> list[Any]:
    """The arrays that a scan stacks."""
    return list(eqn.outvars[_compat.scan_counts(eqn)[1] :])


_AHEAD = "rows of layers to come"


def ahead(stack: Any) -> Any:
    """A stack of which a scan's body reads only rows that the scan has yet to reach."""
    # So they may be read in a buffer into which it writes the others.
    return checkpoint_name(stack, _AHEAD)


def is_ahead(eqn: JaxprEqn) -> bool:
    """Whether an equation is that of `ahead`."""
    return primitives.is_named(eqn) and eqn.params["name"] == _AHEAD


_ROWS = "rows of a table"


def rows_of_layers(stack: Any) -> Any:
    """A stack of ids, or of rows that are added into a table: no parameter's layers."""
    return checkpoint_name(stack, _ROWS)


def is_rows_of_layers(eqn: JaxprEqn) -> bool:
    """Whether an equation is that of `rows_of_layers`."""
    return primitives.is_named(eqn) and eqn.params["name"] == _ROWS


def barrier(values: Sequence[Any]) -> list[Any]:
    """`optimization_barrier`, one for each set of mesh axes over which values vary."""
    # Inside `shard_map` jax 0.10 takes all outputs of a barrier to vary as any of them.
    axes = [_compat.varying_axes(x) for x in values]
    found: dict[int, Any] = {}
    for kind in dict.fromkeys(axes):
        places = [i for i, a in enumerate(axes) if a == kind]
        held = lax.optimization_barrier([values[i] for i in places])
        found.update(zip(places, held, strict=True))
    return [found[i] for i in range(len(values))]


def run_body(
    eqn: JaxprEqn, consts: Sequence, carry: Sequence, xs: Sequence
) -> tuple[list, list]:
    """(carry, rows of stacks) of one iteration of a scan as it is."""
    outs = evaluate(eqn.params["jaxpr"], [*consts, *carry, *xs])
    return outs[: len(carry)], outs[len(carry) :]


def scan_like(eqn: JaxprEqn, step: Callable, init: Any, xs: Any) -> Any:
    """A scan of the length, direction and name of that of `eqn`."""
    length, reverse, unroll = (eqn.params[k] for k in ("length", "reverse", "unroll"))
    scan = partial(lax.scan, length=length, reverse=reverse, unroll=unroll)
    return _compat.in_context_of(eqn, scan, step, init, xs)
