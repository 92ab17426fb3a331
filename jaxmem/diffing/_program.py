"""A step as a jaxpr, and the same as a Python function of plain JAX.

The text is what is compiled, in this interpreter or in another one, and what a reduced
program is kept as between two reductions: tracing it again removes its dead code.
"""

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxmem._checks import check_places
from jaxmem.chips import get_target
from jaxmem.diffing._expressions import NAMESPACE, signature, value
from jaxmem.diffing._opened import opened
from jaxmem.diffing._writer import ProgramWriter
from jaxmem.frameworks import pure_call
from jaxmem.ir import jaxprs
from jaxmem.memory.compile import traced_call

_WIDTH = 88
_HEAD = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

S = jax.ShapeDtypeStruct
"""


@dataclass(frozen=True)
class Program:
    """A step: its jaxpr without calls, and which of its arguments are donated."""

    closed: Any
    donated: tuple[bool, ...]

    @classmethod
    def of_step(cls, step: Callable, args: tuple, options: dict) -> "Program":
        """The program of a step with its arguments and options of `estimate`."""
        places = lambda kind: _places(options, kind)
        chip = get_target(options.get("target"), check=False)
        with pure_call(
            step, args, {}, places("donate"), places("static") or ()
        ) as pure:
            traced = traced_call(step, pure, chip)
            donated = tuple(leaf.donated for leaf in traced.call.leaves)
            return cls(opened(traced.traced.jaxpr), donated)

    @classmethod
    def of_text(cls, text: str, name: str = "step") -> "Program":
        """The program that `text` is of."""
        fn, args, donated = loaded(text, name)
        closed = opened(jax.make_jaxpr(fn)(*args))
        return cls(closed, tuple(i in donated for i in range(len(args))))

    @cached_property
    def equations(self) -> tuple[tuple, ...]:
        """What each equation computes, those of bodies after the one around them."""
        return tuple(map(signature, jaxprs.walk(self.closed)))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The type of each output."""
        return tuple(str(v.aval) for v in self.closed.jaxpr.outvars)

    def text(
        self,
        name: str = "step",
        removed: Collection[int] = (),
        outputs: Collection[int] | None = None,
        bypass: bool = False,
    ) -> str:
        """A function of this name, its arguments, and which of them are donated.

        Args:
          name: of the function; its arguments are in `NAME_args`.
          removed: the numbers of equations that are left out. What they compute becomes
            arguments.
          outputs: the numbers of the outputs that are kept, all by default.
          bypass: what a removed equation computes is its first operand of that type, if
            it has one.

        Raises:
          UnwritableError: an operation cannot be written as plain JAX.
        """
        jaxpr, written = self.closed.jaxpr, ProgramWriter(frozenset(removed), bypass)
        for v in (*jaxpr.constvars, *jaxpr.invars):
            written.argument(v)
        lines = written.lines(jaxpr)
        kept = range(len(jaxpr.outvars)) if outputs is None else outputs
        lines.append(f"return {written.tuple([jaxpr.outvars[i] for i in kept])}")
        args = {v: n for v, n in written.arguments.items() if n in written.read}
        marks = dict(zip(jaxpr.invars, self.donated, strict=True))
        donated = [i for i, v in enumerate(args) if marks.get(v)]
        statements = (
            f"def {name}({', '.join(args.values())}):",
            *(f"    {line}" for line in lines),
            *("", ""),
            f"{name}_args = [{', '.join(_specs(args))}]",
            f"{name}_donated = {donated}",
        )
        wrapped = (_wrapped(one) or [""] for one in statements)
        return "".join(f"{line}\n" for lines in wrapped for line in lines)


def loaded(text: str, name: str = "step") -> tuple[Callable, list, list[int]]:
    """The function of a program's text, its arguments, and which are donated."""
    found: dict[str, Any] = {**NAMESPACE, "S": jax.ShapeDtypeStruct}
    exec(compile(text, f"<{name}>", "exec"), found)
    return found[name], found[f"{name}_args"], found[f"{name}_donated"]


def script(about: str, texts: dict[str, str]) -> str:
    """A Python file that compiles programs on this device and prints their bytes.

    Args:
      about: what it shows.
      texts: by the names of their functions.
    """
    quoted = "\n".join(textwrap.wrap(f'"""{about}"""', _WIDTH))
    body = "\n\n".join(texts.values())
    head = "".join(
        line
        for line in _HEAD.splitlines(keepends=True)
        if not line.endswith(("numpy as jnp\n", "numpy as np\n", "primitives\n"))
        or f"{line.split()[-1]}." in body
    )
    if jax.config.read("jax_enable_x64"):
        head += 'jax.config.update("jax_enable_x64", True)\n'
    programs = ", ".join(f'("{n}", {n}, {n}_args, {n}_donated)' for n in texts)
    head, body = head.rstrip(), body.rstrip()
    line = "\n".join(_wrapped(f"for name, step, args, donated in [{programs}]:"))
    return f"{quoted}\n\n{head}\n\n\n{body}\n\n{line}\n{_MEASURE}"


_MEASURE = """\
    compiled = jax.jit(step, donate_argnums=donated).lower(*args).compile()
    print(f"{name}:", compiled.memory_analysis().temp_size_in_bytes)  # bytes
"""


def _specs(variables: Iterable[Any]) -> Iterator[str]:
    """The types of arguments, equal ones that follow each other together."""
    for spec, same in itertools.groupby(map(_spec, variables)):
        count = len([*same])
        yield spec if count == 1 else f"*[{spec}] * {count}"


def _spec(v: Any) -> str:
    aval = v.aval
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return f"S({value(aval.shape)}, jax.random.key(0).dtype)"
    return f'S({value(aval.shape)}, "{aval.dtype.name}")'


def _wrapped(line: str) -> list[str]:
    """A statement in lines of a page's width, broken inside of brackets alone."""
    indent = line[: len(line) - len(line.lstrip())]
    # no line may end at an equals sign, which stands in no brackets
    text = line.strip().replace(" = ", "\0=\0").replace("def ", "def\0")
    text = text.replace("return ", "return\0")
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [one.replace("\0", " ") for one in lines]


def _places(options: dict[str, Any], kind: str) -> tuple[Any, ...] | None:
    """The places that options name; None where they name none."""
    named = {
        k: options[k] for k in (f"{kind}_argnums", f"{kind}_argnames") if k in options
    }
    return check_places(**named) or None
