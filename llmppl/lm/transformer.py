"""CachedTransformer: a language model that runs each token of each distinct context once.

It makes contexts from texts. Its `evaluator` answers their questions from the cache in its `trie`, or by its `engine`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np

from llmppl.constraints.vocabulary import Text, Vocabulary, encode, encode_fragment
from llmppl.lm.chat import encode_chat
from llmppl.lm.context import NOT_PICKLED, Context
from llmppl.lm.engine import Engine, FunctionEngine, SlotEngine
from llmppl.lm.engines import loading
from llmppl.lm.evaluator import CachedEvaluator
from llmppl.support import arguments, lazy
from llmppl.support.arguments import count, optional_count, positive
from llmppl.support.options import check_options
from llmppl.support.runtime import Stats
from llmppl.support.shared import Shared

Message = Mapping[str, Any]  # a role and a content, as in transformers and most servers
_TEMPLATE_OPTIONS = {"chat_template", "system", "add_generation_prompt", "continue_final_message"}

DEVICE_SHARE = (
    "LLMPPL_DEVICE_SHARE"  # environment variable: the part of each device that this process may use
)


class CachedTransformer(Shared):
    """Language model with a cache of everything it has computed. Programs and threads may share it.

    Parameters
    ----------
    model : transformers model, or pipeline, or Callable, or Engine
        A callable takes the list of token ids so far and returns (V,) logits of the next token, one for each token of
        the vocabulary. (The head of a transformers model may be larger or smaller than the vocabulary. Ids without a
        token are impossible.)
    tokenizer : transformers tokenizer, or Vocabulary
        A bare `Vocabulary` encodes text by the fewest tokens that spell it.
    cache_bytes : int, optional
        Most bytes of keys, values and kept logits of next tokens together. Default: 2 GiB, or half of the free memory
        of a CUDA device.
    max_batch_tokens : int
        Most tokens, rows times longest context, that one forward pass reads. A larger batch is split.
    eos_ids : iterable of int
        Special tokens that end a text, besides those that the tokenizer, the model and its generation config name.
        For a piece of text that ends a text, use `stop` of a ready-made program.

    Attributes
    ----------
    vocab : Vocabulary
    trie : Trie
        `print(lm.trie)` shows the size of the cache.

    Examples
    --------
    >>> lm = CachedTransformer.from_pretrained()
    >>> context = lm.context("Once upon a")
    >>> str(lm.vocab[context.log_probs().argmax()])
    ' time'
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        cache_bytes: int | None = None,
        max_batch_tokens: int = 1 << 16,
        eos_ids: Iterable[int] = (),
    ) -> None:
        cache_bytes = optional_count("cache_bytes", cache_bytes, least=0)
        max_batch_tokens = count("max_batch_tokens", max_batch_tokens)
        if isinstance(model, CachedTransformer):  # it can be called, but not with token ids
            raise TypeError(f"{model!r} is no language model of another package: use it as it is")
        if (
            tokenizer is None and hasattr(model, "tokenizer") and hasattr(model, "model")
        ):  # a pipeline
            tokenizer = model.tokenizer
            model = model.model
        self.model = model
        self.tokenizer: Any = None
        if isinstance(tokenizer, Vocabulary):
            self.vocab = tokenizer
            if eos_ids:
                raise ValueError(
                    "a Vocabulary has eos_ids of its own: Vocabulary(tokens, eos_ids=[...])"
                )
        elif hasattr(tokenizer, "convert_ids_to_tokens"):
            self.tokenizer = tokenizer
            ends = [*_eos_ids(model, tokenizer), *_further_eos(tokenizer, eos_ids)]
            self.vocab = Vocabulary.from_tokenizer(tokenizer, eos_ids=ends)
        else:
            raise TypeError(
                f"tokenizer must be a transformers tokenizer or a Vocabulary, not {arguments.shown(tokenizer)}: "
                "CachedTransformer.from_pretrained(name) loads a model and its tokenizer"
            )
        self._limits = cache_bytes, max_batch_tokens
        self._use(_engine(model, self.vocab, max_batch_tokens))
        self._siblings = dict[
            tuple[str, ...], CachedTransformer
        ]()  # by their adapters, from the first on

    def _use(self, engine: Engine) -> None:
        """Set the engine, with an empty cache."""
        cache_bytes, max_batch_tokens = self._limits
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(
                getattr(engine, "devices", [getattr(engine, "device", None)])
            )
        self.engine = engine
        self.evaluator = CachedEvaluator(engine, self.vocab, cache_bytes, max_batch_tokens)
        self.trie = self.evaluator.trie
        self.store = self.evaluator.store

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | None = None,
        *,
        engine: loading.EngineName | None = None,
        cache_bytes: int | None = None,
        max_batch_tokens: int = 1 << 16,
        eos_ids: Iterable[int] = (),
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Parameters
        ----------
        name : str or path, optional
            A local folder, a hub id, the path of a GGUF file, or "smollm2", a model from a package of that name.
            Default: the model that ships with llmppl.
        engine : str, optional
            Program that computes: "transformers", "numpy" (only the model that ships with llmppl), "llama.cpp" (GGUF
            files) or "vllm". Default: numpy for the model that ships with llmppl, without options; llama.cpp for the
            path of a GGUF file, if it is installed and no option is given that only transformers takes; otherwise
            transformers.
        **options
            dtype : torch.dtype or str
                Default: float32 on a CPU, the checkpoint's own elsewhere. llama.cpp does not take it.
            device, device_map
                Device of the whole model, or how accelerate spreads it, e.g. "auto". Only transformers takes them.

            Other options are passed to transformers' `from_pretrained`, to `llmppl.lm.engines.llamacpp.LlamaCpp`
            (n_ctx, threads, batch_size, cache_type) or to vLLM's engine (max_model_len, tensor_parallel_size, ...).

        Raises
        ------
        OSError
            There is no such model on this machine, and none that can be had from the hub.
        ValueError
            The weights that ship with llmppl, or a GGUF file, are damaged.
        ImportError
            A package is missing. The message says how to install it.
        """
        if name is not None and not isinstance(name, str | os.PathLike):
            given = arguments.shown(name)
            other = "a loaded model goes into CachedTransformer(model, tokenizer)"
            raise TypeError(f"name must be a str or a path, not {given}: {other}")
        cache_bytes = optional_count("cache_bytes", cache_bytes, least=0)
        keys = None if cache_bytes is None else cache_bytes - cache_bytes // 8
        model, tokenizer = loading.load(name, engine, cache_bytes=keys, **options)
        if (
            cache_bytes is not None
            and isinstance(model, Engine)
            and not isinstance(model, SlotEngine)
        ):
            cache_bytes //= 8  # the engine's own cache has the rest
        return cls(
            model,
            tokenizer,
            cache_bytes=cache_bytes,
            max_batch_tokens=max_batch_tokens,
            eos_ids=eos_ids,
        )

    def context(self, text: str | Context = "", *, special: bool = True) -> Context:
        """Return the context of `text`, encoded by the tokenizer with its own special tokens; a Context as it is.

        The name of a special token in `text` becomes this token, unless `special` is False. For text of other people
        give False, or use `chat`. A BOS token that `text` begins with is not added again.

        An empty encoding becomes the BOS token. Without a BOS token it stays empty, if the engine `reads_empty`, as a
        function does. Raises a ValueError if the context is empty for another engine, if it is longer than the model
        reads, and for a lone surrogate.
        """
        if isinstance(text, Context) and text.lm.vocab == self.vocab:
            return text
        text = arguments.text("text", text)  # type: ignore[arg-type]
        if self.tokenizer is None:
            return self._encoded(self.vocab.spell(text.encode()), text)
        ids = encode(self.tokenizer, text, verbose=False, split_special_tokens=not special)
        begin = encode(self.tokenizer, "")
        if not special and sum(i in self.vocab.special_ids for i in ids) > len(begin):
            ids = begin + encode_fragment(
                self.tokenizer, self.vocab, text
            )  # special tokens are pieces of text, too
        elif special and begin and ids[: 2 * len(begin)] == 2 * begin:
            ids = ids[len(begin) :]
        return self._encoded(ids, text)

    def chat(
        self, messages: str | Iterable[Message], *, system: str | None = None, **options: Any
    ) -> Context:
        """Return the context of a conversation, up to where the assistant's answer begins, by the chat template.

        Parameters
        ----------
        messages : str or list of dict
            {"role": "user", "content": "Hi"}, ...; a str is one message of the user. If the last message is the
            assistant's, the answer continues it.
        system : str, optional
            First message, of role "system".
        **options
            Options that the template reads, such as `tools` and `enable_thinking`; `chat_template`,
            `add_generation_prompt` and `continue_final_message` as in transformers.

        Raises
        ------
        ValueError
            There is no chat template, or it refuses the messages.
        TypeError
            The template does not read an option.
        """
        conversation = _conversation(messages, system)
        tokenizer = self.tokenizer
        given = options.pop("chat_template", None)
        if not hasattr(tokenizer, "get_chat_template") or (
            given is None and tokenizer.chat_template is None
        ):
            raise ValueError(
                "this tokenizer has no chat template; its model may not be trained to chat: write the conversation out "
                "and use context(text), or give chat_template=... for a tokenizer of transformers"
            )
        template = tokenizer.get_chat_template(given, options.get("tools"))
        names = {*re.findall(r"\w+", template)}
        known = {name for name in names if "_" in name} | _TEMPLATE_OPTIONS
        check_options(
            "chat, by this template,", options.keys() - names, known
        )  # the template would ignore them
        last = conversation[-1]
        begun = last["role"] == "assistant" and not options.get("add_generation_prompt")
        continued = options.pop("continue_final_message", begun)
        options.setdefault("add_generation_prompt", not continued)
        if continued and (last.get("tool_calls") or not isinstance(last.get("content"), str)):
            raise ValueError(
                "the last message has calls, or no content that the answer could continue: give a text, the result of "
                "its tool, or add_generation_prompt=True"
            )
        try:
            ids = encode_chat(tokenizer, self.vocab, template, conversation, options, continued)
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return self._encoded(ids, None)

    def generate(self, prompt: Any, constraint: Any = None, **options: Any) -> Any:
        """Generate a text, a choice or a record: `llmppl.generate(self, prompt, constraint, ...)`."""
        return lazy.found("llmppl.tasks.generation", "generate")(
            self, prompt, constraint, **options
        )

    __call__ = generate

    def _encoded(self, ids: Sequence[int], text: str | None) -> Context:
        """Return the context of `ids`. Its text is `text` if the ids spell it with a space put before it."""
        if not ids:
            bos = getattr(self.tokenizer, "bos_token_id", None)
            ids = [] if bos is None else [bos]
        ids = [int(self.vocab.token(int(i))) for i in ids]
        data = b"".join(self.vocab.tokens[i] for i in ids)
        start = Text(text) if text is not None and data == b" " + text.encode() else Text(data)
        context = Context(self, self.trie.root, ids, start, len(ids))
        context.check_length()
        return context

    def at(self, ids: Iterable[int]) -> Context:
        """Return the context of exactly these token ids, which may be none; no special token is added."""
        return Context(self, self.trie.root, ids, Text(), 0)

    def adapter(self, name: str | None) -> CachedTransformer:
        """Return the same weights with the adapter `name` (such as LoRA) active, or with none, as a language model.

        It has its own cache, with the same limits. One program, and any thread, may use it together with this one. The
        same name returns the same object. Raises a ValueError if the model has no such adapter.
        """
        names = () if name is None else (name,)
        if self._adapted is None:
            raise ValueError(
                f"adapter {name!r}: only transformers models have adapters, and this is {self!r}"
            )
        with self._adapted.turn.lock:
            self._siblings.setdefault(self._adapted.names, self)
            lm = self._siblings.get(names)
            if lm is None:
                engine = _engine(self.model, self.vocab, self._limits[1], names)
                lm = self._siblings[names] = type(self).__new__(type(self))
                vars(lm).update(vars(self))
                lm._use(engine)
        return lm

    def clear(self) -> None:
        """Empty the cache, and those of the other adapters of the model. Contexts stay valid.

        Call this after a change of the weights, and when your own function or engine starts to answer differently.
        """
        for lm in {self, *self._siblings.values()}:
            lm.evaluator.clear()

    @property
    def _adapted(self) -> Any:
        """The `Adapted` model that the engine runs; None if the engine does not run a transformers model."""
        return getattr(self.engine, "adapted", None)

    @property
    def stats(self) -> Stats:
        """Stats of everything ever run, in all threads; a copy."""
        return self.evaluator.stats

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a CachedTransformer {NOT_PICKLED}")

    def __repr__(self) -> str:
        configured = getattr(getattr(self.model, "config", None), "name_or_path", "")
        name = self.engine.name or configured or type(self.model).__name__
        return f"CachedTransformer({name}, {self.vocab!r})"


def default_cache_bytes(devices: Iterable[Any]) -> int:
    """Return the default of `cache_bytes`: half of this process's share of the free CUDA memory; 2 GiB elsewhere.

    The other half is for forward passes and for the growth of the slab. Of several devices the one with the least free
    memory counts.
    """
    devices = [device for device in devices if getattr(device, "type", "cpu") == "cuda"]
    if not devices:
        return 2 << 30
    from torch.cuda import mem_get_info

    value = os.environ.get(DEVICE_SHARE, "1")
    try:
        share = min(1.0, positive(DEVICE_SHARE, float(value)))
    except ValueError:
        raise ValueError(
            f"the variable {DEVICE_SHARE} is {value!r}; a number such as 0.5 would work"
        ) from None
    return int(min(mem_get_info(device)[0] for device in devices) * share) // 2


def _engine(
    model: Any, vocab: Vocabulary, max_batch_tokens: int, adapters: tuple[str, ...] | None = None
) -> Engine:
    """Return an engine that runs `model`, with `adapters` active; with the currently active ones by default."""
    if isinstance(model, Engine):
        return model.renewed() if isinstance(model, SlotEngine) else model
    if hasattr(model, "config") and hasattr(model, "parameters"):
        engine: Engine = loading.module("hf").engine(model, vocab, max_batch_tokens, adapters)
        return engine
    if callable(model):
        return FunctionEngine(model, len(vocab))
    raise TypeError(
        f"{arguments.shown(model)} is no language model: give a transformers model, a function from ids to logits, or "
        "an Engine"
    )


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the eos ids of the tokenizer, the model and its generation config that are ids of a token, sorted."""
    owners = tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None)
    named = [getattr(owner, "eos_token_id", None) for owner in owners] + [
        getattr(model, "eos_ids", None)
    ]
    ids = {int(i) for each in named if each is not None for i in np.atleast_1d(each)}
    return sorted(i for i in ids if tokenizer.convert_ids_to_tokens(i) is not None)


def _further_eos(tokenizer: Any, ids: Iterable[int]) -> list[int]:
    """Return `ids` as a list; ValueError unless each is a special token. A token of text could not appear in texts."""
    further = [arguments.integer("each of eos_ids", i) for i in ids]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if wrong := set(further).difference(
        tokenizer.all_special_ids, (i for i, each in added.items() if each.special)
    ):
        raise ValueError(
            f"eos_ids: {min(wrong)} is the id of no special token, and a token that ends a text adds nothing to it: "
            "give stop=... to a ready-made program"
        )
    return further


def _conversation(messages: str | Iterable[Message], system: str | None) -> list[dict[str, Any]]:
    """Return the messages as a list of dicts, with `system` first."""
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    if system is not None:
        listed.insert(0, {"role": "system", "content": arguments.text("system", system)})
    wrong = [
        each
        for each in listed
        if not (isinstance(each, Mapping) and {"role"} <= each.keys() != {"role"})
    ]
    if wrong or not listed:
        given = arguments.shown(wrong[0] if wrong else listed)
        raise TypeError(
            f"messages must be a str or a list of dicts such as {{'role': 'user', 'content': 'Hi'}}, not of {given}"
        )
    return [
        {**message, "content": _joined(message)} if "content" in message else {**message}
        for message in listed
    ]


def _joined(message: Message) -> Any:
    """Return the content of a message. Parts that are all texts are joined, for templates that read no parts."""
    parts = message["content"]
    if (
        isinstance(parts, list)
        and parts
        and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts)
    ):
        return "".join(part["text"] for part in parts)
    return parts
