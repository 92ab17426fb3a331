"""substitute() for linen: a model of a dynamic subclass, whose methods substitute.

Submodules made in `@compact` exist only while the model runs. So the new model's
methods intercept calls for their own duration, and its `apply` also replaces formulas
in the jaxpr. `init` runs the plain layers: initial values are Flax's own by
construction.
"""

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxmem.nn import _linen_calls as calls
from jaxmem.nn._fallback import heard_by
from jaxmem.nn._options import NEAR_ZERO, SubstitutionOptions
from jaxmem.nn._rules import LEAVE_SCOPE, first_match
from jaxmem.nn._traced import NEEDS_VALUES, UNTRACEABLE, is_concrete, run_rewritten
from jaxmem.ops.codes import sharing
from jaxmem.ops.records import RECORDS

_ids = itertools.count(1)
# Marks that time for jit's caches: neither `jax.jit` nor `nn.jit` inside the model
# reuses what the plain model has traced.
_jit_key = jax.make_user_context(None)
_LAYERS = tuple(getattr(nn, name) for r in RECORDS for name in r.layers.linen)


class LinenSubstitution:
    """The state shared by all copies of one substituted linen model."""

    def __init__(self, request: SubstitutionOptions, original: nn.Module) -> None:
        self.request = request
        self.original = original
        self.recorder = request.recorder()
        self._id = next(_ids)
        self._local = threading.local()

    @property
    def active(self) -> bool:
        """Whether this thread is inside a method of this model already."""
        return getattr(self._local, "active", False)

    @contextlib.contextmanager
    def running(self, plain: bool = False) -> Iterator[None]:
        """Replaces modules called inside; with `plain`, only notes what it would."""
        self._local.active, self._local.left, self._local.ruled = True, False, set()
        key = _jit_key(None if plain else self._id)
        intercept = functools.partial(self._intercept, plain)
        try:
            with key, sharing(), nn.intercept_methods(intercept):
                yield
        finally:
            self._local.active = False

    def _intercept(self, plain, next_call, args, kwargs, context):
        call = functools.partial(next_call, *args, **kwargs)
        if self._local.left:
            return call()
        module, path = context.module, "/".join(map(str, context.module.path))
        if context.method_name == "__call__" and path not in self._local.ruled:
            rule = first_match(self.request.rules, module, path)
            if rule is not None:
                return self._by_rule(plain, rule, path, module, call)
        written = context.orig_method.func
        if written not in calls.TABLE:
            if context.method_name == "__call__" and _is_users(module):
                self.recorder.left(path, module, OVERRIDES)
            return call()
        options = self._options(written, module, path)
        if calls.TABLE[written] is calls.dense and not options and _is_given(module):
            return call()
        self._note(written, path, module)
        if plain:
            return call()
        lean = functools.partial(calls.TABLE[written], module, next_call)
        with heard_by(functools.partial(self.recorder.left, path, module)):
            return lean(*args, **kwargs, **options)

    def _by_rule(self, plain, rule, path, module, call):
        self.recorder.use(rule)
        if rule.replace is None:
            self.recorder.left(path, module, f"left by rule {rule}")
            return self._leave(call)
        name = getattr(rule.replace, "__name__", str(rule.replace))
        self.recorder.replaced(path, module, name, f"by rule {rule}")
        if plain:
            return call()
        # What takes the module's place may go by the same path: once is enough.
        self._local.ruled.add(path)
        try:
            return _replacement(rule.replace, module)(*call.args, **call.keywords)
        finally:
            self._local.ruled.discard(path)

    def _leave(self, call):
        self._local.left = True
        try:
            with jax.named_scope(LEAVE_SCOPE):
                return call()
        finally:
            self._local.left = False

    def _note(self, written, path, module):
        options = self._options(written, module, path)
        reason = ", ".join(f'{k}="{v}"' for k, v in options.items())
        if options and options["save"] != self.request.save.at(path)[0]:
            reason += ": its scale starts near zero"
        if _is_users(module) and calls.raw(type(module).__call__) is not written:
            reason = f"{OVERRIDES}; its super().__call__ is lean"
        self.recorder.replaced(
            path, module, f"jaxmem {calls.TABLE[written].__name__}", reason
        )

    def _options(self, written, module, path) -> dict[str, Any]:
        call = calls.TABLE[written]
        save, pattern = self.request.save.at(path)
        if isinstance(save, str):
            if call not in calls.TAKES_WORD:
                return {}
            near_zero = module.use_scale and _starts_near_zero(module.scale_init)
            save = "input" if near_zero else save
        elif call not in calls.TAKES_BITS:
            return {}
        self.recorder.use_save(pattern)
        return {"save": save}

    def apply(self, super_apply: Callable, *args: Any) -> Any:
        """`super_apply(*args)` on lean modules and with its formulas replaced."""

        def lean_apply(*args):
            with self.running():
                return super_apply(*args)

        try:
            found = self.recorder.add_patterns
            out = run_rewritten(
                lean_apply, args, self.request.library(), found, self.request.codes
            )
        except NEEDS_VALUES:
            if not is_concrete(args):
                raise
            self.recorder.note(UNTRACEABLE)
            out = lean_apply(*args)
        self.recorder.first_trace(self.request.verbose)
        return out


OVERRIDES = "overrides __call__"


def _is_users(module: nn.Module) -> bool:
    """Whether this is a user's subclass of a layer."""
    own = type(module).__module__.startswith(("flax.", "jaxmem."))
    return isinstance(module, _LAYERS) and not own


def _is_given(module: nn.Module) -> bool:
    """Whether a part of the model has its parameters from an `apply` of its own."""
    # They are made of others then, as a head's kernel is of the embedding, transposed:
    # the rewriter sees of which, and keeps those.
    own = hasattr(type(module), "jaxmem_substitution")
    return module.scope is not None and not module.scope.path and not own


@functools.lru_cache(maxsize=256)
def _starts_near_zero(initializer) -> bool:
    """Whether a scale made by `initializer` holds values near zero."""
    with jax.ensure_compile_time_eval():
        scale = initializer(jax.random.key(0), (64,), jnp.float32)
        scale = scale.unbox() if isinstance(scale, nn.meta.AxisMetadata) else scale
        return bool(jnp.min(jnp.abs(scale)) < NEAR_ZERO)


def _replacement(replace: Any, module: nn.Module) -> Any:
    """What a rule puts in the place of a bound module."""
    if inspect.isclass(replace):
        fields = replace.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        fields = {f for f in fields if hasattr(module, f)}
        options = {f: getattr(module, f) for f in fields - {"name", "parent"}}
        lean = replace(**options)
    else:
        lean = replace(module)
    if isinstance(lean, nn.Module):
        nn.share_scope(module, lean)
    return lean


def substitute_linen(model: nn.Module, request: SubstitutionOptions) -> nn.Module:
    """A model with the fields of `model`, of a subclass of its class."""
    if model.scope is not None:
        raise TypeError(
            f"substitute() got a bound {type(model).__name__}: give the module that "
            "bind() was called on, or the model it is a part of"
        )
    base = type(model)
    state = LinenSubstitution(request, model)
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce__": _hide(lambda self: (substitute_linen, (_plain(self), request))),
        "apply": _apply(base, state),
        "init_with_output": _init(base, state),
    }
    for name in _methods(base):
        namespace[name] = _method(base, name, state)
    cls = type(base.__name__, (base,), namespace)
    cls.jaxmem_substitution = state  # pyright: ignore[reportAttributeAccessIssue]
    fields = {f: getattr(model, f) for f in _init_fields(model)}
    return cls(**fields)


def _init_fields(model):
    fields = model.__dataclass_fields__.values()
    return [f.name for f in fields if f.init]


def _plain(model):
    """The user's own model with the fields this copy of the new one has."""
    cls = type(model.jaxmem_substitution.original)
    return cls(**{f: getattr(model, f) for f in _init_fields(model)})


def _hide(fn):
    # Keeps Flax from wrapping a method of ours in its state handling.
    fn.nowrap = True
    return fn


def _like(original: Callable, fn: Callable) -> Callable:
    """Name, doc and signature of the original, but not Flax's marks on it."""
    return _hide(functools.update_wrapper(fn, original, updated=()))


def _methods(base: type) -> list[str]:
    """The public methods the user's classes define: the ways into the model."""
    found = {}
    for cls in base.__mro__[: base.__mro__.index(nn.Module)]:
        for name, member in vars(cls).items():
            public = name == "__call__" or not name.startswith("_")
            if public and inspect.isfunction(member) and name != "setup":
                if name not in base.__dataclass_fields__:
                    found.setdefault(name, member)
    plain = [n for n, member in found.items() if not hasattr(member, "nowrap")]
    return [n for n in plain if n not in ("apply", "init", "init_with_output")]


def _method(base, name, state):
    def method(self, *args, **kwargs):
        call = functools.partial(getattr(base, name), self)
        if state.active or self.scope is None:
            return call(*args, **kwargs)
        with state.running(plain=self.is_initializing()):
            return call(*args, **kwargs)

    return _like(getattr(base, name), method)


def _apply(base, state):
    def apply(self, variables, *args, rngs=None, **kwargs):
        # Flax's own options; the other keywords are the model's, and may be traced.
        names = {"method", "mutable", "capture_intermediates"}
        options = {name: kwargs.pop(name) for name in names & kwargs.keys()}

        def super_apply(variables, args, rngs, kwargs):
            options_and_kwargs = {**options, **kwargs}
            return base.apply(self, variables, *args, rngs=rngs, **options_and_kwargs)

        if state.active:
            return super_apply(variables, args, rngs, kwargs)
        return state.apply(super_apply, variables, args, rngs, kwargs)

    return _like(base.apply, apply)


def _init(base, state):
    def init_with_output(self, *args, **kwargs):
        if state.active:
            return base.init_with_output(self, *args, **kwargs)
        with state.running(plain=True):
            return base.init_with_output(self, *args, **kwargs)

    return _like(base.init_with_output, init_with_output)
