"""References: the documents that a `$ref` may point to, and the draft that a JSON schema is written in.

The package referencing knows `$id`, `$anchor`, `$dynamicRef` and JSON pointers. `registry_of` gives it the schema, the
metaschemas, and the `resources` of the caller: a mapping of URIs, or a folder. No document is read from the network.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import attrs
from jsonschema_specifications import REGISTRY
from referencing import Registry, Specification
from referencing import jsonschema as drafts
from referencing.exceptions import NoSuchResource, Unresolvable

from llmppl.constraints.json.keywords import check_keywords, foreign, nodes

_DRAFT4 = attrs.evolve(  # with true and false, which schemas in use have all the same
    cast(Any, drafts.DRAFT6),
    name="draft-04",
    id_of=lambda each: drafts.DRAFT4.id_of(each) if isinstance(each, dict) else None,
    anchors_in=lambda spec, each: drafts.DRAFT4.anchors_in(each) if isinstance(each, dict) else [],
)
DRAFTS: dict[int, Specification[Any]] = {
    4: _DRAFT4,
    6: drafts.DRAFT6,
    7: drafts.DRAFT7,
    2019: drafts.DRAFT201909,
    2020: drafts.DRAFT202012,
}
_DRAFT = re.compile(r"json-schema\.org/draft[-/]0?([0-9]+)")
Resources = Mapping[str, Any] | str | Path | None


def draft_of(schema: Any, default: int | None = None) -> int:
    """Return the draft that `$schema` names: 4, 6, 7, 2019 or 2020.

    Without one, it is the default, or else 2020, or 7 if some `items` is a list.
    """
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        named = _DRAFT.search(schema["$schema"])
        if named and int(named[1]) in DRAFTS:
            return int(named[1])
    if default is not None:
        return default
    has_list = any(isinstance(node.get("items"), list) for _, node in nodes(schema))
    return 7 if has_list else 2020


def registry_of(schema: Any, resources: Resources, notes: list[str]) -> Registry[Any]:
    """Return the registry of a schema (the resource ""), the metaschemas and the caller's resources.

    A file of a folder stands for any URI whose last parts are its path, and is read when a `$ref` needs it. Names
    in it that are no keywords join `notes`. Raises TypeError or ValueError if `resources` is neither mapping nor
    folder, or a resource is no schema.
    """
    draft = draft_of(schema)
    given = list[tuple[str, Any]]()
    folder = None
    if isinstance(resources, str | Path):
        folder = Path(resources).resolve()
        if not folder.is_dir():
            raise ValueError(
                f"resources: there is no folder {str(resources)!r}; a mapping of URIs would work"
            )
    elif isinstance(resources, Mapping):
        for uri, each in resources.items():
            given.append((uri.removesuffix("#"), _resource(each, draft, uri, notes)))
    elif resources is not None:
        raise TypeError(
            f"resources is a mapping of URIs to schemas or a folder, not {type(resources).__name__}"
        )

    def retrieve(uri: str) -> Any:
        file = _file(folder, uri)
        if file is None:
            raise NoSuchResource(uri)
        return _resource(file.read_text(encoding="utf-8-sig"), draft, uri, notes)

    make: Any = Registry  # of attrs, which mypy does not read
    try:
        given.append(("", DRAFTS[draft].create_resource(schema)))
        registry: Registry[Any] = (
            make(retrieve=retrieve).combine(REGISTRY).with_resources(given).crawl()
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"JSON schema: a $schema or $id inside is wrong ({error})") from None
    return registry


def _file(folder: Path | None, uri: str) -> Path | None:
    """Return the file inside a folder whose path is the end of a URI, the longest such path first."""
    if folder is None:
        return None
    parts = [part for part in unquote(urlsplit(uri).path).split("/") if part not in ("", ".")]
    for i in range(len(parts)):
        file = folder.joinpath(*parts[i:]).resolve()
        if file.is_relative_to(folder) and file.is_file():
            return file
    return None


def _resource(given: Any, draft: int, uri: str, notes: list[str]) -> Any:
    """Return a resource, from a schema or its JSON. Raises ValueError if it is neither."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        schema = json.loads(text, parse_float=Decimal)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"the resource {uri!r} is not JSON: {error}") from None
    check_keywords(schema, uri)
    notes += itertools.chain(*foreign(schema, f"{uri}#"))
    return DRAFTS[draft_of(schema, draft)].create_resource(schema)


def resolver_of(schema: Any, registry: Registry[Any]) -> Any:
    """Return the resolver with which the reading of a schema begins."""
    return registry.resolver(DRAFTS[draft_of(schema)].create_resource(schema).id() or "")


def lookup(resolver: Any, ref: str, place: str, keyword: str = "$ref") -> Any:
    """Return the schema (`.contents`) that a `$ref`, `$dynamicRef` or `$recursiveRef` points to, and its `.resolver`.

    Raises ValueError if it leads nowhere, or to no schema.
    """
    reason = "leads nowhere"
    try:
        if keyword == "$recursiveRef":
            found = drafts.lookup_recursive_ref(resolver)
        else:
            found = resolver.lookup(ref)
        if isinstance(found.contents, bool | dict):
            return found
        reason = f"leads to {type(found.contents).__name__}, which is no schema"
    except (Unresolvable, LookupError, TypeError, AttributeError) as error:
        cause = error.__cause__ and error.__cause__.__cause__
        if isinstance(cause, ValueError):
            reason = f"cannot be read: {cause}"
    if not ref.startswith("#"):
        reason += f"; resources={{{ref.partition('#')[0]!r}: schema}} or a folder would work"
    raise ValueError(f"JSON schema at {place}, {keyword!r}: {ref!r} {reason}")
