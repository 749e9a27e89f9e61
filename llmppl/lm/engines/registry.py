"""Choosing: which engine loads a model. Each brings weights and tokenizer its own way."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from llmppl.lm.engines import gguf
from llmppl.support.options import foreign_hint, unknown_option

EngineName = Literal["transformers", "numpy", "llama.cpp", "vllm"]

_PACKAGES = {"llama.cpp": "xllamacpp", "vllm": "vllm"}
_KNOWN = "engine", "dtype", "eos_ids", "token"           # our names of options that other libraries call otherwise
_OF_ENGINES = {
    "n_ctx": "llama.cpp", "threads": "llama.cpp", "batch_size": "llama.cpp", "cache_type": "llama.cpp",
    "max_model_len": "vllm", "tensor_parallel_size": "vllm", "gpu_memory_utilization": "vllm",
}  # fmt: skip
_INSTALL = {"llama.cpp": "pip install 'llmppl[llama-cpp]'", "vllm": "pip install 'llmppl[vllm]'"}


def load(
    name: str | Path | None, engine: EngineName | None, *, cache_bytes: int | None = None, **options: Any
) -> tuple[Any, Any]:
    """(model or engine, tokenizer) of a name; `options` are as of `CachedTransformer.from_pretrained`.

    `cache_bytes` is what keys and values may take where that is the engine's business.
    """
    for option, value in options.items():               # transformers takes some names of other libraries in silence
        if foreign_hint("from_pretrained", option, value, _KNOWN):
            raise unknown_option("from_pretrained", {option: value}, _KNOWN)
    if engine is not None and engine not in get_args(EngineName):
        raise ValueError(f"engine must be one of {', '.join(map(repr, get_args(EngineName)))}, not {engine!r}")
    given = {key: options[key] for key in ("dtype", "device", "device_map") if options.get(key) is not None}
    packed = None if engine == "transformers" or name is None else gguf.find(str(name))
    chosen = engine is None
    if engine is None:                                  # what is told to transformers is for transformers
        file = packed is not None and str(name) not in gguf.PACKAGES
        engine = "llama.cpp" if file and find_spec("xllamacpp") is not None and not given else "transformers"
    if engine == "transformers":
        for option in options.keys() & _OF_ENGINES:
            raise TypeError(f"engine='transformers' takes no {option}: it is of engine={_OF_ENGINES[option]!r}")
        with warnings.catch_warnings():                 # of tqdm, in a notebook without widgets, which nobody needs
            warnings.filterwarnings("ignore", "IProgress not found")
            from llmppl.lm.engines import loading
        return loading.load(name, **{"dtype": None, "device": None, "device_map": None, **options})
    if engine == "numpy":
        if name is not None or given or options:
            named = [] if name is None else [repr(name)]
            told = ", ".join(named + [f"{key}={value!r}" for key, value in {**options, **given}.items()])
            raise ValueError(
                f"engine='numpy' runs the model in the package alone, in float32, and takes no {told}: "
                "engine='transformers' does"
            )
        from llmppl.lm.engines import numpy_llama

        return numpy_llama.load()
    if find_spec(_PACKAGES[engine]) is None:
        raise ImportError(f"engine={engine!r} needs {_PACKAGES[engine]}: {_INSTALL[engine]}")
    refused = given.keys() - ({"dtype"} if engine == "vllm" else set())
    if refused:
        why = "takes the numbers of the file as they are" if refused == {"dtype"} else "chooses the device by itself"
        raise ValueError(f"{' and '.join(sorted(refused))} cannot be given to engine={engine!r}, which {why}")
    options = {key: value for key, value in options.items() if key not in given or key == "dtype"}
    options = {key: value for key, value in options.items() if value is not None}
    if engine == "vllm":
        from llmppl.lm.engines import vllm

        return vllm.load(name, **({} if cache_bytes is None else {"kv_cache_memory_bytes": cache_bytes}) | options)
    if packed is None:
        raise ValueError(
            f"engine='llama.cpp' reads GGUF files, and {'the model in the package' if name is None else repr(name)} is "
            "none: give the path of one, or 'smollm2'"
        )
    from llmppl.lm.engines import llamacpp

    found = llamacpp.load(packed, **options, **({} if cache_bytes is None else {"cache_bytes": cache_bytes}))
    if chosen and found[0].quantised:
        warnings.warn(
            f"{packed.file.name} has quantised weights, which llama.cpp multiplies with quantised activations: the "
            "probabilities after a context vary by some hundredths with what else is in the batch. They do not with "
            "engine='transformers', which computes in float32; engine='llama.cpp' says that this is meant",
            stacklevel=3,
        )
    return found
