"""The code of documentation: blocks of a page, examples of docstrings."""

import builtins
import dis
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)


def examples(value: Any) -> list[str]:
    """The code below `Example::` in a docstring, and below later `::` of that part."""
    text = inspect.getdoc(value) or ""
    parts = re.split(r"^(?=[A-Z]\w*:)", text, flags=re.M)
    (part,) = [p for p in parts if p.startswith("Example::")] or [""]
    return [textwrap.dedent(block) for block in _literal_blocks(part)]


def _literal_blocks(text: str) -> list[str]:
    """The indented paragraphs after a line that ends in two colons."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = line.endswith("::")
            found += [[]] if inside else []
        elif inside:
            found[-1].append(line)
    return ["\n".join(lines).strip("\n") for lines in found]


def run(code: str, names: dict[str, Any], where: str) -> None:
    """Runs it as a user's script would: with JAX's own promotion of dtypes."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        compiled = compile(code, where, "exec")
        exec(compiled, names)
    missing = {name for name in _globals(compiled) if name not in names}
    assert missing <= set(dir(builtins)), f"{where}: {missing} are not defined"


def _globals(code: types.CodeType) -> Iterator[str]:
    """The names that it reads from the module, those of functions not called too."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals(inner)
