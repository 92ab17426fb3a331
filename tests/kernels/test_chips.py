"""Kernels on the chips that they are for, and a clear error on the others."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import jaxmem
from benchmarks import kernels as benchmark
from jaxmem import ops
from jaxmem.memory import target_mesh, targets
from pallas_kernels import chips
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.cross_entropy import tpu as cross_entropy_tpu

CHIPS = [t for t in targets() if t.platform != "cpu"]
X = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
WORDS = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
LABELS = jax.ShapeDtypeStruct((64,), jnp.int32)

# name of the kernel -> (op, its arguments)
OPS = {
    "attention": (ops.dot_product_attention, (HEADS,) * 3),
    "linear_cross_entropy": (ops.linear_cross_entropy, (X, WORDS, LABELS)),
    "layer_norm": (ops.layer_norm, (X,)),
    "silu": (lambda x, **how: ops.silu(x, save="output", **how), (X,)),
}


def by_kernel(name):
    op, args = OPS[name]
    return lambda *args: op(*args, implementation="pallas"), args


def adam_step(p, g):
    adam = jaxmem.optim.FusedAdam(1e-3, implementation="pallas")
    return adam.step(g, adam.init(p), p)[0]


def lowered(fn, *args, device=None, platform="cuda"):
    """The program for a device, an `AbstractDevice`, or for one of which nothing is."""
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    allowed += [export.DisabledSafetyCheck.custom_call("tpu_custom_call")]
    how = {"platforms": [platform], "disabled_checks": allowed}
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return export.export(jax.jit(lambda *x: fn(*x)), **how)(*args).mlir_module()


def gpu(kind):
    return AbstractDevice(kind, 100, "cuda")


@pytest.mark.parametrize("name", OPS)
def test_a_kernel_is_refused_before_hopper(name):
    fn, args = by_kernel(name)
    words = f"{name}: the pallas kernel needs compute capability 9.0.*this is 8.0 "
    words += r"\(NVIDIA A100-SXM4-40GB\); use implementation='xla'"
    with pytest.raises(ValueError, match=words):
        lowered(fn, *args, device=gpu("NVIDIA A100-SXM4-40GB"))


@pytest.mark.parametrize("name", ["attention", "linear_cross_entropy"])
def test_products_are_refused_after_hopper(name):
    fn, args = by_kernel(name)
    words = r"needs compute capability 9.0, this is 10.0 \(NVIDIA B200\)"
    with pytest.raises(ValueError, match=words):
        lowered(fn, *args, device=gpu("NVIDIA B200"))


def test_derivatives_maps_and_loops_are_refused_too():
    fn, args = by_kernel("silu")
    steps = [
        lambda x: jax.vjp(fn, x)[1](x),
        jax.vmap(fn),
        lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=2)[0],
        jax.checkpoint(fn),
    ]
    for step in steps:
        with pytest.raises(ValueError, match=r"silu: .* 7.5 \(Tesla T4\)"):
            lowered(step, *args, device=gpu("Tesla T4"))


@pytest.mark.parametrize("target", ["t4", "l4", "a100"])
def test_an_estimate_says_which_kernel_is_not_for_the_chip(target):
    """Before anything is compiled."""
    p = jax.ShapeDtypeStruct((4096,), jnp.float32)
    words = f"cannot be lowered for {target}: adam: the pallas kernel needs compute"
    with pytest.raises(ValueError, match=words):
        jaxmem.estimate(jax.jit(adam_step), p, p, target=target)


@pytest.mark.parametrize("absent", [True, False])
def test_an_estimate_over_several_devices_says_it(absent):
    """Whether the mesh is of the target's devices or of this process's."""
    if absent:
        mesh = target_mesh("a100", (8,), ("x",))
    else:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    part = PartitionSpec("x")
    fn, args = by_kernel("silu")
    step = jax.shard_map(fn, mesh=mesh, in_specs=part, out_specs=part)
    place = jax.sharding.NamedSharding(mesh, part)
    args = [x.update(sharding=place) for x in args]
    with pytest.raises(ValueError, match=r"silu: .* 8.0 \(NVIDIA A100"):
        jaxmem.estimate(jax.jit(step), *args, target="a100")


def test_what_is_not_known_is_not_refused():
    fn, args = by_kernel("silu")
    for device in (None, gpu("NVIDIA X1"), AbstractDevice("TPU v4", 1, "tpu")):
        assert "mosaic_gpu" in lowered(fn, *args, device=device)
    assert "tpu_custom_call" in lowered(fn, *args, platform="tpu")


def device(kind, platform="gpu", **known):
    return types.SimpleNamespace(device_kind=kind, platform=platform, **known)


@pytest.mark.parametrize(
    "known, expected",
    [
        (device("NVIDIA X1", compute_capability="12.0"), (12, 0)),
        (device("NVIDIA H100 NVL"), (9, 0)),
        (device("NVIDIA GH200 480GB"), (9, 0)),
        (device("NVIDIA X1"), None),
    ],
)
def test_a_device_tells_its_capability_or_is_known_by_name(known, expected):
    assert chips.capability(known) == expected


def test_targets_are_known_by_name():
    for target in CHIPS:
        known = AbstractDevice(target.device, 1, target.platform)
        assert chips.platform_of(chips.chip_name(known)) == target.platform


def test_memory_of_cores_is_that_which_pallas_knows():
    from jax.experimental.pallas import tpu as pltpu

    for target in CHIPS:
        if target.platform == "tpu":
            mesh = target_mesh(target, (1,), ("_",))
            with jax.sharding.use_abstract_mesh(mesh):
                expected = pltpu.get_tpu_info().vmem_capacity_bytes
                assert chips.vmem_in_context() == expected


# -- blocks of cross entropy on a TPU of 16 MiB


def entropy(features):
    x = jax.ShapeDtypeStruct((512, features), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((features, 512), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((512,), jnp.int32)
    fn, _ = by_kernel("linear_cross_entropy")
    return jax.grad(fn, argnums=(0, 1)), (x, kernel, labels)


def test_blocks_fit_the_chip_that_is_traced_for():
    x, kernel = entropy(2048)[1][:2]
    case = lambda: cross_entropy_tpu._case(x, kernel, 1, (12, 4), LossOptions())
    v5e = case()
    with jax.sharding.use_abstract_mesh(target_mesh("tpu-v4", (1,), ("_",))):
        v4 = case()
    assert v4.block_tokens < v5e.block_tokens
    assert v4.vmem <= chips.TPUS["v4"] * chips.MIB < v5e.vmem


def test_blocks_that_do_not_fit_are_refused():
    v4 = AbstractDevice("TPU v4", 1, "tpu")
    step, args = entropy(2048)
    assert "tpu_custom_call" in lowered(step, *args, device=v4, platform="tpu")
    step, args = entropy(8192)
    with pytest.raises(ValueError, match="fewer features than 8192: the least blocks"):
        lowered(step, *args, device=v4, platform="tpu")
    needs = chips.Needs("linear_cross_entropy", "tpu", vmem=24 * chips.MIB)
    words = "a chip of at least 24.0 MiB of VMEM a core, this is one of 16 MiB"
    with pytest.raises(ValueError, match=words):
        needs.check(v4)
    needs.check(AbstractDevice("TPU v5 lite", 1, "tpu"))


# -- every kernel, every chip


@pytest.mark.slow
@pytest.mark.parametrize("target", CHIPS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", benchmark.CASES)
def test_a_kernel_compiles_or_says_why_not(name, target, monkeypatch):
    if not target.available:
        pytest.skip(target.why_not)
    monkeypatch.setattr(benchmark, "TOKENS", 2048)
    monkeypatch.setattr(benchmark, "WIDTH", 1024)
    status = benchmark.on_chip(name, target.name)
    before = target.platform == "cuda" and chips.GPUS[target.name] < chips.HOPPER
    product = name.startswith(("attention", "linear_cross_entropy"))
    after = target.name == "b200" and product
    needs = "needs compute capability 9.0" + ("" if product else " or later")
    assert status == (needs if before or after else "compiles")
