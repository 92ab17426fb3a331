"""What the backward pass of a function keeps, by tracing the function.

Nothing is compiled: a compiler may fuse some residuals away or keep others for longer.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem._bytes import format_bytes
from jaxmem._checks import array_text, check_callable, check_numbers, wrong_type
from jaxmem._module_path import merge_numbered, of_user, parse_op_name
from jaxmem.frameworks import module_scopes
from jaxmem.ir.jaxprs import bodies, exchanged, is_array, is_var, split
from jaxmem.memory._formula import formula_of
from jaxmem.memory.compile.call import named_leaves, step_name
from jaxmem.memory.compile.lower import explained
from jaxmem.memory.report.compare import ComparedRow, ReportComparison, compared
from jaxmem.pages import PlainResult, aligned, rich_table

_SHOWN = 40
_ON_A_PAGE = 1000
_HEAD = ("bytes", "array", "kind", "operation", "module", "source")


@dataclass(frozen=True)
class Residual:
    """A value kept for the backward pass.

    Attributes:
      bytes: of the whole array.
      shape: its shape; of a scan, with the axis of iterations in front.
      dtype: its dtype.
      operation: the primitive that computes it, `name 'x'` for a `checkpoint_name`, the
        argument's name, or "constant".
      source: file, line and function where that operation was written; may be empty.
      kind: "argument", "constant" or "intermediate".
      formula: the operations that compute it, as `x * sigmoid(1.702 * x)`.
      path: the name scopes (modules) in which it is computed.
      line: the innermost line outside of installed libraries that led to it; may be
        empty.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    source: str
    kind: str
    formula: str = ""
    path: str = ""
    line: str = ""


@dataclass(frozen=True)
class Residuals(PlainResult):
    """What `jaxmem.residuals` returns; prints as a table.

    Attributes:
      entries: the kept values, each once, the largest first.
    """

    entries: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes kept beside the arguments, which are in memory anyway."""
        return sum(e.bytes for e in self.entries if e.kind != "argument")

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the backward pass reads."""
        return sum(e.bytes for e in self.entries if e.kind == "argument")

    def compare(self, other: "Residuals") -> ReportComparison:
        """These residuals as `before` and others as `after`, side by side.

        Args:
          other: the residuals of the changed function.

        Returns:
          A `ReportComparison`: bytes in all, by module and by operation, with the
          differences.

        Raises:
          TypeError: `other` is no `Residuals`.
        """
        if not isinstance(other, Residuals):
            raise wrong_type("other", other, "what jaxmem.residuals returns")
        both = self, other
        kept = [[e for e in r if e.kind != "argument"] for r in both]
        modules = merge_numbered(of_user(e.path) for entries in kept for e in entries)
        by_module = [_sums(e, lambda e: modules[of_user(e.path)]) for e in kept]
        by_operation = [_sums(entries, lambda e: e.operation) for entries in kept]
        totals = (
            ComparedRow(
                "kept for the backward pass", self.total_bytes, other.total_bytes
            ),
            ComparedRow(
                "arguments it reads", self.argument_bytes, other.argument_bytes
            ),
        )
        return ReportComparison(
            self._headline(),
            other._headline(),
            {
                "totals": totals,
                "kept, by module": compared(*by_module),
                "kept, by operation": compared(*by_operation),
            },
        )

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self):
        return iter(self.entries)

    def __str__(self) -> str:
        _, rows = self._table(_SHOWN)
        return "\n".join([self._headline(), *aligned(rows), *self._left_out()])

    def __rich__(self) -> Any:
        return rich_table(*self._table(_SHOWN), self._headline(), self._left_out())

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        table = page.table(*self._table(_ON_A_PAGE), numbers=[0])
        return self._headline(), None, table, *self._left_out(_ON_A_PAGE)

    def _headline(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)} kept for the backward pass, and "
            f"{format_bytes(self.argument_bytes)} of the arguments"
        )

    def _table(self, shown: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """(head, rows); modules are a column where there are any."""
        rows = [group.cells() for group in _grouped(self.entries)[:shown]]
        named = any(row[-2] for row in rows)
        keep = lambda row: row if named else (*row[:-2], row[-1])
        return keep(_HEAD), [keep(row) for row in rows]

    def _left_out(self, shown: int = _SHOWN) -> list[str]:
        left = _grouped(self.entries)[shown:]
        size = format_bytes(sum(g.bytes for g in left))
        return [f"... {len(left)} smaller values, {size}"] if left else []


def _sums(entries: Iterable[Residual], name: Callable[[Residual], str]) -> Counter[str]:
    """Bytes by name; "(no module)" stands for an empty one."""
    sums: Counter[str] = Counter()
    for entry in entries:
        sums[name(entry) or "(no module)"] += entry.bytes
    return sums


@dataclass(frozen=True)
class _Equal:
    """Values that differ in nothing but the number of their layer."""

    first: Residual
    module: str
    bytes: int
    count: int

    def cells(self) -> tuple[str, ...]:
        times = f"{self.count} x " if self.count > 1 else ""
        e = self.first
        array = times + array_text(e)
        size = format_bytes(self.bytes)
        return size, array, e.kind, e.operation, self.module, e.source


def _grouped(entries: Iterable[Residual]) -> list[_Equal]:
    """The rows of a table: values of equal layers together, the largest first."""
    entries = list(entries)
    modules = merge_numbered(of_user(e.path) for e in entries)
    rows: dict[tuple, _Equal] = {}
    for e in entries:
        module = modules[of_user(e.path)]
        layers = () if "*" in module else (len(rows),)  # else each has its own row
        key = (e.shape, e.dtype, e.kind, e.operation, module, e.source, *layers)
        row = rows.get(key, _Equal(e, module, 0, 0))
        rows[key] = replace(row, bytes=row.bytes + e.bytes, count=row.count + 1)
    return sorted(rows.values(), key=lambda row: -row.bytes)


def residuals(
    fn: Callable, *args: Any, argnums: int | Sequence[int] | None = None, **kwargs: Any
) -> Residuals:
    """Lists the residuals of a function: what it saves for the backward pass.

    Args:
      fn: a differentiable function, jitted or not; a loss or any part of a model.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees; what is no array (a
        string, a function, a bool) is passed on as it is.
      argnums: the positional arguments to differentiate; all by default. The others are
        frozen: values that only their gradients need are not saved.
      **kwargs: keyword arguments, not differentiated.

    Returns:
      `Residuals`, one entry for each value; a value used twice is listed once.

    Raises:
      ValueError: `argnums` that are no positions, nothing to differentiate, arguments
        that do not fit.
      TypeError: a function that cannot be traced.

    Example::

      print(jaxmem.residuals(loss_fn, params, batch))
    """
    name = step_name(check_callable("fn", fn))
    leaves, treedef, chosen = _arguments(name, args, kwargs, argnums)
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    differentiated = [i for i in arrays if i in chosen]

    def backward(*values):
        full = exchanged(leaves, arrays, values)

        def of_chosen(*picked):
            changed = exchanged(full, differentiated, picked)
            args, kwargs = jax.tree.unflatten(treedef, changed)
            return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if is_array(x)]

        return jax.vjp(of_chosen, *(full[i] for i in differentiated))[1]

    with explained(name), module_scopes():
        closed = jax.make_jaxpr(backward)(*(leaves[i] for i in arrays))
    names = [name for _, name, _ in named_leaves(fn, args, kwargs)]
    return _read(closed, [names[i] for i in arrays])


def _arguments(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int] | None,
) -> tuple[list[Any], Any, set[int]]:
    """Leaves, their tree, and which leaves are differentiated."""
    numbers = range(len(args))
    if argnums is not None:
        numbers = check_numbers("argnums", argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"argnums={argnums!r}: {name} was given {len(args)} positional "
                "arguments"
            )
    wanted = {number % len(args) for number in numbers}
    leaves, treedef = jax.tree.flatten((args, kwargs))
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    inexact = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    # `owner` is shorter than `leaves`, whose last ones are of keyword arguments.
    chosen = {i for i, k in enumerate(owner) if k in wanted and inexact(leaves[i])}
    if not chosen:
        raise ValueError(
            f"{name}: no floating-point array among the arguments to differentiate "
            f"(argnums={argnums!r})"
        )
    return leaves, treedef, chosen


def _read(closed: Any, names: list[str]) -> Residuals:
    """The outputs of the traced forward pass are what it keeps."""
    jaxpr, _ = split(closed)
    arguments = dict(zip(jaxpr.invars, names, strict=True))
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    entries = {}
    for var in filter(is_var, jaxpr.outvars):
        var, eqn = _without_precision(makers, var)
        if var in entries:
            continue
        if var in arguments:
            entries[var] = _entry(var, arguments[var], "argument")
        elif eqn is None:
            entries[var] = _entry(var, "constant", "constant")
        else:
            nest = _innermost(eqn, var)
            source, path, line = _place(nest)
            entries[var] = replace(
                _entry(var, _operation(nest[-1]), "intermediate"),
                source=source,
                formula=formula_of(jaxpr, var),
                path=path,
                line=line,
            )
    return Residuals(tuple(sorted(entries.values(), key=lambda e: -e.bytes)))


def _without_precision(makers: dict[Any, Any], var: Any) -> tuple[Any, Any]:
    """(value, equation) below the `reduce_precision` that JAX puts around residuals."""
    while (eqn := makers.get(var)) is not None:
        if eqn.primitive.name != "reduce_precision" or not is_var(eqn.invars[0]):
            return var, eqn
        if eqn.invars[0].aval.dtype != var.aval.dtype:
            return var, eqn
        var = eqn.invars[0]
    return var, None


def _innermost(eqn: Any, var: Any) -> list[Any]:
    """The equation of an output and, inside calls and loops, those that compute it."""
    place = eqn.outvars.index(var)
    for body in bodies(eqn):
        inner, _ = split(body)
        if len(inner.outvars) == len(eqn.outvars):
            out = inner.outvars[place]
            for candidate in inner.eqns:
                if is_var(out) and out in candidate.outvars:
                    return [eqn, *_innermost(candidate, out)]
    return [eqn]


def _place(nest: Sequence[Any]) -> tuple[str, str, str]:
    """(source line, name scopes, the user's line) of the innermost equation."""
    # jax's own code, such as that of `jnp.where`, has no line of the user's: then the
    # line of the call of it is taken.
    sources = [line for eqn in nest if (line := _compat.source_line(eqn))]
    lines = [_compat.caller_line(eqn, *_compat.INSTALLED) for eqn in nest]
    scopes = [scope for eqn in nest if (scope := _compat.name_stack(eqn))]
    path = parse_op_name("/".join([*scopes, nest[-1].primitive.name])).module_path
    return next(reversed(sources), ""), path, next(filter(None, reversed(lines)), "")


def _operation(eqn: Any) -> str:
    name = eqn.primitive.name
    if name == "name":
        return f"name {eqn.params['name']!r}"
    if name == "scan":
        return "input of a scan step"
    label = eqn.params.get("name")
    return f"{name} {label}" if isinstance(label, str) else name


def _entry(var: Any, operation: str, kind: str) -> Residual:
    aval = var.aval
    shape = tuple(aval.shape)
    size = math.prod(shape) * aval.dtype.itemsize
    return Residual(size, shape, str(aval.dtype), operation, "", kind)
