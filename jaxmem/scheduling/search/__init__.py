"""The search for a budget: candidates, their compiles, and the choice among them."""
