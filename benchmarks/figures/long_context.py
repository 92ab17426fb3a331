"""The figures of docs/long_context.md: lengths of one model, and published rows."""

from benchmarks.figures.rows import Row, figures, rows, table


def _pair(r: Row, of: str = "") -> str:
    return f"{float(r[f'{of}GB']):,.1f} / {float(r[f'{of}predicted ms']):,.0f}"


def _link(r: Row) -> str:
    return f"[{r['row']}]({r['link']})"


@figures("long context")
def lengths() -> str:
    head = (
        *("tokens", "H100s", "plain: GB / predicted ms", "GB / predicted ms"),
        *("GB in host memory", "tokens a second and chip", "call"),
    )
    plain = lambda r: (
        f"{float(r['plain GB']):,.1f} / {float(r['plain: predicted ms']):,.0f}"
    )
    cells = [
        (
            *(
                r["tokens"],
                r["H100s"],
                plain(r),
                _pair(r),
                f"{float(r['host GB']):,.0f}",
            ),
            *(f"{float(r['tokens a second']):,.0f}", f"`{r['typed']}`"),
        )
        for r in rows("long_context")
    ]
    return table(head, cells)


@figures("published rows")
def published_rows() -> str:
    head = (
        *("step", "published GB", "its recipe here: GB / predicted ms"),
        *("GB / predicted ms", "GB in host memory", "call"),
    )
    recipe = lambda r: (
        f"{float(r['recipe GB']):,.1f} / {float(r['recipe: predicted ms']):,.0f}"
    )
    cells = [
        (
            *(_link(r), f"{float(r['published GB']):g}", recipe(r), _pair(r)),
            *(f"{float(r['host GB']):,.0f}", f"`{r['typed']}`"),
        )
        for r in rows("published_rows")
    ]
    return table(head, cells)


@figures("published rows, notes")
def notes() -> str:
    """What each recipe is, and what differs from what was published."""
    found = rows("published_rows")
    return "\n".join(f"- {r['row']}: {r['recipe']}. {r['differs']}" for r in found)
