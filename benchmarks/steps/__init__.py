"""Training steps and cases that a benchmark compiles under many forms."""
