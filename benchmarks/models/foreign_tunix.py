"""nnx models of Google's tunix: Llama 3, Qwen 2 and 3, Gemma 1 and 3."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from benchmarks.models.foreign import Model, Size, cross_entropy, tokens

# As Qwen3-1.7B; few of its layers, and of its words, so that layers take most bytes.
WIDE = Size(4, 2048, 16, 2048, 2, 32_768, 0, jnp.bfloat16)


@dataclass(frozen=True)
class Family:
    """A module of tunix, the class in it, and its configuration."""

    module: str
    model: str
    options: Callable[[Size, Any], dict[str, Any]]

    def make(self, size: Size, remat: str = "NONE") -> nnx.Module:
        """The model; `remat`: a name of its `RematConfig`."""
        with warnings.catch_warnings():  # it uses names that jax and flax deprecate
            warnings.simplefilter("ignore", DeprecationWarning)
            home = importlib.import_module(f"tunix.models.{self.module}.model")
            own = {"remat_config": home.RematConfig[remat]}
            config = home.ModelConfig(**{**self.options(size, home), **own})
            return getattr(home, self.model)(config, rngs=nnx.Rngs(params=0))

    def gradient(self, remat: str) -> tuple[Callable, tuple]:
        """A loss gradient of layers of a usual width, and its arguments."""
        model = nnx.eval_shape(lambda: self.make(WIDE, remat))
        params = nnx.split(model, nnx.Param)[1]
        loss = lambda params, batch: _loss(model)(params, {}, batch, None)[0]
        batch = {k: jax.ShapeDtypeStruct(*_about(v)) for k, v in batch_of(WIDE).items()}
        return jax.grad(loss), (params, batch)

    def build(self, size: Size, remat: str = "NONE") -> Model:
        """The model as a function of its parameters, split off once."""
        plain = nnx.eval_shape(lambda: self.make(size, remat))
        lean = jaxmem.substitute(plain)
        inputs = batch_of(size)

        def report(params, statistics, batch):
            return jaxmem.nn.report(lean, *given(batch))

        # the weights are those of the seed above, whatever the key
        init = lambda key: (nnx.split(self.make(size, remat), nnx.Param)[1], {})
        return Model(init, _loss(plain), _loss(lean), report, inputs)


def _about(x: np.ndarray) -> tuple:
    return x.shape, x.dtype


def _loss(model: nnx.Module):
    graph = nnx.graphdef(model)

    def loss(params, statistics, batch, key):
        logits, _ = nnx.merge(graph, params)(*given(batch))
        return cross_entropy(logits, batch["labels"]), statistics

    return loss


def given(batch: dict) -> tuple:
    """The batch as these models take it, without a cache."""
    return batch["tokens"], batch["positions"], None, batch["mask"]


def batch_of(s: Size) -> dict[str, np.ndarray]:
    """Tokens, positions, a causal mask and labels."""
    causal = np.tril(np.ones((s.length, s.length), bool))
    places = np.arange(s.length, dtype=np.int32)
    return {
        "tokens": tokens(s),
        "positions": np.broadcast_to(places, (s.batch, s.length)),
        "mask": np.broadcast_to(causal, (s.batch, s.length, s.length)),
        "labels": tokens(s, 1),
    }


def _options(s: Size, words: str = "vocab_size") -> dict[str, Any]:
    return {
        "num_layers": s.layers,
        words: s.vocabulary,
        "embed_dim": s.width,
        "hidden_dim": 4 * s.width,
        "num_heads": s.heads,
        "head_dim": s.width // s.heads,
        "num_kv_heads": s.heads // 2,
    }


def _llama3(s: Size, _) -> dict[str, Any]:
    return {**_options(s), "rope_theta": 500_000, "norm_eps": 1e-5}


def _qwen(s: Size, _) -> dict[str, Any]:
    dtypes = {"dtype": s.dtype, "param_dtype": jnp.float32}
    return {**_options(s), "rope_theta": 1_000_000, "norm_eps": 1e-6, **dtypes}


def _gemma(s: Size, home) -> dict[str, Any]:
    return {
        **_options(s, "num_embed"),
        "final_logit_softcap": None,
        "attention_types": (home.AttentionType.GLOBAL,) * s.layers,
        "use_post_attn_norm": False,
        "use_post_ffw_norm": False,
    }


def _gemma3(s: Size, _) -> dict[str, Any]:
    window = {"sliding_window_size": s.length // 2}
    return {**_options(s, "num_embed"), **window, "param_dtype": jnp.float32}


FAMILIES = {
    "gemma": Family("gemma", "Gemma", _gemma),
    "gemma3": Family("gemma3", "Gemma3", _gemma3),
    "llama3": Family("llama3", "Llama3", _llama3),
    "qwen2": Family("qwen2", "Qwen2", _qwen),
    "qwen3": Family("qwen3", "Qwen3", _qwen),
}


def build(name: str, size: Size) -> Model:
    """The model of this name."""
    return FAMILIES[name].build(size)
