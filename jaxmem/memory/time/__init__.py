"""What a compiled step takes in seconds: a roofline over its scheduled module."""
