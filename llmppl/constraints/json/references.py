"""References: the documents that a `$ref` may point to, and the draft that a JSON schema is written in.

The package referencing knows `$id`, `$anchor`, `$dynamicRef` and JSON pointers. `registry_of` gives it the schema, the
metaschemas, and the `resources` of the caller: a mapping of URIs, or a folder. No document is read from the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from llmppl.constraints.json.keywords import check_keywords, subschemas

try:
    from jsonschema_specifications import REGISTRY
    from referencing import Registry, Resource, Specification
    from referencing import jsonschema as drafts
    from referencing.exceptions import NoSuchResource, Unresolvable
except ImportError as error:
    raise ImportError("JSON schemas need more packages: pip install llmppl[json-schema]") from error

__all__ = [
    "DRAFTS", "Resolved", "Resolver", "Resources", "draft_of", "lookup", "registry_of", "resolver_of",
    "specification_of",
]  # fmt: skip

Resolver = Any                                      # referencing's private types
Resolved = Any
Resources = Mapping[str, Any] | str | Path | None



def _own(official: Specification[Any]) -> Specification[Any]:
    """Return the rules of a draft that read all keywords of `subschemas`, in each form that some draft has."""
    def subresources(contents: Any) -> list[Any]:
        inside = subschemas(contents) if isinstance(contents, dict) else ()
        return [part for _, _, part in inside if isinstance(part, dict)]

    def in_subresource(segments: Any, resolver: Resolver, subresource: Resource[Any]) -> Resolver:
        is_object = isinstance(subresource.contents, dict)
        return official.maybe_in_subresource(segments, resolver, subresource) if is_object else resolver

    new: Any = Specification                        # of attrs, which mypy does not read
    own: Specification[Any] = new(
        name=official.name, id_of=official.id_of, subresources_of=subresources, maybe_in_subresource=in_subresource,
        anchors_in=lambda specification, contents: official.anchors_in(contents),
    )
    return own


_OFFICIAL = {
    3: drafts.DRAFT3, 4: drafts.DRAFT4, 6: drafts.DRAFT6, 7: drafts.DRAFT7,
    2019: drafts.DRAFT201909, 2020: drafts.DRAFT202012,
}  # fmt: skip
DRAFTS = {draft: _own(each) for draft, each in _OFFICIAL.items()}
_DRAFT = re.compile(r"json-schema\.org/draft[-/]0?([0-9]+)")


def specification_of(schema: Any, default: Specification[Any] | None = None) -> Specification[Any]:
    """Return the draft that `$schema` names. Without one, it is 2020-12, or draft 7 if some `items` is a list."""
    given = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(given, str):
        named = _DRAFT.search(given)
        return DRAFTS.get(int(named[1]) if named else 0, default or DRAFTS[2020])
    return default or DRAFTS[7 if _has_list_of_items(schema) else 2020]


def _has_list_of_items(schema: Any) -> bool:
    todo = [schema]
    for node in todo:                               # grows
        if isinstance(node, dict):
            if isinstance(node.get("items"), list):
                return True
            todo += [part for _, _, part in subschemas(node)]
    return False


def draft_of(specification: Specification[Any]) -> int:
    """Return 3, 4, 6, 7, 2019 or 2020."""
    return next((draft for draft, each in DRAFTS.items() if each is specification), 2020)


def registry_of(schema: Any, resources: Resources = None) -> Registry[Any]:
    """Return the registry of a schema, the metaschemas and the caller's resources.

    Parameters
    ----------
    schema : dict or bool
        It is the resource "", and that of its `$id`.
    resources : mapping of URI to schema (dict, bool or str of JSON), or folder
        A file of the folder stands for any URI whose last parts are its path, and is read when a `$ref` needs it. A URI
        of the mapping without a scheme is found in the same way.

    Raises
    ------
    TypeError
        `resources` is neither.
    ValueError
        A resource of the mapping, or `resources` as a folder, is wrong.
    """
    specification = specification_of(schema)
    names: dict[str, Any] = {}
    if isinstance(resources, Mapping):
        for uri, each in resources.items():
            names[uri.removesuffix("#")] = _resource(each, specification, uri)
    elif resources is not None and not isinstance(resources, str | Path):
        raise TypeError(f"resources is a mapping of URIs to schemas or a folder, not {type(resources).__name__}")
    folder = None if resources is None or isinstance(resources, Mapping) else Path(resources).resolve()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"resources: there is no folder {str(resources)!r}; a mapping of URIs to schemas would work")
    registry = Registry(retrieve=_Retrieve(folder, names, specification)).combine(REGISTRY)  # type: ignore[call-arg]
    registry = registry.with_resources([*names.items(), ("", specification.create_resource(schema))])
    try:
        return registry.crawl()
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"JSON schema: a $schema or $id inside is wrong ({error})") from None


def resolver_of(schema: Any, registry: Registry[Any]) -> Resolver:
    """Return the resolver with which the reading of a schema begins."""
    return registry.resolver(specification_of(schema).create_resource(schema).id() or "")


def lookup(resolver: Resolver, ref: str, place: str, keyword: str = "$ref") -> Resolved:
    """Return the schema (`.contents`) that a `$ref`, `$dynamicRef` or `$recursiveRef` points to, and its `.resolver`.

    Raises ValueError if it leads nowhere, or to no schema.
    """
    try:
        found = drafts.lookup_recursive_ref(resolver) if keyword == "$recursiveRef" else resolver.lookup(ref)
        if isinstance(found.contents, bool | dict):
            return found
        reason = f"leads to {type(found.contents).__name__}, which is no schema"
    except (Unresolvable, LookupError, ValueError, TypeError, AttributeError) as error:
        cause = error.__cause__.__cause__ if error.__cause__ else None
        reason = f"cannot be read: {cause}" if isinstance(cause, ValueError) else "leads nowhere"
    uri = "" if ref.startswith("#") else f"; resources={{{ref.partition('#')[0]!r}: schema}} or a folder would work"
    raise ValueError(f"JSON schema at {place}, {keyword!r}: {ref!r} {reason}{uri}")


class _Retrieve:
    """Reader of files of a folder, or of names of a mapping, by the last parts of a URI. It reads each file once."""

    def __init__(self, folder: Path | None, names: dict[str, Any], specification: Specification[Any]) -> None:
        self.folder, self.specification = folder, specification
        self.known: dict[str, Resource[Any]] = {uri: each for uri, each in names.items() if not urlsplit(uri).scheme}

    def __call__(self, uri: str) -> Resource[Any]:
        parts = [part for part in unquote(urlsplit(uri).path).split("/") if part not in ("", ".")]
        if ".." not in parts and not urlsplit(uri).scheme == "urn":
            for i in range(len(parts)):
                name = "/".join(parts[i:])
                if name not in self.known and self.folder is not None:
                    self.read(name)
                if name in self.known:
                    return self.known[name]
        raise NoSuchResource(uri)

    def read(self, name: str) -> None:
        assert self.folder is not None
        file = (self.folder / name).resolve()
        if file.is_relative_to(self.folder) and file.is_file():
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                raise ValueError(f"the resource {str(file)!r} is not UTF-8") from None
            self.known[name] = _resource(text, self.specification, name)


def _resource(schema: Any, default: Specification[Any], uri: str) -> Resource[Any]:
    """Return a resource, from a schema or its JSON. Raises ValueError if it is neither."""
    try:
        contents = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the resource {uri!r} is not JSON: {error}") from None
    check_keywords(contents, uri)
    return specification_of(contents, default).create_resource(contents)
