"""`save`, by the suffix of the file, and what a notebook shows, for every result."""

import dataclasses
import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

_PICTURES = (".png", ".svg", ".pdf")


class SavedResult:
    """A result that a user prints, looks at in a notebook, or writes to a file.

    A subclass has `_on_page(page)`, what stands on its page, and it may have
    `to_json(indent)` and `plot(path)`.
    """

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the result to a file, in the form that the file's suffix names.

        Args:
            path: a file ending in `.html` (a page that needs no network), `.txt` (what
                `print` shows), `.json`, and for results with a picture `.png`, `.svg`
                or `.pdf`.

        Raises:
            ImportError: a picture, and matplotlib is not installed (extra `plot`).
            ValueError: another suffix, or nothing to draw.
        """
        from jaxmem._checks import wrong_value

        writers = self._writers()
        write = writers.get(Path(path).suffix.lower())
        if write is None:
            *most, last = writers
            allowed = f"a file that ends in {', '.join(most)} or {last}"
            raise wrong_value("path", str(path), allowed)
        write(Path(path))

    def _writers(self) -> dict[str, Callable[[Path], Any]]:
        """What writes a file of each suffix."""
        writers: dict[str, Callable[[Path], Any]] = {
            ".html": lambda path: _write(path, self._page()),
            ".txt": lambda path: _write(path, f"{self}\n"),
        }
        if to_json := getattr(self, "to_json", None):
            writers[".json"] = lambda path: _write(path, f"{to_json(indent=2)}\n")
        if plot := getattr(self, "plot", None):
            writers |= dict.fromkeys(_PICTURES, plot)
        return writers

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        """(headline, whether it is good news, what is below it); `page`: the module."""
        raise NotImplementedError

    def _html(self) -> tuple[str, Any]:
        """(title, body) of the page."""
        from jaxmem.pages import page
        from jaxmem.pages.markup import together

        title, good, *parts = self._on_page(page)
        return title, together(page.headline(title, good), *parts)

    def _page(self) -> str:
        from jaxmem.pages.page import page

        return page(*self._html())

    def _repr_html_(self) -> str:
        from jaxmem.pages.page import piece

        return piece(self._html()[1])


class PlainResult(SavedResult):
    """A result that is plain data, which its JSON holds."""

    def to_json(self, indent: int | None = None) -> str:
        """All fields as JSON text; bytes are integers."""
        fields: Any = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]
        return json.dumps(fields, indent=indent)


def body_of(result: SavedResult) -> Any:
    """The body of a result's page, to be a part of another page."""
    return result._html()[1]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
