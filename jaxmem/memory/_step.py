"""A user's call as a function of a flat list of array leaves.

`jax.export` knows few pytrees, so the step is flattened here: leaves in, leaves out.
The names of the leaves, which of them are donated, and their shardings are read off.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem.frameworks import Call, Form, Place


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array argument of a step; PRNG keys travel as the integers they are."""

    name: str
    spec: jax.ShapeDtypeStruct
    donated: bool
    key_impl: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A call, flattened: `rebuild(leaves)` gives the arguments back."""

    name: str
    leaves: tuple[Leaf, ...]
    treedef: Any
    form: Form

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the pure function with these leaves in them."""
        values = [
            x
            if leaf.key_impl is None
            else jax.random.wrap_key_data(x, impl=leaf.key_impl)
            for x, leaf in zip(leaves, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, values)


def make_step(fn: Callable, call: Call) -> Step:
    """Flattens a call of `fn`."""
    name = step_name(fn)
    titles = _titles(fn, call)
    donated = call.form.donated
    leaves = []
    for path, value in tree_flatten_with_path((call.args, call.kwargs))[0]:
        place = path[1].idx if path[0].idx == 0 else path[1].key
        title = titles[place] + keystr(path[2:]).removesuffix(".")
        leaves.append(_leaf(_spec(value, title, name), title, place in donated))
    treedef = jax.tree.structure((call.args, call.kwargs))
    return Step(name, tuple(leaves), treedef, call.form)


def step_name(fn: Callable) -> str:
    """The function's name, through partials and wrappers; fit for a module's name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name).strip("_")


def describe_sharding(sharding: NamedSharding | None) -> tuple | None:
    """A sharding as plain data, its devices left out."""
    if sharding is None:
        return None
    mesh = sharding.mesh
    spec = tuple(sharding.spec)
    return mesh.axis_sizes, mesh.axis_names, spec, sharding.memory_kind


def _titles(fn: Callable, call: Call) -> dict[Place, str]:
    """The parameters' names; `args[i]` where there is no signature."""
    static = {place for place, _ in call.form.static}
    count = len(call.args) + sum(isinstance(place, int) for place in static)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in positional]
    names = [*names[:count], *(f"args[{i}]" for i in range(len(names), count))]
    names = [name for i, name in enumerate(names) if i not in static]
    return dict(enumerate(names)) | {key: key for key in call.kwargs}


def _leaf(spec: jax.ShapeDtypeStruct, title: str, donated: bool) -> Leaf:
    if not jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return Leaf(title, spec, donated)
    impls = []

    def data_of(key):
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
    data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=spec.sharding)
    return Leaf(title, data, donated, impls[0])


def _spec(value: Any, title: str, step: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and the sharding, if it spreads the array over several devices."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        try:
            value = jax.eval_shape(lambda x: x, value)
        except TypeError as error:
            raise TypeError(
                f"{step}: argument {title} is {value!r}, neither an array nor a "
                "jax.ShapeDtypeStruct; name it in static_argnums (or "
                "static_argnames) if the step does not compute with it"
            ) from error
    if not all(isinstance(d, int) for d in value.shape):
        raise ValueError(
            f"{step}: argument {title} has the symbolic shape {value.shape}, and bytes "
            "take numbers: pass an array of the size that is meant"
        )
    sharding = getattr(value, "sharding", None)
    spread = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    return jax.ShapeDtypeStruct(
        value.shape,
        value.dtype,
        sharding=sharding if spread else None,
        weak_type=getattr(value, "weak_type", False),
    )
