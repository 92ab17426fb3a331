"""Lookups in tables that keep the ids alone."""
