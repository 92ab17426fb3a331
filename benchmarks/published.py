"""Predicted seconds beside those that others have published, for chips not at hand.

    python -m benchmarks.published [words of a chip's or a step's name]

Each step is written down as its recipe says: sizes, batch, mesh, what is kept, and the
options of XLA that change the program. It is compiled by this jax, where the published
run had that of its day. "published" are seconds of a step: as its log says, or from
tokens per second, or from flops per second as MaxText counted them then, with attention
as if it had no mask. Rows of this jaxmem are kept: it goes on where it was stopped.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

import jaxmem
from benchmarks._common import publish_some, unless_known
from benchmarks.steps.published import Model, Recipe, step_of

FILE = "published"
COLUMNS = (
    *("chip", "step", "source", "published s", "predicted s", "ratio"),
    *("products %", "memory %", "collective %", "host %", "MFU %"),
)
BOUNDS = ("products", "memory", "collective", "host")
TIMEOUT = 3600.0  # seconds of a compile

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/"
_TIERS = (
    "https://maxtext.readthedocs.io/en/maxtext-v0.2.2/reference/models/tiering.html"
)
_TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/"

LLAMA_2_7B = Model(32, 4096, 11_008, 32, 32, 32_000)
LLAMA_2_70B = Model(80, 8192, 28_672, 64, 8, 32_000)
LLAMA_3_8B = Model(32, 4096, 14_336, 32, 8, 128_256)
LLAMA_3_70B = Model(80, 8192, 28_672, 64, 8, 128_256)
MISTRAL_7B = Model(32, 4096, 14_336, 32, 8, 32_000)
# MaxText's own, of which its `global_parameter_scale` doubles one size after another
MAXTEXT_16B = Model(32, 4096, 28_672, 64, 64, 32_000, parallel=True)
MAXTEXT_32B = Model(32, 8192, 28_672, 64, 64, 32_000, parallel=True)

QKV = ("query_proj", "key_proj", "value_proj")
DOTS = (*QKV, "out_proj", "mlpwo")
MINIMAL = (*DOTS, "mlpwi_0", "mlpwi_1", "mlpwi")
INPUT = ("decoder_layer_input",)

# Of libtpu, as the recipes group them, but for three that it has no longer.
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "98304"}
_GATHERS = dict.fromkeys(
    ("xla_tpu_overlap_compute_collective_tc", "xla_enable_async_all_gather"), "true"
)
# collectives in parts between those of products, which libtpu has for a v5e alone since
# jax 0.12
_IN_PARTS = dict.fromkeys(
    (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
    ),
    "true",
)
_DATA = dict.fromkeys(
    (
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_data_parallel_opt_different_sized_ops",
    ),
    "true",
)
_SCATTERS = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
}
_SPARSE = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_reduce_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
_OFFLOADS = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": "true",
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": "100",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
_WHOLE = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_V5P = {
    "xla_tpu_megacore_fusion_allow_ags": "false",
    "xla_enable_async_collective_permute": "true",
    "xla_tpu_enable_ag_backward_pipelining": "true",
}
_V5E = _GATHERS | _IN_PARTS | _DATA
_OVERLAPPED = _VMEM | _GATHERS | _DATA | _SCATTERS | _OFFLOADS
_LARGE = {"blocks": 2048, "one_pass": True}
_GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": "1073741824",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "134217728",
    "xla_gpu_enable_triton_gemm": False,
}


@dataclass(frozen=True)
class Published:
    """A step that somebody has timed.

    Attributes:
      recipe: its program.
      source: the address of the figure.
      seconds: as published; else
      tokens: per second and device; else
      flops: per second and device.
    """

    recipe: Recipe
    source: str
    seconds: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0

    @property
    def took(self) -> float:
        """Seconds."""
        made = self.recipe
        if self.tokens:
            return made.batch * made.tokens / self.tokens
        return made.flops / self.flops if self.flops else self.seconds


def v6e(devices: int, model: Model, batch: int, offloaded: tuple[str, ...], **more):
    how = {"offloaded": offloaded, **_LARGE, **more}
    return Recipe("tpu-v6e", devices, model, batch, how.pop("tokens", 8192), **how)


def llama_2_7b(batch: int) -> Recipe:
    """On 8 H100."""
    kept = (*MINIMAL, "context")
    how = {"rolled": False, "options": _GPU}
    return Recipe("h100", 8, LLAMA_2_7B, batch, 4096, kept, **how)


STEPS: Mapping[str, Published] = {
    "Llama-3.1-8B, 8 chips, 3 x 8192": Published(
        v6e(
            *(8, LLAMA_3_8B, 3, (*INPUT, *QKV, "out_proj")),
            options=_OVERLAPPED | _SPARSE | _WHOLE,
        ),
        _RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-8",
        seconds=3.443,
    ),
    "Llama-3.1-8B, 256 chips, 4 x 8192": Published(
        v6e(
            *(256, LLAMA_3_8B, 4, (*INPUT, *QKV, "out_proj")),
            options=_OVERLAPPED | _SPARSE,
        ),
        _RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-256",
        seconds=4.546,
    ),
    "Mistral-7B, 8 chips, 6 x 8192": Published(
        v6e(
            *(8, MISTRAL_7B, 6, (*INPUT, *QKV, "out_proj")),
            options=_OVERLAPPED | _SPARSE | _WHOLE,
        ),
        _RECIPES + "trillium/Mistral-7B-MaxText",
        seconds=6.320,
    ),
    "Llama-2-70B, 256 chips, 2 x 4096": Published(
        v6e(
            *(256, LLAMA_2_70B, 2, QKV),
            tokens=4096,
            blocks=1024,
            one_pass=False,
            options=_VMEM | _GATHERS | _SPARSE,
        ),
        _RECIPES + "trillium/Llama2-70B-MaxText",
        seconds=9.052,
    ),
    "Llama-3.1-70B, 32 chips, 2 x 8192": Published(
        v6e(
            *(32, LLAMA_3_70B, 2, (*INPUT, *QKV)),
            stored=jnp.bfloat16,
            options=_OVERLAPPED | _WHOLE,
        ),
        _RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-32",
        seconds=17.790,
    ),
    "Llama-3.1-70B, 256 chips, 5 x 8192": Published(
        v6e(256, LLAMA_3_70B, 5, (*INPUT, *QKV), options=_OVERLAPPED),
        _RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-256",
        seconds=42.656,
    ),
    "Llama-2-70B, 512 chips, 4 x 4096": Published(
        Recipe(
            "tpu-v5p", 512, LLAMA_2_70B, 4, 4096, DOTS, options=_GATHERS | _DATA | _V5P
        ),
        _TIERS,
        tokens=692,
    ),
    "MaxText's 32B, 64 chips, 6 x 2048": Published(
        Recipe(
            *("tpu-v5p", 64, MAXTEXT_32B, 6, 2048, MINIMAL),
            tensor=4,
            options=_GATHERS | _DATA | _V5P,
        ),
        _MAXTEXT + "tpu/v5p",
        flops=328e12,
    ),
    "MaxText's 16B, 256 chips, 6 x 2048": Published(
        Recipe("tpu-v5e", 256, MAXTEXT_16B, 6, 2048, options=_V5E),
        _MAXTEXT + "tpu/v5e",
        flops=120e12,
    ),
    "MaxText's 32B, 256 chips, 4 x 2048": Published(
        Recipe("tpu-v5e", 256, MAXTEXT_32B, 4, 2048, options=_V5E),
        _MAXTEXT + "tpu/v5e",
        flops=132e12,
    ),
    "Llama-2-7B, 8 GPUs, 2 x 4096": Published(llama_2_7b(2), _TOOLBOX, seconds=0.721),
    "Llama-2-7B, 8 GPUs, 4 x 4096": Published(
        llama_2_7b(4),
        _MAXTEXT + "gpu/a3/llama_2_7b",
        flops=492e12,
    ),
}


def measure(step: Published) -> list:
    """The cells of a row."""
    made, recipe = step_of(step.recipe), step.recipe
    report = jaxmem.estimate(
        made.step,
        *made.args,
        target=recipe.chip,
        donate_argnums=made.donate,
        compiler_options=dict(recipe.options) or None,
        timeout=TIMEOUT,
    )
    print(report.time, flush=True)
    time = report.time
    waits = dict(time.by_bound)
    shares = [100 * waits.get(one, 0.0) / time.seconds for one in BOUNDS]
    ratio = time.seconds / step.took
    return [step.source, step.took, time.seconds, ratio, *shares, 100 * time.mfu]


def cases() -> dict[tuple[str, ...], Callable]:
    keys = {(one.recipe.chip, name): one for name, one in STEPS.items()}
    known = lambda key: unless_known(FILE, key, lambda: measure(keys[key]))
    return {key: partial(known, key) for key in keys}


if __name__ == "__main__":
    publish_some(FILE, COLUMNS, cases(), sys.argv[1:])
