"""The barrier for GPUs: the identity, kept in programs for a GPU alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxmem.ops.common.gpu_barrier import gpu_barrier


def test_it_is_the_identity_in_every_transformation():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(gpu_barrier(x), x)
    np.testing.assert_array_equal(jax.vmap(gpu_barrier, in_axes=1, out_axes=1)(x), x)
    np.testing.assert_array_equal(jax.jvp(gpu_barrier, (x,), (2 * x,))[1], 2 * x)
    square = lambda x: jnp.sum(jax.checkpoint(gpu_barrier)(x * x))
    np.testing.assert_array_equal(jax.jit(jax.grad(square))(x), 2 * x)
    hessian = jax.hessian(lambda x: jnp.sum(gpu_barrier(x) ** 3))(x[0])
    np.testing.assert_allclose(hessian, jnp.diag(6 * x[0]))


@pytest.mark.parametrize("platform, kept", [("cuda", 2), ("tpu", 0), ("cpu", 0)])
def test_it_is_there_for_a_gpu_and_so_is_its_transpose(platform, kept):
    def step(x):
        y, pull = jax.vjp(gpu_barrier, x)
        return y, pull(x)

    exported = export.export(jax.jit(step), platforms=(platform,))(jnp.ones(3))
    assert exported.mlir_module().count("stablehlo.optimization_barrier") == kept
