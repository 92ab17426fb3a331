"""An optimization barrier for GPUs alone."""

from typing import TypeVar

import jax
from jax.interpreters import ad, batching, mlir

from jaxmem import _compat

# It has the name of JAX's own: where a program is rewritten, it is one.
_barrier = _compat.Primitive("optimization_barrier")
_barrier.multiple_results = True


T = TypeVar("T")


def gpu_barrier(operand: T) -> T:
    """`operand`, a pytree, as of `jax.lax.optimization_barrier`, on GPUs alone.

    XLA for GPU does not move or merge operations across it, nor its transpose. On other
    platforms it is nothing: XLA for TPU makes kernels of their own of what a barrier
    keeps apart.
    """
    leaves, tree = jax.tree.flatten(operand)
    return jax.tree.unflatten(tree, _barrier.bind(*leaves))


_barrier.def_impl(lambda *xs: list(xs))
_barrier.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(_barrier, lambda ctx, *xs: list(xs))
mlir.register_lowering(
    _barrier,
    mlir.lower_fun(lambda *xs: jax.lax.optimization_barrier(xs), multiple_results=True),
    platform="cuda",
)
batching.primitive_batchers[_barrier] = lambda xs, dims: (_barrier.bind(*xs), dims)


def _jvp(primals, tangents):
    tangents = map(ad.instantiate_zeros, tangents)
    return _barrier.bind(*primals), _barrier.bind(*tangents)


def _transpose(cotangents, *_):
    return [ct if type(ct) is ad.Zero else _barrier.bind(ct)[0] for ct in cotangents]


ad.primitive_jvps[_barrier] = _jvp
ad.primitive_transposes[_barrier] = _transpose
