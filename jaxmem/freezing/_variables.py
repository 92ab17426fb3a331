"""The trained variables of a model that is no pytree, by a mask."""

import re
from collections.abc import Sequence
from typing import Any

from jaxmem._paths import check_matched, has_gradient, in_quantized, matches
from jaxmem.frameworks import Framework

Variable = tuple[tuple[Any, ...], Any]  # (path, value)


def chosen_paths(
    framework: Framework, model: Any, mask: Any
) -> frozenset[tuple[Any, ...]]:
    """The paths of the variables of floats that the mask selects."""
    variables = framework.variables(model)
    filters = mask if isinstance(mask, list | tuple) else (mask,)
    quantized = in_quantized("/".join(map(str, path)) for path, _ in variables)
    selected = set()
    for one in filters:
        hits = _matches(framework, one, variables)
        rows = zip(hits, variables, quantized, strict=True)
        wanted = (pair for hit, pair, codes in rows if hit and not codes)
        selected |= {path for path, v in wanted if has_gradient(v)}
    if not selected:
        raise ValueError(
            f"trainable: the mask selects none of {len(variables)} Variables, so there "
            "is nothing to train"
        )
    return frozenset(selected)


def _matches(
    framework: Framework, one: Any, variables: Sequence[Variable]
) -> list[bool]:
    """Path patterns as for any tree; all else is a mask of the framework."""
    if isinstance(one, str | re.Pattern):
        named = [("/".join(map(str, path)), v) for path, v in variables]
        hits = [matches(one, path) for path, _ in named]
        check_matched(one, hits, named)
        return hits
    try:
        wanted = framework.predicate(one)
    except (TypeError, ValueError):  # which of them depends on the framework's version
        raise TypeError(
            f"trainable: mask={one!r}, where path patterns or an {framework.name} "
            "filter are needed"
        ) from None
    return [bool(wanted(path, v)) for path, v in variables]
