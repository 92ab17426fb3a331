"""The library of the rewriter: the formulas of all ops' records, as patterns.

One formula stands for every spelling that differs in the order of products and sums, in
casts and in layout (`_match`); what a record lists twice differs by more than that.
"""

import functools
from collections.abc import Sequence

from jaxmem._checks import check_choice, wrong_value
from jaxmem.ops.codes import as_quantization
from jaxmem.ops.record import Formula, OpRecord, Save, Saving
from jaxmem.ops.records import RECORDS
from jaxmem.rewriting._pattern import Pattern


def library(
    save: Save = "input",
    norm_save: str = "input",
    *,
    records: Sequence[OpRecord] = RECORDS,
) -> tuple[Pattern, ...]:
    """The patterns `rewrite` looks for, the largest first.

    Args:
      save: what GELU and SiLU keep: "input", or "output" (and one bit an element),
        which is free where the next operation keeps the output anyway; "auto": that
        where it is so, else the input (`auto_save`, as ReLU always); or the bits of
        codes of their derivative, or a `Quantization` for codes of their input, which
        a dense layer that stores codes shares; gated units and the other activations
        then keep such codes too, ReLU and leaky ReLU a bit.
      norm_save: likewise for layer norm and RMS norm. A function does not show whether
        a scale is near zero, where the input cannot be had back from the output, so
        "output" is for those who know that it is not.
      records: of the ops whose formulas are wanted.

    Returns:
      Patterns for attention, norms, dropout, gated units, softmax, activations,
      max-pooling, and products and convolutions with cast weights.

    Raises:
      ValueError: another word for `save` or `norm_save`.
    """
    if as_quantization(save) is None and save not in ("input", "output", "auto"):
        allowed = "'input', 'output', 'auto', bits (1 to 8) or a Quantization"
        raise wrong_value("save", save, f"one of {allowed}")
    check_choice("norm_save", norm_save, ("input", "output"))
    saving = Saving(save, norm_save)
    return tuple(_pattern(r, f, saving) for r, f in _largest_first(records))


def _largest_first(records: Sequence[OpRecord]) -> list[tuple[OpRecord, Formula]]:
    """Formulas in the order of the records, but within a family by their parts."""
    families: dict[str, int] = {}
    for record in records:
        families.setdefault(record.family or record.name, len(families))
    pairs = [(record, formula) for record in records for formula in record.formulas]
    return sorted(
        pairs, key=lambda p: (families[p[0].family or p[0].name], -p[1].parts)
    )


def _pattern(record: OpRecord, formula: Formula, saving: Saving) -> Pattern:
    lean = record.saving(formula.lean or record.op, saving)
    gate = None if formula.gate is None else _gate(formula.gate)
    return Pattern(
        formula.name or record.name, formula.plain, lean, gate=gate, **_how(formula)
    )


@functools.cache
def _gate(formula: Formula) -> Pattern:
    # One and the same for a formula: it is looked for once for all that it opens.
    return Pattern("gate", formula.plain, formula.plain, **_how(formula))


def _how(formula: Formula) -> dict:
    """How an example may vary."""
    fields = ("examples", "scalars", "uncast", "params", "typed")
    options = {name: getattr(formula, name) for name in fields}
    return options | ({} if formula.when is None else {"when": formula.when})


LIBRARY = library()
