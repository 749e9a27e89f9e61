"""Detached particles: text, weight and plain data of a particle, outside of its process and without its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmppl.inference.resuming.codec import plain


@dataclass(frozen=True)
class SavedParticle:
    """A particle without its language model. `str` is its text; it has the attributes that are plain data.

    Plain data are texts, numbers, arrays of numbers, None, and lists, tuples, sets and dicts of plain data. A token is
    its id. A context is the tuple of its tokens' ids, and `lm.at(particle.context)` restores it.
    """

    text: str
    log_weight: float
    cut: bool = False
    attribution: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("attributes", {})   # pickle asks before it is set
        if name not in attributes:
            raise AttributeError(f"a saved particle has no {name!r}: there was none, or it was no plain data")
        return attributes[name]

    def __str__(self) -> str:
        return self.text


def detach(particle: Any) -> SavedParticle:
    """Return the text, the weight and the plain attributes of `particle`."""
    if isinstance(particle, SavedParticle):
        return particle
    attributes = dict[str, Any]()
    for name, value in getattr(particle, "__dict__", {}).items():
        if not name.startswith("_") and name not in ("log_weight", "cut", "attribution"):
            try:
                attributes[name] = plain(value)
            except (TypeError, RecursionError):         # it is of another type, or contains itself
                continue
    return SavedParticle(str(particle), particle.log_weight, particle.cut, particle.attribution, attributes)
