"""Draw the pictures of docs/ that show a computation: a run of the embedded model, or the results of a benchmark.

    python tools/pictures.py [NAME ...]                 # needs pip install 'llmppl-smc[plots]'

Each function draws one picture, from a run of the embedded model or from a file. Coordinates are inches from the
lower left corner. Ink is dark on a light page and light on a dark one; the other colours suit both.
"""

import json
import re
import sys
from math import exp
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Regex, enumerate_exact, smc_steer
from llmppl.constraints.json.unit import FrameUnit
from llmppl.constraints.machine.machine import DONE, Resume, Then
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


def loop() -> None:
    """Run the program of docs/modelling.md. Draw the parts of its fourth step, with the numbers of this step."""
    names: dict[str, Any] = {"print": lambda *values: None}
    exec((ROOT / "docs/modelling.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], names)
    lm, N, K, recorder = names["lm"], 5, 4, Recorder()
    lm.clear()
    rows = [0]

    def on_step(step: Any) -> None:
        recorder(step)
        rows.append(lm.stats.rows)

    posterior = smc_steer(names["story"], N, K, seed=10, max_steps=30, on_step=on_step, progress=False)
    step, record = recorder.recording.steps[3], posterior.steps[3]
    canvas = Canvas(5.65, 1.95)
    boxes = {
        (0.95, 1.5): ("expand", f"{N} particles,", f"{len(step.candidates)} runs of step()"),
        (4.55, 1.5): ("forward pass", f"{rows[4] - rows[3]} distinct contexts", "in one batch"),
        (4.55, 0.42): ("weigh", "sample, observe, condition", f"{record.num_dead} extensions die"),
        (0.95, 0.42): ("resample", f"{N} of the others survive,", "without replacement"),
    }
    for (x, y), (head, *lines) in boxes.items():
        canvas.axes.add_patch(Rectangle((x - 0.9, y - 0.38), 1.8, 0.76, facecolor=to_rgba(BLUE, 0.12), edgecolor=BLUE))
        canvas.text(x, y + 0.22, head, ha="center", weight="bold")
        for i, line in enumerate(lines):
            canvas.text(x, y - 0.2 * i, line, ha="center", fontsize=9)
    arrows = {
        "contexts": ((1.87, 1.5), (3.63, 1.5)), "distributions": ((4.55, 1.1), (4.55, 0.82)),
        "weights": ((3.63, 0.42), (1.87, 0.42)), "survivors": ((0.95, 0.82), (0.95, 1.1)),
    }  # fmt: skip
    for label, (start, end) in arrows.items():
        canvas.axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1.5})
        above = start[1] == end[1]
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        canvas.text(x + 0.08 * (not above), y + 0.12 * above, label, ha="center" if above else "left")
    canvas.save("loop")


def mask() -> None:
    """Draw a mask: tokens after a prompt, their probabilities, those that the pattern allows, and the proposal."""
    lm = CachedTransformer.from_pretrained()
    index = Regex(r" (very )*(happy|sad)\.").index(lm.vocab)
    probs, allowed = np.exp(lm.context("Tim was").log_probs()), index.mask(index.start)
    proposal = np.where(allowed, probs, 0) / probs[allowed].sum()
    order = np.argsort(-probs)
    shown = sorted([*order[~allowed[order]][:4], *order[allowed[order]][:4]], key=lambda token: -probs[token])
    canvas = Canvas(4.4, 0.27 * len(shown) + 0.75, (0.05, 1.1, 2.25, 3.1), ("token", "model", "mask", "proposal"))
    for row, token in enumerate(shown):
        y, fits = 0.27 * (len(shown) - row) + 0.25, bool(allowed[token])
        canvas.box(0.05, y, str(lm.vocab[token]), BLUE if fits else GREY, filled=fits)
        canvas.bar(1.1, y, float(probs[token]), BLUE if fits else GREY)
        canvas.text(2.4, y, "1" if fits else "0", color=INK if fits else RED, ha="center")
        canvas.bar(3.1, y, float(proposal[token]), GREEN)
    canvas.text(0.05, 0.12, f"the weight of the step is the probability of the mask, {probs[allowed].sum():.2f}")
    canvas.save("mask")


def machine() -> None:
    """Read four texts with the machine of docs/architecture.md. Draw the hypotheses of each state."""
    pets = JsonSchema({"type": "array", "items": {"enum": ["cat", "cow"]}, "minItems": 1})
    reader = ("Pets: " + pets).machine
    canvas = Canvas(4.7, 2.4, (0.05, 1.45, 2.35, 3.0), ("text so far", "unit, state", "exits", "continuation"))
    y = 1.95
    for text in ("Pets", "Pets: [", 'Pets: ["cat"', 'Pets: ["cat"]'):
        state = reader.read(reader.start, text.encode())[0]
        canvas.text(0.05, y, text, family="DejaVu Sans Mono", color=GREEN if state.accepts else INK)
        for unit, number, after in sorted(state.hypotheses, key=lambda each: not each.unit.exits[each.number]):
            exits = ["done" if label == DONE else "call" for label in unit.exits[number]]
            canvas.box(1.45, y, f"{unit_name(unit)} {number}", BLUE)
            canvas.text(2.35, y, ", ".join(exits))
            end = 3.0
            while after is not None:
                label = "end"
                if isinstance(after, Resume):
                    label = f"{unit_name(after.unit)} {after.number}"
                elif isinstance(after, Then):
                    label = "JsonSchema"
                end = canvas.box(end, y, label, GREY, filled=False) + 0.15
                after = after.after
            y -= 0.29
        y -= 0.12
    canvas.save("machine")


def unit_name(unit: Any) -> str:
    """Return the name of a unit in the picture of a machine."""
    if isinstance(unit, FrameUnit):
        return {"Items": "array", "Words": "word"}[type(unit.frame).__name__]
    return "text"


def results(name: str) -> list[dict[str, Any]]:
    """Read a summary that a benchmark wrote."""
    found: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return found


def quality() -> None:
    """Draw the share of right answers of each method, from the summary of benchmarks/tasks.py."""
    methods = results("quality")
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


def cost() -> None:
    """Draw the cost of runs over that of generate, from the summary of benchmarks/goals.py."""
    rows = results("cost")
    left, unit = 3.0, 1.35                              # the place of 0, and the inches of 1
    canvas = Canvas(5.3, 0.27 * len(rows) + 0.8)
    for ratio in (0, 0.5, 1, 1.5):
        color, width = (INK, 1.0) if ratio == 1 else (GREY, 0.5)
        canvas.axes.axvline(left + unit * ratio, 0.14, 0.86, color=color, lw=width)
        canvas.text(left + unit * ratio, 0.12, f"{ratio:g}", ha="center")
    canvas.text(left + unit, 0.27 * len(rows) + 0.65, "generate", ha="center")
    names = {"gpt2": "GPT-2's shape", "embedded": "embedded"}
    for i, each in enumerate(rows):
        y, color = 0.27 * (len(rows) - i) + 0.15, BLUE if "steer" in each["method"] else GREY
        if not i % 2:
            canvas.text(0.05, y, f"{names[each['model']]}, {each['prompt']} tokens, N={each['N']}")
        canvas.text(2.9, y, "steering" if "steer" in each["method"] else "filter", ha="right", fontsize=8)
        middle, low, high = (left + unit * ratio for ratio in each["sampling"])
        canvas.axes.errorbar(middle, y, xerr=[[middle - low], [high - middle]], fmt="o", color=color, lw=2)
        canvas.axes.plot(left + unit * each["prompt once"][0], y, "o", mec=color, mfc="none")
    canvas.save("cost")


def chain() -> None:
    """Draw the share of runs that reach m right lines, from the summary of benchmarks/chain.py."""
    methods = results("chain")
    styles = ((GREY, "--"), (RED, "--"), (GREEN, "-."), (GREY, "-"), (RED, "-"), (BLUE, "-"))
    x, height = 0.45 + 0.5 * np.arange(1, 7), 1.7
    canvas = Canvas(6.6, height + 0.75)
    for share in (0, 0.5, 1):
        canvas.axes.plot((0.7, 3.7), [0.45 + height * share] * 2, color=GREY, lw=0.4)
        canvas.text(0.6, 0.45 + height * share, f"{share:g}", ha="right")
    for m, place in enumerate(x, 1):
        canvas.text(place, 0.25, str(m), ha="center")
    canvas.text(2.2, 0.08, "constraints", ha="center")
    canvas.text(0.05, height + 0.65, "share of runs that satisfy them")
    canvas.text(6.55, height + 0.65, "tokens", ha="right")
    order = sorted(zip(methods, styles, strict=True), key=lambda each: -sum(each[0]["reach"]))
    for row, (each, (color, dashes)) in enumerate(order):
        y = 0.45 + height * np.array(each["reach"])
        shift = 0.02 * (row - 2.5)                      # so that equal shares stay apart
        error = height * np.array(each["error"])
        canvas.axes.errorbar(x + shift, y, yerr=error, color=color, ls=dashes, lw=1.5)
        place = 0.45 + height - 0.27 * row
        canvas.axes.plot((3.85, 4.15), (place, place), color=color, ls=dashes, lw=1.5)
        canvas.text(4.2, place, each["method"], fontsize=8.5)
        canvas.text(6.55, place, f"{each['tokens']:,}", ha="right", fontsize=8.5)
    canvas.save("chain")


DRAWINGS = (automaton, trie, expansion, loop, mask, machine, quality, cost, chain)

if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llmppl", "savefig.transparent": True})
    matplotlib.rcParams.update({"text.color": INK, "font.size": 10, "lines.linewidth": 1})
    for drawing in DRAWINGS:
        if drawing.__name__ in (sys.argv[1:] or drawing.__name__):
            drawing()
