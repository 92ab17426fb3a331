"""Products and sums taken apart: factors with exponents, terms with signs, a number."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from jaxmem.ir.operands_first import operands_first
from jaxmem.rewriting._flat_graph import FlatValue
from jaxmem.rewriting._fold import Number, folded, plus, power, times
from jaxmem.rewriting._views import Labels, View, bottom, elementwise

# So `x / sqrt(v)` is `x * rsqrt(v)`, and `0.5 * x * (1 + t)` is `x * (0.5 * (1 + t))`.
POWERS = {"mul": (1, 1), "div": (1, -1), "square": (2,), "sqrt": (0.5,)}
POWERS |= {"rsqrt": (-0.5,)}
SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}
ONE, NOTHING = Number(1.0, 0.0), Number(0.0, 0.0)

# A value, its labels, and its exponent in a product or its sign in a sum.
Item = tuple[FlatValue, Labels, float]


@dataclass(frozen=True)
class Decomposed:
    """A product or a sum: its items, those that are holes, and its number."""

    items: tuple[Item, ...]
    holes: tuple[Item, ...]
    number: Number


class Law(NamedTuple):
    """How a product, or a sum, is taken apart and put together."""

    unit: Number
    join: Callable[[Number, Number], Number]
    # A number with its exponent, or its sign.
    weighed: Callable[[Number, float], Number]
    # The operands of a value with their weights, and a number beside them.
    operands: Callable[[FlatValue, Labels, float], tuple[list[Item], Number] | None]
    # What joined with the second, with this weight, gives the first; None: nothing.
    solve: Callable[[Number, Number, float], Number | None]


@dataclass(frozen=True)
class Opener:
    """Takes the products and sums of a formula apart, down to its inputs."""

    bottom: Callable[[FlatValue, Labels], View]
    inputs: frozenset[FlatValue]
    holes: frozenset[FlatValue]

    def apart(self, law: Law, value: FlatValue, labels: Labels) -> Decomposed:
        items, number = self._items(law, value, labels, 1.0)
        holes = tuple(i for i in items if i[0] in self.holes)
        rest = [i for i in items if i[0] not in self.holes]
        # Inputs last: they fit anything, so what is more particular goes first.
        rest.sort(key=lambda i: i[0] in self.inputs)
        return Decomposed(tuple(rest), holes, number)

    def _items(self, law: Law, value, labels, weight) -> tuple[list[Item], Number]:
        items: list[Item] = []
        total, todo = law.unit, [(value, labels, weight)]
        while todo:
            value, labels, weight = todo.pop()
            seen = self.bottom(value, labels)
            item = seen.value, seen.labels, weight
            operands, number = self._operands(law, *item)
            total = law.join(total, number)
            if operands is not None:
                todo += reversed(operands)
            elif law is PRODUCT:
                _merge(items, item)
            else:
                items.append(item)
        return items, total

    def _operands(
        self, law: Law, value, labels, weight
    ) -> tuple[list[Item] | None, Number]:
        """What a value is made of, and a number; no operands where it stays whole."""
        if value in self.inputs or value in self.holes:
            return None, law.unit
        number = folded(value)
        if number is not None:
            return [], law.weighed(number, weight)
        return law.operands(value, labels, weight) or (None, law.unit)


def _merge(factors: list[Item], new: Item) -> None:
    for i, (value, labels, exponent) in enumerate(factors):
        if value is new[0] and labels == new[1]:
            factors[i] = (value, labels, exponent + new[2])
            return
    factors.append(new)


def factors_of(value: FlatValue, labels, exponent) -> tuple[list[Item], Number] | None:
    """The operands of a product with their exponents, and its sign."""
    node = value.node
    if node is None or len(node.outs) != 1:
        return None
    if node.name == "neg" and float(exponent).is_integer():
        item = (node.ins[0], elementwise(node.ins[0], labels), exponent)
        return [item], Number((-1.0) ** exponent, 0.0)
    if node.name == "pow":
        number = folded(node.ins[1])
        powers: tuple = () if number is None else (number.value,)
    elif node.name == "integer_pow":
        powers = (node.params["y"],)
    else:
        powers = POWERS.get(node.name, ())
    items = [
        (v, elementwise(v, labels), exponent * p)
        for v, p in zip(node.ins, powers, strict=False)
    ]
    return (items, ONE) if items else None


def terms_of(value: FlatValue, labels, sign) -> tuple[list[Item], Number] | None:
    """The operands of a sum with their signs."""
    node = value.node
    if node is None or node.name not in SIGNS:
        return None
    signs = zip(node.ins, SIGNS[node.name], strict=True)
    return [(v, elementwise(v, labels), sign * s) for v, s in signs], NOTHING


def _root(const: Number, known: Number, exponent: float) -> Number | None:
    if not const.value * known.value > 0:
        return None
    value = (const.value / known.value) ** (1 / exponent)
    return Number(value, const.error + known.error)


def _signed(number: Number, sign: float) -> Number:
    return Number(sign * number.value, number.error)


def _rest(const: Number, known: Number, sign: float) -> Number:
    return _signed(plus(const, _signed(known, -1.0)), sign)


PRODUCT = Law(ONE, times, power, factors_of, _root)
SUM = Law(NOTHING, plus, _signed, terms_of, _rest)


def is_product(value: FlatValue) -> bool:
    """Whether the last operation is a product, a quotient or a power."""
    if value.node is None or value.node.name == "neg":
        return False
    return factors_of(value, tuple(range(len(value.shape))), 1.0) is not None


def is_sum(value: FlatValue) -> bool:
    return value.node is not None and value.node.name in SIGNS


def operations_in(
    value: FlatValue, holes: Container[FlatValue] = frozenset()
) -> dict[str, int]:
    """The operations that a value is a product or a sum of, by the steps to each.

    "sum" among them is a sum of two values that are neither numbers nor `holes`.
    """
    last = bottom(value)
    for one in operands_first(last, _unread):
        if one.within is None:
            one.within = _operations_in(one, holes)
    assert last.within is not None
    return last.within


def _unread(value: FlatValue) -> list[FlatValue]:
    operands = _operands_of(value) if value.within is None else []
    return [v for v in operands if v.within is None]


def _operands_of(value: FlatValue) -> list[FlatValue]:
    """What a product or a sum is made of, numbers apart."""
    opened = folded(value) is None and (is_product(value) or is_sum(value))
    operands = value.node.ins if opened and value.node is not None else []
    return [bottom(v) for v in operands if folded(v) is None]


def _operations_in(value: FlatValue, holes: Container[FlatValue]) -> dict[str, int]:
    """`operations_in`, of a value whose operands know theirs."""
    if folded(value) is not None or value.node is None:
        return {}
    if not (is_product(value) or is_sum(value)):
        # A softmax's shift may be cut from the gradient or not.
        name = value.node.name
        return {} if name == "stop_gradient" else {name: 0}
    operands = [v for v in _operands_of(value) if v not in holes]
    found = {"sum": 0} if is_sum(value) and len(operands) > 1 else {}
    for operand in operands:
        for name, steps in (operand.within or {}).items():
            found[name] = min(steps + 1, found.get(name, steps + 1))
    return found


def without_numbers(law: Law, items, const: Number) -> tuple[list, Number]:
    """The items that are not numbers; the others joined to `const`."""
    kept = []
    for value, labels, weight in items:
        number = folded(value)
        if number is None:
            kept.append((value, labels, weight))
        else:
            const = law.join(const, law.weighed(number, weight))
    return kept, const
