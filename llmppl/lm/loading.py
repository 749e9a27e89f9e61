"""Loading: a transformers model and its tokenizer, from the package, a folder or the hub."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.embedded import verify


def load(name: str | Path | None, *, dtype: Any, device: Any, device_map: Any, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a hub id or folder, or FileNotFoundError; None is the model of the package, verified."""
    if device is not None and device_map is not None:
        raise ValueError("give device= (one for the whole model) or device_map= (accelerate spreads it), not both")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype {dtype!r} is not one of torch's: give 'float32', 'bfloat16', 'float16' or 'auto'")
    if device is not None:
        device = _device(device)
    if name is None:
        verify()
    source = str(EMBEDDED if name is None else name)
    folder = os.path.isdir(source)
    if not folder and not options.get("local_files_only") and not _hub_answers():
        options["local_files_only"] = True              # what was downloaded before still loads
    alone = device_map is None or device_map in ("cpu", {"": "cpu"}) or not torch.accelerator.is_available()
    on_cpu = alone and torch.device(device or "cpu").type == "cpu"
    names = "revision", "token", "trust_remote_code", "cache_dir", "local_files_only"
    shared = {name: options[name] for name in names if name in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
        with _progress_bars(name is not None):
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype or (torch.float32 if on_cpu else "auto"), device_map=device_map, **options
            )
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and folder and _complete(source):
            raise                                       # there is a model; what is wrong is something else
        if folder:
            what = f"the folder holds no model and tokenizer that transformers can load ({first_line(error)})"
        else:
            what = f"no such folder is here, and it could not be had from the hub either ({first_line(error)})"
        raise FileNotFoundError(
            f"no language model {source!r}: {what}. Give a hub id such as 'gpt2' (with a network), a folder written by "
            "save_pretrained of a model and its tokenizer, or nothing for the small model that ships with the package"
        ) from error
    return (model if device is None else model.to(device)).eval(), tokenizer


def _device(device: Any) -> torch.device:
    """`device` as torch knows it, if it is there."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        there = "'cpu'" if accelerator is None else f"'cpu' or {accelerator.type!r}"
        raise ValueError(f"device {device!r} cannot be used here ({first_line(error)}); give {there}") from error
    return found


def _complete(folder: str) -> bool:
    """Whether a folder has what a saved model and its tokenizer have."""
    names = os.listdir(folder)
    weights = any(name.endswith((".safetensors", ".bin", ".index.json")) for name in names)
    return weights and "config.json" in names and any("token" in name or name.startswith("vocab") for name in names)


def _hub_answers(seconds: float = 5.0) -> bool:
    """Whether something listens where the hub is; transformers itself would try for most of a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme)
    place = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}") if proxy else hub
    found: list[bool] = []

    def knock() -> None:
        try:
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname or "", port), timeout=seconds).close()
            found.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=knock, daemon=True)     # a name server that is gone heeds no timeout
    thread.start()
    thread.join(seconds)
    return bool(found)


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Leave transformers' progress bars as they are, or hide them for a while."""
    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()                      # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()                   # type: ignore[no-untyped-call]


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:200]
