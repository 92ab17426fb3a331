"""The steps of `benchmarks.published`: transformers as MaxText's recipes train them.

Layers of RMS norms, rotary positions, grouped heads and SwiGLU, scanned, in bfloat16
over float32 parameters; AdamW after clipping; parameters and moments spread over all
devices, activations over the examples; embeddings by one-hot products, as the recipes
ask for. A layer is recomputed but for the arrays that the recipe's policy names.

Attention is JAX's splash kernel on TPUs, cuDNN's on GPUs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.steps.devices import placed
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

HEAD = 128  # channels of each head
FSDP, TENSOR = "fsdp", "tensor"
_POSITIONS = 500_000.0  # the longest wave of rotary positions


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer.

    Attributes:
      layers: how many.
      width: channels between them.
      hidden: channels of the MLP.
      heads: of queries.
      groups: heads of keys and values.
      words: of the vocabulary.
      parallel: attention and MLP both read the layer's input, after one norm.
      norms: queries and keys are normalised, head by head.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    words: int
    parallel: bool = False
    norms: bool = False

    @property
    def weights(self) -> int:
        """Parameters of matrix products that each token meets."""
        attention = 2 * self.width * HEAD * (self.heads + self.groups)
        layer = attention + 3 * self.width * self.hidden
        return self.layers * layer + self.width * self.words


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
      chip: a name of `jaxmem.targets()`.
      devices: how many.
      model: its sizes.
      batch: examples of each device.
      tokens: of an example.
      kept: names of a layer's arrays that its backward pass finds in memory.
      offloaded: of those that it finds in the host's memory.
      tensor: devices that share the heads and the MLP's channels.
      blocks: tokens of a block of the attention's kernels.
      one_pass: whether one kernel computes all gradients of attention.
      stored: the dtype of parameters and moments.
      rolled: whether the layers are a loop.
      options: of XLA.
    """

    chip: str
    devices: int
    model: Model
    batch: int
    tokens: int
    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    tensor: int = 1
    blocks: int = 512
    one_pass: bool = False
    stored: jnp.dtype = F32
    rolled: bool = True
    options: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Of a device's step as MaxText counted them: attention without its mask."""
        each = 6.0 * self.model.weights
        each += 12.0 * self.model.layers * self.model.heads * HEAD * self.tokens
        return each * self.batch * self.tokens


# -- attention


def splash_attention(recipe: Recipe, q, k, v):
    """Causal; [batch, tokens, heads, channels] of one device."""
    _, tokens, heads, _ = q.shape
    side, one_pass = recipe.blocks, recipe.one_pass
    sizes = splash.BlockSizes(
        *(side,) * 6,
        block_q_dq=None if one_pass else side,
        block_kv_dq=None if one_pass else side,
        use_fused_bwd_kernel=one_pass,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((tokens, tokens))] * heads)
    kernel = splash.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1, block_sizes=sizes
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * HEAD**-0.5, k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


def cudnn_attention(q, k, v):
    """Causal, by cuDNN; [batch, tokens, heads, channels] of one device."""
    how = {"is_causal": True, "implementation": "cudnn"}
    return jaxmem.ops.dot_product_attention(q, k, v, **how)


def attention_of(recipe: Recipe, mesh) -> Callable:
    """Each device has its own examples and heads."""
    is_gpu = not recipe.chip.startswith("tpu")
    one = cudnn_attention if is_gpu else functools.partial(splash_attention, recipe)
    rows = P(FSDP, None, TENSOR)
    spread = {"mesh": mesh, "in_specs": (rows,) * 3, "out_specs": rows}
    return jax.shard_map(one, check_vma=False, **spread)


# -- layers


def rotated(x):
    """With its positions; [batch, tokens, heads, channels]."""
    _, tokens, _, channels = x.shape
    waves = _POSITIONS ** (-jnp.arange(0, channels, 2, F32) / channels)
    angles = jnp.arange(tokens, dtype=F32)[:, None, None] * waves
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    one, other = jnp.split(x.astype(F32), 2, -1)
    turned = one * cos - other * sin, other * cos + one * sin
    return jnp.concatenate(turned, -1).astype(x.dtype)


def attention(core: Callable, x, w):
    batch, tokens, _ = x.shape
    heads = lambda name: (x @ w[name]).reshape(batch, tokens, -1, HEAD)
    q = checkpoint_name(rotated(heads("q")), "query_proj")
    k = checkpoint_name(rotated(heads("k")), "key_proj")
    v = checkpoint_name(heads("v"), "value_proj")
    y = checkpoint_name(core(q, k, v), "context")
    return checkpoint_name(y.reshape(batch, tokens, -1) @ w["out"], "out_proj")


def mlp(x, w):
    gate = checkpoint_name(x @ w["gate"], "mlpwi_0")
    up = checkpoint_name(x @ w["up"], "mlpwi_1")
    inner = checkpoint_name(jax.nn.silu(gate) * up, "mlpwi")
    return checkpoint_name(inner @ w["down"], "mlpwo")


def layer(parallel: bool, core: Callable, keep: Callable, x, w):
    w = {name: a.astype(BF16) for name, a in w.items()}
    x = checkpoint_name(keep(x), "decoder_layer_input")
    if parallel:
        inner = norm(x, w["n1"])
        return keep(x + attention(core, inner, w) + mlp(inner, w)), None
    x = keep(x + attention(core, norm(x, w["n1"]), w))
    return keep(x + mlp(norm(x, w["n2"]), w)), None


def policy_of(recipe: Recipe) -> Callable:
    """What a layer keeps; with "context" the statistics of cuDNN's attention, too."""
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=recipe.kept,
        names_which_can_be_offloaded=recipe.offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    if "context" not in recipe.kept:
        return named

    def policy(primitive, *args, **params):
        fused = str(primitive).startswith("dot_product_attention_fwd")
        return fused or named(primitive, *args, **params)

    return policy


def loss_of(recipe: Recipe, core: Callable, keep: Callable) -> Callable:
    one = functools.partial(layer, recipe.model.parallel, core, keep)
    one = jax.checkpoint(one, policy=policy_of(recipe), prevent_cse=not recipe.rolled)

    def loss(params, tokens):
        words, labels = (
            jax.nn.one_hot(t, recipe.model.words, dtype=BF16) for t in tokens
        )
        x = keep(words @ params["table"].astype(BF16))
        unroll = 1 if recipe.rolled else recipe.model.layers
        x, _ = jax.lax.scan(one, x, params["layers"], unroll=unroll)
        x = norm(x, params["norm"].astype(BF16))
        logits = (x @ params["head"].astype(BF16)).astype(F32)
        return optax.softmax_cross_entropy(logits, labels.astype(F32)).mean()

    return loss


# -- steps


def parameters(model: Model, dtype):
    """Shapes: {"layers", "table", "norm", "head"}."""
    width, hidden, words = model.width, model.hidden, model.words
    all_heads, few = HEAD * model.heads, HEAD * model.groups
    shapes = {
        **{"q": (width, all_heads), "k": (width, few), "v": (width, few)},
        **{"out": (all_heads, width), "n1": (width,)},
        **{"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)},
    }
    if not model.parallel:
        shapes["n2"] = (width,)
    if model.norms:
        shapes |= dict.fromkeys(("nq", "nk"), (HEAD,))
    a = lambda *shape: SDS(shape, dtype)
    layers = {name: a(model.layers, *shape) for name, shape in shapes.items()}
    return {
        "layers": layers,
        "table": a(words, width),
        "norm": a(width),
        "head": a(width, words),
    }


def spec_of(name: str, x) -> P:
    """Along which axes of the mesh a parameter, or a moment of it, is spread."""
    if x.ndim < 2 or name in ("n1", "n2"):
        return P()
    if name in ("table", "head"):
        return P(TENSOR, FSDP) if name == "table" else P(FSDP, TENSOR)
    is_row = name in ("out", "down")
    return P(None, TENSOR, FSDP) if is_row else P(None, FSDP, TENSOR)


def step_of(recipe: Recipe) -> Made:
    """A step of a recipe, and the shapes of its state and its tokens."""
    shape = recipe.devices // recipe.tensor, recipe.tensor
    mesh = jaxmem.target_mesh(recipe.chip, shape, (FSDP, TENSOR))
    where = NamedSharding(mesh, P(FSDP, None, TENSOR))
    keep = lambda x: jax.lax.with_sharding_constraint(x, where)
    core = attention_of(recipe, mesh)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-5, b2=0.95, weight_decay=0.1)
    )
    params = parameters(recipe.model, recipe.stored)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), spec_of)
    examples = recipe.batch * recipe.devices, recipe.tokens
    tokens = placed(mesh, (SDS(examples, jnp.int32),) * 2, lambda *_: P(FSDP))
    return Made(train_step(loss_of(recipe, core, keep), tx), (state, tokens), (0,))
