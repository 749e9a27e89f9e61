"""`generate(..., to=)`: a killed run continues in a new process, with the answers of one that was not killed."""

import dataclasses
import json
import signal
import subprocess
import sys
from typing import Literal

import numpy as np
import pytest
from helpers.tiny import table_lm, tiny_lm

from llmppl import CachedTransformer, Regex, generate, load_results, run_many, smc_steer
from llmppl.models import ConstrainedText

LM = tiny_lm(6)
PROMPTS = ["a", "b", "c", "ab", "ba", "a b"]
OPTIONS = {"method": "best_of", "N": 4, "seed": 3, "progress": False}


@dataclasses.dataclass
class Pair:
    a: bool
    b: Literal["x", "y"]


def letters():
    tokens = [bytes([each]) for each in b'{}[]":, abxytruefls']
    logits = np.array([*np.random.default_rng(0).normal(size=len(tokens)), -3.0])
    return table_lm(lambda ids: [*logits[:-1] + 0.1 * len(ids), -3.0], tokens)


def contents(answers):
    """Return all of the answers but their cost."""
    rows = []
    for answer in answers:
        data = answer.as_dict()
        rows.append((answer.value, answer.fields, {name: data[name] for name in data.keys() - {"seconds", "tokens"}}))
    return rows


def answers(to=None, resume=False, **options):
    prompts = ["a", "b", "ab"]
    return generate(letters(), prompts, Pair, max_tokens=40, to=to, resume=resume, **{**OPTIONS, **options})


def test_a_file_of_answers_continues_where_it_was_left(tmp_path):
    whole = answers()
    path = tmp_path / "r.db"
    seen = []

    def stop(answer):
        seen.append(answer)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers(path, on_answer=stop, together=1)
    assert len(load_results(path)) == 2
    again = []
    found = answers(path, resume=True, on_answer=again.append)
    assert len(again) == 1 and contents(found) == contents(whole)
    assert contents(answers(path, resume=True, on_answer=again.append)) == contents(whole) and len(again) == 1
    for answer, other in zip(found, whole, strict=True):         # also of one that was in the file
        assert answer.conditionals()["b"] == pytest.approx(dict(other.conditionals()["b"]))
    with pytest.raises(AttributeError, match="has no conditionals: generate"):
        load_results(path, Pair)[0].answer.conditionals()
    for result, answer in zip(load_results(path, Pair), whole, strict=True):
        assert (result.value, result.probability, result.error) == (answer.value, answer.probability, None)
        assert result.fields == answer.fields
    for result, answer in zip(load_results(path), whole, strict=True):
        assert result.value == dataclasses.asdict(answer.value) and [*result.fields] == ["a", "b"]
        json.dumps(result.as_dict())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a file of answers."""
    path = tmp_path_factory.mktemp("answers") / "r.db"
    answers(path)
    return path


@pytest.mark.parametrize(
    "changed, said",
    [({"N": 5}, "N and K was"), ({"method": "importance"}, "method was"), ({"seed": 4}, "its seed was"),
     ({"version": "2"}, "its version was"), ({"temperature": 0.5}, "rule was absent")],
)  # fmt: skip
def test_answers_of_another_run_are_refused(changed, said, written):
    with pytest.raises(ValueError, match=said):
        answers(written, resume=True, **changed)
    with pytest.raises(FileExistsError):
        answers(written)


def test_answers_of_another_constraint_are_refused(tmp_path):
    path = tmp_path / "r.db"
    generate(LM, PROMPTS, Regex("[ab]{2}"), to=path, **OPTIONS)
    for other in (Regex("[ab]{3}"), int, ["a", "b"]):
        with pytest.raises(ValueError, match="the constraint was"):
            generate(LM, PROMPTS, other, to=path, resume=True, **OPTIONS)


def without_c(text):
    return "c" not in text


@pytest.mark.parametrize("constraint", [["ab", "b"], {"x": "ab", "ab": "b"}, None, Regex("[ab]+"), without_c])
def test_every_kind_of_answer_is_the_same_from_its_file(constraint, tmp_path):
    path, options = tmp_path / "r.db", {"seed": 3, "max_tokens": 6, "progress": False}
    if isinstance(constraint, list | dict):
        del options["max_tokens"]
    made = generate(LM, PROMPTS, constraint, to=path, **options)
    assert contents(generate(LM, PROMPTS, constraint, to=path, resume=True, **options)) == contents(made)
    assert [result.value for result in load_results(path, constraint)] == [answer.value for answer in made]


def test_answers_of_a_file_have_the_prompts_as_they_were_given(tmp_path):
    prompts, key = [LM.context("a"), LM.context("b")], lambda context: str(context.text)
    for resume in (False, True):
        made = generate(LM, prompts, ["a", "b"], to=tmp_path / "r.db", key=key, resume=resume, progress=False)
        assert [answer.prompt for answer in made] == prompts


def test_a_single_prompt_has_no_file(tmp_path):
    for name, value in {"to": tmp_path / "r.db", "resume": True, "version": "1", "key": str}.items():
        with pytest.raises(TypeError, match=f"generate takes {name} with a list of prompts"):
            generate(LM, "a", int, **{name: value})


def test_results_of_functions_have_the_value_of_their_answers(tmp_path):
    def run(prompt, rng):
        return generate(letters(), prompt, Pair, method="best_of", N=3, max_tokens=40, rng=rng)

    made = [*run_many(run, ["a", "b"], seed=1, to=tmp_path / "r.db", progress=False)]
    for result, loaded in zip(sorted(made, key=lambda each: each.index), load_results(tmp_path / "r.db"), strict=True):
        assert isinstance(result.value, Pair) and loaded.value == dataclasses.asdict(result.value)
        assert result.probability == loaded.probability and [*result.fields] == [*loaded.fields]


def test_results_of_particles_have_value_fields_and_probability(tmp_path):
    def run(prompt, rng):
        return smc_steer(ConstrainedText(letters(), prompt, Pair, max_tokens=40), 4, 2, rng=rng)

    [result] = run_many(run, ["a"], seed=1, to=tmp_path / "r.db", progress=False)
    for loaded in (load_results(tmp_path / "r.db", Pair)[0], result):
        assert isinstance(loaded.value, Pair) and loaded.value == result.particles.answers().best
        assert loaded.probability == pytest.approx(result.particles.answers()[loaded.value])
        assert loaded.fields["b"] == pytest.approx(dict(result.particles.field("b")))


SCRIPT = """
from llmppl import CachedTransformer, Regex, generate

def tell(answer):
    print(answer.prompt, flush=True)

prompts = [a + b for a in "abc" for b in "abc"]
lm = CachedTransformer.from_pretrained()
generate(lm, prompts, Regex("[abc]{{5,9}}"), method="best_of", N=6, seed=5, to={path!r}, resume=True,
         together=2, on_answer=tell, progress=False)
"""


def test_a_killed_process_loses_no_answer(tmp_path):
    path = str(tmp_path / "r.db")
    command = [sys.executable, "-c", SCRIPT.format(path=path)]
    told = []
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        told += [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        told += process.communicate()[0].splitlines()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    prompts = [a + b for a in "abc" for b in "abc"]
    lm = CachedTransformer.from_pretrained()
    whole = generate(lm, prompts, Regex("[abc]{5,9}"), method="best_of", N=6, seed=5, progress=False)
    found = [result.answer for result in load_results(path, Regex("[abc]{5,9}"))]
    assert [each.value for each in found] == [each.value for each in whole]
    for each, other in zip(found, whole, strict=True):
        assert (each.probability is None) == (other.probability is None)
        # rounding of the model in float32, which differs with the batch
        assert each.probability is None or each.probability == pytest.approx(other.probability, rel=1e-5)
