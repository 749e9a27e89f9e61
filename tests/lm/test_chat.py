"""Conversations: the messages and options that a chat template gets, and the errors if it refuses them."""

import pytest
from helpers.tokenizers import PROMPT, TEMPLATE, byte_level, chat_lm

from llmppl import CachedTransformer, Vocabulary

USER = {"role": "user", "content": "the end?"}
BEGUN = {"role": "assistant", "content": "the"}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([USER], {}, "user: the end?\nassistant:"),
        ("the end?", {}, "user: the end?\nassistant:"),
        (iter([USER]), {}, "user: the end?\nassistant:"),
        ("Hi", {"system": "Be kind."}, "system: Be kind.\nuser: Hi\nassistant:"),
        ([USER, BEGUN], {}, "user: the end?\nassistant: the"),
        ([USER, BEGUN, USER], {}, "user: the end?\nassistant: the\nuser: the end?\nassistant:"),
        ([USER, BEGUN], {"add_generation_prompt": True}, "user: the end?\nassistant: the\nassistant:"),
        ([USER, BEGUN], {"continue_final_message": False}, "user: the end?\nassistant: the\nassistant:"),
        ([USER], {"continue_final_message": True}, "user: the end?"),
        ([USER], {"add_generation_prompt": False}, "user: the end?\n"),
        ([USER], {"chat_template": PROMPT}, "assistant:"),
    ],
)
def test_a_conversation_is_encoded_by_the_template_up_to_the_answer(messages, options, expected):
    context = chat_lm().chat(messages, **options)
    assert context.text == expected
    assert (context + " yes").text == expected + " yes"


def test_options_of_the_template_are_passed_and_others_refused():
    reads = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
    reads += "{% for tool in tools or [] %}{{ tool.function.name }}{% break %}{% endfor %}"
    reads += "{%- generation -%}.{% endgeneration %}{% set shown = namespace(n=2) %}{{ shown.n }}"
    lm, tool = chat_lm(reads), {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    end = "user: Hi\nassistant:"
    assert lm.chat("Hi").text == end + ".2"
    assert lm.chat("Hi", enable_thinking=False, tools=[tool]).text == end + "nonelook.2"
    with pytest.raises(TypeError, match="by this template, takes no enable_thinkin: did you mean enable_thinking"):
        lm.chat("Hi", enable_thinkin=False)
    with pytest.raises(TypeError, match="takes no tools: it takes add_generation_prompt, chat_tem"):
        chat_lm().chat("Hi", tools=[tool])
    with pytest.raises(TypeError, match="chat, by this template, takes no max_length: it takes "):
        lm.chat("Hi", max_length=3)
    with pytest.raises(TypeError, match="takes no sytem: did you mean system?"):
        lm.chat("Hi", sytem="Be kind.")


@pytest.mark.parametrize("make", [byte_level, lambda: Vocabulary([b"a", b"b"])], ids=["tokenizer", "vocabulary"])
def test_chat_without_a_template_raises_with_a_remedy(make):
    tokenizer = make()
    lm = CachedTransformer(lambda ids: [0.0], tokenizer)
    with pytest.raises(ValueError, match=r"no chat template.*: write the conversation out and use context\(text\)"):
        lm.chat("the")
    if isinstance(tokenizer, Vocabulary):
        with pytest.raises(ValueError, match="no chat template"):
            lm.chat("the", chat_template=TEMPLATE)
    else:
        assert lm.chat("the", chat_template=TEMPLATE).text == "user: the\nassistant:"


STRICT = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% if not loop.last or message['role'] == 'user' %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "options", "error", "said"),
    [
        (TEMPLATE, ["Hi"], {}, TypeError, "messages must be a str or a list of dicts, such as .*'content': 'Hi'"),
        (TEMPLATE, USER, {}, TypeError, r"messages must be a str or a list of dicts, such as \[\{'role': 'user'"),
        (TEMPLATE, 3, {}, TypeError, "messages must be a str or a list of dicts"),
        (TEMPLATE, None, {}, TypeError, "messages must be a str or a list of dicts"),
        (TEMPLATE, [], {}, ValueError, "messages must be at least one, such as"),
        (TEMPLATE, [{"content": "Hi"}], {}, ValueError, r"messages\[0\] has no role, 'user', .*\{'content': 'Hi'\}"),
        (TEMPLATE, [USER, {"role": "user"}], {}, ValueError, r"messages\[1\] has no content: \{'role': 'user'\}"),
        (TEMPLATE, [{"role": "system", "content": "a"}], {"system": "b"}, ValueError, "give system=, or a first"),
        (TEMPLATE, "Hi", {"system": 3}, TypeError, "system must be a str, not 3"),
        (STRICT, "Hi", {"system": "x"}, ValueError, r"refuses .* \(System role not supported\); give it"),
        (STRICT, [USER, BEGUN], {}, ValueError, "it does not continue a last message of the assistant: let the last"),
    ],
)  # fmt: skip
def test_an_invalid_conversation_is_refused_with_the_reason(template, messages, options, error, said):
    with pytest.raises(error, match=said):
        chat_lm(template).chat(messages, **options)
