"""AdamA with one micro-batch, which is Adam."""

from jaxmem.optim import adama
from tests.optim.cases.case import LR, Case
from tests.optim.reference import adama_leaf


def reference(path, p, grads):
    return adama_leaf(p, grads[:, None], lr=LR)[0]


CASES = [Case("adama", lambda lr=LR: adama(lr), reference, microbatch="other")]
