"""The options of an already jitted step: donated and static arguments, compilation.

`jax.jit`, `nnx.jit` and `equinox.filter_jit` each store them differently.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem import _compat
from jaxmem.frameworks._places import Place


@dataclass(frozen=True)
class Jitted:
    """The options of a jitted step."""

    donated: tuple[Place, ...] = ()  # arguments whose buffers it may reuse
    static: tuple[Place, ...] = ()  # those that are Python values
    compiler_options: dict[str, Any] | None = None  # as given to `jax.jit`
    placed: bool = False  # whether it names shardings of its arguments or results


def jitted(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Jitted | None:
    """The options of a jitted step for a call; None if the function is not jitted."""
    # A wrapper of this library has a method `jit_options(*args, **kwargs)`.
    options = getattr(fn, "jit_options", None)
    if options is not None:
        return options(*args, **kwargs)
    if is_filter_jit(fn):
        # Equinox has no static arguments: every leaf that is no array is static.
        return Jitted(_donated_by_equinox(fn))
    # nnx.jit holds jax's own jitted function
    info = _compat.jit_info(getattr(fn, "jitted_fn", fn))
    if info is None:
        return None
    return Jitted(
        (*info.donate_argnums, *info.donate_argnames),
        (*info.static_argnums, *info.static_argnames),
        dict(info.compiler_options_kvs) or None,
        _compat.names_shardings(info),
    )


def is_filter_jit(fn: Callable) -> bool:
    """Whether `equinox.filter_jit` made it; equinox is not imported to find out."""
    return "equinox" in sys.modules and isinstance(fn, _filter_jit_type())


@functools.cache
def _filter_jit_type() -> type:
    """The class of `filter_jit`'s results, which has no public name."""
    import equinox

    return type(equinox.filter_jit(lambda: None))


def _donated_by_equinox(fn: Any) -> tuple[Place, ...]:
    """`donate=` of `filter_jit` distinguishes the first argument from all others."""
    names = list(fn._signature.parameters)
    first = [0] if fn.donate_first else []
    return (*first, *(range(1, len(names)) if fn.donate_rest else ()))


def is_nnx_jit(fn: Callable) -> bool:
    """Whether `nnx.jit` made it."""
    return "flax.nnx" in sys.modules and hasattr(fn, "jitted_fn")


def without_nnx_jit(fn: Callable) -> Callable:
    """The function inside `nnx.jit`; any other function stays as it is."""
    # This package splits and merges objects already, and an array that the step does
    # not change need not be an output. A step that names shardings stays as it is too:
    # nnx derives from them the sharding of each array of an object.
    if not is_nnx_jit(fn):
        return fn
    sharded = getattr(fn, "in_shardings", None), getattr(fn, "out_shardings", None)
    return getattr(fn, "__wrapped__") if sharded == (None, None) else fn  # noqa: B009
