"""matplotlib, which draws pictures where it is installed (the extra `plot`)."""

from typing import Any

from jaxmem._remedies import missing_package


def import_figure() -> Any:
    """matplotlib's Figure, without pyplot and its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("drawing", "matplotlib>=3.9") from error
    return Figure
