"""Every rule in the fewest bytes a parameter, and the loss it then trains to."""

import functools
from collections.abc import Iterable

from benchmarks.figures.rows import Row, figures, row, rows, table, value

NAME, ADAMW = "five_bytes", "AdamW, float32"
MOST = 5.0  # bytes a parameter
# a page of docs/optimizers -> the rules that it describes
FAMILIES = {
    "low bit": ("AdamW",),
    "lion": ("Lion",),
    "schedule-free": ("Schedule-free AdamW",),
    "muon": ("Muon",),
    "preconditioned": ("SOAP", "Shampoo"),
    "factored": ("CAME", "Adam-mini", "SM3", "Adafactor", "AdaLomo"),
    "low rank": ("GaLore", "APOLLO", "APOLLO-Mini"),
}
TOGETHER = "bytes a parameter"


def spread(r: Row) -> float:
    """Of the seeds of the same rule in float32: the largest less the smallest loss."""
    seeds = [float(x) for column, x in wide(r).items() if column.startswith("seed")]
    return max(seeds) - min(seeds)


def wide(r: Row) -> Row:
    """The same rule in float32."""
    return row(NAME, {"optimizer": r["rule"]})


def lost(r: Row) -> float:
    """How much larger the mean loss is than that of the same rule in float32."""
    return float(r["mean"]) - float(wide(r)["mean"])


def within(r: Row) -> bool:
    return lost(r) <= spread(r)


def narrow() -> list[Row]:
    """The rows in few bytes."""
    return [r for r in rows(NAME) if r["rule"]]


def fits(r: Row) -> bool:
    return float(r[TOGETHER]) <= MOST


@figures("five bytes")
def five_bytes() -> str:
    plain = value(NAME, "mean", {"optimizer": ADAMW})
    parts = "weights", "gradients", "state", TOGETHER, "with all gradients"

    def line(r: Row) -> list[str]:
        loss = float(r["mean"])
        sizes = [f"{float(r[part]):.2f}" for part in parts]
        cells = [f"{loss:.3f}", f"{loss - plain:+.3f}", *_beside(r), r["rate"]]
        return [r["optimizer"], *sizes, *cells]

    head = ["Llama-7B, bytes a parameter", "weights", "gradients", "state"]
    head += ["sum", "sum with all gradients", "loss of a small GPT"]
    head += ["against float32 AdamW", *_BESIDE, "rate"]
    return table(head, map(line, rows(NAME)))


def of_family(rules: Iterable[str]) -> str:
    """Bytes and losses of the rows of a page."""
    wanted = [f"{rule}, float32" for rule in rules]
    found = [r for r in rows(NAME) if (r["rule"] or r["optimizer"]) in wanted]
    lines = (
        [r["optimizer"], f"{float(r[TOGETHER]):.2f}", f"{float(r['mean']):.3f}"]
        + _beside(r)
        for r in found
    )
    head = "after 1,000 steps", "Llama-7B, bytes a parameter", "loss of a small GPT"
    return table((*head, *_BESIDE), lines)


for _family, _rules_of_it in FAMILIES.items():
    _render = functools.partial(of_family, _rules_of_it)
    figures(f"five bytes, {_family}")(_render)


_BESIDE = "against itself in float32", "spread of its seeds", "within the spread"


def _beside(r: Row) -> list[str]:
    if not r["rule"]:
        return ["", "", ""]
    said = "yes" if within(r) else "no"
    return [f"{lost(r):+.3f}", f"{spread(r):.3f}", said]


@figures("five bytes, reached")
def reached() -> str:
    """The rules that have a row which fits and loses no more than its seeds."""
    found = [r for r in narrow() if fits(r) and within(r)]
    return f"{len(_rules(found))} of {len(_rules(narrow()))}"


@figures("five bytes, not reached")
def not_reached() -> str:
    """The rules without such a row, and by how much their best one that fits is off."""
    done = _rules(r for r in narrow() if fits(r) and within(r))
    left = [rule for rule in _rules(narrow()) if rule not in done]

    def said(rule: str) -> str:
        own = [r for r in narrow() if r["rule"] == rule and fits(r)]
        best = min(own, key=lost)
        return f"{_short(best)}: {lost(best):+.3f}, spread {spread(best):.3f}"

    return "; ".join(map(said, left)) or "none"


@figures("five bytes, all gradients")
def with_all_gradients() -> str:
    """The rows that fit with the gradients of the whole model, and are within."""
    found = [r for r in narrow() if float(r["with all gradients"]) <= MOST]
    return "; ".join(_short(r) for r in found if within(r)) or "none"


@figures("five bytes, above")
def above() -> str:
    """The rows that are larger."""
    found = (f"{_short(r)}: {r[TOGETHER]}" for r in narrow() if not fits(r))
    return "; ".join(found) or "none"


def _short(r: Row) -> str:
    return r["optimizer"].removesuffix(", bfloat16")


def _rules(found: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(r["rule"] for r in found))
