"""Piecewise constant derivatives: their tables, and the op that keeps a code."""
