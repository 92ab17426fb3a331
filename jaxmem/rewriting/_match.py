"""Is this value that formula? A formula is matched backwards from its output.

Products and sums are matched up to order and grouping (`_algebra`), casts and views are
looked through (`_views`). Everything else must be the same operation on operands that
match. Each way to match is a `PartialMatch`; they are generated one by one.

What is still to be matched is a list of goals (`_goals`). A goal gives, of a partial
match, the ways to go on: each a partial match and the goals that take its place.
"""

import math
from collections.abc import Iterator
from functools import partial

from jaxmem.ir.primitives import Kind
from jaxmem.rewriting._algebra import (
    PRODUCT,
    SUM,
    Decomposed,
    Item,
    Law,
    Opener,
    is_product,
    is_sum,
    operations_in,
    without_numbers,
)
from jaxmem.rewriting._flat_graph import FlatValue, Node
from jaxmem.rewriting._fold import Number, folded, plus, times
from jaxmem.rewriting._goals import Step, done, solutions
from jaxmem.rewriting._match_inputs import InputMatcher
from jaxmem.rewriting._partial_match import PartialMatch, TracedFormula
from jaxmem.rewriting._views import (
    Labels,
    View,
    bottom,
    dot_operands,
    elementwise,
    inserted,
)

# About how a result is computed, not about what is computed.
IGNORED = frozenset(
    ["accuracy", "out_sharding", "sharding", "precision", "preferred_element_type"]
    + ["new_dtype", "weak_type", "dtype", "inplace"]
)

# Deeper than the deepest formula (a dropout inside attention, with its casts).
DEPTH = 32
# A formula of many like operands matches itself in factorially many ways.
_MOST = 20_000  # goals that are followed


class Matcher(InputMatcher):
    """One formula against one target."""

    def __init__(self, formula: TracedFormula, loose: bool, sizes: dict[str, int]):
        super().__init__(formula, loose)
        self.sizes = sizes
        self.opener = Opener(self._bottom, frozenset(self.inputs), self.holes)

    def run(self, target: FlatValue) -> Iterator[PartialMatch]:
        """Every way in which `target` is the formula."""
        labels = self.indices.root(target.shape)
        start = PartialMatch({}, {}, frozenset(), dict(self.sizes))
        p_labels = elementwise(self.formula.out, labels)
        t_labels = elementwise(target, labels)
        goal = partial(self.match, self.formula.out, p_labels, target, t_labels)
        return solutions(goal, start, _MOST)

    def match(self, p, lp: Labels, t, lt: Labels, st: PartialMatch) -> Iterator[Step]:
        """Extends `st` so that target `t` (labels `lt`) is pattern `p`."""
        p_seen = self._bottom(p, lp)
        p, lp = p_seen.value, p_seen.labels
        number = folded(p)
        if number is not None or p in self.holes:
            return done(self._number(p, number, folded(t), st))
        if p in self.inputs:
            return done(self._bind(p, lp, [(t, lt, 1)], st))
        if is_product(p):
            return self._product(p, lp, [(t, lt, 1.0)], 1.0, st)
        if is_sum(p):
            return self._sum(p, lp, t, lt, st)
        if p.node is not None:
            return self._same_operation(p.node, lp, self._bottom(t, lt), st)
        return iter(())

    # -- products and sums

    def _product(self, p, lp, items, const: float, st) -> Iterator[Step]:
        goal = self.opener.apart(PRODUCT, p, lp)
        return self._factors(goal.items, items, Number(const, 0.0), goal, st)

    def _factors(self, factors, items, const, goal: Decomposed, st) -> Iterator[Step]:
        """Matches `factors` with `items`, of which none may be left over."""
        items, const = without_numbers(PRODUCT, items, const)
        if not factors and not items:
            yield from done(self._settle(PRODUCT, const, goal, st))
        elif factors:
            among = range(len(items))
            yield from self._first_factor(factors, items, among, const, goal, DEPTH, st)

    # The first of the factors is looked for in one item after another, down to the
    # operands of its operands; all other items stay whole until their turn comes. So
    # each way to take a product apart is seen once, not in each order of its steps.
    def _first_factor(
        self, factors, items, among, const, goal: Decomposed, steps: int, st
    ) -> Iterator[Step]:
        """Matches the first of `factors` with one of the items at `among`."""
        if len(items) > sum(math.ceil(abs(e)) for _, _, e in factors):
            return
        (p, lp, e), rest = factors[0], factors[1:]
        among = self._holding(p, items, among)
        for i in among:
            t, lt, g = items[i]
            if g != e and not (g * e > 0 and abs(g) < abs(e)):
                continue
            left = rest if g == e else ((p, lp, e - g), *rest)
            others = [*items[:i], *items[i + 1 :]]
            factor = partial(self._factor, p, lp, t, lt)
            yield st, (factor, partial(self._factors, left, others, const, goal))
        for new, inside, number, covered in self._opened(PRODUCT, items, among, st):
            total = times(const, number)
            go_on = partial(self._first_factor, factors, new, inside, total, goal)
            yield covered, ((partial(go_on, steps - 1),) if steps else ())

    def _factor(self, p, lp, t, lt, st) -> Iterator[Step]:
        if is_sum(p) and p not in self.inputs:
            return self._sum(p, lp, t, lt, st)
        return self.match(p, lp, t, lt, st)

    def _sum(self, p, lp: Labels, t, lt: Labels, st) -> Iterator[Step]:
        goal = self.opener.apart(SUM, p, lp)
        return self._terms(goal.items, [(t, lt, 1.0)], SUM.unit, goal, st)

    def _terms(self, terms, items, const, goal: Decomposed, st) -> Iterator[Step]:
        """Matches `terms` with `items`, of which none may be left over."""
        items, const = without_numbers(SUM, items, const)
        if not terms and not items:
            yield from done(self._settle(SUM, const, goal, st))
        elif terms:
            among = range(len(items))
            yield from self._first_term(terms, items, among, const, goal, DEPTH, st)

    def _first_term(
        self, terms, items, among, const, goal: Decomposed, steps: int, st
    ) -> Iterator[Step]:
        """Matches the first of `terms` with one of the items at `among`."""
        gathers = any(p in self.formula.gathers for p, _, _ in terms)
        if len(items) > len(terms) and not gathers:
            return
        (p, lp, sign), rest = terms[0], terms[1:]
        if p in self.formula.gathers and items:
            parts = [(t, lt, g * sign) for t, lt, g in items]
            for found in self._bind(p, lp, parts, st):
                yield found, (partial(self._terms, rest, [], const, goal),)
            return
        among = self._holding(p, items, among)
        for i in among:
            t, lt, g = items[i]
            others = [*items[:i], *items[i + 1 :]]
            term = partial(self._product, p, lp, [(t, lt, 1.0)], g * sign)
            yield st, (term, partial(self._terms, rest, others, const, goal))
        left = steps if gathers else steps - 1
        for new, inside, number, covered in self._opened(SUM, items, among, st):
            total = plus(const, number)
            go_on = partial(self._first_term, terms, new, inside, total, goal)
            yield covered, ((partial(go_on, left),) if steps else ())

    def _holding(self, p, items, among) -> list[int]:
        """Which of the items may have `p` in them, of those alike the first."""
        found: dict[Item, int] = {}
        for i in among:
            if items[i] not in found and self._may_hold(items[i][0], p):
                found[items[i]] = i
        return list(found.values())

    def _may_hold(self, t: FlatValue, p: FlatValue) -> bool:
        """Whether what `p` is a product or a sum of is there in `t`."""
        if p in self.inputs:
            return True
        most = math.inf if self.formula.gathers else DEPTH
        there = operations_in(t)
        needed = operations_in(p, self.holes)
        return all(there.get(name, math.inf) <= most for name in needed)

    def _opened(self, law: Law, items, among, st) -> Iterator[tuple]:
        """Each item at `among` opened: the items, where the new are, their number."""
        for i in among:
            t, lt, g = items[i]
            seen = self._bottom(t, lt)
            operands = law.operands(seen.value, seen.labels, g)
            if operands is not None:
                inner, number = without_numbers(law, *operands)
                new = [*items[:i], *inner, *items[i + 1 :]]
                covered = st.cover((*seen.through, seen.value.node))
                yield new, range(i, i + len(inner)), number, covered

    def _settle(
        self, law: Law, const: Number, goal: Decomposed, st: PartialMatch
    ) -> Iterator[PartialMatch]:
        """The numbers left over must agree, or are what the one hole stands for."""
        want, unknown = goal.number, []
        for hole, _, weight in goal.holes:
            if hole in st.holes:
                want = law.join(want, law.weighed(st.holes[hole], weight))
            else:
                unknown.append((hole, weight))
        if self.loose or (not unknown and const.agrees(want)):
            yield st
        elif len(unknown) == 1:
            (hole, weight), *_ = unknown
            number = law.solve(const, want, weight)
            if number is not None:
                yield from self._fill(hole, number, st)

    # -- other operations

    def _same_operation(
        self, p: Node, lp, seen: View, st: PartialMatch
    ) -> Iterator[Step]:
        t = seen.value.node
        if p.name == "stop_gradient" and (t is None or t.name != p.name):
            # A softmax does not depend on its shift, whose gradient is often not cut.
            operand = p.ins[0]
            if head(operand) != "reduce_max":
                return iter(())
            st = st.cover(seen.through)
            return self.match(operand, lp, seen.value, seen.labels, st)
        if t is None or t.name != p.name or len(t.outs) != 1 or t.bodies or p.bodies:
            return iter(())
        if len(t.ins) != len(p.ins) or t.rule != p.rule:
            return iter(())
        covered = st.cover((*seen.through, t))
        return self._operation(p, lp)(p, lp, t, seen.labels, covered)

    def _operation(self, p: Node, lp: Labels):
        """How operations like one of the formula are matched."""
        if self._is_masking(p, lp):
            return self._selection
        if p.record.elementwise or p.name == "bitcast_convert_type":
            return self._elementwise
        if p.record.kind is Kind.REDUCTION and not p.record.by_body:
            return self._reduction
        named = {"dot_general": self._contraction, "iota": self._iota}
        return named.get(p.name, self._opaque)

    def _elementwise(self, p: Node, lp, t: Node, lt, st) -> Iterator[Step]:
        if p.name != "bitcast_convert_type" and not _same_params(p, t):
            return
        orders = [t.ins]
        if p.record.commutes:
            orders.append(t.ins[::-1])
        for order in orders:
            pairs = zip(p.ins, order, strict=True)
            yield (
                st,
                tuple(
                    partial(self.match, a, elementwise(a, lp), b, elementwise(b, lt))
                    for a, b in pairs
                ),
            )

    def _selection(self, p: Node, lp, t: Node, lt, st, outer=()) -> Iterator[Step]:
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
            inside = partial(
                *(self.match, kept.value, kept.labels, inner.value, inner.labels)
            )
            yield covered, (inside, partial(self._masked, mask, number, found))
            below = inner.value.node
            gathers = mask.value in self.formula.gathers
            if below is not None and gathers and _is_selection(below, p):
                covered = covered.cover((below,))
                more = partial(self._selection, p, lp, below, inner.labels, outer=found)
                yield covered, (more,)

    def _masked(self, mask: View, number, found, st: PartialMatch) -> Iterator[Step]:
        """Binds the masks, if all put the same number there."""
        fill = found[0][1]
        if not self.loose and not all(fill.agrees(f) for _, f in found):
            return
        choices = [choice for choice, _ in found]
        for state in self._number(number, folded(number), fill, st):
            yield from done(self._bind(mask.value, mask.labels, choices, state))

    def _is_number(self, value: FlatValue) -> bool:
        return value in self.holes or folded(value) is not None

    def _is_masking(self, p: Node, lp: Labels) -> bool:
        """Whether a node of the pattern puts a number where an input says so."""
        if p.name != "select_n" or len(p.ins) != 3:
            return False
        mask, *sides = (self._bottom(v, elementwise(v, lp)).value for v in p.ins)
        return mask in self.inputs and any(map(self._is_number, sides))

    def _reduction(self, p: Node, lp, t: Node, lt, st) -> Iterator[Step]:
        axes = [sorted(map(int, node.params["axes"])) for node in (p, t)]
        if len(axes[0]) != len(axes[1]):
            return iter(())
        over = tuple(self.indices.fresh(t.ins[0].shape[a]) for a in axes[1])
        inner = [
            elementwise(node.ins[0], inserted(labels, ax, over))
            for node, labels, ax in ((p, lp, axes[0]), (t, lt, axes[1]))
        ]
        return self.match(p.ins[0], inner[0], t.ins[0], inner[1], st)

    def _contraction(self, p: Node, lp, t: Node, lt, st) -> Iterator[Step]:
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
            left = partial(self.match, a, p_left, c, lc)
            yield st, (left, partial(self.match, b, p_right, d, ld))

    def _iota(self, p: Node, lp, t: Node, lt, st) -> Iterator[Step]:
        of_formula, of_target = p.params["dimension"], t.params["dimension"]
        if self.loose or lp[of_formula] == lt[of_target]:
            yield st, ()

    def _opaque(self, p: Node, lp, t: Node, lt, st) -> Iterator[Step]:
        free = self.formula.free if p is self.formula.out.node else frozenset()
        # With other parameters a result may have other sizes.
        same = _same_params(p, t, free) and (free or lp == lt)
        if not self.loose and not same:
            return
        goals = []
        for a, b in zip(p.ins, t.ins, strict=True):
            if len(a.shape) != len(b.shape):
                return
            labels = self.indices.root(b.shape)
            inside = elementwise(a, labels), b, elementwise(b, labels)
            goals.append(partial(self.match, a, *inside))
        yield st, tuple(goals)


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


def head(value: FlatValue) -> str:
    """What kind of thing a value is below its casts and views, to index by."""
    value = bottom(value)
    if value.node is None:
        return ""
    if is_product(value):
        return "product"
    return "sum" if is_sum(value) else value.node.name
