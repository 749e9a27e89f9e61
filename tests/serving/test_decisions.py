"""The decision routes over a socket: answers of `decide` in the forms that clients check, and reasons for refusals."""

import asyncio
import http.client
import json
import math
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import pytest
from helpers.common import wants_model
from pydantic import BaseModel, Field, WithJsonSchema

from llmppl import CachedTransformer
from llmppl.decisions import choice, decide, predicate, score

pytest.importorskip("uvicorn", reason="llmppl serve needs uvicorn: pip install 'llmppl-smc[server]'")
from helpers.server import KEY, post, served  # noqa: E402

STATE = "My card was charged twice for order 12345. Refund me now!"
TEAMS = {"billing": "payments and refunds", "technical support": None}
ANGER = ["calm", "annoyed", "furious"]
URGENT = {"type": "predicate", "name": "urgent", "instructions": "Is it urgent?"}
TEAM: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "payments and refunds"}, {"value": "technical support"}],
}
CROSS = {"type": "score", "name": "anger", "instructions": "How cross?", "levels": [{"label": each} for each in ANGER]}
QUESTIONS = [URGENT, TEAM, CROSS]
NOUL = {"type": "noul", "instructions": "Is it urgent?"}
CHOICE = {"type": "choice", "instructions": "Which team?", "criteria": TEAMS}
SCORE = {"type": "score", "instructions": "How cross?", "criteria": ANGER}
CALL = {"type": "function_call", "name": "look_up", "arguments": '{"order": 12345}', "call_id": "1"}
REFUSAL = {"type": "refusal", "refusal": "No."}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "2 charges"}


@pytest.fixture(scope="module", params=[None, pytest.param("smollm2", marks=pytest.mark.slow)])
def server(request):
    """A server of the embedded model, and of smollm2."""
    wants_model(request.param)
    with served(CachedTransformer.from_pretrained(request.param), name="tiny") as made:
        yield made


def ask(server, path="/v1/decisions", **body):
    status, found = post(server, path, {"model": "tiny", **body})
    assert status == 200, found
    return json.loads(found)


def truth(server, state):
    questions = {
        "urgent": "Is it urgent?",
        "team": choice("Which team?", TEAMS),
        "anger": score("How cross?", ANGER),
    }
    return decide(server.lm, state, questions)


def near(value):
    return pytest.approx(value, abs=1e-4)


def test_decisions_have_the_numbers_of_decide(server):
    found = ask(server, input=STATE, questions=QUESTIONS)
    urgent, team, anger = found["answers"]
    wanted = truth(server, STATE)
    assert urgent == {"type": "predicate", "name": "urgent", "probability": near(wanted["urgent"][True])}
    rows = [{"value": value, "probability": near(p)} for value, p in wanted["team"].probabilities.items()]
    assert team == {
        "type": "choice",
        "name": None,
        "choice": wanted["team"].best,
        "confidence": near(wanted["team"].confidence),
        "probabilities": rows,
    }
    p = [row["probability"] for row in anger["probabilities"]]
    assert [(row["value"], row["label"]) for row in anger["probabilities"]] == [*enumerate(ANGER)]
    assert p == near([*wanted["anger"].probabilities.values()])
    assert anger["score"] == pytest.approx(sum(i * each for i, each in enumerate(p)), abs=1e-9)
    assert anger["confidence"] == near(wanted["anger"].confidence)


def test_system_one_has_the_numbers_of_decide(server):
    state = {"message": STATE, "vip": True}
    questions = {"urgent": NOUL, "team": CHOICE, "anger": SCORE}
    found = ask(server, "/v1/systemone", state=state, questions=questions)
    wanted = truth(server, state)
    assert [*found["answers"]] == [*questions]
    for name, answer in found["answers"].items():
        assert answer.pop("x_label_mass") == near(math.exp(wanted[name].log_mass))
    team, anger = wanted["team"], wanted["anger"]
    assert found["answers"] == {
        "urgent": {"type": "noul", "noul": near(wanted["urgent"][True])},
        "team": {
            "type": "choice",
            "choice": team.best,
            "confidence": near(team.confidence),
            "probabilities": near(team.probabilities),
        },
        "anger": {
            "type": "score",
            "score": near(anger.expected),
            "confidence": near(anger.confidence),
            "legend": {"0": "calm", "1": "annoyed", "2": "furious"},
            "probabilities": near({str(i): p for i, p in enumerate(anger.probabilities.values())}),
        },
    }


def test_meanings_typed_values_and_single_options_are_read(server):
    options = [{"value": True}, {"value": "true"}, {"value": "false"}]
    [answer] = ask(server, input="a", questions=[{**TEAM, "choices": options}])["answers"]
    assert [row["value"] for row in answer["probabilities"]] == [True, "true", "false"]
    assert answer["choice"] in (True, "true", "false")
    meant = {**NOUL, "criteria": {"true": "it must be answered today", "false": {"within": "a week"}}}
    one = {"type": "choice", "criteria": {"only": None}}
    found = ask(server, "/v1/systemone", state="a", questions={"a": meant, "b": one, "c": {**SCORE, "criteria": ["x"]}})
    yes, no = "it must be answered today", '{"within": "a week"}'
    wanted = decide(server.lm, "a", {"q": predicate("Is it urgent?", yes, no)})["q"]
    assert found["answers"]["a"]["noul"] == near(wanted[True])
    assert found["answers"]["b"]["probabilities"] == {"only": 1.0} and found["answers"]["b"]["confidence"] == 1.0
    assert found["answers"]["c"]["score"] == 0.0 and found["answers"]["c"]["confidence"] == 1.0


def test_the_items_of_a_conversation_are_its_turns(server):
    items = [
        {"role": "system", "content": "You sort tickets."},
        {"type": "message", "role": "developer", "content": [{"type": "text", "text": "Be quick."}]},
        {"role": "user", "content": [{"type": "input_text", "text": STATE}, {"type": "input_json", "data": {"a": 1}}]},
        CALL,
        OUTPUT,
        {"type": "custom_tool_call", "name": "sh", "input": "ls", "call_id": "2", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a.txt"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}, REFUSAL]},
    ]
    turns = [
        {"role": "system", "content": "You sort tickets."},
        {"role": "developer", "content": "Be quick."},
        {"role": "user", "content": f'{STATE}\n{{"a": 1}}'},
        {"role": "assistant", "content": 'look_up({"order": 12345})'},
        {"role": "tool", "content": "2 charges"},
        {"role": "assistant", "content": "sh(ls)"},
        {"role": "tool", "content": "a.txt"},
        {"role": "assistant", "content": "Yes.\nNo."},
    ]
    for given, state in ((items, turns), (items[2:3], turns[2]["content"])):
        [answer] = ask(server, input=given, questions=[URGENT])["answers"]
        assert answer["probability"] == near(truth(server, state)["urgent"][True])


def test_usage_counts_the_prompts_whatever_is_cached(server):
    server.lm.clear()
    first, again = (ask(server, input=STATE, questions=QUESTIONS)["usage"] for _ in range(2))
    assert first == again and first["total_tokens"] == first["input_tokens"] > 3 * len(server.lm.context(STATE))
    of_system_one = ask(server, "/v1/systemone", state=STATE, questions={"a": NOUL, "b": CHOICE, "c": SCORE})["usage"]
    assert of_system_one == {"input_tokens": first["input_tokens"], "output_tokens": 0}


def test_32_clients_at_once_have_the_numbers_of_one(server):
    states = [f"{STATE} This is message {i}." for i in range(32)]

    def numbers(state):
        found = ask(server, input=state, questions=QUESTIONS)["answers"]
        return [found[0]["probability"], *(row["probability"] for each in found[1:] for row in each["probabilities"])]

    alone = [numbers(state) for state in states]
    server.lm.clear()
    with ThreadPoolExecutor(32) as threads:
        together = [*threads.map(numbers, states)]
    for one, other in zip(alone, together, strict=True):
        assert one == near(other)


DEEP: dict[str, Any] = {}
for _ in range(32):
    DEEP = {"a": DEEP}
WRONG = [
    b"", b"{", b"[]", b"null", b"3", b'{"model": "tiny"', b"\xff\xfe", b"[" * 9000, b'{"model": "tiny", "input": NaN}',
    b'{"model": "tiny", "input": "\\ud800", "questions": [{"type": "predicate", "instructions": "x"}]}',
    b'{"model": "tiny", "input": "a", "questions": [{"type": "predicate", "instructions": "x", "\\ud800": 1}]}',
    b'{"model": "tiny", "input": "a", "questions": [{"type": "predicate", "name": "\\udfff", "instructions": "x"}]}',
    {"model": None}, {"model": "gpt"}, {"model": 3}, {"stream": True}, {"temperature": 0}, {"prompt_cache_key": 3},
    *({"input": each} for each in [
        None, 3, {}, [], [3], ["a"], [{}], [{"role": "user"}], [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": 3}], [{"role": "user", "content": []}], [{"role": "user", "content": "a", "x": 1}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}],
        [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}],
        [{"role": "user", "content": [{"type": "input_json", "data": "a"}]}],
        [{"role": "user", "content": [{"type": "input_json", "data": [3]}]}],
        [{"role": "user", "content": [{"type": "input_json", "data": DEEP}]}],
        [{"type": "reasoning", "summary": []}], [{"type": "item_reference", "id": "x"}], [OUTPUT], [OUTPUT, CALL],
        [{**CALL, "arguments": {}}], [{**CALL, "x": 1}], [{"type": "function_call", "call_id": "1"}],
        "a " * 100_000,
    ]),
    *({"questions": each} for each in [
        None, {}, "a", [], [3], [{}], [{"type": "box", "instructions": "x"}], [{"type": "noul", "instructions": "x"}],
        [{"type": "predicate"}], [{**URGENT, "instructions": 3}], [{**URGENT, "instructions": None}],
        [{**URGENT, "name": 3}], [{**URGENT, "choices": []}], [URGENT] * 401,
        [{**URGENT, "instructions": [{"type": "input_image", "image_url": "x"}]}],
        *([{**TEAM, "choices": each}] for each in [
            None, [], "ab", [{"value": "a"}], ["a", "b"], [{"value": 1}, {"value": 2}], [{"value": "a"}] * 2,
            [{"value": " "}, {"value": "a"}], [{"value": "a", "x": 1}, {"value": "b"}],
            [{"value": "a", "description": 3}, {"value": "b"}], [{"value": str(i)} for i in range(256)],
        ]),
        *([{**CROSS, "levels": each}] for each in [
            None, [], [{"label": "a"}], [{"label": True}, {"label": "b"}], [{"label": "a"}] * 2, {"a": 1},
            [{"label": str(i)} for i in range(11)],
        ]),
    ]),
]  # fmt: skip
WRONG_OF_SYSTEM_ONE = [
    b"{", {"state": None}, {"state": 3}, {"assets": {"a": {"type": "image"}}}, {"images": []}, {"seed": 1},
    *({"questions": each} for each in [
        None, [], {}, {"a": 3}, {"a": {}}, {"a": {"type": "box"}}, {"a": {"type": "predicate"}},
        {str(i): NOUL for i in range(401)}, {"a": {**NOUL, "instructions": 3}},
        {"a": {**NOUL, "criteria": {"yes": "a"}}}, {"a": {**NOUL, "criteria": ["a", "b"]}},
        {"a": {**NOUL, "x": 1}}, {"a": {"type": "choice"}},
        *({"a": {**CHOICE, "criteria": each}} for each in [
            {}, ["a", "b"], {"a": 3}, {"": None, "b": None}, dict.fromkeys(map(str, range(256)))
        ]),
        *({"a": {**SCORE, "criteria": each}} for each in [
            [], {"a": "b"}, [None, "b"], [3], ["a", "a"], ["", "a"], [str(i) for i in range(11)]
        ]),
    ]),
]  # fmt: skip
RIGHT = {"model": "tiny", "input": "a", "questions": [URGENT]}
RIGHT_OF_SYSTEM_ONE = {"model": "tiny", "state": "a", "questions": {"a": NOUL}}


@pytest.mark.parametrize(
    "path, bodies, right",
    [("/v1/decisions", WRONG, RIGHT), ("/v1/systemone", WRONG_OF_SYSTEM_ONE, RIGHT_OF_SYSTEM_ONE)],
)
def test_malformed_requests_get_a_reason(server, path, bodies, right):
    assert len(WRONG) > 60
    for body in bodies:
        status, found = post(server, path, body if isinstance(body, bytes) else right | body)
        error = json.loads(found)["error"]
        assert 400 <= status < 500 and error["message"] and error["type"] and {"code", "param"} <= error.keys(), body
    for missing in right:
        status, found = post(server, path, {name: value for name, value in right.items() if name != missing})
        assert status == 400 and missing in json.loads(found)["error"]["message"]
    assert post(server, path, right)[0] == 200


@pytest.mark.parametrize("path, change, said", [
    ("decisions", {"questions": [{"type": "box", "instructions": "x"}]}, "questions.0.type: 'box' is not one of"),
    ("decisions", {"questions": [URGENT] * 401}, "questions: maxItems is 400"),
    ("decisions", {"questions": [{**CROSS, "levels": [{"label": "a"}]}]}, "questions.0.levels: minItems is 2"),
    ("decisions", {"questions": [{**TEAM, "choices": [{"value": "a"}] * 2}]}, "options must differ: ['a']"),
    ("decisions", {"questions": [{**URGENT, "instructions": "x" * 200_000}]}, "a prompt of 200,006 characters"),
    ("decisions", {"questions": [{**CROSS, "levels": [{"label": "a", "description": "x" * 200_000}, {"label": "b"}]}]},
     "a prompt of 200,013 characters"),
    ("decisions", {"logprobs": True}, "'logprobs' was unexpected"),
    ("decisions", {"input": [OUTPUT]}, "no call before the output '1'"),
    ("decisions", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image' is not one of"),
    ("systemone", {"questions": {"a": {"type": "box"}}}, "questions.a.type: 'box' is not one of"),
    ("systemone", {"assets": {}}, "'assets' was unexpected"),
])  # fmt: skip
def test_a_reason_names_the_place_and_the_limit(server, path, change, said):
    right = RIGHT if path == "decisions" else RIGHT_OF_SYSTEM_ONE
    status, found = post(server, f"/v1/{path}", right | change)
    assert status == 400 and said in json.loads(found)["error"]["message"], found


def test_a_compressed_body_is_refused_by_its_encoding(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "content-encoding": "zstd"}
    connection.request("POST", "/v1/systemone", b"\x28\xb5\x2f\xfd", headers)
    reply = connection.getresponse()
    assert reply.status == 415 and "must not be compressed" in json.loads(reply.read())["error"]["message"]


def test_keys_limits_and_descriptions_are_those_of_other_routes(server):
    for path, right in (("/v1/decisions", RIGHT), ("/v1/systemone", RIGHT_OF_SYSTEM_ONE)):
        assert post(server, path, right, key="other")[0] == 401
        assert post(server, path, json.dumps(right).encode() + b" " * 1_000_000)[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    document = json.loads(connection.getresponse().read())
    text = json.dumps(document)
    for path, name in (("/v1/decisions", "Decisions"), ("/v1/systemone", "SystemOne")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"] == f"#/components/schemas/{name}"
    wanted = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert wanted <= document["components"]["schemas"].keys()


# ---- clients


LEVELS = {
    "type": "integer",
    "anyOf": [{"const": i, "description": each} for i, each in enumerate(ANGER)],
    "description": "How cross is the writer?",
}


class Ticket(BaseModel):
    urgent: bool = Field(description="Is it urgent?")
    team: Literal["billing", "technical support"] = Field(description="Which team?")
    anger: Annotated[Literal[0, 1, 2], WithJsonSchema(LEVELS)]
    also: list[Literal["refund", "bug"]] = Field(description="What is it about?")


def address(server):
    return f"http://127.0.0.1:{server.port}"


def test_the_openai_client_decides(server):
    openai = pytest.importorskip("openai", reason="the test needs openai: pip install openai")
    known = {"base_url": f"{address(server)}/v1", "api_key": KEY, "max_retries": 0}
    client = openai.OpenAI(**known)
    items = [{"role": "user", "content": STATE}, CALL, OUTPUT]
    for given in (STATE, items):
        decision = client.decisions.create(
            model="tiny", input=given, questions=QUESTIONS, prompt_cache_key="a", prompt_cache_options={"ttl": "30m"},
            safety_identifier="b",
        )  # fmt: skip
        type(decision).model_validate(json.loads(decision.to_json()), strict=True)
        assert [answer.type for answer in decision.answers] == ["predicate", "choice", "score"]

    async def again():
        async with openai.AsyncOpenAI(**known) as client:
            return await client.decisions.create(model="tiny", input=items, questions=QUESTIONS)

    assert asyncio.run(again()) == decision
    with pytest.raises(openai.BadRequestError, match="'box' is not one of"):
        client.decisions.create(model="tiny", input="a", questions=[{"type": "box", "instructions": "x"}])
    with pytest.raises(openai.NotFoundError, match="runs the model 'tiny'"):
        client.decisions.create(model="gpt", input="a", questions=QUESTIONS)


def test_agents_of_pydantic_ai_decide_with_a_history(server):
    reason = "the test needs pydantic-ai: pip install 'pydantic-ai-slim[openai]'"
    models = pytest.importorskip("pydantic_ai.models.openai_decisions", reason=reason)
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
    from pydantic_ai.models.system_one import SystemOneModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.system_one import SystemOneProvider

    history = [
        ModelRequest(parts=[UserPromptPart("What is with order 12345?")]),
        ModelResponse(parts=[ToolCallPart("look_up", {"order": 12345}, "1")]),
        ModelRequest(parts=[ToolReturnPart("look_up", "2 charges", "1")]),
        ModelResponse(parts=[TextPart("It was charged twice.")]),
    ]

    async def outputs(model):
        agent = Agent(model, output_type=Ticket, system_prompt="You sort tickets.")
        first = await agent.run(STATE)
        again = await agent.run("Now it works.", message_history=first.all_messages())
        longer = await agent.run("Refund me.", message_history=history)
        return [first.output, again.output, longer.output]

    async def run():
        async with AsyncOpenAI(base_url=f"{address(server)}/v1", api_key=KEY, max_retries=0) as client:
            of_openai = models.OpenAIDecisionsModel("tiny", provider=OpenAIProvider(openai_client=client))
            found = await outputs(of_openai)
        provider = SystemOneProvider(base_url=address(server), api_key=KEY)
        return [*found, *await outputs(SystemOneModel("tiny", provider=provider))]

    assert all(isinstance(output, Ticket) for output in asyncio.run(run()))


def test_the_decision_model_of_langchain_decides(server):
    reason = "the test needs LangChain: pip install langchain-openai"
    decisions = pytest.importorskip("langchain_openai.decisions", reason=reason)
    from langchain_core.messages import AIMessage, HumanMessage

    model = decisions.OpenAIDecisions(model="tiny", api_key=KEY, base_url=f"{address(server)}/v1", max_retries=0)
    questions = {
        "urgent": decisions.Predicate(instructions="Is it urgent?"),
        "team": decisions.Choice(instructions="Which team?", choices={"billing": "payments", "support": "bugs"}),
        "anger": decisions.Score(instructions="How cross?", levels=ANGER),
    }
    for state in (STATE, [HumanMessage(STATE)], [HumanMessage(STATE), AIMessage("Yes?")], {"text": STATE}):
        found = model.invoke({"input": state, "questions": questions})
        assert 0 <= found.predicates["urgent"].probability <= 1
        assert found.choices["team"].choice in ("billing", "support")
        assert 0 <= found.scores["anger"].score <= 2


def test_classifiers_of_langchain_read_system_one(server):
    reason = "the classifiers of LangChain begin with langchain-core 1.8"
    base = pytest.importorskip("langchain_core.decisions", reason=reason)

    class Served(base.BaseDecisionModel):
        model: str = "tiny"

        @property
        def _provider(self) -> str:
            return "llmppl"

        def _classify(self, state, questions):
            asked = {name: each.model_dump(exclude_none=True) for name, each in questions.items()}
            return base.ClassifierResponse.model_validate(ask(server, "/v1/systemone", state=state, questions=asked))

    questions = {
        "urgent": base.Noul(instructions="Is it urgent?"),
        "team": base.Choice(instructions="Which team?", criteria=TEAMS),
        "anger": base.Score(instructions="How cross?", criteria=ANGER),
    }
    found = Served().invoke({"state": STATE, "questions": questions})
    assert found.answers["team"].choice in TEAMS and 0 <= found.answers["anger"].score <= 2


def test_predictors_of_dspy_decide(server):
    dspy = pytest.importorskip("dspy", reason="the test needs DSPy: pip install 'dspy[typesafe]'")
    pytest.importorskip("typesafe_sdk", reason="the test needs the SDK: pip install typesafe-sdk")
    from dspy.experimental import Choice, Noul, Score, TypeSafe

    Teams = Choice.__class_getitem__((("billing", "payments"), ("support", "bugs")))
    Anger = Score.__class_getitem__(tuple(ANGER))

    class Sort(dspy.Signature):
        """Sort a ticket."""

        ticket: str = dspy.InputField()
        urgent: Noul = dspy.OutputField(desc="Is it urgent?")
        team: Teams = dspy.OutputField(desc="Which team?")
        anger: Anger = dspy.OutputField(desc="How cross?")

    lm = TypeSafe("tiny", api_key=KEY, base_url=address(server), cache=False, timeout=300)
    found = dspy.Predict(Sort)(ticket=STATE, lm=lm)
    assert found.team.value in ("billing", "support") and 0 <= found.anger.value <= 2
    assert 0 <= found.urgent.probability <= 1


def test_the_system_one_sdk_decides(server):
    sdk = pytest.importorskip("typesafe_sdk", reason="the test needs the SDK: pip install typesafe-sdk")
    questions = {
        "urgent": sdk.Noul(instructions="Is it urgent?", criteria={"true": "today"}),
        "team": sdk.Choice(instructions="Which team?", criteria=TEAMS),
        "anger": sdk.Score(instructions="How cross?", criteria=ANGER),
    }
    with sdk.TypeSafeClient(api_key=KEY, base_url=address(server), model="tiny", timeout=300) as client:
        found = client.system_one({"ticket": STATE}, questions)
        assert [answer.type for answer in found.answers.values()] == ["noul", "choice", "score"]
        assert found.usage.input_tokens > 0 and [model.name for model in client.models.list().models] == ["tiny"]
        with pytest.raises(sdk.TypeSafeAPIError, match="runs the model 'tiny'"):
            client.system_one("a", questions, model="other")
        box = sdk.Box(instructions="Where?")
        with pytest.raises(sdk.TypeSafeAPIError, match="'box' is not one of"):
            client.system_one("a", {"place": box})


def test_curl_decides(server):
    if shutil.which("curl") is None:
        pytest.skip("the test needs curl")
    body = json.dumps({"model": "tiny", "input": STATE, "questions": QUESTIONS})
    sent = ["curl", "-s", f"{address(server)}/v1/decisions", "-H", f"Authorization: Bearer {KEY}"]
    sent += ["-H", "Content-Type: application/json", "-d", body]
    found = json.loads(subprocess.run(sent, capture_output=True, check=True).stdout)
    assert "answers" in found, found
    assert [each["type"] for each in found["answers"]] == ["predicate", "choice", "score"]
