"""Bytes as people write and read them."""

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{u[:1].lower() + "ib": 1024**i for i, u in enumerate(_UNITS) if i},
    **{u[:1].lower() + "b": 1000**i for i, u in enumerate(_UNITS) if i},
}


def format_bytes(count: float) -> str:
    """Bytes as text of three digits: 1536 as `1.50 KiB`.

    Args:
        count: a number of bytes.

    Returns:
        The number in B, KiB, MiB, GiB or TiB.
    """
    sign, count = ("-" if count < 0 else ""), abs(count)
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    if unit == 0:
        return f"{sign}{count:.0f} B"
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{sign}{count:.{digits}f} {_UNITS[unit]}"


def parse_bytes(text: int | float | str) -> int:
    """Text such as `"14GiB"` or `"16 GB"` as a number of bytes.

    Args:
        text: a number with a unit, or bytes as a number, which stay.

    Returns:
        The bytes.

    Raises:
        ValueError: the text is not a number with one of the units B, KiB, MiB, GiB,
            TiB (of 1024) or kB, MB, GB, TB (of 1000).
    """
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).lower() not in _FACTORS:
        raise ValueError(
            f"cannot read {text!r} as bytes: write a number and one of "
            f"{', '.join(_UNITS)} (of 1024) or kB, MB, GB, TB (of 1000), as in '14GiB'"
        )
    return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])
