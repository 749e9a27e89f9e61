"""llama.cpp as an engine: GGUF files as they are, their quantised weights included.

A context is one of llama.cpp's sequences, and sequences share the cells of what they have in common: a context that
branches off copies no keys, only marks them as its own too. The new tokens of a round run as a tree: a token that
several contexts share is one token of the batch, with the numbers of all their sequences. What is held is kept until
there is no cell or no sequence left; then contexts that were released go first, and of the others the least recently
used. Of released ones no more are kept than of others, since attention looks at every cell.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.lm.engine import Engine
from llmppl.lm.engines import gguf
from llmppl.lm.engines.llamacpp_api import KNOWN, MODEL, TYPES, Batch, Library, library
from llmppl.lm.engines.llamacpp_tree import WIDTH, Run, Sequences, key, pending
from llmppl.support.arguments import count, optional_count

_SEQUENCES = 256                                        # the most that llama.cpp has
_OUTPUTS = 256                                          # the most rows of logits of one batch
_CACHE_BYTES, _CELLS = 1 << 30, 8192                    # by default, the most bytes and tokens of the cache
_IDLE = 1024                                            # tokens that released contexts may always keep
_CHECK = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29], [3, 5, 7, 11, 13, 31, 37]]


class _Entry(NamedTuple):
    """Tokens to run one after the other, from place `first` of all `sequences`."""

    ids: bytes
    first: int
    sequences: list[int]

    @property
    def last(self) -> int:
        return self.first + len(self.ids) // WIDTH


Places = list[tuple[int, int]]                          # of one context: after which n tokens, for which row


class LlamaCpp(Engine):
    """An engine that runs a GGUF file by llama.cpp.

    Parameters
    ----------
    path : str or path
    n_ctx : int, optional
        How many tokens the cache holds, of all contexts together, and so the longest context; what `cache_bytes`
        have room for, up to 8,192, if left out.
    cache_bytes : int, optional
        1 GiB if left out.
    threads : int, optional
        As many as torch uses if left out, which heeds OMP_NUM_THREADS.
    batch_size : int
        The most tokens that run together.
    cache_type : str, optional
        Keys and values are kept as "f32" or "f16"; if left out, as "f16" where the weights are quantised, which changes
        far more, and is faster.
    """

    def __init__(
        self, path: str | Path, *, n_ctx: int | None = None, cache_bytes: int | None = None, threads: int | None = None,
        batch_size: int = 512, cache_type: str | None = None,
    ) -> None:  # fmt: skip
        n_ctx = optional_count("n_ctx", n_ctx)
        threads = optional_count("threads", threads)
        batch_size = count("batch_size", batch_size)
        if cache_type is not None and cache_type not in TYPES:
            raise ValueError(f"cache_type must be one of {', '.join(map(repr, TYPES))}, not {cache_type!r}")
        if threads is None:
            import torch

            threads = torch.get_num_threads()
        self.path = Path(path)
        self._library = library()
        self._c = self._library.c
        self._model = _load(self._library, self.path)
        self._close = weakref.finalize(self, self._c.llama_model_free, self._model)
        _supported(self._library, self._model, self.path)
        if cache_type is None:
            cache_type = "f16" if self.quantised else "f32"
        self.size: int = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        trained: int = self._c.llama_model_n_ctx_train(self._model)
        if n_ctx is None:
            each = _cell_bytes(self._c, self._model, cache_type)
            room = (_CACHE_BYTES if cache_bytes is None else cache_bytes) // each
            n_ctx = max(256, min(room, _CELLS))
        self.cells = -(-n_ctx // 256) * 256             # as llama.cpp rounds it
        self._batch_size = min(batch_size, self.cells)
        most = max(self._batch_size, _SEQUENCES)        # llama.cpp wants room for a token of each sequence
        asked = {"n_ctx": self.cells, "n_batch": most, "n_ubatch": most, "n_seq_max": _SEQUENCES,
                 "n_threads": threads, "n_threads_batch": threads}  # fmt: skip
        self._make = partial(
            self._library.make_context, self._model, asked, n_outputs_max=_OUTPUTS, n_outputs_max_per_seq=0,
            kv_unified=True, type_k=TYPES[cache_type], type_v=TYPES[cache_type],
            flash_attn_type=int(cache_type == "f16"),
        )  # fmt: skip
        self._open()
        self.max_length = min(self.cells, trained)
        ends = [self._library.metadata(self._model, f"tokenizer.ggml.{end}_token_id") for end in gguf.ENDS]
        self.eos_ids = sorted({int(each) for each in ends if each is not None})
        self.name = f"{self.path}, llama.cpp, keys and values in {cache_type}"
        self._round = self._group = 0
        self.clear()
        self._check()

    def _open(self) -> None:
        self._context = self._make()
        self._close.detach()
        self._close = weakref.finalize(self, _free, os.getpid(), self._c, self._context, self._model)
        self._memory, self._process = self._c.llama_get_memory(self._context), os.getpid()

    @property
    def quantised(self) -> bool:
        """Whether weights are: llama.cpp then quantises what they are multiplied with, and rounding is amplified."""
        return not self._library.description(self._model).endswith(("F32", "F16"))          # BF16 too

    # ---- the engine's calls

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> NDArray[np.float32]:
        if not self._close.alive:
            raise ValueError(f"the engine of {self.path} was closed")
        if self._process != os.getpid():
            self.clear()
        logits = np.empty((len(asked), self.size), dtype=np.float32)
        places: list[Places] = [[] for _ in contexts]
        for row, (i, n) in enumerate(asked):
            places[i].append((n, row))
        self._round += 1
        keys = sorted((key(ids), i) for i, ids in enumerate(contexts))          # neighbours share most
        if self._round % 2:
            keys.reverse()                              # where not all fit: those first that came last
        for context, _ in keys:
            run, n = self._held.find(context)
            if n:
                run.leaf().used = self._round
        if keys and (longest := max(len(context) for context, _ in keys) // WIDTH) > self.cells:
            raise ValueError(f"a context of {longest} tokens does not fit into the cache: give n_ctx={longest} or more")
        while keys:
            keys = self._some(keys, places, logits)
        return logits

    def release(self, contexts: list[list[int]]) -> None:
        for ids in contexts:
            run, n = self._held.find(key(ids))
            if n == len(ids):
                run.release(n)
        self._tidy()

    def _tidy(self) -> None:
        """Forget released contexts, the oldest first, where they are the greater part."""
        released = [leaf for leaf in self._held.leaves.values() if leaf.keep < leaf.end]
        idle = sum(leaf.end - leaf.keep for leaf in released)
        for leaf in sorted(released, key=self._worth):
            if idle <= max(_IDLE, self._held.tokens - idle):
                return
            idle -= leaf.end - leaf.keep
            self._cut(leaf, leaf.keep)

    def clear(self) -> None:
        if self._process != os.getpid():                # of a fork: nobody knows what the context was at
            self._open()
        self._c.llama_memory_clear(self._memory, False)
        self._held = Sequences()
        self._free = list(range(_SEQUENCES - 1, -1, -1))

    def close(self) -> None:
        """Free the model and its cache."""
        self._close()

    # ---- a group: contexts that fit into the cache together

    def _some(
        self, keys: list[tuple[bytes, int]], places: list[Places], logits: NDArray[np.float32]
    ) -> list[tuple[bytes, int]]:
        """Run as many of the first `keys` as fit, fill in their `logits`, and return the others."""
        self._group += 1
        self._spare = 0                                 # cells for what is run again
        group = []
        for context, i in keys:
            found = self._fit(context, sorted(n for n, _ in places[i]))
            if found is None:
                break
            group.append((*found, places[i]))
        runs = pending(leaf for leaf, _, _ in group)
        entries = [
            _Entry(run.ids[(run.done - run.start) * WIDTH :], run.done, [leaf.sequence for leaf in run.leaves()])
            for run in runs
        ]
        begins: dict[int, int] = {}                     # by run or entry, the place of its token 0 in the batch
        size = 0
        for owner, entry in zip(runs, entries, strict=True):
            begins[id(owner)] = size - entry.first
            size += len(entry.ids) // WIDTH
        wanted = []
        for leaf, again, asked in group:
            for entry in again:
                begins[id(entry)] = size - entry.first
                size += len(entry.ids) // WIDTH
                entries.append(entry)
            for n, row in asked:
                run = next(run for run in leaf.path() if run.start < n)
                run.want(n)
                ran = next((each for each in again if each.first < n <= each.last), run)
                wanted.append((begins[id(ran)] + n - 1, row))
        self._run(entries, wanted, logits)
        for run in runs:
            run.done = run.end
        for _, again, _ in group:
            for entry in again:
                self._forget(*entry.sequences)
        return keys[len(group) :]

    def _fit(self, context: bytes, asked: list[int]) -> tuple[Run, list[_Entry]] | None:
        """The leaf of `context`, now in the tree, and what is asked of the part that is held, to be run again.

        None if there is no room beside the group under way.
        """
        length = len(context) // WIDTH
        while True:
            run, n = self._held.find(context)
            held = min(n, run.held())
            spans = _spans([place for place in asked if place <= held])
            at_end = run.sequence >= 0 and n == run.end
            sequences = len(spans) + (n < length and not at_end)
            cells = length - n + sum(last - first + 1 for first, last in spans)
            short = len(self._free) < sequences
            if not short and self._held.tokens + self._spare + cells <= self.cells:
                break
            if not self._give_up(run, short, spans[0][0] - 1 if spans else n):
                return None
        source = run.leaf().sequence
        again = [
            _Entry(context[(first - 1) * WIDTH : last * WIDTH], first - 1, [self._branch(source, first - 1)])
            for first, last in spans
        ]
        self._spare += sum(last - first + 1 for first, last in spans)
        if n == length:
            leaf = run.leaf()
        elif at_end:
            leaf = run
            self._held.extend(run, context)
        else:
            leaf = self._held.branch(run, n, context, self._branch(source, held))
        leaf.used, leaf.group = self._round, self._group
        return leaf, again

    def _branch(self, source: int, n: int) -> int:
        """A new sequence with the first n tokens of another."""
        sequence = self._free.pop()
        if n:
            self._c.llama_memory_seq_cp(self._memory, source, sequence, 0, n)
        return sequence

    def _forget(self, *sequences: int) -> None:
        for sequence in sequences:
            self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._free.append(sequence)

    def _give_up(self, run: Run, sequence: bool, n: int) -> bool:
        """Free a sequence, or some cells, for a context that goes on after the first n tokens of the path to `run`."""
        leaves = [leaf for leaf in self._held.leaves.values() if leaf.group != self._group and leaf is not run]
        if leaves:
            leaf = min(leaves, key=self._worth)
            self._cut(leaf, leaf.keep if leaf.keep < leaf.end and not sequence else 0)
            return True
        if run.sequence < 0 or run.group == self._group or n >= run.end:
            return False
        self._cut(run, n)                               # what it has after that
        return True

    def _worth(self, leaf: Run) -> tuple[bool, bool, int]:
        return leaf.used == self._round, leaf.keep == leaf.end, leaf.used

    def _cut(self, leaf: Run, n: int) -> None:
        """Forget what a leaf has after the first n tokens of its path."""
        if n > leaf.start:
            self._c.llama_memory_seq_rm(self._memory, leaf.sequence, n, -1)
        else:
            self._forget(leaf.sequence)
        self._held.cut(leaf, n)

    # ---- batches

    def _run(self, entries: list[_Entry], wanted: list[tuple[int, int]], logits: NDArray[np.float32]) -> None:
        """Run the tokens of `entries`; `wanted` says which of them gives which row of `logits`."""
        if not entries:
            return
        sizes = [len(entry.ids) // WIDTH for entry in entries]
        tokens = np.frombuffer(b"".join(entry.ids for entry in entries), dtype=np.int32)
        positions = np.concatenate([
            np.arange(entry.first, entry.first + size, dtype=np.int32)
            for entry, size in zip(entries, sizes, strict=True)
        ])
        counts = np.array([len(entry.sequences) for entry in entries], dtype=np.int32)
        sequences = np.concatenate([np.array(entry.sequences, dtype=np.int32) for entry in entries])
        starts = sequences.ctypes.data + sequences.itemsize * (np.cumsum(counts, dtype=np.int64) - counts)
        each, where = np.repeat(counts, sizes), np.repeat(starts, sizes)
        places, rows = np.array(sorted(wanted), dtype=np.int64).reshape(-1, 2).T
        outputs, nth = np.unique(places, return_inverse=True)
        flags = np.zeros(len(tokens), dtype=np.int8)
        flags[outputs] = 1
        start = given = 0
        while start < len(tokens):
            stop = min(start + self._batch_size, len(tokens))
            if given + _OUTPUTS < len(outputs):
                stop = min(stop, int(outputs[given + _OUTPUTS]))
            arrays = (array[start:stop].ctypes.data for array in (tokens, positions, each, where, flags))
            token, position, count, sequence, flag = arrays
            status = self._c.llama_decode(
                self._context, Batch(stop - start, token, None, position, count, sequence, flag)
            )
            if status:
                raise RuntimeError(f"llama.cpp gave up on {self.path} (status {status}): {self._library.why()}")
            self.tokens += stop - start
            after = int(np.searchsorted(outputs, stop))
            if after > given:
                found = np.ctypeslib.as_array(self._c.llama_get_logits(self._context), (after - given, self.size))
                here = (nth >= given) & (nth < after)
                logits[rows[here]] = found[nth[here] - given]
            start, given = stop, after

    def _check(self) -> None:
        """A ValueError if contexts that share and branch give other logits than each alone."""
        contexts = [[i % self.size for i in ids] for ids in _CHECK]
        alone = []
        for ids in contexts:
            self.clear()
            alone.append(self.forward([ids], [(0, len(ids))])[0])
        self.clear()
        self.forward(contexts[:1], [(0, 6)])
        shared = self.forward(contexts, [(i, len(ids)) for i, ids in enumerate(contexts)])
        self.clear()
        self.tokens = 0
        off, spread = np.abs(shared - np.stack(alone)).max(), np.std(alone)
        if not off <= 0.05 * spread:
            raise ValueError(
                f"{self.path}: contexts that share a prefix give other logits than each alone, by {off / spread:.2g} "
                'of their spread, so that its cache cannot be used; engine="transformers" recomputes'
            )


def load(source: gguf.Source, **options: Any) -> tuple[LlamaCpp, Any]:
    """(engine, tokenizer) of a GGUF file."""
    engine = LlamaCpp(source.file, **options)
    engine.name = engine.name.replace(str(source.file), str(source))
    return engine, gguf.tokenizer(source.file)


def _load(lib: Library, path: Path) -> Any:
    """The model of a file; a ValueError with the reason if there is none."""
    gguf.checked(path)
    lib.why()
    model = lib.c.llama_model_load_from_file(str(path).encode(), lib.block("model", MODEL, check_tensors=True))
    if not model:
        raise ValueError(
            f"llama.cpp does not load {path}: {lib.why()}. It is damaged, or of an architecture that {KNOWN} does not "
            f"know. {gguf.AGAIN}"
        )
    return model


def _cell_bytes(c: Any, model: Any, cache_type: str) -> int:
    """Bytes of the keys and values of a token."""
    wide = c.llama_model_n_embd(model) // c.llama_model_n_head(model) * c.llama_model_n_head_kv(model)
    return int(c.llama_model_n_layer(model) * 2 * wide * (4 if cache_type == "f32" else 2)) or 1


def _supported(lib: Library, model: Any, path: Path) -> None:
    """A ValueError if contexts cannot share what the model keeps of them, or if it has no next token."""
    kind = lib.metadata(model, "general.architecture")
    for asked, why in (
        ("is_recurrent", "keeps a recurrent state, which contexts cannot share"),
        ("is_hybrid", "keeps a recurrent state in some layers, which contexts cannot share"),
        ("is_diffusion", "does not read from left to right"),
        ("has_encoder", "has an encoder"),
    ):
        if getattr(lib.c, f"llama_model_{asked}")(model):
            raise ValueError(f'{path}: a model of architecture {kind!r} {why}; give engine="transformers"')


def _free(process: int, c: Any, context: Any, model: Any) -> None:
    if process == os.getpid():                          # else they are copies
        c.llama_free(context)
        c.llama_model_free(model)


def _spans(places: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as the first and last of those that follow one another."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and place <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], place)
        else:
            spans.append((place, place))
    return spans
