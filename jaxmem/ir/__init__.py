"""A jaxpr as a graph: users, makers, sizes, costs, and how operations treat an axis."""
