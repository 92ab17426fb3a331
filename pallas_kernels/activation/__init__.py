"""GELU and SiLU; `tpu`, `gpu` and `reference` have these functions.

`forward(x, *, value, code, bits, block)` returns `value(x)`, and the bits of `code(x)`
as uint8 of `packed_shape(x.shape, bits)`.
`backward(g, packed, *saved, slope, block)` returns `slope(code, *saved) * g`, written
over g; the saved arrays have the shape of g.

    value, code, slope: functions of float32 tiles; `code` gives int32 below 2**bits.
    bits: 1 to 8.
    block: of a GPU the columns of a program, a multiple of 128 that divides those of
      x; of a TPU (lead, rows, columns), rows a multiple of 256, or all of them rounded
      up to a multiple of 8, columns a multiple of 128, or all.

They raise NotImplementedError for another dtype, number of bits or size; on a GPU also
for rows that are no multiple of 128 elements.
"""
