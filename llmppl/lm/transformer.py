"""CachedTransformer: a language model that runs each token of each distinct context once.

Questions of many particles are answered together: what is missing of the contexts asked for is cut into chains of new
tokens, each chain continues a context whose keys and values are kept, and chains are the rows of one forward pass. A
chain that continues another chain waits for the next pass; equal prefixes are one row.

One lm may be used from several threads: it answers one round at a time, and every thread's rounds are its own. A round
that an interrupt ends leaves the cache empty, and the contexts as they are.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from llmppl import arguments
from llmppl.arguments import count
from llmppl.exclusive import Exclusive
from llmppl.lm.cache import Backend, Batch, Node, Row, Store, Trie
from llmppl.lm.context import NOT_PICKLED, Context
from llmppl.runtime import ContextTooLong, Stats
from llmppl.tokens import Text, Vocabulary

_LARGE = 1e6                            # the log of a sum of probabilities is added to logits only below this
_Prefetch = tuple[weakref.ref[Any], weakref.ref[Context]]              # who asks, and for what
Question = tuple[Node, ...]             # (n,): the row of n; (n_0, ..., n_k): log p(n_i | n_{i-1}) for i = 1 .. k


class _Here(threading.local):
    """What belongs to one thread: the questions of its next round, and what was done for it.

    done : dict of int to Stats, of all threads by their identifiers (which Python uses again)
    """

    def __init__(self, done: dict[int, Stats]) -> None:
        self.prefetches: list[_Prefetch] = []
        self.stats = done.setdefault(threading.get_ident(), Stats())


@dataclass
class _Need:
    """What is wanted at a node: its row, and the log-probabilities of some children."""

    row: bool = False
    children: list[Node] = field(default_factory=list)


class CachedTransformer:
    """A language model with a cache of everything it has computed, shared by all who use it.

    Parameters
    ----------
    model : transformers model, or Callable, or Backend
        A callable takes the list of token ids read so far and returns (V,) logits of the next token, one for each
        token of the vocabulary. (The head of a transformers model may be padded, or too small: ids that no token
        stands behind are ruled out.)
    tokenizer : transformers tokenizer, or Vocabulary
        A bare `Vocabulary` encodes text by the fewest tokens that spell it.
    cache_bytes : int
        The most bytes that keys, values and kept log-probabilities may take together.
    max_batch_tokens : int
        The most tokens, rows times longest context, that one forward pass may read. A longer batch is cut.

    Attributes
    ----------
    vocab : Vocabulary
    trie : Trie
        `print(lm.trie)` draws what is cached.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        cache_bytes: int = 2 << 30,
        max_batch_tokens: int = 1 << 16,
    ) -> None:
        cache_bytes = count("cache_bytes", cache_bytes, least=0)
        self.model, self.max_batch_tokens = model, count("max_batch_tokens", max_batch_tokens)
        if isinstance(tokenizer, Vocabulary):
            self.tokenizer, self.vocab = None, tokenizer
        elif not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"tokenizer must be a transformers tokenizer or a Vocabulary, not {tokenizer!r}")
        else:
            from llmppl.lm import hf

            self.tokenizer = tokenizer
            self.vocab = Vocabulary.from_tokenizer(tokenizer, eos_ids=hf.eos_ids(model, tokenizer))
        self.backend: Backend = _backend(model, self.vocab)
        self._done: dict[int, Stats] = {}
        self.here = _Here(self._done)
        self.store = Store(cache_bytes, self.backend.slot_bytes, self.backend.reserve)
        self._exclusive = Exclusive(self._renew, "a language model")
        self.trie = Trie(self.vocab.tokens, self.store, self._exclusive)
        self._paths: dict[Node, NDArray[np.int64]] = {}         # slots of the contexts of the last rounds
        self._ran: list[Node] = []                      # whose slots the round under way has written
        self._round = 0
        self._unknown = np.flatnonzero(~self.vocab.known)
        self._warned = False

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | None = None,
        *,
        dtype: Any = None,
        device: Any = None,
        device_map: Any = None,
        cache_bytes: int = 2 << 30,
        max_batch_tokens: int = 1 << 16,
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Parameters
        ----------
        name : str or path, optional
            A hub id or a local folder; the model that ships with the package if left out.
        dtype : torch.dtype or str, optional
            float32 on a CPU and the checkpoint's own elsewhere, if left out.
        device : str or torch.device, optional
            Where to put the whole model.
        device_map : optional
            How accelerate is to spread it, e.g. "auto"; not together with `device`.
        **options
            Passed on to transformers' `from_pretrained`.

        Raises
        ------
        FileNotFoundError
            There is no such model here, nor, or not from here, on the hub.
        ValueError
            The weights that ship with the package are damaged.
        """
        from llmppl.lm import hf

        model, tokenizer = hf.load(name, dtype=dtype, device=device, device_map=device_map, **options)
        return cls(model, tokenizer, cache_bytes=cache_bytes, max_batch_tokens=max_batch_tokens)

    # ---- contexts

    def context(self, text: str = "") -> Context:
        """`text` as the tokenizer encodes it, its own special tokens included.

        An empty encoding becomes the BOS token.

        Raises
        ------
        ValueError
            If the encoding is empty and the tokenizer has no BOS; if the model cannot read so long a context; if the
            text holds a lone surrogate, which has no bytes.
        """
        arguments.text("text", text)
        if self.tokenizer is None:
            return self._at(self.vocab.spell(text.encode()), text)
        return self._at(self.tokenizer.encode(text, verbose=False), text)

    def chat(self, messages: Sequence[dict[str, str]]) -> Context:
        """The tokenizer's chat template applied to `messages`, up to where the assistant's answer begins."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("this tokenizer has no chat template; write the conversation out and use context(text)")
        template: Any = self.tokenizer
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return self._at(template.apply_chat_template(list(messages), **options), None)

    def _at(self, ids: Sequence[int], text: str | None) -> Context:
        """The context of `ids`; its text is `text` if that is their bytes but for a space put before it."""
        if not ids:
            bos = getattr(self.tokenizer, "bos_token_id", None)
            if bos is None:
                raise ValueError("an empty prompt needs a BOS token, and this tokenizer has none: give some text")
            ids = [bos]
        ids = [int(self.vocab.token(int(i))) for i in ids]
        data = b"".join(self.vocab.tokens[i] for i in ids)
        start = Text(text) if text is not None and data == b" " + text.encode() else Text(data)
        context = self.enter(self.trie.root, ids, start, len(ids))
        self.check_length(context)
        return context

    def enter(self, node: Node, ids: Iterable[int], start: Text, offset: int) -> Context:
        """The context that continues the one of `node` by `ids`; `start` is the text of its first `offset` tokens."""
        context = Context(self, node, start, offset)
        self._exclusive(self.trie.place, context, ids)
        return context

    def check_length(self, context: Context, but: int = 0) -> None:
        """ContextTooLong if the model cannot read so long a context, its last `but` tokens left out."""
        most = self.backend.max_length
        if most is not None and len(context) - but > most:
            raise ContextTooLong(
                f"a context of {len(context) - but} tokens, and the model reads at most {most}: shorten the prompt, or "
                f"bound the program with max_tokens or max_steps ({context!r})"
            )

    # ---- answers

    @property
    def stats(self) -> Stats:
        """Of all that was ever run, in every thread; a copy."""
        return sum(list(self._done.values()), Stats())

    def done(self) -> Stats:
        """What was run for the calling thread; a copy."""
        return replace(self.here.stats)

    def cached(self, question: Question) -> Any | None:
        """The cached answer, or None. It is right whenever it is there, so no thread waits for another."""
        node, *after = question
        if not after:
            row = node.row
            if row is not None:
                self.store.touch_row(node)
                self.here.stats.hits += 1
            return row
        log_probs = [child.log_prob for child in after]
        if None in log_probs:
            return None
        self.here.stats.hits += 1
        return log_probs

    def prefetch(self, asker: object, context: Context) -> None:
        """Compute the row of `context` in this thread's next round, if it and `asker` live until then."""
        self.here.prefetches.append((weakref.ref(asker), weakref.ref(context)))

    def evaluate(self, questions: list[Question]) -> list[Any]:
        """Rows and log-probabilities, with everything that this thread has prefetched since its last round."""
        prefetches, self.here.prefetches = self.here.prefetches, []
        answers: list[Any] = self._exclusive(self._evaluate, questions, prefetches)
        return answers

    def _evaluate(self, questions: list[Question], prefetches: list[_Prefetch]) -> list[Any]:
        start = perf_counter()
        self._round += 1
        self.trie.settle()                              # and not again before the round ends: its nodes stay
        needs: dict[Node, _Need] = {}
        rows: dict[Node, Row] = {}
        for node, *after in questions:
            if not after:
                needs.setdefault(node, _Need()).row = True
            for parent, child in zip((node, *after), after, strict=False):
                if child.log_prob is None:
                    needs.setdefault(parent, _Need()).children.append(child)
        for asker, place in prefetches:
            context = place()
            if context is not None and asker() is not None:
                needs.setdefault(context.node, _Need()).row = True
        for node, row in [(node, node.row) for node in needs if node.row is not None]:
            self._give(row, needs.pop(node), node, rows)
        computed = len(needs)
        while needs:
            self._forward(needs, rows)
        self._ran.clear()
        stats = self.here.stats
        stats.rounds += 1
        stats.rows += computed
        stats.hits += max(0, len(questions) - computed)
        stats.seconds_lm += perf_counter() - start
        return [[child.log_prob for child in after] if after else rows[node] for node, *after in questions]

    def _forget(self) -> None:
        """Give up what this round has run, which is not known to be right; all else is."""
        for node in self._ran:
            if node.slot >= 0:
                self.store.forget(node)
        self._paths.clear()
        self._ran.clear()
        self._exclusive.in_order()

    def _renew(self) -> None:
        """Forget all that is cached; the contexts that live stay."""
        self._paths.clear()
        self._ran.clear()
        self.store.clear()
        self.trie.renew()

    @staticmethod
    def _give(row: Row, need: _Need, node: Node, rows: dict[Node, Row]) -> None:
        """Hand out what `need` wants of `row`."""
        if need.row:
            rows[node] = row
        for child in need.children:
            child.log_prob = float(row.logits[child.token]) - row.log_z

    def _forward(self, needs: dict[Node, _Need], rows: dict[Node, Row]) -> None:
        """Run one forward pass towards `needs`, and take from them what it answers."""
        chains = self._chains(needs) if self.backend.slot_bytes else None
        if chains:
            chains = self._fitting(chains)
        if chains:
            self._run(chains, needs, rows, True)
        else:                                           # nothing can be kept: whole contexts, all of one length
            if self.backend.slot_bytes and not self._warned:
                self._warned = True
                warnings.warn(
                    f"cache_bytes={self.store.budget} does not hold a context of {max(n.depth for n in needs)} tokens "
                    f"at {self.backend.slot_bytes} bytes each; such contexts are recomputed from their start",
                    stacklevel=2,
                )
            ends = sorted(needs, key=lambda node: -node.depth)
            most = max(1, self.max_batch_tokens // ends[0].depth)
            inside: set[Node] = set()
            whole: list[list[Node]] = []
            for end in ends:
                if end not in inside and end.depth == ends[0].depth and len(whole) < most:
                    whole.append(list(end.path())[::-1])
                    inside.update(whole[-1])
            self._run(whole, needs, rows, False)

    def _chains(self, needs: Iterable[Node]) -> list[list[Node]]:
        """What has to run now: runs of new nodes that each continue a node with a slot (or the root)."""
        claimed: set[Node] = set()
        chains = []
        for end in sorted(needs, key=lambda node: -node.depth):
            node = end
            chain: list[Node] = []
            if node.slot >= 0:                          # its row was given up: run its last token again
                chain.append(node)
                assert node.parent is not None
                node = node.parent
            while node.slot < 0 and node.parent is not None and node not in claimed:
                chain.append(node)
                node = node.parent
            if node not in claimed and chain:
                chain = chain[::-1][: self.max_batch_tokens]
                claimed.update(chain)
                chains.append(chain)
        return chains

    def _fitting(self, chains: list[list[Node]]) -> list[list[Node]]:
        """The first chains that go together into one pass and into the store; none if not even one does."""
        first, *others = chains                         # the first need always gets on, so that all are answered
        group, longest = [first], first[-1].depth
        for chain in sorted(others, key=len, reverse=True):
            deepest = max(longest, chain[-1].depth)
            alike = len(first) <= 2 * len(chain) and len(chain) <= 2 * len(first)
            if alike and (len(group) + 1) * deepest <= self.max_batch_tokens:
                group.append(chain)
                longest = deepest
        while group:
            wanted = sum(node.slot < 0 for chain in group for node in chain)
            before = self.store.evictions
            have = self.store.room(wanted, keep=[chain[-1] for chain in group])
            if self.store.evictions > before:
                self._paths.clear()
            if have >= wanted:
                return group
            group = group[: len(group) // 2]
        return []

    def _run(self, chains: list[list[Node]], needs: dict[Node, _Need], rows: dict[Node, Row], slots: bool) -> None:
        """One forward pass over `chains`, each of which continues the parent of its first node."""
        lengths = np.array([len(chain) for chain in chains])
        starts = np.array([chain[0].depth - 1 for chain in chains])
        tokens = np.zeros((len(chains), int(lengths.max())), dtype=np.int64)
        for i, chain in enumerate(chains):
            tokens[i, : len(chain)] = [node.token for node in chain]
        asked = [(i, j) for i, chain in enumerate(chains) for j, node in enumerate(chain) if node in needs]
        nodes = [chains[i][j] for i, j in asked]
        if slots:
            for node in itertools.chain(*chains):
                self._ran.append(node)
                if node.slot < 0:
                    self.store.take(node)
        paths = self._slots(chains, int((starts + lengths).max())) if slots else None
        try:
            logits = self.backend.forward(Batch(tokens, starts, lengths, paths, asked))
            laws = [self._row(values, node) for values, node in zip(logits, nodes, strict=True)]
        except Exception:                               # the model's own, or it gave no distribution
            self._forget()
            raise
        self.here.stats.tokens += int(lengths.sum())
        for chain in chains:
            chain[-1].used = self._round
        for node, row in zip(nodes, laws, strict=True):
            need = needs.pop(node, None)
            if need is not None:                        # else another row answered the same node
                self._give(row, need, node, rows)
                if need.row or any(child.slot < 0 for child in need.children):     # nothing else may keep the child
                    self.store.put_row(node, row)

    def _slots(self, chains: list[list[Node]], longest: int) -> NDArray[np.int64]:
        """(B, longest) slots of the whole context of each chain, right-padded with its first."""
        slots = np.empty((len(chains), longest), dtype=np.int64)
        for i, chain in enumerate(chains):
            end, start = chain[-1], chain[0].parent
            assert start is not None
            before = self._paths.get(start)
            if before is None:
                before = np.array([node.slot for node in start.path()][::-1], dtype=np.int64)
            slots[i, : start.depth] = before
            slots[i, start.depth : end.depth] = [node.slot for node in chain]
            slots[i, end.depth :] = slots[i, 0]         # never another's: NaN spreads through a mask
        if len(self._paths) * longest > 1 << 20:
            self._paths.clear()
        for i, chain in enumerate(chains):
            self._paths[chain[-1]] = slots[i, : chain[-1].depth].copy()
        return slots

    def _row(self, values: NDArray[Any], node: Node) -> Row:
        """The law of the next token from the model's output; ids that no token stands behind are impossible."""
        size = len(self.vocab)
        logits = values[:size].copy() if len(values) >= size else np.full(size, -np.inf, dtype=values.dtype)
        logits[: len(values)] = values[:size]
        logits[self._unknown] = -np.inf
        top, log_z = float(logits.max()), math.nan
        if abs(top) > _LARGE and math.isfinite(top):    # log_z would lose the digits that tell the sum
            logits, top = logits - np.asarray(top, logits.dtype), 0.0
        if math.isfinite(top):
            weights = np.subtract(logits, top, dtype=np.float64)
            log_z = top + math.log(float(np.exp(weights, out=weights).sum()))
        if math.isnan(log_z):
            kind = "NaN" if np.isnan(values).any() else "+inf" if top == math.inf else "-inf alone"
            at = Context(self, node, Text(), 0)
            raise FloatingPointError(f"the model's logits after {at!r} hold {kind}: they give no law of the next token")
        logits.setflags(write=False)
        return Row(logits, log_z)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a CachedTransformer {NOT_PICKLED}")

    def __repr__(self) -> str:
        name = getattr(getattr(self.model, "config", None), "name_or_path", "") or type(self.model).__name__
        return f"CachedTransformer({name}, {self.vocab!r})"


def _backend(model: Any, vocab: Vocabulary) -> Backend:
    if hasattr(model, "forward") and hasattr(model, "slot_bytes"):
        return model                                    # type: ignore[no-any-return]
    if hasattr(model, "config"):
        from llmppl.lm import hf

        if hf.is_transformer(model):
            return hf.backend(model, vocab)
    if callable(model):
        return _Function(model, len(vocab))
    raise TypeError(f"{model!r} is no language model: give a transformers model, or a function from ids to logits")


class _Function:
    """Any function from token ids to logits, as a backend that keeps nothing."""

    slot_bytes: int = 0
    max_length: int | None = None

    def __init__(self, function: Callable[[list[int]], Any], size: int) -> None:
        self.function, self.size = function, size

    def reserve(self, slots: int) -> None:
        raise NotImplementedError

    def forward(self, batch: Batch) -> NDArray[Any]:
        return np.stack([self._logits(batch.tokens[i, : j + 1].tolist()) for i, j in batch.asked])

    def _logits(self, ids: list[int]) -> NDArray[np.float64]:
        logits = np.asarray(self.function(ids), dtype=np.float64)
        if logits.shape != (self.size,):
            raise ValueError(
                f"the model's function gave an array of shape {logits.shape} after the tokens {ids}; it must give one "
                f"logit for each of the {self.size} tokens of the vocabulary, shape ({self.size},)"
            )
        return logits
