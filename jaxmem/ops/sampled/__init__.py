"""Dense layers whose kernel gradient is estimated from a part of the input."""
