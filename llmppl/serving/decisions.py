"""Decision routes: bodies of OpenAI's `client.decisions` and of System One, and the responses to them.

The file decisions.json has the schemas of the bodies. The *state* is the text that all questions are about. Numbers of
a response have 12 decimals: a client that adds them as decimals then finds a sum of 1 within their rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from llmppl.decisions import Answer, Question, choice, predicate, score
from llmppl.decisions.asking import Asking
from llmppl.decisions.deciding import DEFAULTS
from llmppl.decisions.prompts import text_of_state
from llmppl.decisions.questions import Questions
from llmppl.serving.bodies import Limits, check_length
from llmppl.serving.service import Service
from llmppl.support.arguments import shown

Object = dict[str, Any]
SCHEMAS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MAX_DEPTH = 32  # of JSON in an input
UNSAID = "Which of these applies?"  # where a question has no instructions


def check(body: Object, name: str) -> None:
    """Raise a ValueError with the place of the first error, unless a body has a schema."""
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # no surrogates, no NaN
    schema = {
        "$ref": f"#/components/schemas/{name}",
        "components": {"schemas": SCHEMAS},
    }
    for error in Draft202012Validator(schema).iter_errors(body):
        place = ".".join(map(str, error.absolute_path))
        reason = error.message[-300:]
        if type(error.validator_value) is int:
            reason = f"{error.validator} is {error.validator_value}"
        raise ValueError(f"{place or 'body'}: {reason}")


def rounded(number: float) -> float:
    return round(number, 12)


def summary(answer: Answer) -> Object:
    """Return the kind, the best option or the expected level, and the confidence."""
    kind = answer.question.kind
    best = answer.best if kind == "choice" else rounded(answer.expected or 0)
    return {"type": kind, kind: best, "confidence": rounded(answer.confidence)}


# ---- OpenAI


def _conversation(body: Object) -> str:
    """Return the text of an input. ValueError if an output has no call."""
    if isinstance(body["input"], str):
        return str(body["input"])
    turns = []
    calls = set()
    for item in body["input"]:
        if "role" in item:
            role, said = item["role"], _text(item["content"])
        elif "output" in item:
            role, said = "tool", _text(item["output"])
            if item["call_id"] not in calls:
                wanted = shown(item["call_id"])
                raise ValueError(f"input: no call before the output {wanted}")
        else:
            calls.add(item["call_id"])
            given = item.get("arguments", item.get("input"))
            role, said = "assistant", f"{item['name']}({given})"
        turns.append({"role": role, "content": said})
    if [turn["role"] for turn in turns] == ["user"]:
        return said
    return text_of_state(turns)


def _text(content: str | list[Object]) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if _depth(part) > MAX_DEPTH + 1:
            raise ValueError(f"input_json: data may have {MAX_DEPTH} levels")
        said = part.get("text", part.get("refusal", part.get("data")))
        texts.append(text_of_state(said))
    return "\n".join(texts)


def _depth(data: Any) -> int:
    """Return the number of levels of JSON."""
    if isinstance(data, dict):
        data = [*data.values()]
    if not isinstance(data, list):
        return 0
    return 1 + max(map(_depth, data), default=0)


def _question(asked: Object) -> Question:
    text = _text(asked["instructions"]) or UNSAID
    if asked["type"] == "predicate":
        return predicate(text)
    if asked["type"] == "choice":
        return choice(text, _described(asked["choices"], "value"))
    return score(text, _described(asked["levels"], "label"))


def _described(options: list[Object], key: str) -> Object:
    """Return options with their descriptions. ValueError if two are the same."""
    described = {each[key]: each.get("description") for each in options}
    if len(described) < len(options):
        raise ValueError(f"options must differ: {shown([*described])}")
    return described


def _form(asked: Object, answer: Answer) -> Object:
    name = {"name": asked.get("name")}
    if asked["type"] == "predicate":
        return {"type": "predicate", **name, "probability": rounded(answer[True])}
    rows = list[Object]()
    for i, share in enumerate(answer.in_order):
        row = {"value": share.value, "probability": rounded(share.probability)}
        if asked["type"] == "score":
            row |= {"value": i, "label": share.value}
        rows.append(row)
    return {**summary(answer), **name, "probabilities": rows}


# ---- System One


def _state(body: Object) -> str:
    return text_of_state(body["state"])


def _question_of_criteria(asked: Object) -> Question:
    text = text_of_state(asked.get("instructions") or "") or UNSAID
    criteria = asked.get("criteria") or {}
    if isinstance(criteria, list):
        return score(text, [*map(text_of_state, criteria)])
    described = {name: text_of_state(each or "") for name, each in criteria.items()}
    if asked["type"] == "choice":
        return choice(text, described)
    return predicate(text, described.get("true", ""), described.get("false", ""))


def _form_of_criteria(asked: Object, answer: Answer) -> Object:
    """Return an answer. `x_label_mass` is the probability that the model writes an option at all."""
    mass = {"x_label_mass": rounded(math.exp(answer.log_mass))}
    if asked["type"] == "noul":
        return {"type": "noul", "noul": rounded(answer[True]), **mass}
    form = {**summary(answer), **mass}
    names = asked["criteria"]
    if asked["type"] == "score":
        names = [str(i) for i in range(len(names))]
        form["legend"] = dict(zip(names, asked["criteria"], strict=True))
    shares = [rounded(share.probability) for share in answer.in_order]
    return {**form, "probabilities": dict(zip(names, shares, strict=True))}


# ---- both


class Route(NamedTuple):
    """Schema of a route, and its functions for the state, for a question, and for the form of an answer."""

    schema: str
    state: Callable[[Object], str]
    question: Callable[[Object], Question]
    form: Callable[[Object, Answer], Object]


OPENAI = Route("Decisions", _conversation, _question, _form)
SYSTEM_ONE = Route("SystemOne", _state, _question_of_criteria, _form_of_criteria)


class DecisionJob:
    """Call that reads the answers to a body, and its response."""

    def __init__(self, service: Service, limits: Limits, route: Route, body: Object) -> None:
        check(body, route.schema)
        state = route.state(body)
        self.asked = body["questions"]
        if isinstance(self.asked, list):
            self.asked = dict(enumerate(self.asked))
        questions = {name: route.question(each) for name, each in self.asked.items()}
        longest = 0
        for each in questions.values():
            text = "".join([each.text, *each.names, *each.descriptions])
            longest = max(longest, len(text))
        check_length(service.lm, len(state) + longest)
        how = {**DEFAULTS, "timeout": limits.seconds}
        asking = Asking(service.lm, Questions(questions), how)
        prompts = asking.prompts(state)
        self.tokens = sum(len(context) for each in prompts for context in each.contexts)
        self.route, self.body = route, body
        read = partial(asking.read, prompts)
        self.calls = [service.submit(read, timeout=limits.seconds, interruptible=True)]

    def response(self, results: list[dict[Any, Answer]]) -> Object:
        """Return the response, from the result of the call."""
        forms: Any = {}
        for name, answer in results[0].items():
            forms[name] = self.route.form(self.asked[name], answer)
        usage: Object = {"input_tokens": self.tokens, "output_tokens": 0}
        if self.route is OPENAI:
            forms = [*forms.values()]
            usage["total_tokens"] = self.tokens
            usage["input_tokens_details"] = {
                "cached_tokens": 0,
                "cache_write_tokens": 0,
            }
            usage["output_tokens_details"] = {"reasoning_tokens": 0}
        return {"model": self.body["model"], "answers": forms, "usage": usage}
