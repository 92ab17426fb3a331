"""Products and sums taken apart: factors with exponents, terms with signs, a number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxmem.rewriting._flat_graph import FlatValue
from jaxmem.rewriting._fold import Number, folded, plus, power, times
from jaxmem.rewriting._views import Labels, View, elementwise

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
