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
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, chain, islice, pairwise, starmap, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.lm.engine import Engine
from llmppl.lm.engines.loading import GGUF_ENDS, gguf_file, gguf_name, gguf_tokenizer
from llmppl.support.arguments import count, optional_count

_SEQUENCES = 256  # llama.cpp's maximum
_OUTPUTS = 256  # most rows of logits of one batch
_CELLS = 8192  # default: most tokens of the cache
_IDLE = 1024  # number of tokens that released contexts may always keep
_CHECK = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29], [3, 5, 7, 11, 13, 31, 37]]
_TRAITS = "is_recurrent", "is_hybrid", "is_diffusion", "has_encoder"  # of models that are refused
WIDTH = 4  # bytes of a token


class _Entry(NamedTuple):
    """Tokens to run, from position `first` on, in all of `numbers` of sequences."""

    ids: bytes
    first: int
    numbers: list[int]


@dataclass(eq=False)
class Sequence:
    """Context in one of llama.cpp's sequences, which no other sequence continues.

    A context is a string of bytes, four for each token, so C code compares and sorts contexts. The first `done` tokens
    are in the cache, and the first `keep` may be asked for again. `used` and `group` are the round and the group of the
    last use.
    """

    ids: bytes
    number: int
    done: int
    keep: int
    used: int = 0
    group: int = 0

    @property
    def size(self) -> int:
        return len(self.ids) // WIDTH


Item = tuple[bytes, int]  # (context, row): the logits after the context are that row
_IDS = attrgetter("ids")


class LlamaCpp(Engine):
    """Engine that runs a GGUF file by llama.cpp.

    Parameters
    ----------
    path : str or path
    n_ctx : int, optional
        Number of tokens in the cache, of all contexts together; no context is longer. Default: as many as
        `cache_bytes` hold, at most 8,192.
    cache_bytes : int
        Most bytes of keys and values.
    threads : int, optional
        Default: as many as torch uses, which reads OMP_NUM_THREADS.
    batch_size : int
        Most tokens that run together.
    cache_type : str, optional
        Format of keys and values, "f32" or "f16". Default: "f16" if the weights are quantised, which is faster and
        changes probabilities far less than the quantisation does; otherwise "f32".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int | None = None,
        cache_bytes: int = 1 << 30,
        threads: int | None = None,
        batch_size: int = 512,
        cache_type: str | None = None,
    ) -> None:
        n_ctx = optional_count("n_ctx", n_ctx)
        threads = optional_count("threads", threads)
        batch_size = count("batch_size", batch_size)
        if cache_type is not None and cache_type not in TYPES:
            raise ValueError(
                f"cache_type must be one of {', '.join(map(repr, TYPES))}, not {cache_type!r}"
            )
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
        trained = self._c.llama_model_n_ctx_train(self._model)
        if n_ctx is None:
            n_ctx = max(
                256, min(cache_bytes // _cell_bytes(self._c, self._model, cache_type), _CELLS)
            )
        self.cells = -(-n_ctx // 256) * 256  # as llama.cpp rounds it
        self._batch_size = min(batch_size, self.cells)
        most = max(
            self._batch_size, _SEQUENCES
        )  # llama.cpp needs room for a token of each sequence
        self._make = partial(
            self._library.make_context,
            self._model,
            n_ctx=self.cells,
            n_batch=most,
            n_ubatch=most,
            n_seq_max=_SEQUENCES,
            n_threads=threads,
            n_threads_batch=threads,
            n_outputs_max=_OUTPUTS,
            n_outputs_max_per_seq=0,
            kv_unified=True,
            type_k=TYPES[cache_type],
            type_v=TYPES[cache_type],
            flash_attn_type=int(cache_type == "f16"),
        )
        self._open()
        self.max_length = min(self.cells, trained)
        ends = [
            self._library.metadata(self._model, f"tokenizer.ggml.{end}_token_id")
            for end in GGUF_ENDS
        ]
        self.eos_ids = sorted({int(each) for each in ends if each is not None})
        self.name = f"{self.path}, llama.cpp, keys and values in {cache_type}"
        self._round = self._group = 0
        self.clear()
        self._check()

    def _open(self) -> None:
        self._context = self._make()
        self._close.detach()
        self._close = weakref.finalize(
            self, _free, os.getpid(), self._c, self._context, self._model
        )
        self._memory = self._c.llama_get_memory(self._context)
        self._process = os.getpid()

    @property
    def quantised(self) -> bool:
        """True if the weights are quantised. llama.cpp then quantises activations, too, which amplifies rounding."""
        return not self._library.description(self._model).endswith(("F32", "F16"))  # BF16 too

    def forward(
        self, contexts: list[list[int]], asked: list[tuple[int, int]]
    ) -> NDArray[np.float32]:
        if not self._close.alive:
            raise ValueError(f"the engine of {self.path} was closed")
        if self._process != os.getpid():
            self.clear()
        logits = np.empty((len(asked), self.size), dtype=np.float32)
        self._round += 1
        keys = [key(ids) for ids in contexts]
        items = sorted(
            (keys[i][: n * WIDTH], row) for row, (i, n) in enumerate(asked)
        )  # neighbours share most
        if self._round % 2:
            items.reverse()  # if not all fit, the last of one round are first in the next
        for context, _ in items:
            held, n = self._nearest(context)
            if held is not None and n:
                held.used = self._round
        if (longest := max(map(len, contexts), default=0)) > self.cells:
            raise ValueError(
                f"a context of {longest} tokens does not fit into the cache: give n_ctx={longest} or more"
            )
        while items:
            items = self._run_group(items, logits)
        return logits

    def release(self, contexts: list[list[int]]) -> None:
        """Release contexts, and evict the oldest released tokens while they are more than the other ones."""
        for ids in contexts:
            for each in self._continuing(key(ids)):
                each.keep = min(each.keep, len(ids) - 1)
        shared = [0, *starmap(common, pairwise(map(_IDS, self._held))), 0]
        idle = {
            each: each.size - max(each.keep, *around)
            for each, around in zip(self._held, pairwise(shared), strict=True)
            if each.keep < each.size
        }
        left = sum(idle.values())
        for each in sorted(idle, key=self._priority):
            if left <= max(_IDLE, self._tokens - left):
                return
            left -= idle[each]
            self._cut(each, each.keep)

    def clear(self) -> None:
        if self._process != os.getpid():  # in a fork the context may be in any state
            self._open()
        self._c.llama_memory_clear(self._memory, False)
        self._held: list[Sequence] = []  # sorted by their ids
        self._tokens = 0  # number of cells that they occupy
        self._free = list(range(_SEQUENCES - 1, -1, -1))

    def close(self) -> None:
        """Free the model and its cache."""
        self._close()

    def _run_group(self, items: list[Item], logits: NDArray[np.float32]) -> list[Item]:
        """Run as many of the first `items` as fit, write their rows of `logits`, and return the other items."""
        self._group += 1
        self._spare: list[
            _Entry
        ] = []  # cached tokens that run again, each in a sequence of its own
        rows = []  # context, row, index in `_spare`
        for context, row in items:
            spare = len(self._spare)
            if not self._fit(context):
                break
            rows.append((context, row, spare if len(self._spare) > spare else None))
        new = [each for each in self._held if each.done < each.size]
        shared = [0, *starmap(common, pairwise(map(_IDS, new)))][
            : len(new)
        ]  # number of tokens, with the one before
        first = [
            max(each.done, n) for each, n in zip(new, shared, strict=True)
        ]  # token that only this one runs
        ends = list(
            accumulate((each.size - n for each, n in zip(new, first, strict=True)), initial=0)
        )
        entries = [
            entry for i, n in enumerate(first) for entry in _entries(new[i:], shared[i + 1 :], n)
        ]
        places = []
        for context, row, again in rows:
            n = len(context) // WIDTH
            for each in self._continuing(context):
                each.keep = max(each.keep, n)
            i = bisect_left(new, context, key=_IDS)
            places.append((ends[i] + n - 1 - first[i] if again is None else ends[-1] + again, row))
        self._run([*entries, *self._spare], places, logits)
        for each in new:
            each.done = each.size
        for entry in self._spare:
            self._free_number(*entry.numbers)
        return items[len(rows) :]

    def _fit(self, context: bytes) -> bool:
        """Let a sequence hold `context`; if it is cached, let its last token run again for its logits.

        Return False if there is no room beside the contexts of this group.
        """
        length = len(context) // WIDTH
        while True:
            held, n = self._nearest(context)
            done = 0 if held is None else min(n, held.done)
            repeats = done == length
            extends = held is not None and n == held.size
            short = not self._free and (repeats or (n < length and not extends))
            if not short and self._tokens + len(self._spare) + length - n + repeats <= self.cells:
                break
            if not self._evict(held, short, n - repeats):
                return False
        if held is not None and repeats:
            self._spare.append(
                _Entry(context[-WIDTH:], length - 1, [self._branch(held, length - 1)])
            )
        elif held is not None and extends:
            held.ids = context
        elif held is None or n < length:
            keep = 0 if held is None else min(held.keep, n)
            held = Sequence(context, self._branch(held, done), done, keep)
            insort(self._held, held, key=_IDS)
        self._tokens += length - n
        held.used = self._round
        held.group = self._group
        return True

    def _nearest(self, context: bytes) -> tuple[Sequence | None, int]:
        """Return the sequence that shares the most tokens with `context`, and their number."""
        i = bisect_left(self._held, context, key=_IDS)
        near = [
            (common(each.ids, context), -k, each)
            for k, each in enumerate(self._held[max(0, i - 1) : i + 1])
        ]
        n, _, held = max(near, default=(0, 0, None))
        return held, n

    def _continuing(self, context: bytes) -> Iterator[Sequence]:
        """Return the sequences whose contexts begin with `context`."""
        rest = islice(self._held, bisect_left(self._held, context, key=_IDS), None)
        return takewhile(lambda each: each.ids.startswith(context), rest)

    def _branch(self, held: Sequence | None, n: int) -> int:
        """Return the number of a new sequence with the first n tokens of `held`."""
        number = self._free.pop()
        if held is not None and n:
            self._c.llama_memory_seq_cp(self._memory, held.number, number, 0, n)
        return number

    def _free_number(self, number: int) -> None:
        self._c.llama_memory_seq_rm(self._memory, number, -1, -1)
        self._free.append(number)

    def _evict(self, held: Sequence | None, number: bool, n: int) -> bool:
        """Free the `number` of a sequence, or some cells, for a context that shares n tokens with `held`.

        Return False if nothing can be freed.
        """
        order = (
            -1 if self._round % 2 else 1
        )  # of equals, those go first that the next round reaches last
        others = [
            each for each in self._held[::order] if each.group != self._group and each is not held
        ]
        if others:
            each = min(others, key=self._priority)
            self._cut(each, each.keep if each.keep < each.size and not number else 0)
            return True
        if held is None or held.group == self._group or n >= held.size:
            return False
        self._cut(held, n)
        return True

    def _priority(self, held: Sequence) -> tuple[bool, bool, int]:
        """Return the rank of `held` for eviction; the smallest goes first."""
        return held.used == self._round, held.keep == held.size, held.used

    def _cut(self, held: Sequence, n: int) -> None:
        """Remove the tokens of `held` after the first n; all of them if others share these."""
        i = self._held.index(held)
        size = held.size
        around = self._held[max(0, i - 1) : i] + self._held[i + 1 : i + 2]
        shared = max((common(each.ids, held.ids) for each in around), default=0)
        if n > shared:
            self._c.llama_memory_seq_rm(self._memory, held.number, n, -1)
            held.ids = held.ids[: n * WIDTH]
            held.done = min(held.done, n)
            held.keep = min(held.keep, n)
        else:
            self._free_number(held.number)
            del self._held[i]
        self._tokens -= size - max(n, shared)

    def _run(
        self, entries: list[_Entry], asked: list[tuple[int, int]], logits: NDArray[np.float32]
    ) -> None:
        """Run the tokens of `entries`. For each (place, row) of `asked`, copy the logits at the place to the row."""
        ids, firsts, numbers = zip(*entries, strict=True)
        sizes = [len(each) // WIDTH for each in ids]
        tokens = np.frombuffer(b"".join(ids), dtype=np.int32)
        positions = np.concatenate(
            [first + np.arange(n) for first, n in zip(firsts, sizes, strict=True)]
        )
        counts = np.array([*map(len, numbers)], dtype=np.int32)
        sequences = np.array([*chain.from_iterable(numbers)], dtype=np.int32)
        pointers = sequences.ctypes.data + sequences.itemsize * (
            np.cumsum(counts, dtype=np.int64) - counts
        )
        places, rows = np.array(sorted(asked), dtype=np.int64).reshape(-1, 2).T
        outputs, output_of = np.unique(places, return_inverse=True)
        flags = np.zeros(len(tokens), dtype=np.int8)
        flags[outputs] = 1
        arrays = (
            tokens,
            positions.astype(np.int32),
            np.repeat(counts, sizes),
            np.repeat(pointers, sizes),
            flags,
        )
        start = done = 0  # number of tokens run, number of outputs copied
        while start < len(tokens):
            stop = min(
                start + self._batch_size, len(tokens), *outputs[done + _OUTPUTS :][:1].tolist()
            )
            token, position, count, sequence, flag = (
                array[start:stop].ctypes.data for array in arrays
            )
            batch = CBatch(stop - start, token, None, position, count, sequence, flag)
            status = self._c.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(
                    f"llama.cpp gave up on {self.path} (status {status}): {self._library.why()}"
                )
            self.tokens += stop - start
            after = int(np.searchsorted(outputs, stop))
            if after > done:
                computed = np.ctypeslib.as_array(
                    self._c.llama_get_logits(self._context), (after - done, self.size)
                )
                here = (output_of >= done) & (output_of < after)
                logits[rows[here]] = computed[output_of[here] - done]
            start = stop
            done = after

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
        error = np.abs(shared - np.stack(alone)).max()
        spread = np.std(alone)
        if not error <= 0.05 * spread:
            raise ValueError(
                f"{self.path}: contexts that share a prefix give other logits than each alone, by {error / spread:.2g} "
                'of their spread. Its cache cannot be used; engine="transformers" recomputes'
            )


def load(name: str | Path | None, **options: Any) -> tuple[LlamaCpp, Any]:
    """Load (engine, tokenizer) of a GGUF file; ValueError if `name` is none."""
    file = gguf_file(name)
    if file is None:
        raise ValueError(
            f"engine='llama.cpp' reads GGUF files: give the path of one, or 'smollm2', not {name!r}"
        )
    engine = LlamaCpp(file, **options)
    engine.name = engine.name.replace(str(file), gguf_name(name, file))
    return engine, gguf_tokenizer(file)


def _load(lib: Library, path: Path) -> Any:
    """Load the model of a file; ValueError with the reason if that fails, or if contexts cannot share its state."""
    lib.why()
    model = lib.c.llama_model_load_from_file(
        str(path).encode(), lib.block("model", MODEL, check_tensors=True)
    )
    if not model:
        raise ValueError(
            f"llama.cpp does not load {path}: {lib.why()}. It is damaged, or of an architecture that {KNOWN} does not "
            "know"
        )
    for trait in _TRAITS:
        if getattr(lib.c, f"llama_model_{trait}")(model):
            kind = lib.metadata(model, "general.architecture")
            words = trait.replace("_", " ")
            lib.c.llama_model_free(model)
            raise ValueError(
                f"{path}: contexts cannot share the state of a model of architecture {kind!r}, which {words}; give "
                'engine="transformers"'
            )
    return model


def _cell_bytes(c: Any, model: Any, cache_type: str) -> int:
    """Return the bytes of the keys and values of a token."""
    wide = (
        c.llama_model_n_embd(model) // c.llama_model_n_head(model) * c.llama_model_n_head_kv(model)
    )
    return int(c.llama_model_n_layer(model) * 2 * wide * (4 if cache_type == "f32" else 2)) or 1


def _free(process: int, c: Any, context: Any, model: Any) -> None:
    if process == os.getpid():  # a fork has copies
        c.llama_free(context)
        c.llama_model_free(model)


# ---- contexts as bytes


def key(ids: list[int]) -> bytes:
    """Return a context as bytes."""
    return array("i", ids).tobytes()


def common(one: bytes, other: bytes) -> int:
    """Return the length in tokens of the common prefix of two contexts."""
    size = min(len(one), len(other)) // WIDTH
    if one[: size * WIDTH] == other[: size * WIDTH]:
        return size
    return int(
        (np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)).argmax()
    )


def _entries(held: list[Sequence], shared: list[int], first: int) -> Iterator[_Entry]:
    """Yield the tokens of held[0] from `first` on, in parts that the same sequences share.

    held[i + 1] shares shared[i] tokens with held[i]; the contexts are sorted.
    """
    nested = takewhile(lambda n: n > first, accumulate(shared, min, initial=held[0].size))
    reach = [(n, each.number) for n, each in zip(nested, held, strict=False)]
    for start, stop in pairwise([first, *sorted({n for n, _ in reach})]):
        yield _Entry(
            held[0].ids[start * WIDTH : stop * WIDTH],
            start,
            [number for n, number in reach if n > start],
        )


# ---- the C API

KNOWN = "xllamacpp 2026.10.11549"  # release of this layout
TYPES = {"f32": 0, "f16": 1}  # ggml_type of keys and values
_ERROR = 4  # ggml_log_level
_BLOCK = 512  # bytes; larger than any struct of parameters

Fields = dict[str, tuple[int, str, Any]]  # name: offset, format, default

# the fields that are set, and some that would show another layout
MODEL: Fields = {
    "n_gpu_layers": (16, "i", -1),
    "check_tensors": (73, "?", False),
    "use_extra_bufts": (74, "?", True),
}
CONTEXT: Fields = {
    "n_ctx": (0, "I", 512),
    "n_batch": (4, "I", 2048),
    "n_ubatch": (8, "I", 512),
    "n_seq_max": (12, "I", 1),
    "n_outputs_max": (20, "I", 0),
    "n_outputs_max_per_seq": (24, "I", 1),
    "n_threads": (28, "i", 4),
    "n_threads_batch": (32, "i", 4),
    "flash_attn_type": (52, "i", -1),
    "type_k": (104, "i", 1),
    "type_v": (108, "i", 1),
    "swa_full": (140, "?", True),
    "kv_unified": (141, "?", False),
}


class Block(ctypes.Structure):
    """Struct of parameters, with room for the fields of other releases."""

    _fields_ = [("data", ctypes.c_uint8 * _BLOCK)]


class CBatch(ctypes.Structure):
    """`llama_batch`: n tokens, each with its position, its sequences, and a flag if its logits are needed."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


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
    **{
        f"llama_model_n_{name}": (c_int32, [c_void_p])
        for name in ("ctx_train", "embd", "layer", "head", "head_kv")
    },
    **{f"llama_model_{trait}": (c_bool, [c_void_p]) for trait in _TRAITS},
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
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise _unfit(str(error)) from error
        self._log = _LOG(self._logged)  # C calls it while the process lives
        self.c.llama_log_set(self._log, None)
        silent = ctypes.cast(
            (ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)).abs, c_void_p
        )
        atexit.register(self.c.llama_log_set, silent, None)  # C must not call Python after its end
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
        if (
            self._process != os.getpid()
        ):  # in a fork, OpenMP would wait for threads that do not exist
            values |= {"n_threads": 1, "n_threads_batch": 1}
        self.why()
        context = self.c.llama_init_from_model(model, self.block("context", CONTEXT, **values))
        if not context:
            size = values["n_ctx"]
            raise MemoryError(
                f"llama.cpp makes no cache of {size} tokens: {self.why()}. Give a smaller n_ctx"
            )
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
    libraries = sorted(
        path for path in folder.glob("xllamacpp*") if path.suffix in (".so", ".pyd", ".dylib")
    )
    if not libraries:
        raise _unfit(f"{folder} holds no shared library")
    return libraries[0]


def _unfit(why: str) -> ImportError:
    return ImportError(
        f"the installed xllamacpp does not fit ({why}). {KNOWN} does: pip install {KNOWN.replace(' ', '==')}"
    )
