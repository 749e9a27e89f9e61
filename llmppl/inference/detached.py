"""Detached particles: text, weight and plain data of a particle, outside of its process and without its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmppl.support.shared import Shared

_SCALARS: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, str, bytes)
_SEQUENCES: tuple[Callable[[Any], Any], ...] = (tuple, list, set, frozenset)
_OTHER = "log_weight", "cut", "attribution", "parsed"   # fields of a SavedParticle, and the parsed value


@dataclass(frozen=True)
class SavedParticle:
    """A particle without its language model. `str` is its text; it has the attributes that are plain data.

    Plain data are texts, numbers, arrays of numbers, None, and lists, tuples, sets and dicts of plain data. A token is
    its id. A context is the tuple of its tokens' ids, and `lm.at(particle.context)` restores it. `parsed`, of a program
    that has it, is plain data too: the fields of an object as a dict.
    """

    text: str
    log_weight: float
    cut: bool = False
    attribution: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("attributes", {})   # pickle asks before it is set
        if name == "s" and "text" in vars(self):
            return self.text
        if name not in attributes:
            known = ", ".join(["s", "text", *attributes])
            raise AttributeError(f"a saved particle has no {name!r}, it has {known}: only plain data is saved")
        return attributes[name]

    def __str__(self) -> str:
        return self.text


def detach(particle: Any) -> SavedParticle:
    """Return the text, the weight, the plain attributes and the parsed value of `particle`."""
    if isinstance(particle, SavedParticle):
        return particle
    attributes = dict[str, Any]()
    for name, value in getattr(particle, "__dict__", {}).items():
        if not name.startswith("_") and name not in _OTHER:
            try:
                attributes[name] = plain(value)
            except (TypeError, RecursionError):         # it is of another type, or contains itself
                continue
    if not particle.cut and hasattr(type(particle), "parsed"):
        attributes["parsed"] = plain(_fields_of(particle.parsed))
    return SavedParticle(str(particle), particle.log_weight, particle.cut, particle.attribution, attributes)


def _fields_of(value: Any) -> Any:
    """Return a parsed object as a dict: that of a pydantic model, or the fields of a dataclass."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def plain(value: Any) -> Any:
    """Return `value` as plain data: tokens as ids, contexts as tuples of ids, subclasses as their builtin base.

    Raises
    ------
    TypeError
        If `value` is not plain data.
    """
    if value is None or isinstance(value, np.generic) or (isinstance(value, str) and isinstance(value, Shared)):
        return value                                    # Shared: a Text, which keeps its bytes
    for kind in _SCALARS:
        if isinstance(value, kind):                     # type: ignore[arg-type]
            return kind(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    for kind in _SEQUENCES:
        if isinstance(value, kind):                     # type: ignore[arg-type]
            return kind(map(plain, value))
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return tuple(map(int, value.tokens))
    raise TypeError(f"{type(value).__name__} is no plain data")
