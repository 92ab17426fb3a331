"""What to replace by what: the user's rules, tried before the built-in table."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmem._checks import check_callable, wrong_type, wrong_value

# The rewriter looks into no scope whose name starts with `jaxmem.`.
LEAVE_SCOPE = "jaxmem.leave"


@dataclass(frozen=True)
class Rule:
    """One rule of a substitution: which modules to replace, and with what.

    Args:
        match: a module class (its subclasses too), or a regular expression searched
            for in the module's path (`"encoder/layers_0/norm"`), or a tuple of both.
        replace: a jaxmem layer class, which takes over the attributes of the same
            name; or a function that is given the user's (bound) module and returns
            its replacement: a module that keeps the parameters' names, or
            a plain function of the call's arguments; or None, to leave the module and
            all inside it as it is.

    Raises:
        TypeError: when `match` or `replace` is none of these.
        ValueError: when a text is no regular expression, or empty.

    Example::

        class MyRMSNorm(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
                return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

        def lean_norm(module):
            scale = module.get_variable("params", "scale")
            return lambda x: jaxmem.ops.rms_norm(x, scale)

        rules = [jaxmem.nn.Rule(MyRMSNorm, lean_norm), jaxmem.nn.Rule("decoder/", None)]
        lean = jaxmem.substitute(MyRMSNorm(), rules=rules[:1])
    """

    match: type | str | tuple[type, str]
    replace: type | Callable[[Any], Callable] | None

    def __post_init__(self) -> None:
        allowed = "a class, a regular expression on the module path, or a tuple of both"
        if not self._parts:
            raise wrong_value("Rule: match", self.match, allowed)
        for part in self._parts:
            if not isinstance(part, str | type):
                raise wrong_type("Rule: match", self.match, allowed)
            if isinstance(part, str):
                _check_expression(part, self.match, allowed)
        if self.replace is not None:
            allowed = "a class, a function of the module, or None"
            check_callable("Rule: replace", self.replace, allowed)

    @property
    def _parts(self) -> tuple:
        return self.match if isinstance(self.match, tuple) else (self.match,)

    def matches(self, module: Any, path: str) -> bool:
        """Whether this rule speaks about `module` at `path`."""
        return all(
            re.search(part, path) is not None
            if isinstance(part, str)
            else isinstance(module, part)
            for part in self._parts
        )

    def __str__(self) -> str:
        names = [p if isinstance(p, str) else p.__name__ for p in self._parts]
        return " at ".join(map(repr, names))


def _check_expression(text: str, match: Any, allowed: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise wrong_value("Rule: match", match, f"{allowed}: {error}") from None
    if not text:
        raise wrong_value("Rule: match", match, f"{allowed} that is not empty")


def first_match(rules: tuple[Rule, ...], module: Any, path: str) -> Rule | None:
    """The first rule that speaks about `module`."""
    return next((rule for rule in rules if rule.matches(module, path)), None)
