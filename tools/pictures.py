"""Draw the pictures of docs/ that show a computation: automaton.svg, trie.svg and expansion.svg.

    python tools/pictures.py                            # all of them; needs pip install 'llmppl[plots]'
    python tools/pictures.py trie expansion             # some of them

Each function draws one picture, from a run of the embedded model or from a file. Coordinates are inches from the
lower left corner. Ink is dark on a light page and light on a dark one; other colours suit both.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle

from llmppl import CachedTransformer, ConstrainedText, Regex, enumerate_exact, smc_steer
from llmppl.report import Recorder

ROOT = Path(__file__).resolve().parent.parent
INK, BLUE, GREEN, RED, GREY = "#24292f", "#4c8eda", "#3a9d6e", "#d9534f", "#8b949e"
DARK = {INK: "#e6edf3"}                                 # the colours that change on a dark page
MONO, CHARACTER = "DejaVu Sans Mono", 0.0837           # and the width of a character


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

    def box(self, x: float, y: float, text: str, color: str, filled: bool = True) -> float:
        """Draw a text in a box, with a dot for each space. Return the right end of the box."""
        width = CHARACTER * len(text) + 0.06
        face = to_rgba(color, 0.3 if filled else 0)
        self.axes.add_patch(Rectangle((x, y - 0.11), width, 0.22, facecolor=face, edgecolor=color, lw=1))
        self.mono(x + 0.03, y, text.replace(" ", "·"), ha="left")
        return x + width

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


def trie() -> None:
    """Draw the trie of contexts after six steps of three particles."""
    lm = CachedTransformer.from_pretrained()
    program = ConstrainedText(lm, "The girl had a", max_tokens=12)
    particles = smc_steer(program, N=3, K=3, seed=2, max_steps=6, progress=False)
    ends = {particle.context.node for particle in particles}
    canvas, rows = Canvas(5.15, 1.9), iter(np.arange(1.77, 0, -0.32))

    def draw(node: Any, x: float, y: float) -> None:
        run = node.slot >= 0
        end = canvas.box(x, y, str(lm.vocab[node.token]), BLUE if run else GREY, filled=run)
        if node in ends:
            canvas.axes.add_patch(Ellipse((end + 0.12, y), 0.11, 0.11, facecolor=GREEN, lw=0))
        for i, child in enumerate(node.children):
            below = next(rows) if i else y
            canvas.line([end, end + 0.04, end + 0.04, end + 0.08], [y, y, below, below], lw=1)
            draw(child, end + 0.08, below)

    (prompt,) = lm.trie.root.children
    draw(prompt, 0.05, next(rows))
    asked = [node for node in lm.trie.root.subtree() if node.row is not None]
    alone = sum(node.depth for node in asked)
    print(f"trie: {lm.stats.tokens} tokens run; {len(asked)} rows, which need {alone} tokens without a cache")
    canvas.save("trie")


def expansion() -> None:
    """Draw one step of steering: three particles, nine different extensions, and the three that survive."""
    adjectives = "big|red|little|new|nice|small|special|pretty|good"
    nouns = "hat|ball|dog|cat|dress|doll|friend|house|garden|bird|box|car"
    lm, recorder = CachedTransformer.from_pretrained(), Recorder()
    program = ConstrainedText(lm, "The girl had a", Regex(rf" ({adjectives}) ({nouns})\."), max_tokens=12)
    smc_steer(program, N=3, K=3, seed=2, max_steps=2, on_step=recorder, progress=False)
    before, step = recorder.recording.steps
    canvas, y = Canvas(4.8, 3.25), 3.1
    for x, head in ((0.05, "N particles"), (1.6, "N K extensions"), (3.75, "N survivors")):
        canvas.text(x, y, head, ha="left")
    for place, parent in enumerate(before.candidates):
        children = [each for each in step.candidates if each.parent == place]
        if not children:
            continue
        middle = y - 0.31 * (1 + len(children)) / 2
        end = canvas.box(0.05, middle, parent.text, BLUE)
        canvas.text(0.05, middle - 0.23, f"{math.exp(parent.log_weight_after - before.log_ml):.2f}", ha="left")
        for child in children:
            y -= 0.31
            colour = GREEN if child.copies else GREY
            canvas.line([end, 1.55], [middle, y], lw=1)
            canvas.box(1.6, y, child.text[child.keep :], colour, filled=bool(child.copies))
            canvas.bar(2.55, y, math.exp(child.log_weight - step.log_ml), colour, 0.7)
            if child.copies:
                canvas.bar(3.75, y, math.exp(child.log_weight_after - step.log_ml), GREEN, 0.7)
        y -= 0.05
    canvas.save("expansion")


if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llmppl"})
    drawings = {each.__name__: each for each in (automaton, trie, expansion)}
    for name in sys.argv[1:] or drawings:
        drawings[name]()
