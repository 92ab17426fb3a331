"""The rules of `jaxmem.lint`, one a file. To add a rule, write its file and list it.

A rule is a function of a `Subject` that yields `Finding`s.
"""

from jaxmem.linting.rules.donations import donated_twice, donation_not_used, not_donated
from jaxmem.linting.rules.kept import dropout_mask, wide_copy
from jaxmem.linting.rules.known_faults import known_faults
from jaxmem.linting.rules.lost_batch_axis import lost_batch_axis
from jaxmem.linting.rules.misread_slices import misread_from_host
from jaxmem.linting.rules.padded import padded
from jaxmem.linting.rules.policies import policy_none, policy_saves_all, unmatched_name
from jaxmem.linting.rules.ragged_copies import ragged_copies
from jaxmem.linting.rules.recomputation import recomputation_undone, whole_loss
from jaxmem.linting.rules.stacked_as_read import stacked_as_read
from jaxmem.linting.rules.stacked_twice import stacked_twice
from jaxmem.linting.rules.stacked_wide import stacked_wide
from jaxmem.linting.rules.unused_gradient import unused_gradient

RULES = (
    unmatched_name,
    policy_none,
    policy_saves_all,
    whole_loss,
    recomputation_undone,
    not_donated,
    donation_not_used,
    donated_twice,
    stacked_twice,
    stacked_as_read,
    stacked_wide,
    unused_gradient,
    wide_copy,
    dropout_mask,
    lost_batch_axis,
    misread_from_host,
    padded,
    ragged_copies,
    known_faults,
)
