"""Models in dm-haiku: a transformer from its layers, and its own nets."""

import haiku as hk
import jax
import numpy as np

import jaxmem
from benchmarks.models.foreign import Model, Size, cross_entropy, images, tokens


class Transformer(hk.Module):
    """Pre-norm, causal, as haiku's own example has it."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size

    def __call__(self, words, dropout):
        s = self.size
        norm = lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)
        scale = hk.initializers.VarianceScaling(2 / s.layers)
        places = hk.get_parameter(
            "positions", [s.length, s.width], init=hk.initializers.TruncatedNormal()
        )
        x = hk.Embed(s.vocabulary, s.width)(words) + places
        mask = np.tril(np.ones((1, 1, s.length, s.length)))
        for _ in range(s.layers):
            attend = hk.MultiHeadAttention(
                s.heads, s.width // s.heads, w_init=scale, model_size=s.width
            )
            y = norm()(x)
            x = x + self._dropped(attend(y, y, y, mask=mask), dropout)
            mlp = [hk.Linear(4 * s.width), jax.nn.gelu, hk.Linear(s.width)]
            x = x + self._dropped(hk.Sequential(mlp)(norm()(x)), dropout)
        return hk.Linear(s.vocabulary)(norm()(x))

    def _dropped(self, x, rate):
        return hk.dropout(hk.next_rng_key(), rate, x) if rate else x


def _transformer(s: Size) -> Model:
    run = lambda batch, train: Transformer(s)(batch["tokens"], 0.1 if train else 0.0)
    return _model(run, {"tokens": tokens(s), "labels": tokens(s, 1)})


def _net(make):
    def build(s: Size) -> Model:
        run = lambda batch, train: make()(batch["images"], is_training=train)
        labels = np.arange(s.batch, dtype=np.int32) % 10
        return _model(run, {"images": images(s), "labels": labels})

    return build


def _model(run, batch) -> Model:
    """haiku's functions are plain ones: `substitute` takes them as they are."""
    made = hk.transform_with_state(run)

    def init(key):
        return made.init(key, batch, True)

    def scored(params, state, batch, key):
        logits, state = made.apply(params, state, key, batch, key is not None)
        return cross_entropy(logits, batch["labels"]), state

    lean = jaxmem.substitute(scored)

    def report(params, state, batch):
        return jaxmem.nn.report(lean, params, state, batch, None)

    return Model(init, scored, lean, report, batch)


FAMILIES = {
    "transformer": _transformer,
    "resnet18": _net(lambda: hk.nets.ResNet18(10)),
    "resnet50": _net(lambda: hk.nets.ResNet50(1000)),
    "mobilenet": _net(lambda: hk.nets.MobileNetV1(num_classes=10)),
}


def build(name: str, size: Size) -> Model:
    """The model of this name."""
    return FAMILIES[name](size)
