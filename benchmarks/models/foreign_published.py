"""Models of other libraries in the sizes that were published, built as shapes alone.

Where a library's configuration has a published size as its default, or under a name, it
is taken as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.models import (
    foreign_equinox,
    foreign_haiku,
    foreign_lora,
    foreign_transformers,
)
from benchmarks.models import foreign_tunix as tunix_models
from benchmarks.models.foreign import Model, Size

_FAMILIES = foreign_transformers.FAMILIES
_WITH_CHECKPOINTS = ("bert",)  # of those below
BF16, F32 = "bfloat16", "float32"
PIXELS = "224 x 224 pixels"


@dataclass(frozen=True)
class Published:
    """A model that has a size of its own.

    Attributes:
      library: it comes from.
      name: as it was published.
      example: what an example is, in words.
      dtype: of its products; where the library has no option for it, float32.
      build: gives the model for a batch of one example, from that dtype.
      checkpointed: `build` with the library's own option for recomputation, if it has
        one: `gradient_checkpointing` of transformers, `remat_config` of tunix.
      batch: examples at which it is scheduled within a budget; as the library has the
        model they take up to half of an H100.
    """

    library: str
    name: str
    example: str
    dtype: str
    build: Callable[[Any], Model]
    batch: int
    checkpointed: Callable[[Any], Model] | None = None


def _size(dtype: Any, length: int, vocabulary: int, image: int = 224) -> Size:
    """What the inputs are made from; width and layers come from elsewhere."""
    return Size(0, 0, 0, length, 1, vocabulary, image, jnp.dtype(dtype))


def _transformers(
    name: str,
    family: str,
    example: str,
    batch: int,
    sizes: tuple[int, ...],
    **options: Any,
) -> Published:
    """A class of transformers with its default configuration, but for `options`."""
    made = replace(_FAMILIES[family], options=lambda _: options)
    build = lambda dtype: made.build(_size(dtype, *sizes))
    option = replace(made, checkpointed=True)
    checkpointed = lambda dtype: option.build(_size(dtype, *sizes))
    has = checkpointed if family in _WITH_CHECKPOINTS else None
    return Published("transformers", name, example, BF16, build, batch, has)


def _of_tunix(family: str, config: str) -> tunix_models.Family:
    """A configuration that tunix has a name for."""

    def options(_: Size, home: ModuleType) -> Mapping[str, Any]:
        published = getattr(home.ModelConfig, config)()
        return {f.name: getattr(published, f.name) for f in fields(published)}

    return replace(tunix_models.FAMILIES[family], options=options)


def _tunix(
    name: str, family: str, config: str, vocabulary: int, batch: int
) -> Published:
    made = _of_tunix(family, config)
    build = lambda dtype: made.build(_size(dtype, 512, vocabulary))
    checkpointed = lambda dtype: made.build(_size(dtype, 512, vocabulary), "BLOCK")
    return Published("tunix", name, "512 tokens", F32, build, batch, checkpointed)


def _lora(words: str, base: str) -> Published:
    """Llama 3.2 1B with a base of qwix, of which the adapters alone are trained."""
    made = _of_tunix("llama3", "llama3p2_1b")
    build = lambda dtype: foreign_lora.build(base, _size(dtype, 512, 128256), made)
    name = f"Llama 3.2 1B, {words}"
    return Published("tunix", name, "512 tokens", F32, build, 16)


def _gpt2(library: str, home: ModuleType) -> Published:
    """A transformer from a library's layers, in the size of GPT-2."""
    size = Size(12, 768, 12, 1024, 1, 50257, 224, jnp.float32)
    build = lambda _: home.build("transformer", size)
    return Published(library, "transformer, 124M", "1024 tokens", F32, build, 16)


def _whisper(dtype: Any) -> Model:
    """The tiny one, as by default: 30 seconds of sound and all the text it takes."""

    def inputs(size: Size) -> dict[str, np.ndarray]:
        frames = np.zeros((1, 80, 3000), np.float32)
        return {**_FAMILIES["whisper"].inputs(size), "input_features": frames}

    made = replace(_FAMILIES["whisper"], options=lambda _: {}, inputs=inputs)
    return made.build(_size(dtype, 448, 51865))


def _resnet(dtype: Any) -> Model:
    return foreign_haiku.build("resnet50", _size(dtype, 0, 0))


_ALL = (
    _transformers("BERT-base", "bert", "512 tokens", 64, (512, 30522)),
    _transformers("GPT-2", "gpt2", "1024 tokens", 16, (1024, 50257)),
    _transformers(
        *("BART-base", "bart", "512 + 512 tokens", 32, (512, 50265)),
        d_model=768,
        **{f"{side}_layers": 6 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 12 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 3072 for side in ("encoder", "decoder")},
    ),
    _transformers("ViT-B/16", "vit", PIXELS, 256, (0, 0), num_labels=1000),
    _transformers("CLIP ViT-B/32", "clip", f"{PIXELS}, 77 tokens", 256, (77, 49408)),
    Published("transformers", "Whisper tiny", "30 s, 448 tokens", BF16, _whisper, 64),
    _transformers("ResNet-50", "resnet", PIXELS, 512, (0, 0), num_labels=1000),
    _tunix("Llama 3.2 1B", "llama3", "llama3p2_1b", 128256, 8),
    _tunix("Qwen 2.5 0.5B", "qwen2", "qwen2p5_0p5b", 151936, 16),
    _tunix("Gemma 2B", "gemma", "gemma_2b", 256128, 4),
    _lora("LoRA", "not quantized"),
    _lora("LoRA on int8", "int8"),
    _lora("LoRA on NF4", "NF4"),
    _gpt2("equinox", foreign_equinox),
    _gpt2("haiku", foreign_haiku),
    Published("haiku", "ResNet-50", PIXELS, F32, _resnet, 256),
)
MODELS = {f"{model.library}/{model.name}": model for model in _ALL}
