"""What was done to a step: the plan, its notes and its fingerprint."""
