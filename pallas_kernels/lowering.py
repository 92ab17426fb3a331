"""Decisions at lowering, when a program's chip and number of devices are known.

There are two primitives. One is the identity, and checks that a kernel supports the
chip. The other chooses between XLA and a kernel; every transformation but lowering
treats it as XLA.
"""

import functools
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from pallas_kernels._compat import (
    Primitive,
    device_in_context,
    is_of,
    jaxpr_as_fun,
    lower_plainly,
    on_one_device,
    sharded_over,
    varying_as,
)
from pallas_kernels._compat import lowered_for as lowered_for
from pallas_kernels.chips import Needs
from pallas_kernels.partials import HashablePartial, partial

_TRACED = 256  # functions of which JAX keeps what was traced

# -- a check

_for_chip = Primitive("for_chip")
_for_chip.multiple_results = True


def for_chip(args: Any, needs: Needs) -> Any:
    """`args`, a pytree; lowering for a chip without these needs raises ValueError."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(tree, _for_chip.bind(*leaves, needs=needs))


def _check(ctx, *args, needs: Needs):
    device = device_in_context(needs.platform)
    if device is not None:
        needs.check(device)
    return args


_for_chip.def_impl(lambda *args, needs: list(args))
_for_chip.def_abstract_eval(lambda *avals, needs: list(avals))
mlir.register_lowering(_for_chip, _check)
batching.primitive_batchers[_for_chip] = lambda args, dims, *, needs: (
    _for_chip.bind(*args, needs=needs),
    dims,
)


# -- a choice


class KernelCandidate(NamedTuple):
    """A kernel that may be taken.

    Attributes:
      platform: "cuda" or "tpu".
      wins: predicate of a device: whether to take the kernel there.
      run: function of flat arrays to a tuple of arrays.
      reason: why it does not support these arguments; empty if it does.
      name: of the kernel and the platform, for warnings.
      vmaps: whether `jax.vmap` of `run` is as good as the kernel itself.
      sharded: the same as `run` under a `jit` over several devices, which itself says
        how it is partitioned; None if the kernel needs a `jax.shard_map` there.
    """

    platform: str
    wins: Callable[[Any], bool]
    run: Callable[..., tuple]
    reason: str
    name: str
    vmaps: bool = False
    sharded: Callable[..., tuple] | None = None

    def changed(self, change: Callable[[Callable], Callable]) -> "KernelCandidate":
        """The same, with a change of what runs it."""
        sharded = None if self.sharded is None else change(self.sharded)
        return self._replace(run=change(self.run), sharded=sharded)


_choice = Primitive("kernel_or_xla")
_choice.multiple_results = True


def kernel_or_xla(xla: Callable, candidates: list[KernelCandidate], *args: Any) -> Any:
    """`xla(*args)`, or the result of the first candidate that wins where it is lowered.

    That is on one device, or its shard; one that can be partitioned also on several.
    """
    # In derivatives it is `xla(*args)`, since kernels have none of their own, and under
    # `vmap` for a kernel that was not measured there.
    leaves, tree = jax.tree.flatten(args)
    run = partial(of_leaves, tree, xla)
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed = _traced(run, plain)
    consts, number = closed.consts, len(closed.consts)
    if consts:
        # Arrays that `xla` closes over, such as a mask that no kernel supports, may be
        # tracers of the enclosing trace, so they become arguments.
        run = functools.partial(_of_consts, closed, number)  # no cache keeps arrays
        plain = [jax.ShapeDtypeStruct(jnp.shape(c), c.dtype) for c in consts] + plain
        closed = _traced(run, plain)
        candidates = [k.changed(partial(partial, _without, number)) for k in candidates]
        leaves = [*consts, *leaves]
    how = {"jaxpr": closed, "xla": run, "candidates": tuple(candidates)}
    outs = _choice.bind(*leaves, **how, mesh=_mesh_of(leaves))
    outs = [varying_as(x, *map(jax.typeof, leaves)) for x in outs]
    whole = jax.eval_shape(_jitted(xla), *args)
    return jax.tree.unflatten(jax.tree.structure(whole), outs)


def of_leaves(tree: Any, function: Callable, *leaves: Any) -> tuple:
    """The leaves of `function`'s result for an unflattened tree of arguments."""
    return tuple(jax.tree.leaves(function(*tree.unflatten(leaves))))


def _traced(run: Callable, plain: list[Any]) -> Any:
    """The closed jaxpr; for an equal function, in a like context, the same one."""
    if isinstance(run, HashablePartial):
        return _jitted(run).trace(*plain).jaxpr
    return jax.make_jaxpr(run)(*plain)


def _jitted(run: Callable) -> Any:
    """Its `jax.jit`; for an equal function the same one."""
    return _kept_jit(run) if isinstance(run, HashablePartial) else jax.jit(run)


_kept_jit = lru_cache(_TRACED)(jax.jit)


def _mesh_of(arrays: list[Any]) -> Any:
    """The mesh of arrays, as their types name it, or the one in context."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    named = (mesh for mesh in meshes if not mesh.empty)
    return next(named, jax.sharding.get_abstract_mesh())


def _of_consts(closed, number: int, *arrays) -> tuple:
    """The results of a jaxpr with the first arrays as its constants."""
    with_consts = closed.replace(consts=list(arrays[:number]))
    return tuple(jaxpr_as_fun(with_consts)(*arrays[number:]))


def _without(number: int, kernel: Callable, *arrays) -> tuple:
    """The results of a kernel on all but the first arrays."""
    return kernel(*arrays[number:])


def _chosen(ctx, jaxpr, candidates, mesh) -> tuple[Callable, Any]:
    """(what to lower, a function of plain arrays, the context to do so in)."""
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    one = on_one_device(ctx)
    inside = ctx if one else sharded_over(ctx, mesh)
    for kernel in candidates:
        run = kernel.run if one else kernel.sharded if inside is not None else None
        if platforms != (kernel.platform,) or run is None:
            continue
        device = device_in_context(kernel.platform)
        if device is None or not kernel.wins(device):
            continue
        if not kernel.reason:
            return run, inside
        warn_once(f"{kernel.name}: {kernel.reason}; XLA does it")
    return jaxpr_as_fun(jaxpr), ctx


def is_choice(eqn: Any) -> bool:
    """Whether an equation may be lowered to a kernel."""
    return eqn.primitive is _choice


def kernel_of(eqn: Any, device: Any, sharded: bool = False) -> Any:
    """The jaxpr of the kernel that an equation is lowered to; None where XLA does it.

    Args:
      eqn: one of which `is_choice` says so.
      device: that it is lowered for.
      sharded: whether a `jit` over several devices is lowered.
    """
    for kernel in eqn.params["candidates"]:
        run = kernel.sharded if sharded else kernel.run
        taken = is_of(device, kernel.platform) and kernel.wins(device)
        if run is not None and taken and not kernel.reason:
            avals = [v.aval for v in eqn.invars]
            avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
            kept = isinstance(kernel.run, HashablePartial)
            return (_kept_trace if kept else _trace_for)(kernel.run, avals, device)
    return None


def _trace_for(run: Callable, avals: tuple, device: Any) -> Any:
    # a function of its own: no cache of JAX's takes this trace for another device's
    with lowered_for(device):
        return jax.make_jaxpr(lambda *args: run(*args))(*avals)


_kept_trace = lru_cache(_TRACED)(_trace_for)


def _lower(ctx, *args, jaxpr, xla, candidates, mesh):
    return lower_plainly(*_chosen(ctx, jaxpr, candidates, mesh), *args)


def _derivative(primals, tangents, *, jaxpr, xla, candidates, mesh):
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(xla, tuple(primals), tuple(tangents))


def _under_vmap(args, dims, *, jaxpr, xla, candidates, mesh):
    mapped = partial(partial, _mapped, tuple(dims))
    kept = [k.changed(mapped) for k in candidates if k.vmaps]
    plain = mapped(xla)
    outs = kernel_or_xla(plain, kept, *args) if kept else plain(*args)
    return outs, [0] * len(outs)


def _mapped(dims: tuple, function: Callable, *args):
    return jax.vmap(function, in_axes=dims)(*args)


def _run(*args, xla, **params):
    return _jitted(partial(_bound, xla, **params))(*args)


def _bound(xla: Callable, *args, **params):
    return _choice.bind(*args, xla=xla, **params)


@cache
def warn_once(message: str) -> None:
    """Warns with the same message once in a process."""
    warnings.warn(message, stacklevel=4)


_choice.def_impl(_run)
_choice.def_abstract_eval(lambda *avals, jaxpr, **params: jaxpr.out_avals)
mlir.register_lowering(_choice, _lower)
ad.primitive_jvps[_choice] = _derivative
batching.primitive_batchers[_choice] = _under_vmap
