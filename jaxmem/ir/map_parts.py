"""A `shard_map` taken apart into one for each of its operations, and put together.

A pass that decides for each operation whether it is done a second time sees a
`shard_map` as one operation. In parts, each result is handed from one to the next as
JAX hands a residual from the forward to the backward pass: the devices' arrays side by
side along axis 0, sharded over the axes of the mesh along which they differ.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.body_parts import Run
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.joined import JoinedGroup, OnlyOnce, Reads, read_elsewhere
from jaxmem.ir.map_operations import is_of_number, mapped_axes, operations_of
from jaxmem.ir.part_marks import is_part
from jaxmem.ir.types import ClosedJaxpr, Jaxpr, JaxprEqn, Var

NAME = "shard_map"


def can_be_taken_apart(eqn: JaxprEqn) -> bool:
    """Whether a `shard_map` holds operations that can be done apart from each other."""
    inside = operations_of(eqn)
    several = len(inside) > 1 or any(
        jaxprs.bodies(e) and not is_part(e) for e in inside
    )
    return several and not _compat.has_side_effects(eqn)


def taken_apart(eqn: JaxprEqn, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """What a `shard_map` gives, of one for each of its operations.

    `closed`: its body, or one that does the same.
    """
    body, constants = jaxprs.split(closed)
    if constants:  # of the trace of the map: elsewhere they have no meaning
        return _compat.bind(eqn, args)
    return _Parts(eqn, body, args).run()


class _Parts:
    """One body on its way through its operations.

    `known` has each variable's array, with the specification under which it is read.
    """

    def __init__(self, eqn: JaxprEqn, body: Jaxpr, args: Sequence[Any]) -> None:
        self.eqn, self.body = eqn, body
        self.read = {v for e in body.eqns for v in e.invars if is_var(v)}
        specs = map(normal_spec, eqn.params["in_specs"])
        pairs = zip(body.invars, args, specs, strict=True)
        self.known = {v: (x, spec) for v, x, spec in pairs}
        self.outs: list[Any] = [None] * len(body.outvars)
        self.specs = [*map(normal_spec, eqn.params["out_specs"])]

    def run(self) -> list[Any]:
        for inner in self.body.eqns:
            self.do(
                lambda xs, e=inner: _compat.bind(e, xs), inner.invars, inner.outvars
            )
        for k, v in enumerate(self.body.outvars):
            if self.outs[k] is None:  # an operand, or a number
                (self.outs[k],) = self.mapped(list, [v], [self.specs[k]], [v])
        return self.outs

    def do(self, run: Run, invars: Sequence[Any], outvars: Sequence[Any]) -> None:
        """One operation, with what it gives under each specification that is asked."""
        wanted: list[tuple[Any, PartitionSpec, int | None]] = [
            (v, lifted(self.eqn, v), None) for v in outvars if v in self.read
        ]
        for k, v in enumerate(self.body.outvars):
            if is_var(v) and v in outvars:
                wanted.append((v, self.specs[k], k))
        if not wanted:
            return
        # one may be read inside and returned, or returned twice, in one specification
        different = list(dict.fromkeys((v, spec) for v, spec, _ in wanted))
        position = {v: k for k, v in enumerate(outvars)}

        def each(xs: list) -> list:
            made = run(xs)
            return [made[position[v]] for v, _ in different]

        specs = [spec for _, spec in different]
        arrays = self.mapped(each, invars, specs, [v for v, _ in different])
        found = dict(zip(different, arrays, strict=True))
        for v, spec, k in wanted:
            if k is None:
                self.known[v] = found[v, spec], spec
            else:
                self.outs[k] = found[v, spec]

    def mapped(
        self,
        run: Run,
        invars: Sequence[Any],
        out_specs: Sequence[Any],
        outvars: Sequence[Any],
    ) -> list[Any]:
        """`run` of values in a `shard_map` like that of the equation."""
        given = list(dict.fromkeys(filter(is_var, invars)))
        known = [self.known[v] for v in given]

        def body(*shards: Any) -> tuple[Any, ...]:
            pairs = zip(given, shards, strict=True)
            own = {v: as_rank(x, v.aval.ndim) for v, x in pairs}
            outs = run([own[v] if is_var(v) else v.val for v in invars])
            # a number of each device is sharded as an array of one element
            ranks = (
                max(v.aval.ndim, len(s))
                for v, s in zip(outvars, out_specs, strict=True)
            )
            return tuple(map(as_rank, outs, ranks))

        one = like_map(self.eqn, body, [spec for _, spec in known], out_specs)
        return list(_compat.in_context_of(self.eqn, one, *(x for x, _ in known)))


def lifted(eqn: JaxprEqn, v: Var) -> PartitionSpec:
    """How a `shard_map` hands on a variable: over all axes that it differs along."""
    names = mapped_axes(eqn)
    if eqn.params["check_vma"]:
        names &= v.aval.manual_axis_type.varying
    order = tuple(n for n in eqn.params["mesh"].axis_names if n in names)
    return normal_spec((order,))


def as_rank(x: Any, rank: int) -> Any:
    """A number as an array of one element, or the reverse; any other array as it is."""
    return x if jnp.ndim(x) == rank else jnp.reshape(x, (1,) * rank)


def normal_spec(spec: Iterable[Any]) -> PartitionSpec:
    """A specification in one way of writing it."""
    # `P("x", None)` means what `P("x")` does, and is not equal to it
    parts = [p[0] if isinstance(p, tuple) and len(p) == 1 else p for p in spec]
    parts = [None if p == () else p for p in parts]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


# -- put together


class Maps:
    """`shard_map`s over the same axes of a mesh."""

    def key(self, eqn: JaxprEqn) -> Any:
        if eqn.primitive.name != NAME or _compat.has_side_effects(eqn):
            return None
        return eqn.params["mesh"], mapped_axes(eqn), eqn.params["check_vma"]

    def reads(self, eqn: JaxprEqn) -> Reads:
        return zip(eqn.invars, map(normal_spec, eqn.params["in_specs"]), strict=True)

    def makes(self, eqn: JaxprEqn) -> Reads:
        return zip(eqn.outvars, map(normal_spec, eqn.params["out_specs"]), strict=True)

    def is_part(self, eqn: JaxprEqn) -> bool:
        return len(operations_of(eqn)) < 2

    def belongs(self, group: JoinedGroup, i: int) -> bool:
        return True

    def pays(self, graph: JaxprGraph, group: Sequence[int]) -> bool:
        return any(self.is_part(graph.eqns[i]) for i in group)

    def joined(
        self, values: Values, group: Sequence[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, outputs) of a group's equations, done in one `shard_map`."""
        eqns = [values.graph.eqns[i] for i in group]
        given = _given(eqns)
        wanted = _wanted(values.graph, group)

        def body(*shards: Any) -> tuple[Any, ...]:
            env: dict[Any, Any] = dict(zip(given, shards, strict=True))
            once = _OnlyOnce()
            for eqn in eqns:
                inner = jaxprs.bodies(eqn)[0]
                specs = map(normal_spec, eqn.params["in_specs"])
                pairs = zip(eqn.invars, specs, inner.invars, strict=True)
                ins = [
                    _compat.typed_as(_read(env, v, spec), w.aval)
                    for v, spec, w in pairs
                ]
                outs = jaxprs.evaluate(inner, ins, once)
                env.update(
                    ((v, None), x) for v, x in zip(eqn.outvars, outs, strict=True)
                )
            return tuple(env[v, None] for v in wanted)

        one = like_map(eqns[0], body, [spec for _, spec in given], [*wanted.values()])
        arrays = [values.read(v) for v, _ in given]
        outs = _compat.in_context_of(eqns[-1], one, *arrays)
        known = dict(zip(wanted, outs, strict=True))
        for i, eqn in zip(group, eqns, strict=True):
            yield i, [known.get(v) for v in eqn.outvars]


MAPS = Maps()


class _OnlyOnce(OnlyOnce):
    """Here a number that was made an array of one element to be handed on is itself.

    So a predicate is one value for all `cond`s that read it.
    """

    def __init__(self) -> None:
        super().__init__()
        # by the id of what was made of it; that is kept, so that the id stays its own
        self._source: dict[int, tuple[Any, Any]] = {}

    def __call__(self, eqn: JaxprEqn, args: list) -> list[Any]:
        if not is_of_number(eqn) or not is_var(eqn.invars[0]):
            return super().__call__(eqn, args)
        (x,) = args
        if id(x) in self._source:
            return [self._source[id(x)][1]]
        (made,) = super().__call__(eqn, args)
        self._source[id(made)] = made, x
        return [made]


def _given(eqns: Iterable[Any]) -> list[tuple[Any, PartitionSpec]]:
    """(variable, specification) of what `shard_map`s read and do not make."""
    made: set[Any] = set()
    found: dict[tuple[Any, PartitionSpec], None] = {}
    for eqn in eqns:
        pairs = ((v, s) for v, s in MAPS.reads(eqn) if is_var(v) and v not in made)
        found |= dict.fromkeys(pairs)
        made.update(eqn.outvars)
    return list(found)


def _wanted(graph: JaxprGraph, group: Sequence[int]) -> dict[Any, PartitionSpec]:
    """What others read of the results of `shard_map`s."""
    specs = {v: spec for i in group for v, spec in MAPS.makes(graph.eqns[i])}
    return {v: specs[v] for v in read_elsewhere(graph, group)}


def _read(env: Mapping[Any, Any], v: Any, spec: PartitionSpec) -> Any:
    if not is_var(v):
        return v.val
    return env[v, None] if (v, None) in env else env[v, spec]


def like_map(
    eqn: JaxprEqn, body: Callable, in_specs: Sequence, out_specs: Sequence
) -> Callable:
    """A `shard_map` over the mesh and the axes of that of `eqn`."""
    return jax.shard_map(
        body,
        mesh=eqn.params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=mapped_axes(eqn),
        check_vma=eqn.params["check_vma"],
    )
