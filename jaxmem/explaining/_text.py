"""One text of what is given: an exception with its causes, a file, a text."""

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem._checks import check_text, wrong_type, wrong_value

_ALLOWED = "an exception, the text of a log, or the path of one"
# `2025-01-02 03:04:05.6: W external/xla/.../bfc_allocator.cc:501] ` and its like
_PREFIX = re.compile(r"^.*?[\w/.-]+\.(?:cc|h|cu):\d+\] ?", re.M)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OWN = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = re.compile(
    r"(?:site|dist)-packages|[/\\]lib[/\\]python|^<|jax[/\\]_src|^" + re.escape(_OWN)
)


def text_of(error: Any) -> str:
    """The text of an error or a log."""
    if isinstance(error, BaseException):
        return "\n".join(_chain(error))
    if isinstance(error, os.PathLike):
        return _read(Path(error))
    if not isinstance(error, str):
        raise wrong_type("error", error, _ALLOWED)
    check_text("error", error, _ALLOWED)
    if "\n" not in error and len(error) < 256 and os.path.isfile(error):
        return _read(Path(error))
    return error


def without_prefixes(text: str) -> str:
    """The lines without time, level and place in XLA's sources."""
    return _PREFIX.sub("", text)


def line_of_user(text: str) -> str:
    """The innermost `file:line` of a traceback outside installed libraries."""
    frames = [f for f in _FRAME.findall(text) if not _INSTALLED.search(f[0])]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _chain(error: BaseException) -> Iterator[str]:
    """The causes first, as Python prints them, those that `from None` hides as well."""
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:
        errors.append(following)
        following = following.__cause__ or following.__context__
    for each in reversed(errors):
        yield "".join(traceback.format_exception(each, chain=False))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"the path of a log that can be read ({error.strerror})"
        raise wrong_value("error", path, why) from error
