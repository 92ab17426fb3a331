"""substitute() for nnx: a copy of the graph whose nodes have other classes.

A node keeps its attributes, so state paths, sharing and Variables stay as they were;
only `__class__` changes, to a subclass of the user's own class. The root's `__call__`
also traces itself and replaces formulas in the jaxpr.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from jaxmem.nn import nnx as lean
from jaxmem.nn._intercepted import interception_heard_by
from jaxmem.nn._nnx_attention import attention_saving
from jaxmem.nn._options import NEAR_ZERO, SubstitutionOptions
from jaxmem.nn._rules import LEAVE_SCOPE, Rule, first_match
from jaxmem.nn._substitution_report import Recorder
from jaxmem.nn._traced import NEEDS_VALUES, UNTRACEABLE, is_concrete, run_rewritten
from jaxmem.ops.codes import Quantization, sharing
from jaxmem.ops.records import RECORDS

_NAMES = [(name, r.layers) for r in RECORDS for name in r.layers.nnx]
TABLE: dict[type, type] = {
    getattr(nnx, name): getattr(lean, name) for name, _ in _NAMES
}
TAKES_BITS = tuple(getattr(nnx, name) for name, layers in _NAMES if layers.bits)
_TAG = "jaxmem.substitute"


class NnxSubstitution:
    """The state shared by all copies of one substituted nnx model."""

    def __init__(self, request: SubstitutionOptions) -> None:
        self.request = request
        self.recorder = request.recorder()
        self._local = threading.local()

    def call(self, base_call: Callable, model: nnx.Module, args, kwargs) -> Any:
        """`base_call(model, ...)` with the formulas in its trace replaced."""
        if getattr(self._local, "active", False):
            return base_call(model, *args, **kwargs)
        self._local.active = True
        try:
            with sharing(), interception_heard_by(self.recorder.mention):
                return self._call(base_call, model, args, kwargs)
        finally:
            self._local.active = False
            self.recorder.first_trace(self.request.verbose)

    def _call(self, base_call, model, args, kwargs):
        rewriting = (
            self.request.library(),
            self.recorder.add_patterns,
            self.request.codes,
        )
        try:
            return _call_traced(base_call, model, args, kwargs, rewriting)
        except NEEDS_VALUES:
            if not is_concrete((nnx.state(model), args, kwargs)):
                raise
        self.recorder.note(UNTRACEABLE)
        return base_call(model, *args, **kwargs)


class _GraphChanged(Exception):
    """The call changed more than the values of Variables."""


def _call_traced(base_call, model, args, kwargs, rewriting):
    """As jit would: Variables are written back, but only those the call has set."""
    inputs = (model, args, kwargs)
    graph, state = nnx.split(inputs)
    changed = []

    def pure(state):
        mine = nnx.merge(graph, state)
        before = {path: v.get_raw_value() for path, v in _variables(mine).items()}
        out = base_call(mine[0], *mine[1], **mine[2])
        if nnx.graphdef(mine) != graph:
            raise _GraphChanged
        after = {path: v.get_raw_value() for path, v in _variables(mine).items()}
        # The others may belong to an outer trace, where they cannot be written.
        changed[:] = [path for path in after if after[path] is not before[path]]
        return out, [after[path] for path in changed]

    try:
        out, values = run_rewritten(pure, (state,), *rewriting)
    except _GraphChanged:
        return _call_changing(base_call, inputs, rewriting)
    own = _variables(inputs)
    for path, value in zip(changed, values, strict=True):
        own[path].set_raw_value(value)
    return out


def _variables(node) -> dict[tuple, nnx.Variable]:
    found = nnx.iter_graph(node)
    return {path: leaf for path, leaf in found if isinstance(leaf, nnx.Variable)}


@nnx.update_context(_TAG)
def _call_changing(base_call, inputs, rewriting):
    """For a call that adds Variables (`sow`) or sets attributes."""
    with nnx.split_context(_TAG) as context:
        graph, state = context.split(inputs)

    def pure(state):
        with nnx.merge_context(_TAG, inner=True) as context:
            mine = context.merge(graph, state)
        out = base_call(mine[0], *mine[1], **mine[2])
        with nnx.split_context(_TAG) as context:
            return context.split((mine, out))

    graph_out, state_out = run_rewritten(pure, (state,), *rewriting)
    with nnx.merge_context(_TAG, inner=False) as context:
        return context.merge(graph_out, state_out)[1]


def substitute_nnx(model: nnx.Module, request: SubstitutionOptions) -> nnx.Module:
    """A copy of `model` on lean layers."""
    new = nnx.clone(model)
    state = NnxSubstitution(request)
    left: list[tuple] = []
    for path, node in list(nnx.iter_graph(new)):
        inside_left = any(path[: len(prefix)] == prefix for prefix in left)
        if isinstance(node, nnx.Module) and not inside_left:
            if _exchange(node, path, request, state.recorder) == "left":
                left.append(path)
    if callable(new):
        _set_class(new, _with_call(type(new), state))
    return new


def _exchange(
    node, path, request: SubstitutionOptions, recorder: Recorder
) -> str | None:
    """Gives one node the lean class for its own, where there is one."""
    where = "/".join(map(str, path))
    rule = first_match(request.rules, node, where)
    if rule is not None:
        return _exchange_by_rule(rule, node, where, recorder)
    cls = type(node)
    base = next((b for b in cls.__mro__ if b in TABLE), None)
    if base is None or issubclass(cls, TABLE[base]):
        return None
    if cls.__call__ is not base.__call__:
        recorder.left(where, node, "overrides __call__")
        return None
    options = _set_up(node, where, request, recorder)
    recorder.replaced(where, node, f"jaxmem {TABLE[base].__name__}", options)
    _set_class(node, TABLE[base] if cls is base else _both(cls, TABLE[base]))
    return None


def _set_up(node, where: str, request: SubstitutionOptions, recorder: Recorder) -> str:
    """Sets the options of the lean class on the node; says which."""
    save, pattern = request.save.at(where)
    if isinstance(save, Quantization) and isinstance(node, TAKES_BITS):
        recorder.use_save(pattern)
    if isinstance(node, nnx.LayerNorm | nnx.RMSNorm):
        recorder.use_save(pattern)
        near_zero = save == "output" and _near_zero(node.scale)
        lean_norm: Any = node
        lean_norm.save = save = "input" if near_zero else save
        return f'save="{save}"' + (": its scale is near zero" if near_zero else "")
    word = isinstance(save, str)
    if isinstance(node, nnx.MultiHeadAttention):
        if node.attention_fn is not nnx.dot_product_attention:
            return "keeps its own attention_fn"
        fn = lean.dot_product_attention if word else attention_saving(save)
        node.attention_fn = fn
    elif word or not isinstance(node, TAKES_BITS):
        return ""
    else:
        node.save = save  # pyright: ignore[reportAttributeAccessIssue]
    return "" if word else f'save="{save}"'


def _near_zero(scale) -> bool:
    """Whether the scale holds values that cannot be divided by; False if unknown."""
    value = None if scale is None else scale[...]
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return bool(jnp.min(jnp.abs(value)) < NEAR_ZERO)


def _exchange_by_rule(rule: Rule, node, where, recorder: Recorder) -> str | None:
    recorder.use(rule)
    if rule.replace is None:
        recorder.left(where, node, f"left by rule {rule}")
        _set_class(node, _left_alone(type(node)))
        return "left"
    name = getattr(rule.replace, "__name__", str(rule.replace))
    recorder.replaced(where, node, name, f"by rule {rule}")
    _set_class(node, _by_rule(type(node), rule.replace))
    return None


def _set_class(node, cls: type) -> None:
    object.__setattr__(node, "__class__", cls)


def _subclass(base: type, *others: type, **members: Any) -> type:
    """A subclass that goes by the name of `base`."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base)(base.__name__, (base, *others), names | members)


# Equal classes for equal models, so that their graph definitions are equal too.
_cached = functools.lru_cache(maxsize=1024)


@_cached
def _both(cls: type, lean_cls: type) -> type:
    # The user's class first: its methods win, `__call__` comes from the lean one.
    return _subclass(cls, lean_cls)


@_cached
def _left_alone(cls: type) -> type:
    def call(self, *args, **kwargs):
        with jax.named_scope(LEAVE_SCOPE):
            return cls.__call__(self, *args, **kwargs)

    return _subclass(cls, __call__=functools.wraps(cls.__call__)(call))


@_cached
def _by_rule(cls: type, replace) -> type:
    if inspect.isclass(replace):
        return _subclass(cls, __call__=replace.__call__, **_defaults(replace, cls))

    def call(self, *args, **kwargs):
        return replace(self)(*args, **kwargs)

    return _subclass(cls, __call__=functools.wraps(cls.__call__)(call))


def _defaults(replace: type, cls: type) -> dict[str, Any]:
    """The lean constructor's defaults, for attributes the user's class does not set."""
    found: dict[str, Any] = {}
    for base in replace.__mro__:
        if "__init__" in vars(base) and issubclass(base, nnx.Module):
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if parameter.default is not inspect.Parameter.empty:
                    found.setdefault(name, parameter.default)
    static = {k: staticmethod(v) if callable(v) else v for k, v in found.items()}
    return {k: v for k, v in static.items() if not hasattr(cls, k)}


def _with_call(cls: type, state: NnxSubstitution) -> type:
    def call(self, *args, **kwargs):
        return state.call(cls.__call__, self, args, kwargs)

    wrapped = functools.wraps(cls.__call__)(call)
    return _subclass(cls, __call__=wrapped, jaxmem_substitution=state)
