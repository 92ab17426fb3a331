"""`jaxmem ledger`."""

from typing import Annotated, Any

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._functions import call, find, find_args, returns_the_step
from jaxmem.cli._output import check_limit, show

_NEEDED = (
    "(params, tx), or a step whose arguments hold a TrainState, or an nnx.Optimizer "
    "beside its model"
)


def ledger(
    function: opt.Function,
    arguments: opt.Arguments = None,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Micro-batches in a mini-batch.")
    ] = 1,
    released: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Stacked parameters whose gradients are released layer by layer, such "
            "as `layers/**`; can be repeated.",
        ),
    ] = None,
    gradient_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype of the gradients.")
    ] = None,
    accumulator_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype of the accumulator.")
    ] = None,
    maximum: Annotated[
        str | None,
        typer.Option(
            "--max", metavar="SIZE", help="Limit for the bytes on one device."
        ),
    ] = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Count the bytes of weights, gradients and optimizer state, without compiling.

    FUNCTION returns `(params, tx)`, with arrays or `jax.ShapeDtypeStruct` and an optax
    transformation; or a step with its arguments, among them a `TrainState` or an
    `nnx.Optimizer`. It may also be the transformation itself, with `--args` for a
    function that returns `(params,)`.

    Exits 0, or 1 if they take more than `--max`, 2 on a usage error, 3 if something
    cannot be imported or traced.
    """
    import jaxmem

    limit = opt.size(maximum, "--max")
    params, tx = _parameters(function, arguments)
    try:
        counted = jaxmem.ledger(
            *(params, tx),
            micro_batches=micro_batches,
            released=released or None,
            gradient_dtype=gradient_dtype,
            accumulator_dtype=accumulator_dtype,
        )
    except ValueError as error:  # of a pattern or a dtype
        raise typer.BadParameter(str(error)) from error
    show(counted, json_path, plot_path, html=html_path)
    check_limit("a device", counted.device_bytes, limit, json_path, "--max")


def _parameters(spec: str, args_spec: str | None) -> tuple[Any, Any]:
    """The parameters and the transformation."""
    module, named = find(spec)
    if not _is_tx(named):
        if not callable(named):
            message = f"{spec} is {type(named).__name__}, no function"
            raise typer.BadParameter(message)
        if args_spec is None and returns_the_step(named):
            return _found_in(call(named, spec, None), spec)
    maker, title = find_args(module, spec, args_spec)
    made = call(maker, title, None)
    if not _is_tx(named):
        return _found_in((named, made), spec)
    if type(made) is tuple and len(made) == 1:
        return made[0], named
    raise typer.BadParameter(f"{title} must return (params,), for {spec} is a tx")


def _found_in(returned: Any, spec: str) -> tuple[Any, Any]:
    match returned:
        case (params, tx, *_) if _is_tx(tx):
            return params, tx
        case (_, tuple(args), *_):
            return _state_among(args, spec)
    raise typer.BadParameter(f"{spec} must return {_NEEDED}")


def _state_among(args: tuple, spec: str) -> tuple[Any, Any]:
    """A TrainState's parameters and transformation, or those of objects."""
    from jaxmem.frameworks import is_object

    for state in args:
        tx = getattr(state, "tx", None)
        if not _is_tx(tx):
            continue
        if hasattr(state, "params"):
            return state.params, tx
        models = [x for x in args if is_object(x) and x is not state]
        if models:
            return models[0], tx
    raise typer.BadParameter(f"{spec} must return {_NEEDED}")


def _is_tx(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and hasattr(value, "update")
