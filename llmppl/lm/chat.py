"""Chat: token ids of a conversation, by the chat template of a tokenizer.

A *message* is a dict with a role and a content, as in transformers and most servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmppl.support.arguments import shown, text
from llmppl.support.options import unknown_option

Message = Mapping[str, Any]

_OPTIONS = {"chat_template", "add_generation_prompt", "continue_final_message"}         # read by transformers itself
_NOT_OPTIONS = {"messages", "raise_exception", "strftime_now"}  # variables that transformers gives to templates


def chat_ids(
    tokenizer: Any, messages: str | Iterable[Message], system: str | None, options: Mapping[str, Any]
) -> list[int]:
    """Return the ids of a conversation, up to the beginning of the answer or its continuation.

    See `CachedTransformer.chat`.
    """
    conversation = _conversation(messages, system)
    if getattr(tokenizer, "chat_template", None) is None and (tokenizer is None or "chat_template" not in options):
        advice = "" if tokenizer is None else ", or give one, chat_template=..."
        raise ValueError(
            "this tokenizer has no chat template; its model may not be trained to chat: write the conversation out and "
            f"use context(text){advice}"
        )
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    known = _options_of(template) | _OPTIONS
    if unknown := options.keys() - known:
        raise unknown_option("chat, by this template,", sorted(unknown), known | {"system"})
    prefilled = conversation[-1]["role"] == "assistant" and not options.get("add_generation_prompt")
    continues = options.get("continue_final_message", prefilled)
    all_options = {"continue_final_message": continues, "add_generation_prompt": not continues, **options}
    try:
        ids: list[int] = tokenizer.apply_chat_template(conversation, **all_options, tokenize=True, return_dict=False)
    except ImportError:                                 # jinja2 is missing
        raise
    except Exception as error:                          # a template can raise anything
        reason = str(error).strip().partition("\n")[0]
        advice = "give it messages and options that it knows"
        if continues:
            advice = "it does not continue a last message of the assistant: let the last be the user's"
        raise ValueError(f"the chat template refuses this conversation ({reason}); {advice}") from error
    return ids


def _conversation(messages: str | Iterable[Message], system: str | None) -> list[dict[str, Any]]:
    """Return the messages as a list of dicts, with `system` first."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": text("messages", messages)}]
    if isinstance(messages, Mapping):
        raise _no_messages(messages)
    listed = list(messages) if isinstance(messages, Iterable) else [messages]
    for message in listed:
        if not isinstance(message, Mapping):
            raise _no_messages({"role": "user", "content": message})
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


def _no_messages(example: Message) -> TypeError:
    return TypeError(f"messages must be a str or a list of dicts, such as {shown([example])}")


def _options_of(template: str) -> set[str]:
    """Return the names of the options that a template reads. It would silently ignore others."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)       # a tag of transformers
    return meta.find_undeclared_variables(environment.parse(plain)) - environment.globals.keys() - _NOT_OPTIONS
