"""Writes the figures of README.md and docs/ from the files in results/.

    python -m benchmarks.figures            # rewrites the marked blocks
    python -m benchmarks.figures --check    # exits 1, naming what would change

What stands between `<!-- figures: NAME -->` and `<!-- end of figures -->` is written by
the renderer NAME: a table on lines of its own, or a figure within a sentence. No figure
that a command measured is typed.
"""

import importlib
import pathlib
import re
import sys

from benchmarks.figures.rows import FIGURES, ROOT

RENDERERS = """
    advice devices faults five_bytes frontier headlines long_context measured needs
    optimizers placement readme results sentences tables techniques tiles time velora
    way_in
""".split()
for name in RENDERERS:  # they fill FIGURES
    importlib.import_module(f"benchmarks.figures.{name}")
MARKED = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[^>]*?) -->)"
    r"(?P<body>.*?)(?P<end><!-- end of figures -->)",
    re.DOTALL,
)
# Markdown takes a line that begins with a comment as HTML, with all that follows.
ASTRAY = re.compile(r"^[ ]*<!-- figures: ([^>]*?) -->[^\n]", re.MULTILINE)


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str) -> tuple[str, list[str]]:
    """The text with its figures as they are now, and the blocks that were otherwise.

    Raises:
      ValueError: a block has no renderer, or no end, or begins a line of a paragraph.
    """
    if astray := ASTRAY.search(text):
        raise ValueError(f"{astray[1]}: a figure must not begin a line")
    changed: list[str] = []

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in FIGURES:
            raise ValueError(f"no renderer of {name!r}")
        new = FIGURES[name]()
        if found["body"].startswith("\n"):
            new = f"\n{new}\n"
        if new != found["body"]:
            changed.append(name)
        return found["begin"] + new + found["end"]

    new = MARKED.sub(block, text)
    if len(MARKED.findall(text)) != text.count("<!-- figures:"):
        raise ValueError("a block of figures has no end")
    return new, changed


def names(text: str) -> set[str]:
    return {found["name"] for found in MARKED.finditer(text)}


def main() -> None:
    if unknown := set(sys.argv[1:]) - {"--check"}:
        sys.exit(f"unknown: {', '.join(unknown)}; known: --check")
    check, stale = "--check" in sys.argv, False
    for page in pages():
        text = page.read_text()
        try:
            new, changed = written(text)
        except ValueError as error:
            sys.exit(f"{page.relative_to(ROOT)}: {error}")
        for name in changed:
            print(f"{page.relative_to(ROOT)}: {name}")
        stale |= bool(changed)
        if new != text and not check:
            page.write_text(new)
    sys.exit(check and stale)
