"""Bytes as people write and read them."""

import math
import re
from fractions import Fraction

from jaxmem._checks import check_float, wrong_type, wrong_value

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{u[:1].lower() + "ib": 1024**i for i, u in enumerate(_UNITS) if i},
    **{u[:1].lower() + "b": 1000**i for i, u in enumerate(_UNITS) if i},
}
_ALLOWED = (
    f"bytes, as a number or as text with one of {', '.join(_UNITS)} (of 1024) or kB, "
    "MB, GB, TB (of 1000), as in '14GiB'"
)


def format_bytes(count: float) -> str:
    """Bytes as text of three digits: 1536 as `1.50 KiB`.

    Args:
        count: a number of bytes.

    Returns:
        The number in B, KiB, MiB, GiB or TiB.
    """
    count = check_float("count", count)
    sign, count = ("-" if count < 0 else ""), abs(count)
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    if unit == 0:
        return f"{sign}{count:.0f} B"
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{sign}{count:.{digits}f} {_UNITS[unit]}"


def parse_bytes(text: int | float | str, name: str = "text") -> int:
    """Text such as `"14GiB"` or `"16 GB"` as a number of bytes.

    Args:
        text: a number with a unit, or a number of bytes, rounded down.
        name: the argument that it is, for an error.

    Returns:
        The bytes.

    Raises:
        TypeError: neither a number nor a text.
        ValueError: a negative number, an infinity or NaN, or a text that is no number
            with one of the units B, KiB, MiB, GiB, TiB (of 1024) or kB, MB, GB, TB (of
            1000), in letters of either case.
    """
    if not isinstance(text, str):
        try:
            check_float(name, text, at_least=0)
        except TypeError:
            raise wrong_type(name, text, _ALLOWED) from None
        return int(text)  # not of the float: it may have fewer digits
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).lower() not in _FACTORS:
        raise wrong_value(name, text, _ALLOWED)
    return int(Fraction(match.group(1)) * _FACTORS[match.group(2).lower()])


def axis_unit(largest: float) -> tuple[float, str]:
    """The unit of an axis that ends at so many bytes: (its bytes, its name)."""
    power = min(max(int(math.log(max(largest, 1), 1024)), 0), len(_UNITS) - 1)
    return 1024.0**power, _UNITS[power]
