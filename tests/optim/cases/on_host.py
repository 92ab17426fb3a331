"""Adam whose moments lie in the host's memory."""

from jaxmem.optim import adam, adama, on_host
from tests.optim.cases.adama import reference
from tests.optim.cases.case import LR, Case

CASES = [
    Case("adam_on_host", lambda lr=LR: adam(lr, bits=32, on_host=True), reference),
    Case("on_host", lambda lr=LR: on_host(adama(lr)), reference, microbatch="other"),
]
