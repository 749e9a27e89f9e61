"""Views of results: tables as text and for a notebook, charts, data frames."""

import math
import pickle
import re
import sys
from types import SimpleNamespace

import pytest
from helpers.common import Cell
from helpers.tiny import cold_lm_with_bos

from llmppl import Categorical, Model, beam_search, repeat, search, smc_steer
from llmppl.constraints import Text
from llmppl.inference import Death, Particles
from llmppl.models.choices import describe_site
from llmppl.queries import Match, MatchList
from llmppl.report.tables import chart, html_table, text_table


class Letters(Model):
    def step(self):
        letter = self.sample(Categorical({"a": 0.5, "<b>": 0.3, ".": 0.2}))
        self.s += letter
        self.condition(self.s[:1] != ".")
        if letter == ".":
            self.finish()


def steer(rng=None, seed=3):
    return smc_steer(Letters(), N=4, K=2, max_steps=5, **({"seed": seed} if rng is None else {"rng": rng}))


def test_a_table_is_as_wide_as_its_cells_and_shows_twenty_rows():
    assert text_table(["n", "text"], [["1", "a"], ["22", "b c"]]) == [" n  text", " 1  a", "22  b c"]
    many = [[str(i), "x"] for i in range(23)]
    assert text_table(["n", "text"], many)[-2:] == ["19  x", "... and 3 more"]
    assert html_table(["n", "text"], many).count("<tr>") == 21 and "... and 3 more" in html_table(["n", "t"], many)


def test_a_table_of_a_notebook_escapes_its_cells_and_sets_no_colours():
    shown = html_table(["n", "<text>"], [["<1>", "</td>&"]], bars=[[(0.25,), (1.0, 0.5, 1.25)]])
    assert "&lt;text&gt;" in shown and "<td>&lt;1&gt;</td>" in shown and "&lt;/td&gt;&amp;" in shown
    assert 'width="16.6"' in shown and "M32.2 5H79.0M" in shown and shown.count("<th") - shown.count("<thead") == 3
    assert not re.search("color:|background|<script", shown)


def test_a_chart_writes_its_ends_and_leaves_gaps():
    drawn = chart("ess", [0.0, 1.0, -math.inf, 0.5], low=0.0)
    axis, path = re.findall(r'<path d="(.*?)"', drawn)
    assert axis == "M56 8V47H284" and path == "M56.0 47.0L132.0 8.0M284.0 27.5"
    assert re.findall(r"<text[^>]*>(.*?)</text>", drawn) == ["0.00", "1.00", "1", "4", "0.50"]
    assert "ess over 4 steps, from 0.00 to 1.00" in drawn and "color:" not in drawn
    flat = chart("x", [2.0, 2.0])
    assert re.findall(r"<text[^>]*>(.*?)</text>", flat) == ["2.00", "1", "2", "2.00"]


def test_steps_are_a_tuple_that_shows_as_a_table_with_charts():
    particles = steer()
    steps = particles.steps
    lines = repr(steps).splitlines()
    assert isinstance(steps, tuple) and lines[0] == f"{len(steps)} steps"
    assert lines[2].split() == ["step", "ess", "log", "Z-hat", "ancestors", "finished", "dead"]
    last = steps[-1]
    figures = [last.index, f"{last.ess:.1f}", f"{last.log_ml:.2f}", last.num_unique_ancestors]
    assert lines[-1].split() == [*map(str, figures), str(last.num_finished), str(last.num_dead)]
    assert steps._repr_html_().count('class="chart"') == 3 and steps._repr_html_().count("<tr>") == len(steps) + 1
    empty = Particles([]).steps
    assert repr(empty) == "0 steps" and empty._repr_html_() == "<p>0 steps</p>"


def test_deaths_show_as_a_table_in_a_notebook():
    deaths = Particles([], deaths=[Death(2, "a < b", 3), Death(4, "a < b", 1, "<i>")]).deaths
    shown = deaths._repr_html_()
    assert "Deaths(4 particles)" in shown and "<td>4</td><td>2-4</td>" in shown
    assert "a &lt; b, one with the text &#x27;&lt;i&gt;&#x27;" in shown
    assert Particles([]).deaths._repr_html_() == "<p>Deaths(0 particles)</p>"


def test_iterated_matches_show_as_a_table():
    found = search(cold_lm_with_bos(), "a|b|c")
    two = found.take(2)
    assert isinstance(two, MatchList) and isinstance(two, list) and found.num_matches == 2
    log_prob = f"{two[0].log_prob:.3f}"
    assert repr(two).splitlines()[:4] == ["2 matches", "", "log prob  tokens  text", f"{log_prob:>8}       1  {two[0]}"]
    assert two._repr_html_().count("<tr>") == 3 and f"<td>{log_prob}</td><td>1</td>" in two._repr_html_()
    assert len(found.take(10)) == 1 and repr(found.take(10)) == "0 matches: there are no others"
    with pytest.raises(ValueError, match="n must be at least 0, not -1"):
        found.take(-1)
    weighed = MatchList([Match(Text("a"), "", (), -1.0, -1.0, -1.0, log_weight=-2.5)])
    assert repr(weighed).splitlines() == [
        "1 match", "", "log prob  log weight  tokens  text", "  -1.000      -2.500       0  a",
    ]  # fmt: skip


def test_beams_show_as_a_table():
    beams = beam_search(Letters(), 2, 2, max_steps=1)
    assert repr(beams).splitlines() == ["2 beams", "", "log joint  text", "    -0.69  a [cut]", "    -1.20  <b> [cut]"]
    assert beams._repr_html_().count("<tr>") == 3 and "&lt;b&gt; [cut]</td>" in beams._repr_html_()
    assert beams.best is beams[0].particle
    frame = pytest.importorskip("pandas", reason="pandas is not installed") and beams.to_pandas()
    assert frame["log_joint"].tolist() == [beam.log_joint for beam in beams] and frame["text"].tolist() == ["a", "<b>"]
    assert repr(pickle.loads(pickle.dumps(beams))) == repr(beams)
    assert repr(beam_search(Letters(), 1, 1, max_steps=1)).startswith("1 beam\n")


def test_data_frames_agree_with_the_results():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    particles = steer()
    frame = particles.to_pandas()
    assert list(frame) == ["text", "weight", "log_weight", "cut"] and isinstance(frame, pandas.DataFrame)
    assert frame["text"].tolist() == particles.texts and frame["log_weight"].tolist() == particles.log_weights.tolist()
    assert frame.groupby("text")["weight"].sum().to_dict() == pytest.approx(particles.by_text())
    assert frame["cut"].tolist() == [particle.cut for particle in particles]
    assert particles.steps.to_pandas()["ess"].tolist() == [step.ess for step in particles.steps]
    repeats = repeat(lambda rng: steer(rng), 3, seed=0)
    assert repeats.to_pandas()["log_ml"].tolist() == repeats.log_mls.tolist()
    matches = search(cold_lm_with_bos(), "a|b").take(2)
    assert matches.to_pandas()["log_prob"].tolist() == [match.log_prob for match in matches]
    assert MatchList().to_pandas().empty and len(Particles([]).to_pandas()) == 0


def test_progress_in_a_notebook_needs_no_widgets(monkeypatch, capsys):
    cell = Cell(monkeypatch)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    particles = smc_steer(Letters(), 4, 2, seed=3, max_steps=5, progress=True)
    assert re.fullmatch(rf"step {len(particles.steps)} of 5: \d/4 finished, log Z-hat -?[\d.]+", cell.shown[0])
    search(cold_lm_with_bos(), "a|b", progress=True).take(2)
    assert re.fullmatch(r"match 2: \d+ expansions", cell.shown[1]) and len(cell.shown) == 2
    steer()                                             # which is asked for no line
    assert len(cell.shown) == 2 and capsys.readouterr() == ("", "")


class Named(Model):
    def step(self):
        self.condition(len(self.s) > 3)


def test_a_statement_in_a_cell_is_named_by_the_cells_number(monkeypatch):
    cell = Cell(monkeypatch)
    cell.compile = SimpleNamespace(format_code_name=lambda name: ("Cell", "In[7]") if name == __file__ else None)
    describe_site.cache_clear()                                  # others were told outside of a notebook
    try:
        (death,) = smc_steer(Named(), 2, 2, seed=0).deaths
    finally:
        describe_site.cache_clear()
    assert re.fullmatch(r"condition is false \(In\[7\], line \d+\)", death.reason)


def test_without_pandas_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        steer().to_pandas()
