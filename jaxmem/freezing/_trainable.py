"""`trainable`: parameters in two parts, by a mask."""

from typing import Any

import jax

from jaxmem.freezing import _nnx
from jaxmem.freezing._mask import chosen
from jaxmem.freezing._part import Frozen, Part, shapes_of


def trainable(params: Any, mask: Any) -> Part:
    """Parameters in two parts: what is trained, and what is frozen.

    Give the first to the optimizer and to `jaxmem.value_and_grad`: then gradients and
    moments exist for it alone, and nothing is kept in the forward pass that only the
    gradients of the rest would need. (`optax.masked` leaves gradients of zero for all
    the rest; `optax.set_to_zero` moments too.)

    Args:
      params: any pytree of arrays or `jax.ShapeDtypeStruct`s, such as a linen model's
        parameters; or an `nnx.Module`.
      mask: what is trained, in one of these forms.

        - A pattern of paths: `"head"`, `"layers/*/attention"`, `"**/lora_*"`. A path
          is what leads to an array, joined by slashes. `*`, `?` and `[...]` stand for
          characters of one name, `**` for any number of names. A pattern names a
          branch: all that is on it is trained. Or a compiled regular expression, which
          is searched for in the path.
        - A function `(path, leaf) -> bool`.
        - A list of these: what any of them selects.
        - A tree of bools, of the structure of params or a prefix of it, as for
          `optax.masked`.
        - For nnx: patterns, or any nnx filter (`nnx.LoRAParam`, a function of nnx's
          path and Variable, ...), or a list of these.

        Arrays that are not of floats (keys, counters, quantized weights) are never
        trained.

    Returns:
      A `Part`: `(params, frozen)`, both pytrees, with the bytes that are saved as its
      text.

    Raises:
      ValueError: nothing is selected; a pattern that matches nothing (the nearest paths
        are named); a tree of bools of another structure.
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
    if _nnx.is_module(params):
        trained, rest, graph = _nnx.split(params, mask)
        return Part(trained, _frozen(rest, trained, graph))
    picked = chosen(params, mask)
    leaves, structure = jax.tree.flatten(params)
    trained, rest = (
        structure.unflatten(
            [
                leaf if one is ours else None
                for leaf, one in zip(leaves, picked, strict=True)
            ]
        )
        for ours in (True, False)
    )
    return Part(trained, _frozen(rest, trained))


def _frozen(rest: Any, trained: Any, graph: Any = None) -> Frozen:
    return Frozen(rest, jax.tree.structure(trained), graph, shapes_of(trained))
