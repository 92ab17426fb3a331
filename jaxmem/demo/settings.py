"""The settings of a demonstration."""

from dataclasses import dataclass
from typing import Literal

from jaxmem.demo.optimizers import OPTIMIZERS
from jaxmem.demo.techniques import TECHNIQUES, Technique


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size and course of the demonstration.

    Args:
        model: "nnx" or "linen", the Flax API that the GPT is written in.
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
        optimizer: of the substituted run, a name of `OPTIMIZERS`; the plain one has
            "adamw".
        micro_batches: into how many each batch is split, in both runs. None for 1, and
            with AdamA for the most up to 8 that divide the batch.
        v_scale: of AdamA, see `jaxmem.adama`.
        technique: a name of `TECHNIQUES`, how the second run differs from the first.

    Raises:
        ValueError: for a value that no run can be made of.
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
    optimizer: str = "adamw"
    micro_batches: int | None = None
    v_scale: Literal["paper", "mean"] = "paper"
    technique: str = "exact"

    def __post_init__(self):
        choices = {"model": ("nnx", "linen"), "optimizer": tuple(OPTIMIZERS)}
        for name, allowed in (choices | {"technique": tuple(TECHNIQUES)}).items():
            value = getattr(self, name)
            if value not in allowed:
                names = ", ".join(allowed)
                raise ValueError(f"{name} must be one of {names}, got {value!r}")
        for name in ("steps", "batch", "layers", "width", "heads", "context"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must divide into {self.heads} heads")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.n < 1 or self.batch % self.n:
            raise ValueError(
                f"micro_batches must be at least 1 and divide the batch of "
                f"{self.batch}, got {self.n}"
            )
        if self.how.in_linen and self.model != "linen":
            raise ValueError(f"technique {self.technique!r} needs model='linen'")
        if self.how.halves and self.layers < 2:
            raise ValueError(f"technique {self.technique!r} needs layers=2 or more")

    @property
    def draws(self) -> bool:
        """Whether a step needs a random key."""
        return self.dropout > 0 or self.how.draws

    @property
    def how(self) -> Technique:
        """The technique itself."""
        return TECHNIQUES[self.technique]

    @property
    def stacks(self) -> dict[str, int]:
        """Names and lengths of the stacks of layers, the lowest first.

        A scanned stack is trained or frozen as a whole.
        """
        lower = self.layers // 2 if self.how.halves else 0
        stacks = {"lower": lower, "blocks": self.layers - lower}
        return {name: length for name, length in stacks.items() if length}

    @property
    def n(self) -> int:
        """Micro-batches a step."""
        if self.micro_batches is not None:
            return self.micro_batches
        if not OPTIMIZERS[self.optimizer].in_state:
            return 1
        return max(n for n in range(1, 9) if self.batch % n == 0)
