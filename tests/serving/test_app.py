"""The HTTP endpoint over a real socket: its answers are those of `generate`, and wrong requests get a reason."""

import gc
import http.client
import json
import math
import re
import time
from typing import Literal

import pytest
from helpers.common import HANG, repetitions

import llmppl
from llmppl import Regex, generate

pytest.importorskip("uvicorn", reason="llmppl serve needs uvicorn: pip install 'llmppl-smc[server]'")
from helpers.server import KEY, post, served  # noqa: E402

from llmppl.serving.bodies import Chat, Constraint, Limits  # noqa: E402

HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}c{% endif %}"


TOOL = {"type": "function", "function": {"name": "feed", "description": "Feed a pet", "parameters": {
    "type": "object", "properties": {"age": {"enum": [1, 2, 3]}}, "required": ["age"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def server(embedded):
    """A server of the embedded model, with its port and its service."""
    lm = embedded
    before, lm.tokenizer.chat_template = lm.tokenizer.chat_template, TEMPLATE
    limits = Limits(bytes=20_000, tokens=200, particles=64, prompts=8)
    with served(lm, name="tiny", limits=limits) as made:
        yield made
    lm.tokenizer.chat_template = before


def complete(server, **body):
    status, found = post(server, "/v1/completions", body)
    assert status == 200, found
    return json.loads(found)


def test_a_completion_is_the_answer_of_generate(server):
    for seed in range(repetitions(30, 4)):
        found = complete(server, prompt="Once", max_tokens=8, seed=seed, constraint={"regex": " [a-z ]+"})
        alone = generate(server.lm, "Once", Regex(" [a-z ]+"), max_tokens=8, seed=seed)
        assert found["choices"][0]["text"] == alone.text and found["choices"][0]["weight"] == alone.probability


def test_a_prompt_reads_the_names_of_special_tokens_unless_told_otherwise(server):
    prompt = "Tim<|endoftext|>"
    for special in (True, False):
        found = complete(server, prompt=prompt, special=special, max_tokens=4, seed=1, method="sample")
        context = server.lm.context(prompt, special=special)
        assert found["usage"]["prompt_tokens"] == len(context)
        assert found["choices"][0]["text"] == generate(server.lm, context, method="sample", max_tokens=4, seed=1).text


def test_several_choices_carry_the_weights_of_their_values(server):
    options = {"method": "steer", "N": 6, "K": 2, "seed": 1}
    found = complete(server, prompt="The", n=4, constraint={"regex": " (cat|dog)( ran)?"}, **options)
    weights = generate(server.lm, "The", Regex(" (cat|dog)( ran)?"), **options).posterior.by_text()
    assert {each["text"]: each["weight"] for each in found["choices"]} == pytest.approx(weights)


def test_log_probabilities_of_options_are_those_of_choose(server):
    found = complete(server, prompt="The cat was", logprobs=2, constraint={"choice": [" big", " small"]})
    truth = generate(server.lm, "The cat was", [" big", " small"]).posterior
    [choice] = found["choices"]
    assert choice["text"] == truth.best and choice["logprobs"]["top_logprobs"] == [
        {text: pytest.approx(math.log(p)) for text, p in truth.items()}]  # fmt: skip


def test_prompts_of_one_request_are_answered_in_order(server):
    found = complete(server, prompt=["Once", "The cat"], max_tokens=5, temperature=0)
    alone = [generate(server.lm, prompt, max_tokens=5, temperature=0).text for prompt in ("Once", "The cat")]
    assert [choice["text"] for choice in found["choices"]] == alone
    assert found["usage"]["total_tokens"] == sum(found["usage"][k] for k in ("prompt_tokens", "completion_tokens"))


def test_the_openai_client_completes_streams_parses_and_calls(server):
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Pet(BaseModel):
        age: Literal[1, 2, 3]

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "The dog"}], "seed": 1}
    plain = client.chat.completions.create(**talk, max_tokens=9)
    options = {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.chat.completions.create(**talk, **options))
    assert "".join(each.choices[0].delta.content or "" for each in pieces[:-1]) == plain.choices[0].message.content
    assert pieces[-2].choices[0].finish_reason == plain.choices[0].finish_reason == "length"
    assert pieces[-1].usage.total_tokens > 0
    parsed = client.chat.completions.parse(**talk, response_format=Pet)
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    tools = [openai.pydantic_function_tool(Pet, name="feed"), openai.pydantic_function_tool(Pet, name="wash")]
    wash = {"type": "function", "function": {"name": "wash"}}
    for choice, names in (("required", {"feed", "wash"}), (wash, {"wash"})):
        [made] = client.chat.completions.create(**talk, tools=tools, tool_choice=choice).choices[0].message.tool_calls
        assert made.function.name in names and Pet.model_validate_json(made.function.arguments)
    told = client.chat.completions.create(**talk, tools=tools, max_tokens=60).choices[0].message
    pieces = client.chat.completions.create(**talk, tools=tools, max_tokens=60, stream=True)
    said = [each.choices[0].delta.content for each in pieces if each.choices[0].delta.content]
    assert "".join(said) == told.content and len(said) > 1 and not told.tool_calls
    del tools[1]["function"]["parameters"]["additionalProperties"]                # listed arguments only
    either = Chat.model_validate(talk | {"tools": tools}).target().index(server.lm.vocab)
    texts = '{"name":"wash","arguments":{"age":2}}', '{"name":"wash","arguments":{"age":4}}', "Age {4}", "{"
    assert [accepts(either, text) for text in texts] == [True, False, True, False]
    with pytest.raises(openai.AuthenticationError, match="key"):
        openai.OpenAI(base_url=client.base_url, api_key="other", max_retries=0).models.list()


def accepts(index, text):
    """Check whether a text is in the language of an index."""
    try:
        return index.accepts(index.after(text))
    except ValueError:
        return False


TEXT, TALK = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
WRONG = [
    b"", b"{", b"[]", b"null", b"3", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9000,
    {}, {"prompt": 3}, {"prompt": []}, {"prompt": ["a", 1]}, {"prompt": ["a"] * 9}, {"prompt": None}, {"prompts": "a"},
    *({**TEXT, name: value} for name, values in {
        "n": [0, -1, 1.5, "x", 9, True, 10**30], "max_tokens": [0, -3, 201, "many", 1e9, True],
        "seed": [-1, 1.5, "x", 10**30], "temperature": [-1, "hot", 1e400, 1e308, True], "top_p": [0, 1.1, -1, "x"],
        "stop": [3, [3], {}], "stream": ["yes!", 3], "model": ["gpt", 3, {}], "logprobs": [-1, "x", 21, True],
        "echo": [True], "best_of": [4], "suffix": ["x"], "top_k": [0], "min_p": [2], "presence_penalty": [1, "x", True],
        "frequency_penalty": [-0.5], "logit_bias": [{"3": 5}, []], "method": ["magic", 3, "exact"],
        "N": [0, 65, "x", True], "K": [0, 2], "power": [0, -1, True, 1e308], "budget": [0, "x", True],
        "timeout": [0, -1, 1e9], "temprature": [1], "functions": [[]], "rule": ["x"],
        "constraint": [
            3, "a", {}, {"regex": 3}, {"regex": "("}, {"regex": "a", "choice": ["a"]}, {"regexp": "a"}, {"choice": []},
            {"choice": [1]}, {"choice": "ab"}, {"grammar": "start: x"}, {"grammar": ""},
            {"json_schema": 3}, {"json_schema": {"type": "thing"}},
            {"json_schema": {"$ref": "file:///etc/passwd"}}, {"json_schema": {"$ref": "http://x.example/y"}},
            {"json_schema": {"min": 3}}, {"regex": "[^\\s\\S]"}, {"regex": "(a|b){99999999}"},
        ],
    }.items() for value in values),
]  # fmt: skip
WRONG_TALK = [
    {}, {"messages": []}, {"messages": "a"}, {"messages": [{}]}, {"messages": ["a"]}, {"messages": [{"content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"messages": [{"role": 3, "content": "a"}]},
    *({**TALK, name: value} for name, values in {
        "response_format": [
            {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "json", {},
        ],
        "tools": [[{}], [{"type": "retrieval"}], [{"type": "function"}], 3],
        "tool_choice": ["maybe", 3, {"type": "function"}], "max_completion_tokens": [0, 201], "prompt": ["a"],
        "logprobs": [1, "x"], "top_logprobs": [21, True], "stream_options": [3],
    }.items() for value in values),
    {**TALK, "response_format": {"type": "json_object"}, "constraint": {"regex": "a"}},
    {**TALK, "tool_choice": "required"},
    {**TALK, "tool_choice": "required",
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
    {**TALK, "stream": True, "n": 2},
]  # fmt: skip


@pytest.mark.parametrize("path, bodies", [("/v1/completions", WRONG), ("/v1/chat/completions", WRONG_TALK)])
def test_wrong_requests_get_a_reason(server, path, bodies):
    for body in bodies:
        status, found = post(server, path, body)
        assert 400 <= status < 500 and json.loads(found)["error"]["message"], (body, status, found)
    assert complete(server, prompt="a", max_tokens=1)


@pytest.mark.parametrize("after", [" .a.b", ".a.b", "\\\n.a.b", " a.b", "  .a (b)"])
def test_a_grammar_of_a_request_reads_no_file(after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.lark").write_text('b: "b"\n')
    with pytest.raises(ValueError, match="import only"):
        Constraint(grammar=f"%import{after}\nstart: b").build()
    assert Constraint(grammar="%import  common.INT\nstart: INT").build()


def talk(server, status=200, **body):
    found = post(server, "/v1/chat/completions", {**TALK, **body})
    assert found[0] == status, found
    return json.loads(found[1])


def test_usage_counts_the_prompt_and_the_answer_whatever_is_cached(server):
    lm = server.lm
    context = lm.context("ac")                          # the template's text of TALK
    for body in ({"temperature": 0, "max_tokens": 7}, {"seed": 1, "max_tokens": 40, "stop": "."}):
        lm.clear()
        first, again = talk(server, **body), talk(server, **body)
        alone = generate(lm, context, **body)
        written = len(alone.particle.context) - len(context) + (alone.ended == "eos")
        usage = {"prompt_tokens": len(context), "completion_tokens": written, "total_tokens": len(context) + written}
        assert first["usage"] == again["usage"] == usage
        assert first["llmppl"][0]["tokens"] > again["llmppl"][0]["tokens"] == 0
    found = complete(server, prompt=["He was", "She was"], constraint={"choice": [" happy", " sad"]})
    texts = ["He was" + found["choices"][0]["text"], "She was" + found["choices"][1]["text"]]
    assert found["usage"]["prompt_tokens"] == sum(len(lm.context(each)) for each in ("He was", "She was"))
    assert found["usage"]["total_tokens"] == sum(len(lm.context(each)) for each in texts)


@pytest.mark.parametrize("body", [
    {}, {"temperature": 0}, {"response_format": {"type": "json_object"}}, {"constraint": {"regex": " [a-z]{1,5}"}},
    {"constraint": {"regex": " [a-z]{1,5}"}, "method": "importance"}, {"constraint": {"choice": [" a", " b"]}},
    {"constraint": {"regex": " [a-z]{1,5}"}, "method": "beam"}, {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required", "temperature": 1},
])  # fmt: skip
def test_more_choices_are_distinct_and_change_no_answer(server, body):
    body = {**body, "seed": 1, "max_tokens": 30}
    [one], three = talk(server, **body)["choices"], talk(server, **body, n=3)["choices"]
    called = [choice["message"].pop("tool_calls", [{}])[0].pop("id", None) for choice in (one, *three)]
    assert three[0] == one and len(called) == 1 + len(three)
    weights = [choice["weight"] or 0 for choice in three[1:]]
    assert weights == sorted(weights, reverse=True)
    if "tools" not in body:
        texts = [choice["message"]["content"] for choice in three]
        assert len({*texts}) == len(texts) == (2 if "choice" in body.get("constraint", {}) else 3)


def test_json_is_greedy_unless_there_is_a_temperature_or_a_check(server):
    record = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    record["additionalProperties"] = False
    checked = {**record, "not": {"required": ["b"]}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": record}}}
    mine, other = {"constraint": {"json_schema": record}}, {"constraint": {"json_schema": checked}}
    used = [(body["method"], found["llmppl"][0]["method"]) for body in (
        {**each, "method": method, "temperature": temperature, "seed": 0, "max_tokens": 30}
        for each in (form, mine, other) for method in ("auto", "best_of") for temperature in (None, 0, 0.5)
    ) for found in [talk(server, **body)]]  # fmt: skip
    assert used[:3] == used[6:9] == used[12:15] == [("auto", each) for each in ("greedy", "greedy", "sample")]
    assert {method for _, method in used[3:6] + used[9:12] + used[15:]} == {"best_of"}


@pytest.mark.parametrize("method", ["auto", "exact"])
def test_an_option_at_temperature_0_is_the_most_probable_one(server, method):
    choices = {"choice": [" upon a time", " there was a dog", " was"]}
    options = {"prompt": "Once", "constraint": choices, "method": method}
    usual, cold = (complete(server, **options, **more)["choices"][0]["text"] for more in ({}, {"temperature": 0}))
    assert cold == usual


def test_a_limit_is_the_finish_reason_also_beside_tools(server):
    for seed in range(6):
        [choice] = talk(server, tools=[TOOL], max_tokens=5, seed=seed)["choices"]
        tokens = talk(server, tools=[TOOL], max_tokens=5, seed=seed)["usage"]["completion_tokens"]
        assert choice["finish_reason"] == ("length" if tokens == 5 else "stop")
    [choice] = talk(server, tools=[TOOL], tool_choice="required", max_tokens=5, complete=False)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    [choice] = talk(server, tools=[TOOL], tool_choice="required")["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    text = talk(server, tools=[TOOL], seed=1, max_tokens=30)["choices"][0]["message"]["content"]
    [choice] = talk(server, tools=[TOOL], seed=1, max_tokens=30, stop=text[4:6])["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == text[: text.index(text[4:6])]


def test_too_few_tokens_get_advice_that_a_request_can_follow(server):
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "a long text in quotes"}}}
    error = talk(server, 400, response_format=form, max_tokens=5)["error"]
    least = int(re.search(r"the shortest takes (\d+) tokens.*complete=False", error["message"])[1])
    assert talk(server, response_format=form, max_tokens=least)["choices"][0]["finish_reason"] == "stop"
    [cut] = talk(server, response_format=form, max_tokens=2, complete=False)["choices"]
    assert cut["finish_reason"] == "length"


def test_a_grammar_of_a_request_names_no_special_token(server):
    grammar = "start: TOOL\n%declare TOOL"
    for fields, message in [
        ({"grammar": grammar}, "terminal TOOL is declared, and stands for nothing"),
        ({"grammar": grammar, "specials": {"TOOL": "<s>"}}, "specials"),
    ]:
        error = talk(server, 400, constraint=fields, max_tokens=5)["error"]
        assert message in error["message"]


def test_log_probabilities_of_tokens_are_those_of_the_model(server):
    lm = server.lm
    chat = talk(server, logprobs=True, top_logprobs=3, max_tokens=6, seed=2)["choices"][0]
    entries, context = chat["logprobs"]["content"], lm.context("ac")
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == chat["message"]["content"]
    for entry in entries:
        log_probs = context.log_probs()
        [token] = [i for i, each in enumerate(lm.vocab.tokens) if each == bytes(entry["bytes"])]
        assert entry["logprob"] == pytest.approx(log_probs[token])
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(sorted(log_probs)[:-4:-1])
        context += token
    [choice] = complete(server, prompt="ac", logprobs=3, max_tokens=6, seed=2)["choices"]
    legacy = choice["logprobs"]
    assert "".join(legacy["tokens"]) == choice["text"] == chat["message"]["content"]
    assert legacy["token_logprobs"] == [entry["logprob"] for entry in entries]
    assert [choice["text"][at:][:1] for at in legacy["text_offset"]] == [each[:1] for each in legacy["tokens"]]
    stopped = complete(server, prompt="ac", logprobs=0, max_tokens=6, seed=2, stop=choice["text"][-3:])["choices"][0]
    assert "".join(stopped["logprobs"]["tokens"]).startswith(stopped["text"])


def test_streams_with_tools_and_schemas_equal_their_results(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["a", "b"],
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}}}}}  # fmt: skip
    for more in ({"response_format": form}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"},
                 {"tools": [TOOL], "tool_choice": "required", "extra_body": {"complete": False}, "max_tokens": 7},
                 {"logprobs": True}):  # fmt: skip
        options = {"model": "tiny", "messages": TALK["messages"], "seed": 4, "max_tokens": 40, **more}
        whole = client.chat.completions.create(**options)
        usage = {"stream_options": {"include_usage": True}}
        *pieces, last = client.chat.completions.create(**options, **usage, stream=True)
        deltas = [piece.choices[0].delta for piece in pieces]
        said = [delta.content for delta in deltas if delta.content]
        [choice] = whole.choices
        assert "".join(said) == (choice.message.content or "") and last.usage == whole.usage
        assert pieces[-1].choices[0].finish_reason == choice.finish_reason
        logprobs = pieces[-1].choices[0].logprobs
        assert (logprobs and logprobs.model_dump()) == (choice.logprobs and choice.logprobs.model_dump())
        calls = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
        made = [each.function for each in choice.message.tool_calls or ()]
        assert [(each.name, each.arguments) for each in calls] == [(each.name, each.arguments) for each in made]


def test_tools_reach_a_template_that_reads_them(server):
    lm = server.lm
    lm.tokenizer.chat_template = "{{ tools | tojson }}" + "{% for m in messages %}[{{ m.role }}]{{ m.content }}" \
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.age }}{% endfor %}{% endfor %}"
    called = {"id": "1", "type": "function", "function": {"name": "feed", "arguments": '{"age": 7}'}}
    messages = [*TALK["messages"], {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "1", "content": "done"}]  # fmt: skip
    try:
        [context] = Chat.model_validate({"messages": messages, "tools": [TOOL]}).prompts(lm)
    finally:
        lm.tokenizer.chat_template = TEMPLATE
    tools, *said = str(context.text).split("[")[-4:]
    assert said == ["user]a", "assistant]feed7", "tool]done"] and '"name": "feed"' in str(context.text)
    [context] = Chat.model_validate({"messages": messages, "tools": [TOOL]}).prompts(lm)
    assert str(context.text).endswith('a{"name": "feed", "arguments": {"age": 7}}donec')


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    "[{{ m.role }}{{ m.name }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id + c.function.arguments }}"
    "{% endfor %}{% if 'tool_calls' in m and not m.tool_calls %}?{% endif %}{% endfor %}"
)


def test_messages_reach_strict_templates_with_all_their_fields(server):
    lm = server.lm
    made = talk(server, tools=[TOOL], tool_choice="required")["choices"][0]["message"]["tool_calls"]
    answer = {"role": "tool", "tool_call_id": made[0]["id"], "name": "feed", "content": "done"}
    said = {"role": "assistant", "content": "Hi", "tool_calls": []}
    found = []
    for template in ("{# tools #}" + STRICT.replace("c.function.arguments", "c.function.name"), "{# tools #}" + STRICT):
        lm.tokenizer.chat_template = template
        try:
            for messages in ([said, answer], [*TALK["messages"], {**said, "tool_calls": made}, answer]):
                [context] = Chat.model_validate({"messages": messages, "tools": [TOOL]}).prompts(lm)
                found.append(str(context.text))
        finally:
            lm.tokenizer.chat_template = TEMPLATE
    assert found[0] == found[2] == "[assistant]Hi[toolfeed]done"
    assert found[1] == f"[user]a[assistant]Hi{made[0]['id']}feed[toolfeed]done"
    assert found[3].startswith("[user]Call one of these functions")     # this template wants a text as arguments
    assert '\na[assistant]Hi{"name": "feed", "arguments": {"age": ' in found[3] and found[3].endswith("}[user]done")


def test_health_needs_no_key_and_everything_else_does(server):
    def get(path, key=""):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    assert get("/health")[0] == 200
    assert get("/openapi.json")[0] == get("/v1/models")[0] == 401
    assert get("/openapi.json", KEY)[1]["info"]["version"] == llmppl.__version__
    assert get("/docs", KEY)[0] == get("/redoc", KEY)[0] == 404


def test_large_bodies_and_unknown_keys_are_refused(server):
    assert post(server, "/v1/completions", {"prompt": "a" * 30_000})[0] == 413
    assert post(server, "/v1/completions", TEXT, key="other")[0] == 401
    assert post(server, "/v1/nothing", TEXT)[0] == 404


def test_a_client_that_leaves_cancels_its_call(server, caplog):
    before = server.service.stats.cancelled
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
    body = {"prompt": "Once", "method": "steer", "N": 16, "max_tokens": 200, "constraint": {"regex": "( [a-z]+){60}"}}
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    while not server.service.stats.running:
        time.sleep(0.01)
    connection.close()
    while server.service.stats.running:
        time.sleep(0.01)
    complete(server, prompt="Once", max_tokens=1, seed=0)       # the loop goes on, and has cleared the call away
    gc.collect()
    assert server.service.stats.cancelled == before + 1
    assert [each for each in caplog.records if each.name == "asyncio"] == []
