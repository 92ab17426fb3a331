"""What an already jitted step says of its own arguments.

`jax.jit`, `nnx.jit` and `equinox.filter_jit` each keep it in a place of their own.
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
    """The options of a jitted step.

    Attributes:
      donated: positions and names of the arguments whose buffers it may reuse.
      static: those that are Python values.
      compiler_options: as given to `jax.jit`; None where there are none.
      placed: whether it names shardings of its arguments or results.
    """

    donated: tuple[Place, ...] = ()
    static: tuple[Place, ...] = ()
    compiler_options: dict[str, Any] | None = None
    placed: bool = False


def jitted(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Jitted | None:
    """The options of a jitted step for a call; None for what is not jitted.

    A wrapper of our own says them by a method `jit_options(*args, **kwargs)`.
    """
    own = getattr(fn, "jit_options", None)
    if own is not None:
        return own(*args, **kwargs)
    if is_filter_jit(fn):
        # equinox has no static arguments: whatever is no array is static
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
    """The class of what `filter_jit` returns, which has no public name."""
    import equinox

    return type(equinox.filter_jit(lambda: None))


def _donated_by_equinox(fn: Any) -> tuple[Place, ...]:
    """`donate=` of `filter_jit` knows the first argument and all others."""
    names = list(fn._signature.parameters)
    first = [0] if fn.donate_first else []
    return (*first, *(range(1, len(names)) if fn.donate_rest else ()))


def is_nnx_jit(fn: Callable) -> bool:
    """Whether `nnx.jit` made it."""
    return "flax.nnx" in sys.modules and hasattr(fn, "jitted_fn")


def without_nnx_jit(fn: Callable) -> Callable:
    """The function inside `nnx.jit`; the same function where there is no such.

    Objects are split and merged here already, and what the step leaves as it was need
    not be an output. One that names shardings stays as it is: nnx makes of them what
    each array of an object has, and the call that is traced names it.
    """
    if not is_nnx_jit(fn):
        return fn
    sharded = getattr(fn, "in_shardings", None), getattr(fn, "out_shardings", None)
    return getattr(fn, "__wrapped__") if sharded == (None, None) else fn  # noqa: B009
