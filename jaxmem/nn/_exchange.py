"""Rules for the modules of frameworks that have no lean layers here."""

from collections.abc import Callable
from typing import Any

from jaxmem.nn._rules import Rule, first_match
from jaxmem.nn._substitution_report import Recorder


def exchange_by_rules(
    rules: tuple[Rule, ...], recorder: Recorder
) -> Callable[[str, Any], Any | None]:
    """(path, module) -> what takes its place; None where no rule speaks about it."""

    def change(path: str, module: Any) -> Any | None:
        rule = first_match(rules, module, path)
        if rule is None:
            return None
        recorder.use(rule)
        if rule.replace is None:
            recorder.left(path, module, f"left by rule {rule}")
            return module
        name = getattr(rule.replace, "__name__", str(rule.replace))
        recorder.replaced(path, module, name, f"by rule {rule}")
        return rule.replace(module)

    return change
