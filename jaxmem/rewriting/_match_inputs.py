"""What an input, a scalar or a number of a formula stands for in the target."""

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from jaxmem.rewriting._flat_graph import FlatValue
from jaxmem.rewriting._fold import Number
from jaxmem.rewriting._partial_match import (
    Bound,
    PartialMatch,
    Positions,
    TracedFormula,
)
from jaxmem.rewriting._views import Indices, Labels, View, look_through


class InputMatcher:
    """Binds the leaves of one formula."""

    def __init__(self, formula: TracedFormula, loose: bool):
        self.formula = formula
        # Ignores numbers, sizes and the direction of axes. It finds the sizes at which
        # the pattern is then traced anew, for the strict match.
        self.loose = loose
        self.inputs = formula.inputs
        self.holes = frozenset(formula.holes.values())
        self.indices = Indices()
        self.bottoms: dict[tuple[FlatValue, Labels], View] = {}
        self.conflicts = 0  # where an input stood for two different values

    def _bottom(self, value: FlatValue, labels: Labels) -> View:
        key = value, labels
        if key not in self.bottoms:
            seen = list(self._looked_through(value, labels))
            nodes = tuple(node for _, _, node in seen if node is not None)
            last, its_labels, _ = seen[-1]
            self.bottoms[key] = View(last, its_labels, nodes)
        return self.bottoms[key]

    def _looked_through(self, value: FlatValue, labels: Labels) -> Iterator[tuple]:
        """What a value is a view of, down to the first leaf of the formula."""
        for seen in look_through(value, labels, self.indices):
            yield seen
            if seen[0] in self.inputs or seen[0] in self.holes:
                return

    def _number(
        self, p, number, found: Number | None, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        if found is None:
            return
        if p in self.holes:
            yield from self._fill(p, found, st)
        elif self.loose or found.agrees(number):
            yield st

    def _fill(
        self, hole: FlatValue, found: Number, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        before = st.holes.get(hole)
        if before is None:
            yield replace(st, holes=st.holes | {hole: found})
        elif self.loose or before.agrees(found):
            # The one whose dtypes rounded it less is the one that was meant.
            best = min(before, found, key=lambda n: n.error)
            yield replace(st, holes=st.holes | {hole: best})

    def _bind(
        self, p, lp: Labels, parts: list, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        """`p` stands for all the `parts`: values, their labels and signs."""
        first, *more = (self._bound(p, lp, *part) for part in parts)
        if first is None or None in more:
            return
        bound = replace(first, further=tuple(more))
        sizes = self._named_sizes(p, lp, st)
        if sizes is None:
            return
        st = replace(st, sizes=sizes)
        before = st.inputs.get(p)
        if before is None:
            yield replace(st, inputs=st.inputs | {p: bound})
        elif before.key == bound.key:
            merged = bound if more else before.merged(bound)
            yield replace(st, inputs=st.inputs | {p: merged})
        else:
            self.conflicts += 1

    def _bound(self, p, lp: Labels, t, lt: Labels, sign: float) -> Bound | None:
        choices = []
        for value, labels, _ in look_through(t, lt, self.indices):
            if _kind(value.dtype) != _kind(p.dtype):
                break
            positions = self._positions(p, lp, value, labels)
            if positions is not None:
                choices.append((value, positions))
        if not choices:
            return None
        base, positions = choices[-1]
        return Bound(base, positions, tuple(choices), int(sign))

    def _positions(self, p, lp: Labels, t, lt: Labels) -> Positions | None:
        positions = []
        for n, label in zip(t.shape, lt, strict=True):
            if label is None:
                positions.append(None)
            elif label in lp:
                positions.append(lp.index(label))
                if not self.loose and p.shape[positions[-1]] != n:
                    return None
            elif self.loose:
                positions.append(None)
            else:
                return None
        return tuple(positions)

    def _named_sizes(self, p, lp: Labels, st: PartialMatch) -> dict[str, int] | None:
        sizes = dict(st.sizes)
        for name, label in zip(self.inputs[p], lp, strict=True):
            if label is None:
                continue
            if (
                sizes.setdefault(name, self.indices.sizes[label])
                != (self.indices.sizes[label])
            ):
                return None
        return sizes


def _kind(dtype) -> str:
    kinds = {"float": jnp.inexact, "int": jnp.integer, "bool": jnp.bool_}
    for name, kind in kinds.items():
        if jnp.issubdtype(dtype, kind):
            return name
    return str(dtype)
