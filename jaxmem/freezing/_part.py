"""The two parts of a tree of parameters, and the gradient by one of them.

Both parts are pytrees of the user's own structure, with None where the other part has
its leaf: names and paths stay, optimizers skip a None, and either part can be an
argument of a jitted step, donated or not, or a carry of a scan. What a leaf belongs to
is structure, and so known when a step is traced.

Nothing here saves memory by itself. JAX keeps for the backward pass what the gradients
that were asked for need, and no more, if no operation in between does otherwise.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem._checks import check_bool, check_callable, shown
from jaxmem._paths import paths_and_leaves
from jaxmem.freezing import _nnx
from jaxmem.freezing._table import Sizes, lines, rich_table, sizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["structure", "graph", "shapes"],
)
@dataclass(frozen=True)
class Frozen:
    """The frozen parameters, which know how to take the trained ones in again.

    A pytree: hand it to a jitted step as an argument. A step that closes over it has
    the frozen parameters as constants in its program.

    Attributes:
      params: a tree like the whole one, with None in the place of what is trained.
        For nnx, the state without what is trained.
      structure: that of the trained part.
      graph: for nnx, the definition of the model.
      shapes: of the arrays of the trained part, as they were split off.
    """

    params: Any
    structure: Any
    graph: Any = None
    shapes: tuple[tuple[int, ...], ...] | None = None

    def merge(self, params: Any) -> Any:
        """The whole parameters, or the nnx model.

        Args:
          params: the trained part, of the structure and the shapes that `trainable`
            gave it; all arrays may have more or fewer leading axes, as in the body of
            a `vmap` or a `scan` over both parts.

        Returns:
          A tree of the structure that was split; for nnx a new model.

        Raises:
          ValueError: a tree of another structure, or with arrays of other shapes.
        """
        structure = jax.tree.structure(params)
        if structure != self.structure:
            raise ValueError(
                f"merge: params={shown(params)} are not the trained parameters that "
                "were split off" + _difference(structure, self.structure)
            )
        if self.shapes is not None:
            _check_shapes(params, self.shapes)
        if self.graph is not None:
            return _nnx.merge(self.graph, params, self.params)
        is_gap = lambda x: x is None
        return jax.tree.map(_either, params, self.params, is_leaf=is_gap)


def shapes_of(params: Any) -> tuple[tuple[int, ...], ...]:
    """The shape of each array of the trained part."""
    return tuple(jnp.shape(x) for x in jax.tree.leaves(params))


def _check_shapes(params: Any, wanted: tuple[tuple[int, ...], ...]) -> None:
    """ValueError for other shapes, but for leading axes that all have or lack alike.

    What is no array (a tree of shardings, say) passes.
    """
    arrays = [
        (path, x.shape, want)
        for (path, x), want in zip(paths_and_leaves(params), wanted, strict=True)
        if hasattr(x, "shape") and hasattr(x, "dtype")
    ]
    alike = len({len(shape) - len(want) for _, shape, want in arrays}) == 1
    for path, shape, want in arrays:
        common = min(len(shape), len(want))
        same = shape[len(shape) - common :] == want[len(want) - common :]
        if shape != want and not (same and alike):
            raise ValueError(
                f"merge: params have {path!r} of shape {shape}, but an array of shape "
                f"{want} was split off there"
            )


def _difference(given: Any, wanted: Any) -> str:
    """The first path that one structure has and the other has not, if there is one."""
    has, needs = (
        [path for path, _ in paths_and_leaves(s.unflatten(range(s.num_leaves)))]
        for s in (given, wanted)
    )
    lacking = [f"; {path!r} is missing" for path in needs if path not in has]
    beyond = [f"; {path!r} is none of them" for path in has if path not in needs]
    return "".join(lacking[:1] + beyond[:1])


def _either(trained: Any, frozen: Any) -> Any:
    return frozen if trained is None else trained


class Part(NamedTuple):
    """What `trainable` returns; prints as a table of what is trained, and saved.

    Attributes:
      params: what is trained: a tree like the whole one, with None in the place of
        what is frozen. For nnx, an `nnx.State` of what is trained alone.
      frozen: the rest, a `Frozen`, whose `merge` takes the trained part in again.
    """

    params: Any
    frozen: Frozen

    @property
    def filter(self) -> Callable[..., bool]:
        """For nnx, what is trained as an nnx filter: `nnx.Optimizer(..., wrt=)`."""
        if self.frozen.graph is None:
            raise TypeError("filter: these are no parts of an nnx.Module")
        return _nnx.Paths(_nnx.paths_of(self.params))

    @property
    def sizes(self) -> Sizes:
        """How many parameters and bytes are trained, and how many there are."""
        return sizes(self.params, self.frozen.params)

    def __str__(self) -> str:
        return "\n".join(lines(self.sizes))

    def __rich__(self) -> Any:
        return rich_table(self.sizes)


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable:
    """`jax.value_and_grad` by the trained part alone.

    Args:
      loss_fn: `(params, *args, **kwargs) -> loss`, of the whole parameters (for nnx, of
        the model).
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      `(params, frozen, *args, **kwargs) -> (loss, gradients)`, or `((loss, aux),
      gradients)`: the two parts first, as `trainable` returns them. Gradients are of
      the structure of the trained part. For nnx, what the loss does to the model that
      it is given (statistics, keys) is lost unless it is returned as aux;
      `nnx.value_and_grad(argnums=nnx.DiffState(0, part.filter))` keeps it.

    Raises:
      TypeError: `loss_fn` is no function or `has_aux` no bool; when called, a second
        argument that is not the frozen part.

    Example::

      params, frozen = jaxmem.trainable(params, "**/lora_*")
      loss, grads = jaxmem.value_and_grad(loss_fn)(params, frozen, batch)
    """
    check_callable("loss_fn", loss_fn)
    check_bool("has_aux", has_aux)

    def loss_of_part(params, frozen, *args, **kwargs):
        if not isinstance(frozen, Frozen):
            raise TypeError(
                "value_and_grad: call it as (params, frozen, ...), with both parts "
                f"from jaxmem.trainable; the second is a {type(frozen).__name__}"
            )
        return loss_fn(frozen.merge(params), *args, **kwargs)

    return jax.value_and_grad(loss_of_part, has_aux=has_aux)
