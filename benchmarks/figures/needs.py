"""The figures of docs/needs.md: known models by training method."""

from benchmarks.figures.rows import Row, figures, rows, table


@figures("needs")
def needs() -> str:
    head = (
        *("model", "parameters", "a step", "chip", "method"),
        *("GB", "predicted ms", "fits one chip"),
    )
    return table(head, list(map(_line, rows("needs"))))


def _line(r: Row) -> list[str]:
    size = f"{float(r['GB']):,.1f}" if r["GB"] else ""
    ms = f"{float(r['predicted ms']):,.0f}" if r["predicted ms"] else ""
    count = int(r["parameters"]) / 1e6
    count = f"{count:,.0f} million" if count < 1e3 else f"{count / 1e3:,.2f} billion"
    return [r["model"], count, r["batch"], r["chip"], r["method"], size, ms, _fits(r)]


def _fits(r: Row) -> str:
    if not r["GB"]:
        return ""
    return "yes" if float(r["GB"]) <= float(r["chip GB"]) else "no"
