"""Cross entropy of a linear layer's logits, one block of the vocabulary at a time."""
