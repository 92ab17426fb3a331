"""Equinox: a module is a pytree whose leaves are not all arrays.

As in `equinox.filter_jit`, arrays are traced, and everything else is static.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem._paths import has_gradient
from jaxmem.frameworks._jitted import Jitted
from jaxmem.frameworks._places import Place
from jaxmem.frameworks.pytrees import Pytrees
from jaxmem.ir import jaxprs


class Equinox(Pytrees):
    """The floating arrays of a module are trained; other leaves have no gradient."""

    name: ClassVar[str] = "equinox"
    module: ClassVar[str | None] = "equinox"
    static_leaves: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["equinox"].Module)

    def compiles(self, fn: Callable) -> bool:
        return isinstance(fn, _filter_jit_type())

    def jit_options(self, fn: Any) -> Jitted:
        """It has no static arguments: every leaf that is no array is static."""
        return Jitted(_donated(fn))

    def partition(self, model: Any) -> tuple[Any, Any, Any]:
        is_trained = lambda path, x: jaxprs.is_array(x) and has_gradient(x)
        return self.select(model, is_trained)

    def state_line(self, name: str) -> str:
        return super().state_line(f"equinox.filter({name}, equinox.is_inexact_array)")

    def exchanged(self, model: Any, change: Callable[[str, Any], Any | None]) -> Any:
        def exchanged(path, x):
            if not self.owns(x):
                return x
            new = change(keystr(path, simple=True, separator="/"), x)
            return inside(path, x) if new is None else new

        def inside(path, module):
            is_leaf = lambda x: x is not module and self.owns(x)
            leaves, tree = tree_flatten_with_path(module, is_leaf=is_leaf)
            return tree.unflatten([exchanged((*path, *keys), x) for keys, x in leaves])

        return exchanged((), model)


@functools.cache
def _filter_jit_type() -> type:
    """The class of `filter_jit`'s results, which has no public name."""
    import equinox

    return type(equinox.filter_jit(lambda: None))


def _donated(fn: Any) -> tuple[Place, ...]:
    """`donate=` of `filter_jit` distinguishes the first argument from all others."""
    names = list(fn._signature.parameters)
    first = [0] if fn.donate_first else []
    return (*first, *(range(1, len(names)) if fn.donate_rest else ()))
