"""What msgspec finds wrong with data from outside, in words that help a user to correct it.

Settings, cluster files and HTTP bodies use it. msgspec reports neither the allowed values nor the
known fields, so this looks at the type that was wanted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

_MISSING = re.compile("missing required field `([^`]*)`")
_UNKNOWN = re.compile("unknown field `([^`]*)`")
_BOUND = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+)")
_LIMITS = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
_KIND = re.compile("Invalid enum value|Expected `[^`]*`, got `([^`]*)`")
_USER = re.compile(r"(?:(?<=//)|^(?!\w+://))[^\s'\"]*@")
_MOST_SHOWN = 200
_STEP = re.compile(r"([^.\[\]]+)|\[(?:\d+|\.\.\.)\]")
# it is slow, and a client that errs may err often
_type_info = lru_cache(maxsize=64)(inspect.type_info)
_WORDS: tuple[tuple[type[inspect.Type] | tuple[type[inspect.Type], ...], str], ...] = (
    (inspect.IntType, "a whole number"),
    (inspect.FloatType, "a number"),
    (inspect.BoolType, "true or false"),
    (inspect.StrType, "text"),
    ((inspect.CollectionType, inspect.TupleType), "a list"),
    ((inspect.StructType, inspect.DictType), "an object"),
)


def shortened(text: str) -> str:
    """Text that a user sent, for an error: its first 200 characters."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def in_words(error: msgspec.MsgspecError, shape: Any) -> tuple[str, str]:
    """(path of the field at fault, "" for all; what it must be) of data that does not fit
    `shape`."""
    what, of_keys, path = str(error).partition(" - at `key` in `$")
    if not of_keys:
        what, _, path = what.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if of_keys:
        return path, "its keys must be text"
    if (missing := _MISSING.search(what)) is not None:
        return f"{path}.{missing[1]}".lstrip("."), "is missing"
    if (unknown := _UNKNOWN.search(what)) is not None:
        known = [name for kind in _at(shape, path) for name in _fields(kind)]
        hint = f"there is no such field; {nearest(unknown[1], known)}"
        return f"{path}.{unknown[1]}".lstrip("."), hint
    if (bound := _BOUND.search(what)) is not None:
        return path, "must be " + _LIMITS[bound[1]].format(bound[2].removesuffix(".0"))
    if (found := _KIND.match(what)) is not None and (wanted := _choices(_at(shape, path))):
        *others, last = wanted
        text = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
        return path, text + (", not null" if found[1] == "null" else "")
    if "matching regex" in what and (meant := _meant(shape, path)):
        return path, f"must be {meant}"
    return path, what[:1].lower() + what[1:]


def integers(shape: Any) -> re.Pattern[bytes]:
    """What matches an integer field of `shape` in JSON if it is written like 4.0: the field's name
    with the colon, the integer, and the rest. In text the quotes of such bytes are escaped."""
    return _integers(shape)


@lru_cache(maxsize=64)
def _integers(shape: Any) -> re.Pattern[bytes]:
    structs = [kind for kind in _at(shape, "") if isinstance(kind, inspect.StructType)]
    names = [
        field.encode_name
        for struct in structs
        for field in struct.fields
        if any(isinstance(kind, inspect.IntType) for kind in _each(field.type))
    ]
    named = "|".join(names).encode()
    return re.compile(rb'("(?:%b)"\s*:\s*)(-?\d{1,15})\.0+(?=[\s,}])' % named)


def without_password(url: str) -> str:
    """The URL, whatever else is wrong with it, without what may be a name and a password: errors
    and lists show it."""
    return _USER.sub("***@", url)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that is most like this one; `cutoff`: how similar it must be."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, cutoff)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _at(shape: Any, path: str) -> list[inspect.Type]:
    """The types that the value at this path may have."""
    return [it for kind in _said(shape, path) for it in _each(kind)]


def _meant(shape: Any, path: str) -> str:
    """The description of the text at this path; its pattern is for machines."""
    kinds = [it for kind in _said(shape, path) for it in _either(kind)]
    said = [it.extra_json_schema for it in kinds if isinstance(it, inspect.Metadata)]
    return next((it["description"] for it in said if it and "description" in it), "")


def _said(shape: Any, path: str) -> list[inspect.Type]:
    """The types at the path, as they are written."""
    kinds = [_type_info(shape)]
    for step in _STEP.finditer(path):
        kinds = [below for kind in kinds for it in _each(kind) for below in _below(it, step[1])]
    return kinds


def _either(kind: inspect.Type) -> Iterable[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _each(kind: inspect.Type) -> Iterator[inspect.Type]:
    for it in _either(kind):
        if isinstance(it, inspect.Metadata):
            yield from _each(it.type)
        else:
            yield it


def _below(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types of a field, or of an element."""
    match kind:
        case inspect.StructType(fields=fields) if field is not None:
            yield from (it.type for it in fields if it.encode_name == field)
        case inspect.DictType(value_type=inner) | inspect.CollectionType(item_type=inner):
            yield inner
        case inspect.TupleType(item_types=inners):
            yield from inners


def _fields(kind: inspect.Type) -> list[str]:
    return [it.encode_name for it in kind.fields] if isinstance(kind, inspect.StructType) else []


def _choices(kinds: Sequence[inspect.Type]) -> list[str]:
    found: list[str] = []
    for kind in kinds:
        if isinstance(kind, inspect.LiteralType):
            found += [str(value) for value in kind.values]
        found += [text for classes, text in _WORDS if isinstance(kind, classes)]
    return found
