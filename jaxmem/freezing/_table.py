"""How much is trained, and the bytes that the frozen parameters save, as a table."""

from dataclasses import dataclass
from typing import Any

from jaxmem._paths import has_gradient, in_quantized, paths_and_leaves
from jaxmem.memory import format_bytes
from jaxmem.pages import aligned

_SHOWN = 6  # paths of trained arrays
_MOMENTS = 2  # of Adam, in the parameters' dtype


@dataclass(frozen=True)
class TrainedSizes:
    """Sizes of split parameters; other arrays without a gradient do not count.

    Attributes:
      trained: the paths of the trained arrays.
      trained_parameters: how many numbers they hold.
      trained_bytes: the bytes of the trained arrays, and of their gradients.
      arrays: how many arrays there are, the frozen ones included.
      parameters: how many numbers they hold.
      bytes: the bytes of all arrays.
      quantized: how many weights are codes of a few bits (qwix's `QArray`) beside these
        arrays; they have no gradient.
      quantized_parameters: how many numbers they stand for.
      quantized_bytes: the bytes of their codes, scales and zero points.
    """

    trained: tuple[str, ...]
    trained_parameters: int
    trained_bytes: int
    arrays: int
    parameters: int
    bytes: int
    quantized: int = 0
    quantized_parameters: int = 0
    quantized_bytes: int = 0


def sizes(trained: Any, frozen: Any) -> TrainedSizes:
    ours = [pair for pair in paths_and_leaves(trained) if has_gradient(pair[1])]
    rest = paths_and_leaves(frozen)
    marks = list(zip(rest, in_quantized(path for path, _ in rest), strict=True))
    others = [pair for pair, codes in marks if not codes and has_gradient(pair[1])]
    quantized = [pair for pair, codes in marks if codes]
    codes = [pair for pair in quantized if "qvalue" in pair[0].split("/")]
    return TrainedSizes(
        trained=tuple(path for path, _ in ours),
        trained_parameters=_count(ours),
        trained_bytes=_bytes(ours),
        arrays=len(ours) + len(others),
        parameters=_count(ours) + _count(others),
        bytes=_bytes(ours) + _bytes(others),
        quantized=len(codes),
        quantized_parameters=_count(codes),
        quantized_bytes=_bytes(quantized),
    )


def _count(named: list[tuple[str, Any]]) -> int:
    return sum(x.size for _, x in named)


def _bytes(named: list[tuple[str, Any]]) -> int:
    return sum(_bits(x.dtype) * x.size // 8 for _, x in named)


def _bits(dtype: Any) -> int:
    # numpy gives a uint4 a whole byte, and the devices that compute with it half of one
    return 4 if dtype.name.endswith("int4") else 8 * dtype.itemsize


def headline(s: TrainedSizes) -> str:
    parameters = s.parameters + s.quantized_parameters
    share = 100 * s.trained_parameters / parameters
    return (
        f"{s.trained_parameters:,} of {parameters:,} parameters trained "
        f"({share:.3g} %), in {len(s.trained)} of {s.arrays + s.quantized} arrays"
    )


COLUMNS = ("bytes", "of all", "of the trained", "saved")


def rows(s: TrainedSizes) -> list[tuple[str, ...]]:
    """Gradients and moments."""
    return [
        (name, *map(format_bytes, (n * s.bytes, n * s.trained_bytes, n * saved)))
        for saved in (s.bytes - s.trained_bytes,)
        for name, n in (("gradients", 1), ("two moments", _MOMENTS))
    ]


def caption(s: TrainedSizes) -> list[str]:
    """What is trained, and what cannot be."""
    if not s.quantized:
        return [trained_line(s)]
    size = format_bytes(s.quantized_bytes)
    base = f"quantized: {s.quantized} arrays of {size}, which have no gradient"
    return [trained_line(s), base]


def trained_line(s: TrainedSizes) -> str:
    hidden = len(s.trained) - _SHOWN
    rest = f", and {hidden} more" if hidden > 0 else ""
    return f"trained: {', '.join(s.trained[:_SHOWN])}{rest}"


def lines(s: TrainedSizes) -> list[str]:
    return [headline(s), *aligned([COLUMNS, *rows(s)]), *caption(s)]


def rich_table(s: TrainedSizes) -> Any:
    from rich.table import Table
    from rich.text import Text

    text = Text("\n".join(caption(s)))
    table = Table(*COLUMNS, title=headline(s), caption=text)
    for row in rows(s):
        table.add_row(*row)
    return table
