"""The table of known faults, as docs/trust.md has it."""

from benchmarks.figures.results import NAMES
from benchmarks.figures.rows import NEWEST, VERSION, figures, rows, table
from jaxmem.faults import FAULTS, KnownFault
from jaxmem.faults.versions import written

_NAMES = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}


@figures("known faults")
def known_faults() -> str:
    head = "report", "where", "versions of jax", "what", "workaround"
    return table(head, map(_line, FAULTS))


def _line(fault: KnownFault) -> tuple[str, ...]:
    where = ", ".join(_NAMES[platform] for platform in fault.platforms)
    what = f"{fault.what} ({fault.consequence})"
    report = f"[{fault.report}]({fault.address})"
    return report, where, _versions(fault), what, _way_round(fault)


def _versions(fault: KnownFault) -> str:
    looked_at = f"looked at to {written(fault.looked_at[-1])}"
    if fault.affected is None:
        return f"none; {looked_at}"
    first, last = fault.affected
    if first is not None and first == last:
        return f"{written(first)}; {looked_at}"
    ends = (first and f"from {written(first)}", last and f"to {written(last)}")
    return f"{' '.join(filter(None, ends)) or 'all'}; {looked_at}"


def _way_round(fault: KnownFault) -> str:
    options = ", ".join(f"`{k}={v}`" for k, v in fault.options.items())
    return f"{fault.way_round}; or {options}" if options else fault.way_round


@figures("audit")
def audit() -> str:
    """Modules that are right, and what the audit finds in them."""
    head = "chip", "jax", "modules", "with findings", "of a compile, %"
    found = [(r, v) for v in (VERSION, NEWEST) for r in rows("audit", v)]
    lines = [
        (
            NAMES[r["chip"]],
            version.removeprefix("jax"),
            r["modules"],
            r["with findings"],
            r["of a compile %"],
        )
        for r, version in found
    ]
    return table(head, lines)
