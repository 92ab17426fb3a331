"""The steps of known models: what is trained, in which types, and a row for each."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import needs
from benchmarks.figures.rows import rows

pytestmark = pytest.mark.usefixtures("standard_jax")
LLAMA = needs.MODELS["Llama-3.2-1B"]


def dtypes(tree) -> set:
    return {x.dtype for x in jax.tree.leaves(tree)}


def sizes(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.fast("AdamW", "LoRA, jax.checkpoint")
@pytest.mark.parametrize("how", needs.METHODS)
def test_a_step_gives_its_state_back(how):
    # on a TPU attention is not cuDNN's, which has to be there to be traced
    step, args, donated = LLAMA.step(needs.METHODS[how], "tpu-v5p")
    state, *_ = jax.eval_shape(step, *args)
    types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert types(state) == types(args[0]) and donated == (0,)


@pytest.mark.fast("8-bit AdamW, substitute, schedule", "LoRA, jax.checkpoint")
@pytest.mark.parametrize("how", needs.METHODS)
def test_what_is_trained(how):
    method = needs.METHODS[how]
    _, (state, *rest), _ = LLAMA.step(method, "tpu-v5p")
    wide = jnp.bfloat16 if method.eight_bit else jnp.float32
    assert dtypes(state[0]) == {jnp.dtype(wide)}
    if method.lora:
        # 16 layers; 16 ranks beside each of seven products
        widths = 2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192)
        assert sizes(state[0]) == 16 * 16 * widths
        assert sizes(rest[0]) == LLAMA.parameters
        assert dtypes(rest[0]) == {jnp.dtype(jnp.bfloat16)}
    else:
        assert sizes(state[0]) == LLAMA.parameters


def test_what_the_table_has():
    """A model has all of its methods on a chip, or none."""
    found = {(r["model"], r["chip"], r["method"]) for r in rows("needs")}
    known = set(needs.measures())
    assert found <= known
    there = {row[:2] for row in found}
    assert found == {row for row in known if row[:2] in there}
    assert {model for model, _ in there} == set(needs.MODELS)
