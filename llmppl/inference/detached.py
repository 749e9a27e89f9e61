"""Saved: what is kept of a particle outside of its process and without its language model: text, weight, plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmppl.support.shared import Shared


@dataclass(frozen=True)
class SavedParticle:
    """A particle as it was saved: `str` is its text, and it has those of its attributes that are plain data.

    Plain data are texts, numbers, arrays of numbers, None, and lists, tuples, sets and dicts of plain data. A token is
    its id; a context is the tuple of its tokens' ids, and `lm.at(particle.context)` is the context again.
    """

    text: str
    log_weight: float
    cut: bool = False
    attribution: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("attributes", {})   # which is not there yet when pickle asks
        if name not in attributes:
            raise AttributeError(f"a saved particle has no {name!r}: there was none, or it was no plain data")
        return attributes[name]

    def __str__(self) -> str:
        return self.text


def saved(particle: Any) -> SavedParticle:
    """What is kept of `particle`."""
    if isinstance(particle, SavedParticle):
        return particle
    attributes = dict[str, Any]()
    for name, value in getattr(particle, "__dict__", {}).items():
        if not name.startswith("_") and name not in ("log_weight", "cut", "attribution"):
            try:
                attributes[name] = _plain(value)
            except (TypeError, RecursionError):         # it is of another type, or holds itself
                continue
    return SavedParticle(str(particle), particle.log_weight, particle.cut, particle.attribution, attributes)


def _plain(value: Any) -> Any:
    """`value` as plain data; TypeError if it is none."""
    if value is None or isinstance(value, np.generic) or (isinstance(value, str) and isinstance(value, Shared)):
        return value                                    # a Text, which keeps its bytes
    kind: Any
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    for several in (list, tuple, set, frozenset):
        if isinstance(value, several):
            return several(map(_plain, value))
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return tuple(map(int, value.tokens))
    raise TypeError(f"{type(value).__name__} is no plain data")
