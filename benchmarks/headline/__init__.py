"""Published claims beside ours: `CLAIMS` are the rows of `benchmarks.headlines`."""

from benchmarks.headline.claim import Claim
from benchmarks.headline.of_activations import ACTIVATIONS
from benchmarks.headline.of_parts import PARTS
from benchmarks.headline.of_plans import PLANS
from benchmarks.headline.of_states import STATES

CLAIMS: tuple[Claim, ...] = (*ACTIVATIONS, *PARTS, *STATES, *PLANS)
