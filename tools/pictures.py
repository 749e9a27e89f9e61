"""Draw the pictures of docs/ that show a computation: automaton, trie, expansion and quality.

    python tools/pictures.py                            # needs pip install 'llmppl[plots]'

Each function draws one picture, from a run of the embedded model or from a file. Coordinates are inches from the
lower left corner. Ink is dark on a light page and light on a dark one; the other colours suit both.
"""

import json
import re
from math import exp
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from llmppl import CachedTransformer, ConstrainedText, Regex, enumerate_exact, smc_steer
from llmppl.report import Recorder

ROOT = Path(__file__).resolve().parent.parent
INK, BLUE, GREEN, RED, GREY = "#24292f", "#4c8eda", "#3a9d6e", "#d9534f", "#8b949e"
RULES = "".join(f'[style*="{kind}: {INK}"]{{{kind}:#e6edf3!important}}' for kind in ("fill", "stroke"))
STYLE = f"<style>@media (prefers-color-scheme:dark){{{RULES}}}</style>\n"
CHARACTER = 0.0837                                      # width of a character in a box


class Canvas:
    """Figure of `width` by `height` inches, with heads at the places `x` on top, and the marks of the pictures."""

    def __init__(self, width: float, height: float, x: tuple[float, ...] = (), heads: tuple[str, ...] = ()) -> None:
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")
        for place, head in zip(x, heads, strict=True):
            self.text(place, height - 0.15, head)

    def text(self, x: float, y: float, text: str, **options: Any) -> None:
        self.axes.text(x, y, text, va="center_baseline", **options)

    def box(self, x: float, y: float, text: str, color: str, filled: bool = True) -> float:
        """Draw a text in a box, with a dot for each space. Return the right end of the box."""
        frame = {"boxstyle": "square,pad=0.2", "facecolor": to_rgba(color, 0.3 if filled else 0), "edgecolor": color}
        self.text(x + 0.03, y, text.replace(" ", "·"), family="DejaVu Sans Mono", bbox=frame)
        return x + CHARACTER * len(text) + 0.06

    def bar(self, x: float, y: float, share: float, color: str = BLUE) -> None:
        """Draw a bar of 0.5 inches for a share of 1, with its value."""
        self.axes.barh(y, 0.5 * share, 0.14, left=x, color=color)
        self.text(x + 0.5 * share + 0.06, y, f"{share:.2f}")

    def save(self, name: str) -> None:
        """Write docs/NAME.svg, with the rules for a dark page."""
        path = ROOT / "docs" / f"{name}.svg"
        self.figure.savefig(path, metadata={"Date": None, "Creator": None})
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r" *<metadata>.*?</metadata>\n", STYLE, text, flags=re.DOTALL), encoding="utf-8")


def automaton() -> None:
    """Run the program of docs/local-and-global.md. Draw its automaton, the model's tokens and two distributions."""
    names: dict[str, Any] = {"print": lambda *values: None}
    exec((ROOT / "docs/local-and-global.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], names)
    vocab, index, probs = names["vocab"], names["index"], names["PROBS"]
    levels = ("local masking", "masked proposal")
    local, posterior = (enumerate_exact(names["Dog"](level)).by_text() for level in levels)
    places = {(): (0.25, 1.15), (1,): (1.5, 1.75), (2,): (1.5, 0.65)}                   # of texts, as token ids
    places |= {(1, 4): (2.8, 1.75), (1, 3): (2.8, 1.25), (2, 4): (2.8, 0.65), (2, 3): (2.8, 0.15)}
    canvas = Canvas(5.5, 2.35, (3.1, 3.7, 4.6), ("model", "local", "posterior"))
    states, p = {(): index.start}, {(): 1.0}
    for ids, (x, y) in places.items():
        if ids:
            before, token = ids[:-1], ids[-1]
            (u, v), q = places[before], probs[before[-1] if before else 0][token]
            fits = index.mask(states[before])[token]
            style = {"color": BLUE, "shrinkB": 15} if fits else {"color": RED, "shrinkB": 5, "ls": (0, (1.2, 0.6))}
            style |= {"arrowstyle": "-", "shrinkA": 15, "lw": 0.7 + 5 * q, "capstyle": "butt"}
            canvas.axes.annotate("", (x, y), (u, v), arrowprops=style)
            label = f"{str(vocab[token]).strip()} {q:g}"
            canvas.text((x + u) / 2 - 0.15, (y + v) / 2 + (0.17 if y >= v else -0.18), label, ha="center")
            if not fits:
                canvas.text(x, y, "×", ha="center", color=RED, fontsize=16)
                continue
            states[ids], p[ids] = index.advance(states[before], token), p[before] * q
        canvas.text(x, y, str([*dict.fromkeys(states.values())].index(states[ids])), ha="center")
        canvas.axes.plot(x, y, "o", ms=28, mec=INK, mfc="none")
        if index.accepts(states[ids]):
            text = "".join(str(vocab[each]) for each in ids)
            canvas.axes.plot(x, y, "o", ms=21, mec=INK, mfc="none")
            canvas.text(3.1, y, f"{p[ids]:.3f}")
            canvas.bar(3.7, y, local[text])
            canvas.bar(4.6, y, posterior[text])
    canvas.save("automaton")


def trie() -> None:
    """Draw the trie of contexts after six steps of three particles, and print the number of its tokens and rows."""
    lm = CachedTransformer.from_pretrained()
    program = ConstrainedText(lm, "The girl had a", max_tokens=12)
    ends = {each.context.node for each in smc_steer(program, N=3, K=3, seed=2, max_steps=6, progress=False)}
    canvas, rows = Canvas(5.15, 1.9), iter(np.arange(1.77, 0, -0.32))

    def draw(node: Any, x: float, y: float) -> None:
        end = canvas.box(x, y, str(lm.vocab[node.token]), BLUE if node.slot >= 0 else GREY, filled=node.slot >= 0)
        if node in ends:
            canvas.axes.plot(end + 0.12, y, "o", color=GREEN)
        for i, child in enumerate(node.children):
            below = next(rows) if i else y
            canvas.axes.plot([end, end + 0.04, end + 0.04, end + 0.08], [y, y, below, below], GREY)
            draw(child, end + 0.08, below)

    draw(lm.trie.root.children[0], 0.05, next(rows))
    alone = [node.depth for node in lm.trie.root.subtree() if node.row is not None]
    print(f"trie: {lm.stats.tokens} tokens run; {len(alone)} rows, which need {sum(alone)} tokens without a cache")
    canvas.save("trie")


def expansion() -> None:
    """Draw one step of steering: three particles, nine different extensions, and the three that survive."""
    words = "(big|red|little|new|nice|small|special|pretty|good) "
    words += "(hat|ball|dog|cat|dress|doll|friend|house|garden|bird|box|car)"
    lm, recorder = CachedTransformer.from_pretrained(), Recorder()
    program = ConstrainedText(lm, "The girl had a", Regex(rf" {words}\."), max_tokens=12)
    smc_steer(program, N=3, K=3, seed=2, max_steps=2, on_step=recorder, progress=False)
    before, step = recorder.recording.steps
    canvas = Canvas(4.8, 3.25, (0.05, 1.6, 3.75), ("N particles", "N K extensions", "N survivors"))
    y = 3.1
    for place in before.ancestors:
        parent, children = before.candidates[place], [each for each in step.candidates if each.parent == place]
        middle = y - 0.31 * (1 + len(children)) / 2
        end = canvas.box(0.05, middle, parent.text, BLUE)
        canvas.text(0.05, middle - 0.23, f"{exp(parent.log_weight_after - before.log_ml):.2f}")
        for child in children:
            y -= 0.31
            color = GREEN if child.copies else GREY
            canvas.axes.plot([end, 1.55], [middle, y], GREY)
            canvas.box(1.6, y, child.text[child.keep :], color, filled=bool(child.copies))
            canvas.bar(2.55, y, exp(child.log_weight - step.log_ml), color)
            if child.copies:
                canvas.bar(3.75, y, exp(child.log_weight_after - step.log_ml), color)
        y -= 0.05
    canvas.save("expansion")


def quality() -> None:
    """Draw the share of right answers of each method, from the summary of benchmarks/tasks.py."""
    methods = json.loads((ROOT / "benchmarks/results/quality.json").read_text(encoding="utf-8"))
    left, percent = 2.45, 0.039                         # the place of 0 %, and the inches of a percent
    canvas = Canvas(5.3, 0.27 * len(methods) + 0.55, (left, 4.8), ("right answers, %", "tokens"))
    for share in (0, 20, 40, 60):
        canvas.axes.axvline(left + percent * share, 0.08, 0.9, color=GREY, lw=0.5)
        canvas.text(left + percent * share, 0.12, str(share), ha="center")
    for row, each in enumerate(sorted(methods, key=lambda each: (each["tokens"] >= 180, each["right"]))):
        x, y, color = left + percent * each["right"], 0.4 + 0.27 * row, BLUE if each["tokens"] >= 180 else GREY
        canvas.text(0.05, y, each["method"])
        canvas.text(5.25, y, str(each["tokens"]), ha="right")
        canvas.axes.errorbar(x, y, xerr=percent * each["error"], fmt="o", color=color, lw=2)
    canvas.save("quality")


if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llmppl", "savefig.transparent": True})
    matplotlib.rcParams.update({"text.color": INK, "font.size": 10, "lines.linewidth": 1})
    for drawing in (automaton, trie, expansion, quality):
        drawing()
