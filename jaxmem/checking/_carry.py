"""What a step gives back to its next call: outputs that are like arguments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem._checks import wrong_value
from jaxmem.checking._runs import Arguments, Ran
from jaxmem.frameworks import has_objects
from jaxmem.ir import jaxprs


@dataclass(frozen=True)
class Carry:
    """Which outputs are arguments of the next call.

    Attributes:
      pairs: (position of the argument, position in the returned tuple; None where the
        argument is all that is returned).
      objects: whether an object among the arguments carries its own state.
    """

    pairs: tuple[tuple[int, int | None], ...] = ()
    objects: bool = False

    def __bool__(self) -> bool:
        return bool(self.pairs) or self.objects

    def next(self, ran: Ran, fresh: Arguments) -> Arguments:
        """The arguments of the next call: `fresh` ones where nothing is carried."""
        pairs = zip(ran.args, fresh[0], strict=True)
        args = [own if has_objects(own) else new for own, new in pairs]
        for position, place in self.pairs:
            args[position] = ran.out if place is None else ran.out[place]
        objects = {k: x for k, x in ran.kwargs.items() if has_objects(x)}
        return tuple(args), fresh[1] | objects


def carry_of(given: Sequence[Any], ran: Ran, asked: Sequence[int] | None) -> Carry:
    """What is fed back.

    Args:
      given: the positional arguments of the call.
      ran: the call.
      asked: positions of arguments that are results of the call before, in the order
        of the results; None for those that are alike.
    """
    objects = has_objects((ran.args, ran.kwargs))
    if asked is None:
        return Carry(tuple(_found(given, ran.out)), objects)
    return Carry(tuple(_asked(given, ran.out, asked)), objects)


def _asked(given, out: Any, asked: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    if any(not 0 <= position < len(given) for position in asked):
        raise wrong_value("carry", tuple(asked), f"positions of {len(given)} arguments")
    whole = len(asked) == 1 and _kinds(out) == _kinds(given[asked[0]])
    for place, position in enumerate(asked):
        value = out
        if not whole:
            several = isinstance(out, tuple | list) and place < len(out)
            value = out[place] if several else None
        if _kinds(value) != _kinds(given[position]):
            raise wrong_value(
                "carry",
                tuple(asked),
                f"positions of arguments that results {place} and so on are like, in "
                "structure, shapes and dtypes",
            )
        yield position, None if whole else place


def _found(given, out: Any) -> Iterator[tuple[int, int | None]]:
    """Results are matched in order, up to the first that is like no argument."""
    for position, argument in enumerate(given):
        if _is_alike(out, argument):
            yield position, None
            return
    if not isinstance(out, tuple | list):
        return
    start = 0
    for place, value in enumerate(out):
        alike = (i for i in range(start, len(given)) if _is_alike(value, given[i]))
        position = next(alike, None)
        if position is None:
            return
        yield position, place
        start = position + 1


def _is_alike(value: Any, argument: Any) -> bool:
    """Whether it may be state: a bare number is a loss or a rate."""
    leaves = jax.tree.leaves(value)
    shapes = [x.shape for x in leaves if jaxprs.is_array(x)]
    return shapes not in ([], [()]) and _kinds(value) == _kinds(argument)


def _kinds(value: Any) -> Any:
    leaves, tree = jax.tree.flatten(value)
    return tree, list(map(_kind, leaves))


def _kind(leaf: Any) -> Any:
    """A Python number is an array after the first step, as a `TrainState`'s count."""
    if jaxprs.is_array(leaf):
        return leaf.shape, leaf.dtype
    is_number = isinstance(leaf, bool | int | float | complex)
    return ((), jax.dtypes.result_type(leaf)) if is_number else leaf
