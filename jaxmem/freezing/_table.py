"""How much is trained, and the bytes that the frozen parameters save, as a table."""

from dataclasses import dataclass
from typing import Any

from jaxmem._paths import has_gradient, paths_and_leaves
from jaxmem.memory import format_bytes

_SHOWN = 6  # paths of trained arrays
_MOMENTS = 2  # of Adam, in the parameters' dtype


@dataclass(frozen=True)
class TrainedSizes:
    """Sizes of split parameters; arrays without a gradient do not count.

    Attributes:
      trained: the paths of the trained arrays.
      trained_parameters: how many numbers they hold.
      trained_bytes: the bytes of the trained arrays, and of their gradients.
      arrays: how many arrays there are, the frozen ones included.
      parameters: how many numbers they hold.
      bytes: the bytes of all arrays.
    """

    trained: tuple[str, ...]
    trained_parameters: int
    trained_bytes: int
    arrays: int
    parameters: int
    bytes: int


def sizes(trained: Any, frozen: Any) -> TrainedSizes:
    ours, others = (
        [(path, x) for path, x in paths_and_leaves(tree) if has_gradient(x)]
        for tree in (trained, frozen)
    )
    return TrainedSizes(
        trained=tuple(path for path, _ in ours),
        trained_parameters=_count(ours),
        trained_bytes=_bytes(ours),
        arrays=len(ours) + len(others),
        parameters=_count(ours) + _count(others),
        bytes=_bytes(ours) + _bytes(others),
    )


def _count(named: list[tuple[str, Any]]) -> int:
    return sum(x.size for _, x in named)


def _bytes(named: list[tuple[str, Any]]) -> int:
    return sum(x.size * x.dtype.itemsize for _, x in named)


def headline(s: TrainedSizes) -> str:
    share = 100 * s.trained_parameters / s.parameters
    return (
        f"{s.trained_parameters:,} of {s.parameters:,} parameters trained "
        f"({share:.3g} %), in {len(s.trained)} of {s.arrays} arrays"
    )


COLUMNS = ("bytes", "of all", "of the trained", "saved")


def rows(s: TrainedSizes) -> list[tuple[str, ...]]:
    """Gradients and moments."""
    return [
        (name, *map(format_bytes, (n * s.bytes, n * s.trained_bytes, n * saved)))
        for saved in (s.bytes - s.trained_bytes,)
        for name, n in (("gradients", 1), ("two moments", _MOMENTS))
    ]


def trained_line(s: TrainedSizes) -> str:
    hidden = len(s.trained) - _SHOWN
    rest = f", and {hidden} more" if hidden > 0 else ""
    return f"trained: {', '.join(s.trained[:_SHOWN])}{rest}"


def lines(s: TrainedSizes) -> list[str]:
    table = [COLUMNS, *rows(s)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [headline(s), *body, trained_line(s)]


def rich_table(s: TrainedSizes) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS, title=headline(s), caption=Text(trained_line(s)))
    for row in rows(s):
        table.add_row(*row)
    return table
