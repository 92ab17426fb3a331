"""The user's loss function in one form.

The form is (params, model_state, batch, rng) -> (loss, (model_state, aux)), with None
for an absent model state and {} for an absent aux.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem.accumulate._options import StepOptions
from jaxmem.frameworks import Held


def loss_of(
    held: Held, loss_fn: Callable, options: StepOptions
) -> tuple[Callable, StepOptions]:
    """The loss of what a model holds, and the options of a mini-batch with it."""
    if held.state_of is None:

        def of_params(params, *args):
            return loss_fn(held.model(params), *args)

        return standard_loss(of_params, options), options
    inner = replace(options, has_model_state=True)
    of_object = _of_object(held, held.state_of, loss_fn, options)
    return standard_loss(of_object, inner), inner


def _of_object(
    held: Held, state_of: Callable, loss_fn: Callable, options: StepOptions
) -> Callable:
    """A loss that returns what it has changed in the model."""

    def loss(params, state, batch, rng):
        model = held.model(params, state)
        value, _, aux = unpack(loss_fn(model, batch, rng), options)
        state = state_of(model, params)
        return value, (state, aux) if options.has_aux else state

    return loss


def standard_loss(loss_fn: Callable, options: StepOptions) -> Callable:
    """`loss_fn` in the one form, rematerialized if that was asked for."""

    def standard(params, model_state, batch, rng):
        first = (params, model_state) if options.has_model_state else (params,)
        loss, new_state, aux = unpack(loss_fn(*first, batch, rng), options)
        check_same(model_state, new_state)
        return _scalar(loss), (new_state, _named(aux, options))

    if options.remat is False:
        return standard
    policy = None if options.remat is True else options.remat
    return jax.checkpoint(standard, policy=policy)


def unpack(out, options: StepOptions):
    """(loss, model_state, aux) of what the loss function returned."""
    if not (options.has_aux or options.has_model_state):
        if isinstance(out, tuple):
            raise TypeError(
                f"loss_fn returned {_kind(out)}: a loss alone without has_aux=True "
                "or has_model_state=True"
            )
        return out, None, None
    loss, rest = _pair(out, options)
    if not options.has_model_state:
        return loss, None, rest
    if not options.has_aux:
        return loss, rest, None
    return loss, *_pair(rest, options)


def _pair(out, options: StepOptions):
    if isinstance(out, tuple) and len(out) == 2:
        return out
    form = "(loss, aux)"
    if options.has_model_state:
        form = f"(loss, {'(model_state, aux)' if options.has_aux else 'model_state'})"
    raise TypeError(f"loss_fn must return {form}, got {_kind(out)} instead")


def _scalar(loss):
    if not hasattr(loss, "dtype") and not isinstance(loss, float):
        raise TypeError(f"loss_fn must return a scalar loss, got {_kind(loss)}")
    loss = jnp.asarray(loss)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            "loss_fn must return a floating scalar, the mean over its micro-batch; "
            f"got {loss.dtype}{list(loss.shape)}"
        )
    return loss


def _named(aux, options: StepOptions) -> dict:
    """A mapping keeps its names in the metrics, anything else goes under "aux"."""
    if not options.has_aux:
        return {}
    named = dict(aux) if isinstance(aux, dict) else {"aux": aux}
    named = jax.tree.map(jnp.asarray, named)
    if clash := {"loss", "skipped"} & set(named):
        raise ValueError(
            f"aux has the names {sorted(clash)}, which the metrics have already"
        )
    return named


def check_same(old, new) -> None:
    """ValueError for a model state of other types: a scan carries it."""
    before, after = (
        {keystr(path): jax.typeof(x) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (old, new)
    )
    changed = [
        f"{name}: {before.get(name, 'nothing')} in, {after.get(name, 'nothing')} out"
        for name in dict.fromkeys([*before, *after])
        if not _same_type(before.get(name), after.get(name))
    ]
    if changed or jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "the loss function must return a model state of the structure, shapes and "
            "dtypes that it was given; " + ("; ".join(changed[:4]) or _trees(old, new))
        )


def _same_type(one, other) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _trees(old, new) -> str:
    return f"in {jax.tree.structure(old)}, out {jax.tree.structure(new)}"


def _kind(value) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
