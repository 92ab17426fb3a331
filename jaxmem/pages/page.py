"""A page, or a piece of one for a notebook, with its style and script inside.

Neither loads anything from a network: the page's own policy forbids it.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from jaxmem.pages.markup import Markup, tag, together

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: Markup) -> str:
    """A whole document."""
    head = together(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
    )
    inside = tag("body", tag("main", Markup(piece(body))), class_="jm-page")
    html = tag("html", tag("head", head), inside, lang="en")
    return f"<!doctype html>\n{html}\n"


def piece(body: Markup) -> str:
    """What a notebook shows: the body with its style and script."""
    style, script = Markup(_asset("page.css")), Markup(_asset("page.js"))
    return tag("div", tag("style", style), body, tag("script", script), class_="jm")


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()
) -> Markup:
    """A table whose columns `numbers` are aligned at the right."""
    right = {i: "jm-n" for i in numbers}

    def row(cells: Sequence[object], kind: str) -> Markup:
        columns = enumerate(cells)
        return tag("tr", *(tag(kind, c, class_=right.get(i)) for i, c in columns))

    return tag(
        "div",
        tag(
            "table",
            tag("thead", row(head, "th")) if head else "",
            tag("tbody", *(row(cells, "td") for cells in rows)),
        ),
        class_="jm-table",
    )


def headline(text: str, good: bool | None = None) -> Markup:
    """The first line; green where `good`, red where not, plain where None."""
    colour = {True: " jm-good", False: " jm-bad", None: ""}[good]
    return tag("p", text, class_=f"jm-headline{colour}")


def lines(title: str, sentences: Iterable[str]) -> Markup:
    """A titled list; nothing where there is no sentence."""
    items = [tag("li", sentence) for sentence in sentences]
    return together(tag("h3", title), tag("ul", *items)) if items else Markup()


def code(title: str, text: str) -> Markup:
    """A titled piece of code; nothing where there is none."""
    return together(tag("h3", title), tag("pre", text)) if text else Markup()


@cache
def _asset(name: str) -> str:
    return files("jaxmem.pages").joinpath(name).read_text(encoding="utf-8")
