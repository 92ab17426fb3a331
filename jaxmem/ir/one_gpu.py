"""What XLA for GPU must be told, in programs for one device.

Each is the identity in its first operand, everywhere else too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching, mlir

from jaxmem import _compat
from jaxmem._contexts import set_within

_compiled_here: ContextVar[bool] = ContextVar("compiled_here", default=False)


def compiled_here() -> AbstractContextManager[None]:
    """Programs exported meanwhile are compiled by this same version of jaxlib.

    Others are told nothing about layouts: no version promises to know such a constraint
    of another one, and `jax.export` refuses it.
    """
    return set_within(_compiled_here, True)


def row_major(x: Any) -> Any:
    """The same array, whose last axis is contiguous.

    XLA gives a loop's buffer the order of axes in which the values come that are
    written into it, and then transposes the whole buffer before the loop and after it:
    a second copy, where the argument could have been updated in place. (Of an array on
    several devices it would make one: it gathers what is constrained.)
    """
    return _row_major.bind(x)


def index_after(j: Any, same_j: Any, value: Any) -> Any:
    """The index `j`, not before a scalar is there; `same_j` is it, computed otherwise.

    XLA reads what the body of a loop and an update both read once, and makes products
    of it, such as a decayed weight, before the body has begun. (Of an array on several
    devices a scalar would be sent.)
    """
    return _index_after.bind(j, same_j, value)


def late(j: jax.Array, same_j: jax.Array, *values: jax.Array) -> Any:
    """`j`, computed of the values; an optimization barrier cannot be evaluated."""
    some = sum((jnp.isnan(x).astype(j.dtype) for x in values), jnp.zeros_like(j))
    return lax.clamp(same_j, some, j)


def _row_major_order(x: jax.Array) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _primitive(name: str, on_one_gpu: Callable, exported: bool) -> _compat.Primitive:
    """The identity in the first operand; on one GPU the function."""
    # `exported`: whether it may be in a program that another version will compile

    def lowered(ctx: Any, *args: Any) -> Any:
        kept = exported or _compiled_here.get() or not _compat.is_for_export(ctx)
        if not kept or not _compat.is_on_one_device(ctx):
            return [args[0]]
        return mlir.lower_fun(on_one_gpu, multiple_results=False)(ctx, *args)

    def batched(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
        alone = all(d is None for d in dims[1:])
        return made.bind(*args) if alone else args[0], dims[0]

    # a primitive, since only its lowering knows the platform and the devices
    made = _compat.Primitive(name)
    made.def_impl(lambda x, *_: x)
    made.def_abstract_eval(lambda x, *_: x)
    mlir.register_lowering(made, lambda ctx, *args: [args[0]])
    mlir.register_lowering(made, lowered, platform="cuda")
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = lambda primals, tangents: (
        made.bind(*primals),
        tangents[0],
    )
    return made


_row_major = _primitive("row_major", _row_major_order, exported=False)
_index_after = _primitive("index_after", late, exported=True)
