"""Loading of a transformers model and its tokenizer from the package, a folder, a GGUF file or the hub."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.embedded import verify
from llmppl.lm.engines import gguf
from llmppl.support.locks import Lock
from llmppl.support.options import unknown_option

MISSING = {                                             # key: the folder exists
    False: "no such folder is here, and the hub did not give it either",
    True: "the folder holds no model and tokenizer that transformers can load",
}
SAVED = r"(\.safetensors|\.bin|\.index\.json)$", r"^config\.json$", r"token|^vocab"
OPTIONS = (                                             # llmppl's own, and the common ones of transformers
    "engine", "cache_bytes", "row_bytes", "max_batch_tokens", "eos_ids", "dtype", "device", "device_map", "revision",
    "token", "trust_remote_code", "cache_dir", "attn_implementation", "quantization_config",
)  # fmt: skip
TIED = "parts that share weights, as embedding and head often do, have to be in the same place"

_LOADING = Lock()                       # transformers changes settings of the process while it loads


def load(
    name: str | Path | None, *, dtype: Any = None, device: Any = None, device_map: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Load (model, tokenizer) of a hub id, a folder or a GGUF file; None is the model in the package, verified.

    Files on this machine are used without asking the hub. Raises FileNotFoundError if there is no such model.
    """
    if None not in (device, device_map):
        raise ValueError("give device= (one for the whole model) or device_map= (accelerate spreads it), not both")
    if device_map is not None and find_spec("accelerate") is None:
        raise ImportError("device_map= needs accelerate: pip install llmppl[device-map]")
    device = None if device is None else _device(device)
    placement = device if device_map is None else device_map
    on_cpu = getattr(placement, "type", placement) in (None, "cpu", {"": "cpu"})
    dtype = _dtype(dtype, on_cpu or not torch.accelerator.is_available())
    if name is None:
        verify()
        name = EMBEDDED
    source = str(name)
    packed = gguf.find(source)
    if packed is not None:
        with _LOADING.lock:
            source = str(gguf.converted(packed.file))
    folder = os.path.isdir(source)
    local_only = options.pop("local_files_only", False) or folder
    shared = {key: options[key] for key in ("revision", "token", "trust_remote_code", "cache_dir") if key in options}

    def attempt(local: bool) -> tuple[Any, Any]:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, **shared)
        with _LOADING.lock, _progress_bars(shown=not local):
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, device_map=device_map, local_files_only=local, **options
            )
        if packed is not None:
            model.config.name_or_path = str(packed)
        return (model if device is None else model.to(device)).eval(), tokenizer

    try:
        try:
            return attempt(local=True)
        except (OSError, ValueError):
            if local_only or not _hub_answers():
                raise
            return attempt(local=False)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
        raise unknown_option("from_pretrained", [unknown[1]], OPTIONS) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and folder and _complete(source):
            if isinstance(device_map, dict):
                message = f"device_map={device_map!r} cannot be followed ({first_line(error)}); {TIED}"
                raise ValueError(message) from error
            raise                                       # the model exists: the error has another cause
        raise FileNotFoundError(
            f"no language model {source!r}: {MISSING[folder]} ({first_line(error)}). Give a hub id such as 'gpt2' "
            "(with a network), a folder written by save_pretrained of a model and its tokenizer, a GGUF file, "
            "'smollm2' or nothing, for the small model that ships with the package"
        ) from error


def _dtype(dtype: Any, on_cpu: bool) -> Any:
    """Return `dtype` as transformers takes it. The default is float32 on a CPU, the checkpoint's own elsewhere."""
    if dtype is None:
        return torch.float32 if on_cpu else "auto"
    if dtype != "auto" and not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"dtype {dtype!r} is not one of torch's: give 'float32', 'bfloat16', 'float16' or 'auto'")
    return dtype


def _device(device: Any) -> torch.device:
    """Return `device` as a torch.device; ValueError if it cannot be used on this machine."""
    try:
        known = torch.device(device)
        torch.empty(0, device=known)
    except (RuntimeError, AssertionError, TypeError) as error:
        there = "'cpu'"
        if torch.accelerator.is_available():
            there += f" or {str(torch.accelerator.current_accelerator())!r}"
        raise ValueError(f"device {device!r} cannot be used here ({first_line(error)}); give {there}") from error
    return known


def _complete(folder: str) -> bool:
    """Return whether a folder has the files of a saved model and its tokenizer."""
    names = "\n".join(os.listdir(folder))
    return all(re.search(name, names, re.MULTILINE) for name in SAVED)


def _hub_answers(seconds: float = 5.0) -> bool:
    """Return whether the hub can be reached. transformers itself would try for most of a minute."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):                       # the hub's client raises errors of many types
            get_session().head(constants.ENDPOINT, timeout=seconds)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # a missing name server ignores the timeout
    thread.start()
    thread.join(seconds)
    return answered.is_set()


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of transformers and the hub inside the `with` block, unless `shown`.

    They also stay if the user has made transformers verbose (`logging.set_verbosity_info()`).
    """
    if shown or logging.get_verbosity() <= INFO:
        yield
        return
    of_hub, of_transformers = not are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()                      # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if of_transformers:
            logging.enable_progress_bar()               # type: ignore[no-untyped-call]
        (enable_progress_bars if of_hub else disable_progress_bars)()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    return str(error).strip().partition("\n")[0].rstrip()[:200]
