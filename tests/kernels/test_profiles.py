"""The names by which a profile of a GPU knows the kernels."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import ops
from tests.kernels.test_chips import gpu, lowered

X = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
P = jax.ShapeDtypeStruct((4096,), jnp.float32)


def both_passes(op, **how):
    def run(x):
        y, pull = jax.vjp(lambda x: op(x, implementation="pallas", **how), x)
        return y, pull(y)

    return run


def adam_step(p, g):
    adam = jaxmem.optim.FusedAdam(1e-3, implementation="pallas")
    return adam.step(g, adam.init(p), p)[0]


CASES = {
    "activation": (both_passes(ops.silu, save="output"), (X,)),
    "norm": (both_passes(ops.layer_norm), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_pass_has_a_name(name):
    fn, args = CASES[name]
    passes = {f"jaxmem_{name}_forward", f"jaxmem_{name}_backward"}
    assert _names(fn, args) == passes


def test_adam_has_a_name():
    assert _names(adam_step, (P, P)) == {"jaxmem_adam"}


def _names(fn, args) -> set[str]:
    """The functions on the device, which Mosaic makes of the kernels' names."""
    text = str(lowered(fn, *args, device=gpu("NVIDIA H100 80GB HBM3")))
    # Strings of its module end in a zero; the dialect that it is in is "stable".
    return set(re.findall(r"\\00((?!stable)\w+?)_mosaic_gpu\\00", text))
