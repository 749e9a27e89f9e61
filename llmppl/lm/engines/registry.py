"""Registry of engines: the table `ENGINES` of the engines that have a name, and `load`, which chooses one of them.

A new engine is a file of this folder with a function `load(name, **options)`, and an entry of the table. The function
returns (model or `Engine`, tokenizer). The file is imported when the engine is first used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from llmppl.lm.engines import gguf
from llmppl.support.arguments import one_of

EngineName = Literal["transformers", "numpy", "llama.cpp", "vllm"]      # the keys of ENGINES, for type checkers


class Entry(NamedTuple):
    """An engine that has a name.

    module : file of this folder that defines `load(name, **options) -> (model or Engine, tokenizer)`
    package, extra : the package that the engine needs, and the extra of llmppl that installs it; "" if there is none
    options : options that this engine alone takes
    refuses : options of transformers that this engine does not take, with the reasons
    cache_option : the option that bounds the bytes of keys and values; "" if llmppl's own cache holds them
    """

    module: str
    package: str = ""
    extra: str = ""
    options: tuple[str, ...] = ()
    refuses: Mapping[str, str] = MappingProxyType({})
    cache_option: str = ""


_DEVICE = dict.fromkeys(("device", "device_map"), "chooses the device by itself")
ENGINES: dict[EngineName, Entry] = {
    "transformers": Entry("loading"),
    "numpy": Entry("numpy_llama"),
    "llama.cpp": Entry(
        "llamacpp", "xllamacpp", "llama-cpp", ("n_ctx", "threads", "batch_size", "cache_type"),
        {"dtype": "takes the numbers of the file as they are"} | _DEVICE, "cache_bytes",
    ),
    "vllm": Entry(
        "vllm", "vllm", "vllm", ("max_model_len", "tensor_parallel_size", "gpu_memory_utilization"), _DEVICE,
        "kv_cache_memory_bytes",
    ),
}  # fmt: skip


def module(name: str) -> Any:
    """Import a module of this folder. By name, so that `llmppl.lm` and its engines import each other in no circle."""
    with warnings.catch_warnings():                     # tqdm warns in a notebook without widgets
        warnings.filterwarnings("ignore", "IProgress not found")
        return import_module(f"{__package__}.{name}")


def load(
    name: str | Path | None, engine: EngineName | None, *, cache_bytes: int | None = None, **options: Any
) -> tuple[Any, Any]:
    """Load (model or Engine, tokenizer); `name` and `options` are those of `CachedTransformer.from_pretrained`.

    `cache_bytes` bounds the keys and values of an engine that keeps its own.
    """
    source = None if name is None else gguf.find(str(name))
    is_file = source is not None and str(name) not in gguf.PACKAGES
    chosen = _default(is_file, options) if engine is None else one_of("engine", engine, ENGINES)
    entry = ENGINES[chosen]
    for owner, other in ENGINES.items():
        for option in set(other.options).difference(entry.options).intersection(options):
            raise TypeError(f"engine={chosen!r} takes no {option}: it is an option of engine={owner!r}")
    if entry.package and find_spec(entry.package) is None:
        raise ImportError(f"engine={chosen!r} needs {entry.package}: pip install 'llmppl[{entry.extra}]'")
    if refused := _refused(entry, options):
        reasons = " and ".join(dict.fromkeys(entry.refuses[option] for option in refused))
        raise ValueError(f"{' and '.join(refused)} cannot be given to engine={chosen!r}, which {reasons}")
    if chosen != "transformers":                        # to which None is a value
        options = {option: value for option, value in options.items() if value is not None}
    if entry.cache_option and cache_bytes is not None:
        options = {entry.cache_option: cache_bytes} | options
    loaded: tuple[Any, Any] = module(entry.module).load(name, **options)
    if engine is None and getattr(loaded[0], "quantised", False):
        warnings.warn(
            f"{name} has quantised weights, which llama.cpp multiplies with quantised activations: the probabilities "
            "after a context vary by some hundredths with the rest of the batch. They do not with "
            "engine='transformers', which computes in float32; engine='llama.cpp' turns this warning off",
            stacklevel=3,
        )
    return loaded


def _default(is_file: bool, options: Mapping[str, Any]) -> EngineName:
    """Choose llama.cpp for the path of a GGUF file, if it is installed and takes the options; else transformers."""
    llama_cpp = ENGINES["llama.cpp"]
    fits = is_file and find_spec(llama_cpp.package) is not None and not _refused(llama_cpp, options)
    return "llama.cpp" if fits else "transformers"


def _refused(entry: Entry, options: Mapping[str, Any]) -> list[str]:
    return sorted(option for option in entry.refuses if options.get(option) is not None)
