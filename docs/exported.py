"""The names that users call, from the lists of the packages themselves."""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "jaxmem",
    "jaxmem.accumulate",
    "jaxmem.advising",
    "jaxmem.auditing",
    "jaxmem.checking",
    "jaxmem.demo",
    "jaxmem.diffing",
    "jaxmem.explaining",
    "jaxmem.freezing",
    "jaxmem.linting",
    "jaxmem.memory",
    "jaxmem.monitoring",
    "jaxmem.nn",
    "jaxmem.nn.linen",
    "jaxmem.nn.nnx",
    "jaxmem.ops",
    "jaxmem.optim",
    "jaxmem.optim.accumulation",
    "jaxmem.planning",
    "jaxmem.rewriting",
    "jaxmem.scheduling",
    "jaxmem.testing",
)
API = Path(__file__).parent / "api"
# an entry of an API page: `.. autofunction:: jaxmem.estimate`
ENTRY = re.compile(
    r"^\.\. (?:auto(?:function|class|exception|module)|py:module):: ([\w.]+)$", re.M
)


def exported() -> Iterator[tuple[str, Any]]:
    """Every name of every package's `__all__`, with what it stands for."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            yield f"{package}.{name}", getattr(module, name)


def undocumented() -> list[str]:
    """Exported names without a docstring of their own, and their public methods."""
    missing = []
    for name, value in exported():
        if not _documented(value):
            missing.append(name)
        if inspect.isclass(value):
            missing += [f"{name}.{method}" for method in _bare_methods(value)]
    return missing


def entries() -> list[str]:
    """The names that have an entry on an API page, as often as they have one."""
    return [
        n for page in sorted(API.glob("*.md")) for n in ENTRY.findall(page.read_text())
    ]


@functools.cache
def full_name(short: str) -> str | None:
    """The one entry that ends in this name; words of prose and arguments have none."""
    if "." in short or not re.search(r"_|^[A-Z]", short):
        return None
    found = [name for name in entries() if name.endswith(f".{short}")]
    return found[0] if len(found) == 1 else None


def find(name: str) -> Any:
    """What a dotted name of jaxmem stands for."""
    value = importlib.import_module("jaxmem")
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def undescribed() -> list[str]:
    """Exported names that no API page describes, under this name or a shorter one."""
    shown = {id(find(name)) for name in entries()}
    return [name for name, value in exported() if id(value) not in shown]


def _documented(value: Any) -> bool:
    """A dataclass without a docstring has its signature instead."""
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    name = getattr(value, "__name__", "")
    return bool(own and own.strip()) and not own.startswith(f"{name}(")


def _bare_methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        value = getattr(value, "__func__", getattr(value, "fget", value))
        written = getattr(value, "__qualname__", "") == f"{cls.__qualname__}.{name}"
        if written and not name.startswith("_") and not value.__doc__:
            yield name
