"""The harness gives the same scores by llmppl as by its transformers backend, and by all tokens those of `choose`."""

import json
from pathlib import Path

import pytest

import llmppl
from llmppl import choose

lm_eval = pytest.importorskip("lm_eval", reason="the adapter needs lm_eval: pip install 'llmppl-smc[lm-eval]'")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from llmppl.serving.lm_eval import Harness  # noqa: E402

FOLDER = str(Path(llmppl.__file__).parent / "lm" / "embedded")
ROWS = [
    {"text": "Once upon a time there was a little", "options": [" girl", " boy", " stone"], "label": 0},
    {"text": "The cat was very", "options": [" happy", " hungry and tired", " blue"], "label": 1},
    {"text": "Tom and Lily like to", "options": [" play.", " sleep.", " fly to the moon."], "label": 0},
    {"text": "The boy went home and", "options": [" slept", " cried", " ate an apple"], "label": 2},
]
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: ROWS}}\ntest_split: test\ndoc_to_text: text\n"
TASKS = {
    "choices": """output_type: multiple_choice
doc_to_target: label
doc_to_choice: options
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "stories": """output_type: generate_until
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def others():
    """The transformers backend of the harness with the embedded model."""
    return HFLM(pretrained=FOLDER, dtype="float32", device="cpu", batch_size=1)


def test_two_tasks_have_the_scores_of_the_transformers_backend(embedded, others, tmp_path):
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    for name, task in TASKS.items():
        text = f"task: {name}\n{COMMON}{task}".replace("ROWS", str(tmp_path / "rows.json"))
        (tmp_path / f"{name}.yaml").write_text(text)
    manager, tasks = TaskManager(include_path=str(tmp_path), include_defaults=False), [*TASKS]

    def evaluated(model):
        found = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0)
        return found["results"], [[each["resps"] for each in found["samples"][task]] for task in tasks]

    (ours, (choices, stories)), (theirs, (their_choices, their_stories)) = map(evaluated, (Harness(embedded), others))
    assert ours == theirs and stories == their_stories
    for row, their_row in zip(choices, their_choices, strict=True):
        for [(score, greedy)], [(their_score, their_greedy)] in zip(row, their_row, strict=True):
            assert float(score) == pytest.approx(float(their_score), abs=1e-3) and greedy == their_greedy


def test_rolling_scores_are_those_of_the_transformers_backend(embedded, others):
    requests = [Instance("loglikelihood_rolling", {}, ("The cat ran. " * n,), 0) for n in (1, 40)]
    assert Harness(embedded).loglikelihood_rolling(requests) == pytest.approx(
        others.loglikelihood_rolling(requests), abs=1e-2
    )


def test_all_tokenisations_have_the_mass_of_choose(embedded):
    requests = [Instance("loglikelihood", {}, ("The cat was", text), 0) for text in (" big", "ab", " very happy")]
    found = [score for score, _ in Harness(embedded, text="all").loglikelihood(requests)]
    expected = [choose(embedded, "The cat was", [each.args[1]], end="prefix").log_mass for each in requests]
    assert found == pytest.approx(expected, abs=1e-9)
    canonical = [score for score, _ in Harness(embedded).loglikelihood(requests)]
    assert all(one >= other - 1e-6 for one, other in zip(found, canonical, strict=True))
