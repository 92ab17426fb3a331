"""Arrays stored in a few bits a value, and the ops that read them from there."""

from jaxmem.ops.codes.quantization import Quantization as Quantization
from jaxmem.ops.codes.quantization import SaveLike as SaveLike
from jaxmem.ops.codes.quantization import as_quantization as as_quantization
from jaxmem.ops.codes.quantization import bits_or_none as bits_or_none
from jaxmem.ops.codes.readers import CodeReader as CodeReader
from jaxmem.ops.codes.readers import coded_activation as coded_activation
from jaxmem.ops.codes.readers import marking as marking
from jaxmem.ops.codes.stored import sharing as sharing
