"""Whether a version of jax has a fault, as far as the table knows."""

from collections.abc import Iterable
from typing import Literal

import jax

from jaxmem.faults.record import KnownFault, Version

Standing = Literal["affected", "not affected", "not checked yet"]


def installed() -> Version:
    """The version of jax in this process."""
    return jax.__version_info__


def standing(
    fault: KnownFault, platform: str, version: Version | None = None
) -> Standing:
    """What the table says of a fault.

    Args:
      fault: a row.
      platform: "cpu", "cuda" or "tpu".
      version: of jax; the installed one by default.
    """
    if platform not in fault.platforms:
        return "not affected"
    version = installed() if version is None else version
    if version > fault.looked_at[-1]:
        return "not checked yet"
    if fault.affected is None:
        return "not affected"
    first, last = fault.affected
    late = first is None or version >= first
    early = last is None or version <= last
    return "affected" if late and early else "not affected"


def newest(faults: Iterable[KnownFault]) -> Version:
    """The newest version that was looked at for any of them."""
    return max(fault.looked_at[-1] for fault in faults)


def written(version: Version) -> str:
    """A version in its usual form."""
    return ".".join(map(str, version))
