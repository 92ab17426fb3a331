"""Which implementation runs is decided by the platform that is lowered for."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import export

from pallas_kernels import dispatch as module
from pallas_kernels._compat import simulated
from pallas_kernels.dispatch import dispatch

X = jnp.arange(4.0)


def plain(x):
    return x + 1


def on_tpu(x):
    return jnp.sin(x)


def on_gpu(x):
    return jnp.cos(x)


def not_me(x):
    raise NotImplementedError("even lengths alone")


def call(x, implementation="pallas", tpu=on_tpu, gpu=on_gpu):
    return dispatch("op", implementation, x, xla=plain, tpu=tpu, gpu=gpu)


def lowered(platform, **how):
    return export.export(jax.jit(lambda x: call(x, **how)), platforms=[platform])(X)


@pytest.mark.parametrize("platform, op", [("tpu", "sine"), ("cuda", "cosine")])
def test_platform_decides(platform, op):
    assert f"stablehlo.{op}" in lowered(platform).mlir_module()


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_plain_where_nothing_was_measured(implementation):
    assert (call(X, implementation) == X + 1).all()
    for platform in ("tpu", "cuda", "cpu"):
        text = lowered(platform, implementation=implementation).mlir_module()
        assert "stablehlo.add" in text and "stablehlo.cosine" not in text


def test_what_was_measured_is_taken(monkeypatch):
    monkeypatch.setattr(module, "MEASURED", frozenset({("op", "cuda")}))
    assert (call(X, None) == X + 1).all()  # here, on a CPU
    how = {"implementation": None}
    assert "stablehlo.cosine" in lowered("cuda", **how).mlir_module()
    assert "stablehlo.add" in lowered("tpu", **how).mlir_module()


def test_a_wanted_kernel_that_falls_back_warns_once(monkeypatch):
    monkeypatch.setattr(module, "MEASURED", frozenset({("op", "tpu")}))
    with pytest.warns(UserWarning, match="op on TPU: even lengths alone; XLA does it"):
        assert (call(X, None, tpu=not_me) == X + 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(X, None, tpu=not_me)


def test_no_kernel_for_the_platform_is_said_when_it_is_lowered():
    for run in (call, jax.jit(call), jax.vmap(call)):
        with pytest.raises(ValueError, match="no kernel for the platform"):
            run(X)
    with pytest.raises(ValueError, match="TPU: even lengths alone"):
        lowered("tpu", tpu=not_me)
    assert "stablehlo.cosine" in lowered("cuda", tpu=not_me).mlir_module()


def test_no_kernel_at_all_is_said_at_the_call():
    with pytest.raises(ValueError, match="no kernel for this op. TPU: even .* GPU: th"):
        call(X, tpu=not_me, gpu=None)


@pytest.mark.parametrize("platform, op", [("tpu", jnp.sin), ("cuda", jnp.cos)])
def test_a_simulated_platform_decides(platform, op):
    with simulated(platform):
        assert (call(X) == op(X)).all()
        assert (call(X, None) == X + 1).all()
        with pytest.raises(ValueError, match="no kernel for the platform"):
            call(X, **{"tpu": {"tpu": None}, "cuda": {"gpu": None}}[platform])


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='cudnn': allowed are None"):
        call(X, "cudnn")
