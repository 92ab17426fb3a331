"""What `jax.nn.dot_product_attention(implementation="cudnn")` is not right about."""

from collections.abc import Iterator
from typing import Any

from jaxmem import _compat
from jaxmem.faults.program import TracedProgram, levels

_FORWARD = "dot_product_attention_fwd_wrapper"
_BACKWARD = "dot_product_attention_bwd_wrapper"
_BIAS = 3  # the operand
_FIRST_WITHOUT_NAN = 91300  # cuDNN, for a function of the scores
_CRASHED = 48  # the size of heads


def wide_bias(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds gradients by a bias of 32 bits beside queries of 16."""
    for eqn in _attentions(program, _BACKWARD):
        bias, query = eqn.invars[_BIAS].aval, eqn.invars[0].aval
        if _has_bias(eqn) and bias.dtype.itemsize > query.dtype.itemsize:
            yield (
                eqn,
                f"the gradient of cuDNN's attention in {query.dtype} by a bias in "
                f"{bias.dtype} is NaN",
            )


def batched_bias(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds gradients by a bias that has a batch."""
    for eqn in _attentions(program, _BACKWARD):
        batch = eqn.invars[_BIAS].aval.shape[0]
        if eqn.params["variadic_args"][1] and batch > 1:
            yield (
                eqn,
                f"cuDNN's attention refuses the gradient by a bias of {batch} examples",
            )


def lost_bias(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds backward passes that give a bias no gradient."""
    for eqn in _attentions(program, _BACKWARD):
        if _has_bias(eqn) and not eqn.params["variadic_args"][1]:
            yield eqn, "the backward pass of cuDNN's attention leaves the bias out"


def mask_alone(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds masks of one query, which are not broadcast to the others."""
    for eqn in _attentions(program, _FORWARD):
        bias, query = eqn.invars[_BIAS].aval, eqn.invars[0].aval
        if _has_bias(eqn) and bias.shape[-2] == 1 != query.shape[1]:
            yield eqn, "cuDNN's attention does not broadcast a mask over the queries"


def function_of_scores(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds functions of the scores, beside a cuDNN older than 9.13."""
    version = _compat.cudnn_version()
    old = version is not None and version < _FIRST_WITHOUT_NAN
    for eqn in _attentions(program, _FORWARD) if old else ():
        if eqn.params.get("score_mod") is not None:
            yield (
                eqn,
                f"cuDNN's attention with a function of the scores gives NaN with this "
                f"process's cuDNN, {version}",
            )


def crashing_heads(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds heads of a size that has crashed."""
    for eqn in _attentions(program, _FORWARD):
        if eqn.invars[0].aval.shape[-1] == _CRASHED:
            yield eqn, f"cuDNN's attention ends the process at heads of {_CRASHED}"


def _attentions(program: TracedProgram, name: str) -> Iterator[Any]:
    for level in levels(program.closed):
        yield from (e for e in level.graph.eqns if e.primitive.name == name)


def _has_bias(eqn) -> bool:
    return bool(eqn.params["variadic_args"][0])
