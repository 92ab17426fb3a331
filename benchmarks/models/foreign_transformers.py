"""Flax models of Hugging Face transformers (4.x: version 5 has none).

T5, mT5 and LongT5 are not among them: they call `jnp.clip(a_max=...)`, an argument that
jax 0.10 no longer has.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from flax import linen

import jaxmem
from benchmarks.models.foreign import Model, Size, cross_entropy, images, tokens

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers.logging.set_verbosity_error()  # it says that Flax is deprecated


@dataclass(frozen=True)
class Family:
    """A class of transformers, its configuration, and what its module is given."""

    model: str
    config: str
    options: Callable[[Size], dict[str, Any]]
    inputs: Callable[[Size], dict[str, np.ndarray]]
    checkpointed: bool = False  # with `gradient_checkpointing`, of those that have it

    def module(self, size: Size) -> linen.Module:
        config = getattr(transformers, self.config)(**self.options(size))
        make = getattr(transformers, self.model)
        more = {"gradient_checkpointing": True} if self.checkpointed else {}
        return make(config, dtype=size.dtype, _do_init=False, **more).module

    def build(self, size: Size) -> Model:
        """The model as a loss; dropout as its configuration has it."""
        module, inputs = self.module(size), self.inputs(size)
        lean = jaxmem.substitute(module)

        def init(key):
            given = {n: x for n, x in inputs.items() if n != "labels"}
            variables = dict(module.init({"params": key, "dropout": key}, **given))
            return variables.pop("params"), variables

        def report(params, statistics, batch):
            given = {n: x for n, x in batch.items() if n != "labels"}
            return jaxmem.nn.report(lean, **given)

        return Model(init, _loss(module), _loss(lean), report, inputs)


def _loss(module: linen.Module):
    def loss(params, statistics, batch, key):
        given = {n: x for n, x in batch.items() if n != "labels"}
        rngs = None if key is None else {"dropout": key}
        out, new = module.apply(
            {"params": params, **statistics},
            **given,
            deterministic=key is None,
            rngs=rngs,
            mutable=["batch_stats"],
        )
        logits = getattr(out, "logits", None)
        if logits is None:  # CLIP: which image belongs to which text
            logits = out.logits_per_image
        return cross_entropy(logits, batch["labels"]), new

    return loss


def _bert_like(s: Size, **more) -> dict[str, Any]:
    """Names that most configurations share."""
    return {
        "vocab_size": s.vocabulary,
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": 4 * s.width,
        "max_position_embeddings": 2 * s.length,
        **more,
    }


def _bart_like(s: Size, **more) -> dict[str, Any]:
    sides = ("encoder", "decoder")
    return {
        "vocab_size": s.vocabulary,
        "d_model": s.width,
        "max_position_embeddings": 2 * s.length,
        **{f"{side}_layers": s.layers for side in sides},
        **{f"{side}_attention_heads": s.heads for side in sides},
        **{f"{side}_ffn_dim": 4 * s.width for side in sides},
        **more,
    }


def _causal(s: Size) -> dict[str, np.ndarray]:
    places = np.broadcast_to(np.arange(s.length, dtype=np.int32), (s.batch, s.length))
    return {
        "input_ids": tokens(s),
        "attention_mask": np.ones((s.batch, s.length), np.int32),
        "position_ids": places,
        "labels": tokens(s, 1),
    }


def _without_places(s: Size) -> dict[str, np.ndarray]:
    given = _causal(s)
    del given["position_ids"]
    return given


def _typed(s: Size) -> dict[str, Any]:
    """Of BERT and what descends from it; `head_mask` has no default."""
    return {
        **_causal(s),
        "token_type_ids": np.zeros((s.batch, s.length), np.int32),
        "head_mask": None,
    }


def _typed_without_places(s: Size) -> dict[str, Any]:
    given = _typed(s)
    del given["position_ids"]
    return given


def _pairs(s: Size) -> dict[str, np.ndarray]:
    """Of a text and its translation."""
    text = _causal(s)
    return {**text, **_decoder(text), "decoder_input_ids": tokens(s, 2)}


def _decoder(text) -> dict[str, np.ndarray]:
    return {
        f"decoder_{n}": text[n] for n in ("input_ids", "attention_mask", "position_ids")
    }


def _images(s: Size) -> dict[str, np.ndarray]:
    labels = np.arange(s.batch, dtype=np.int32) % 2
    return {"pixel_values": images(s), "labels": labels}


def _clip(s: Size) -> dict[str, np.ndarray]:
    return {**_causal(s), **_images(s), "labels": np.arange(s.batch, dtype=np.int32)}


def _speech(s: Size) -> dict[str, np.ndarray]:
    """Mel spectrograms [B, bins, frames] of twice as many frames as the encoder has."""
    shape = (s.batch, 80, 2 * s.length)
    features = np.random.default_rng(3).standard_normal(shape, np.float32)
    text = _causal(s)
    return {"input_features": features, **_decoder(text), "labels": text["labels"]}


def _patch(s: Size) -> int:
    """A side of a patch: 14 x 14 patches of a real image."""
    return 16 if s.image >= 224 else 8


def _vit_like(s: Size, **more) -> dict[str, Any]:
    options = _bert_like(s, image_size=s.image, patch_size=_patch(s), **more)
    return {n: x for n, x in options.items() if n != "max_position_embeddings"}


def _clip_options(s: Size) -> dict[str, Any]:
    vision = _vit_like(s, projection_dim=s.width)
    return {
        "text_config": _bert_like(s, projection_dim=s.width),
        "vision_config": vision,
        "projection_dim": s.width,
    }


def _conv(s: Size) -> dict[str, Any]:
    """Four stages, the last as wide as the transformers are."""
    widths = [s.width // 8, s.width // 4, s.width // 2, s.width]
    return {
        "embedding_size": max(s.width // 8, 4),
        "hidden_sizes": widths,
        "depths": [2, 2, 2, 2],
    }


def _gpt2(s: Size, **more) -> dict[str, Any]:
    return {
        "vocab_size": s.vocabulary,
        "n_embd": s.width,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_positions": 2 * s.length,
        **more,
    }


def _llama(s: Size, **more) -> dict[str, Any]:
    return _bert_like(s, num_key_value_heads=s.heads // 2, **more)


def _distilbert(s: Size) -> dict[str, Any]:
    return {
        "vocab_size": s.vocabulary,
        "dim": s.width,
        "hidden_dim": 4 * s.width,
        "n_layers": s.layers,
        "n_heads": s.heads,
        "max_position_embeddings": 2 * s.length,
    }


def _gpt_neo(s: Size) -> dict[str, Any]:
    options = _bert_like(s, num_layers=s.layers, num_heads=s.heads)
    for name in ("num_hidden_layers", "num_attention_heads"):
        del options[name]
    options["attention_types"] = [[["global", "local"], s.layers // 2]]
    return {**options, "window_size": s.length // 2}


def _bloom(s: Size) -> dict[str, Any]:
    sizes = {"vocab_size": s.vocabulary, "hidden_size": s.width}
    return {**sizes, "n_layer": s.layers, "n_head": s.heads}


def _opt(s: Size) -> dict[str, Any]:
    options = _bert_like(s, ffn_dim=4 * s.width, word_embed_proj_dim=s.width)
    del options["intermediate_size"]
    return options


def _xglm(s: Size) -> dict[str, Any]:
    return {
        "vocab_size": s.vocabulary,
        "d_model": s.width,
        "ffn_dim": 4 * s.width,
        "num_layers": s.layers,
        "attention_heads": s.heads,
        "max_position_embeddings": 2 * s.length,
    }


def _whisper(s: Size) -> dict[str, Any]:
    options = _bart_like(s, num_mel_bins=80, max_source_positions=s.length)
    return {**options, "max_target_positions": 2 * s.length, "pad_token_id": 0}


FAMILIES = {
    "albert": Family(
        "FlaxAlbertForMaskedLM",
        "AlbertConfig",
        lambda s: _bert_like(s, embedding_size=s.width // 4),
        lambda s: {n: x for n, x in _typed(s).items() if n != "head_mask"},
    ),
    "bart": Family(
        "FlaxBartForConditionalGeneration", "BartConfig", _bart_like, _pairs
    ),
    "beit": Family(
        "FlaxBeitForImageClassification",
        "BeitConfig",
        lambda s: _vit_like(s, use_relative_position_bias=True, drop_path_rate=0.0),
        _images,
    ),
    "bert": Family("FlaxBertForMaskedLM", "BertConfig", _bert_like, _typed),
    "blenderbot": Family(
        "FlaxBlenderbotForConditionalGeneration",
        "BlenderbotConfig",
        _bart_like,
        _pairs,
    ),
    "bloom": Family("FlaxBloomForCausalLM", "BloomConfig", _bloom, _without_places),
    "clip": Family("FlaxCLIPModel", "CLIPConfig", _clip_options, _clip),
    "dinov2": Family(
        "FlaxDinov2ForImageClassification", "Dinov2Config", _vit_like, _images
    ),
    "distilbert": Family(
        "FlaxDistilBertForMaskedLM", "DistilBertConfig", _distilbert, _without_places
    ),
    "electra": Family(
        "FlaxElectraForMaskedLM",
        "ElectraConfig",
        lambda s: _bert_like(s, embedding_size=s.width // 2),
        _typed,
    ),
    "gemma": Family(
        "FlaxGemmaForCausalLM",
        "GemmaConfig",
        lambda s: _llama(s, head_dim=s.width // s.heads),
        _causal,
    ),
    "gpt2": Family("FlaxGPT2LMHeadModel", "GPT2Config", _gpt2, _causal),
    "gpt_neo": Family("FlaxGPTNeoForCausalLM", "GPTNeoConfig", _gpt_neo, _causal),
    "gptj": Family(
        "FlaxGPTJForCausalLM",
        "GPTJConfig",
        lambda s: _gpt2(s, rotary_dim=s.width // s.heads // 2),
        _causal,
    ),
    "llama": Family("FlaxLlamaForCausalLM", "LlamaConfig", _llama, _causal),
    "marian": Family("FlaxMarianMTModel", "MarianConfig", _bart_like, _pairs),
    "mbart": Family(
        "FlaxMBartForConditionalGeneration", "MBartConfig", _bart_like, _pairs
    ),
    "mistral": Family(
        "FlaxMistralForCausalLM",
        "MistralConfig",
        lambda s: _llama(s, sliding_window=s.length // 2),
        _causal,
    ),
    "opt": Family("FlaxOPTForCausalLM", "OPTConfig", _opt, _causal),
    "pegasus": Family(
        "FlaxPegasusForConditionalGeneration", "PegasusConfig", _bart_like, _pairs
    ),
    "regnet": Family(
        "FlaxRegNetForImageClassification",
        "RegNetConfig",
        lambda s: {**_conv(s), "groups_width": 4, "layer_type": "y"},
        _images,
    ),
    "resnet": Family(
        "FlaxResNetForImageClassification", "ResNetConfig", _conv, _images
    ),
    "roberta": Family("FlaxRobertaForMaskedLM", "RobertaConfig", _bert_like, _typed),
    "roformer": Family(
        "FlaxRoFormerForMaskedLM",
        "RoFormerConfig",
        lambda s: _bert_like(s, embedding_size=s.width),
        _typed_without_places,
    ),
    "vit": Family("FlaxViTForImageClassification", "ViTConfig", _vit_like, _images),
    "whisper": Family(
        "FlaxWhisperForConditionalGeneration", "WhisperConfig", _whisper, _speech
    ),
    "xglm": Family("FlaxXGLMForCausalLM", "XGLMConfig", _xglm, _causal),
}


def build(name: str, size: Size) -> Model:
    """The model of this name."""
    return FAMILIES[name].build(size)
