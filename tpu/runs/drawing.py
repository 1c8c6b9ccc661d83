"""Charts that are read on a light page and on a dark one: the page of the Prefect UI is as each person has it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Letters, axes and small marks: as far from white as from the near-black of a dark page, about 4:1.
INK = "#737f92"


def to_png(figure: Figure) -> bytes:
    """The figure as PNG without a background, its axes in INK, and all letters that have no ground of their own."""
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(colors=INK)
    for text in figure.findobj(Text):
        if text.get_bbox_patch() is None:  # type: ignore[attr-defined]
            text.set_color(INK)  # type: ignore[attr-defined]
    for spine in figure.findobj(Spine):
        spine.set_edgecolor(INK)  # type: ignore[attr-defined]
    picture = io.BytesIO()
    figure.savefig(picture, format="png", transparent=True)
    return picture.getvalue()
