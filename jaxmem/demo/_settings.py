"""What a run of the demonstration is made of."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size and course of the demonstration.

    Args:
        model: "nnx" or "linen", which of the two Flax APIs the GPT is written in.
        steps: training steps of each of the two runs.
        batch: sequences a step.
        seed: of the initial values, the batches and the dropout masks.
        dropout: rate of the dropout layers. Above 0 the two runs draw different masks
            and their losses agree only in the long run.
        layers: transformer blocks.
        width: of the residual stream.
        heads: of the attention.
        context: bytes a sequence.
        learning_rate: peak of a warm-up and cosine schedule.

    Raises:
        ValueError: for a value no run can be made of.
    """

    model: str = "nnx"
    steps: int = 100
    batch: int = 8
    seed: int = 0
    dropout: float = 0.0
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 256
    learning_rate: float = 3e-3

    def __post_init__(self):
        if self.model not in ("nnx", "linen"):
            raise ValueError(f"model must be 'nnx' or 'linen', got {self.model!r}")
        for name in ("steps", "batch", "layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must divide into {self.heads} heads")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
