"""A checkpoint policy that saves more than it says."""

from collections.abc import Iterator

import jax

from jaxmem import _compat
from jaxmem.linting._kept import kept_values
from jaxmem.linting._subject import Finding, Level, Subject, checkpoints, place


def policy_saves_all(subject: Subject) -> Iterator[Finding]:
    """Finds `save_anything_except_these_names` where jax saves those names too."""
    forgetful = [
        (level, eqn)
        for level, eqn in checkpoints(subject.closed)
        if _compat.forgets_its_names(eqn.params["policy"])
    ]
    if forgetful:
        yield Finding(
            check="policy saves all",
            severity="error",
            what=(
                "save_anything_except_these_names saves everything, the names "
                f"included, in jax {jax.__version__}"
            ),
            bytes=sum(k.bytes for k in kept_values(Level.of(subject.live))),
            count=len(forgetful),
            remedy=(
                "name what is to be saved (save_only_these_names), or write a policy: "
                "a function of (primitive, *types, **params)"
            ),
            **place(*forgetful[0]),
        )
