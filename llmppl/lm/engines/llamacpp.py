"""llama.cpp as an engine, for GGUF files with quantised weights or not.

A context is one of llama.cpp's *sequences*, and sequences share the cells (keys and values) of common prefixes. The new
tokens of a round run as a tree: a token that several contexts share is one token of the batch, with the numbers of all
their sequences. When no cell or no sequence is left, released contexts are evicted first, then the least recently used
ones. Released contexts hold at most as many cells as the others, because attention reads every cell.

The engine calls the C API of llama.cpp by ctypes, from the shared library in the package xllamacpp. The structs of
llama.h change from release to release. A struct of parameters is a *block* of bytes here, with the offsets of one
release: its defaults are compared with those of the library, and another layout is refused.
Source: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_void_p
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.lm.engine import Engine
from llmppl.lm.engines.loading import GGUF_ENDS, gguf_file, gguf_name, gguf_tokenizer
from llmppl.support.arguments import count, optional_count

_SEQUENCES = 256                                        # llama.cpp's maximum
_OUTPUTS = 256                                          # most rows of logits of one batch
_CACHE_BYTES, _CELLS = 1 << 30, 8192                    # defaults: most bytes and tokens of the cache
_IDLE = 1024                                            # number of tokens that released contexts may always keep
_CHECK = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29], [3, 5, 7, 11, 13, 31, 37]]
WIDTH = 4                                               # bytes of a token


class _Entry(NamedTuple):
    """Tokens to run, from position `first` on, in all of `sequences`."""

    ids: bytes
    first: int
    sequences: list[int]

    @property
    def size(self) -> int:
        return len(self.ids) // WIDTH


Item = tuple[bytes, int]                                # (context, row): the logits after the context are that row


class LlamaCpp(Engine):
    """Engine that runs a GGUF file by llama.cpp.

    Parameters
    ----------
    path : str or path
    n_ctx : int, optional
        Number of tokens in the cache, of all contexts together; no context is longer. Default: as many as
        `cache_bytes` hold, at most 8,192.
    cache_bytes : int, optional
        Most bytes of keys and values. Default: 1 GiB.
    threads : int, optional
        Default: as many as torch uses, which reads OMP_NUM_THREADS.
    batch_size : int
        Most tokens that run together.
    cache_type : str, optional
        Format of keys and values, "f32" or "f16". Default: "f16" if the weights are quantised, which is faster and
        changes probabilities far less than the quantisation does; otherwise "f32".
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
        if cache_type is None:
            cache_type = "f16" if self.quantised else "f32"
        self.size: int = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        trained: int = self._c.llama_model_n_ctx_train(self._model)
        if n_ctx is None:
            most_bytes = _CACHE_BYTES if cache_bytes is None else cache_bytes
            n_ctx = max(256, min(most_bytes // _cell_bytes(self._c, self._model, cache_type), _CELLS))
        self.cells = -(-n_ctx // 256) * 256             # as llama.cpp rounds it
        self._batch_size = min(batch_size, self.cells)
        most = max(self._batch_size, _SEQUENCES)        # llama.cpp needs room for a token of each sequence
        self._make = partial(
            self._library.make_context, self._model, n_ctx=self.cells, n_batch=most, n_ubatch=most,
            n_seq_max=_SEQUENCES, n_threads=threads, n_threads_batch=threads, n_outputs_max=_OUTPUTS,
            n_outputs_max_per_seq=0, kv_unified=True, type_k=TYPES[cache_type], type_v=TYPES[cache_type],
            flash_attn_type=int(cache_type == "f16"),
        )  # fmt: skip
        self._open()
        self.max_length = min(self.cells, trained)
        ends = [self._library.metadata(self._model, f"tokenizer.ggml.{end}_token_id") for end in GGUF_ENDS]
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
        """True if the weights are quantised. llama.cpp then quantises activations, too, which amplifies rounding."""
        return not self._library.description(self._model).endswith(("F32", "F16"))          # BF16 too

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> NDArray[np.float32]:
        if not self._close.alive:
            raise ValueError(f"the engine of {self.path} was closed")
        if self._process != os.getpid():
            self.clear()
        logits = np.empty((len(asked), self.size), dtype=np.float32)
        self._round += 1
        keys = [key(ids) for ids in contexts]
        items = sorted((keys[i][: n * WIDTH], row) for row, (i, n) in enumerate(asked))         # neighbours share most
        if self._round % 2:
            items.reverse()                             # if not all fit, the last of one round are first in the next
        for context, _ in items:
            segment, n = self._held.find(context)
            if n:
                segment.leaf().used = self._round
        if (longest := max((n for _, n in asked), default=0)) > self.cells:
            raise ValueError(f"a context of {longest} tokens does not fit into the cache: give n_ctx={longest} or more")
        while items:
            items = self._run_group(items, logits)
        return logits

    def release(self, contexts: list[list[int]]) -> None:
        """Note what may go, and evict the oldest of it while it holds more tokens than the rest."""
        for ids in contexts:
            segment, n = self._held.find(key(ids))
            for each in segment.subtree() if n == len(ids) else ():
                each.keep = max(each.start, min(each.keep, n - 1))
        released = [leaf for leaf in self._held.leaves.values() if leaf.keep < leaf.end]
        idle = sum(leaf.end - leaf.keep for leaf in released)
        for leaf in sorted(released, key=self._priority):
            if idle <= max(_IDLE, self._held.tokens - idle):
                return
            idle -= leaf.end - leaf.keep
            self._cut(leaf, leaf.keep)

    def clear(self) -> None:
        if self._process != os.getpid():                # in a fork the context may be in any state
            self._open()
        self._c.llama_memory_clear(self._memory, False)
        self._held = Sequences()
        self._free = list(range(_SEQUENCES - 1, -1, -1))

    def close(self) -> None:
        """Free the model and its cache."""
        self._close()

    def _run_group(self, items: list[Item], logits: NDArray[np.float32]) -> list[Item]:
        """Run as many of the first `items` as fit, write their rows of `logits`, and return the other items."""
        self._group += 1
        self._spare = 0                                 # number of cells for tokens that run again
        group: list[tuple[Segment, _Entry | None]] = []
        for context, _ in items:
            fitted = self._fit(context)
            if fitted is None:
                break
            group.append(fitted)
        new = {
            segment: _Entry(
                segment.ids[(segment.done - segment.start) * WIDTH :], segment.done,
                [leaf.sequence for leaf in segment.leaves()],
            )
            for segment in pending(leaf for leaf, _ in group)
        }  # fmt: skip
        repeated = [again for _, again in group if again is not None]
        entries = [*new.values(), *repeated]
        offsets = accumulate((entry.size for entry in entries), initial=0)
        begins = {id(entry): offset - entry.first for entry, offset in zip(entries, offsets, strict=False)}
        places = []
        for (context, row), (leaf, again) in zip(items, group, strict=False):
            n = len(context) // WIDTH
            segment = next(each for each in leaf.path() if each.start < n)
            segment.keep = max(segment.keep, n)
            places.append((begins[id(again or new[segment])] + n - 1, row))
        self._run(entries, places, logits)
        for segment in new:
            segment.done = segment.end
        for entry in repeated:
            self._free_sequence(entry.sequences[0])
        return items[len(group) :]

    def _fit(self, context: bytes) -> tuple[Segment, _Entry | None] | None:
        """Add `context` to the tree. Return its leaf, and its last token if that is cached and has to run again.

        None if there is no room beside the contexts of this group.
        """
        length = len(context) // WIDTH
        while True:
            segment, n = self._held.find(context)
            cached = min(n, segment.held())
            repeats = cached == length
            at_end = segment.sequence >= 0 and n == segment.end
            short = not self._free and (repeats or (n < length and not at_end))
            if not short and self._held.tokens + self._spare + length - n + repeats <= self.cells:
                break
            if not self._evict(segment, short, n - repeats):
                return None
        leaf, again = segment.leaf(), None
        if repeats:
            self._spare += 1
            again = _Entry(context[-WIDTH:], length - 1, [self._branch(leaf.sequence, length - 1)])
        elif n < length and at_end:
            self._held.extend(leaf, context)
        elif n < length:
            leaf = self._held.branch(segment, n, context, self._branch(leaf.sequence, cached))
        leaf.used, leaf.group = self._round, self._group
        return leaf, again

    def _branch(self, source: int, n: int) -> int:
        """Return a new sequence with the first n tokens of `source`."""
        sequence = self._free.pop()
        if n:
            self._c.llama_memory_seq_cp(self._memory, source, sequence, 0, n)
        return sequence

    def _free_sequence(self, sequence: int) -> None:
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free.append(sequence)

    def _evict(self, segment: Segment, sequence: bool, n: int) -> bool:
        """Free a `sequence`, or some cells, for a context that shares n tokens with the path to `segment`.

        Return False if nothing can be freed.
        """
        leaves = [leaf for leaf in self._held.leaves.values() if leaf.group != self._group and leaf is not segment]
        if leaves:
            leaf = min(leaves, key=self._priority)
            self._cut(leaf, leaf.keep if leaf.keep < leaf.end and not sequence else 0)
            return True
        if segment.sequence < 0 or segment.group == self._group or n >= segment.end:
            return False
        self._cut(segment, n)
        return True

    def _priority(self, leaf: Segment) -> tuple[bool, bool, int]:
        """Return the rank of `leaf` for eviction; the smallest goes first."""
        return leaf.used == self._round, leaf.keep == leaf.end, leaf.used

    def _cut(self, leaf: Segment, n: int) -> None:
        """Remove the tokens of `leaf` after the first n of its path; the whole leaf if it has none before."""
        if n > leaf.start:
            self._c.llama_memory_seq_rm(self._memory, leaf.sequence, n, -1)
        else:
            self._free_sequence(leaf.sequence)
        self._held.cut(leaf, n)

    def _run(self, entries: list[_Entry], asked: list[tuple[int, int]], logits: NDArray[np.float32]) -> None:
        """Run the tokens of `entries`. For each (place, row) of `asked`, copy the logits at the place to the row."""
        sizes = [entry.size for entry in entries]
        tokens = np.frombuffer(b"".join(entry.ids for entry in entries), dtype=np.int32)
        positions = np.concatenate([np.arange(each.first, each.first + each.size, dtype=np.int32) for each in entries])
        counts = np.array([len(entry.sequences) for entry in entries], dtype=np.int32)
        sequences = np.concatenate([np.array(entry.sequences, dtype=np.int32) for entry in entries])
        pointers = sequences.ctypes.data + sequences.itemsize * (np.cumsum(counts, dtype=np.int64) - counts)
        places, rows = np.array(sorted(asked), dtype=np.int64).reshape(-1, 2).T
        outputs, output_of = np.unique(places, return_inverse=True)
        flags = np.zeros(len(tokens), dtype=np.int8)
        flags[outputs] = 1
        arrays = tokens, positions, np.repeat(counts, sizes), np.repeat(pointers, sizes), flags
        start = done = 0                                # number of tokens run, number of outputs copied
        while start < len(tokens):
            stop = min(start + self._batch_size, len(tokens))
            if done + _OUTPUTS < len(outputs):
                stop = min(stop, int(outputs[done + _OUTPUTS]))
            token, position, count, sequence, flag = (array[start:stop].ctypes.data for array in arrays)
            batch = CBatch(stop - start, token, None, position, count, sequence, flag)
            status = self._c.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama.cpp gave up on {self.path} (status {status}): {self._library.why()}")
            self.tokens += stop - start
            after = int(np.searchsorted(outputs, stop))
            if after > done:
                computed = np.ctypeslib.as_array(self._c.llama_get_logits(self._context), (after - done, self.size))
                here = (output_of >= done) & (output_of < after)
                logits[rows[here]] = computed[output_of[here] - done]
            start, done = stop, after

    def _check(self) -> None:
        """Raise a ValueError if contexts that share prefixes have other logits than each context alone."""
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
        error, spread = np.abs(shared - np.stack(alone)).max(), np.std(alone)
        if not error <= 0.05 * spread:
            raise ValueError(
                f"{self.path}: contexts that share a prefix give other logits than each alone, by {error / spread:.2g} "
                'of their spread. Its cache cannot be used; engine="transformers" recomputes'
            )


def load(name: str | Path | None, **options: Any) -> tuple[LlamaCpp, Any]:
    """Load (engine, tokenizer) of a GGUF file; ValueError if `name` is none."""
    file = None if name is None else gguf_file(name)
    if file is None:
        raise ValueError(
            f"engine='llama.cpp' reads GGUF files, and {'the model in the package' if name is None else repr(name)} is "
            "none: give the path of one, or 'smollm2'"
        )
    engine = LlamaCpp(file, **options)
    engine.name = engine.name.replace(str(file), gguf_name(name, file))
    return engine, gguf_tokenizer(file)


def _load(lib: Library, path: Path) -> Any:
    """Load the model of a file; ValueError with the reason if that fails, or if contexts cannot share its state."""
    lib.why()
    model = lib.c.llama_model_load_from_file(str(path).encode(), lib.block("model", MODEL, check_tensors=True))
    if not model:
        raise ValueError(
            f"llama.cpp does not load {path}: {lib.why()}. It is damaged, or of an architecture that {KNOWN} does not "
            "know"
        )
    for trait in ("is_recurrent", "is_hybrid", "is_diffusion", "has_encoder"):
        if getattr(lib.c, f"llama_model_{trait}")(model):
            kind, words = lib.metadata(model, "general.architecture"), trait.replace("_", " ")
            lib.c.llama_model_free(model)
            raise ValueError(
                f"{path}: contexts cannot share the state of a model of architecture {kind!r}, which {words}; give "
                'engine="transformers"'
            )
    return model


def _cell_bytes(c: Any, model: Any, cache_type: str) -> int:
    """Return the bytes of the keys and values of a token."""
    wide = c.llama_model_n_embd(model) // c.llama_model_n_head(model) * c.llama_model_n_head_kv(model)
    return int(c.llama_model_n_layer(model) * 2 * wide * (4 if cache_type == "f32" else 2)) or 1


def _free(process: int, c: Any, context: Any, model: Any) -> None:
    if process == os.getpid():                          # a fork has copies
        c.llama_free(context)
        c.llama_model_free(model)


# ---- the tree of the contexts in the cache


def key(ids: Sequence[int]) -> bytes:
    """Return a context as bytes."""
    return array("i", ids).tobytes()


class Segment:
    """Tokens without a branch: positions `start` .. `end - 1` of all contexts that pass here.

    Each leaf is one sequence, and an inner segment has two children or more. A context is a string of bytes, four for
    each token, so C code compares and hashes prefixes. The first `done` tokens of a path are in the cache.
    """

    __slots__ = ("parent", "ids", "start", "end", "done", "children", "sequence", "used", "group", "keep")

    def __init__(self, parent: Segment | None, ids: bytes, done: int, sequence: int = -1) -> None:
        self.parent, self.ids, self.done, self.sequence = parent, ids, done, sequence
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(ids) // WIDTH
        self.children: dict[bytes, Segment] = {}            # by the first token
        self.used = self.group = 0                      # of a leaf: round and group of its last use
        self.keep = self.start                          # number of first tokens of the path that may be asked for again

    def subtree(self) -> Iterator[Segment]:
        """Yield this segment and all below it."""
        stack = [self]
        while stack:
            segment = stack.pop()
            yield segment
            stack.extend(segment.children.values())

    def leaves(self) -> Iterator[Segment]:
        return (segment for segment in self.subtree() if not segment.children)

    def leaf(self) -> Segment:
        """Return one of the leaves below."""
        return next(self.leaves())

    def held(self) -> int:
        """Return how many of the first tokens of the path to here are in the cache."""
        segment = self
        while segment.parent is not None and segment.done == segment.start:
            segment = segment.parent
        return segment.done

    def path(self) -> Iterator[Segment]:
        """Yield the segments from this one up to the root, without the root."""
        segment = self
        while segment.parent is not None:
            yield segment
            segment = segment.parent


class Sequences:
    """Tree of segments. `tokens` is the number of its tokens, `leaves` maps sequences to leaves."""

    def __init__(self) -> None:
        self.root = Segment(None, b"", 0)
        self.leaves: dict[int, Segment] = {}
        self.tokens = 0

    def find(self, context: bytes) -> tuple[Segment, int]:
        """Return the last segment that shares tokens with `context`, and the length of the whole shared prefix."""
        segment, at = self.root, 0
        while True:
            child = segment.children.get(context[at : at + WIDTH])
            if child is None:
                return segment, at // WIDTH
            if not context.startswith(child.ids, at):
                return child, at // WIDTH + common(child.ids, context[at:])
            segment, at = child, at + len(child.ids)

    def extend(self, leaf: Segment, context: bytes) -> None:
        """Extend `leaf`, whose path is a prefix of `context`, to the end of `context`."""
        more = context[leaf.end * WIDTH :]
        leaf.ids += more
        leaf.end += len(more) // WIDTH
        self.tokens += len(more) // WIDTH

    def branch(self, segment: Segment, n: int, context: bytes, sequence: int) -> Segment:
        """Add and return a leaf for `context`, whose longest shared prefix is n tokens of the path to `segment`."""
        if n < segment.end:
            segment = self._split(segment, n)
        leaf = Segment(segment, context[n * WIDTH :], n, sequence)
        segment.children[leaf.ids[:WIDTH]] = leaf
        self.leaves[sequence] = leaf
        self.tokens += leaf.end - leaf.start
        return leaf

    def cut(self, leaf: Segment, n: int) -> None:
        """Remove the tokens of `leaf` after the first n of its path; the whole leaf if it has none before."""
        if n > leaf.start:
            self.tokens -= leaf.end - n
            leaf.ids = leaf.ids[: (n - leaf.start) * WIDTH]
            leaf.end, leaf.done = n, min(leaf.done, n)
            leaf.keep = min(leaf.keep, n)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.ids[:WIDTH]], self.leaves[leaf.sequence]
        self.tokens -= leaf.end - leaf.start
        if len(parent.children) == 1 and parent.parent is not None:
            (only,) = parent.children.values()          # an only child merges with its parent
            only.ids, only.keep = parent.ids + only.ids, only.keep if only.keep > only.start else parent.keep
            only.start, only.parent = parent.start, parent.parent
            only.parent.children[only.ids[:WIDTH]] = only

    def _split(self, segment: Segment, n: int) -> Segment:
        """Split a segment after the first n tokens of its path; return the upper part, which is new."""
        assert segment.parent is not None
        size = (n - segment.start) * WIDTH
        upper = Segment(segment.parent, segment.ids[:size], min(segment.done, n))
        segment.parent.children[segment.ids[:WIDTH]] = upper
        segment.ids, segment.start, segment.parent = segment.ids[size:], n, upper
        segment.done = max(segment.done, n)
        upper.keep, segment.keep = min(segment.keep, n), max(segment.keep, n)
        upper.children[segment.ids[:WIDTH]] = segment
        return upper


def common(one: bytes, other: bytes) -> int:
    """Return the length in tokens of the common prefix of two byte strings."""
    size = min(len(one), len(other)) // WIDTH
    differ = np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)
    return int(differ.argmax()) if differ.any() else size


def pending(leaves: Iterable[Segment]) -> list[Segment]:
    """Return the segments above `leaves` that have tokens to run, each after its ancestors."""
    todo: dict[int, Segment] = {}
    for leaf in leaves:
        for segment in leaf.path():
            if segment.done == segment.end or id(segment) in todo:
                break
            todo[id(segment)] = segment
    return sorted(todo.values(), key=lambda segment: segment.start)


# ---- the C API

KNOWN = "xllamacpp 2026.10.11549"                       # release of this layout
TYPES = {"f32": 0, "f16": 1}                            # ggml_type of keys and values
_ERROR = 4                                              # ggml_log_level
_BLOCK = 512                                            # bytes; larger than any struct of parameters

Fields = dict[str, tuple[int, str, Any]]                # name: offset, format, default

MODEL: Fields = {
    "n_gpu_layers": (16, "i", -1), "split_mode": (20, "i", 1), "load_mode": (24, "i", -1), "lazy_mode": (28, "i", 1),
    "vocab_only": (72, "?", False), "check_tensors": (73, "?", False), "use_extra_bufts": (74, "?", True),
    "load_mtp": (77, "?", False),
}  # fmt: skip
CONTEXT: Fields = {
    "n_ctx": (0, "I", 512), "n_batch": (4, "I", 2048), "n_ubatch": (8, "I", 512), "n_seq_max": (12, "I", 1),
    "n_rs_seq": (16, "I", 0), "n_outputs_max": (20, "I", 0), "n_outputs_max_per_seq": (24, "I", 1),
    "n_threads": (28, "i", 4), "n_threads_batch": (32, "i", 4), "rope_scaling_type": (40, "i", -1),
    "pooling_type": (44, "i", -1), "attention_type": (48, "i", -1), "flash_attn_type": (52, "i", -1),
    "yarn_ext_factor": (64, "f", -1.0), "yarn_attn_factor": (68, "f", -1.0), "yarn_beta_fast": (72, "f", -1.0),
    "yarn_beta_slow": (76, "f", -1.0), "defrag_thold": (84, "f", -1.0), "type_k": (104, "i", 1),
    "type_v": (108, "i", 1), "offload_kqv": (137, "?", True), "no_perf": (138, "?", True),
    "op_offload": (139, "?", True), "swa_full": (140, "?", True), "kv_unified": (141, "?", False),
    "n_samplers": (152, "Q", 0),
}  # fmt: skip


class Block(ctypes.Structure):
    """Struct of parameters, with room for the fields of other releases."""

    _fields_ = [("data", ctypes.c_uint8 * _BLOCK)]


class CBatch(ctypes.Structure):
    """`llama_batch`: n tokens, each with its position, its sequences, and a flag if its logits are needed."""

    _fields_ = [
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p), ("n_seq_id", c_void_p),
        ("seq_id", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_model_default_params": (Block, []),
    "llama_context_default_params": (Block, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Block]),
    "llama_init_from_model": (c_void_p, [c_void_p, Block]),
    "llama_free": (None, [c_void_p]),
    "llama_model_free": (None, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_n_head_kv": (c_int32, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_is_diffusion": (c_bool, [c_void_p]),
    "llama_model_desc": (c_int32, [c_void_p, c_char_p, c_size_t]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, CBatch]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
}
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class Library:
    """Shared library: `c` has its functions by name, `errors` the last lines that it logged as errors."""

    def __init__(self, path: Path) -> None:
        self.errors: deque[str] = deque(maxlen=20)
        self._process = os.getpid()
        try:
            self.c = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise _unfit(str(error)) from error
        self._log = _LOG(self._logged)                  # C calls it while the process lives
        self.c.llama_log_set(self._log, None)
        silent = ctypes.cast((ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)).abs, c_void_p)
        atexit.register(self.c.llama_log_set, silent, None)         # C must not call Python after its end
        self.c.llama_backend_init()
        self.block("context", CONTEXT)

    def _logged(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())

    def why(self) -> str:
        """Return the errors that the library has logged since the last call."""
        logged = "; ".join(self.errors)
        self.errors.clear()
        return logged or "no reason was given"

    def block(self, kind: str, fields: Fields, **values: Any) -> Block:
        """Return the library's default parameters, changed by `values`; ImportError if their layout is not `fields`."""
        block: Block = getattr(self.c, f"llama_{kind}_default_params")()
        for name, (offset, form, default) in fields.items():
            value = struct.unpack_from(f"={form}", block.data, offset)[0]
            if value != default:
                raise _unfit(f"llama_{kind}_params has {value!r} where {name} was {default!r}")
        for name, value in values.items():
            offset, form, _ = fields[name]
            struct.pack_into(f"={form}", block.data, offset, value)
        return block

    def make_context(self, model: Any, **values: Any) -> Any:
        """Return a context of the model with these parameters."""
        if self._process != os.getpid():                # in a fork, OpenMP would wait for threads that do not exist
            values |= {"n_threads": 1, "n_threads_batch": 1}
        self.why()
        context = self.c.llama_init_from_model(model, self.block("context", CONTEXT, **values))
        if not context:
            size = values["n_ctx"]
            raise MemoryError(f"llama.cpp makes no cache of {size} tokens: {self.why()}. Give a smaller n_ctx")
        return context

    def metadata(self, model: Any, name: str) -> str | None:
        """Return the value of a field of the file; None if there is none."""
        text = ctypes.create_string_buffer(1024)
        size = self.c.llama_model_meta_val_str(model, name.encode(), text, len(text))
        return None if size < 0 else text.value.decode("utf-8", "replace")

    def description(self, model: Any) -> str:
        """Return architecture, size and type of the weights, as in "llama 135M Q8_0"."""
        text = ctypes.create_string_buffer(256)
        self.c.llama_model_desc(model, text, len(text))
        return text.value.decode("utf-8", "replace")


@cache
def library() -> Library:
    """Return the library; ImportError if it is missing or has another layout."""
    return Library(_path())


def _path() -> Path:
    folder = Path(import_module("xllamacpp").__path__[0])
    libraries = sorted(path for path in folder.glob("xllamacpp*") if path.suffix in (".so", ".pyd", ".dylib"))
    if not libraries:
        raise _unfit(f"{folder} holds no shared library")
    return libraries[0]


def _unfit(why: str) -> ImportError:
    return ImportError(
        f"the installed xllamacpp does not fit ({why}). {KNOWN} does: pip install {KNOWN.replace(' ', '==')}"
    )
