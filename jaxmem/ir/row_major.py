"""An array whose axes keep their order in memory, on a GPU."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching, mlir

from jaxmem import _compat

_row_major = _compat.Primitive("row_major")
_compiled_here: ContextVar[bool] = ContextVar("compiled_here", default=False)


def row_major(x):
    """The same array; where it is computed for one GPU, its last axis is contiguous.

    XLA for GPU gives a loop's buffer the order of axes in which the values come that
    are written into it, and then transposes the whole buffer before the loop and after
    it: a second copy, where the argument could have been updated in place. On several
    devices nothing is said: XLA would gather the array.
    """
    return _row_major.bind(x)


@contextlib.contextmanager
def compiled_here() -> Iterator[None]:
    """Programs exported meanwhile are compiled by this same version of jaxlib.

    To others it is not said: no version promises to know a constraint on layouts that
    another one wrote, and `jax.export` refuses it.
    """
    token = _compiled_here.set(True)
    try:
        yield
    finally:
        _compiled_here.reset(token)


def _lowered(ctx, x):
    kept = _compiled_here.get() or not _compat.is_for_export(ctx)
    if not kept or not _compat.is_on_one_device(ctx):
        return [x]
    order = Layout(tuple(range(ctx.avals_in[0].ndim)))
    constrained = lambda x: with_layout_constraint(x, order)
    return mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


_row_major.def_impl(lambda x: x)
_row_major.def_abstract_eval(lambda x: x)
mlir.register_lowering(_row_major, lambda ctx, x: [x])
mlir.register_lowering(_row_major, _lowered, platform="cuda")
batching.primitive_batchers[_row_major] = lambda args, dims: (
    _row_major.bind(*args),
    *dims,
)
ad.deflinear2(_row_major, lambda ct, _: [ct])
