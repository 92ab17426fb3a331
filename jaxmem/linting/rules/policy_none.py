"""A `jax.checkpoint` without a policy."""

from collections.abc import Iterator

from jaxmem.linting._subject import Finding, Subject, checkpoints, place


def policy_none(subject: Subject) -> Iterator[Finding]:
    """Finds `policy=None`, which saves nothing; some read it as no checkpoint."""
    for level, eqn in checkpoints(subject.closed):
        if eqn.params["policy"] is None:
            yield Finding(
                check="policy None",
                severity="note",
                what="a jax.checkpoint without a policy saves nothing",
                remedy=(
                    "if that is meant, jax.checkpoint_policies.nothing_saveable says "
                    "so; if all is to be saved, leave the checkpoint out"
                ),
                **place(level, eqn),
            )
