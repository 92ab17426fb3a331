"""Words that readers stumbled over: what docs, help and messages may not say.

A phrase is refused in the pages, the README, the sources of the notebooks, the help of
the commands, and the string constants and public docstrings of the package. Comments
and private docstrings are free. What to write instead stands beside it.
"""

import ast
import pathlib
import re

import pytest
import typer.main

import jaxmem
from jaxmem.cli import app

PACKAGE = pathlib.Path(jaxmem.__file__).parent
ROOT = PACKAGE.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
INSTEAD = {
    # a phrase, in lower case -> what to write
    "that you need not have": "even if you do not have the chip",
    "need not be there": "that you do not need to have",
    "need not be present": "that you do not need to have",
    "need not be here": "that you do not need to have",
    "nothing need be allocated": "nothing has to be allocated",
    "than it need.": "than it needs",
    "chips that are not there": "absent chips, chips you do not have",
    "chip that is not there": "an absent chip",
    "chips that were not there": "absent chips",
    "devices that are not there": "absent devices",
    "a name that is not there": "an unknown name",
    "exchanges layers": "replaces layers",
    "for ones that keep less": "with versions that save less for the backward pass",
    "layers that keep less": "layers that save less for the backward pass",
    "fits into a number of bytes": "fits a memory budget",
    "fits the step into a number": "fits the step into a memory budget",
    "is it true?": "How were the numbers measured?",
    "what do i type": "Quick start",
    "what to type": "API",
    "your problem, the call": "Which API do I need?",
    "asked for by name": "opt-in",
    "in the place of": "instead of, replaces",
    "stands in the place": "replaces",
    "take the place of": "replace",
    "gradients exist at once": "gradients are live at once",
    "arrays exist at once": "arrays are live at once",
    "exist as a whole": "are live at once, are materialized",
    "layers that are written out": "unrolled layers",
    "attention written out": "plain XLA attention",
    "attention is written out": "plain XLA attention",
    "another second moment": "a different second-moment estimate",
    "another rule than": "a different update rule from",
    "are other rules than": "differ from",
    "as it was given": "the original step",
    "reports of the step as it was": "reports of the original step",
    "stay as they were": "do not change",
    "no order of its operations is below": "a lower bound",
    "what no order can do without": "a lower bound for any order",
    "no plan takes less": "a lower bound",
    "of these in donated arguments": "aliased with donated inputs",
    "next to nothing": "very little",
    "--version: print it": "Print the version and exit.",
    "made anew": "computed again, recomputed",
    "anew for": "again for",
    "searches anew": "searches again",
    "computed anew": "computed again",
    "written anew": "rewritten",
    "rows anew": "rows again",
    "held against": "compared with",
    "held to": "compared with, checked against",
    "stands beside": "is shown with, is compared with",
    "what is beyond that": "any further bytes",
    "a way round": "a workaround",
    "hands out": "returns",
    "equal to the bit": "bitwise equal",
    "bit for bit": "bitwise equal",
    "none but rounding": "rounding only",
    "error of memory": "out-of-memory error",
    "that memory has run out": "out-of-memory error",
    "memory to begin with": "out of memory at startup",
    "the least found": "the lowest peak found",
    "the least is": "the lowest peak is",
    "who holds what": "which buffer belongs to which operation",
    "not looked at yet": "not checked yet",
    "the pass that does it": "the pass that causes it",
    "wait for ever": "deadlock",
    "takes the copy away": "removes the copy",
    "the very value": "a value",
    "as one types": "as used",
    "of one's own": "your own",
    "somebody's own": "hand-written",
    "is no measure of": "say what it does not show",
    "are no measure of": "say what they do not show",
    "on wrong use": "on a usage error",
    "may be given again": "can be repeated",
    "wait in the host's memory": "are offloaded to the host",
    "base in few bits": "quantized base",
    "by the account of": "computed from",
    "what comes back": "the result",
    "in silence": "silently",
}


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).lower()


def _pattern(phrase: str) -> str:
    """Whole words, so that "held to" is not found in "upheld together"."""
    begin, end = (r"\b" if c.isalnum() else "" for c in (phrase[0], phrase[-1]))
    return begin + re.escape(phrase) + end


REFUSED = re.compile("|".join(map(_pattern, INSTEAD)))


def refused(text: str) -> list[str]:
    """What is wrong with a text, a line for each phrase."""
    found = dict.fromkeys(REFUSED.findall(_plain(text)))
    return [f'"{phrase}": write "{INSTEAD[phrase]}"' for phrase in found]


def _is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.Module) or getattr(node, "name", "").startswith("_")


def texts(source: str) -> list[tuple[int, str]]:
    """(line, text) of string constants and of docstrings of public names."""
    tree, skipped, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) and _is_private(node):
            skipped.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = (getattr(part, "value", "") for part in node.values)
            joined = "".join(x if isinstance(x, str) else "{}" for x in parts)
            found.append((node.lineno, joined))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skipped:
                found.append((node.lineno, node.value))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_standard_words(page):
    assert refused(page.read_text()) == []


def test_messages_and_docstrings_use_standard_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in texts(path.read_text())
        for what in refused(text)
    ]
    assert not found, "\n" + "\n".join(found)


def test_docstrings_are_read_without_a_formula_being_set():
    """Neither `help` nor the pages of the API set what LaTeX writes as $x_i$."""
    formula = re.compile(r"\$[^\s$][^$\n]*\$")
    assert formula.search("the gradient $g_i$ of each")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, text in docstrings(path.read_text())
        if formula.search(text)
    ]
    assert found == []


def docstrings(source: str) -> list[tuple[str, str]]:
    kinds = ast.ClassDef | ast.FunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [(node.name, ast.get_docstring(node) or "") for node in nodes]


def test_the_help_uses_standard_words():
    command = typer.main.get_command(app)
    for one in (command, *command.commands.values()):
        helps = (getattr(option, "help", None) for option in one.params)
        text = " | ".join(filter(None, (one.help, *helps)))
        assert refused(text) == [], one.name


def test_a_phrase_is_found_across_lines_and_as_whole_words():
    assert refused("It stands in the\n place   of jit.")
    assert not refused("What is upheld together counts; beheld today.")
    assert texts('def _f():\n    """free"""\nx = f"a {x} b"')[0] == (3, "a {} b")
