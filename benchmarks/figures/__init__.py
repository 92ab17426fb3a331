"""The figures of README.md and docs/, by one command: `python -m benchmarks.figures`.

`writer` puts into the marked blocks what the renderers give, a module for a page or a
kind of table each; `rows` reads the results files.
"""
