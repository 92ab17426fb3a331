"""Attention by the kernel of another library: what has neither dropout nor codes.

cuDNN's comes through `jax.nn`, tokamax's from the package of that name. They choose by
the device of this process: for a chip that is not there cuDNN's does not compile, and
tokamax takes XLA.
"""

from typing import Any, Literal

import jax

from jaxmem._remedies import missing_package

Library = Literal["cudnn", "tokamax"]
LIBRARIES: tuple[Library, ...] = ("cudnn", "tokamax")


def attend_by(library: Library, query, key, value, bias, mask, **options: Any) -> Any:
    """What `library` makes of the arguments of `jax.nn.dot_product_attention`."""
    inputs = query, key, value, bias, mask
    if library == "cudnn":
        return jax.nn.dot_product_attention(*inputs, implementation="cudnn", **options)
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_package("implementation='tokamax'", "tokamax>=0.0.12") from error
    return tokamax.dot_product_attention(*inputs, **options)


def check_plain(library: Library, **given: Any) -> None:
    """ValueError if an argument is given that only our implementations have."""
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise ValueError(
            f"implementation={library!r} does not take {', '.join(extra)}: "
            "'xla' and 'pallas' do"
        )
