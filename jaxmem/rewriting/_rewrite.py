"""`rewrite` and `find`: a function with the formulas in it replaced, and the report."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._checks import check_callable, wrong_type
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.rewriting._auto import auto_save, is_marked
from jaxmem.rewriting._bodies import with_bodies
from jaxmem.rewriting._find import Match
from jaxmem.rewriting._flat_graph import (
    FlatGraph,
    FlatValue,
    Frame,
    Node,
    build,
    inputs_of,
)
from jaxmem.rewriting._library import LIBRARY
from jaxmem.rewriting._pattern import Pattern
from jaxmem.rewriting._plan import RewritePlan, plan_rewrites


@dataclass(frozen=True)
class Site:
    """A place where a pattern was seen.

    Attributes:
      pattern: its name.
      shape: of the array the formula gives.
      dtype: of that array.
      path: the name scopes (the modules) it is in.
      source: file, line and function.
      reason: empty where it was replaced; else why it was left.
    """

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    path: str
    source: str
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.pattern} {self.dtype}{list(self.shape)}"
        text += f" in {self.path}" if self.path else ""
        return f"{text} at {self.source}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Report:
    """What `find` saw.

    Attributes:
      replaced: the formulas that are replaced.
      left: formulas recognised and left, with the reason.
      unused: names of patterns that matched nothing.
    """

    replaced: tuple[Site, ...]
    left: tuple[Site, ...]
    unused: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How often each pattern was found."""
        return dict(Counter(site.pattern for site in self.replaced))

    def __str__(self) -> str:
        lines = [f"{n} x {name}" for name, n in self.counts.items()] or [
            "nothing found"
        ]
        return "\n".join([*lines, *(f"left: {site}" for site in self.left)])


def find(
    fn: Callable, *args, patterns: Sequence[Pattern] = LIBRARY, **kwargs
) -> Report:
    """What `rewrite` would replace in `fn` at these arguments.

    Args:
      fn: any function that JAX can trace.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct` of any shape and dtype.
      patterns: formulas to look for, the largest first.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The report; nothing is computed.

    Example::

      print(jaxmem.rewriting.find(lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5)), x))
    """
    check_callable("fn", fn)
    patterns = check_patterns(patterns)
    traced = _jaxpr.trace(fn, *args, **kwargs)
    return _report(plan_rewrites(build(traced.jaxpr), patterns), patterns)


def rewrite(
    fn: Callable,
    patterns: Sequence[Pattern] = LIBRARY,
    *,
    on_report: Callable[[Report], Any] | None = None,
) -> Callable:
    """A function like `fn` with the formulas in it replaced by lean ones.

    Each call traces `fn` at its arguments, so wrap the result in `jax.jit`, or call it
    inside a function that is. Differentiate the result, not the argument: what the
    backward pass keeps is decided when `jax.grad` sees the lean functions. Formulas
    are found through `jit`, `scan`, `while`, `cond`, `jax.checkpoint`, `shard_map` and
    `custom_jvp` functions; what is inside a `custom_vjp` keeps its own rule.

    Args:
      fn: any function that JAX can trace, of any pytrees. Leaves that are not arrays
        (flags, names) are passed on as they are.
      patterns: formulas to look for, the largest first.
      on_report: called with the `Report` of each trace.

    Returns:
      The new function, of the same signature. It computes what `fn` does, to rounding;
      a dropout has another mask of the same law. Where nothing is found it is traced
      to the jaxpr of `fn`.

    Raises:
      TypeError: `fn` is not callable or `patterns` holds something else.

    Example::

      gelu = jaxmem.rewriting.rewrite(lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5)))
      y = gelu(x)
    """
    check_callable("fn", fn)
    patterns = check_patterns(patterns)
    if on_report is not None:
        check_callable("on_report", on_report, "a function of a Report, or None")

    @functools.wraps(fn)
    def rewritten(*args, **kwargs):
        traced = _jaxpr.trace(fn, *args, **kwargs)
        rewrites = plan_rewrites(build(traced.jaxpr), patterns)
        if on_report is not None:
            on_report(_report(rewrites, patterns))
        run = lambda *leaves: _run_graph(rewrites, leaves)
        marked = is_marked(traced.jaxpr) or any(map(_marks, _matches(rewrites)))
        run = auto_save(run) if marked else run
        outs = run(*traced.leaves)
        return jax.tree.unflatten(traced.out_tree, outs)

    return rewritten


def check_patterns(patterns: Any) -> tuple[Pattern, ...]:
    """The patterns; TypeError for what is none."""
    several = isinstance(patterns, list | tuple)
    if not several or not all(isinstance(p, Pattern) for p in patterns):
        raise wrong_type("patterns", patterns, "a sequence of Pattern objects")
    return tuple(patterns)


def _matches(rewrites: RewritePlan) -> Iterator[Match]:
    yield from rewrites.matches.values()
    for plans in rewrites.inner.values():
        for inner in plans:
            yield from _matches(inner)


def _marks(match: Match) -> bool:
    """Whether the lean function leaves a choice to `auto_save`."""
    return getattr(match.pattern.lean, "keywords", {}).get("save") == "auto"


# -- evaluation


def _run_graph(rewrites: RewritePlan, args: Sequence[Any]) -> list[Any]:
    if not rewrites.changes:
        return _jaxpr.evaluate(rewrites.graph.body, args)
    return _run_frame(
        rewrites, rewrites.graph.top, dict(_constants(rewrites.graph)), args
    )


def _constants(graph: FlatGraph) -> Iterator[tuple[FlatValue, Any]]:
    values = [v for node in graph.nodes for v in node.ins]
    values += graph.top.outs + [v for f in _frames(graph.top) for v in f.ins + f.outs]
    return ((v, v.known) for v in values if v.known is not None)


def _frames(frame: Frame) -> Iterator[Frame]:
    for item in frame.items:
        if isinstance(item, Frame):
            yield item
            yield from _frames(item)


def _run_frame(
    rewrites: RewritePlan, frame: Frame, env: dict, args: Sequence[Any]
) -> list[Any]:
    env = env | dict(zip(frame.ins, args, strict=True))
    _run_items(rewrites, frame, env)
    return [env[v] for v in frame.outs]


def _run_items(rewrites: RewritePlan, frame: Frame, env: dict[FlatValue, Any]) -> None:
    for item in frame.items:
        if isinstance(item, Frame) and item in rewrites.opened:
            _compat.in_context_of(item.eqn, _run_items, rewrites, item, env)
        elif item in rewrites.matches:
            match = rewrites.matches[item]
            env[item.outs[0]] = _compat.in_context_of(item.eqn, match.run, env)
        elif item in rewrites.recomputed:
            outs = _compat.in_context_of(item.eqn, _recompute, rewrites, item, env)
            env.update(zip(item.outs, outs, strict=True))
        elif item not in rewrites.skipped:
            env.update(zip(item.outs, _run_item(rewrites, item, env), strict=True))


def _recompute(
    rewrites: RewritePlan, node: Node, env: dict[FlatValue, Any]
) -> list[Any]:
    """A node inside a replaced formula, which keeps what the formula is given."""
    nodes = rewrites.recomputed[node]
    inputs = inputs_of(nodes)

    def run(*args):
        known = {v: v.known for n in nodes for v in n.ins if v.known is not None}
        inner = known | dict(zip(inputs, args, strict=True))
        for n in nodes:
            outs = _compat.bind(n.eqn, [inner[v] for v in n.ins])
            inner.update(zip(n.outs, outs, strict=True))
        return [inner[v] for v in node.outs]

    with jax.named_scope("jaxmem.recomputed"):
        return jax.checkpoint(run, prevent_cse=False)(*(env[v] for v in inputs))


def _run_item(
    rewrites: RewritePlan, item: Node | Frame, env: dict[FlatValue, Any]
) -> list[Any]:
    args = [env[v] for v in item.ins]
    if isinstance(item, Frame):
        if item not in rewrites.changed:
            return _compat.bind(item.eqn, args)
        known = dict(_constants(rewrites.graph))
        run = functools.partial(_run_frame, rewrites, item, known)
        return with_bodies(item.eqn, args, [run])
    plans = rewrites.inner.get(item, [])
    if not any(p.changes for p in plans):
        return _compat.bind(item.eqn, args)
    runs = [functools.partial(_run_graph, p) for p in plans]
    return with_bodies(item.eqn, args, runs)


# -- report


def _report(rewrites: RewritePlan, patterns: Sequence[Pattern]) -> Report:
    sites = list(_sites(rewrites, ""))
    found = tuple(s for s in sites if not s.reason)
    seen = {s.pattern for s in sites}
    unused = dict.fromkeys(p.name for p in patterns if p.name not in seen)
    return Report(found, tuple(s for s in sites if s.reason), tuple(unused))


def _sites(rewrites: RewritePlan, path: str) -> Iterator[Site]:
    refused = {r.root: r for r in rewrites.refused}
    for node in rewrites.graph.nodes:
        if node in rewrites.matches:
            yield site_of(rewrites.matches[node].pattern, node, path)
        elif node in refused:
            yield site_of(refused[node].pattern, node, path, refused[node].reason)
        for inner in rewrites.inner.get(node, ()):
            yield from _sites(inner, _path(node, path))


def _path(node: Node, path: str) -> str:
    eqns = [f.eqn for f in node.frame.path() if f.eqn is not None]
    names = [path, *(_compat.name_stack(e) for e in (*eqns, node.eqn))]
    return "/".join(filter(None, names))


def site_of(pattern: Pattern, node: Node, path: str, reason: str = "") -> Site:
    """A node at which a pattern ends, in the scopes of `path`."""
    out = node.outs[0]
    eqns = [node.eqn, *(f.eqn for f in node.frame.path()[:0:-1])]
    source = next(filter(None, map(_compat.source_line, eqns)), "")
    return Site(
        pattern.name, out.shape, str(out.dtype), _path(node, path), source, reason
    )
