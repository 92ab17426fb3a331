"""Updates of large leaves, with the parameter's own, in one loop over their rows."""
