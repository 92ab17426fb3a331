"""`substitute`: the same model, keeping less for its backward pass.

Modules are replaced by class, formulas written without a module in the traced function.
Nothing in jax or flax is patched: the new model carries it all.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxmem._checks import check_bool, wrong_type, wrong_value
from jaxmem.frameworks import Framework, framework_of
from jaxmem.nn._call import linen_call, nnx_call, of_arrays
from jaxmem.nn._exchange import exchange_by_rules
from jaxmem.nn._options import SubstitutionOptions, read_storage
from jaxmem.nn._remaining import KeptArrays, kept_by
from jaxmem.nn._rules import Rule
from jaxmem.nn._substitute_linen import substitute_linen
from jaxmem.nn._substitute_nnx import substitute_nnx
from jaxmem.nn._substitution_report import Recorder, SubstitutionReport
from jaxmem.nn._traced import run_rewritten
from jaxmem.ops.codes import SaveLike, as_quantization

Model = TypeVar("Model")


def substitute(
    model: Model,
    rules: Sequence[Rule] | None = None,
    *,
    save: SaveLike | Mapping[str, SaveLike] = "output",
    activations: SaveLike | None = None,
    patterns: Any = None,
    verbose: bool = False,
) -> Model:
    """The same model with layers that save less for the backward pass.

    Parameters, their paths and initial values, outputs and gradients (up to rounding)
    do not change; dropout draws different masks. The original model is not modified.
    A linen model comes back as an instance of a subclass of its class, to use as the
    old one: `init` runs the plain layers, `apply` the lean ones. An nnx model comes
    back as a copy with the layers' classes replaced. A function comes back
    as a function, and so does an Equinox module; the result of Haiku's `transform`
    gets a new `apply`. `jaxmem.nn.report` shows what was done.

    Limits: a linen model used as a part of a plain one, or through `bind`, has its
    modules replaced but not the formulas outside of modules; for an nnx model it is
    `__call__` whose formulas are replaced. A model that branches in Python on values
    of its inputs cannot be traced, and gets its modules replaced only, with a warning.

    Args:
        model: a `flax.linen` module (unbound), a `flax.nnx` module, a function, or a
            model of another framework that is registered.
        rules: tried in order, before the built-in table; see `Rule`.
        save: what norms and GELU/SiLU keep, `"output"` (which the next matmul keeps
            anyway) or `"input"`. Norms whose scale starts near zero keep their input,
            and so does on a TPU what is in no loop: it makes the output again where
            products read it.
            Bits a value (1 to 8), the name of a dtype (`"float8_e4m3fn"`) or the
            dtype, or a `jaxmem.ops.Quantization` make norms, dense
            layers, convolutions and attention keep codes; so does a dict from patterns
            of module paths, `{"layers/*/mlp/*": 8}`, for the modules that a pattern
            (as of `fnmatch`) names, the first match first, and `"output"` for the rest.
            A linen model given a key named "storage" rounds at random, else to the
            nearest code.
        activations: what GELU/SiLU keep, instead of `save`: a word, the bits of a code
            of their derivative, or a `Quantization` for codes of their input, as gated
            units and other activations then keep, which a layer after them that stores
            codes reads too (codes beside an exact output come on top). The word
            `"auto"` is `"output"` where the next layer turns out to be trained and
            `"input"` where it is frozen, and so fits whatever is trained. None: as
            `save`, but `"auto"` where that is `"output"` or a dict.
        patterns: formulas to look for, as in `jaxmem.rewriting.rewrite`; its library
            if None.
        verbose: prints the report at the first trace.

    Returns:
        The new model.

    Raises:
        TypeError: when `model` is no module and no function, or a key of `save` is no
            string.
        ValueError: when `save` is another word, or bits out of range.

    Example::

        lean = jaxmem.substitute(model)
        variables = lean.init(key, tokens)
        print(jaxmem.nn.report(lean, tokens))
    """
    storage = read_storage(save)
    rules = _checked_rules(rules)
    check_bool("verbose", verbose)
    if patterns is not None:
        _check_patterns(patterns)
    if activations is not None and as_quantization(activations, "activations") is None:
        if activations not in ("input", "output", "auto"):
            allowed = "'input', 'output', 'auto', bits (1 to 8), a Quantization or None"
            raise wrong_value("activations", activations, allowed)
    if activations is None:
        word = "auto" if storage.word == "output" else storage.word
        kept = as_quantization(save) or word
    elif isinstance(activations, int):  # of the derivative
        kept = activations
    else:
        kept = as_quantization(activations) or str(activations)
    request = SubstitutionOptions(rules, storage, kept, patterns, verbose)
    framework = framework_of(model)
    if framework.is_model(model):
        lean = _LEAN.get(framework.name)
        if lean is not None:
            return lean.substitute(model, request)
        return _substitute_forward(framework, model, request)
    raise wrong_type(
        "substitute: model",
        model,
        "a flax.linen module, a flax.nnx module (the instance, not its class) or a "
        "function",
    )


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    given = () if rules is None else rules
    if not isinstance(given, list | tuple) or not all(
        isinstance(rule, Rule) for rule in given
    ):
        raise wrong_type("rules", rules, "a sequence of jaxmem.nn.Rule, or None")
    return tuple(given)


def _check_patterns(patterns: Any) -> None:
    from jaxmem.rewriting import Pattern  # only now: it traces its library

    several = isinstance(patterns, list | tuple)
    if not several or not all(isinstance(p, Pattern) for p in patterns):
        allowed = "a sequence of jaxmem.rewriting.Pattern, or None"
        raise wrong_type("patterns", patterns, allowed)


class LeanModels(NamedTuple):
    """How models are substituted whose framework has lean layers here."""

    substitute: Callable  # `(model, options) -> model`
    # `(model, args, rngs, kwargs)` -> the call as a function of the parameters first,
    # and the arguments for that
    call: Callable


_LEAN = {
    "linen": LeanModels(substitute_linen, linen_call),
    "nnx": LeanModels(substitute_nnx, nnx_call),
}


def _substitute_forward(
    framework: Framework, model: Any, request: SubstitutionOptions
) -> Any:
    """Modules by the rules, and the formulas in the function that computes it."""
    recorder = request.recorder()
    change = exchange_by_rules(request.rules, recorder)
    exchanged = framework.exchanged(model, change)
    fn = framework.forward(exchanged)

    @functools.wraps(fn)
    def lean(*args, **kwargs):
        def call(args, kwargs):
            return fn(*args, **kwargs)

        library = request.library()
        found = recorder.add_patterns
        out = run_rewritten(call, (args, kwargs), library, found, request.codes)
        recorder.first_trace(request.verbose)
        return out

    vars(lean)["jaxmem_recorder"] = recorder
    return framework.with_forward(exchanged, lean)


def report(
    model: Any, *args: Any, rngs: Any = None, **kwargs: Any
) -> SubstitutionReport:
    """What `substitute` did to `model`.

    A linen model's modules, and the formulas of any model, are known once it was
    traced. With example arguments the model is traced here, abstractly (nothing is
    computed), and the report tells what the backward pass keeps after the substitution,
    formula by formula (`residuals`, `left`): of a module's parameters, of all floats
    that a function is given. Without, the report tells of the traces so far.

    Args:
        model: what `substitute` returned.
        *args: example arguments of the call: arrays or `jax.ShapeDtypeStruct`.
        rngs: for linen, keys by name; `params` and `dropout` if None.
        **kwargs: further arguments of the call.

    Returns:
        The report.

    Raises:
        TypeError: when `model` does not come from `substitute`.
    """
    recorder = _recorder(model)
    if args or kwargs:
        recorder.residuals = _trace(model, args, rngs, kwargs)
    return recorder.report()


def _recorder(model) -> Recorder:
    framework = framework_of(model)
    fn = framework.forward(model) if framework.is_model(model) else model
    state = getattr(model, "jaxmem_substitution", None)
    recorder = getattr(fn, "jaxmem_recorder", None) or getattr(state, "recorder", None)
    if recorder is None:
        raise wrong_type("report: model", model, "what substitute returned")
    return recorder


def _trace(model, args, rngs, kwargs) -> KeptArrays | None:
    """What a model keeps at these arguments; runs it on shapes only."""
    framework = framework_of(model)
    lean = _LEAN.get(framework.name)
    if lean is not None:
        fn, args = lean.call(model, args, rngs, kwargs)
    else:
        fn, *args = of_arrays(framework.forward(model), args, kwargs)
    if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(args[0])):
        return kept_by(fn, *args)
    jax.eval_shape(fn, *args)
    return None
