"""The figures of docs/long_context.md: lengths of one model, and published rows."""

from benchmarks.figures.rows import Row, figures, rows, table


def _both(r: Row, size: str = "GB", ms: str = "predicted ms") -> str:
    return f"{float(r[size]):,.1f} / {float(r[ms]):,.0f}"


def _whole(r: Row, column: str) -> str:
    return f"{float(r[column]):,.0f}"


@figures("long context")
def lengths() -> str:
    head = (
        *("tokens", "H100s", "plain: GB / predicted ms", "GB / predicted ms"),
        *("GB in host memory", "tokens a second and chip", "call"),
    )
    return table(head, list(map(_length, rows("long_context"))))


def _length(r: Row) -> list[str]:
    plain = _both(r, "plain GB", "plain: predicted ms")
    rest = _whole(r, "host GB"), _whole(r, "tokens a second"), f"`{r['typed']}`"
    return [r["tokens"], r["H100s"], plain, _both(r), *rest]


@figures("published rows")
def published_rows() -> str:
    head = (
        *("step", "published GB", "its recipe here: GB / predicted ms"),
        *("GB / predicted ms", "GB in host memory", "call"),
    )
    return table(head, list(map(_published, rows("published_rows"))))


def _published(r: Row) -> list[str]:
    name, size = r["row"], r["published GB"]
    name = f"[{name}]({r['link']})" if r["link"] else name
    size = f"{float(size):g}" if size else ""  # of some only buffers were published
    recipe = _both(r, "recipe GB", "recipe: predicted ms")
    return [name, size, recipe, _both(r), _whole(r, "host GB"), f"`{r['typed']}`"]


@figures("published rows, notes")
def notes() -> str:
    """What each recipe is, and what differs from what was published."""
    found = rows("published_rows")
    return "\n".join(f"- {r['row']}: {r['recipe']}. {r['differs']}" for r in found)
