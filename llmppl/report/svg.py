"""Small drawings as inline SVG, in the colour of the surrounding text: a chart over steps, and a bar for a weight.

They are markup without scripts or colours, so they work in notebooks and pages, in light and dark themes.
"""

import html
import math
from collections.abc import Sequence

__all__ = ["bar", "chart"]

WIDTH, HEIGHT = 340, 64                                 # px of a chart
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 8, 17                # px of the margins around its curve


def chart(name: str, values: Sequence[float], *, low: float | None = None) -> str:
    """Return a chart of a value at each of T steps.

    The axis goes from `low` (by default the smallest value) to the largest value. The labels are these two values, the
    first and the last step, and the last value. A value that is not finite leaves a gap.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite) if low is None else low, max(finite)
    base, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(step: int) -> tuple[float, float]:
        x = LEFT + (right - LEFT) * (step / max(len(values) - 1, 1))
        return x, base - (base - TOP) * (values[step] - low) / max(high - low, 1e-12)

    path, joined, dot, last = "", False, "", ""
    for step, value in enumerate(values):
        if math.isfinite(value):
            x, y = at(step)
            path += f"{'L' if joined else 'M'}{x:.1f} {y:.1f}"
            dot, last = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>', _text(x + 6, y + 4, value)
        joined = math.isfinite(value)
    ends = "".join(
        f'<text x="{at(step)[0]:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{step + 1}</text>'
        for step in sorted({0, len(values) - 1})
    )
    axis = f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="currentColor" opacity="0.35"/>'
    marks = _text(LEFT - 5, base, low, "end") + _text(LEFT - 5, TOP + 6, high, "end") * (high > low)
    title = html.escape(f"{name} over {len(values)} steps, from {low:.2f} to {high:.2f}")
    return (
        f'<svg class="chart" role="img" aria-label="{title}" width="{WIDTH}" height="{HEIGHT}" font-size="10" '
        f'fill="currentColor"><title>{title}</title>{axis}'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linejoin="round"/>'
        f"{dot}{marks}{ends}{last}</svg>"
    )


def bar(share: float, width: float = 80.0) -> str:
    """Return a bar whose length is `share`, from 0 to 1, of `width` px."""
    return (
        f'<svg class="bar" aria-hidden="true" width="{width:.0f}" height="8">'
        f'<rect width="{max(share * width, 1.0):.1f}" height="8" rx="2" fill="currentColor" opacity="0.7"/></svg>'
    )


def _text(x: float, y: float, value: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{value:.2f}</text>'
