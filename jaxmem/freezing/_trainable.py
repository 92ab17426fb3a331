"""`trainable`: trained and frozen parameters, by a mask."""

from typing import Any

import jax

from jaxmem._checks import shown
from jaxmem._paths import (
    has_gradient,
    in_quantized,
    paths_and_leaves,
    wanted_leaves,
)
from jaxmem.frameworks import Framework, framework_of
from jaxmem.freezing._split import Frozen, SplitParameters, shapes_of
from jaxmem.freezing._variables import chosen_paths

_ALLOWED = "path patterns, a function (path, leaf) -> bool, or a tree of bools"


def trainable(params: Any, mask: Any) -> SplitParameters:
    """Splits parameters into trained and frozen ones.

    Pass the trained ones to the optimizer and to `jaxmem.value_and_grad`: then
    gradients and moments exist for them alone, and the forward pass keeps nothing that
    only the gradients of the others would need. (`optax.masked` leaves zero gradients
    for all the others; `optax.set_to_zero` moments too.)

    Args:
      params: any pytree of arrays or `jax.ShapeDtypeStruct`s, such as a linen model's
        parameters; or an `nnx.Module`.
      mask: which arrays are trained, in one of these forms.

        - A pattern of paths: `"head"`, `"layers/*/attention"`, `"**/lora_*"`. A path
          is the names that lead to an array, joined by slashes. `*`, `?` and `[...]`
          stand for characters of one name, `**` for any number of names. A pattern
          selects a branch: all arrays on it are trained. A compiled regular expression
          is searched for in the path instead.
        - A function `(path, leaf) -> bool`.
        - A list of these, which selects all that any of them selects.
        - A tree of bools, of the structure of params or a prefix of it, as for
          `optax.masked`.
        - For nnx: patterns, or any nnx filter (`nnx.LoRAParam`, a function of nnx's
          path and Variable, ...), or a list of these.

        Only floating arrays are trained, never keys, counters or quantized weights: of
        qwix's `QArray` neither codes (`qvalue`) nor `scale` and `zero_point`.

    Returns:
      `SplitParameters`, `(params, frozen)`: both are pytrees. As text it is a table of
      the bytes that are saved, and of those of a quantized base.

    Raises:
      ValueError: nothing is selected; a pattern that matches nothing (the error names
        the nearest paths); a tree of bools of another structure.
      TypeError: a mask that is none of the above.

    Example::

      params, frozen = jaxmem.trainable(params, ["**/lora_*", "head"])
      opt_state = tx.init(params)

      @functools.partial(jax.jit, donate_argnums=(0, 1))
      def step(params, opt_state, frozen, batch):
          loss, grads = jaxmem.value_and_grad(loss_fn)(params, frozen, batch)
          updates, opt_state = tx.update(grads, opt_state, params)
          return optax.apply_updates(params, updates), opt_state, loss

      whole = frozen.merge(params)
    """
    framework = framework_of(params)
    if not framework.is_pytree:
        paths = chosen_paths(framework, params, mask)
        trained, rest, graph = framework.select(params, lambda path, _: path in paths)
        return SplitParameters(trained, _frozen(rest, trained, graph, framework))
    is_trained = _selected(params, mask)
    leaves, structure = jax.tree.flatten(params)
    trained, rest = (
        structure.unflatten(
            [x if y is want else None for x, y in zip(leaves, is_trained, strict=True)]
        )
        for want in (True, False)
    )
    return SplitParameters(trained, _frozen(rest, trained))


def _selected(params: Any, mask: Any) -> list[bool]:
    """For each leaf whether it is trained; ValueError if none is."""
    named = paths_and_leaves(params)
    if not any(has_gradient(leaf) for _, leaf in named):
        raise ValueError(f"trainable: params={shown(params)} hold no array of floats")
    wanted = wanted_leaves("trainable: mask", mask, params, _ALLOWED)
    quantized = in_quantized(path for path, _ in named)
    picked = [
        w and has_gradient(x) and not codes
        for w, (_, x), codes in zip(wanted, named, quantized, strict=True)
    ]
    if not any(picked):
        raise ValueError(
            f"trainable: the mask selects none of {len(named)} arrays, so there is "
            "nothing to train"
        )
    return picked


def _frozen(
    rest: Any, trained: Any, graph: Any = None, framework: Framework | None = None
) -> Frozen:
    structure = jax.tree.structure(trained)
    return Frozen(rest, structure, graph, shapes_of(trained), framework)
