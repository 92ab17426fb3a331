"""nnx models, split into states by a filter. Flax is imported only for such a model."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem._paths import check_matched, has_gradient, in_quantized, matches


@dataclass(frozen=True)
class Paths:
    """An nnx filter: the Variables at these paths."""

    paths: frozenset[tuple[Any, ...]]

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        return tuple(path) in self.paths


def is_module(params: Any) -> bool:
    """Whether this is an nnx model; Flax is not imported to find out."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(params, nnx.Module)


def split(model: Any, mask: Any) -> tuple[Any, Any, Any]:
    """(trained, frozen, graph), the first two states of arrays."""
    from flax import nnx

    wanted = Paths(_chosen(model, mask))
    graph, trained, frozen = nnx.split(model, wanted, ...)
    return *nnx.as_pure((trained, frozen)), graph


def merge(graph: Any, trained: Any, frozen: Any) -> Any:
    from flax import nnx

    return nnx.merge(graph, trained, frozen)


def paths_of(state: Any) -> frozenset[tuple[Any, ...]]:
    from flax import nnx

    return frozenset(path for path, _ in nnx.to_flat_state(state))


def _chosen(model: Any, mask: Any) -> frozenset[tuple[Any, ...]]:
    """The paths of the Variables of floats that the mask selects."""
    from flax import nnx

    variables = list(nnx.to_flat_state(nnx.state(model)))
    filters = mask if isinstance(mask, list | tuple) else (mask,)
    quantized = in_quantized("/".join(map(str, path)) for path, _ in variables)
    selected = set()
    for one in filters:
        rows = zip(_matches(one, variables), variables, quantized, strict=True)
        wanted = (pair for hit, pair, codes in rows if hit and not codes)
        selected |= {path for path, v in wanted if has_gradient(v)}
    if not selected:
        raise ValueError(
            f"trainable: the mask selects none of {len(variables)} Variables, so there "
            "is nothing to train"
        )
    return frozenset(selected)


def _matches(one: Any, variables: list) -> list[bool]:
    """Path patterns as for any tree; all else is an nnx filter."""
    from flax import nnx

    if isinstance(one, str | re.Pattern):
        named = [("/".join(map(str, path)), v) for path, v in variables]
        hits = [matches(one, path) for path, _ in named]
        check_matched(one, hits, named)
        return hits
    try:
        wanted: Callable = nnx.filterlib.to_predicate(one)
    except (TypeError, ValueError):  # which of them depends on Flax's version
        raise TypeError(
            f"trainable: mask={one!r}, where path patterns or an nnx filter are needed"
        ) from None
    return [bool(wanted(path, v)) for path, v in variables]
