"""Is this value that formula? A formula is matched backwards from its output.

Products and sums are matched up to order and grouping, with their constants multiplied
(added) up and powers, quotients, square roots and negation as exponents and signs, so
that `x / sqrt(v)` is `x * rsqrt(v)` and `0.5 * x * (1 + t)` is `x * (0.5 * (1 + t))`.
Casts and views are looked through (`_views`). Everything else must be the same
operation on operands that match. Each way to match is a `PartialMatch`; they are
generated one by one.

A `loose` match ignores numbers, sizes and the direction of axes. It finds the sizes at
which the pattern is then traced anew, for the strict match.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from jaxmem.rewriting._algebra import (
    Decomposed,
    Opener,
    factors_of,
    is_product,
    is_sum,
    terms_of,
    without_numbers,
)
from jaxmem.rewriting._flat_graph import FlatValue, Node
from jaxmem.rewriting._fold import Number, folded, plus, power, times
from jaxmem.rewriting._partial_match import Bound, PartialMatch, TracedFormula
from jaxmem.rewriting._views import (
    Indices,
    Labels,
    View,
    dot_operands,
    elementwise,
    inserted,
    look_through,
)

ELEMENTWISE = frozenset(
    ["abs", "and", "atan2", "bitcast_convert_type", "cbrt", "ceil", "clamp", "cos"]
    + ["cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor"]
    + ["ge", "gt", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt"]
    + ["max", "min", "ne", "nextafter", "not", "or", "pow", "rem", "round", "select_n"]
    + ["shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"]
    + ["sinh", "stop_gradient", "tan", "tanh", "xor"]
)
COMMUTES = frozenset(["and", "eq", "max", "min", "ne", "or", "xor"])
REDUCES = frozenset(["argmax", "argmin", "reduce_max", "reduce_min", "reduce_sum"])
# About how a result is computed, not about what is computed.
IGNORED = frozenset(
    ["accuracy", "out_sharding", "sharding", "precision", "preferred_element_type"]
    + ["new_dtype", "weak_type", "dtype", "inplace"]
)


class Matcher:
    """One formula against one target.

    `conflicts` counts where an input of the formula stood for two different values.
    """

    def __init__(self, formula: TracedFormula, loose: bool, sizes: dict[str, int]):
        self.formula, self.loose, self.sizes = formula, loose, sizes
        self.inputs = formula.inputs
        self.holes = frozenset(formula.holes.values())
        self.indices = Indices()
        self.opener = Opener(self._bottom, frozenset(self.inputs), self.holes)
        self.steps = self.conflicts = 0

    def run(self, target: FlatValue) -> Iterator[PartialMatch]:
        """Every way in which `target` is the formula."""
        labels = self.indices.root(target.shape)
        start = PartialMatch({}, {}, frozenset(), dict(self.sizes))
        p_labels = elementwise(self.formula.out, labels)
        t_labels = elementwise(target, labels)
        yield from self.match(self.formula.out, p_labels, target, t_labels, start)

    def match(
        self, p, lp: Labels, t, lt: Labels, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        """Extends `st` so that target `t` (labels `lt`) is pattern `p`."""
        self.steps += 1
        # A formula of many like operands matches itself in factorially many ways.
        if self.steps > 20_000:
            return
        p_seen = self._bottom(p, lp)
        p, lp = p_seen.value, p_seen.labels
        number = folded(p)
        if number is not None or p in self.holes:
            yield from self._number(p, number, folded(t), st)
        elif p in self.inputs:
            yield from self._bind(p, lp, [(t, lt, 1)], st)
        elif is_product(p):
            yield from self._product(p, lp, [(t, lt, 1.0)], 1.0, st)
        elif is_sum(p):
            yield from self._sum(p, lp, t, lt, st)
        elif p.node is not None:
            seen = self._bottom(t, lt)
            yield from self._same_operation(p.node, lp, seen, st)

    def _bottom(self, value: FlatValue, labels: Labels) -> View:
        seen = None
        for seen in look_through(value, labels, self.indices):
            if seen.value in self.inputs or seen.value in self.holes:
                break
        assert seen is not None
        return seen

    # -- leaves

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
        for seen in look_through(t, lt, self.indices):
            if _kind(seen.value.dtype) != _kind(p.dtype):
                break
            positions = self._positions(p, lp, seen)
            if positions is not None:
                choices.append((seen.value, positions))
        if not choices:
            return None
        base, positions = choices[-1]
        return Bound(base, positions, tuple(choices), int(sign))

    def _positions(self, p, lp: Labels, seen: View) -> tuple[int | None, ...] | None:
        positions = []
        for n, label in zip(seen.value.shape, seen.labels, strict=True):
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

    # -- products

    def _product(
        self, p, lp, items, const: float, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        goal = self.opener.product(p, lp)
        yield from self._factors(goal.items, items, Number(const, 0.0), st, goal)

    def _factors(
        self, factors, items, const, st, goal: Decomposed
    ) -> Iterator[PartialMatch]:
        """Matches `factors` with `items`, opening products among these as needed."""
        items, const = without_numbers(items, const, exponents=True)
        if not factors and not items:
            yield from self._settle_product(const, goal, st)
        if not factors or len(items) > sum(math.ceil(abs(e)) for _, _, e in factors):
            return
        (p, lp, e), rest = factors[0], factors[1:]
        for i, (t, lt, g) in enumerate(items):
            if g != e and not (g * e > 0 and abs(g) < abs(e)):
                continue
            left = rest if g == e else ((p, lp, e - g), *rest)
            others = [*items[:i], *items[i + 1 :]]
            for found in self._factor(p, lp, t, lt, st):
                yield from self._factors(left, others, const, found, goal)
        for i, (t, lt, g) in enumerate(items):
            seen = self._bottom(t, lt)
            opened = factors_of(seen.value, seen.labels, g)
            if opened is not None:
                new = [*items[:i], *opened[0], *items[i + 1 :]]
                signed = Number(const.value * opened[1], const.error)
                covered = st.cover((*seen.through, seen.value.node))
                yield from self._factors(factors, new, signed, covered, goal)

    def _factor(self, p, lp, t, lt, st) -> Iterator[PartialMatch]:
        if is_sum(p) and p not in self.inputs:
            yield from self._sum(p, lp, t, lt, st)
        else:
            yield from self.match(p, lp, t, lt, st)

    def _settle_product(
        self, const: Number, goal: Decomposed, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        """The numbers left over must agree, or are what the one hole stands for."""
        want, unknown = goal.number, []
        for hole, _, e in goal.holes:
            if hole in st.holes:
                want = times(want, power(st.holes[hole], e))
            else:
                unknown.append((hole, e))
        if self.loose or (not unknown and const.agrees(want)):
            yield st
        elif len(unknown) == 1 and const.value * want.value > 0:
            (hole, e), *_ = unknown
            value = (const.value / want.value) ** (1 / e)
            yield from self._fill(hole, Number(value, const.error + want.error), st)

    # -- sums

    def _sum(
        self, p, lp: Labels, t, lt: Labels, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        goal = self.opener.sum(p, lp)
        start = [(t, lt, 1.0)]
        yield from self._terms(goal.items, start, Number(0.0, 0.0), st, goal)

    def _terms(
        self, terms, items, const, st, goal: Decomposed
    ) -> Iterator[PartialMatch]:
        """Matches `terms` with `items`, opening sums among these as needed."""
        items, const = without_numbers(items, const, exponents=False)
        if not terms and not items:
            yield from self._settle_sum(const, goal, st)
        gathers = any(p in self.formula.gathers for p, _, _ in terms)
        if not terms or (len(items) > len(terms) and not gathers):
            return
        (p, lp, sign), rest = terms[0], terms[1:]
        if p in self.formula.gathers and items:
            parts = [(t, lt, g * sign) for t, lt, g in items]
            for found in self._bind(p, lp, parts, st):
                yield from self._terms(rest, [], const, found, goal)
            return
        for i, (t, lt, g) in enumerate(items):
            others = [*items[:i], *items[i + 1 :]]
            for found in self._product(p, lp, [(t, lt, 1.0)], g * sign, st):
                yield from self._terms(rest, others, const, found, goal)
        for i, (t, lt, g) in enumerate(items):
            seen = self._bottom(t, lt)
            opened = terms_of(seen.value, seen.labels, g)
            if opened is not None:
                new = [*items[:i], *opened, *items[i + 1 :]]
                covered = st.cover((*seen.through, seen.value.node))
                yield from self._terms(terms, new, const, covered, goal)

    def _settle_sum(
        self, const: Number, goal: Decomposed, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        want, unknown = goal.number, []
        for hole, _, sign in goal.holes:
            if hole in st.holes:
                known = st.holes[hole]
                want = plus(want, Number(sign * known.value, known.error))
            else:
                unknown.append((hole, sign))
        if self.loose or (not unknown and const.agrees(want)):
            yield st
        elif len(unknown) == 1:
            (hole, sign), *_ = unknown
            value = plus(const, Number(-want.value, want.error))
            yield from self._fill(hole, Number(sign * value.value, value.error), st)

    # -- other operations

    def _same_operation(
        self, p: Node, lp, seen: View, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        t = seen.value.node
        if p.name == "stop_gradient" and (t is None or t.name != p.name):
            # A softmax does not depend on its shift, whose gradient is often not cut.
            operand = p.ins[0]
            if head(operand) == "reduce_max":
                st = st.cover(seen.through)
                yield from self.match(operand, lp, seen.value, seen.labels, st)
            return
        if t is None or t.name != p.name or len(t.outs) != 1 or t.bodies or p.bodies:
            return
        if len(t.ins) != len(p.ins) or t.rule != p.rule:
            return
        st = st.cover((*seen.through, t))
        if self._is_masking(p, lp):
            yield from self._selection(p, lp, t, seen.labels, st)
        elif p.name in ELEMENTWISE:
            yield from self._elementwise(p, lp, t, seen.labels, st)
        elif p.name in REDUCES:
            yield from self._reduction(p, lp, t, seen.labels, st)
        elif p.name == "dot_general":
            yield from self._contraction(p, lp, t, seen.labels, st)
        elif p.name == "iota":
            dims = p.params["dimension"], t.params["dimension"]
            if self.loose or lp[dims[0]] == seen.labels[dims[1]]:
                yield st
        else:
            yield from self._opaque(p, lp, t, seen.labels, st)

    def _operands(self, pairs, st: PartialMatch) -> Iterator[PartialMatch]:
        if not pairs:
            yield st
            return
        (p, lp, t, lt), *rest = pairs
        for found in self.match(p, lp, t, lt, st):
            yield from self._operands(rest, found)

    def _elementwise(self, p: Node, lp, t: Node, lt, st) -> Iterator[PartialMatch]:
        if p.name not in ("bitcast_convert_type",) and not _same_params(p, t):
            return
        orders = [t.ins]
        if p.name in COMMUTES:
            orders.append(t.ins[::-1])
        for order in orders:
            pairs = [
                (a, elementwise(a, lp), b, elementwise(b, lt))
                for a, b in zip(p.ins, order, strict=True)
            ]
            yield from self._operands(pairs, st)

    def _selection(
        self, p: Node, lp, t: Node, lt, st, outer=()
    ) -> Iterator[PartialMatch]:
        """A number where a mask says so: the mask or its opposite, one or several.

        `outer` are the masks and the numbers of the selections round this one.
        """
        mask, *sides = (self._bottom(v, elementwise(v, lp)) for v in p.ins)
        place = 1 if self._is_number(sides[0].value) else 0
        kept, number = sides[place], sides[1 - place].value
        for sign in (1, -1):
            ins = t.ins[1:] if sign == 1 else t.ins[:0:-1]
            fill = folded(ins[1 - place])
            if fill is None:
                continue
            choice = t.ins[0], elementwise(t.ins[0], lt), sign
            found = (*outer, (choice, fill))
            inner = self._bottom(ins[place], elementwise(ins[place], lt))
            covered = st.cover(inner.through)
            for state in self.match(
                kept.value, kept.labels, inner.value, inner.labels, covered
            ):
                yield from self._masked(mask, number, found, state)
            below = inner.value.node
            gathers = mask.value in self.formula.gathers
            if below is not None and gathers and _is_selection(below, p):
                covered = covered.cover((below,))
                yield from self._selection(p, lp, below, inner.labels, covered, found)

    def _masked(
        self, mask: View, number, found, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        """Binds the masks, if all put the same number there."""
        fill = found[0][1]
        if not self.loose and not all(fill.agrees(f) for _, f in found):
            return
        for state in self._number(number, folded(number), fill, st):
            choices = [choice for choice, _ in found]
            yield from self._bind(mask.value, mask.labels, choices, state)

    def _is_number(self, value: FlatValue) -> bool:
        return value in self.holes or folded(value) is not None

    def _is_masking(self, p: Node, lp: Labels) -> bool:
        """Whether a node of the pattern puts a number where an input says so."""
        if p.name != "select_n" or len(p.ins) != 3:
            return False
        mask, *sides = (self._bottom(v, elementwise(v, lp)).value for v in p.ins)
        return mask in self.inputs and any(map(self._is_number, sides))

    def _reduction(self, p: Node, lp, t: Node, lt, st) -> Iterator[PartialMatch]:
        axes = [sorted(map(int, node.params["axes"])) for node in (p, t)]
        if len(axes[0]) != len(axes[1]):
            return
        over = tuple(self.indices.fresh(t.ins[0].shape[a]) for a in axes[1])
        inner = [
            elementwise(node.ins[0], inserted(labels, ax, over))
            for node, labels, ax in ((p, lp, axes[0]), (t, lt, axes[1]))
        ]
        yield from self.match(p.ins[0], inner[0], t.ins[0], inner[1], st)

    def _contraction(self, p: Node, lp, t: Node, lt, st) -> Iterator[PartialMatch]:
        (t_over, _), _ = t.params["dimension_numbers"]
        (p_over, _), _ = p.params["dimension_numbers"]
        if len(t_over) != len(p_over) or not _usual_precision(t):
            return
        over = tuple(self.indices.fresh(t.ins[0].shape[a]) for a in t_over)
        p_left, p_right = dot_operands(p, lp, over)
        t_left, t_right = dot_operands(t, lt, over)
        a, b = p.ins
        for (c, lc), (d, ld) in (
            ((t.ins[0], t_left), (t.ins[1], t_right)),
            ((t.ins[1], t_right), (t.ins[0], t_left)),
        ):
            pairs = [(a, p_left, c, lc), (b, p_right, d, ld)]
            yield from self._operands(pairs, st)

    def _opaque(self, p: Node, lp, t: Node, lt, st) -> Iterator[PartialMatch]:
        free = self.formula.free if p is self.formula.out.node else frozenset()
        # With other parameters a result may have other sizes.
        same = _same_params(p, t, free) and (free or lp == lt)
        if not self.loose and not same:
            return
        pairs = []
        for a, b in zip(p.ins, t.ins, strict=True):
            if len(a.shape) != len(b.shape):
                return
            labels = self.indices.root(b.shape)
            pairs.append((a, elementwise(a, labels), b, elementwise(b, labels)))
        yield from self._operands(pairs, st)


def _is_selection(node: Node, like: Node) -> bool:
    """Whether a node chooses between two arrays, under the same rule."""
    same = node.name == "select_n" and node.rule == like.rule
    return same and len(node.ins) == len(like.ins)


def _usual_precision(node: Node) -> bool:
    """Whether nobody asked for more precision than the lean op has."""
    asked = node.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    return all(str(p) in ("None", "DEFAULT", "BF16_BF16_F32") for p in asked)


def _same_params(p: Node, t: Node, free: frozenset[str] = frozenset()) -> bool:
    keys = (p.params.keys() | t.params.keys()) - IGNORED - free
    return all(_equal(p.params.get(k), t.params.get(k)) for k in keys)


def _equal(a, b) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return a is b


def _kind(dtype) -> str:
    kinds = {"float": jnp.inexact, "int": jnp.integer, "bool": jnp.bool_}
    for name, kind in kinds.items():
        if jnp.issubdtype(dtype, kind):
            return name
    return str(dtype)


def head(value: FlatValue) -> str:
    """What kind of thing a value is below its casts and views, to index by."""
    labels: Labels = tuple(range(len(value.shape)))
    *_, seen = look_through(value, labels, Indices())
    node = seen.value.node
    if node is None:
        return ""
    if is_product(seen.value):
        return "product"
    return "sum" if is_sum(seen.value) else node.name
