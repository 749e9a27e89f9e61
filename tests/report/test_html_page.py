"""Page of a run, driven in a browser by pointer, keys and finger, light and dark, wide and narrow.

The expected contents come from the recording itself. Skipped without playwright (`make extras`) or a browser.
"""

import html
import re
import shutil
from dataclasses import replace

import pytest
from helpers.common import HANG

from llmppl import Bernoulli, Categorical, Model, smc_steer
from llmppl.report import Recorder, page

BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SIZES = {"wide": (1440, 760), "phone": (390, 844)}
WORDS = {" the": 0.3, " a": 0.2, " cat": 0.2, " dog": 0.15, " sat": 0.1, ".": 0.05}


class Prompt:
    """Context with the attributes that a recorder uses."""

    next_token, tokens = None, ()

    def __init__(self, text):
        self.text = text


class Words(Model):
    """Program of words, of which some die and some weigh less."""

    def __init__(self, most):
        super().__init__()
        self.most, self.context, self.n = most, Prompt("Once <upon> a time"), 0

    def step(self):
        word = self.sample(Categorical(WORDS))
        self.s += word
        self.context = Prompt("Once <upon> a time" + self.s)
        self.n += 1
        self.score(-0.7 * (word == " a"))
        self.condition(self.sample(Bernoulli(0.9)))
        if word == "." or self.n == self.most:
            self.finish()


def recorded(N, steps):
    recorder = Recorder(title="a <test>")
    smc_steer(Words(steps), N, 3, seed=2, on_step=recorder)
    return recorder.recording


@pytest.fixture(scope="module")
def run():
    return recorded(8, 12)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make extras)")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS, timeout=1000 * HANG)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page. At the end of the test, check that it had no error."""
    contexts, errors = [], []

    def open_page(text, size="wide", scheme="light", **options):
        width, height = SIZES[size]
        viewport = {"width": width, "height": height}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, **options))
        contexts[-1].set_default_timeout(1000 * HANG)
        tab = contexts[-1].new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("request", lambda request: None if request.url.startswith("file:") else errors.append(request.url))
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(text, encoding="utf-8")
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def place_of(tab, step, candidate):
    """Scroll to a candidate, and return its place in px of the window."""
    return tab.evaluate(
        """([t, i]) => {
          const node = nodes[t - 1][i], stage = $("stage"), tree = $("tree");
          stage.scrollLeft = left(node.t) * scale - 100;
          const box = tree.getBoundingClientRect();
          return [box.left + (left(node.t) + LINK + 3) * scale, box.top + node.line * scale];
        }""",
        [step, candidate],
    )


def first(run, holds):
    """Return the step and the place of the first candidate of which a predicate holds."""
    return next((step.index, i) for step in run.steps for i, c in enumerate(step.candidates) if holds(c))


def heaviest(run, step, parent=None):
    """Return the place of the heaviest candidate of a step, among the children of `parent`."""
    candidates = run.steps[step - 1].candidates
    of = [i for i, c in enumerate(candidates) if parent is None or c.parent == parent]
    return max(of, key=lambda i: candidates[i].log_weight_after)


def survivors(run):
    """Return, for each step, the number of candidates with descendants among the last particles."""
    alive = {i for i, c in enumerate(run.steps[-1].candidates) if c.copies}
    numbers = [len(alive)]
    for step in reversed(run.steps[1:]):
        alive = {step.candidates[i].parent for i in alive}
        numbers.append(len(alive))
    return numbers[::-1]


def found(run, text):
    """Return the candidates that added a text."""
    before, places = [""], []
    for step in run.steps:
        for i, c in enumerate(step.candidates):
            parent = "" if c.parent is None else before[c.parent]
            if text in c.text and text not in parent:
                places.append((step.index, i))
        before = [c.text for c in step.candidates]
    return places


def test_hovering_shows_the_fate_of_a_candidate(opened, run):
    tab = opened(page(run))
    for holds, fate in [
        (lambda c: c.death, "Died: condition is false (test_html_page.py, line"),
        (lambda c: not c.copies and not c.death, "Culled. It had"),
        (lambda c: c.copies and c.finished and not c.carried, "Finished, and kept"),
    ]:
        step, place = first(run, holds)
        tab.mouse.move(*place_of(tab, step, place))
        told = tab.inner_text("#tip")
        assert fate in told and run.steps[step - 1].candidates[place].text.strip() in told
        assert tab.inner_text("#at") == f"step {step}" and tab.inner_text("#ess")
    tab.mouse.move(1300, 700)
    assert tab.is_hidden("#tip")


def test_a_click_shows_the_history_with_working_links(opened, run):
    tab = opened(page(run))
    step, place = first(run, lambda c: c.death and len(c.text) > 12)
    tab.mouse.click(*place_of(tab, step, place))
    died = run.steps[step - 1].candidates[place]
    assert tab.inner_text("#detail h2") == f"Step {step}, candidate {place}"
    assert tab.inner_text(".whole") == "Once <upon> a time" + died.text
    assert died.death in tab.inner_text(".fate") and tab.locator("#history tbody").count() == step
    tab.click("#history tbody:nth-of-type(2) a")
    assert tab.inner_text("#detail h2") == f"Step {step - 1}, candidate {died.parent}"
    assert tab.url.endswith(f"#step={step - 1}&candidate={died.parent}")
    tab.go_back()
    assert tab.inner_text("#detail h2") == f"Step {step}, candidate {place}"
    tab.click("#detail .bars a")
    assert tab.is_visible("#overview") and tab.is_hidden("#detail")
    tab.click("#overview .code a")                      # the first that died
    assert tab.inner_text(".fate").startswith("Died")


class Lines(Model):
    """Program of long lines with a common beginning and a latent, cut before its end."""

    mood = ""

    def step(self):
        if not self.mood:
            self.mood = self.sample(Categorical({"<b>angry": 0.5, "sad": 0.5}))
        word = self.sample(Categorical(dict.fromkeys(("fine", "ill", "late", "<i>here"), 0.25)))
        self.s += f"Ann asks again: How are you today? Bob says that he is {word} as always.\n"


@pytest.fixture(scope="module")
def lines():
    recorder = Recorder(title="<b>lines")
    smc_steer(Lines(), 6, 3, seed=1, max_steps=4, on_step=recorder)
    return replace(recorder.recording, ended="")


@pytest.mark.parametrize("size", SIZES)
def test_long_lines_differ_and_show_latents_and_cuts(opened, size):
    recorder = Recorder(title="<b>lines")
    smc_steer(Lines(), 6, 3, seed=1, max_steps=4, on_step=recorder)
    tab = opened(page(replace(recorder.recording, ended="")), size)
    labels = {text for text in tab.locator("#all text").all_text_contents() if text.startswith("…")}
    assert len({label[1:5] for label in labels}) == 4 and any("<i>" in label for label in labels)
    assert tab.locator("#values li").all_inner_texts() == ["below 3%", "3 to 10%", "10 to 30%", "above 30%"]
    tab.select_option("#colour", "mood")
    assert tab.locator("#values li").all_inner_texts() == ["<b>angry", "sad"]
    strokes = "new Set([...document.querySelectorAll('#all .kept')].map(e => getComputedStyle(e).stroke)).size"
    assert tab.evaluate(strokes) == 2
    tab.select_option("#colour", "none")
    assert tab.evaluate(strokes) == 1
    tab.click("#overview .text a >> nth=0")
    assert tab.inner_text(".fate").startswith("Cut") and "mood: " in tab.inner_text("#detail")
    assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert tab.locator("b b, i i, aside i i, h1 b").count() == 0        # no text became markup


class Forced(Model):
    """Program of a choice, two forced words, and a choice."""

    def step(self):
        n = self.s.count(" ")
        self.s += self.sample(Categorical({" and": 1.0} if n in (1, 2) else {" x": 0.5, " y": 0.5}))
        if n == 3:
            self.finish()


def test_forced_steps_are_folded_until_asked_for(opened):
    smc_steer(Forced(), 2, 2, seed=0, on_step=(recorder := Recorder()))
    tab, width = opened(page(recorder.recording)), "columns.map((_, t) => right(t) - left(t))"
    folded = tab.evaluate(width)
    tab.uncheck("#folded")
    assert [a < b for a, b in zip(folded[1:], tab.evaluate(width)[1:], strict=True)] == [True, True, False]


def test_keys_move_along_the_tree_without_a_first_click(opened, run):
    tab = opened(page(run))

    def press(key, step, place):
        tab.keyboard.press(key)
        assert tab.inner_text("#detail h2") == f"Step {step}, candidate {place}"

    one = heaviest(run, 1)
    two = heaviest(run, 2, one)
    press("ArrowRight", 1, one)
    press("ArrowRight", 2, two)
    press("ArrowLeft", 1, one)
    below, above = tab.evaluate("i => [1, -1].map(d => (columns[0][nodes[0][i].rank + d] || {i: null}).i)", one)
    for key, back, other in [("ArrowDown", "ArrowUp", below), ("ArrowUp", "ArrowDown", above)]:
        if other is not None:
            press(key, 1, other)
            press(back, 1, one)
    tab.keyboard.press("Escape")
    assert tab.is_visible("#overview")
    tab.keyboard.press("Tab")                           # and whoever goes by the tabulator sees where he is
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_search_finds_a_text_and_enter_moves_to_the_next(opened, run):
    tab = opened(page(run))
    tab.keyboard.press("/")
    tab.keyboard.type("Cat sat")
    places = found(run, "cat sat")
    assert len(places) > 1 and tab.inner_text("#found") == f"{len(places)} found"
    assert tab.locator("#hits rect").count() == len(places)
    seen = set()
    for _ in places:
        tab.keyboard.press("Enter")
        seen.add(tuple(map(int, re.findall(r"\d+", tab.inner_text("#detail h2")))))
    assert seen == set(places)
    tab.keyboard.press("Shift+Enter")
    assert tuple(map(int, re.findall(r"\d+", tab.inner_text("#detail h2")))) in seen
    tab.keyboard.press("Escape")
    assert tab.input_value("#find") == "" and tab.locator("#hits rect").count() == 0


def test_the_filter_shows_only_ancestors_of_the_last_particles(opened, run):
    tab = opened(page(run))
    drawn = "columns.map(column => column.length)"
    assert tab.evaluate(drawn) == [len(step.candidates) for step in run.steps]
    tab.check("#survivors")
    assert tab.evaluate(drawn) == survivors(run)
    step, place = first(run, lambda c: c.death)
    tab.click("#overview .code a")                      # it is none: the others come back, so that it can be seen
    assert tab.inner_text("#detail h2") == f"Step {step}, candidate {place}" and not tab.is_checked("#survivors")


def contrasts(tab):
    """Return the contrast of every visible text, by the formula of WCAG 2, with a few words of it."""
    texts = tab.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
             && !["SCRIPT", "TITLE"].includes(e.tagName)
             && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
          let opacity = 1, behind = null;
          for (let up = e; up instanceof Element; up = up.parentNode) {
            const style = getComputedStyle(up);
            opacity *= style.opacity;
            if (!behind && style.backgroundColor !== "rgba(0, 0, 0, 0)") behind = style.backgroundColor;
          }
          const style = getComputedStyle(e);
          return [e.textContent.slice(0, 30), e instanceof SVGElement ? style.fill : style.color, behind, opacity];
        })"""
    )

    return [(contrast(ink, behind, opacity), text) for text, ink, behind, opacity in texts]


def contrast(ink, behind, opacity=1.0):
    """Return the contrast of two colours in CSS notation."""

    def luminance(channels):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def rgb(colour):
        return [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]

    seen = [opacity * a + (1 - opacity) * b for a, b in zip(rgb(ink), rgb(behind), strict=True)]
    light, dark = sorted([luminance(seen), luminance(rgb(behind))], reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_a_contrast_of_4_5_at_least(opened, run, scheme, size):
    tab = opened(page(run), size, scheme)
    overview = contrasts(tab)
    step, place = first(run, lambda c: c.death and len(c.text) > 12)
    assert len(overview) > 150 and any(text in WORDS for _, text in overview)
    tab.goto(f"{tab.url}#step={step}&candidate={place}")
    tab.wait_for_selector("#detail .fate")
    for ratio, text in overview + contrasts(tab):
        assert ratio >= 4.5, f"{text!r} has {ratio:.2f}"
    tab.fill("#find", "cat")                            # what is found lies on a colour of its own
    fill = "name => getComputedStyle(document.querySelector(name)).fill"
    hit = tab.evaluate(fill, "#hits rect")
    for name in "#all text.rejected", "#all text:not(.rejected)", "#chosen text:not(.end)":
        assert contrast(tab.evaluate(fill, name), hit) >= 4.5
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 150) == (scheme == "dark")


def test_a_phone_stacks_all_parts_and_accepts_taps(opened, run):
    tab = opened(page(run), "phone", has_touch=True, is_mobile=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    stage, aside = (tab.locator(name).bounding_box() for name in ("#stage", "aside"))
    assert stage["width"] == 390 and stage["height"] >= 320 and aside["y"] >= stage["y"] + stage["height"]
    for button in tab.locator("#tools button").all():
        assert min(button.bounding_box()["width"], button.bounding_box()["height"]) >= 24       # WCAG 2.5.8
    step, place = first(run, lambda c: c.copies)
    tab.touchscreen.tap(*place_of(tab, step, place))
    assert tab.inner_text("#detail h2") == f"Step {step}, candidate {place}"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_inside_a_notebook_links_and_keys_stay_in_the_frame(opened, run):
    document = f'<p>cell</p><iframe srcdoc="{html.escape(page(run))}" width="900" height="600"></iframe>'
    tab = opened(document)
    frame, address = tab.frame_locator("iframe"), tab.url
    step, place = first(run, lambda c: c.death)
    frame.locator("#overview .code a").first.click()
    assert frame.locator("#detail h2").first.inner_text() == f"Step {step}, candidate {place}"
    tab.keyboard.press("ArrowLeft")
    frame.locator("#detail .bars a").click()
    assert frame.locator("#overview").is_visible() and tab.url == address
    tab.keyboard.press("ArrowRight")
    assert frame.locator("#detail h2").first.inner_text() == f"Step 1, candidate {heaviest(run, 1)}"
