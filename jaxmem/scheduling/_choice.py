"""What the passes are asked to do: plain data.

A `Choice` is all that a search over budgets varies, so it is also all that must be kept
of a plan to have the same step a second time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

from jaxmem._checks import OneOf, Range, from_plain, wrong_value
from jaxmem.chips import CHIPS

Chip = Annotated[str, OneOf(tuple(CHIPS))]
Count = Annotated[int, Range(1)]
Bytes = Annotated[int, Range(0)]
Index = Annotated[int, Range(0)]
Rate = Annotated[float, Range(0)]  # bytes that one would keep rather than a second
Labels = tuple[str, ...]  # of operations: `minimum_cut.label_of`

C = TypeVar("C")


@dataclass(frozen=True)
class Choice:
    """A configuration for each pass.

    Attributes:
      target: the chip whose rates say what an operation costs.
      configs: those that are not the default, in the order of their names.
      unchanged: whether the step is not changed, whatever the others say.
      compared: whether a compiler compares the step with the one given; else nothing is
        done but what the step's graph shows to gain clearly.
      without: names of passes that are switched off, to find the one at fault; no part
        of what a plan keeps.
    """

    target: Chip = "cpu"
    configs: tuple[Any, ...] = ()
    unchanged: bool = False
    compared: bool = True
    without: tuple[str, ...] = ()

    def __post_init__(self):
        # one form for one choice, so that equal ones compare and hash as equal
        by_name = {config.name: config for config in self.configs}
        kept = [c for _, c in sorted(by_name.items()) if c != type(c)()]
        object.__setattr__(self, "configs", tuple(kept))

    def get(self, kind: type[C]) -> C:
        """The configuration of this class; its default where none is given."""
        return next((c for c in self.configs if type(c) is kind), kind())

    @property
    def uses_host(self) -> bool:
        """Whether a pass lets arrays be offloaded to the host."""
        return any(getattr(config, "uses_host", False) for config in self.configs)

    def having(self, *configs: Any) -> "Choice":
        """The same with other configurations of some passes."""
        return replace(self, configs=(*self.configs, *configs))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the name of each pass with its configuration."""
        configs = {config.name: asdict(config) for config in self.configs}
        own = {"unchanged": self.unchanged, "compared": self.compared}
        return {"target": self.target, "passes": configs, **own}

    @classmethod
    def from_dict(
        cls, data: Any, kinds: Mapping[str, type], name: str = "choice"
    ) -> "Choice":
        """What `to_dict` gave.

        Args:
          data: dicts and lists.
          kinds: the class of configurations of each pass.
          name: of the choice, for messages.

        Raises:
          TypeError, ValueError: a pass or a field that there is not, or a value that
            is not allowed.
        """
        written = from_plain(_Written, data, name)
        if unknown := written.passes.keys() - kinds.keys():
            raise wrong_value(f"{name}.passes", sorted(unknown), f"of {sorted(kinds)}")
        passes = f"{name}.passes"
        configs = (
            from_plain(kinds[k], found, f"{passes}[{k!r}]")
            for k, found in written.passes.items()
        )
        return cls(written.target, tuple(configs), written.unchanged, written.compared)


@dataclass(frozen=True)
class _Written:
    """A choice as `to_dict` writes it."""

    target: Chip
    passes: dict[str, dict]
    unchanged: bool
    compared: bool


NO_CHOICE = Choice(compared=False)


def counted(count: int) -> str:
    """So many choices, in words."""
    return f"{count} {'choice' if count == 1 else 'choices'}"
