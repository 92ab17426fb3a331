"""Thresholds of selective differentiation."""

import pytest

from benchmarks import frozen

pytestmark = pytest.mark.usefixtures("standard_jax")


@pytest.mark.slow
def test_resnet_input_gradients():
    """ResNet-101, the input's gradient alone, batch norm in inference mode."""
    cases = ("all", "input alone", "norms")
    found = frozen.rows(frozen.kept, ["ResNet-101"], cases)
    rows = {case: rest for _, case, *rest in found}
    assert rows["input alone"][3] <= frozen.THRESHOLDS["ResNet-101", "input alone"]
    for plain, lean, *_ in rows.values():
        assert lean < 0.35 * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16", "BERT-base", "Llama 1B, 4 layers"])
def test_adapters_keep_no_more_than_full_training(name):
    """Of the base nothing, and of an adapter the input: its product is recomputed."""
    full, lora = frozen.rows(frozen.kept, [name], ("all", "LoRA"))
    assert lora[3] <= full[3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT-base", "Llama 1B, 4 layers"])
def test_adapters_take_no_more_than_full_training(name):
    """Compiled for an H100: peaks of plain, substituted, and scheduled gradients."""
    full, lora = (  # each with its predicted ms behind
        row[-6::2] for row in frozen.rows(frozen.compiled, [name], ("all", "LoRA"))
    )
    for less, more in zip(lora, full, strict=True):
        assert less <= more
