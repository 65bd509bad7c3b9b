"""What msgspec finds wrong, in words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from moonserve.invalid import in_words, nearest


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """With a choice."""

    kind: Literal["a", "b", "c"] = "a"


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """With one of each."""

    name: str
    count: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    share: float = 0.0
    on: bool = False
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}
    when: Literal["off", "end"] | Annotated[int, msgspec.Meta(ge=1)] = "end"
    mixed: str | list[int] = ""
    word: Annotated[str, msgspec.Meta(pattern="^[a-z]*$", description="small letters")] | None = ""


@pytest.mark.parametrize(
    ("given", "path", "what"),
    [
        ({}, "name", "is missing"),
        ([], "", "must be an object"),
        (None, "", "must be an object, not null"),
        ({"name": None}, "name", "must be text, not null"),
        ({"name": "n", "count": 0}, "count", "must be 1 or more"),
        ({"name": "n", "count": 10}, "count", "must be 9 or less"),
        ({"name": "n", "count": "1"}, "count", "must be a whole number"),
        ({"name": "n", "share": "1"}, "share", "must be a number"),
        ({"name": "n", "on": 1}, "on", "must be true or false"),
        ({"name": "n", "inner": {"kind": "d"}}, "inner.kind", "must be a, b or c"),
        ({"name": "n", "inner": {"kind": 3}}, "inner.kind", "must be a, b or c"),
        ({"name": "n", "inners": [{}, {"kind": "d"}]}, "inners[1].kind", "must be a, b or c"),
        ({"name": "n", "inners": {}}, "inners", "must be a list"),
        ({"name": "n", "by_name": {"x": {"kind": ""}}}, "by_name[...].kind", "must be a, b or c"),
        ({"name": "n", "when": "soon"}, "when", "must be end, off or a whole number"),
        ({"name": "n", "mixed": None}, "mixed", "must be text or a list, not null"),
        ({"name": "n", "mixed": ["x"]}, "mixed[0]", "must be a whole number"),
        ({"name": "n", "word": "A"}, "word", "must be small letters"),
        ({"nam": "n"}, "nam", "there is no such field; did you mean name?"),
        ({"inner": {"kinds": 1}}, "inner.kinds", "there is no such field; did you mean kind?"),
        ({"inners": [{"z": 1}]}, "inners[0].z", "there is no such field; known are kind"),
    ],
)
def test_what_is_wrong_is_told_by_path_and_remedy(given: Any, path: str, what: str) -> None:
    """Every kind of fault names its field, and what that may be instead."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode(given), type=Outer)
    assert in_words(caught.value, Outer) == (path, what)


def test_a_key_that_is_no_text_is_told() -> None:
    """YAML has such."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"name": "n", "inner": {3: "x"}}, Outer)
    assert in_words(caught.value, Outer) == ("inner", "its keys must be text")


def test_a_name_that_is_near_none_is_answered_with_all() -> None:
    """So that nobody has to look them up."""
    assert nearest("x", ["aa", "bb"]) == "known are aa, bb"
