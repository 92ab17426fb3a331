"""What a compiler will make of a step: fusion, buffers and the peak, by the graph."""
