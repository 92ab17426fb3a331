"""`python -m jaxmem`: the `jaxmem` command."""

from jaxmem.cli import main

if __name__ == "__main__":
    main()
