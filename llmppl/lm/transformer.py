"""CachedTransformer: a language model that runs each token of each distinct context once.

It makes contexts from texts; what they ask is answered by its `evaluator`, from its `trie` or by its `engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from llmppl.constraints.vocabulary import Text, Vocabulary
from llmppl.lm.chat import Message, chat_ids
from llmppl.lm.context import NOT_PICKLED, Context
from llmppl.lm.engine import Engine, FunctionEngine, SlotEngine
from llmppl.lm.evaluator import CachedEvaluator
from llmppl.support import arguments
from llmppl.support.arguments import count, optional_count, positive
from llmppl.support.runtime import Stats
from llmppl.support.shared import Fixed

if TYPE_CHECKING:
    from llmppl.lm.engines.registry import EngineName

DEVICE_SHARE = "LLMPPL_DEVICE_SHARE"    # names the environment variable of what this process may take of each device


class CachedTransformer(Fixed):
    """A language model with a cache of everything it has computed, shared by all who use it.

    Parameters
    ----------
    model : transformers model, or Callable, or Engine
        A callable takes the list of token ids read so far and returns (V,) logits of the next token, one for each
        token of the vocabulary. (The head of a transformers model may be padded, or too small: ids that no token
        stands behind are ruled out.)
    tokenizer : transformers tokenizer, or Vocabulary
        A bare `Vocabulary` encodes text by the fewest tokens that spell it.
    cache_bytes : int, optional
        The most bytes that keys, values and kept logits of next tokens may take together; 2 GiB, or half of what is
        free on a CUDA device, if left out.
    row_bytes : int, optional
        The most bytes that kept logits may take. `cache_bytes` is then the budget of keys and values alone.
    max_batch_tokens : int
        The most tokens, rows times longest context, that one forward pass may read. A longer batch is cut.
    eos_ids : iterable of int
        Special tokens that end a text, besides those that the tokenizer, the model and its generation config name.
        What ends a text and is text itself is `stop` of a ready-made program.

    Attributes
    ----------
    vocab : Vocabulary
    trie : Trie
        `print(lm.trie)` draws what is cached.
    """

    _names = "model", "tokenizer", "vocab", "engine", "evaluator", "trie", "store"
    _instead = (
        ": a decision rule is an argument of programs and queries, rule=Rule(temperature=0.1), as max_tokens is, and a "
        "limit of the cache one of CachedTransformer"
    )

    def __init__(
        self, model: Any, tokenizer: Any, *, cache_bytes: int | None = None, row_bytes: int | None = None,
        max_batch_tokens: int = 1 << 16, eos_ids: Iterable[int] = (),
    ) -> None:  # fmt: skip
        cache_bytes = optional_count("cache_bytes", cache_bytes, least=0)
        row_bytes = optional_count("row_bytes", row_bytes, least=0)
        max_batch_tokens = count("max_batch_tokens", max_batch_tokens)
        self.model = model
        if isinstance(tokenizer, Vocabulary):
            self.vocab = tokenizer
            self.tokenizer: Any = None                  # no Optional: hardly a model is without
            if eos_ids:
                raise ValueError("a Vocabulary has eos_ids of its own: Vocabulary(tokens, eos_ids=[...])")
        elif not hasattr(tokenizer, "convert_ids_to_tokens"):
            how = ""
            if hasattr(model, "convert_ids_to_tokens"):
                how = ": model and tokenizer are swapped"
            elif isinstance(model, str):
                how = f": CachedTransformer.from_pretrained({model!r}) loads both"
            given = arguments.kind(tokenizer)
            raise TypeError(f"tokenizer must be a transformers tokenizer or a Vocabulary, not {given}{how}")
        else:
            self.tokenizer = tokenizer
            further = _further_eos(tokenizer, eos_ids)
            self.vocab = Vocabulary.from_tokenizer(tokenizer, eos_ids=[*_eos_ids(model, tokenizer), *further])
        self._limits = cache_bytes, row_bytes, max_batch_tokens
        self._use(_engine(model, self.vocab, max_batch_tokens))
        self._siblings = {} if self._adapted is None else {self._adapted.names: self}       # by their adapters

    def _use(self, engine: Engine) -> None:
        """Answer by `engine`, with a cache of its own."""
        cache_bytes, row_bytes, max_batch_tokens = self._limits
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(getattr(engine, "devices", [getattr(engine, "device", None)]))
        self.engine = engine
        self.evaluator = CachedEvaluator(engine, self.vocab, cache_bytes, row_bytes, max_batch_tokens)
        self.trie, self.store = self.evaluator.trie, self.evaluator.store

    @classmethod
    def from_pretrained(
        cls, name: str | Path | None = None, *, engine: EngineName | None = None, cache_bytes: int | None = None,
        row_bytes: int | None = None, max_batch_tokens: int = 1 << 16, eos_ids: Iterable[int] = (), **options: Any,
    ) -> Self:  # fmt: skip
        """Load a model and its tokenizer.

        Parameters
        ----------
        name : str or path, optional
            A local folder, a hub id, the path of a GGUF file, or "smollm2", a model that an installed package carries;
            the model that ships with the package if left out.
        engine : str, optional
            What computes: "transformers", "numpy" (the model that ships with the package, at once), "llama.cpp" (GGUF
            files) or "vllm". By default llama.cpp for the path of a GGUF file, if it is installed and no option is
            given that only transformers takes; else transformers.
        **options
            dtype : torch.dtype or str
                float32 on a CPU and the checkpoint's own elsewhere, if left out. Not of llama.cpp.
            device, device_map
                Where to put the whole model, or how accelerate is to spread it, e.g. "auto". Of transformers alone.

            Others are passed on: to transformers' `from_pretrained`, to `llmppl.lm.engines.llamacpp.LlamaCpp` (n_ctx, threads,
            batch_size, cache_type) or to vLLM's engine (max_model_len, tensor_parallel_size, ...).

        Raises
        ------
        FileNotFoundError
            There is no such model here, nor, or not from here, on the hub.
        ValueError
            The weights that ship with the package are damaged, or a GGUF file is, or cannot be read.
        ImportError
            What an engine, an option, a GGUF file or "smollm2" needs is not installed; it says the command.
        """
        from llmppl.lm.engines import registry as choosing

        if name is not None and not isinstance(name, (str, os.PathLike)):
            said = "CachedTransformer(model, tokenizer) takes what is loaded already"
            raise TypeError(f"name must be a str or a path, not {arguments.kind(name)}: {said}")
        cache_bytes = optional_count("cache_bytes", cache_bytes, least=0)
        row_bytes = optional_count("row_bytes", row_bytes, least=0)
        keys = cache_bytes if row_bytes is not None or cache_bytes is None else cache_bytes - cache_bytes // 8
        model, tokenizer = choosing.load(name, engine, cache_bytes=keys, **options)
        keeps_its_own = isinstance(model, Engine) and not isinstance(model, SlotEngine)
        if keeps_its_own and row_bytes is None and cache_bytes is not None:
            row_bytes = cache_bytes // 8                # the rest is the engine's
        return cls(
            model, tokenizer, cache_bytes=cache_bytes, row_bytes=row_bytes, max_batch_tokens=max_batch_tokens,
            eos_ids=eos_ids,
        )  # fmt: skip

    def context(self, text: str = "") -> Context:
        """`text` as the tokenizer encodes it, its own special tokens included; an empty encoding becomes the BOS token.

        Where there is no BOS, it stays empty for an engine that `reads_empty`, as a function does. A ValueError if
        another has none, if the model cannot read so long a context, and for a lone surrogate.
        """
        arguments.text("text", text)
        if self.tokenizer is None:
            return self._encoded(self.vocab.spell(text.encode()), text)
        return self._encoded(self.tokenizer.encode(text, verbose=False), text)

    def chat(self, messages: str | Iterable[Message], *, system: str | None = None, **options: Any) -> Context:
        """A conversation as the tokenizer's chat template writes it, up to where the assistant's answer begins.

        Parameters
        ----------
        messages : str or list of dict
            {"role": "user", "content": "Hi"}, ...; a str is one message of the user. With a last message of the
            assistant, the answer has begun so, and goes on.
        system : str, optional
            A first message of the role "system".
        **options
            What the template reads, such as `tools` and `enable_thinking`; `chat_template`, `add_generation_prompt`
            and `continue_final_message` as of transformers.

        Raises
        ------
        ValueError
            If there is no chat template, or it refuses the messages.
        TypeError
            For an option that the template does not read.
        """
        return self._encoded(chat_ids(self.tokenizer, messages, system, options), None)

    def _encoded(self, ids: Sequence[int], text: str | None) -> Context:
        """The context of `ids`; its text is `text` if that is their bytes but for a space put before it."""
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
        """The context of just these token ids; of none, where a text begins before any special token."""
        return Context(self, self.trie.root, ids, Text(), 0)

    def adapter(self, name: str | None) -> CachedTransformer:
        """The language model that the same weights are with the adapter `name` (LoRA and its kin), or with none.

        It has a cache of its own, with the same limits, and may be used beside this one, in one program and by any
        thread. The same name gives the same object. A ValueError if the model has no such adapter.
        """
        names = () if name is None else (name,)
        if self._adapted is None:
            raise ValueError(f"adapter {name!r}: only transformers models have adapters, and this is {self!r}")
        with self._adapted.turn.lock:
            found = self._siblings.get(names)
            if found is None or not found._adapted.current:
                engine = _engine(self.model, self.vocab, self._limits[2], names)
                found = self._siblings[names] = type(self).__new__(type(self))
                vars(found).update(vars(self))
                found._use(engine)
        return found

    def clear(self) -> None:
        """Forget all that is cached, also of the other adapters of the model; contexts stay valid.

        A run, and a question outside of one, does so by itself where torch counts a change of the weights. Call it
        after changes that torch does not count (`weight.data.mul_(2)`), and when a function or an engine of one's own
        answers otherwise.
        """
        for lm in {self, *self._siblings.values()}:
            lm.evaluator.clear()

    @property
    def _adapted(self) -> Any:
        """The choice of adapters by which the engine runs its model; None if it is none of transformers."""
        return getattr(self.engine, "adapted", None)

    @property
    def stats(self) -> Stats:
        """Of all that was ever run, in every thread; a copy."""
        return self.evaluator.stats

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a CachedTransformer {NOT_PICKLED}")

    def __repr__(self) -> str:
        named = getattr(getattr(self.model, "config", None), "name_or_path", "")
        name = self.engine.name or named or type(self.model).__name__
        return f"CachedTransformer({name}, {self.vocab!r})"


def default_cache_bytes(devices: Iterable[Any], memory: Callable[[Any], tuple[int, int]] | None = None) -> int:
    """Return half of the share of what is free on CUDA devices, by `memory(device) -> (free, all)`; 2 GiB elsewhere.

    The other half is for forward passes, and for a slab that grows: for a while a tensor of it is there twice. Of
    several devices the one with the least counts, since rows may fill the budget, and all of them are on one device.
    """
    devices = [device for device in devices if getattr(device, "type", "cpu") == "cuda"]
    if not devices:
        return 2 << 30
    from torch.cuda import mem_get_info

    given = os.environ.get(DEVICE_SHARE, "1")
    try:
        share = min(1.0, positive(DEVICE_SHARE, float(given)))
    except ValueError:
        raise ValueError(f"the variable {DEVICE_SHARE} is {given!r}; a number such as 0.5 would work") from None
    return int(min((memory or mem_get_info)(device)[0] for device in devices) * share) // 2


def _engine(
    model: Any, vocab: Vocabulary, max_batch_tokens: int, adapters: tuple[str, ...] | None = None
) -> Engine:
    """`model` as an engine; with `adapters` active, or those that are now."""
    if isinstance(model, Engine):
        return model
    if hasattr(model, "config") and hasattr(model, "parameters"):
        from llmppl.lm.engines import hf

        return hf.engine(model, vocab, max_batch_tokens, adapters)
    if callable(model):
        return FunctionEngine(model, len(vocab))
    raise TypeError(
        f"{arguments.kind(model)} is no language model: give a transformers model, a function from ids to logits, or "
        "an Engine"
    )


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text, by the tokenizer, the model and its generation config, where there is such a token."""
    owners = tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None)
    given = [getattr(owner, "eos_token_id", None) for owner in owners] + [getattr(model, "eos_ids", None)]
    found = {i for ids in given for i in ([ids] if isinstance(ids, int) else ids or ())}
    return sorted(i for i in found if tokenizer.convert_ids_to_tokens(i) is not None)


def _further_eos(tokenizer: Any, ids: Iterable[int]) -> list[int]:
    """`ids`, if each is of a special token: one of text could then stand in none."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise TypeError(f"eos_ids must be a list of token ids, not {arguments.shown(ids)}")
    found = [arguments.integer("each of eos_ids", i) for i in ids]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for i in found:
        piece = tokenizer.convert_ids_to_tokens(i) if i >= 0 else None
        if piece is None:
            raise ValueError(f"eos_ids: {i} is the id of no token")
        if not (i in tokenizer.all_special_ids or (i in added and added[i].special)):
            said = f"eos_ids: {i} is {piece!r}, a token of text, and what ends a text adds nothing to it"
            raise ValueError(f"{said}: give stop=... to a ready-made program")
    return found
