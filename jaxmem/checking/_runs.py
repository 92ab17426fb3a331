"""Running a step on copies, as its user calls it, and reading what it gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem.frameworks import (
    has_objects,
    jitted,
    map_arrays,
    named_leaves,
    pure_call,
)
from jaxmem.ir import jaxprs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Results = dict[str, np.ndarray]  # by name, on the host
Transform = Callable[..., tuple[list[Any], dict]]


@dataclass
class Ran:
    """A call that is done.

    Attributes:
      args: the arguments, whose objects are updated.
      kwargs: the keyword arguments, likewise.
      out: what the step returned.
      seen: what a transform has seen besides.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    seen: dict[str, Any] = field(default_factory=dict)


@dataclass
class Runner:
    """A step that is called as its user calls it; jitted if it is not so already.

    Attributes:
      fn: the step.
      static: places of its arguments that are Python values.
      transform: (closed jaxpr, leaves, seed) -> (results, what is seen besides), of
        the step's jaxpr, in place of the step itself.
    """

    fn: Callable
    static: Sequence[int | str] = ()
    transform: Transform | None = None
    _jitted: dict[Any, Callable] = field(default_factory=dict, repr=False)

    def memory(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What XLA says of the memory of the step's program, jitted or not."""
        with pure_call(self.fn, args, dict(kwargs), (), self.static) as call:
            lowered = self._jit(call).lower(np.uint32(0), *call.args, **call.kwargs)
            return lowered.compile().memory_analysis()

    def __call__(self, args: tuple, kwargs: Mapping[str, Any], seed: Any = 0) -> Ran:
        kwargs = dict(kwargs)
        if self.transform is None and jitted(self.fn, args, kwargs) is not None:
            return Ran(args, kwargs, self.fn(*args, **kwargs))
        with pure_call(self.fn, args, kwargs, (), self.static) as call:
            out, seen = self._jit(call)(np.uint32(seed), *call.args, **call.kwargs)
            return Ran(args, kwargs, call.finish(out), seen)

    def _jit(self, call) -> Any:
        if call.signature not in self._jitted:
            self._jitted[call.signature] = jax.jit(self._flat(call))
        return self._jitted[call.signature]

    def _flat(self, call) -> Callable:
        step = call.form.pure(self.fn)

        def run(seed, *args, **kwargs):
            if self.transform is None:
                return step(*args, **kwargs), {}
            traced = jaxprs.trace(step, *args, **kwargs)
            outs, seen = self.transform(traced.jaxpr, traced.leaves, seed)
            return jax.tree.unflatten(traced.out_tree, outs), seen

        return run


def copied(tree: Any) -> Any:
    """The pytree with copies of its arrays and objects."""
    return map_arrays(_copy, tree)


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, jax.Array) else x


def results_of(step: Callable, ran: Ran) -> Results:
    """The arrays that a step has returned, and those of the objects it updates."""
    found = dict(arrays_of(ran.out, "result"))
    args, kwargs = ran.args, ran.kwargs
    if not has_objects((args, kwargs)):
        return found
    kept = tuple(x if has_objects(x) else None for x in args)
    named = {k: x for k, x in kwargs.items() if has_objects(x)}
    with pure_call(_nothing, kept, named, ()) as call:
        leaves = list(named_leaves(step, call.args, call.kwargs))
        return {name: on_host(x) for _, name, x in leaves if jaxprs.is_array(x)} | found


def _nothing(*args, **kwargs) -> None:
    del args, kwargs


def arrays_of(tree: Any, title: str) -> list[tuple[str, np.ndarray]]:
    """(name, value) of every array and number in a pytree."""
    with pure_call(_nothing, (tree,), {}, ()) as call:
        leaves, _ = tree_flatten_with_path(call.args[0])
    named = ((title + keystr(path).removesuffix("."), x) for path, x in leaves)
    return [(name, on_host(x)) for name, x in named if jaxprs.is_value(x)]


def on_host(x: Any) -> np.ndarray:
    """The elements of an array; the bits of a random key."""
    if jaxprs.is_array(x) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    # a copy: what lies on the host may be the step's own memory, and donated next
    return np.array(x)
