"""The rules of `jaxmem.lint`, one a file. To add a rule, write its file and list it.

A rule is a function of a `Subject` that yields `Finding`s.
"""

from jaxmem.linting.rules.donated_twice import donated_twice
from jaxmem.linting.rules.donation_not_used import donation_not_used
from jaxmem.linting.rules.dropout_mask import dropout_mask
from jaxmem.linting.rules.not_donated import not_donated
from jaxmem.linting.rules.policy_none import policy_none
from jaxmem.linting.rules.policy_saves_all import policy_saves_all
from jaxmem.linting.rules.recomputation_undone import recomputation_undone
from jaxmem.linting.rules.stacked_twice import stacked_twice
from jaxmem.linting.rules.unmatched_name import unmatched_name
from jaxmem.linting.rules.unused_gradient import unused_gradient
from jaxmem.linting.rules.whole_loss import whole_loss
from jaxmem.linting.rules.wide_copy import wide_copy

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
    unused_gradient,
    wide_copy,
    dropout_mask,
)
