"""Interrupted, not lost: what Ctrl-C leaves of a run, of several runs, and of a command."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from llmppl import Categorical, Model, cli, importance_sampling, smc_standard, smc_steer
from llmppl.queries import Matches


class Letters(Model):
    def step(self):
        self.s += self.sample(Categorical({"a": 0.5, "b": 0.3, "c": 0.2}))
        self.score(-0.5 * self.s.endswith("a"))
        if len(self.s) == 6:
            self.finish()


RUNS = {
    "distinct": lambda **how: smc_steer(Letters(), 4, 3, **how),
    "merged": lambda **how: smc_steer(Letters(), 4, 3, expand="merged", **how),
    "copies": lambda **how: smc_steer(Letters(), 4, 3, expand="copies", **how),
    "standard": lambda **how: smc_standard(Letters(), 6, **how),
    "importance": lambda **how: importance_sampling(Letters(), 6, **how),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_ctrl_c_leaves_the_posterior_after_the_last_whole_step(run):
    def on_step(step):
        if step.index == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(seed=1, on_step=on_step)
    cut = run(seed=1, max_steps=3)
    assert [(str(p), p.log_weight, p.cut) for p in caught.value.particles] == [
        (str(p), p.log_weight, True) for p in cut
    ]


COMMAND = [sys.executable, "-c", "from llmppl.cli import app; app()"]


def test_an_interrupted_command_prints_its_texts_and_exits_130(tmp_path):
    trace = tmp_path / "run.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*COMMAND, "generate", "Once", "--max-tokens", "400", "--json", "--seed", "1", "--trace", str(trace)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    while process.poll() is None and not (trace.exists() and trace.read_bytes().count(b"\n") > 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate()
    rows = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 130 and sum(row["weight"] for row in rows) == pytest.approx(1.0)
    assert any(row["cut"] for row in rows)
    assert re.fullmatch(r"llmppl: interrupted after step \d+: texts that had not ended are cut\n", told)
    assert '{"end": "KeyboardInterrupt"}' in trace.read_text().splitlines()[-1]


def test_an_interrupted_query_has_printed_its_matches_and_exits_130(monkeypatch):
    found = Matches.__next__

    def next_match(matches):
        if matches.num_matches == 2:
            raise KeyboardInterrupt
        return found(matches)

    monkeypatch.setattr(Matches, "__next__", next_match)
    result = CliRunner().invoke(cli.app, ["query", "The (cat|dog|bird) sat", "--json"])
    assert result.exit_code == 130 and len(result.stdout.splitlines()) == 2
    assert result.stderr.splitlines()[-1] == "llmppl: interrupted after 2 matches"


def test_a_command_interrupted_before_its_first_step_exits_130(monkeypatch):
    def load(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("llmppl.cli.options.load", load)
    result = CliRunner().invoke(cli.app, ["generate", "Once"])
    assert result.exit_code == 130 and result.stdout == ""
