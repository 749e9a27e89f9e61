"""Draw the pictures of docs/ that show a computation: automaton.svg.

    python tools/pictures.py                            # all of them; needs pip install 'llmppl[plots]'
    python tools/pictures.py automaton                  # one of them

Each function draws one picture, from a run of the embedded model or from a file. Coordinates are inches from the
lower left corner. Ink is dark on a light page and light on a dark one; other colours suit both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle

from llmppl import enumerate_exact

ROOT = Path(__file__).resolve().parent.parent
INK, BLUE, RED, GREY = "#24292f", "#4c8eda", "#d9534f", "#8b949e"
DARK = {INK: "#e6edf3"}                                 # the colours that change on a dark page
MONO = "DejaVu Sans Mono"


class Canvas:
    """Empty figure of `width` by `height` inches, with the marks that the pictures share."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, ha: str = "center", color: str = INK, **options: Any) -> None:
        self.axes.text(x, y, text, ha=ha, va="center_baseline", color=color, **{"fontsize": 10, **options})

    def mono(self, x: float, y: float, text: str, **options: Any) -> None:
        self.text(x, y, text, family=MONO, **options)

    def line(self, xs: list[float], ys: list[float], color: str = GREY, **options: Any) -> None:
        self.axes.plot(xs, ys, color=color, solid_capstyle="butt", **options)

    def bar(self, x: float, y: float, share: float, color: str, unit: float) -> None:
        """Draw a bar of `share` times `unit` inches, with its value."""
        self.axes.add_patch(Rectangle((x, y - 0.07), share * unit, 0.14, facecolor=color, lw=0))
        self.text(x + share * unit + 0.06, y, f"{share:.2f}", ha="left")

    def save(self, name: str) -> None:
        """Write docs/NAME.svg, with the rules for a dark page."""
        path = ROOT / "docs" / f"{name}.svg"
        self.figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        rules = "".join(
            f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
            for light, dark in DARK.items() for kind in ("fill", "stroke")
        )  # fmt: skip
        text = path.read_text(encoding="utf-8")
        style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"
        text = re.sub(r"<metadata>.*?</metadata>\n?", style, text, count=1, flags=re.DOTALL)
        path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


def automaton() -> None:
    """Draw the automaton and the model of docs/local-and-global.md, and the probabilities that two levels give."""
    page = (ROOT / "docs" / "local-and-global.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"print": lambda *values: None}
    exec(page.split("```python\n")[1].split("```")[0], names)
    vocab, index, probs = names["vocab"], names["index"], names["PROBS"]
    levels = "local masking", "masked proposal"
    local, posterior = (enumerate_exact(names["Dog"](level)).by_text() for level in levels)
    canvas, numbers = Canvas(5.45, 2.35), dict[Any, int]()

    def node(x: float, y: float, state: Any) -> None:
        for size in (0.4, 0.3)[: 1 + index.accepts(state)]:
            canvas.axes.add_patch(Ellipse((x, y), size, size, facecolor="none", edgecolor=INK, lw=1.2))
        canvas.text(x, y, str(numbers.setdefault(state, len(numbers))))

    def edge(x: float, y: float, u: float, v: float, token: int, p: float, dead: bool = False) -> None:
        a, b = np.array([x, y]), np.array([u, v])
        away = 0.21 * (b - a) / np.linalg.norm(b - a)
        ends = np.stack([a + away, b - (0.3 if dead else 1) * away])
        colour = RED if dead else BLUE
        canvas.line(ends[:, 0], ends[:, 1], colour, lw=0.7 + 5 * p, ls=(0, (1.2, 0.6)) if dead else "solid")
        aside = (-0.28, -0.17) if v < y else (-0.2, 0.2) if v > y else (0, 0.16)
        canvas.mono((x + u) / 2 + aside[0], (y + v) / 2 + aside[1], f"{str(vocab[token]).strip()} {p:g}")
        if dead:
            canvas.text(u, v, "×", color=RED, fontsize=16)

    for x, head in ((3.1, "model"), (3.7, "local"), (4.7, "posterior")):
        canvas.text(x, 2.2, head, ha="left")
    node(0.25, 1.15, index.start)
    for article, y in ((1, 1.75), (2, 0.65)):
        after, text = index.advance(index.start, article), str(vocab[article])
        edge(0.25, 1.15, 1.5, y, article, probs[0][article])
        node(1.5, y, after)
        for word, v in ((4, y), (3, y - 0.5)):
            fits = bool(index.mask(after)[word])
            edge(1.5, y, 2.8, v, word, probs[article][word], dead=not fits)
            if fits:
                node(2.8, v, index.advance(after, word))
                canvas.text(3.1, v, f"{probs[0][article] * probs[article][word]:.3f}", ha="left")
                for x, answers in ((3.7, local), (4.7, posterior)):
                    canvas.bar(x, v, answers[f"{text}{vocab[word]}"], BLUE, 0.4)
    canvas.save("automaton")


if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llmppl"})
    drawings = {each.__name__: each for each in (automaton,)}
    for name in sys.argv[1:] or drawings:
        drawings[name]()
