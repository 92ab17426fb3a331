"""What the backward pass of a function keeps, by tracing it alone.

Nothing is compiled: these are the values JAX carries from the forward to the backward
pass. A compiler may fuse some of them away or keep others longer; `estimate` tells what
it made of them.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem import _compat
from jaxmem._checks import check_callable, check_numbers
from jaxmem._jaxpr import bodies, split
from jaxmem.memory._bytes import format_bytes
from jaxmem.memory._compile import explained
from jaxmem.memory._formula import formula_of
from jaxmem.memory._module_path import parse_op_name
from jaxmem.memory._step import step_name

_SHOWN = 40


@dataclass(frozen=True)
class Residual:
    """A value kept for the backward pass.

    Attributes:
      bytes: of the whole array.
      shape: its shape; in a scan with the steps in front.
      dtype: its dtype.
      operation: the primitive that made it, `name 'x'` for a `checkpoint_name`, the
        argument's name, or "constant".
      source: file, line and function where that operation was written; may be empty.
      kind: "argument", "constant" or "intermediate".
      formula: the chain of operations that makes it, as `x * sigmoid(1.702 * x)`.
      path: the name scopes (modules) it is made in.
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
class Residuals:
    """What `jaxmem.residuals` found; prints as a table.

    Attributes:
      entries: the values kept, each once, the largest first.
    """

    entries: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes kept beyond the arguments, which are there anyway."""
        return sum(e.bytes for e in self.entries if e.kind != "argument")

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the backward pass reads."""
        return sum(e.bytes for e in self.entries if e.kind == "argument")

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self):
        return iter(self.entries)

    def __str__(self) -> str:
        rows = [_cells(e) for e in self.entries[:_SHOWN]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self._headline(), *lines, *self._left_out()])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("bytes", "array", "kind", "operation", "source")
        table.title = self._headline()
        for entry in self.entries[:_SHOWN]:
            # rich would take a shape's brackets for markup
            table.add_row(*(cell.replace("[", r"\[") for cell in _cells(entry)))
        table.caption = "".join(self._left_out()) or None
        return table

    def _headline(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)} kept for the backward pass, and "
            f"{format_bytes(self.argument_bytes)} of the arguments"
        )

    def _left_out(self) -> list[str]:
        left = self.entries[_SHOWN:]
        size = format_bytes(sum(e.bytes for e in left))
        return [f"... {len(left)} smaller ones, {size}"] if left else []


def _cells(entry: Residual) -> tuple[str, ...]:
    array = f"{entry.dtype}[{','.join(map(str, entry.shape))}]"
    size = format_bytes(entry.bytes)
    return size, array, entry.kind, entry.operation, entry.source


def residuals(
    fn: Callable, *args: Any, argnums: int | Sequence[int] | None = None, **kwargs: Any
) -> Residuals:
    """Lists what the backward pass of a function keeps.

    Args:
      fn: a differentiable function, jitted or not; a loss or any part of a model.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees; what is no array (a
        string, a function, a bool) is passed on as it is.
      argnums: the positional arguments to differentiate; all by default. The others are
        frozen: what only their gradients need is not kept.
      **kwargs: keyword arguments, not differentiated.

    Returns:
      `Residuals`, one entry for each value; a value used twice is there once.

    Raises:
      ValueError: `argnums` that are no positions, nothing to differentiate, arguments
        that do not fit.
      TypeError: a function that cannot be traced.
    """
    name = step_name(check_callable("fn", fn))
    leaves, treedef, chosen = _arguments(name, args, kwargs, argnums)
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    split_at = [i for i in arrays if i in chosen]

    def backward(*values):
        full = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            full[i] = value

        def of_chosen(*picked):
            changed = list(full)
            for i, value in zip(split_at, picked, strict=True):
                changed[i] = value
            args, kwargs = jax.tree.unflatten(treedef, changed)
            return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(x)]

        return jax.vjp(of_chosen, *(full[i] for i in split_at))[1]

    with explained(name):
        closed = jax.make_jaxpr(backward)(*(leaves[i] for i in arrays))
    names = _names(fn, args, kwargs)
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
    chosen = {
        i for i, place in enumerate(owner) if place in wanted and _inexact(leaves[i])
    }
    if not chosen:
        raise ValueError(
            f"{name}: no floating-point array among the arguments to differentiate "
            f"(argnums={argnums!r})"
        )
    return leaves, treedef, chosen


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _names(fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf: the parameter's, then the path inside it."""
    try:
        titles = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        titles = []
    names = []
    for path, _ in tree_flatten_with_path((args, kwargs))[0]:
        if path[0].idx == 1:
            names.append(path[1].key + keystr(path[2:]))
        else:
            i = path[1].idx
            title = titles[i] if i < len(titles) else f"args[{i}]"
            names.append(title + keystr(path[2:]))
    return names


def _read(closed: Any, names: list[str]) -> Residuals:
    """The outputs of the traced forward pass are what it keeps."""
    jaxpr, _ = split(closed)
    arguments = dict(zip(jaxpr.invars, names, strict=True))
    entries = []
    for var in dict.fromkeys(v for v in jaxpr.outvars if not hasattr(v, "val")):
        var, eqn = _origin(jaxpr, var)
        if var in arguments:
            entries.append((var, _entry(var, arguments[var], "", "argument")))
        elif eqn is None:
            entries.append((var, _entry(var, "constant", "", "constant")))
        else:
            operation, source = _describe(eqn, var)
            entry = _entry(var, operation, source, "intermediate")
            path, line = _place(eqn, var)
            entry = replace(entry, formula=formula_of(jaxpr, var), path=path, line=line)
            entries.append((var, entry))
    unique = dict(entries).values()
    return Residuals(tuple(sorted(unique, key=lambda e: -e.bytes)))


def _origin(jaxpr: Any, var: Any) -> tuple[Any, Any]:
    """The value itself, seen through what JAX puts round a saved value."""
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while var in made_by:
        eqn = made_by[var]
        if eqn.primitive.name != "reduce_precision" or hasattr(eqn.invars[0], "val"):
            return var, eqn
        if eqn.invars[0].aval.dtype != var.aval.dtype:
            return var, eqn
        var = eqn.invars[0]
    return var, None


def _describe(eqn: Any, var: Any) -> tuple[str, str]:
    """The innermost operation that makes an output, and its source line."""
    place = eqn.outvars.index(var)
    for body in bodies(eqn):
        inner, _ = split(body)
        if len(inner.outvars) != len(eqn.outvars):
            continue
        out = inner.outvars[place]
        for candidate in inner.eqns:
            if not hasattr(out, "val") and out in candidate.outvars:
                operation, source = _describe(candidate, out)
                # jax's own code inside, such as jnp.where, has no line of the user's
                return operation, source or _compat.source_line(eqn)
    return _operation(eqn), _compat.source_line(eqn)


def _place(eqn: Any, var: Any, stack: str = "", line: str = "") -> tuple[str, str]:
    """The name scopes of the innermost operation, and the user's line for it."""
    stack = "/".join(part for part in (stack, _compat.name_stack(eqn)) if part)
    line = _compat.caller_line(eqn, *_compat.INSTALLED) or line
    place = eqn.outvars.index(var)
    for body in bodies(eqn):
        inner, _ = split(body)
        if len(inner.outvars) == len(eqn.outvars):
            out = inner.outvars[place]
            for candidate in inner.eqns:
                if not hasattr(out, "val") and out in candidate.outvars:
                    return _place(candidate, out, stack, line)
    return parse_op_name(f"{stack}/{eqn.primitive.name}").module_path, line


def _operation(eqn: Any) -> str:
    name = eqn.primitive.name
    if name == "name":
        return f"name {eqn.params['name']!r}"
    if name == "scan":
        return "input of a scan step"
    label = eqn.params.get("name")
    return f"{name} {label}" if isinstance(label, str) else name


def _entry(var: Any, operation: str, source: str, kind: str) -> Residual:
    aval = var.aval
    shape = tuple(aval.shape)
    size = math.prod(shape) * aval.dtype.itemsize
    return Residual(size, shape, str(aval.dtype), operation, source, kind)
