"""The HTTP endpoint over a real socket: its answers are those of `generate`, and wrong requests get a reason."""

import gc
import http.client
import json
import math
import threading
import time
from typing import Literal

import pytest
from helpers.common import HANG, repetitions

from llmppl import Regex, generate
from llmppl.serving import Service

uvicorn = pytest.importorskip("uvicorn", reason="llmppl serve needs uvicorn: pip install 'llmppl-smc[server]'")
from llmppl.serving.app import make_app  # noqa: E402
from llmppl.serving.bodies import Chat, Constraint, Limits  # noqa: E402

KEY = "secret"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}c{% endif %}"


@pytest.fixture(scope="module")
def server(embedded):
    """A server of the embedded model, with its port and its service."""
    lm = embedded
    before, lm.tokenizer.chat_template = lm.tokenizer.chat_template, TEMPLATE
    with Service(lm) as service:
        app = make_app(service, name="tiny", key=KEY, limits=Limits(bytes=20_000, tokens=200, particles=64, prompts=8))
        made = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        while not made.started:
            assert thread.is_alive()
            time.sleep(0.01)
        made.port, made.service, made.lm = made.servers[0].sockets[0].getsockname()[1], service, lm
        yield made
        made.should_exit = True
        thread.join(HANG)
    lm.tokenizer.chat_template = before


def post(server, path, body, key=KEY):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {**HEADERS, "authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    return reply.status, reply.read()


def complete(server, **body):
    status, found = post(server, "/v1/completions", body)
    assert status == 200, found
    return json.loads(found)


def test_a_completion_is_the_answer_of_generate(server):
    for seed in range(repetitions(30, 4)):
        found = complete(server, prompt="Once", max_tokens=8, seed=seed, constraint={"regex": " [a-z ]+"})
        alone = generate(server.lm, "Once", Regex(" [a-z ]+"), max_tokens=8, seed=seed)
        assert found["choices"][0]["text"] == alone.text and found["choices"][0]["weight"] == alone.probability


def test_several_choices_carry_their_weights(server):
    options = {"method": "steer", "N": 6, "K": 2, "seed": 1}
    found = complete(server, prompt="The", n=4, constraint={"regex": " (cat|dog)( ran)?"}, **options)
    particles = generate(server.lm, "The", Regex(" (cat|dog)( ran)?"), **options).posterior
    weights = sorted(zip(particles.weights.tolist(), map(str, particles), strict=True), reverse=True)
    assert sorted([(each["weight"], each["text"]) for each in found["choices"]], reverse=True) == weights[:4]


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
    told = client.chat.completions.create(**talk, tools=tools, max_tokens=9).choices[0].message
    pieces = client.chat.completions.create(**talk, tools=tools, max_tokens=9, stream=True)
    said = [each.choices[0].delta.content for each in pieces if each.choices[0].delta.content]
    assert "".join(said) == told.content and len(said) > 1 and not told.tool_calls
    del tools[1]["function"]["parameters"]["additionalProperties"]                # listed arguments only
    either = Chat.model_validate(talk | {"tools": tools}).target()
    texts = '{"name":"wash","arguments":{"age":2}}', '{"name":"wash","arguments":{"age":4}}', "Age {4}", "{"
    assert [text in either for text in texts] == [True, False, True, False]
    with pytest.raises(openai.AuthenticationError, match="key"):
        openai.OpenAI(base_url=client.base_url, api_key="other", max_retries=0).models.list()


TEXT, TALK = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
WRONG = [
    b"", b"{", b"[]", b"null", b"3", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9000,
    {}, {"prompt": 3}, {"prompt": []}, {"prompt": ["a", 1]}, {"prompt": ["a"] * 9}, {"prompt": None}, {"prompts": "a"},
    *({**TEXT, name: value} for name, values in {
        "n": [0, -1, 1.5, "x", 9, None, 10**30], "max_tokens": [0, -3, 201, "many", 1e9], "seed": [-1, 1.5, "x"],
        "temperature": [-1, "hot", 1e400], "top_p": [0, 1.1, -1, "x"], "stop": [3, [3], {}], "stream": ["yes!", 3],
        "model": ["gpt", 3, {}], "logprobs": [-1, "x", 5], "echo": [True], "best_of": [4], "suffix": ["x"],
        "presence_penalty": [1, "x"], "frequency_penalty": [-0.5], "logit_bias": [{"3": 5}, []],
        "method": ["magic", 3, "exact"], "N": [0, 65, "x"], "K": [0, 2], "power": [0, -1], "budget": [0, "x"],
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
        "logprobs": [True, "x"],
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
