"""What a pass is: it finds rewrites of a list of equations, applies and describes them.

A new way to save bytes is one file with a subclass of `Pass`, and one line in
`_passes.PASSES`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import Aliases, is_transposed
from jaxmem.ir.part_marks import is_part
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shard_maps import inside_of
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling.plan.rows import Description


class Config(Protocol):
    """What a pass is asked to do: a frozen dataclass of plain data."""

    # Its default, `Config()`, does nothing that costs time.

    name: ClassVar[str]


# What a plan advises where a level is not compared, and something was left out.
NAME_A_TARGET = "name a target, and both are compiled and the smaller is run"

C = TypeVar("C", bound=Config)
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Level:
    """A list of equations on its way through the passes: a step, or a loop's body."""

    jaxpr: Any  # closed
    aliases: Aliases  # position of an output -> of the input in whose memory it will be
    target: str = "cpu"  # the chip whose rates say what an operation costs
    # the loop, `cond` or `shard_map` whose body it is; None for the step itself
    loop: Any = None
    # whether a compiler compares the result with the step as given. If none does, a
    # pass does nothing but what the step's graph shows to gain clearly
    compared: bool = True
    # what is known of it and of what was made of it under other choices
    known: Remembered = field(default_factory=Remembered, compare=False, repr=False)
    # over which axes of a mesh the inputs are sharded (`ir.shards.InputShardings`);
    # None where nothing is known
    shardings: Any = None
    # the `shard_map`s that it is in, the outermost first: it can be retraced only while
    # these are
    maps: tuple[Any, ...] = ()

    def size(self, v) -> int:
        """Bytes of a variable of the list on one device."""
        return shardings_in(self.jaxpr, self.shardings).bytes_of(v)

    def looked_at(self, look: Callable[["Level"], T]) -> T:
        """`look(level)`, where the axes that the level names have a meaning."""

        def inside(maps: tuple[Any, ...]) -> T:
            if not maps:
                return look(self)
            return inside_of(maps[0], lambda _: inside(maps[1:]))

        return inside(self.maps)


def has_level(eqn) -> bool:
    """Whether the passes look into an equation: it holds scans, or both passes."""
    branches = primitives.is_branch(eqn) or primitives.is_shard_map(eqn)
    if not (branches or primitives.is_loop(eqn)):
        return False
    inside = [e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body)]
    both = not is_transposed(eqn) and any(map(is_transposed, inside))
    return both or any(primitives.is_scan(e) or is_part(e) for e in inside)


class Pass(Generic[C, R]):
    """One way to save bytes."""

    config: type[C]  # the class of its configuration
    # whether it is asked again after each rewrite, until it finds none
    repeats: bool = False
    # whether it only tells XLA in what order, or in what steps, to run operations:
    # predictions are made without it
    orders: bool = False
    # whether it runs operations in parts: its rows of the plan are those of tiles
    in_parts: bool = False

    def analyse(self, level: Level, config: C) -> Iterator[R]:
        """The rewrites that pay; the first of them is applied."""
        raise NotImplementedError

    def apply(self, level: Level, rewrite: R) -> Any:
        """The closed jaxpr with a rewrite done."""
        raise NotImplementedError

    def describe(self, rewrite: R, target: str) -> Description:
        """What a rewrite did, in rows of the plan; `target`: whose rates count."""
        del rewrite, target
        return Description()

    def left(self, level: Level, config: C) -> Iterator[str]:
        """Sentences about what could be done to the level, and was not."""
        del level, config
        return iter(())
