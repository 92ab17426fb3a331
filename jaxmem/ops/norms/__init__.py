"""Normalisations, by what each keeps: its input, its output or codes."""
