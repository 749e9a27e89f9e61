"""Identity of a program: its name, source text, options and language models, to compare a saved run with this one."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmppl.constraints.vocabulary import Vocabulary
from llmppl.lm import CachedTransformer, Context
from llmppl.lm.context import LanguageModel
from llmppl.models.model import _OWN as OWN
from llmppl.support.arguments import shown

SHAPE = {"program": str, "models": [[str]], "whole": {...: str}, "parts": {...: [str]}, "options": {...: [str]}}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_HOMES = tuple(folder + os.sep for folder in (_PACKAGE, sysconfig.get_path("stdlib")))


def identity(model: Any, **options: Any) -> tuple[dict[str, Any], list[Vocabulary]]:
    kind = type(model).__qualname__
    own = {f"the attribute {name}": value for name, value in vars(model).items() if name not in OWN}
    return identity_of(kind, own | {f"the class {kind}": type(model)}, **options)


def identity_of(program: str, own: Mapping[str, Any], **options: Any) -> tuple[dict[str, Any], list[Vocabulary]]:
    lms = list(dict.fromkeys(_language_models(list(own.values()))))
    whole = {name: digest_of_data(value, name) for name, value in own.items()}
    given = {name: [shown(value, 60), digest_of_data(value, name)] for name, value in options.items()}
    models = [[repr(lm), lm.vocab.digest.hex()[:24]] for lm in lms]
    parts = {name: ["", digest] for name, digest in whole.items()}
    found = {"program": program, "models": models, "whole": whole, "parts": parts, "options": given}
    return found, [lm.vocab for lm in lms]


def _language_models(value: Any) -> Iterator[LanguageModel]:
    if isinstance(value, CachedTransformer):
        yield value
    elif isinstance(value, Context):
        yield value.lm
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _language_models(each)


def digest_of_data(value: Any, name: str) -> str:
    """Return a digest of the source of code, the values of plain data, and the type of anything else."""
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, type | types.FunctionType):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return value.__qualname__
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_plain(each))) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value if isinstance(value, str | bytes | int | float | bool | None) else type(value).__qualname__


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    for field in ("program", "models", "whole", "options", "stream"):
        if before.get(field) != now.get(field):
            return f"its {field} was {json.dumps(before.get(field))[:80]}, and is {json.dumps(now.get(field))[:80]}"
    return None


def is_own(part: Any) -> bool:
    name = part.__name__ if isinstance(part, types.ModuleType) else part.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or _HOMES[0]
    return not (file.startswith(_HOMES) or "site-packages" in file)
