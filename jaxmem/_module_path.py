"""From XLA's `op_name` to the module path that a user knows.

`jit(f)/jvp(Bert)/layers/while/body/closed_call/attention/query/dot_general` is
`dot_general` in `Bert/layers/attention/query`, in the forward pass.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxmem import _compat

# Parts of a path that tracing adds. `body`, `cond` and `branch_N_fun` count as such
# after their `while` or `cond` only, because a module may have these names.
_NOISE = frozenset(
    "while closed_call eval_jaxpr core_call checkpoint remat remat2 pjit scan"
    " rematted_computation custom_jvp_call custom_vjp_call custom_lin cond"
    " custom_vjp_call_jaxpr shard_map pallas_call switch call_exported".split()
)
_AFTER = {"while": ("body", "cond", "body_jaxpr", "cond_jaxpr")}
_WRAPPERS = frozenset("jvp transpose vmap pmap xmap linearize".split())
_BRANCH = re.compile(r"branch_\d+_fun$")
# Iterations of a loop in which a `cond` takes its true branch, which a schedule knows.
_TAKEN = re.compile(r"taken_in_(\d+)_of_(\d+)$")
_NUMBER = re.compile(r"^(.*?)(\d+)$")
_MANY = 4  # layers whose numbers are replaced by a star
_OWN = "jaxmem."  # the scopes of this package's ops begin with it


@dataclass(frozen=True)
class OpName:
    """The module path, the operation, and the pass that an `op_name` tells."""

    module_path: str
    operation: str
    backward: bool
    recomputed: bool


def parse_op_name(op_name: str) -> OpName:
    """Splits an `op_name` of the HLO metadata."""
    # XLA:CPU joins the names of operations that it merges with semicolons.
    parts = _split(op_name.partition(";")[0])
    operation = parts[-1] if parts and "(" not in parts[-1] else ""
    scopes = parts[:-1] if operation else parts
    backward = "transpose(" in op_name
    modules, jitted = _modules(scopes, backward)
    einsum = modules.pop() if modules and "->" in modules[-1] else ""
    prefix = "" if jitted.startswith("<") or len(scopes) < 2 else jitted.lstrip("_")
    return OpName(
        module_path="/".join(modules),
        operation="/".join(p for p in (einsum or prefix, operation) if p),
        backward=backward,
        recomputed=_compat.RECOMPUTED in op_name,
    )


def taken_in(count: int, iterations: int) -> str:
    """The name scope of a `cond` that takes its true branch in so many iterations."""
    return f"taken_in_{count}_of_{iterations}"


def share_taken(op_name: str) -> float | None:
    """Of a `cond`'s iterations, in how many it takes its true branch, if that is known.

    `op_name`: of the conditional; None where no schedule has made it.
    """
    scopes = map(_TAKEN.match, op_name.split("/"))
    found = next((match for match in reversed([*scopes]) if match), None)
    return None if found is None else int(found[1]) / int(found[2])


def without_repetition(path: str) -> str:
    """`M/norm/norm` and `M/norm/M/norm` without the repetition that `grad` makes."""
    parts = path.split("/")
    for size in range(len(parts) // 2, 0, -1):
        if parts[-size:] == parts[-2 * size : -size]:
            return "/".join(parts[:-size])
    return path


def _modules(scopes: list[str], backward: bool) -> tuple[list[str], str]:
    """The modules in the parts of an `op_name`, and the function jitted last."""
    modules, jitted, previous = [], "", ""
    # The backward pass of a `custom_vjp` repeats the path that it is in, once in each
    # body of a loop, up to the `checkpoint` of the op. Inside the user's own
    # `checkpoint` it does not.
    begin, repeats = 0, backward
    for part in scopes:
        scope, jitted = _unwrap(part)
        if scope and not _is_noise(scope, previous):
            if scope != part and modules[:1] == [scope]:
                modules, begin, repeats = [], 0, False
            modules.append(scope)
        elif scope:
            if scope == "checkpoint" and repeats:
                modules[begin:] = _without_repeats(modules[begin:], of_users=True)
            begin = len(modules)
            repeats = backward and "checkpoint" not in (scope, previous)
        previous = part
    return _without_repeats(modules), jitted


def _without_repeats(path: list[str], of_users: bool = False) -> list[str]:
    """A path without immediate repeats of what holds a scope of this package.

    With `of_users` a repeated run of the user's modules goes too, if such a scope
    follows it.
    """
    for size in range(len(path) // 2, 0, -1):
        for i in range(len(path) - 2 * size + 1):
            run, rest = path[i : i + size], path[i + size :]
            own = ops_in("/".join(rest if of_users else run))
            if own and rest[:size] == run:
                return _without_repeats(path[:i] + rest)
    return path


def of_user(module_path: str) -> str:
    """A module path without the scopes that this package's own ops open."""
    return "/".join(p for p in module_path.split("/") if not p.startswith(_OWN))


def ops_in(module_path: str) -> str:
    """The innermost op of this package in a module path, "jaxmem.dense", or ""."""
    own = [p for p in module_path.split("/") if p.startswith(_OWN)]
    return own[-1] if own else ""


def merge_numbered(paths: Iterable[str]) -> dict[str, str]:
    """`Bert/layers_7/mlp` -> `Bert/layers_*/mlp`, where there are many such layers."""
    paths = list(dict.fromkeys(paths))
    siblings = defaultdict(set)
    for path in paths:
        for parent, stem, number in _numbered(path):
            siblings[parent, stem].add(number)
    many = {key for key, numbers in siblings.items() if len(numbers) >= _MANY}
    return {path: _merged(path, many) for path in paths}


def _split(op_name: str) -> list[str]:
    """Splits at the slashes outside of parentheses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(op_name):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            parts.append(op_name[start:i])
            start = i + 1
    return [p for p in [*parts, op_name[start:]] if p]


def _unwrap(part: str) -> tuple[str, str]:
    """`transpose(jvp(Bert))` -> ("Bert", ""); `jit(silu)` -> ("", "silu")."""
    while (at := part.find("(")) >= 0 and part.endswith(")"):
        name, inner = part[:at], part[at + 1 : -1]
        if name in ("jit", "pjit"):
            return "", inner
        if name not in _WRAPPERS:
            return ("" if name in _NOISE else part), ""
        part = inner
    return part, ""


def _is_noise(part: str, previous: str) -> bool:
    return (
        part in _NOISE
        or bool(_TAKEN.match(part))
        or part in _AFTER.get(previous, ())
        or (previous == "cond" and bool(_BRANCH.match(part)))
    )


def _numbered(path: str) -> list[tuple[str, str, str]]:
    """(parent, stem, number) of each part that ends in a number."""
    parts = [(parent, *split) for parent, split in _parts(path)]
    return [(parent, stem, number) for parent, stem, number in parts if number]


def _merged(path: str, many: set[tuple[str, str]]) -> str:
    return "/".join(
        stem + ("*" if (parent, stem) in many and number else number)
        for parent, (stem, number) in _parts(path)
    )


def _parts(path: str) -> list[tuple[str, tuple[str, str]]]:
    """Each part as stem and number, with its parents' stems before it."""
    parts, parent = [], ""
    for part in path.split("/"):
        match = _NUMBER.match(part)
        stem, number = (match.group(1), match.group(2)) if match else (part, "")
        parts.append((parent, (stem, number)))
        parent += f"/{stem}*" if number else f"/{part}"
    return parts
