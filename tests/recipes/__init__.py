"""The scripts of examples/recipes: values and bytes."""
