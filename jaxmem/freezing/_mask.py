"""What the user gives as a mask, as one bool for each leaf."""

from typing import Any

from jaxmem._checks import shown
from jaxmem._paths import (
    has_gradient,
    paths_and_leaves,
    selected,
    selectors,
    spread_bools,
)

ALLOWED = "path patterns, a function (path, leaf) -> bool, or a tree of bools"


def chosen(params: Any, mask: Any) -> list[bool]:
    """For each leaf whether it is trained; ValueError where none is."""
    named = paths_and_leaves(params)
    if not any(has_gradient(leaf) for _, leaf in named):
        raise ValueError(f"trainable: params={shown(params)} hold no array of floats")
    given = selectors(mask)
    if given is None:
        wanted = spread_bools("trainable: mask", params, mask, ALLOWED)
    else:
        wanted = selected("trainable: mask", named, given)
    picked = [w and has_gradient(x) for w, (_, x) in zip(wanted, named, strict=True)]
    if not any(picked):
        raise ValueError(
            f"trainable: the mask selects none of {len(named)} arrays, so there is "
            "nothing to train"
        )
    return picked
