"""Seconds and live bytes of a list of equations, both of one device."""
