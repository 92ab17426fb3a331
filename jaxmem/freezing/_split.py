"""Trained and frozen parameters, and the gradient with respect to the trained ones.

Nothing here saves memory by itself. JAX keeps for the backward pass only what the
requested gradients need, unless an operation in between keeps more.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem._checks import check_bool, check_callable, shown
from jaxmem._paths import paths_and_leaves
from jaxmem.frameworks import Framework
from jaxmem.freezing._table import TrainedSizes, lines, rich_table, sizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["structure", "graph", "shapes", "framework"],
)
@dataclass(frozen=True)
class Frozen:
    """The frozen parameters, and how to merge them with the trained ones.

    This is a pytree: pass it to a jitted step as an argument. A step that closes over
    it has the frozen parameters as constants in its program.

    Attributes:
      params: a tree like the whole one, with None for each trained array.
        For nnx, the state without the trained Variables.
      structure: that of the trained parameters.
      graph: for nnx, the definition of the model.
      shapes: of the trained arrays when they were split off.
      framework: what merges a model that is no pytree; None for pytrees.
    """

    params: Any
    structure: Any
    graph: Any = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    framework: Framework | None = None

    def merge(self, params: Any) -> Any:
        """The whole parameters, or the nnx model.

        Args:
          params: the trained parameters, of the structure and the shapes that
            `trainable` returned; all arrays may have more or fewer leading axes, as in
            the body of a `vmap` or a `scan` over both trees.

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
        if self.framework is not None:
            return self.framework.combine(params, self.params, self.graph)
        # None where the other tree has its leaf: names and paths stay, optimizers skip
        # a None, and the structure tells which leaf is trained when a step is traced.
        is_gap = lambda x: x is None
        either = lambda trained, frozen: frozen if trained is None else trained
        return jax.tree.map(either, params, self.params, is_leaf=is_gap)


def shapes_of(params: Any) -> tuple[tuple[int, ...], ...]:
    """The shape of each trained array."""
    return tuple(jnp.shape(x) for x in jax.tree.leaves(params))


def _check_shapes(params: Any, wanted: tuple[tuple[int, ...], ...]) -> None:
    """ValueError for other shapes, unless all gain or lose leading axes alike."""
    # A leaf that is no array (a sharding, say) passes.
    arrays = [
        (path, x.shape, want)
        for (path, x), want in zip(paths_and_leaves(params), wanted, strict=True)
        if hasattr(x, "shape") and hasattr(x, "dtype")
    ]
    same_rank = len({len(shape) - len(want) for _, shape, want in arrays}) == 1
    for path, shape, want in arrays:
        common = min(len(shape), len(want))
        same = shape[len(shape) - common :] == want[len(want) - common :]
        if shape != want and not (same and same_rank):
            raise ValueError(
                f"merge: params have {path!r} of shape {shape}, but an array of shape "
                f"{want} was split off there"
            )


def _difference(given: Any, wanted: Any) -> str:
    """The first path that one structure has and the other has not, if there is one."""
    paths, wanted_paths = (
        [path for path, _ in paths_and_leaves(s.unflatten(range(s.num_leaves)))]
        for s in (given, wanted)
    )
    missing = [f"; {p!r} is missing" for p in wanted_paths if p not in paths]
    unknown = [f"; {p!r} is none of them" for p in paths if p not in wanted_paths]
    return "".join(missing[:1] + unknown[:1])


class SplitParameters(NamedTuple):
    """The result of `trainable`; prints as a table of the trained arrays and the bytes.

    Attributes:
      params: the trained parameters: a tree like the whole one, with None for
        each frozen array. For nnx, an `nnx.State` of the trained Variables.
      frozen: the other parameters, whose `merge` gives the whole ones.
    """

    params: Any
    frozen: Frozen

    @property
    def filter(self) -> Callable[..., bool]:
        """For nnx, a filter of the trained Variables: `nnx.Optimizer(..., wrt=)`."""
        framework = self.frozen.framework
        found = None if framework is None else framework.filter_of(self.params)
        if found is None:
            raise TypeError("filter: these are not the parameters of an nnx.Module")
        return found

    @property
    def sizes(self) -> TrainedSizes:
        """How many parameters and bytes are trained, and how many there are."""
        return sizes(self.params, self.frozen.params)

    def __str__(self) -> str:
        return "\n".join(lines(self.sizes))

    def __rich__(self) -> Any:
        return rich_table(self.sizes)


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable:
    """`jax.value_and_grad` with respect to the trained parameters alone.

    Args:
      loss_fn: `(params, *args, **kwargs) -> loss`, of the whole parameters (for nnx, of
        the model).
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      `(params, frozen, *args, **kwargs) -> (loss, gradients)`, or `((loss, aux),
      gradients)`: the results of `trainable` come first. Gradients have the structure
      of the trained parameters. For nnx, the loss function's changes of the model
      (statistics, keys) are lost unless it returns them as aux;
      `nnx.value_and_grad(argnums=nnx.DiffState(0, split.filter))` keeps them.

    Raises:
      TypeError: `loss_fn` is no function or `has_aux` no bool; when called, a second
        argument that is no `Frozen`.

    Example::

      params, frozen = jaxmem.trainable(params, "**/lora_*")
      loss, grads = jaxmem.value_and_grad(loss_fn)(params, frozen, batch)
    """
    check_callable("loss_fn", loss_fn)
    check_bool("has_aux", has_aux)

    def loss_of_trained(params, frozen, *args, **kwargs):
        if not isinstance(frozen, Frozen):
            raise TypeError(
                "value_and_grad: call it as (params, frozen, ...), with both results "
                f"of jaxmem.trainable; the second is a {type(frozen).__name__}"
            )
        return loss_fn(frozen.merge(params), *args, **kwargs)

    return jax.value_and_grad(loss_of_trained, has_aux=has_aux)
