"""Recording of a run against the steps themselves, its page, and the command."""

import functools
import html
import json
import pickle
import re
from collections import Counter
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
from llmppl.report.recording import _last_message
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


RUNS = {
    "copies": functools.partial(smc_steer, N=4, K=3, expand="copies"),
    "distinct": functools.partial(smc_steer, N=4, K=3),
    "standard": functools.partial(smc_standard, N=8, ess_threshold=1.0),
}


def steer(path, model=None, run=RUNS["distinct"], **options):
    """Return the particles of a recorded run, its steps as data, and the recording that is read back."""
    steps, recorder = [], Recorder(path, title="letters")

    def on_step(step):
        recorder(step)
        copies = np.bincount(step.ancestors, minlength=len(step.candidates))
        assert step.particles.log_weights.tolist() == sorted(step.log_chosen, reverse=True)
        after = [np.logaddexp.reduce(step.log_chosen[step.ancestors == i], initial=-np.inf)
                 for i in range(len(step.candidates))]  # fmt: skip
        candidates = [
            (str(c), c.log_twist, c.finished and not c.death, c.death, dict(c.attribution), w, int(n))
            for c, w, n in zip(step.candidates, step.candidate_log_weights, copies, strict=True)
        ]
        steps.append((step.log_ml, step.ess, step.parents, step.ancestors, candidates, after))

    particles = run(model or Letters(), seed=1, max_steps=6, on_step=on_step, **options)
    return particles, steps, load(path)


@pytest.mark.parametrize("model", [Letters(), Letters("x"), Letters(twisted=True)], ids=["plain", "begun", "twisted"])
@pytest.mark.parametrize("run", RUNS)
def test_a_recording_agrees_with_the_steps_of_the_run(tmp_path, model, run):
    _, steps, recording = steer(tmp_path / "run.jsonl", model, RUNS[run])
    assert (recording.program, recording.title, len(recording.steps)) == ("Letters", "letters", len(steps))
    before, totals = np.full(8, None), [Counter()]     # what each statement added so far, for each candidate
    for step, (log_ml, ess, parents, ancestors, candidates, after) in zip(recording.steps, steps, strict=True):
        assert (step.log_ml, step.ess) == (log_ml, ess)
        assert [c.parent for c in step.candidates] == before[parents].tolist()
        totals = [Counter(totals[c.parent or 0]) for c in step.candidates]
        for total, c in zip(totals, step.candidates, strict=True):
            total.update(c.attribution)
        assert [
            (c.text, c.twist, c.finished, c.death, pytest.approx(total), c.log_weight, c.copies)
            for c, total in zip(step.candidates, totals, strict=True)
        ] == candidates
        assert [c.log_weight_after for c in step.candidates] == pytest.approx(after)
        before = ancestors
    assert run != "standard" or max(c.copies for step in recording.steps for c in step.candidates) > 1


def test_particles_and_attribution_agree_with_the_run(tmp_path):
    particles, _, recording = steer(tmp_path / "run.jsonl", Letters(twisted=True))
    read = recording.particles()
    assert sorted(weight for _, weight in read) == pytest.approx(sorted(particles.weights))
    assert [weight for _, weight in read] == sorted((weight for _, weight in read), reverse=True)
    (name,) = recording.mean_attribution()
    assert recording.mean_attribution()[name] == pytest.approx(particles.expect(lambda p: p.attribution[name]))
    assert sum(recording.deaths().values()) == sum(death.count for death in particles.deaths)


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
    assert repr(recording).endswith(": All particles had died after 2 steps.)")
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
    _, _, recording = steer(tmp_path / "run.jsonl")
    text = page(recording)
    assert not re.search(r"https?://|<link|<img|@import|url\(|src=", text)
    assert "{{" not in text and text.count("<script") == 2
    data, texts = page_data(text), [""]
    for drawn, step in zip(data["steps"], recording.steps, strict=True):
        texts = [(texts[parent] if parent >= 0 else "")[: keep if keep >= 0 else None] + added
                 for parent, added, keep, *_ in drawn["candidates"]]  # fmt: skip
        assert texts == [candidate.text for candidate in step.candidates]
        assert sum(c[4] for c in drawn["candidates"]) == pytest.approx(1, abs=1e-2)


WORDS = [
    (lambda lm: ConstrainedText(lm, "a", Regex("a|b c"), max_tokens=4, complete=True),
     {"Regex('a|b c') and an end within max_tokens=4"}),
    (lambda lm: ConstrainedText(lm, "a", min_tokens=2, max_tokens=3), {"min_tokens=2"}),
    (lambda lm: Infilling(lm, ["a", "b", "c"], lengths=Geometric(0.5, max_value=3)),
     {"the fragments after the holes", "the lengths of the holes, which the target leaves open", "no end in a hole"}),
    (lambda lm: PromptIntersection(lm, ["a", "b"], max_tokens=2),
     {"the first prompt, over the proposal", "the other prompts"}),
]  # fmt: skip


@pytest.mark.parametrize("program, statements", WORDS)
def test_statements_of_ready_made_programs_are_described_in_words(program, statements):
    assert {*smc_steer(program(cold_lm()), N=6, K=3, seed=0).mean_attribution()} == statements


class Hostile(Model):
    def step(self):
        self.s = '</script><script>alert("1")</script><!-- {{data}}'
        self.finish()


def test_no_text_can_end_the_script_or_become_markup(tmp_path):
    smc_steer(Hostile(), 1, 1, on_step=Recorder(tmp_path / "run.jsonl", title="<b>{{data}}"))
    text = page(load(tmp_path / "run.jsonl"))
    assert text.count("<script") == 2 and "<b>{{" not in text
    assert page_data(text)["steps"][0]["candidates"][0][1] == '</script><script>alert("1")</script><!-- {{data}}'


def test_a_recorder_records_one_run_from_its_beginning(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl")
    smc_steer(Doomed(), 2, 2, seed=0, on_step=recorder)
    message = r"run\.jsonl'\) has recorded up to step 2 and is given step 1: .* make a Recorder for each run"
    with pytest.raises(ValueError, match=message):
        smc_steer(Doomed(), 2, 2, seed=0, on_step=recorder)
    assert len(load(tmp_path / "run.jsonl").steps) == 2


HEADER = '{"llmppl_trace": 3, "program": "", "title": "", "prompts": [], "messages": []}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no whole step"),
        ('{"a": 1}\n', "line 1, is not as a Recorder writes it (KeyError: 'llmppl_trace')"),
        (b"\xff\xfe\x00\n", "line 1, is not as a Recorder writes it"),
        ('{"llmppl_trace": 9}\n', "this version of llmppl reads format 3"),
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
    assert view.count('class="chart"') == 3 and view.count('class="bar"') == len(particles) and bar([1.0]) in view
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
        assert page_data(page(load(path)))["prompts"] == prompts
    smc_steer(Letters(), 2, 2, seed=0, max_steps=2, on_step=Recorder(path))
    assert load(path).prompts == []


class Piece(bytes):
    bytes = property(lambda self: self)                 # as those of a token; special without any


@pytest.mark.parametrize("parts", ["|system\nBe brief||\n||user\nHi|\n||assistant\n", "||user||\n\nHi|||assistant||\n",
                                   "||Hello||Yes|||Hi||"], ids=["chatml", "llama", "mistral"])  # fmt: skip
@pytest.mark.parametrize("answer", ["", "Fine"])
def test_the_last_message_of_a_conversation_is_found(parts, answer):
    tokens = [Piece(part.encode()) for part in [*parts.split("|"), *[answer] * bool(answer)]]
    assert _last_message(tokens, answer).removeprefix("user\n") == "Hi" and _last_message(tokens[1:2], "") == ""


class Spoken(Model):
    """Program that dies after a span, before it adds it to the text."""

    def step(self):
        self.s += "Bob:"
        self.spoken = self.extend(cold_lm().context("ab"), max_tokens=3).text
        self.condition("a" not in self.spoken)
        self.s += self.spoken
        self.finish()


def test_a_death_shows_the_span_that_was_not_added_yet():
    dead, recorder = [], Recorder()

    def on_step(step):
        recorder(step)
        dead.extend(f"Bob:{c.spoken}" for c in step.candidates if c.death)

    posterior = smc_steer(Spoken(), 12, 3, seed=1, on_step=on_step)
    assert [c.text for c in recorder.recording.steps[0].candidates if c.death] == dead and len({*dead}) > 2
    assert {death.text for death in posterior.deaths} <= {*dead}


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
    posterior = smc_steer(Letters(), 3, 2, seed=4, max_steps=4, on_step=recorder)
    posterior.show()
    (file,) = tmp_path.iterdir()
    assert opened == [file.as_uri()] and str(file) in capsys.readouterr().out
    shown = file.read_text(encoding="utf-8")
    assert shown == page(replace(recorder.recording, ended=""))
    left = sum(particle.cut for particle in posterior)
    assert left and f"Cut after 4 steps, {left} of 3 particles not finished." in shown
    plain = smc_steer(Letters(), 3, 2, seed=4, max_steps=4, on_step=lambda step: None)
    for unrecorded in plain, pickle.loads(pickle.dumps(posterior)):
        with pytest.raises(RuntimeError, match=r"this run was not recorded.* on_step=Recorder\(\)\) records one"):
            unrecorded.show()


def test_in_a_notebook_the_page_is_a_frame_below_the_cell(monkeypatch):
    cell = Cell(monkeypatch)
    recorder = Recorder()
    smc_steer(Letters(), 3, 2, seed=1, max_steps=4, on_step=recorder).show()
    (shown,) = cell.shown
    (document,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert html.unescape(document) == page(replace(recorder.recording, ended=""))
