"""Checkpoints: an interrupted run that is called again ends as it would have ended, or is refused by what differs."""

import contextlib
import json

import numpy as np
import pytest
from test_choices import PROGRAMS, what_the_program_made
from tiny import cold_lm

from llmppl import ConstrainedText, Regex, importance_sampling, smc_standard, smc_steer
from llmppl.inference.resampling import multinomial
from llmppl.trace import Recorder, load

ALGORITHMS = {
    "distinct": lambda model, **how: smc_steer(model, 5, 3, max_steps=9, **how),
    "merged": lambda model, **how: smc_steer(model, 5, 3, expand="merged", max_steps=9, **how),
    "copies": lambda model, **how: smc_steer(model, 5, 3, expand="copies", max_steps=9, **how),
    "standard": lambda model, **how: smc_standard(model, 8, resample=multinomial, max_steps=9, **how),
    "importance": lambda model, **how: importance_sampling(model, 8, max_steps=9, **how),
}


def told(particles):
    """All that a run tells of itself, but for what it cost."""
    each = [(what_the_program_made(p), p.choices, p.log_weight, p.log_twist, p.finished, p.cut) for p in particles]
    steps = [{name: np.asarray(value).tolist() for name, value in vars(step).items()} for step in particles.steps]
    total = particles.log_ml, particles.log_ml_se, particles.log_ml_se_reason, particles.deaths
    return each, total, steps


def interrupt(at):
    """An `on_step` at whose `at`-th step the user has had enough."""

    def on_step(step):
        if step.index == at:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_run_that_is_interrupted_at_any_step_ends_as_it_would_have(program, run, tmp_path):
    model = program()
    whole = run(model, seed=3)
    for every in (1, 3, None):
        path = tmp_path / f"{every}.ckpt"
        for at in range(1, len(whole.steps) + 1):
            with pytest.raises(KeyboardInterrupt):
                run(model, seed=3, checkpoint=path, every=every, on_step=interrupt(at))
            assert json.loads(path.read_bytes().splitlines()[-2])["t"] == at - 1
        assert told(run(model, seed=3, checkpoint=path, every=every)) == told(whole)
        assert told(run(model, seed=3, checkpoint=path)) == told(whole)


def constrained(lm, **options):
    return ConstrainedText(lm, "a", Regex("(a|bc|d)*"), max_tokens=10, **options)


def test_what_was_computed_is_not_computed_again_but_for_the_contexts_of_the_particles(tmp_path):
    def run(**how):
        return smc_steer(constrained(cold_lm()), 6, 3, seed=1, **how)

    whole = run()
    for stop in range(len(whole.steps)):
        path = tmp_path / f"{stop}.ckpt"
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path, on_step=interrupt(stop + 1))
        rest = run(checkpoint=path)
        assert [p.choices for p in rest] == [p.choices for p in whole]
        # Keys and values that are computed together come out with other last digits than one by one.
        np.testing.assert_allclose([rest.log_ml, rest.log_ml_se], [whole.log_ml, whole.log_ml_se], rtol=1e-12)
        np.testing.assert_allclose(rest.log_weights, whole.log_weights, rtol=1e-12)
        assert rest.stats.rounds == whole.stats.rounds - stop and rest.stats.tokens <= whole.stats.tokens
        ended = run(checkpoint=path)
        assert told(ended)[1:] == told(rest)[1:] and [str(p) for p in ended] == [str(p) for p in rest]
        assert ended.log_weights.tobytes() == rest.log_weights.tobytes()
        assert ended.stats.rows == ended.stats.tokens == 0


def test_without_a_seed_the_stream_is_that_of_the_file_and_a_given_one_goes_on_as_after_the_run(tmp_path):
    run, path = ALGORITHMS["distinct"], tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        run(PROGRAMS["Streams"](), checkpoint=path, on_step=interrupt(3))
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(path.read_bytes())
    assert told(run(PROGRAMS["Streams"](), checkpoint=path)) == told(run(PROGRAMS["Streams"](), checkpoint=copy))

    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM):
        path, rng, other = tmp_path / f"{kind.__name__}.ckpt", *(np.random.Generator(kind(7)) for _ in range(2))
        rng.random(3), other.random(3)
        whole = run(PROGRAMS["Streams"](), rng=rng)
        with pytest.raises(KeyboardInterrupt):
            run(PROGRAMS["Streams"](), rng=other, checkpoint=path, on_step=interrupt(4))
        other = np.random.Generator(kind(7))
        other.random(3)
        assert repr(told(run(PROGRAMS["Streams"](), rng=other, checkpoint=path))) == repr(told(whole))
        assert [other.random(), other.spawn(1)[0].random()] == [rng.random(), rng.spawn(1)[0].random()]


def test_the_recording_of_a_run_that_goes_on_is_whole(tmp_path):
    path, recording = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    run = ALGORITHMS["copies"]
    with Recorder(tmp_path / "whole.jsonl") as recorder:
        assert len(run(PROGRAMS["Coins"](), seed=1, on_step=recorder).steps) == 9

    class Stops(Recorder):
        stop = 0

        def __call__(self, step):
            super().__call__(step)
            if step.index == self.stop:
                raise KeyboardInterrupt

    for stop in (2, 3, 6, 0):
        with contextlib.suppress(KeyboardInterrupt), Stops(recording) as recorder:
            recorder.stop = stop
            run(PROGRAMS["Coins"](), seed=1, on_step=recorder, checkpoint=path, every=2)
        end = "KeyboardInterrupt ended the run." if stop else "All particles finished, after 9 steps."
        assert load(recording).status().endswith(end)
    assert recording.read_text() == (tmp_path / "whole.jsonl").read_text()
