"""Updates of tables, of the rows alone that have a gradient."""
