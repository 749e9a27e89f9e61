"""Prompts of decisions: the texts of a state and a question, and the conversation that asks it.

Without examples the state comes first, so that all questions on a state share its tokens. With examples the question
comes first, and each example is a turn of the conversation, so that all states share these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmppl.decisions.questions import Question
from llmppl.lm import CachedTransformer, Context
from llmppl.support.arguments import shown

THINK = "Think first, in a sentence or two."
LAYOUT = "1"  # changes with every change of a prompt


def is_messages(state: Any) -> bool:
    """Check whether a state is a conversation: a list of dicts with roles."""
    return (
        isinstance(state, list | tuple)
        and len(state) > 0
        and all(isinstance(each, Mapping) and "role" in each for each in state)
    )


def text_of_state(state: Any) -> str:
    """Return the text of a state: itself, the turns of a conversation with their roles, or JSON on one line."""
    if isinstance(state, str):
        return state
    if is_messages(state):
        return "\n\n".join(
            f"{each['role']}: {text_of_state(each.get('content', ''))}" for each in state
        )
    try:
        return json.dumps(state, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a state must be a text, messages or JSON, not {shown(state)} ({error}): "
            "dataclasses.asdict(state) or state.model_dump(mode='json') makes JSON of a record"
        ) from None


def text_of_question(question: Question, order: Sequence[int]) -> str:
    """Return the text of a question with its options in some order."""
    lines = [question.text]
    if question.kind != "predicate":
        lines.append("Options:")
    for i in order:
        description = question.descriptions[i]
        if description:
            lines.append(f"{question.names[i]}: {description}")
        elif question.kind != "predicate":
            lines.append(question.names[i])
    return "\n".join([*lines, instruction(question, order)])


def instruction(question: Question, order: Sequence[int]) -> str:
    """Return the sentence that asks for one of the answers."""
    if question.kind != "predicate":
        return "Answer with one of these options only."
    first, second = (question.names[i] for i in order)
    return f"Answer {first} or {second}."


def conversation(
    state: str, question: Question, order: Sequence[int], examples: Sequence[tuple[str, str]] = ()
) -> list[dict[str, str]]:
    """Return the messages that ask a question about the text of a state.

    examples : list of (the text of a state, the name of the right answer)
    """
    asked = text_of_question(question, order)
    if not examples:
        return [_turn("user", f"{state}\n\nQuestion: {asked}")]
    turns = list[dict[str, str]]()
    for example, name in examples:
        turns += [_turn("user", f"Text: {example}"), _turn("assistant", name)]
    turns.append(_turn("user", f"Text: {state}"))
    turns[0]["content"] = f"{asked}\n\n{turns[0]['content']}"
    return turns


def thinking(
    turns: list[dict[str, str]], question: Question, order: Sequence[int], draft: str | None = None
) -> list[dict[str, str]]:
    """Return the conversation that asks for a draft first. With the draft, it asks for the answer."""
    *earlier, asked = turns
    drafted = [*earlier, _turn("user", f"{asked['content']}\n{THINK}")]
    if draft is None:
        return drafted
    return [*drafted, _turn("assistant", draft), _turn("user", instruction(question, order))]


def with_answers(state: str, questions: Sequence[Question], places: Sequence[int]) -> str:
    """Return the text of a state with the answers to earlier questions."""
    lines = [f"{each.text} {each.names[i]}" for each, i in zip(questions, places, strict=True)]
    return "\n".join([state, "", *lines]) if lines else state


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def has_chat(lm: CachedTransformer) -> bool:
    """Check whether the tokenizer has a chat template."""
    return getattr(lm.tokenizer, "chat_template", None) is not None


def as_context(lm: CachedTransformer, turns: Sequence[Mapping[str, str]]) -> Context:
    """Return the context of a conversation: by the chat template, or as text that ends with "Answer:"."""
    if has_chat(lm):
        return lm.chat(turns)
    lines = list[str]()
    for turn in turns:
        line = turn["content"]
        if turn["role"] != "user":
            line = f"Answer: {line.strip()}"
        lines.append(line)
    return lm.context("\n\n".join([*lines, "Answer:"]), special=False)
