"""Particles as data: a `SavedParticle` is one without its language model, and a `Digest` compares two."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from llmppl.models.model import Model
from llmppl.support.shared import Shared
from llmppl.support.values import describe

_SCALARS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
_SEQUENCES: tuple[type[Any], ...] = (tuple, list, set, frozenset)
_OTHER = "log_weight", "cut", "attribution", "parsed"   # fields of a SavedParticle, and the parsed value


@dataclass(frozen=True)
class SavedParticle:
    """A particle without its language model. `str` is its text; it has the attributes that are plain data.

    Plain data are texts, numbers, arrays of numbers, None, and lists, tuples, sets and dicts of plain data. A token is
    its id. A context is the tuple of its tokens' ids, and `lm.at(particle.context)` restores it. `parsed`, of a program
    that has it, is plain data too: the fields of an object as a dict, and a date, a UUID or an enum as in JSON.

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
        attributes = vars(self).get("attributes", {})   # pickle asks before it is set
        if name == "s" and "text" in vars(self):
            return self.text
        if name not in attributes:
            known = ", ".join(dict.fromkeys(["s", "text", *attributes]))
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
            with contextlib.suppress(TypeError, RecursionError):        # it is of another type, or contains itself
                attributes[name] = plain(value)
    if not particle.cut and hasattr(type(particle), "parsed"):
        parsed = particle.parsed
        with contextlib.suppress(TypeError, ValueError, RecursionError):        # nothing shows it as data
            attributes["parsed"] = _data_of(parsed)
    return SavedParticle(str(particle), particle.log_weight, particle.cut, particle.attribution, attributes)


def _data_of(value: Any) -> Any:
    """Return a parsed value as plain data: a dataclass as a dict, other objects as pydantic writes them in JSON."""
    value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    try:
        return plain(value)
    except TypeError:
        return getattr(sys.modules.get("pydantic_core"), "to_jsonable_python", plain)(value)


def plain(value: Any) -> Any:
    """Return `value` as plain data, or raise a TypeError.

    A token becomes its id, a context the tuple of its ids, a member of an enum its value, and an object of a subclass
    one of the built-in base.
    """
    value = value.value if isinstance(value, Enum) else value
    if value is None or isinstance(value, np.generic) or (isinstance(value, str) and isinstance(value, Shared)):
        return value                                    # Shared: a Text, which keeps its bytes
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return tuple(map(int, value.tokens))
    kind = next((kind for kind in (*_SCALARS, *_SEQUENCES) if isinstance(value, kind)), None)
    if kind is not None:
        return kind(value) if kind in _SCALARS else kind(map(plain, value))
    raise TypeError(f"{type(value).__name__} is no plain data")


# ---- the digest of a particle


class Digest(NamedTuple):
    """Contents of the attributes of a particle: a digest of all but their floats, a sum of these, and of their sizes.

    Another batch rounds floats in another way. So the sums of equal particles differ by up to a hundredth.
    """

    text: str
    total: float
    size: float

    def like(self, other: Digest) -> bool:
        return self.text == other.text and math.isclose(self.total, other.total, abs_tol=0.01 * (1.0 + self.size))


def digest_of(particle: Any) -> Digest:
    """Return the digest of the attributes of a particle, except those that its copies share and those of inference."""
    words, floats = list[str](), [np.empty(0)]
    _walk(particle, words, floats, ())
    numbers = np.nan_to_num(np.concatenate(floats), posinf=1e3, neginf=-1e3)
    weights = 1.0 + 1.0 / (2 + np.arange(numbers.size))             # so that the order of floats matters
    text = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    return Digest(text, float(numbers @ weights), float(np.abs(numbers) @ weights))


def _walk(value: Any, words: list[str], floats: list[Any], inside: tuple[int, ...]) -> None:
    """Append the contents of a value: its floats to `floats`, all else in words."""
    words.append(type(value).__qualname__)
    if isinstance(value, str | bytes | int | complex | None):
        words.append(repr(int(value) if isinstance(value, int) else getattr(value, "bytes", value)))
    elif isinstance(value, float | np.ndarray | np.generic) and not (array := np.asarray(value)).dtype.hasobject:
        words += [array.dtype.str, repr(array.shape), "" if array.dtype.kind == "f" else array.tobytes().hex()]
        floats += [array.ravel().astype(np.float64)] * (array.dtype.kind == "f")
    elif id(value) in inside:
        words.append(f"{len(inside) - inside.index(id(value))} up")
    else:
        for each in _parts(value):
            _walk(each, words, floats, (*inside, id(value)))


def _parts(value: Any) -> Sequence[Any]:
    """Return the parts of an object: its elements, or those of its pickle; none for a function or a lock."""
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(describe, value))
    if isinstance(value, Model):
        left_out = {"finished"}.union(*(vars(base).get("shared", ()) for base in type(value).__mro__))
        return [part for part in sorted(vars(value).items()) if part[0] not in left_out and part[0][-1:] != "_"]
    if hasattr(value, "next_token") and hasattr(value, "tokens"):               # a context
        return [int(token) for token in value.tokens]
    if hasattr(value, "detach") and hasattr(value, "cpu"):                      # a tensor
        return [value.detach().cpu().double().numpy()]
    try:
        made = () if isinstance(value, Shared | type) else value.__reduce_ex__(4)
    except Exception:                                   # it has no pickle
        return []
    return [list(each) if isinstance(each, Iterator) else each for each in made[1:]]
