"""Kernels on the chips that they are for, and a clear error on the others."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import jaxmem
from benchmarks import kernels as benchmark
from benchmarks.steps.kernels import Size
from jaxmem import ops
from jaxmem.chips import AbstractGpu
from jaxmem.memory import CompileError, target_mesh, targets
from pallas_kernels import chips
from pallas_kernels.bits import gpu as bits_gpu
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.cross_entropy import tpu as cross_entropy_tpu

CHIPS = [t for t in targets() if t.platform != "cpu"]
X = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)

# name of the kernel -> (op, its arguments)
OPS = {
    "attention": (ops.dot_product_attention, (HEADS,) * 3),
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
def test_a_kernel_is_refused_where_mosaic_would_compile_for_hopper(name):
    """As for an A100 that does not tell its compute capability, in any jax."""
    fn, args = by_kernel(name)
    words = f"{name}: the pallas kernel needs compute capability 9.0.*this is 8.0 "
    words += r"\(NVIDIA A100-SXM4-40GB\); use implementation='xla'"
    with pytest.raises(ValueError, match=words) as error:
        lowered(fn, *args, device=gpu("NVIDIA A100-SXM4-40GB"))
    assert ("'cudnn'" in str(error.value)) == (name == "attention")


ON_AMPERE = ["layer_norm", "silu"]
A100 = AbstractGpu("NVIDIA A100-SXM4-40GB", 108, "cuda", "8.0")


@pytest.mark.parametrize("name", ON_AMPERE)
def test_a_kernel_is_for_ampere_from_jax_0_12_on(name, monkeypatch):
    fn, args = by_kernel(name)
    monkeypatch.setattr(chips, "COMPILES_FOR_AMPERE", False)
    words = r"needs compute capability 9.0 or later \(8.0 from jax 0.12 on\), this is 8"
    with pytest.raises(ValueError, match=words):
        lowered(fn, *args, device=A100)
    with pytest.raises(ValueError, match="bits: .*; XLA's packing has the same layout"):
        lowered(bits_gpu.pack, X, device=A100)
    if jax.__version_info__ >= (0, 12):
        monkeypatch.undo()
        assert "mosaic_gpu" in lowered(fn, *args, device=A100)
        assert "mosaic_gpu" in lowered(bits_gpu.pack, X, device=A100)


@pytest.mark.parametrize("capability", ["7.5", "7.0"])
def test_no_kernel_is_for_a_gpu_before_ampere(capability):
    fn, args = by_kernel("silu")
    words = f"silu: .* this is {capability} .*; use implementation='xla'$"
    with pytest.raises(ValueError, match=words):
        lowered(fn, *args, device=AbstractGpu("Tesla", 40, "cuda", capability))


def test_products_are_refused_after_hopper():
    fn, args = by_kernel("attention")
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


@pytest.mark.fast("t4", "a100")
@pytest.mark.parametrize("target", ["t4", "l4", "a100"])
def test_an_estimate_says_which_kernel_is_not_for_the_chip(target):
    """Before anything is compiled."""
    fn, args = by_kernel("attention")
    words = f"cannot be lowered for {target}: attention: the pallas kernel needs comp"
    with pytest.raises(CompileError, match=words):
        jaxmem.estimate(jax.jit(fn), *args, target=target)


def test_an_estimate_says_which_kernel_is_not_for_a_t4():
    p = jax.ShapeDtypeStruct((4096,), jnp.float32)
    words = "cannot be lowered for t4: adam: the pallas kernel needs compute"
    with pytest.raises(CompileError, match=words):
        jaxmem.estimate(jax.jit(adam_step), p, p, target="t4")


@pytest.mark.parametrize("absent", [True, False])
def test_an_estimate_over_several_devices_says_it(absent):
    """Whether the mesh is of the target's devices or of this process's."""
    if absent:
        mesh = target_mesh("t4", (8,), ("x",))
    else:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    part = PartitionSpec("x")
    fn, args = by_kernel("silu")
    step = jax.shard_map(fn, mesh=mesh, in_specs=part, out_specs=part)
    place = jax.sharding.NamedSharding(mesh, part)
    args = [x.update(sharding=place) for x in args]
    with pytest.raises(CompileError, match=r"silu: .* 7.5 \(Tesla T4"):
        jaxmem.estimate(jax.jit(step), *args, target="t4")


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
    fn = functools.partial(ops.linear_cross_entropy, implementation="pallas")
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
    small = Size(tokens=2048, width=1024, heads=4, words=2048, elements=2**20)
    case = functools.partial(benchmark.CASES[name], size=small)
    monkeypatch.setitem(benchmark.CASES, name, case)
    status = benchmark.on_chip(name, target.name)
    assert status == expected(name, target)


def expected(name, target):
    """Of `on_chip`, from what the chips and jax can do."""
    if target.platform == "tpu":
        return "compiles"
    capability = chips.GPUS[target.name]
    if name == "linear_cross_entropy":
        return "none"
    if name.startswith("attention"):
        return "compiles" if capability == (9, 0) else "needs compute capability 9.0"
    least = (8, 0) if jax.__version_info__ >= (0, 12) else (9, 0)
    if capability >= least:
        return "compiles"
    later = " (8.0 from jax 0.12 on)" if least == (9, 0) else ""
    return f"needs compute capability {least[0]}.0 or later{later}"
