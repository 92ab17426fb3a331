"""The options of an already jitted step: donated and static arguments, compilation."""

from collections.abc import Callable
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


def of_jax(fn: Callable) -> Jitted | None:
    """Those of what `jax.jit` returned; None for any other function."""
    info = _compat.jit_info(fn)
    if info is None:
        return None
    return Jitted(
        (*info.donate_argnums, *info.donate_argnames),
        (*info.static_argnums, *info.static_argnames),
        dict(info.compiler_options_kvs) or None,
        _compat.names_shardings(info),
    )
