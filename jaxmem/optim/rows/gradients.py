"""A gradient, or an update, of a table as rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, Num

from jaxmem._checks import check_array, check_numbers, shown
from jaxmem.ir.unique_rows import in_table, put_rows, take_rows, unique_rows


@jax.tree_util.register_pytree_with_keys_class
class RowGradients:
    """A gradient of a table that is zero outside of a few rows.

    In a tree it replaces the table's gradient or update. `table + self`
    adds the rows in place, so `optax.apply_updates` takes it as it is. As a pytree it
    is its ids and its rows, and goes through `jit`, `scan` and `shard_map`. The ids
    travel as an array of keys, on which no arithmetic works: a transformation that maps
    over leaves, such as `optax.clip`, fails on them, where it would otherwise change
    which rows are meant. Put it inside of `rowwise`.

    Attributes:
      ids: int32 [k], of rows; one may come twice, and those outside of the table, which
        name no row, lie behind its end.
      rows: [k, ...], what is added to them.
      shape: of the table.

    Args:
      ids: integers [k]; negative ones name no row.
      rows: [k, ...], the other axes those of the table.
      shape: of the table.

    Raises:
      TypeError: ids that are no integers, rows that are no numbers.
      ValueError: shapes that do not fit each other.

    Source:
      The IndexedSlices of TensorFlow; the ids as keys are this library's.

    Example::

      table = params["embed"]["table"]
      ids, rows = jnp.array([3, 1]), jnp.ones((2, table.shape[1]))
      gradient = jaxmem.optim.RowGradients(ids, rows, table.shape)
      table = table + gradient
    """

    rows: Num[Array, " k *row"]
    shape: tuple[int, ...]

    def __init__(
        self, ids: Int[Array, " k"], rows: Num[Array, " k *row"], shape: tuple[int, ...]
    ):
        check_array("RowGradients: ids", ids, "integer")
        check_array("RowGradients: rows", rows, "number")
        shape = check_numbers("RowGradients: shape", shape)
        fits = jnp.shape(ids) == jnp.shape(rows)[:1]
        if not shape or not fits or jnp.shape(rows)[1:] != shape[1:]:
            raise ValueError(
                f"RowGradients: ids={shown(ids)}, rows={shown(rows)}, shape={shape}: "
                "one id for each row, and rows as those of the table"
            )
        inside = in_table(jnp.asarray(ids), shape[0])[0].astype(jnp.int32)
        self._set(_marks(inside), jnp.asarray(rows), shape, False)

    def _set(self, marks: Any, rows: Any, shape: tuple[int, ...], unique: bool):
        self._marks, self.rows, self.shape, self._unique = marks, rows, shape, unique

    @classmethod
    def _of(cls, marks: Any, rows: Any, shape: tuple[int, ...], unique: bool):
        made = object.__new__(cls)
        made._set(marks, rows, shape, unique)
        return made

    def tree_flatten_with_keys(self):
        """Ids and rows, with their names in a path of a pytree."""
        keys = jax.tree_util.GetAttrKey("ids"), jax.tree_util.GetAttrKey("rows")
        children = zip(keys, (self._marks, self.rows), strict=True)
        return tuple(children), (self.shape, self._unique)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """Of any leaves: JAX puts placeholders there too."""
        return cls._of(*children, *aux)

    @property
    def ids(self) -> Int32[Array, " k"]:
        """The ids of the rows, int32."""
        words = jax.random.key_data(self._marks)[..., 0]
        return jax.lax.bitcast_convert_type(words, jnp.int32)

    @property
    def dtype(self) -> Any:
        """That of the rows."""
        return self.rows.dtype

    @property
    def is_unique(self) -> bool:
        """Whether each id is known to come once."""
        return self._unique

    def summed(self) -> "RowGradients":
        """The same with each id once, in rising order, and the sum of its rows.

        There are as many slots as before; those that stay empty name no row.
        """
        if self._unique:
            return self
        ids, rows = unique_rows(self.ids, self.rows, self.shape[0])
        return self._of(_marks(ids), rows, self.shape, True)

    def with_rows(self, rows: Num[Array, " k *row"]) -> "RowGradients":
        """Other rows of the same ids."""
        return self._of(self._marks, rows, self.shape, self._unique)

    def todense(self) -> Num[Array, " rows *row"]:
        """An array of the table's shape, zero in all other rows."""
        return (
            jnp.zeros(self.shape, self.rows.dtype)
            .at[self.ids]
            .add(self.rows, mode="drop")
        )

    def all_gather(self, axis_name: str | tuple[str, ...]) -> "RowGradients":
        """The rows of every device of a mesh axis, inside `shard_map`.

        What `jax.lax.psum` is for a dense gradient: the sum of all devices' rows, for a
        table that each of them has. What moves is proportional to the ids. Call
        `shard_map` with `check_vma=False`: else JAX sums the gradient of such a table
        by itself, densely, and `value_and_row_grad` refuses it.

        Args:
          axis_name: the mesh axis, or several.

        Example::

          def sum_over_devices(grads):  # in shard_map over "data"
              return {"table": grads["table"].all_gather("data"),
                      "w": jax.lax.psum(grads["w"], "data")}
        """
        gather = lambda x: jax.lax.all_gather(x, axis_name, tiled=True)
        marks = _marks(gather(self.ids))
        return self._of(marks, gather(self.rows), self.shape, False)

    def __radd__(self, table: Any) -> Any:
        """The table with the rows added, rounded once if it is of a narrower dtype."""
        if getattr(table, "shape", None) != self.shape:
            raise ValueError(
                f"RowGradients: table={shown(table)}: one of the shape {self.shape}"
            )
        table = jnp.asarray(table)
        with jax.numpy_dtype_promotion("standard"):  # as optax adds
            dtype = jnp.promote_types(table.dtype, self.rows.dtype)
        if not self._unique or dtype == table.dtype:
            rows = self.rows.astype(table.dtype)
            return table.at[self.ids].add(
                rows,
                mode="drop",
                unique_indices=self._unique,
                indices_are_sorted=self._unique,
            )
        moved = take_rows(table, self.ids).astype(dtype) + self.rows.astype(dtype)
        return put_rows(table, self.ids, moved.astype(table.dtype))

    __add__ = __radd__
    __array_ufunc__ = None  # NumPy's arrays leave the sum to `__radd__`

    def __repr__(self) -> str:
        return f"RowGradients(rows={shown(self.rows)}, shape={self.shape})"


def _marks(ids: Int32[Array, " k"]):
    words = jax.lax.bitcast_convert_type(ids, jnp.uint32)
    pairs = jnp.stack([words, jnp.zeros_like(words)], axis=-1)
    return jax.random.wrap_key_data(pairs, impl="threefry2x32")


def is_rows(x: Any) -> bool:
    """Whether a node of a tree is a gradient as rows."""
    return isinstance(x, RowGradients)
