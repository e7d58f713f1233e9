"""Figures that look alike: on a white background, so that they are legible on light and dark pages."""

from pathlib import Path
from typing import Any

WIDTH = 8.0
"""Inches. At 100 pixels to the inch the text has the size of a page's own."""
INK, FAINT, GRID = "#24303c", "#5a6776", "#e4e6ea"


def new_figure(height: float, width: float = WIDTH) -> Any:
    """An empty figure; needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'pagestash[plot]'", name="matplotlib"
        ) from error
    # Not pyplot, which would choose a window system and keep every figure alive.
    layout = ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.07)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write(figure: Any, path: Path, *, dpi: int = 200) -> None:
    """Write the figure; the suffix determines the format. The same figure gives the same file."""
    from matplotlib import rc_context

    fixed = {"Date": None} if path.suffix.lower() == ".svg" else None
    # Text stays text: the file is a quarter of the size.
    with rc_context({"svg.hashsalt": "pagestash", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=dpi, metadata=fixed)


def check_suffix(what: str, path: Path) -> None:
    """Refuse a suffix that matplotlib does not know."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ValueError(f"{what} {path}: expected a picture's suffix, like .png or .svg")


def byte_unit(size: int) -> tuple[str, int]:
    """The largest unit that is not above `size`, and its bytes."""
    for unit, divisor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= divisor:
            return unit, divisor
    return "bytes", 1


def tidy(axis: Any) -> None:
    """Horizontal lines only, behind the data; no box around it."""
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
