"""Calibration of records: compared with its maps by hand, and with held-out records."""

import enum
import random
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from llmppl import CachedTransformer, JsonSchema, Regex, generate
from llmppl.decisions import Calibration, decide, fit_record_calibration
from llmppl.decisions.calibration import Map, setting_of_records


class Kind(enum.Enum):
    DOG = "dog"
    CAT = "cat"
    COW = "cow"


class Pet(BaseModel):
    name: Literal["Tom", "Lily"]
    kind: Kind = Field(alias="kind of pet")
    big: bool


LM = CachedTransformer.from_pretrained()
QUESTION = {"big": "Is it big?"}
SHOT = 'Tim had a big dog.\n{"name": "Tom", "kind of pet": "dog", "big": true}\n'


def items(number, seed):
    """Prompts with their right records."""
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        name, kind, big = rng.choice(["Tom", "Lily"]), rng.choice([*Kind]), rng.random() < 0.5
        prompt = f"{SHOT}{name} had a {'big' if big else 'small'} {kind.value}.\n"
        found.append((prompt, Pet.model_validate({"name": name, "kind of pet": kind, "big": big})))
    return found


@pytest.fixture(scope="module")
def calibration():
    return fit_record_calibration(LM, items(32, 0), Pet, progress=False)


def test_a_calibration_of_records_is_right_on_other_records(calibration, tmp_path):
    """Six fresh records: the Brier score falls in each field."""
    calibration.save(tmp_path / "pet.json")
    loaded = Calibration.load(tmp_path / "pet.json")
    names = "name", "kind of pet", "big"
    before, after = {name: [] for name in names}, {name: [] for name in names}
    for prompt, pet in items(6, 1):
        right = pet.model_dump(mode="json", by_alias=True)
        plain = generate(LM, prompt, Pet)
        again = generate(LM, prompt, Pet, calibration=loaded)
        assert again.text == plain.text and again.probability is None
        for scores, found in ((before, plain.conditionals()), (after, again.conditionals())):
            for name in names:
                assert sum(found[name].values()) == pytest.approx(1)
                errors = [(p - (value == right[name])) ** 2 for value, p in found[name].items()]
                scores[name].append(sum(errors))
    for name in names:
        assert np.mean(after[name]) < 0.5 * np.mean(before[name]), name
        assert np.mean(after[name]) < 0.2, name


def test_a_calibrated_field_is_the_map_of_its_conditional():
    schema = JsonSchema(Pet)
    temperature = Map("temperature", 0.5, np.zeros(3))
    receipt = {"setting": setting_of_records(LM, schema.schema, []), "questions": {}}
    calibration = Calibration({"kind of pet": temperature}, receipt)
    prompt, _ = items(1, 2)[0]
    plain = generate(LM, prompt, schema).conditionals()
    found = generate(LM, prompt, schema, calibration=calibration).conditionals()
    roots = {value: p**0.5 for value, p in plain["kind of pet"].items()}
    for value, root in roots.items():
        assert found["kind of pet"][value] == pytest.approx(root / sum(roots.values()))
    assert found["big"] == pytest.approx(dict(plain["big"]))            # has no map


def test_a_calibration_of_a_schema_has_the_paths_of_its_fields(tmp_path):
    inner = {"type": "object", "properties": {"b": {"enum": [1, 2]}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    for part in (inner, schema):
        part["additionalProperties"] = False
    labelled = [(f"{i}: ", {"a": {"b": 1 + i % 2}}) for i in range(4)]
    calibration = fit_record_calibration(LM, labelled, JsonSchema(schema), progress=False)
    calibration.save(tmp_path / "c.json")
    loaded = Calibration.load(tmp_path / "c.json")
    assert [*loaded.maps] == ["a.b"]
    assert generate(LM, "5: ", JsonSchema(schema), calibration=loaded).conditionals()["a.b"]
    inner["properties"]["b"] = {"enum": [1, 3]}
    with pytest.raises(ValueError, match="another question 'a.b'"):
        generate(LM, "5: ", JsonSchema(schema), calibration=loaded)


def test_values_that_do_not_fit_the_rest_keep_the_probability_zero():
    pairs = (1, ["x", "y"]), (2, ["y", "z"])
    kinds = [{"properties": {"a": {"const": a}, "b": {"enum": b}}} for a, b in pairs]
    schema = JsonSchema({
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y", "z"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "anyOf": kinds,
    })  # fmt: skip
    receipt = {"setting": setting_of_records(LM, schema.schema, []), "questions": {}}
    calibration = Calibration({"b": Map("biases", 1.0, np.array([5.0, 0.0, 5.0]))}, receipt)
    answer = generate(LM, "Numbers: ", schema, calibration=calibration)
    plain = generate(LM, "Numbers: ", schema).conditionals()["b"]
    found = answer.conditionals()["b"]
    assert found.keys() == plain.keys() and sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda c: generate(LM, "a", Regex("a"), calibration=c), TypeError, "schema of records"),
        (lambda c: generate(LM, "a", Pet, calibration=5), TypeError, "of fit_record_calibration"),
        (lambda c: decide(LM, "a", QUESTION, calibration=c), ValueError, "is of layout 'records'"),
        (lambda c: generate(LM, "a", Other, calibration=c), ValueError, "another question 'big'"),
    ],
)
def test_wrong_calibrations_are_refused(call, error, says, calibration):
    with pytest.raises(error, match=says):
        call(calibration)


@pytest.mark.parametrize(
    "labelled, error, says",
    [
        ([("a", {"big": "no"})], ValueError, "'no' is no value of 'big'"),
        (["a"], TypeError, "with no 'a'"),
        ([("a", 3)], TypeError, "a dict or an object of the type, not 3"),
        ([("a", {"huge": 1})], ValueError, "are: name, kind of pet, big"),
        ([], ValueError, "no label of a closed field"),
    ],
)
def test_wrong_labels_of_records_are_refused(labelled, error, says):
    with pytest.raises(error, match=says):
        fit_record_calibration(LM, labelled, Pet)


class Other(BaseModel):
    big: Literal["yes", "no"]
