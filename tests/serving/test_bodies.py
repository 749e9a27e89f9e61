"""Bodies of requests: fields of ordinary clients pass, and others are refused in words. Tools of every shape work."""

import json

import pytest

from llmppl.serving.bodies import Chat, Completion, Constraint

TALK = {"messages": [{"role": "user", "content": "Hi"}]}
HARMLESS = {
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "reasoning_effort": "low",
    "user": "me",
    "parallel_tool_calls": True,
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "verbosity": "low",
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "modalities": ["text"],
    "best_of": 1,
    "suffix": "",
    "echo": False,
    "repetition_penalty": 1.0,
    "stream_options": {"include_usage": True},
}


def refusal(kind, **body):
    """Return the place and the message of the first error of a body."""
    with pytest.raises(ValueError) as caught:
        kind.model_validate(body)
    first = caught.value.errors()[0]
    return first["loc"], first["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize("kind, body", [(Chat, TALK), (Completion, {"prompt": "a"})])
def test_null_is_the_default_of_every_optional_field(kind, body):
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    nulls = dict.fromkeys((kind.model_fields.keys() | HARMLESS.keys()) - required)
    assert kind.model_validate(nulls | body) == kind.model_validate(body)
    for name in required:
        assert refusal(kind, **{**body, name: None}) == ((name,), "Field required")


def test_null_is_the_default_inside_messages_tools_and_formats():
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": None,
        "name": None,
        "refusal": None,
        "audio": None,
    }
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    schema = {"name": "x", "description": None, "strict": None, "schema": {"type": "integer"}}
    body = Chat.model_validate(
        {"messages": [message], "tools": [{"type": "function", "function": function}]}
    )
    assert body.messages[0].plain() == {"role": "assistant", "content": ""} and [
        *body.functions()
    ] == ["f"]
    form = {"type": "json_schema", "json_schema": schema}
    assert Chat.model_validate({**TALK, "response_format": form}).target().parse("3") == 3
    text = {"type": "text", "json_schema": None}
    assert Chat.model_validate({**TALK, "response_format": text}).target() is None


@pytest.mark.parametrize("kind, body", [(Chat, TALK), (Completion, {"prompt": "a"})])
def test_fields_that_change_no_text_pass(kind, body):
    plain = kind.model_validate(body).model_dump(exclude={"stream_options"})
    assert kind.model_validate({**body, **HARMLESS}).model_dump(exclude={"stream_options"}) == plain


@pytest.mark.parametrize(
    "name, value, instead",
    [
        *((name, {}, "constraint") for name in ("guided_json", "structured_outputs")),
        *(
            (name, "a", "constraint")
            for name in ("guided_regex", "guided_grammar", "grammar", "regex", "choice")
        ),
        *(
            (name, value, "temperature")
            for name in ("presence_penalty", "frequency_penalty")
            for value in (0.5, True)
        ),
        ("repetition_penalty", 1.1, "temperature"),
        ("logit_bias", {"3": 5}, "constraint"),
        ("best_of", 4, "method"),
        ("suffix", "x", "stop"),
        ("echo", True, "stop"),
        ("temprature", 1, "did you mean temperature?"),
    ],
)
def test_fields_that_would_change_the_text_name_what_works(name, value, instead):
    for kind, body in ((Chat, TALK), (Completion, {"prompt": "a"})):
        _, message = refusal(kind, **body, **{name: value})
        assert message.startswith(f"{name} is not supported: ") and instead in message


@pytest.mark.parametrize(
    "name",
    [
        "N",
        "K",
        "n",
        "max_tokens",
        "seed",
        "budget",
        "power",
        "timeout",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ],
)
@pytest.mark.parametrize("value", [True, False, "1", [1], 1e308, float("inf"), float("nan")])
def test_booleans_texts_and_huge_values_are_no_numbers(name, value):
    if name == "timeout" and value == 1e308:
        return  # the server bounds it
    assert refusal(Completion, prompt="a", **{name: value})[0] == (name,)


def test_a_message_has_parts_of_text_only():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    assert (
        Chat.model_validate({"messages": [{"role": "user", "content": parts}]}).messages[0].content
        == "Hi you"
    )
    for kind in ("image_url", "input_audio", "file"):
        place, message = refusal(
            Chat, messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}]
        )
        assert (
            place == ("messages", 0, "content")
            and message == f"a part of a message must be a text, not {kind}"
        )
    for wrong in ([{"type": "text"}], [{"type": "text", "text": 3}], ["Hi"], [3], [{}], 3, {}):
        assert refusal(Chat, messages=[{"role": "user", "content": wrong}])[0] == (
            "messages",
            0,
            "content",
        )


def test_an_empty_choice_says_what_it_must_have():
    with pytest.raises(ValueError, match="constraint.choice must list at least one text"):
        Constraint(choice=[]).build()


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


NODE = {"type": "object", "properties": {"next": {"$ref": "#/definitions/N"}}}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TEXT = {"type": "string"}
# parameters, arguments that they allow, and arguments that they do not
SHAPES = [
    (None, {}, 3),
    ({}, {"a": [1]}, 438.2),
    ({"type": "object"}, {"a": 1}, []),
    ({"type": "object", "properties": {}}, {}, {"a": 1}),
    ({"type": "object", "properties": {"a": TEXT}}, {"a": "x"}, {"b": "x"}),
    (
        {
            "type": "object",
            "properties": {"a": TEXT},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"a": "x"},
        {},
    ),
    (
        {"type": "object", "properties": {"data": {"type": "object"}}, "required": ["data"]},
        {"data": {"a": 1}},
        {},
    ),
    ({"type": "object", "additionalProperties": TEXT}, {"k": "x"}, {"k": 3}),
    (
        {"type": "object", "additionalProperties": {"type": "array", "items": TEXT}},
        {"k": ["x"]},
        {"k": "x"},
    ),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, {"x": 1}, {"x": "a"}),
    (
        {
            "properties": {
                "a": {"type": "array", "items": {"type": "object", "properties": {"b": TEXT}}}
            }
        },
        {"a": [{"b": "x"}]},
        {"a": [3]},
    ),
    (
        {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
        {"kids": [{"kids": []}]},
        {"kids": [3]},
    ),
    (
        {
            "type": "object",
            "properties": {"t": {"$ref": "#/$defs/T"}},
            "$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}}, "type": "object"}},
        },
        {"t": {"t": {}}},
        {"t": 3},
    ),
    ({"$ref": "#/definitions/N", "definitions": {"N": NODE}}, {"next": {}}, {"next": 3}),
    (
        {"$schema": DRAFT_7, "$ref": "#/definitions/N", "definitions": {"N": NODE}},
        {"next": {}},
        "a",
    ),
    (
        {"$schema": DRAFT_7, "type": "object", "properties": {"u": {"type": ["string", "null"]}}},
        {"u": None},
        {"u": 3},
    ),
    (
        {
            "anyOf": [
                {"properties": {"a": TEXT}, "required": ["a"]},
                {"properties": {"b": TEXT}, "required": ["b"]},
            ]
        },
        {"b": "x"},
        {},
    ),
    (
        {"oneOf": [{"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, TEXT]},
        {"a": "x"},
        "x",
    ),
    ({"type": ["object", "null"]}, {}, None),
    ({"allOf": [{"properties": {"a": TEXT}}, {"required": ["a"]}]}, {"a": "x"}, {}),
    (
        {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}},
        {"d": "2020-01-31"},
        {"d": "x"},
    ),
]


def accepts(index, text):
    """Check whether a text is in the language of an index."""
    try:
        return index.accepts(index.after(text))
    except ValueError:
        return False


@pytest.mark.parametrize("parameters, right, wrong", SHAPES)
def test_tools_of_every_shape_are_called_with_an_object(embedded, parameters, right, wrong):
    for choice in ("auto", "required"):
        other = {"type": "function", "function": {"name": "g"}}
        body = {**TALK, "tools": [tool(parameters=parameters), other], "tool_choice": choice}
        index = Chat.model_validate(body).target().index(embedded.vocab)
        call = {"name": "f", "arguments": right}
        assert accepts(index, json.dumps(call)) and accepts(
            index, json.dumps(call, separators=(",", ":"))
        )
        assert not accepts(index, json.dumps({"name": "f", "arguments": wrong}))
        assert not accepts(index, json.dumps({"name": "h", "arguments": right})) and not accepts(
            index, "{"
        )
        assert accepts(index, "It rains {") == (choice == "auto")


@pytest.mark.parametrize(
    "tools, choice, said",
    [
        ([], "required", "one of tools"),
        ([tool()], tool() | {"function": {"name": "g"}}, "one of tools"),
        ([tool(parameters={"type": "string"})], "auto", "no instances"),
    ],
)
def test_tools_that_no_answer_can_call_are_refused(tools, choice, said):
    with pytest.raises(ValueError, match=said):
        Chat.model_validate({**TALK, "tools": tools, "tool_choice": choice}).target()
