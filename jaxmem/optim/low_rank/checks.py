"""The state that an update is given, against the one that `init` makes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from jaxmem._checks import shown


def check_state(name: str, init: Callable[[Any], Any], updates: Any, state: Any):
    """Errors for a state that is not of these arguments and parameters.

    Args:
      name: of the optimizer.
      init: makes the state of parameters; it is not run but traced.
      updates: gradients, which have the parameters' shapes.
      state: what the update was given.

    Raises:
      TypeError: a state of another class.
      ValueError: one of other parameters, or of other arguments.
    """
    wanted = jax.eval_shape(init, updates)
    if type(state) is not type(wanted):
        raise TypeError(
            f"state={shown(state)}: the {type(wanted).__name__} that {name}'s init "
            "makes, in update(updates, state, params)"
        )
    if jax.tree.structure(state) != jax.tree.structure(wanted):
        here, there = (
            {keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
            for tree in (state, wanted)
        )
        odd = sorted(here ^ there) or ["leaves of another class"]
        raise ValueError(
            f"updates={shown(updates)} and state={shown(state)}: not of the structure "
            f"that {name}'s init makes of such parameters, {shown(wanted)}; only one "
            f"of the two has {odd[0]}"
        )
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(wanted), strict=True)
    for (path, x), want in pairs:
        have = (getattr(x, "shape", None), getattr(x, "dtype", None))
        if have != (want.shape, want.dtype):
            raise ValueError(
                f"state{keystr(path)}={shown(x)}: {name}'s init makes "
                f"{shown(want)} there, of these parameters and arguments; a restored "
                "state has to be of the same rank, projection, projector_dtype and "
                "inner transformation"
            )
