"""Recording of a run against the steps themselves, its page, and the command."""

import html
import json
import math
import pickle
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.common import Cell
from helpers.tiny import cold_lm
from typer.testing import CliRunner

from llmppl import (
    Bernoulli,
    Categorical,
    ConstrainedText,
    Geometric,
    Infilling,
    Model,
    PromptIntersection,
    Regex,
    cli,
    smc_standard,
    smc_steer,
)
from llmppl.report import Recorder, load
from llmppl.report.html_page import page
from llmppl.report.tables import bar


class Letters(Model):
    """Program of letters until a full stop, no "c" at the second place, each b penalised."""

    def __init__(self, start="", twisted=False):
        super().__init__()
        self.s = start
        self.twisted = twisted

    def step(self):
        letter = self.sample(Categorical({"a": 0.4, "b": 0.3, "c": 0.2, ".": 0.1}))
        self.s += letter
        self.score(-1.0 if letter == "b" else 0.5)
        self.condition(self.s[1:2] != "c")
        if self.twisted:
            self.twist(0.25)
        if letter == ".":
            self.finish()


def steer(path, model=None, N=4, K=3, **options):
    """Return a recorded run, its steps, and the recording that is read back."""
    steps, recorder = [], Recorder(path, title="letters")

    def on_step(step):
        recorder(step)
        steps.append(
            [(str(c), dict(c.attribution), c.log_twist, c.finished, c.death) for c in step.candidates]
            + [step.parents, step.candidate_log_weights, step.ancestors]
            + [step.particles.log_weights, step.log_ml, step.ess]
        )

    particles = smc_steer(model or Letters(), N, K, seed=1, max_steps=6, on_step=on_step, **options)
    return particles, steps, load(path)


@pytest.mark.parametrize("model", [Letters(), Letters("x"), Letters(twisted=True)], ids=["plain", "begun", "twisted"])
@pytest.mark.parametrize("expand", ["copies", "distinct"])
def test_a_recording_agrees_with_the_steps_of_the_run(tmp_path, model, expand):
    _, steps, recording = steer(tmp_path / "run.jsonl", model, expand=expand)
    assert (recording.program, recording.title, len(recording.steps)) == ("Letters", "letters", len(steps))
    before, totals = None, [{}]                         # what each statement added so far, for each candidate
    for step, (*candidates, parents, log_weights, ancestors, after, log_ml, ess) in zip(
        recording.steps, steps, strict=True
    ):
        assert (step.log_ml, step.ess) == (log_ml, ess)
        read = [(c.text, c.twist, c.finished, c.death) for c in step.candidates]
        assert read == [(text, twist, finished and not death, death) for text, _, twist, finished, death in candidates]
        assert [c.log_weight for c in step.candidates] == log_weights.tolist()
        assert [c.parent for c in step.candidates] == [None if before is None else before[i] for i in parents]
        assert [c.copies for c in step.candidates] == [np.sum(ancestors == i) for i in range(len(candidates))]
        chosen = [np.logaddexp.reduce(after[ancestors == i], initial=-np.inf) for i in range(len(candidates))]
        assert [c.log_weight_after for c in step.candidates] == pytest.approx(chosen)
        old = [totals[c.parent or 0] for c in step.candidates]
        totals = [_added(total, c.attribution) for total, c in zip(old, step.candidates, strict=True)]
        assert totals == [pytest.approx(attribution) for _, attribution, *_ in candidates]
        before = ancestors


def _added(total, attribution):
    return {name: total.get(name, 0.0) + attribution.get(name, 0.0) for name in {**total, **attribution}}


def test_particles_and_attribution_agree_with_the_run(tmp_path):
    particles, _, recording = steer(tmp_path / "run.jsonl", Letters(twisted=True))
    read = recording.particles()
    assert sorted(weight for _, weight in read) == pytest.approx(sorted(particles.weights))
    assert [weight for _, weight in read] == sorted((weight for _, weight in read), reverse=True)
    (name,) = recording.mean_attribution()
    assert recording.mean_attribution()[name] == pytest.approx(particles.expect(lambda p: p.attribution[name]))
    assert sum(recording.deaths().values()) == sum(death.count for death in particles.deaths)


def test_a_particle_that_was_resampled_twice_is_one_candidate_of_two_copies(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl")
    particles = smc_standard(Letters(), 8, ess_threshold=1.0, seed=0, max_steps=4, on_step=recorder)
    recording = load(tmp_path / "run.jsonl")
    assert max(candidate.copies for step in recording.steps for candidate in step.candidates) > 1
    for step in recording.steps[:-1]:
        assert sum(candidate.copies for candidate in step.candidates) == 8
    assert sum(weight for _, weight in recording.particles()) == pytest.approx(1.0)
    assert sum(c.copies for c in recording.steps[-1].candidates) == len(particles)


class Fickle(Model):
    """Program that removes a part of its text, with characters outside the basic plane before it."""

    def step(self):
        self.s = "\N{GRINNING FACE}ab" if not self.s else "\N{GRINNING FACE}a<c>"
        self.sample(Bernoulli(0.5))
        if self.s.endswith(">"):
            self.finish()


def test_a_partly_withdrawn_text_is_recorded_correctly(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl")
    smc_steer(Fickle(), 2, 2, seed=0, on_step=recorder)
    recording = load(tmp_path / "run.jsonl")
    assert {(c.text, c.keep) for c in recording.steps[1].candidates} == {("\N{GRINNING FACE}a<c>", 2)}
    data = page_data(page(recording))
    assert data["steps"][1]["candidates"][0][1:3] == ["<c>", 3]        # JavaScript counts UTF-16 units


def test_a_recording_is_readable_after_every_step(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)

    def on_step(step):
        recorder(step)
        assert load(path).steps[-1].index == step.index

    smc_steer(Letters(), 3, 2, seed=3, max_steps=4, on_step=on_step)
    lines = path.read_text().splitlines(keepends=True)
    whole = load(path)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])
    assert load(path).steps == whole.steps[:-1]


def test_the_page_shows_the_status_of_the_recording(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        particles = smc_steer(Letters(), 4, 2, seed=1, max_steps=2, on_step=recorder)
    left = sum(p.cut for p in particles)
    assert load(path).status() == f"Cut after 2 steps, {left} of {len(particles)} particles not finished."

    def interrupted(step):
        recorder(step)
        if step.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Recorder(path) as recorder:
        smc_steer(Letters(), 4, 2, seed=1, on_step=interrupted)
    assert load(path).status().startswith("The recording stops after step 2, ")
    assert load(path).status().endswith("KeyboardInterrupt ended the run.")
    text = path.read_text()
    path.write_text(text[: text.rindex('{"end"')])
    assert load(path).status().endswith("not finished: cut by max_steps, still running, or interrupted.")
    assert load(path).status() in page(load(path))


class Doomed(Model):
    def step(self):
        self.s += "x"
        self.condition(len(self.s) < 2)


def test_the_page_reports_that_all_died_or_all_finished(tmp_path):
    smc_steer(Doomed(), 3, 2, expand="copies", seed=0, on_step=Recorder(tmp_path / "dead.jsonl"))
    recording = load(tmp_path / "dead.jsonl")
    assert recording.status() == "All particles had died after 2 steps."
    assert recording.particles() == [] and recording.mean_attribution() == {}
    ((reason, count),) = recording.deaths().items()
    assert re.fullmatch(r"condition is false \(test_recording_runs\.py, line \d+\)", reason) and count == 6
    shown = page(recording)
    assert "−∞" in shown and reason in shown and "What killed others" in shown
    smc_steer(Letters("."), 3, 2, seed=5, on_step=Recorder(tmp_path / "done.jsonl"))
    assert load(tmp_path / "done.jsonl").status().startswith("All particles finished, after ")


def page_data(text):
    """Return the data of the script of a page."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def test_the_page_contains_every_candidate_and_loads_nothing(tmp_path):
    _, steps, recording = steer(tmp_path / "run.jsonl")
    text = page(recording)
    assert not re.search(r"https?://|<link|<img|@import|url\(|src=", text)
    assert "{{" not in text and text.count("<script") == 2
    data = page_data(text)
    assert [len(step["candidates"]) for step in data["steps"]] == [len(step.candidates) for step in recording.steps]
    texts = [""]
    for drawn, step in zip(data["steps"], recording.steps, strict=True):
        texts = [
            ("" if parent < 0 else texts[parent])[: keep if keep >= 0 else None] + added
            for parent, added, keep, *_ in drawn["candidates"]
        ]
        assert texts == [candidate.text for candidate in step.candidates]
    assert all(math.isclose(sum(c[4] for c in step["candidates"]), 1, abs_tol=1e-2) for step in data["steps"])
    assert len(data["steps"]) == len(steps)


class Hostile(Model):
    def step(self):
        self.s = '</script><script>alert("1")</script><!-- {{data}}'
        self.finish()


def test_no_text_can_end_the_script_or_become_markup(tmp_path):
    smc_steer(Hostile(), 1, 1, on_step=Recorder(tmp_path / "run.jsonl", title="<b>{{data}}"))
    text = page(load(tmp_path / "run.jsonl"))
    assert text.count("<script") == 2 and "alert(&quot;1&quot;)" in text and "<b>{{" not in text
    assert page_data(text)["steps"][0]["candidates"][0][1] == '</script><script>alert("1")</script><!-- {{data}}'


def test_a_recorder_records_one_run_from_its_beginning(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl")
    smc_steer(Doomed(), 2, 2, seed=0, on_step=recorder)
    message = r"run\.jsonl'\) has recorded up to step 2 and is given step 1: .* make a Recorder for each run"
    with pytest.raises(ValueError, match=message):
        smc_steer(Doomed(), 2, 2, seed=0, on_step=recorder)
    assert len(load(tmp_path / "run.jsonl").steps) == 2


HEADER = '{"llmppl_trace": 2, "program": "", "title": "", "prompts": []}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no whole step"),
        ("hello\nworld\n", "line 1, is not as a Recorder writes it"),
        ('{"a": 1}\n', "line 1, is not as a Recorder writes it (KeyError: 'llmppl_trace')"),
        ("[1]\n", "line 1, is not as a Recorder writes it"),
        (b"\xff\xfe\x00\n", "line 1, is not as a Recorder writes it"),
        ('{"llmppl_trace": 9}\n', "this version of llmppl reads format 2"),
        (HEADER + '{"step": 1', "has no whole step"),
        (HEADER + '{"step": 1}\n', "line 2, is not as a Recorder writes it (KeyError: 'candidates')"),
        (HEADER + "[" * 100_000 + "\n", "line 2, is not as a Recorder writes it (RecursionError"),
    ],
)
def test_an_invalid_recording_is_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_the_command_writes_the_page_beside_the_recording_or_elsewhere(tmp_path):
    path = tmp_path / "run.jsonl"
    steer(path)
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 0 and result.stdout == f"{tmp_path / 'run.html'}: {load(path).status()}\n"
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page(load(path))
    assert CliRunner().invoke(cli.app, ["trace", str(path), "-o", str(tmp_path / "other.html")]).exit_code == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "run.html").read_bytes()


def test_the_command_names_a_file_that_it_cannot_read_or_write(tmp_path):
    path = tmp_path / "run.jsonl"
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 2 and "does not exist" in result.stderr
    steer(path)
    result = CliRunner().invoke(cli.app, ["trace", str(path), "-o", str(tmp_path / "no" / "run.html")])
    assert result.exit_code == 2 and "run.html: No such file or directory" in result.stderr
    result = CliRunner().invoke(cli.app, ["trace", str(path), "-o", str(path)])
    assert result.exit_code == 2 and "The page would replace the recording" in result.stderr
    with pytest.raises(FileNotFoundError, match="run.jsonl"):
        load(tmp_path / "no" / "run.jsonl")


def test_the_notebook_view_draws_the_steps_and_the_weights(tmp_path):
    particles, _, _ = steer(tmp_path / "run.jsonl")
    view = particles._repr_html_()
    assert view.count('class="chart"') == 2 and view.count('class="bar"') == len(particles) and bar(1.0) in view
    assert f"log Z-hat over {len(particles.steps)} steps" in view
    assert "<script" not in view and "color:" not in view


class After(Model):
    """Program that continues a prompt by one letter a step; its first text has no prompt before it."""

    def __init__(self, lm, *prompts):
        super().__init__()
        self.contexts = [lm.context(prompt) for prompt in prompts]

    def step(self):
        token = self.sample(self.transformer(self.contexts[0]).masked([True] * 5 + [False]))
        self.s += token
        self.contexts = [context + token for context in self.contexts]
        if len(self.s) > 3:
            self.finish()


def test_the_page_shows_the_prompts(tmp_path):
    lm, path = cold_lm(), tmp_path / "run.jsonl"
    for prompts in ["ab"], ["a", "b c"]:
        smc_steer(After(lm, *prompts), 2, 2, seed=0, on_step=Recorder(path))
        assert load(path).prompts == prompts
        text = page(load(path))
        assert all(f"<q>{prompt}</q>" in text for prompt in prompts) and page_data(text)["prompts"] == prompts
    smc_steer(Letters(), 2, 2, seed=0, max_steps=2, on_step=Recorder(path))
    assert load(path).prompts == [] and '<div class="prompt"' not in page(load(path))


def test_a_recorder_without_a_file_keeps_the_run_in_memory(tmp_path):
    memory, recorder = Recorder(), Recorder(tmp_path / "run.jsonl")

    def both(step):
        memory(step)
        recorder(step)

    with pytest.raises(ValueError, match=re.escape("Recorder() has recorded no step: run smc_steer(model, N, K")):
        _ = memory.recording
    smc_steer(Letters(), 3, 2, seed=1, max_steps=4, on_step=both)
    assert memory.recording == load(tmp_path / "run.jsonl") == recorder.recording


def test_a_posterior_shows_the_page_of_its_run(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = Recorder()
    posterior = smc_steer(Letters(), 3, 2, seed=1, max_steps=4, on_step=recorder)
    posterior.show()
    (file,) = tmp_path.iterdir()
    assert opened == [file.as_uri()] and str(file) in capsys.readouterr().out
    shown = file.read_text(encoding="utf-8")
    assert shown == page(replace(recorder.recording, ended=""))
    left = sum(particle.cut for particle in posterior)
    assert left and f"Cut after 4 steps, {left} of 3 particles not finished." in shown
    plain = smc_steer(Letters(), 3, 2, seed=1, max_steps=4, on_step=lambda step: None)
    for unrecorded in plain, pickle.loads(pickle.dumps(posterior)):
        with pytest.raises(RuntimeError, match=r"this run was not recorded.* on_step=Recorder\(\)\) records one"):
            unrecorded.show()


def test_in_a_notebook_the_page_is_a_frame_below_the_cell(monkeypatch):
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", cell)
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    recorder = Recorder()
    smc_steer(Letters(), 3, 2, seed=1, max_steps=4, on_step=recorder).show()
    (shown,) = cell.shown
    (document,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert html.unescape(document) == page(replace(recorder.recording, ended=""))


def test_an_interrupted_run_shows_its_steps_as_well(monkeypatch, tmp_path):
    recorder, shown = Recorder(), []
    monkeypatch.setattr("llmppl.report.html_page.show", shown.append)

    class Stops(Letters):
        def step(self):
            super().step()
            if len(self.s) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        smc_steer(Stops(), 3, 2, seed=1, on_step=recorder)
    error.value.particles.show()
    assert len(shown[0].steps) == 2


def test_statements_of_ready_made_programs_are_described_in_words():
    lm = cold_lm()

    def statements(program, **options):
        return [*smc_steer(program, N=6, K=3, seed=0, **options).mean_attribution()]

    assert statements(ConstrainedText(lm, "a", Regex("a|b c"), max_tokens=4, complete=True)) == [
        "Regex('a|b c') and an end within max_tokens=4"
    ]
    assert statements(ConstrainedText(lm, "a", min_tokens=2, max_tokens=3)) == ["min_tokens=2"]
    told = statements(Infilling(lm, ["a", "b", "c"], lengths=Geometric(0.5, max_value=3)))
    lengths = "the lengths of the holes, which the target leaves open"
    assert {*told} == {"the fragments after the holes", lengths, "no end in a hole"}
    told = statements(PromptIntersection(lm, ["a", "b"], max_tokens=2))
    assert {*told} == {"the first prompt, over the proposal", "the other prompts"}

    class Mine(ConstrainedText):
        def step(self):
            super().step()
            self.score(-1.0)

    told = statements(Mine(lm, "a", Regex("a|b c"), max_tokens=4))
    assert any(re.fullmatch(r"score \(test_recording_runs\.py, line \d+\)", each) for each in told)
    assert "Regex('a|b c') and an end within max_tokens=4" in told
