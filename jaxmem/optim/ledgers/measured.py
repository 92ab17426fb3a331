"""What training keeps for each parameter, in bytes, before anything is allocated."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxmem._checks import check_dtype, check_int, wrong_type, wrong_value
from jaxmem._paths import has_gradient, path_of, selected, selectors
from jaxmem.frameworks import framework_of
from jaxmem.optim._abstract_state import abstract_state
from jaxmem.optim._placed_as import placed_as
from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.accumulation.states import accumulates
from jaxmem.optim.ledgers.ledger import Ledger
from jaxmem.optim.ledgers.row import PARTS, LedgerRow

_RELEASED = "patterns of paths, or functions of (path, leaf)"


def ledger(
    params: PyTree,
    tx: Any,
    *,
    micro_batches: int = 1,
    released: Any = None,
    gradient_dtype: DTypeLike | None = None,
    accumulator_dtype: DTypeLike | None = None,
) -> Ledger:
    """Bytes that a training step keeps besides activations, in total and per parameter.

    Nothing is allocated or compiled: the optimizer's `init` is traced. `estimate` has
    what a compiled step takes, temporaries included.

    Args:
      params: the trained parameters: arrays, or the `jax.ShapeDtypeStruct`s of
        `jax.eval_shape`, or an nnx module. With shardings, bytes are those of one
        device; state that belongs to a parameter is then counted as sharded like it,
        in the axes that divide.
      tx: the optax transformation.
      micro_batches: of a mini-batch. With more than one, and a `tx` that does not
        accumulate gradients in its own state, `microbatch` sums them.
      released: the stacked parameters, [layers, ...], whose updates `schedule` moves
        into the backward scan, as patterns of paths such as ``"layers/**"``: their
        gradients are live one layer at a time. By default all gradients are live at
        once.
      gradient_dtype: of the gradients; the parameters' by default.
      accumulator_dtype: as for `microbatch`: at least float32 by default.

    Returns:
      A `Ledger`.

    Raises:
      TypeError, ValueError: `tx` is no optax transformation, or another argument is
        not as above; a pattern matches no parameter.

    Example::

      params = jax.eval_shape(model.init, key, tokens)["params"]
      print(jaxmem.ledger(params, jaxmem.optim.adam(1e-3, bits=8)))
    """
    micro_batches = check_int("micro_batches", micro_batches, 1)
    for name, dtype in (
        ("gradient_dtype", gradient_dtype),
        ("accumulator_dtype", accumulator_dtype),
    ):
        if dtype is not None:
            check_dtype(name, dtype)
    named = _parameters(params)
    tree = _tree_of(params)
    state = abstract_state(tx, tree)
    rows = [_row("weights", "parameters", [_sized(x) for _, x in named])]
    gradients = [_sized(x, gradient_dtype) for _, x in named]
    for i in _released(released, named):
        layers = named[i][1].shape[0]
        gradients[i] = gradients[i].shared(layers)
    what = "one layer at a time" if released is not None else "all at once"
    rows.append(_row("gradients", what, gradients))
    if micro_batches > 1 and not accumulates(state):
        sums = [_sized(x, accumulator_dtype or accumulation_dtype(x)) for _, x in named]
        rows.append(_row("accumulator", f"of {micro_batches} micro-batches", sums))
    rows += _state_rows(state, named)
    count = sum(int(np.prod(x.shape, dtype=np.int64)) for _, x in named)
    return Ledger(count, tuple(sorted(rows, key=lambda row: PARTS.index(row.part))))


@dataclass(frozen=True)
class _Size:
    bytes: int
    dtype: str
    on_host: bool = False

    def shared(self, n: int) -> "_Size":
        return _Size(self.bytes // n, self.dtype, self.on_host)


def _tree_of(params: PyTree) -> PyTree:
    return framework_of(params).parameters(params)


def _parameters(params: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree.leaves_with_path(_tree_of(params))
    named = [(path_of(keys), x) for keys, x in leaves if has_gradient(x)]
    if not named:
        raise wrong_type("params", params, "a tree of floating-point arrays or shapes")
    return named


def _released(given: Any, named: list[tuple[str, Any]]) -> list[int]:
    """The positions of the parameters whose gradients exist a layer at a time."""
    if given is None:
        return []
    chosen = selectors(given)
    if chosen is None:
        raise wrong_type("released", given, _RELEASED)
    places = [i for i, one in enumerate(selected("released", named, chosen)) if one]
    for path, leaf in (named[i] for i in places):
        if not leaf.shape:
            allowed = "stacked parameters, [layers, ...]"
            raise wrong_value("released", given, f"{allowed}; {path} is a scalar")
    return places


def _sized(x, dtype=None, sharding: Sharding | None = None) -> _Size:
    """The bytes of one device's part of an array."""
    dtype = jax.numpy.dtype(dtype or x.dtype)
    sharding = sharding or getattr(x, "sharding", None)
    placed = isinstance(sharding, Sharding)
    shape = sharding.shard_shape(x.shape) if placed else x.shape
    of_state = getattr(x, "sharding", None)  # its sharding may be a parameter's
    kinds = (getattr(s, "memory_kind", None) for s in (sharding, of_state))
    host = "pinned_host" in kinds
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return _Size(size, dtype.name, host)


def _row(part: str, name: str, sizes: list[_Size]) -> LedgerRow:
    dtypes = Counter()
    for size in sizes:
        dtypes[size.dtype] += size.bytes
    return LedgerRow(
        part,
        name,
        tuple(dtype for dtype, _ in dtypes.most_common()),
        sum(size.bytes for size in sizes if not size.on_host),
        sum(size.bytes for size in sizes if size.on_host),
    )


def _state_rows(state: Any, named: list[tuple[str, Any]]) -> list[LedgerRow]:
    """One row for each field of a state's class; counters have none."""
    found: dict[tuple[str, str], list[_Size]] = {}
    for part, name, keys, leaf in _fields(state, "moments", "", ()):
        if leaf.shape:
            size = _sized(leaf, sharding=placed_as(path_of(keys), leaf, named))
            found.setdefault((part, name), []).append(size)
    return [_row(part, name, sizes) for (part, name), sizes in found.items()]


def _fields(node: Any, part: str, name: str, keys: tuple) -> Iterator[tuple]:
    """(part, class and field, keys, leaf) of each array of a state."""
    # an inner state's class says more than the outer one's
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        for field in getattr(node, "_fields"):  # noqa: B009
            title = f"{type(node).__name__}.{field}"
            part = getattr(type(node), "ledger_parts", {}).get(field, "moments")
            key = jax.tree_util.GetAttrKey(field)
            yield from _fields(getattr(node, field), part, title, (*keys, key))
        return
    leaves = jax.tree.flatten_with_path(node, is_leaf=lambda x: _is_inside(x, node))[0]
    for path, leaf in leaves:
        if hasattr(leaf, "shape") and not isinstance(leaf, tuple):
            yield part, name, (*keys, *path), leaf
        elif leaf is not node:
            yield from _fields(leaf, part, name, (*keys, *path))


def _is_inside(x: Any, node: Any) -> bool:
    return x is not node and isinstance(x, tuple) and hasattr(x, "_fields")
