"""The frameworks that this library knows, and whose an object is."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem.frameworks._jitted import Jitted, of_jax
from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.plain import PLAIN
from jaxmem.ir import jaxprs

_REGISTERED: list[Framework] = []


def register(framework: Framework) -> None:
    """Makes a framework known; one of the same name is replaced.

    Args:
      framework: an instance of a subclass of `Framework`. Those that were registered
        before it are asked before it whose an object is.
    """
    names = [known.name for known in _REGISTERED]
    if framework.name in names:
        _REGISTERED[names.index(framework.name)] = framework
    else:
        _REGISTERED.append(framework)


def unregister(framework: Framework) -> None:
    """Forgets a framework."""
    _REGISTERED.remove(framework)


def in_use() -> list[Framework]:
    """The frameworks whose modules are imported; none is imported to find out."""
    return [f for f in _REGISTERED if f.module is None or f.module in sys.modules]


def owner_of(x: Any) -> Framework | None:
    """The framework that splits an object; None for what is no such object."""
    return next((f for f in in_use() if f.owns(x)), None)


def framework_of(x: Any) -> Framework:
    """The framework of a model, or of a step's first argument; `PLAIN` for the rest."""
    return next((f for f in in_use() if f.trains(x) or f.is_model(x)), PLAIN)


def taking_apart(params: Any) -> Framework | None:
    """The framework that holds optimizer states of such parameters by keys, if any."""
    return next((f for f in in_use() if f.takes_apart(params)), None)


def is_object(x: Any) -> bool:
    """Whether a step may update it in place."""
    return any(f.in_place and f.owns(x) for f in in_use())


def has_objects(tree: Any) -> bool:
    """Whether there are objects in a pytree that a step may update in place."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def has_models(tree: Any) -> bool:
    """Whether there are objects of any framework in a pytree."""
    is_owned = lambda x: owner_of(x) is not None
    return any(map(is_owned, jax.tree.leaves(tree, is_leaf=is_owned)))


def map_arrays(fn: Callable, tree: Any) -> Any:
    """The pytree with copies of its objects, and `fn` of each array."""
    for framework in in_use():
        leaves = jax.tree.leaves(tree, is_leaf=framework.owns)
        if framework.in_place and any(map(framework.owns, leaves)):
            return framework.map_arrays(fn, tree)  # together, for what they share

    def mapped(x: Any) -> Any:
        owner = owner_of(x)
        if owner is not None:
            return owner.map_arrays(fn, x)
        return fn(x) if jaxprs.is_array(x) else x

    return jax.tree.map(mapped, tree, is_leaf=lambda x: owner_of(x) is not None)


def compiler_of(fn: Callable) -> Framework | None:
    """The framework whose own `jit` made a function."""
    return next((f for f in in_use() if f.compiles(fn)), None)


def jitted(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Jitted | None:
    """The options of a jitted step for a call; None if the function is not jitted."""
    # A wrapper of this library has a method `jit_options(*args, **kwargs)`.
    options = getattr(fn, "jit_options", None)
    if options is not None:
        return options(*args, **kwargs)
    framework = compiler_of(fn)
    return of_jax(fn) if framework is None else framework.jit_options(fn)
