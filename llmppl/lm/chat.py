"""Chat: a conversation in tokens, as the template of a tokenizer writes it.

A *message* is a dict of a role and a content, as transformers and most servers have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmppl.support.arguments import shown, text, unknown_option
from llmppl.support.locks import let_through

Message = Mapping[str, Any]

_OPTIONS = {"chat_template", "add_generation_prompt", "continue_final_message"}         # heeded without the template
_GIVEN = {"messages", "raise_exception", "strftime_now"}        # what a template reads besides options


def chat_ids(
    tokenizer: Any, messages: str | Iterable[Message], system: str | None, options: Mapping[str, Any]
) -> list[int]:
    """The ids of a conversation, up to where the assistant's answer begins or goes on; see `CachedTransformer.chat`."""
    conversation = _conversation(messages, system)
    if getattr(tokenizer, "chat_template", None) is None and (tokenizer is None or "chat_template" not in options):
        how = "" if tokenizer is None else ", or give one, chat_template=..."
        raise ValueError(
            "this tokenizer has no chat template, as that of a model not trained to chat: write the conversation out "
            f"and use context(text){how}"
        )
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    read = _read_by(template)
    if unknown := options.keys() - read - _OPTIONS:
        raise unknown_option("chat, by this template,", sorted(unknown), read | _OPTIONS | {"system"})
    prefilled = conversation[-1]["role"] == "assistant" and not options.get("add_generation_prompt")
    goes_on = options.get("continue_final_message", prefilled)
    whole = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on, **options}
    try:
        ids: list[int] = tokenizer.apply_chat_template(conversation, **whole, tokenize=True, return_dict=False)
    except ImportError:                                 # of jinja2
        raise
    except Exception as error:                          # whatever a template makes of messages and options
        let_through(error)
        why = str(error).strip().partition("\n")[0]
        how = (
            "it does not go on with a last message of the assistant: let the last be the user's" if goes_on
            else "give it messages and options of the kind that it knows"
        )  # fmt: skip
        raise ValueError(f"the chat template refuses this conversation ({why}); {how}") from error
    return ids


def _conversation(messages: str | Iterable[Message], system: str | None) -> list[dict[str, Any]]:
    """The messages as a list of dicts, `system` before them."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": text("messages", messages)}]
    listed = [messages] if isinstance(messages, Mapping) or not isinstance(messages, Iterable) else list(messages)
    wrong = next((each for each in listed if not isinstance(each, Mapping)), None)
    if isinstance(messages, Mapping) or wrong is not None:
        example = [messages if isinstance(messages, Mapping) else {"role": "user", "content": wrong}]
        raise TypeError(f"messages must be a str or a list of dicts, such as {shown(example)}")
    if not listed:
        raise ValueError("messages must be at least one, such as {'role': 'user', 'content': 'Hi'}, not []")
    for i, message in enumerate(listed):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] has no role, 'user', 'assistant' or 'system': {shown(message)}")
        if not message.keys() & {"content", "tool_calls"}:
            raise ValueError(f"messages[{i}] has no content: {shown(message)}")
    if system is not None:
        if listed[0]["role"] == "system":
            raise ValueError("give system=, or a first message of role 'system', not both")
        listed = [{"role": "system", "content": text("system", system)}, *listed]
    return list(map(dict, listed))


def _read_by(template: str) -> set[str]:
    """The names of the options that a template reads; others it would pass over without a word."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)       # a tag of transformers
    return meta.find_undeclared_variables(environment.parse(plain)) - environment.globals.keys() - _GIVEN
