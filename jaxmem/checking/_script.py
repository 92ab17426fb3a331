"""A Python file that runs a check again: functions by name, arrays from beside it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem.checking._compare import StepComparison
from jaxmem.checking._guilty import rewritable
from jaxmem.ir import jaxprs

MOST_BYTES = 256 * 2**20  # of arrays that are written beside the script

_TEMPLATE = '''\
"""A check that found a difference, to be run again: python {name}"""

import pathlib
import sys

{folders}
{imports}

{fetch}


step = {step}
reference = {reference}
args = {args}
kwargs = {kwargs}
report = jaxmem.check(step, reference, *args, **kwargs, {how})
print(report)
raise SystemExit(0 if report else 1)
'''
_SAVED = """\
ARRAYS = np.load(pathlib.Path(__file__).with_suffix(".npz"))


def array(number, dtype):
    return jnp.asarray(ARRAYS[f"a{number}"].view(dtype))"""
_DRAWN = '''\
RANDOM = np.random.default_rng(0)


def array(shape, dtype):
    """At random: the arrays themselves were too large to write."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(0.02 * RANDOM.standard_normal(shape), dtype)
    return jnp.asarray(RANDOM.integers(0, 2, shape), dtype)'''
_KEYS = """


def key(data, impl):
    return jax.random.wrap_key_data(data, impl=impl)"""


@dataclass(frozen=True)
class Reproduction:
    """A check that was made, and what it takes to make it again."""

    step: Callable
    comparison: StepComparison

    def __call__(self, path: str | PathLike[str]) -> None:
        file, of = Path(path), self.comparison
        written = _ScriptText(_bytes(of.arguments) <= MOST_BYTES)
        args, kwargs = map(written.expression, of.arguments)
        step = written.function("step", self.step)
        reference = written.function("reference", of.reference)
        options: dict[str, Any] = {"steps": of.steps, "carry": of.asked}
        options["static_argnums"] = [p for p in of.static if isinstance(p, int)]
        options["static_argnames"] = [p for p in of.static if isinstance(p, str)]
        how = ", ".join(f"{k}={v!r}" for k, v in options.items() if v not in (None, []))
        fetch = _SAVED if written.saves else _DRAWN
        text = _TEMPLATE.format(
            name=file.name,
            folders="".join(f"sys.path.insert(0, {f!r})\n" for f in written.folders),
            imports="\n".join(sorted(written.imports)),
            fetch=fetch + _KEYS,
            step=step,
            reference=reference,
            args=args,
            kwargs=kwargs,
            how=how,
        )
        file.write_text(text, encoding="utf-8")
        if written.saves:
            np.savez(file.with_suffix(".npz"), allow_pickle=False, **written.arrays)


class _ScriptText:
    """Expressions of values, with the modules and arrays that they need."""

    def __init__(self, saves: bool):
        self.saves = saves
        self.arrays: dict[str, np.ndarray] = {}
        self.imports = {
            *("import jax", "import jax.numpy as jnp", "import jaxmem"),
            "import numpy as np",
        }
        self.folders: set[str] = set()  # from which modules are imported

    def expression(self, value: Any) -> str:
        """Python that makes a pytree like this one."""
        if jaxprs.is_array(value):
            return self._array(value)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        if type(value) is dict:
            items = (f"{k!r}: {self.expression(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        if type(value) is list:
            return f"[{', '.join(map(self.expression, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self.expression(v)}, ' for v in value)})"
        names = getattr(value, "_fields", None)
        if isinstance(value, tuple) and names is not None:
            fields = [f"{k}={self.expression(getattr(value, k))}" for k in names]
            name = self._name(type(value))
            return f"{name}({', '.join(fields)})" if name else _to_fill(value)
        return self._name(value) or _to_fill(value)

    def function(self, title: str, fn: Any) -> str:
        """An expression of a function of the user's, or what is to be filled in."""
        if name := self._name(fn):
            return name
        inner = getattr(fn, "__wrapped__", None)
        own = "" if inner is None else self._name(inner)
        if own and rewritable(fn) is not None:
            options = (f"{k}={v!r}" for k, v in fn.options().items())
            return f"jaxmem.schedule({', '.join([own, *options])})"
        like = f", made of {own}" if own else ""
        return f"...  # fill in the {title}: {_told(fn)}{like}, has no name to import"

    def _array(self, value: Any) -> str:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value))
            return f"key({self._array(jax.random.key_data(value))}, {impl!r})"
        if not self.saves:
            return f"array({tuple(value.shape)}, {value.dtype.name!r})"
        number = len(self.arrays)
        # numpy's files know no narrow floats: their bits are written
        x = np.asarray(value)
        bits = f"V{x.dtype.itemsize}" if x.dtype.kind == "V" else x.dtype
        self.arrays[f"a{number}"] = x.view(bits)
        return f"array({number}, jnp.dtype({value.dtype.name!r}))"

    def _note_folder(self, module: str) -> None:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or any(part in file for part in _INSTALLED):
            return
        depth = module.count(".") + (Path(file).name == "__init__.py")
        self.folders.add(str(Path(file).resolve().parents[depth]))

    def _name(self, value: Any) -> str:
        """`module.name` of what can be imported; empty of all else."""
        module = getattr(value, "__module__", None) or ""
        name = getattr(value, "__qualname__", "")
        if not module or not name or _found(module, name) is not value:
            return ""
        if module == "__main__":
            module = Path(getattr(sys.modules["__main__"], "__file__", "") or "").stem
            if not module.isidentifier():
                return ""
        self.imports.add(f"import {module}")
        self._note_folder(module)
        return f"{module}.{name}"


_INSTALLED = ("site-packages", "dist-packages")


def _found(module: str, name: str) -> Any:
    value = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _told(value: Any) -> str:
    try:
        where = f" in {Path(inspect.getfile(value)).name}"
    except TypeError:
        where = ""
    return f"{getattr(value, '__qualname__', type(value).__qualname__)}{where}"


def _to_fill(value: Any) -> str:
    """What the user has to write: an object that no expression makes."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"...\n    # fill in: a {kind}\n    "


def _bytes(tree: Any) -> int:
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))
