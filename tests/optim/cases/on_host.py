"""Adam whose moments lie in the host's memory."""

from jaxmem.optim import adama, on_host
from tests.optim.cases.adama import reference
from tests.optim.cases.case import LR, Case

CASES = [
    Case("on_host", lambda lr=LR: on_host(adama(lr)), reference, microbatch="other")
]
