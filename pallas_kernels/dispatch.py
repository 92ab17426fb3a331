"""One rule for which implementation of an op runs: plain XLA, or a Pallas kernel.

The choice is made for the platform that is lowered for, not for the one that this
process runs on: a step that is compiled for an absent H100 contains the H100's kernel.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from pallas_kernels._compat import refused, simulated_platform

Implementation = Literal["xla", "pallas"]

NAMES = {"tpu": "TPU", "cuda": "GPU"}

# Kernels that `implementation=None` takes: (kernel, platform) pairs for which
# `benchmarks/results` holds a time on a device that is no worse than XLA's.
MEASURED: frozenset[tuple[str, str]] = frozenset()


def check_implementation(implementation: Any, *more: str) -> None:
    """ValueError for what is no implementation; `more`: what else an op has."""
    names = ("xla", "pallas", *more)
    if implementation not in (None, *names):
        *first, last = (f"{name!r}" for name in names)
        raise ValueError(
            f"implementation={implementation!r}: allowed are None, {', '.join(first)} "
            f"and {last}"
        )


def considered(name: str, implementation: Implementation | None) -> bool:
    """Whether a kernel may be taken, on one platform or another."""
    check_implementation(implementation)
    return any(_is_wanted(name, platform, implementation) for platform in NAMES)


def dispatch(
    name: str,
    implementation: Implementation | None,
    *args: Any,
    xla: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
    gpu: Callable[..., Any] | None = None,
) -> Any:
    """`xla(*args)`, or what the kernel of the platform makes of `args`.

    Args:
      name: of the kernel, as messages have it: "layer_norm".
      implementation: "xla"; "pallas" for the kernel; None for the kernel where it was
        measured to be no slower than XLA, and XLA elsewhere.
      *args: arrays, in any pytrees.
      xla, tpu, gpu: functions of `args` that return the same structure, shapes and
        dtypes. A kernel raises NotImplementedError for arguments it does not do.

    Returns:
      What the chosen function returns.

    Raises:
      ValueError: another implementation. With "pallas": no kernel does these
        arguments; or, when it is lowered, none of the platform it is lowered for.

    Warns:
      Under None, where a kernel that would have been chosen does not do `args`: once
      for each message.
    """
    check_implementation(implementation)
    kernels = {"tpu": tpu, "cuda": gpu}
    wanted = {p: k for p, k in kernels.items() if _is_wanted(name, p, implementation)}
    if not wanted:
        return xla(*args)
    branches, reasons = _supported(name, wanted, args)
    if implementation is None:
        for platform, reason in reasons.items():
            _warn_once(f"{name} on {NAMES[platform]}: {reason}; XLA does it")
        return jax.lax.platform_dependent(*args, **branches, default=xla)
    text = "; ".join(f"{NAMES[p]}: {reason}" for p, reason in reasons.items())
    if not branches:
        raise ValueError(f"implementation='pallas': no kernel for this {name}. {text}")
    simulated = simulated_platform()
    if simulated is not None and simulated in branches:
        return branches[simulated](*args)
    like = jax.eval_shape(xla, *args)
    there = " and ".join(NAMES[platform] for platform in branches)
    message = (
        f"implementation='pallas': {name} has no kernel for the platform that this is "
        f"lowered for, but for {there}. {text}"
    )
    refuse = lambda *args: refused(args, like, message)
    return jax.lax.platform_dependent(*args, **branches, default=refuse)


def _is_wanted(name: str, platform: str, implementation) -> bool:
    if implementation is None:
        return (name, platform) in MEASURED
    return implementation == "pallas"


def _once(name: str, kernel: Callable, *args: Any) -> Any:
    return kernel(*_differentiated_once(name, args))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_once(name: str, args: tuple) -> tuple:
    """`args`, of which a kernel has no derivative of its own: it says so."""
    return args


@_differentiated_once.defjvp
def _refuse_derivative(name: str, primals, tangents):
    raise ValueError(
        f"the kernel of {name} has a first derivative alone: implementation='xla' "
        "has all"
    )


def _supported(
    name: str, kernels: Mapping[str, Callable | None], args
) -> tuple[dict[str, Callable], dict[str, str]]:
    """The kernels that take these arguments, and why the others do not."""
    branches, reasons = {}, {}
    for platform, kernel in kernels.items():
        if kernel is None:
            reasons[platform] = "there is none"
            continue
        try:
            jax.eval_shape(kernel, *args)
            branches[platform] = functools.partial(_once, name, kernel)
        except NotImplementedError as error:
            reasons[platform] = str(error)
    return branches, reasons


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
