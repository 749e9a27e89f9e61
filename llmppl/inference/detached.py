"""Particles as data: a `SavedParticle` is one without its language model."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from llmppl.support.shared import Shared
from llmppl.support.values import DATES

_SCALARS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
_SEQUENCES: tuple[type[Any], ...] = (tuple, list, set, frozenset)
_OTHER = (
    "log_weight",
    "cut",
    "attribution",
    "parsed",
)  # fields of a SavedParticle, and the parsed value


@dataclass(frozen=True)
class SavedParticle:
    """A particle without its language model. `str` is its text; it has the attributes that are plain data.

    Plain data are texts, numbers, arrays of numbers, dates, None, and lists, tuples, sets and dicts of plain data. A
    token is its id. A context is the tuple of its tokens' ids, and `lm.at(particle.context)` restores it. `parsed` is
    plain data too: an object of pydantic is a dict, as in JSON, and an enum its value.

    Examples
    --------
    >>> import pickle
    >>> posterior = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, seed=0)
    >>> saved = pickle.loads(pickle.dumps(posterior)).best
    >>> saved.text, str(lm.at(saved.context).text)
    (' happy', 'He was happy')
    """

    text: str
    log_weight: float
    cut: bool = False
    attribution: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("attributes", {})  # pickle asks before it is set
        if name == "s" and "text" in vars(self):
            return self.text
        if name not in attributes:
            known = ", ".join(dict.fromkeys(["s", "text", *attributes]))
            raise AttributeError(
                f"a saved particle has no {name!r}, it has {known}: only plain data is saved"
            )
        return attributes[name]

    def __str__(self) -> str:
        return self.text


def detach(particle: Any) -> SavedParticle:
    """Return the text, the weight, the plain attributes and the parsed value of `particle`."""
    if isinstance(particle, SavedParticle):
        return particle
    attributes = {}
    for name, value in getattr(particle, "__dict__", {}).items():
        if not name.startswith("_") and name not in _OTHER:
            # it is of another type, or contains itself
            with contextlib.suppress(TypeError, RecursionError):
                attributes[name] = plain(value)
    if not particle.cut and hasattr(type(particle), "parsed"):
        parsed = particle.parsed
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # nothing shows it as data
            attributes["parsed"] = data_of(parsed)
    return SavedParticle(
        str(particle), particle.log_weight, particle.cut, particle.attribution, attributes
    )


def data_of(value: Any) -> Any:
    """Return a parsed value as plain data: a dataclass as a dict, other objects as pydantic writes them in JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    try:
        return plain(value)
    except TypeError:
        return getattr(sys.modules.get("pydantic_core"), "to_jsonable_python", plain)(value)


def plain(value: Any) -> Any:
    """Return `value` as plain data, or raise a TypeError.

    A token becomes its id, a context the tuple of its ids, a member of an enum its value, and an object of a subclass
    one of the built-in base.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or type(value) in DATES or isinstance(value, np.generic):
        return value
    if isinstance(value, str) and isinstance(value, Shared):
        return value  # a Text, which keeps its bytes
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return tuple(map(int, value.tokens))
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return kind(map(plain, value))
    raise TypeError(f"{type(value).__name__} is no plain data")
