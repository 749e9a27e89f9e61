"""Python types as JSON: the schema of a type, and the reader of its values. Both are pydantic's.

The schema is narrowed so that every text of it can be read back. Objects have no members that their type does not name,
and formats are regular expressions (`automata/formats.py`), because readers of schemas interpret formats differently.
"""

from __future__ import annotations

import functools
import sys
import typing
from typing import TYPE_CHECKING, Any

from llmppl.constraints.automata.formats import FORMATS
from llmppl.constraints.json.checks import places
from llmppl.support.arguments import is_hashable, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["read", "schema_of"]


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises TypeError if its values have no JSON, ImportError without pydantic."""
    return _of(kind)[1]


def read(kind: Any, value: Any, *, json: bool) -> Any:
    """Return `value`, which is JSON text if `json`, as an object of a type. Raises ValueError if it is none."""
    from pydantic import ValidationError

    adapter = _of(kind)[0]
    try:
        return adapter.validate_json(value) if json else adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join((".".join(map(str, first["loc"])), first["msg"])).removeprefix(": ")) from error


def _of(kind: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    return (_made if is_hashable(kind) else _made.__wrapped__)(kind)


@functools.lru_cache(64)
def _made(kind: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
    except ImportError as error:
        raise ImportError("a type as JSON needs pydantic: pip install llmppl[json-schema]") from error
    try:
        adapter = TypeAdapter(_readable(kind))
        schema = adapter.json_schema()
    except (PydanticUserError, NameError, RecursionError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"a constraint cannot be the type {shown(kind)}: {why}. A pydantic model, a dataclass, a TypedDict, "
            "Literal[...], an Enum, int, list[...] and the like would work; for other texts Regex(...) or Grammar(...)"
        ) from None
    for _, node in places(schema):
        _narrow(node)
    return adapter, schema


def _narrow(node: dict[str, Any]) -> None:
    """Forbid unnamed members, replace formats by patterns, and read choices by a tag as `anyOf`."""
    if node.get("type") == "object":
        node.setdefault("additionalProperties", False)
    if node.get("format") in FORMATS:
        node["pattern"] = f"^{FORMATS[node.pop('format')]}$"
    if node.pop("discriminator", None):
        node["anyOf"] = node.pop("oneOf")


def _readable(kind: Any) -> Any:
    """Replace every `typing.TypedDict` in a type by that of `typing_extensions`, which pydantic needs before 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        from typing_extensions import TypedDict

        hints = {name: _readable(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
        bare = {
            name: typing.get_args(hint)[0] if typing.get_origin(hint) in (typing.Required, typing.NotRequired) else hint
            for name, hint in hints.items()
        }
        optional = bare.keys() - kind.__required_keys__
        fields = {name: typing.NotRequired[hint] if name in optional else hint for name, hint in bare.items()}
        return TypedDict(kind.__name__, fields)     # type: ignore[operator]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (None, typing.Literal) or (new := tuple(map(_readable, inner))) == inner:
        return kind
    return typing.Union[new] if origin.__module__ == "types" else origin[new]       # noqa: UP007
