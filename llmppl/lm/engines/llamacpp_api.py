"""The C API of llama.cpp by ctypes, from the shared library in the package xllamacpp.

The structs of llama.h change from release to release. A struct of parameters is a *block* of bytes here, with known
offsets of the fields that llmppl sets. The offsets belong to one release. Its defaults are compared with those of the
library's `llama_*_default_params`, and another layout is refused. Fields that a later release appends keep their
defaults. A new context is asked for its parameters, which are compared with the requested ones.
Source: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmppl.support.locks import Lock

INSTALL = "pip install 'llmppl[llama-cpp]'"
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


class Batch(ctypes.Structure):
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
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_ctx_seq": (c_uint32, [c_void_p]),
    "llama_n_batch": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_n_seq_max": (c_uint32, [c_void_p]),
    "llama_n_threads": (c_int32, [c_void_p]),
    "llama_n_threads_batch": (c_int32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_n_head_kv": (c_int32, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_has_decoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_is_diffusion": (c_bool, [c_void_p]),
    "llama_model_desc": (c_int32, [c_void_p, c_char_p, c_size_t]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
}
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
_lock = Lock()
_library: Library | None = None


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
        self.default_block("model", MODEL)
        self.default_block("context", CONTEXT)

    def _logged(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())

    def why(self) -> str:
        """Return the errors that the library has logged since the last call."""
        logged = "; ".join(self.errors)
        self.errors.clear()
        return logged or "no reason was given"

    def default_block(self, kind: str, fields: Fields) -> Block:
        """Return the library's default parameters; ImportError if their layout is not `fields`."""
        block: Block = getattr(self.c, f"llama_{kind}_default_params")()
        for name, (offset, form, default) in fields.items():
            value = struct.unpack_from(f"={form}", block.data, offset)[0]
            if value != default:
                raise _unfit(f"llama_{kind}_params has {value!r} where {name} was {default!r}")
        return block

    def block(self, kind: str, fields: Fields, **values: Any) -> Block:
        """Return the default parameters, changed by `values`."""
        block = self.default_block(kind, fields)
        for name, value in values.items():
            offset, form, _ = fields[name]
            struct.pack_into(f"={form}", block.data, offset, value)
        return block

    def make_context(self, model: Any, asked: dict[str, int], **others: Any) -> Any:
        """Return a context of the model with the parameters `asked`, which it must confirm, and `others`."""
        if self._process != os.getpid():                # in a fork, OpenMP would wait for threads that do not exist
            asked = asked | {"n_threads": 1, "n_threads_batch": 1}
        self.why()
        context = self.c.llama_init_from_model(model, self.block("context", CONTEXT, **asked, **others))
        if not context:
            size = asked["n_ctx"]
            raise MemoryError(f"llama.cpp makes no cache of {size} tokens: {self.why()}. Give a smaller n_ctx")
        actual = {name: getattr(self.c, f"llama_{name}")(context) for name in asked}
        per_sequence = self.c.llama_n_ctx_seq(context)
        if actual != asked or per_sequence != asked["n_ctx"]:
            self.c.llama_free(context)
            raise _unfit(f"it was asked for {asked} in one cache and has {actual} in caches of {per_sequence}")
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


def library() -> Library:
    """Return the library, loaded once; ImportError if it is missing or has another layout."""
    global _library
    with _lock.lock:
        if _library is None:
            _library = Library(_path())
        return _library


def _path() -> Path:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ImportError(f'engine="llama.cpp" needs the package xllamacpp: {INSTALL}')
    folder = Path(spec.origin).parent
    libraries = sorted(path for path in folder.glob("xllamacpp*") if path.suffix in (".so", ".pyd", ".dylib"))
    if not libraries:
        raise _unfit(f"{folder} holds no shared library")
    return libraries[0]


def _unfit(why: str) -> ImportError:
    return ImportError(
        f"the installed xllamacpp does not fit ({why}). {KNOWN} does: pip install {KNOWN.replace(' ', '==')}"
    )
