"""What kernels take that a chip chooses, against what compiled steps say they take."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.chips import rates_of
from jaxmem.cost import equations

SHAPE = (32, 1024, 12, 64)
Q = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
BIAS = jax.ShapeDtypeStruct((32, 1, 1, 1024), jnp.bfloat16)
OFF = 0.05  # of the compiled seconds: what stands around the kernel

attention = jaxmem.ops.dot_product_attention
by_xla = functools.partial(attention, implementation="xla")


def gradients(q, k, v):
    loss = lambda *args: jnp.sum(attention(*args).astype(jnp.float32))
    return jax.grad(loss, (0, 1, 2))(q, k, v)


def predicted(fn, args, target, of=equations.seconds):
    eqns = jax.make_jaxpr(fn)(*args).eqns
    return sum(of(eqn, rates_of(target)) or 0.0 for eqn in eqns)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (attention, (Q, Q, Q)),  # cuDNN's
        (functools.partial(attention, is_causal=True), (Q, Q, Q)),
        (attention, (Q, Q, Q, BIAS)),  # ours
        (gradients, (Q, Q, Q)),
    ],
    ids=("cuDNN", "causal", "with a bias", "gradients"),
)
def test_attention_by_a_kernel(fn, args, standard_jax):
    compiled = jaxmem.estimate(fn, *args, target="h100").seconds
    assert predicted(fn, args, "h100") == pytest.approx(compiled, rel=OFF)
    products = predicted(fn, args, "h100", equations.product_seconds)
    assert products == pytest.approx(compiled, rel=OFF)


def test_where_xla_does_it_its_blocks_count(standard_jax):
    """A CPU has no kernel; on a GPU they take ten times as long as the kernel."""
    args = Q, Q, Q
    of_cpu = predicted(by_xla, args, "cpu")
    assert predicted(attention, args, "cpu") == pytest.approx(of_cpu, rel=1e-3)
    assert predicted(by_xla, args, "h100") > 5 * predicted(attention, args, "h100")
