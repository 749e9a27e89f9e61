"""Small drawings as inline SVG, in the colour of the text around them: a curve over steps, and a bar for a weight.

They are plain markup without scripts or colours, so that they read in notebooks and pages, light and dark.
"""

import math
from collections.abc import Sequence

__all__ = ["bar", "curve"]

MARGIN = 4.0                # px kept free above and below a curve, for the width of its line


def curve(
    xs: Sequence[float], ys: Sequence[float], *, width: float, height: float, low: float, high: float, title: str
) -> str:
    """The points (x, y) joined by a line, with a dot at the last.

    Parameters
    ----------
    xs, ys : (T,) float
        x in px. A y that is not finite leaves a gap.
    low, high : float
        The values at the bottom and at the top.
    title : str
        What a reader of the screen is told.
    """
    span = max(high - low, 1e-12)
    points = [
        (x, MARGIN + (height - 2 * MARGIN) * (1 - (y - low) / span)) if math.isfinite(y) else None
        for x, y in zip(xs, ys, strict=True)
    ]
    path, before = "", None
    for point in points:
        if point is not None:
            path += f"{'L' if before else 'M'}{point[0]:.1f} {point[1]:.1f}"
        before = point
    drawn = [point for point in points if point is not None]
    dot = f'<circle cx="{drawn[-1][0]:.1f}" cy="{drawn[-1][1]:.1f}" r="2.5" fill="currentColor"/>' if drawn else ""
    return (
        f'<svg class="curve" role="img" aria-label="{title}" width="{width:.0f}" height="{height:.0f}">'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linejoin="round"/>{dot}</svg>'
    )


def bar(share: float, width: float = 80.0) -> str:
    """A bar whose length is `share`, from 0 to 1, of `width` px."""
    return (
        f'<svg class="bar" aria-hidden="true" width="{width:.0f}" height="8">'
        f'<rect width="{max(share * width, 1.0):.1f}" height="8" rx="2" fill="currentColor" opacity="0.7"/></svg>'
    )
