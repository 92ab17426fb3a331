"""Models as their users write them, in Flax and in other libraries."""
