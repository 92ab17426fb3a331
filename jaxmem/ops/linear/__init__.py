"""Dense layers and convolutions that keep no cast copy of their kernel."""
