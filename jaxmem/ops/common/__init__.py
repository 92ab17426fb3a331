"""What several families share: computing dtypes, derivatives, loops over blocks."""
