"""Products and sums taken apart: factors with exponents, terms with signs, a number."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxmem.rewriting._flat_graph import FlatValue
from jaxmem.rewriting._fold import Number, folded, plus, power, times
from jaxmem.rewriting._views import Labels, View, elementwise

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


@dataclass(frozen=True)
class Opener:
    """Takes the products and sums of a formula apart, down to its inputs."""

    bottom: Callable[[FlatValue, Labels], View]
    inputs: frozenset[FlatValue]
    holes: frozenset[FlatValue]

    def product(self, value: FlatValue, labels: Labels) -> Decomposed:
        return self._sorted(*self._factors(value, labels, 1.0))

    def sum(self, value: FlatValue, labels: Labels) -> Decomposed:
        return self._sorted(*self._terms(value, labels, 1.0))

    def _sorted(self, items: list[Item], number: Number) -> Decomposed:
        """Inputs last: they fit anything, so what is more particular goes first."""
        holes = tuple(i for i in items if i[0] in self.holes)
        rest = [i for i in items if i[0] not in self.holes]
        rest.sort(key=lambda i: i[0] in self.inputs)
        return Decomposed(tuple(rest), holes, number)

    def _is_atom(self, value: FlatValue) -> bool:
        return value in self.inputs or value in self.holes

    def _factors(self, value, labels, exponent) -> tuple[list[Item], Number]:
        seen = self.bottom(value, labels)
        value, labels = seen.value, seen.labels
        if self._is_atom(value):
            return [(value, labels, exponent)], ONE
        number = folded(value)
        if number is not None:
            return [], power(number, exponent)
        parts = factors_of(value, labels, exponent)
        if parts is None:
            return [(value, labels, exponent)], ONE
        items, sign = parts
        factors: list[Item] = []
        total = Number(sign, 0.0)
        for item in items:
            more, number = self._factors(*item)
            total = times(total, number)
            for factor in more:
                _merge(factors, factor)
        return factors, total

    def _terms(self, value, labels, sign) -> tuple[list[Item], Number]:
        seen = self.bottom(value, labels)
        value, labels = seen.value, seen.labels
        if self._is_atom(value):
            return [(value, labels, sign)], NOTHING
        number = folded(value)
        if number is not None:
            return [], Number(sign * number.value, number.error)
        items = terms_of(value, labels, sign)
        if items is None:
            return [(value, labels, sign)], NOTHING
        terms: list[Item] = []
        total = NOTHING
        for item in items:
            more, number = self._terms(*item)
            total = plus(total, number)
            terms += more
        return terms, total


def _merge(factors: list[Item], new: Item) -> None:
    for i, (value, labels, exponent) in enumerate(factors):
        if value is new[0] and labels == new[1]:
            factors[i] = (value, labels, exponent + new[2])
            return
    factors.append(new)


def factors_of(value: FlatValue, labels, exponent) -> tuple[list[Item], float] | None:
    """The operands of a product with their exponents, and its sign."""
    node = value.node
    if node is None or len(node.outs) != 1:
        return None
    if node.name == "neg" and float(exponent).is_integer():
        item = (node.ins[0], elementwise(node.ins[0], labels), exponent)
        return [item], (-1.0) ** exponent
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
    return (items, 1.0) if items else None


def terms_of(value: FlatValue, labels: Labels, sign: float) -> list[Item] | None:
    """The operands of a sum with their signs."""
    node = value.node
    if node is None or node.name not in SIGNS:
        return None
    return [
        (v, elementwise(v, labels), sign * s)
        for v, s in zip(node.ins, SIGNS[node.name], strict=True)
    ]


def is_product(value: FlatValue) -> bool:
    """Whether the last operation is a product, a quotient or a power."""
    if value.node is None or value.node.name == "neg":
        return False
    return factors_of(value, tuple(range(len(value.shape))), 1.0) is not None


def is_sum(value: FlatValue) -> bool:
    return value.node is not None and value.node.name in SIGNS


def without_numbers(items, const: Number, exponents: bool) -> tuple[list, Number]:
    """The items that are not numbers; the others multiplied (added) to `const`."""
    kept = []
    for value, labels, e in items:
        number = folded(value)
        if number is None:
            kept.append((value, labels, e))
        elif exponents:
            const = times(const, power(number, e))
        else:
            const = plus(const, Number(e * number.value, number.error))
    return kept, const
