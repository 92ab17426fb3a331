"""Products with weights of few bits, in a traced function: no wide copy is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.rewriting import LIBRARY, find, rewrite
from tests.scheduling.test_few_bit_base import KINDS, LAYERS, arguments, loss_of
from tests.sets import some_fast

WIDE = (16, 16)

forms = pytest.mark.parametrize("scanned", [False, True], ids=["written out", "scan"])
kinds = pytest.mark.parametrize("kind", KINDS)


def kept(fn, args):
    """Residuals beyond the arguments, of the gradient of the adapters."""
    found = jaxmem.residuals(fn, *args, argnums=0).entries
    return [r for r in found if r.kind != "argument"]


@pytest.mark.fast("int8-written out", "float8-scan", "table-written out")
@forms
@kinds
def test_no_wide_weight_is_kept(kind, scanned):
    loss, args = loss_of(kind, scanned), arguments(kind, scanned)
    plain, lean = (kept(fn, args) for fn in (loss, rewrite(loss)))
    assert [r for r in plain if r.shape[-2:] == WIDE]
    assert not [r for r in lean if r.shape[-2:] == WIDE]
    assert sum(r.bytes for r in lean) <= sum(r.bytes for r in plain)


@pytest.mark.fast("int8-scan", "table-scan")
@pytest.mark.parametrize(
    "scanned", some_fast([False, True], True), ids=["written out", "scan"]
)
@kinds
def test_values_and_gradients(kind, scanned):
    loss, args = loss_of(kind, scanned), arguments(kind, scanned)
    for argnums in (0, 2, (0, 2)):
        got, want = (
            jax.jit(jax.value_and_grad(fn, argnums))(*args)
            for fn in (rewrite(loss), loss)
        )
        # sums of 16 numbers in another order, through six layers
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max(), rtol=0)


def test_a_trained_scale_has_its_gradient():
    loss, (adapters, base, x) = loss_of("int8"), arguments("int8")
    of_scales = lambda fn: (
        lambda scales: fn(
            adapters, [b | {"scale": s} for b, s in zip(base, scales, strict=True)], x
        )
    )
    scales = [b["scale"] for b in base]
    got, want = (jax.grad(of_scales(fn))(scales) for fn in (rewrite(loss), loss))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max(), rtol=0)


def test_the_report_counts_them():
    loss, args = loss_of("table"), arguments("table")
    assert find(loss, *args).counts["dequantized_product"] == LAYERS
    assert "dequantized_product" not in find(loss, *args, patterns=[]).counts


def test_under_vmap_and_remat():
    loss, (adapters, base, x) = loss_of("int8"), arguments("int8")
    lean = jax.checkpoint(rewrite(loss, LIBRARY))
    xs = jnp.stack([x, -x])
    got, want = (
        jax.vmap(jax.grad(fn, 2), (None, None, 0))(adapters, base, xs)
        for fn in (lean, loss)
    )
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)
