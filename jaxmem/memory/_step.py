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

Place = int | str


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
    static: tuple[tuple[Place, Any], ...]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments with these leaves in them."""
        values = [
            x
            if leaf.key_impl is None
            else jax.random.wrap_key_data(x, impl=leaf.key_impl)
            for x, leaf in zip(leaves, self.leaves, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.treedef, values)
        args, kwargs = list(args), dict(kwargs)
        for place, value in self.static:
            if isinstance(place, int):
                args.insert(place, value)
            else:
                kwargs[place] = value
        return args, kwargs


def make_step(
    fn: Callable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate: Place | Sequence[Place] = (),
    static: Place | Sequence[Place] = (),
) -> Step:
    """Flattens a call; `donate` and `static` are positions and keywords."""
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {type(fn).__name__}: {fn!r}")
    name = step_name(fn)
    donated = _places("donate_argnums", donate, len(args), kwargs)
    fixed = _places("static_argnums", static, len(args), kwargs)
    if clash := donated & fixed:
        raise ValueError(f"arguments {sorted(map(str, clash))} are donated and static")
    places = [i for i in range(len(args)) if i not in fixed]
    dynamic = (
        tuple(args[i] for i in places),
        {k: v for k, v in kwargs.items() if k not in fixed},
    )
    titles = _titles(fn, len(args))
    leaves = []
    for path, value in tree_flatten_with_path(dynamic)[0]:
        place = places[path[1].idx] if path[0].idx == 0 else path[1].key
        title = titles[place] if isinstance(place, int) else place
        title += keystr(path[2:])
        leaves.append(_leaf(_spec(value, title, name), title, place in donated))
    kept_apart = [(i, args[i]) for i in range(len(args)) if i in fixed]
    kept_apart += [(k, v) for k, v in kwargs.items() if k in fixed]
    treedef = jax.tree.structure(dynamic)
    return Step(name, tuple(leaves), treedef, tuple(kept_apart))


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


def _places(
    what: str, places: Place | Sequence[Place], count: int, kwargs: dict[str, Any]
) -> frozenset[Place]:
    """Positions counted from the front; each must be an argument of the call."""
    places = (places,) if isinstance(places, int | str) else tuple(places)
    for place in places:
        known = place in kwargs if isinstance(place, str) else -count <= place < count
        if not known:
            raise ValueError(
                f"{what}={place!r}: the call has {count} positional arguments and "
                f"the keywords {sorted(kwargs)}"
            )
    return frozenset(p % count if isinstance(p, int) else p for p in places)


def _titles(fn: Callable, count: int) -> list[str]:
    """The parameters' names; `args[i]` where there is no signature."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in positional]
    return [*names[:count], *(f"args[{i}]" for i in range(len(names), count))]


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
    sharding = getattr(value, "sharding", None)
    spread = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    return jax.ShapeDtypeStruct(
        value.shape,
        value.dtype,
        sharding=sharding if spread else None,
        weak_type=getattr(value, "weak_type", False),
    )
