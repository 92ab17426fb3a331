"""The choice of an op's implementation: plain XLA, or a Pallas kernel.

It is made for the platform and the chip that are lowered for, not for those that this
process runs on: a step that is compiled for an absent H100 contains the H100's kernel.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from pallas_kernels import chips
from pallas_kernels._compat import device_in_context, refused, simulated_platform
from pallas_kernels.lowering import (
    KernelCandidate,
    for_chip,
    kernel_or_xla,
    of_leaves,
    warn_once,
)
from pallas_kernels.measured import Measured, load
from pallas_kernels.partials import partial

Implementation = Literal["xla", "pallas"]

NAMES = {"tpu": "TPU", "cuda": "GPU"}


# `implementation=None` takes a kernel in these cases, on one device or inside of
# `shard_map`. The times of each are in `benchmarks/results`.
MEASURED: tuple[Measured, ...] = load()


def kernel_module(kernel: str, platform: str) -> Any:
    """The module of a kernel's folder: "tpu", "gpu" or "reference"."""
    # It is imported only when a kernel may run, since Pallas takes long to import.
    return importlib.import_module(f"pallas_kernels.{kernel}.{platform}")


def check_implementation(implementation: Any, *more: str) -> None:
    """Raises ValueError for an unknown implementation; an op allows `more` names."""
    names = ("xla", "pallas", *more)
    if implementation not in (None, *names):
        *first, last = (f"{name!r}" for name in names)
        raise ValueError(
            f"implementation={implementation!r}: allowed are None, {', '.join(first)} "
            f"and {last}"
        )


def considered(name: str, implementation: Implementation | None, x: Any) -> bool:
    """Whether a kernel may be taken in either pass on any chip.

    `x` is the array that its passes are sized by.
    """
    check_implementation(implementation)
    if implementation is None:
        return bool(_measured(name, x, (False, True)))
    return implementation == "pallas"


def dispatch(
    name: str,
    implementation: Implementation | None,
    *args: Any,
    xla: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
    gpu: Callable[..., Any] | None = None,
    sized_by: Any = None,
    backward: bool = False,
    xla_derives: bool = False,
    others: Sequence[KernelCandidate] = (),
) -> Any:
    """`xla(*args)`, or the result of the platform's kernel.

    Args:
      name: of the kernel in messages, such as "layer_norm".
      implementation: "xla"; "pallas" for the kernel; None for the kernel where
        `MEASURED` has it for the chip, dtype, size and pass, on one device or inside
        of `shard_map`, and XLA elsewhere, under `vmap` and in further derivatives.
      *args: arrays, in any pytrees.
      xla, tpu, gpu: functions of `args` that return the same structure, shapes and
        dtypes. A kernel raises NotImplementedError for arguments it does not support.
      sized_by: the array whose dtype and size are compared with `MEASURED`; None for
        the first.
      backward: whether this is a backward pass.
      xla_derives: whether the kernel's derivative, which a second derivative of an op
        asks for, is that of `xla`; otherwise it raises an error. `xla` closes over no
        tracers then.
      others: kernels of another maker, which None takes before ours; `run` is of
        `args`, and returns what `xla` does.

    Returns:
      What the chosen function returns.

    Raises:
      ValueError: unknown implementation. With "pallas": no kernel supports these
        arguments; or, at lowering, there is none for the platform or the chip.

    Warns:
      With None, if a kernel that would have been chosen does not support `args`: once
      for each message, at lowering. With `xla_derives`, once for each kernel of which
      XLA computes a derivative.
    """
    check_implementation(implementation)
    x = jax.tree.leaves(args)[0] if sized_by is None else sized_by
    kernels = {"tpu": tpu, "cuda": gpu}
    found = _measured(name, x, (backward,))
    if implementation is None:
        kernels = {p: k for p, k in kernels.items() if p in found}
    others = others if implementation is None else ()
    if implementation == "xla" or not (kernels or others):
        return xla(*args)
    if implementation is None and any(map(_is_explicit, jax.tree.leaves(args))):
        how = {"tpu": tpu, "gpu": gpu, "sized_by": x, "backward": backward}
        run = functools.partial(dispatch, name, None, xla=xla, others=others, **how)
        # XLA's results say how they are sharded; no kernel is traced for such types.
        outs = jax.eval_shape(xla, *args)
        shardings = jax.tree.map(lambda out: out.sharding, outs)
        return jax.sharding.auto_axes(run, out_sharding=shardings)(*args)
    branches, reasons = _supported(name, kernels, xla, args)
    if implementation is None:
        ours = _candidates(name, kernels, reasons, found)
        tree = jax.tree.structure(args)
        flat = partial(partial, of_leaves, tree)
        candidates = [k.changed(flat) for k in (*others, *ours)]
        return kernel_or_xla(xla, candidates, *args)
    run = functools.partial(_by_platform, name, branches, reasons, xla)
    if not xla_derives:
        return run(_differentiated_once(name, args))
    return _derived_by_xla(name, xla, args, run(jax.lax.stop_gradient(args)))


def _is_explicit(x: Any) -> bool:
    """Whether the type of an array says how it is sharded."""
    kinds = jax.typeof(x).sharding.mesh.axis_types
    return jax.sharding.AxisType.Explicit in kinds


def _measured(name: str, x, passes: tuple[bool, ...]) -> dict[str, set[str]]:
    """The chips on which one of these passes was measured for such an `x`."""
    found: dict[str, set[str]] = {}
    for entry in MEASURED:
        large = entry.dtype == x.dtype.name and entry.smallest <= x.size
        if entry.kernel == name and entry.backward in passes and large:
            found.setdefault(chips.platform_of(entry.chip), set()).add(entry.chip)
    return found


def _candidates(name, kernels, reasons, found) -> list[KernelCandidate]:
    def one(platform: str, kernel) -> KernelCandidate:
        return KernelCandidate(
            platform,
            partial(_is_one_of, frozenset(found[platform])),
            kernel,
            reasons.get(platform, ""),
            f"{name} on {NAMES[platform]}",
        )

    return [one(*item) for item in kernels.items()]


def _is_one_of(names: frozenset[str], device: Any) -> bool:
    return chips.chip_name(device) in names


def _by_platform(name: str, branches, reasons, xla, args):
    """The kernel of the platform that is lowered for; an error on others."""
    text = "; ".join(f"{NAMES[p]}: {reason}" for p, reason in reasons.items())
    if not branches:
        raise ValueError(f"implementation='pallas': no kernel for this {name}. {text}")
    simulated = simulated_platform()
    if simulated is not None and simulated in branches:
        return branches[simulated](*args)
    there = " and ".join(NAMES[platform] for platform in branches)
    message = (
        f"implementation='pallas': {name} has no kernel for the platform that this is "
        f"lowered for, but for {there}. {text}"
    )
    refuse = functools.partial(_refuse, xla, message)
    return jax.lax.platform_dependent(*args, **branches, default=refuse)


def _refuse(xla: Callable, message: str, *args: Any) -> Any:
    """What `xla` returns; lowering it raises ValueError."""
    return refused(args, jax.eval_shape(xla, *args), message)


def _once(name: str, platform: str, kernel: Callable, *args: Any) -> Any:
    return kernel(*for_chip(args, chips.needs(name, platform)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_once(name: str, args: tuple) -> tuple:
    """`args`; its derivative raises an error, since kernels have none."""
    return args


@_differentiated_once.defjvp
def _refuse_derivative(name: str, primals, tangents):
    raise ValueError(
        f"the kernel of {name} has a first derivative alone: implementation='xla' "
        "has all"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _derived_by_xla(name: str, xla: Callable, args: tuple, outs: Any) -> Any:
    """`outs`, what a kernel gives for `args`, with the derivative of `xla(*args)`."""
    # The kernel is outside, since its effects in a simulation do not pass `custom_jvp`.
    return outs


@_derived_by_xla.defjvp
def _derive_by_xla(name: str, xla: Callable, primals, tangents):
    warn_once(f"{name}: the kernel has no second derivative; it is computed by XLA")
    (args, outs), (dots, _) = primals, tangents
    return outs, jax.jvp(xla, args, dots)[1]


def _supported(
    name: str, kernels: Mapping[str, Callable | None], xla: Callable, args
) -> tuple[dict[str, Callable], dict[str, str]]:
    """The kernels that support these arguments, and the others with the reason."""
    branches, reasons = {}, {}
    for platform, kernel in kernels.items():
        if kernel is None:
            reasons[platform] = "there is none"
            continue
        # Tracing itself may fail for a chip that the kernel is not for.
        device = device_in_context(platform)
        if message := chips.needs(name, platform).lacking(device):
            branches[platform] = functools.partial(_refuse, xla, message)
            continue
        try:
            jax.eval_shape(kernel, *args)
            branches[platform] = functools.partial(_once, name, platform, kernel)
        except NotImplementedError as error:
            reasons[platform] = str(error)
    return branches, reasons
