"""Elementwise functions and softmax, by what each keeps: input, output or a code."""

from jaxmem.ops.activations.forms import AutoSave as AutoSave
