"""The rules of `benchmarks.five_bytes`: each in float32, and in few bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import keystr

from jaxmem import optim
from jaxmem.optim import LowBit

Dims = optax.contrib.MuonDimensionNumbers


class Leaves(NamedTuple):
    """What rules must be told of a model's leaves.

    Attributes:
      stacked: patterns of the leaves with layers along axis 0.
      numbers: which axes of a layer's kernels are rows and columns, of the parameters;
        embeddings and the head are no matrices.
      projected: patterns of the kernels that low-rank rules project.
      rank: of their projections, a quarter of the width.
    """

    stacked: tuple[str, ...]
    numbers: Callable[[Any], Any]
    projected: tuple[str, ...]
    rank: int


def _by_path(axes: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Dimension numbers of a tree, by the path of each leaf."""
    of_leaf = lambda path, _: axes(keystr(path))
    return lambda params: jax.tree_util.tree_map_with_path(of_leaf, params)


def _gpt(path: str) -> Any:
    if "'blocks'" not in path or "kernel" not in path:
        return None
    if any(f"'{name}'" in path for name in ("query", "key", "value")):
        return Dims(1, (2, 3))  # heads are one side
    return Dims((1, 2), 3) if "'out'" in path else Dims(1, 2)


def _llama(path: str) -> Any:
    return Dims(1, 2) if "'layers'" in path else None


GPT_LEAVES = Leaves(("blocks",), _by_path(_gpt), ("*/up/kernel", "*/down/kernel"), 16)
LLAMA_LEAVES = Leaves(("layers", "norms"), _by_path(_llama), ("layers",), 1024)


class Rule(NamedTuple):
    """A row.

    Attributes:
      family: the row with the same rule in float32; "" for that itself.
      make: the transformation, of a rate and the model's leaves.
      start: the rate at which the search begins.
      narrow: what rounds bfloat16 weights; None for weights in float32.
      averages: whether the rate stays after the warm-up and the model is an average.
    """

    family: str
    make: Callable[[Any, Leaves], Any]
    start: float
    narrow: Callable[[Any], Any] | None = None
    averages: bool = False

    @property
    def wide(self) -> bool:
        """Whether the weights are in float32."""
        return self.narrow is None

    def optimizer(self, rate: Any, leaves: Leaves) -> optax.GradientTransformation:
        made = self.make(rate, leaves)
        return made if self.narrow is None else self.narrow(made)


def _matrices(make: Callable, name: str = "weight_dimension_numbers", **how: Any):
    """A rule of matrices."""
    how |= {"weight_decay": 0.0}
    return lambda rate, leaves: make(rate, **{name: leaves.numbers}, **how)


def _low_rank(make: Callable, **how: Any):
    def made(rate, leaves):
        return make(rate, rank=leaves.rank, projected=leaves.projected, **how)

    return made


def _stacked(make: Callable, **how: Any):
    return lambda rate, leaves: make(rate, stacked=leaves.stacked, **how)


_B2 = 0.95


def _adamw(bits: int | LowBit):
    return lambda rate, _: optim.adamw(rate, b2=_B2, weight_decay=0.0, bits=bits)


def _lion(bits: int | LowBit):
    return lambda rate, _: optim.lion(rate, weight_decay=0.0, bits=bits)


def _schedule_free(bits: int | LowBit):
    return lambda rate, _: optim.schedule_free_adamw(rate, b2=_B2, bits=bits)


def _muon(bits: int | LowBit):
    # of AdamW's lengths, so that the leaves which take AdamW have the same rate
    how = {"consistent_rms": 0.2, "adam_b2": _B2, "bits": bits}
    return _matrices(optim.muon, "muon_weight_dimension_numbers", **how)


def _preconditioned(make: Callable, bits: int | LowBit, **how: Any):
    if make is optim.shampoo:
        how |= {"grafting_b2": _B2}
    how |= {"preconditioner_dtype": "float32" if bits == 32 else "int8"}
    return _matrices(make, b2=_B2, bits=bits, **how)


def _galore(bits: int, **how: Any):
    inner = optim.scale_by_adam(b2=_B2, bits=bits)
    return _low_rank(optim.galore, inner=inner, **how)


def _apollo_mini(rate: Any, leaves: Leaves):
    return optim.apollo_mini(rate, b2=_B2, projected=leaves.projected)


# rule in float32 -> how it is made, where its rate's search starts
PLAIN: dict[str, tuple[Callable, float]] = {
    "AdamW": (_adamw(32), 3e-3),
    "Lion": (_lion(32), 1e-3),
    "Schedule-free AdamW": (_schedule_free(32), 3e-3),
    "Muon": (_muon(32), 3e-3),
    "SOAP": (_preconditioned(optim.soap, 32), 1e-2),
    "Shampoo": (_preconditioned(optim.shampoo, 32), 3e-3),
    "CAME": (_stacked(optim.came), 1e-3),
    "Adam-mini": (_stacked(optim.adam_mini, b2=_B2), 3e-3),
    "SM3": (_stacked(optim.sm3), 1e-1),
    "Adafactor": (_stacked(optim.adafactor), 3e-2),
    "AdaLomo": (_stacked(optim.adalomo), 3e-2),
    "GaLore": (_galore(32), 1e-2),
    "APOLLO": (_low_rank(optim.apollo, b2=_B2), 3e-3),
    "APOLLO-Mini": (_apollo_mini, 3e-3),
}

# the code of moments -> as `bits` has it; of 4 bits "nvfp4" is closest
_BITS = {"8-bit": 8, "4-bit": 4, "mxfp4": LowBit(4, code="mxfp4")}
_BITS |= {"nvfp4": LowBit(4, code="nvfp4")}


def _in_codes(make: Callable, *codes: str, words: str = "", **how: Any):
    """A rule with moments in each of the codes, by what is added to its name."""
    return {words + code: make(_BITS[code], **how) for code in codes}


def _with_bits(make: Callable, **how: Any):
    return lambda bits: _stacked(make, bits=bits, **how)


_FACTORED = {"words": "factored, ", "factored": True}
_ONE_SIDE = {"words": "one-sided, ", "one_sided": True}
# rule -> what is added to its name -> how it is made
NARROW: dict[str, dict[str, Callable]] = {
    "AdamW": _in_codes(_adamw, "8-bit", "4-bit", "mxfp4", "nvfp4"),
    "Lion": _in_codes(_lion, "8-bit", "4-bit"),
    "Schedule-free AdamW": _in_codes(_schedule_free, "8-bit", "4-bit"),
    "Muon": _in_codes(_muon, "8-bit", "4-bit", "nvfp4"),
    "SOAP": {
        **_in_codes(partial(_preconditioned, optim.soap), "8-bit", **_FACTORED),
        **_in_codes(
            partial(_preconditioned, optim.soap), "8-bit", "nvfp4", **_ONE_SIDE
        ),
    },
    "Shampoo": _in_codes(
        partial(_preconditioned, optim.shampoo), "4-bit", "nvfp4", **_ONE_SIDE
    ),
    "CAME": _in_codes(_with_bits(optim.came), "8-bit", "nvfp4"),
    "Adam-mini": _in_codes(_with_bits(optim.adam_mini, b2=_B2), "8-bit"),
    "SM3": _in_codes(_with_bits(optim.sm3), "8-bit"),
    "Adafactor": {"": PLAIN["Adafactor"][0]},
    "AdaLomo": {"": PLAIN["AdaLomo"][0]},
    "GaLore": {"8-bit, int8 projector": _galore(8, projector_dtype="int8")},
    "APOLLO": {"": PLAIN["APOLLO"][0]},
    "APOLLO-Mini": {"": _apollo_mini},
}
_STOCHASTIC = (("", optim.stochastic_rounding),)
# what rounds weights, and how it is named, where there is more than that
_ROUNDED = {
    "AdamW, 4-bit": (*_STOCHASTIC, (" + 8-bit masters", optim.split_master)),
}


def _rows() -> dict[str, Rule]:
    rows = {}
    for family, (make, start) in PLAIN.items():
        wide = f"{family}, float32"
        averages = family.startswith("Schedule-free")
        rows[wide] = Rule("", make, start, None, averages)
        for code, made in NARROW[family].items():
            name = ", ".join(filter(None, (family, code)))
            for words, wrap in _ROUNDED.get(name, _STOCHASTIC):
                row = Rule(wide, made, start, wrap, averages)
                rows[f"{name}, bfloat16{words}"] = row
    return rows


RULES = _rows()
