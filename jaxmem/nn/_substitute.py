"""`substitute`: the same model, keeping less for its backward pass.

Modules are replaced by class, formulas written without a module in the traced function.
Nothing in jax or flax is patched: the new model carries it all.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxmem._checks import check_bool, wrong_type, wrong_value
from jaxmem.nn._options import SubstitutionOptions, read_storage
from jaxmem.nn._remaining import KeptArrays, kept_by
from jaxmem.nn._rules import Rule
from jaxmem.nn._substitute_linen import substitute_linen
from jaxmem.nn._substitute_nnx import substitute_nnx
from jaxmem.nn._substitution_report import Recorder, SubstitutionReport
from jaxmem.nn._traced import run_rewritten, split_arrays
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
    """The same model on layers that keep less for the backward pass.

    Parameters, their paths and initial values, outputs and gradients (up to rounding)
    stay as they were; dropout draws other masks. The model given is left untouched.
    A linen model comes back as an instance of a subclass of its class, to use as the
    old one: `init` runs the plain layers, `apply` the lean ones. An nnx model comes
    back as a copy with the layers' classes exchanged. A function comes back as a
    function. What was done is told by `jaxmem.nn.report`.

    Limits: a linen model used as a part of a plain one, or through `bind`, has its
    modules replaced but not the formulas outside of modules; for an nnx model it is
    `__call__` whose formulas are replaced. A model that branches in Python on values
    of its inputs cannot be traced, and gets its modules replaced only, with a warning.

    Args:
        model: a `flax.linen` module (unbound), a `flax.nnx` module, or a function.
        rules: tried in order, before the built-in table; see `Rule`.
        save: what norms and GELU/SiLU keep, `"output"` (which the next matmul keeps
            anyway) or `"input"`. Norms whose scale starts near zero keep their input.
            Bits a value (1 to 8), the name of a dtype (`"float8_e4m3fn"`) or the
            dtype, or a `jaxmem.ops.Quantization` make norms, dense
            layers, convolutions and attention keep codes; so does a dict from patterns
            of module paths, `{"layers/*/mlp/*": 8}`, for the modules that a pattern
            (as of `fnmatch`) names, the first match first, and `"output"` for the rest.
            A linen model given a key named "storage" rounds at random, else to the
            nearest code.
        activations: what GELU/SiLU keep, in place of `save`: a word, the bits of a code
            of their derivative, or a `Quantization` for codes of their input, as gated
            units and other activations then keep, which a layer after them that stores
            codes reads too (codes beside an exact output come on top). The word
            `"auto"` is `"output"` where the next layer turns out to be trained and
            `"input"` where it is frozen, and so fits whatever is trained. None: as
            `save`, and `"output"` where that is a dict.
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
        kept = as_quantization(save) or storage.word
    elif isinstance(activations, int):  # of the derivative
        kept = activations
    else:
        kept = as_quantization(activations) or str(activations)
    request = SubstitutionOptions(rules, storage, kept, patterns, verbose)
    if isinstance(model, linen.Module):
        return substitute_linen(model, request)
    if isinstance(model, nnx.Module):
        return substitute_nnx(model, request)
    if callable(model) and not inspect.isclass(model):
        return _substitute_function(model, request)
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


def _substitute_function(fn: Callable, request: SubstitutionOptions) -> Callable:
    recorder = request.recorder()

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
    return lean


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
    state = getattr(model, "jaxmem_substitution", None)
    recorder = getattr(model, "jaxmem_recorder", None) or getattr(
        state, "recorder", None
    )
    if recorder is None:
        raise wrong_type("report: model", model, "what substitute returned")
    return recorder


def _trace(model, args, rngs, kwargs) -> KeptArrays | None:
    """What a model keeps at these arguments; runs it on shapes only."""
    if isinstance(model, linen.Module):
        fn, args = _linen_call(model, args, rngs, kwargs)
    elif isinstance(model, nnx.Module):
        fn, args = _nnx_call(model, args, kwargs)
    else:
        fn, *args = _of_arrays(model, args, kwargs)
    if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(args[0])):
        return kept_by(fn, *args)
    jax.eval_shape(fn, *args)
    return None


def _of_arrays(fn: Callable, args, kwargs) -> tuple[Callable, list[Any]]:
    """The call as a function of its arrays alone, and these."""
    # A `jax.ShapeDtypeStruct` too.
    is_array = lambda leaf: hasattr(leaf, "dtype")
    arrays, rebuild = split_arrays((args, kwargs), is_array)

    def call(arrays):
        args, kwargs = rebuild(arrays)
        return fn(*args, **kwargs)

    return call, arrays


def _linen_call(model, args, rngs, kwargs) -> tuple[Callable, tuple]:
    """The call as a function of the parameters first, and the arguments for that."""
    rngs = rngs or {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init, arrays = _of_arrays(functools.partial(model.init, rngs), args, kwargs)
    variables = dict(jax.eval_shape(init, arrays))

    def run(variables, *args, **kwargs):
        return model.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)[0]

    def apply(params, rest, arrays):
        variables = {"params": params, **rest}
        call, _ = _of_arrays(functools.partial(run, variables), args, kwargs)
        return call(arrays)

    return apply, (variables.pop("params", {}), variables, arrays)


def _nnx_call(model, args, kwargs) -> tuple[Callable, tuple]:
    """The same of an nnx model, whose own state stays as it is."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, rest, arrays):
        mine = nnx.merge(graph, params, rest, copy=True)
        call, _ = _of_arrays(mine, args, kwargs)
        return call(arrays)

    return run, (params, rest, _of_arrays(model, args, kwargs)[1])
