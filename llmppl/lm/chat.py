"""Tokens of a conversation, in which only the chat template writes control tokens. The messages stay text.

A *control token* is a special token, or an added token that begins with `BAR`, or of which the template names it or
the other one of a pair, such as "<think>" and "</think>". An *alias* is a character that occurs nowhere in the
conversation. Aliases replace signs of the messages, such as "<", while the template renders. So the result shows which
of its signs come from the messages.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from llmppl.constraints.vocabulary import Vocabulary, encode, encode_fragment
from llmppl.support import arguments

SIGNS = "<>|[]{}()/_#@:=*~^$%&!?-+｜▁◁▷"  # of control tokens; JSON does not escape them
BAR = "<|", "<｜"  # templates make such names, as in "<|" + role + "|>"
ALIASES = range(0x30000, 0x31340)  # rare letters, which are printable


class Marks:
    """Aliases that do not occur in `used`, for signs and for the letters of control tokens.

    ids : dict of the control tokens to their ids; known : set of these ids
    tags : set of the control tokens that are not special and come in pairs, as "<think>" and "</think>" do
    control : regex of all control tokens, the longest first
    """

    def __init__(self, tokenizer: Any, vocab: Vocabulary, template: str, used: str) -> None:
        named = set()
        self.ids = dict[str, int]()
        names = Counter[str]()
        opened = template.replace("/", "")  # "</think>" names "<think>", too
        for i, token in tokenizer.added_tokens_decoder.items():
            text = token.content
            opening = text.replace("/", "")
            names[opening] += 1
            if i in vocab.special_ids:
                self.ids[text] = i
            elif text.startswith(BAR) or (opening.strip() and opening in opened):
                self.ids[text] = i
                named.add(text)
        self.tags = {text for text in named if text[0] == "<" and names[text.replace("/", "")] == 2}
        self.known = frozenset(self.ids.values())
        tokens = sorted(self.ids, key=len, reverse=True)
        self.control = "|".join(map(re.escape, tokens)) or "(?!)"
        self.letters = sorted({*"".join(tokens)})
        unused = (alias for alias in map(chr, ALIASES) if alias not in used)
        self.end = next(unused)
        self.aliases = dict(zip({*SIGNS, *self.letters}, unused, strict=False))
        self.signs = {ord(alias): sign for sign, alias in self.aliases.items()}

    def put(self, value: Any, pattern: str, kept: Collection[str] = ()) -> Any:
        """Return a copy of a message or an option. An alias begins each text of `pattern`, but `kept` ones."""

        def alias(found: re.Match[str]) -> str:
            text = found[0]
            return text if text in kept else self.aliases[text[0]] + text[1:]

        if isinstance(value, str):
            return re.sub(pattern, alias, arguments.text("messages", value))
        if isinstance(value, list | tuple):
            return [self.put(each, pattern, kept) for each in value]
        if not isinstance(value, Mapping):
            return value
        marked = {}
        for name, each in value.items():
            is_answer = name == "content" and value.get("role") == "assistant"
            written = self.tags if is_answer else ()  # a model wrote it, with "<think>" as a token
            marked[self.put(name, self.control)] = self.put(each, pattern, written)
        return marked


def encode_chat(
    tokenizer: Any,
    vocab: Vocabulary,
    template: str,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    continued: bool,
) -> list[int]:
    """Return the ids of a conversation. If `continued`, they end with the content of the last message."""
    marks = Marks(tokenizer, vocab, template, str((messages, options)))

    def rendered(pattern: str) -> str:
        marked = marks.put(messages, pattern)
        last = marked[-1]
        answer = last.get("content")
        if continued:
            last["content"] = marks.end  # the template could trim the answer itself
        further = marks.put(options, pattern)
        further["chat_template"] = template
        text: str = tokenizer.apply_chat_template(marked, tokenize=False, **further)
        if not continued:
            return text
        head, found, _ = text.rpartition(marks.end)
        if not found:
            raise ValueError("it leaves out the last message, which the answer would continue")
        # the template may write an empty "<think></think>", which this answer begins with itself
        empty = rf"<(\w+)>\s*(</\1>\s*)?{found}(?=\s*<\1>)"
        return re.sub(f"{empty}|{found}", "", head + found + answer)

    loose = rendered(marks.control)
    text = loose.translate(marks.signs)
    marked = [rendered(f"{marks.control}|[{re.escape(SIGNS)}]")]
    # if the template reads signs, mark each letter by itself
    if marked[0].translate(marks.signs) != text:
        marked = [loose]
        for letter in marks.letters:
            each = rendered(f"{marks.control}|{re.escape(letter)}")
            if each.translate(marks.signs) == text:
                marked.append(each)
    cuts = [0]
    for found in re.finditer(f"(?=({marks.control}))", text):
        start, end = found.span(1)
        if any(each[start:end] != found[1] for each in marked):
            cuts.append(start + 1)
    cuts.append(len(text))
    ids = []
    for start, end in pairwise(cuts):
        piece = text[start:end]
        plain = re.split(marks.control, piece, maxsplit=1)[0] if start else ""
        ids += encode_fragment(tokenizer, vocab, plain)
        ids += _encode_piece(tokenizer, vocab, piece.removeprefix(plain), marks)
    return ids


def _encode_piece(tokenizer: Any, vocab: Vocabulary, text: str, marks: Marks) -> list[int]:
    """Return the ids of a piece of a conversation, whose control tokens are all those of the template."""
    ids = encode(tokenizer, text, add_special_tokens=False, verbose=False)
    parts = re.split(f"({marks.control})", text)
    own = Counter(map(marks.ids.get, parts[1::2]))
    found = Counter(filter(marks.known.__contains__, ids))
    if found <= own:
        return ids
    # the tokenizer normalises a text to a control token
    ids = []
    for part in parts:
        ids += [marks.ids[part]] if part in marks.ids else encode_fragment(tokenizer, vocab, part)
    return ids
