"""HTML from Python: text is escaped unless it is HTML already."""

import json
from html import escape
from typing import Any


class Markup(str):
    """HTML, which is not escaped a second time."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `data_m=1` stands for `data-m="1"`, and `class_` for `class`."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{together(*children)}</{name}>")


def together(*children: object) -> Markup:
    """Children beside each other."""
    return Markup(
        "".join(c if isinstance(c, Markup) else escape(str(c)) for c in children)
    )


def data(value: Any) -> Markup:
    """A value as JSON that a script in the page reads."""
    # `</script>` in a string would end the element.
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')
