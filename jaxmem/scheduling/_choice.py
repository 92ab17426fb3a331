"""What the passes are asked to do: plain data.

A `Choice` is all that a search over budgets varies, so it is also all that must be kept
of a plan to have the same step a second time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class Choice:
    """A configuration for each pass.

    Attributes:
      target: the chip whose rates say what an operation costs.
      configs: those that are not the default, in the order of their names.
      unchanged: whether the step is left as it was given, whatever the others say.
      compared: whether a compiler compares the step with the one given; else nothing is
        done but what the step's graph shows to gain clearly.
    """

    target: str = "cpu"
    configs: tuple[Any, ...] = ()
    unchanged: bool = False
    compared: bool = True

    def __post_init__(self):
        by_name = {config.name: config for config in self.configs}
        kept = [c for _, c in sorted(by_name.items()) if c != type(c)()]
        object.__setattr__(self, "configs", tuple(kept))

    def get(self, kind: type[C]) -> C:
        """The configuration of this class; its default where none is given."""
        return next((c for c in self.configs if type(c) is kind), kind())

    def having(self, *configs: Any) -> "Choice":
        """The same with other configurations of some passes."""
        return replace(self, configs=(*self.configs, *configs))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the name of each pass with its configuration."""
        configs = {config.name: asdict(config) for config in self.configs}
        own = {"unchanged": self.unchanged, "compared": self.compared}
        return {"target": self.target, "passes": configs, **own}

    @classmethod
    def from_dict(cls, data: dict[str, Any], kinds: Mapping[str, type]) -> "Choice":
        """What `to_dict` gave; `kinds`: the class of configurations of each pass."""
        configs = (_config(kinds[k], found) for k, found in data["passes"].items())
        own = data["unchanged"], data["compared"]
        return cls(data["target"], tuple(configs), *own)


def _config(kind: Any, found: dict[str, Any]) -> Any:
    """JSON has lists where configurations have tuples."""
    if unknown := found.keys() - {f.name for f in fields(kind)}:
        raise ValueError(f"the pass {kind.name!r} has no option {sorted(unknown)}")
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return kind(**tuples)


NO_CHOICE = Choice(compared=False)
