"""GELU, SiLU and their gated units; `tpu`, `gpu` and `reference` have these functions.

`forward(x, *, value, code, bits, block)` returns `value(x)`, and the bits of `code(x)`
as uint8 of `packed_shape(x.shape, bits)`.
`backward(g, packed, *saved, slope, block)` returns `slope(code, *saved) * g`, written
over g; the saved arrays have the shape of g.
`gated_forward(gate, up, *, value, block)` returns `value(gate) * up`.
`gated_backward(g, gate, up, *, both, block)` returns the cotangents of gate and up,
written over gate and g.

    value, code, slope, both: functions of float32 tiles; `code` gives int32 below
      2**bits, `both` value and slope of the gate.
    bits: 1 to 4.
    block: of a GPU the elements of a program, a multiple of 4096 and the same in both
      passes; of a TPU (lead, rows, columns), rows a multiple of 256, or all of them
      rounded up to a multiple of 8, columns a multiple of 128, or all.

They raise NotImplementedError for another dtype, number of bits or size.
"""
