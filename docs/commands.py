"""Writes the commands into `command_line.md`, from their own help, and the exit codes.

python docs/commands.py           # writes
python docs/commands.py --check   # exits with 1 where something is not as written
"""

import inspect
import pathlib
import re
import sys
import typing
from enum import Enum

from jaxmem.cli import EXIT_CODES, app

PAGE = pathlib.Path(__file__).with_name("command_line.md")
BLOCKS = "commands", "exit codes"


def written(text: str) -> str:
    """The page with the commands and exit codes as they are now."""
    commands = "\n".join(map(section, app.registered_commands))
    rows = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    codes = f"| code | meaning |\n|---|---|\n{rows}"
    for title, block in zip(BLOCKS, (f"\n{commands}\n", codes), strict=True):
        head, rest = text.split(f"<!-- {title} -->\n")
        tail = rest.split(f"<!-- end of {title} -->")[1]
        text = f"{head}<!-- {title} -->\n{block}<!-- end of {title} -->{tail}"
    return text


def section(command) -> str:
    """One command: its title, what it does, and a table of its options."""
    text = inspect.cleandoc(command.callback.__doc__)
    # an indented block of code, as the help shows it
    code = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)
    text = code.sub(lambda m: f"```python\n{inspect.cleandoc(m[0])}\n```\n", text)
    rows = "\n".join(options(command.callback))
    head = "| option | what it does |\n|---|---|"
    return f"## jaxmem {command.name}\n\n{text}\n\n{head}\n{rows}\n"


def options(function):
    """The rows of the table: name, value, help, default."""
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, info = typing.get_args(hints[parameter.name])[:2]
        # typer has the first of the names where a default would stand
        given = [info.default, *(getattr(info, "param_decls", None) or ())]
        names = [x for x in given if isinstance(x, str) and x.startswith("--")]
        name = names[0] if names else f"--{parameter.name.replace('_', '-')}"
        value = info.metavar or _values(kind)
        if type(info).__name__ == "ArgumentInfo":
            label = f"`{info.metavar or parameter.name.upper()}`"
        else:
            label = f"`{f'{name} {value}'.strip()}`"
        yield f"| {label} | {_described(info.help, parameter.default)} |"


def _values(kind) -> str:
    inner = [k for k in typing.get_args(kind) or (kind,) if k is not type(None)][0]
    inner = next(iter(typing.get_args(inner)), inner)  # of a list
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "|".join(item.value for item in inner).replace("|", r"\|")
    if inner is bool:
        return ""
    names = {int: "N", float: "X", pathlib.Path: "PATH"}
    return names.get(inner, "TEXT")


def _described(text: str | None, default) -> str:
    text = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", text or "")
    text = f"{text.rstrip('.')}." if text and not text.endswith(".") else text
    if default in (None, False, inspect.Parameter.empty):
        return text
    shown = default.value if isinstance(default, Enum) else default
    return f"{text} Default: `{shown}`.".strip()


def main() -> None:
    text = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(written(text))
    elif written(text) != text:
        sys.exit(f"{PAGE.name} is not the commands' help: python docs/commands.py")


if __name__ == "__main__":
    main()
