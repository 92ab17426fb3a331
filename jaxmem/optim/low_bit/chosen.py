"""A code for each leaf: what was chosen, by what errors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem._checks import shown, wrong_value
from jaxmem._paths import hint, path_of

FLOAT32 = "float32"  # for moments that are not in codes


@dataclass(frozen=True)
class LeafCode:
    """The code of a leaf's moments.

    Attributes:
      path: of the leaf, "layers/kernel".
      code: of `LowBit.code`, or "float32" for moments that are not in codes.
      errors: (code, error) of each code that was measured: how far updates are from
        those with float32 moments, the norm of the difference by that of the update.
      why: what kept the leaf from being measured; else empty.
    """

    path: str
    code: str
    errors: tuple[tuple[str, float], ...] = ()
    why: str = ""


@dataclass(frozen=True)
class ChosenCodes(Mapping[str, str]):
    """Leaves by their paths, and the code of each: what `choose_codes` returns.

    A mapping, whose text is a table of the errors. The optimizers take it as `bits`,
    and `LowBit` as `code`. The state of an optimizer depends on it: for a run that goes
    on from a checkpoint keep `dict(chosen)`, which `LowBit(bits, code=...)` takes too.

    Attributes:
      bits: 8 or 4.
      leaves: of each leaf its code and errors.
    """

    bits: int
    leaves: tuple[LeafCode, ...]

    def __getitem__(self, path: str) -> str:
        """The code of the leaf with this path."""
        found = [leaf.code for leaf in self.leaves if leaf.path == path]
        if not found:
            raise KeyError(path)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        """The paths."""
        return (leaf.path for leaf in self.leaves)

    def __len__(self) -> int:
        """The number of leaves."""
        return len(self.leaves)

    def __repr__(self) -> str:
        return f"ChosenCodes({dict(self)})"

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for x in self.leaves for name, _ in x.errors))
        rows = [["leaf", "code", *(f"error: {name}" for name in names)]]
        rows += [[x.path, x.code, *_figures(x, names)] for x in self.leaves]
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        pad = lambda row: "  ".join(map(str.ljust, row, wide)).rstrip()
        notes = [f"  {x.why}" if x.why else "" for x in self.leaves]
        return "\n".join(map(str.__add__, map(pad, rows), ["", *notes]))


def by_path(given: Mapping[str, str], bits: int, codes: Sequence[str]) -> ChosenCodes:
    """A mapping as users give it, or an error for a code that there is not."""
    for path, code in given.items():
        if code not in (*codes, FLOAT32):
            allowed = " or ".join(map(repr, (*codes, FLOAT32)))
            raise wrong_value(f"code[{path!r}]", code, f"with bits={bits} {allowed}")
    if isinstance(given, ChosenCodes):
        return given
    return ChosenCodes(bits, tuple(LeafCode(p, code) for p, code in given.items()))


def name_of(path: Sequence[Any]) -> str:
    """A leaf's name, the same for an nnx.State of Variables and for one of arrays."""
    return path_of(path).removesuffix("/value")


def code_of(codes: Mapping[str, str], path: Sequence[Any]) -> str:
    """The code of a leaf; ValueError for one without."""
    name = name_of(path)
    if name not in codes:
        near = hint(name, [*codes])
        raise ValueError(f"code={shown(codes)} has none for the leaf {name!r}; {near}")
    return codes[name]


def _figures(leaf: LeafCode, names: Sequence[str]) -> list[str]:
    measured = dict(leaf.errors)
    return [f"{measured[n]:.3g}" if n in measured else "" for n in names]
