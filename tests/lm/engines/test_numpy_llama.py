"""The model in the package, run by numpy: the results of transformers, without an import of torch."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution

import numpy as np
import pytest
from helpers.common import ROOT
from packaging.requirements import Requirement

from llmppl import CachedTransformer, ConstrainedText, Infilling, Regex, smc_steer
from llmppl.lm.embedded import PATH
from llmppl.lm.engines import hf
from llmppl.lm.engines.numpy_llama import NumpyLlama
from llmppl.testing import check_engine

TEXT = "Once upon a time, there was a little dog named Max. He loved to play with his red ball in the park."


@pytest.fixture(scope="module")
def small():
    return CachedTransformer.from_pretrained(engine="numpy")


@pytest.fixture
def engine():
    return NumpyLlama(PATH)


def test_it_answers_as_transformers_does_after_any_history(engine, embedded):
    report = check_engine(
        engine,
        lambda ids: embedded.engine.forward([ids], [(0, len(ids))])[0],
        ids=[int(token) for token in embedded.context(TEXT).tokens],
        size=len(embedded.vocab),
        contexts=40,
    )
    assert report.rows > 100 and report.distance < 1e-4


def test_it_reads_and_writes_the_given_slots(engine, embedded):
    """Rows of unequal lengths with a common prefix, in random slots, as in the check of transformers models."""
    rows = hf._sample_rows(embedded.model, embedded.vocab)
    truth = np.stack([
        embedded.engine.forward([row.tolist()], [(0, n) for n in range(1, len(row) + 1)]) for row in rows
    ])
    assert hf._error_of(engine, rows, truth) < 1e-4
    kept = engine.slab.copy()
    engine.reserve(2 * rows.size)
    np.testing.assert_array_equal(engine.slab[:, :, : rows.size], kept)    # NaN, too, in slots that no row has
    assert engine.slot_bytes == kept[:, :, 0].nbytes


def test_whole_contexts_run_without_slots(engine, embedded):
    ids = [int(token) for token in embedded.context(TEXT).tokens]
    asked = [(1, 3), (0, 9), (1, 2), (0, 12)]
    found = engine.forward([ids[:12], ids[4:7]], asked)
    truth = embedded.engine.forward([ids[:12], ids[4:7]], asked)
    assert np.abs(found - truth).max() < 1e-4 and engine.tokens == 15 and engine.slab.size == 0


def test_the_same_seed_draws_the_same_texts_and_runs_as_many_tokens(small, embedded):
    for make in (
        lambda lm: ConstrainedText(lm, "Tim was", Regex(" [0-9]{1,2} years old and (very )*(happy|sad)[.]")),
        lambda lm: Infilling(lm, "The dog was very[BLANK] because he had lost his[BLANK]."),
    ):
        one, other = (smc_steer(make(lm), 6, 3, seed=4) for lm in (small, embedded))
        assert one.texts == other.texts
        assert one.log_ml == pytest.approx(other.log_ml, abs=1e-4)


def test_its_tokenizer_reads_and_writes_as_that_of_transformers(small, embedded):
    one, other = small.tokenizer, embedded.tokenizer
    assert small.vocab == embedded.vocab and one.get_vocab() == other.get_vocab()
    assert (one.bos_token_id, one.eos_token_id) == (other.bos_token_id, other.eos_token_id)
    assert one.all_special_ids == other.all_special_ids
    for text in (TEXT, "", " naïve\n日本 🙂", "<|endoftext|> the"):
        for add, split in itertools.product((False, True), repeat=2):
            options = {"add_special_tokens": add, "split_special_tokens": split}
            ids = one.encode(text, **options)
            assert ids == other.encode(text, **options)
            assert one.decode(ids, skip_special_tokens=add) == other.decode(ids, skip_special_tokens=add)


def test_two_language_models_of_one_engine_have_caches_of_their_own(embedded):
    first = CachedTransformer.from_pretrained(engine="numpy")
    first.context(TEXT).log_probs()
    second = CachedTransformer(first.model, first.tokenizer)
    second.context(TEXT[::-1]).log_probs()
    truth = embedded.context(TEXT + " He").log_probs()
    np.testing.assert_allclose(first.context(TEXT + " He").log_probs(), truth, atol=1e-4)


def base_packages():
    """Return the distributions that a base installation brings."""
    needed, project = {}, tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo = project["dependencies"]
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name not in needed and (requirement.marker is None or requirement.marker.evaluate()):
            needed[requirement.name] = distribution(requirement.name)
            todo += needed[requirement.name].requires or ()
    return needed.values()


PROGRAM = """
from llmppl import CachedTransformer, Regex, choose, generate
from llmppl.cli import app

lm = CachedTransformer.from_pretrained()
print(generate(lm, "The cat", Regex(" [a-z]+"), seed=0).text != "", choose(lm, "The", [" cat", " dog"]).best)
for name in ("gpt2", "smollm2"):
    try:
        CachedTransformer.from_pretrained(name)
    except ImportError as error:
        print(error)
app(["demo"], standalone_mode=False)
"""


def test_base_packages_run_the_demo_and_errors_name_the_extra(tmp_path):
    for each in base_packages():
        for top in {file.parts[0] for file in each.files if ".." not in file.parts}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(each.locate_file(top))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    result = subprocess.run([sys.executable, "-S", "-c", PROGRAM], env=env, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "True  dog" and len(lines) > 20, result.stderr
    error = "engine='transformers' needs torch and transformers: pip install 'llmppl-smc[transformers]'"
    assert lines[1] == lines[2] == error


@pytest.mark.parametrize(
    "command",
    [["generate", "Once upon a time", "--max-tokens", "5"], ["query", "The (cat|dog)", "--prefix", "The", "-n", "1"]],
    ids=lambda command: command[0],
)
def test_a_command_on_the_model_in_the_package_imports_no_torch(command):
    program = (
        "import json, sys\nfrom llmppl.cli import app\n"
        "try: app(json.loads(sys.argv[1]))\nexcept SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, json.dumps(command)], capture_output=True, text=True)
    assert result.stdout.count("\n") > 2 and result.stdout.endswith("False\n"), result.stderr


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [("gpt2", {}, "'gpt2'"), (None, {"device": "cpu"}, "device='cpu'"), (None, {"revision": "x"}, "revision='x'")],
)
def test_it_takes_no_other_model_and_no_options_of_transformers(name, options, refused):
    with pytest.raises(ValueError, match=f"takes no {refused}: engine='transformers' does"):
        CachedTransformer.from_pretrained(name, engine="numpy", **options)
