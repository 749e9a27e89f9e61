"""Loading: a transformers model and its tokenizer, from the package, a folder, a GGUF file or the hub."""

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
from llmppl.support.arguments import unknown_option
from llmppl.support.locks import Turn

MISSING = {                                             # by whether there is a folder
    False: "no such folder is here, and it could not be had from the hub either",
    True: "the folder holds no model and tokenizer that transformers can load",
}
SAVED = r"(\.safetensors|\.bin|\.index\.json)$", r"^config\.json$", r"token|^vocab"
OPTIONS = (                                             # of ours, and the commonest of transformers
    "engine", "cache_bytes", "row_bytes", "max_batch_tokens", "eos_ids", "dtype", "device", "device_map", "revision",
    "token", "trust_remote_code", "cache_dir", "attn_implementation", "quantization_config",
)  # fmt: skip
TIED = "parts that share weights, as embedding and head often do, have to be in the same place"

_ONE_AT_A_TIME = Turn()                 # transformers loads under settings of the process, such as how tensors are made


def load(name: str | Path | None, *, dtype: Any, device: Any, device_map: Any, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a hub id, folder or GGUF file, or FileNotFoundError; None is our own model, verified.

    What is on this machine is used as it is; the hub is asked for what is not.
    """
    if None not in (device, device_map):
        raise ValueError("give device= (one for the whole model) or device_map= (accelerate spreads it), not both")
    if device_map is not None and find_spec("accelerate") is None:
        raise ImportError("device_map= needs accelerate: pip install llmppl[device-map]")
    device = None if device is None else _device(device)
    place = device if device_map is None else device_map
    on_cpu = getattr(place, "type", place) in (None, "cpu", {"": "cpu"})
    dtype = _dtype(dtype, on_cpu or not torch.accelerator.is_available())
    if name is None:
        verify()
        name = EMBEDDED
    source = str(name)
    packed = gguf.find(source)
    if packed is not None:
        with _ONE_AT_A_TIME.lock:
            source = str(gguf.converted(packed.file))
    folder = os.path.isdir(source)
    local_only = options.pop("local_files_only", False) or folder
    shared = {key: options[key] for key in ("revision", "token", "trust_remote_code", "cache_dir") if key in options}

    def attempt(local: bool) -> tuple[Any, Any]:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, **shared)
        with _ONE_AT_A_TIME.lock, _progress_bars(shown=not local):
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
                said = f"device_map={device_map!r} cannot be followed ({first_line(error)}); {TIED}"
                raise ValueError(said) from error
            raise                                       # there is a model; what is wrong is something else
        raise FileNotFoundError(
            f"no language model {source!r}: {MISSING[folder]} ({first_line(error)}). Give a hub id such as 'gpt2' "
            "(with a network), a folder written by save_pretrained of a model and its tokenizer, a GGUF file, "
            "'smollm2' or nothing, for the small model that ships with the package"
        ) from error


def _dtype(dtype: Any, on_cpu: bool) -> Any:
    """`dtype` as transformers takes it; where none is given, float32 on a CPU and the checkpoint's own elsewhere."""
    if dtype is None:
        return torch.float32 if on_cpu else "auto"
    if dtype != "auto" and not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"dtype {dtype!r} is not one of torch's: give 'float32', 'bfloat16', 'float16' or 'auto'")
    return dtype


def _device(device: Any) -> torch.device:
    """`device` as torch knows it, if it is there."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        there = "'cpu'"
        if torch.accelerator.is_available():
            there += f" or {str(torch.accelerator.current_accelerator())!r}"
        raise ValueError(f"device {device!r} cannot be used here ({first_line(error)}); give {there}") from error
    return found


def _complete(folder: str) -> bool:
    """Whether a folder has what a saved model and its tokenizer have."""
    names = "\n".join(os.listdir(folder))
    return all(re.search(name, names, re.MULTILINE) for name in SAVED)


def _hub_answers(seconds: float = 5.0) -> bool:
    """Whether the hub can be reached; transformers itself would try for most of a minute."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):                       # whatever the hub's client raises
            get_session().head(constants.ENDPOINT, timeout=seconds)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # a name server that is gone heeds no timeout
    thread.start()
    thread.join(seconds)
    return answered.is_set()


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Leave the progress bars of transformers and the hub as they are, or hide them for a while.

    They are not hidden from who has asked transformers to say more (`logging.set_verbosity_info()`).
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
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0].rstrip()[:200]
