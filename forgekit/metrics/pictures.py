"""A figure with a canvas of its own, written as a PNG file in one go."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forgekit.data.optional_packages import require
from forgekit.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, whose parts find their own room.

    Raises:
        ImportError: If matplotlib is missing.
    """
    require("matplotlib.figure", extra="plot")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def write_picture(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as a PNG file, replaced in one go; its folder is made. Returns the path."""
    # pyplot would keep the canvas, and a window system, in global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, format="png", dpi=150)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, picture.getvalue())
    return Path(path)
