"""Headers for objectives, priority and tenant."""

import msgspec
import pytest

from moonserve.core.errors import BadRequest
from moonserve.core.request import Slo
from moonserve.live.openai.headers import PRIORITY, TBT, TENANT, TTFT, Ms, priority, slo, tenant


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Slo()),
        ({TTFT: "500"}, Slo(500_000, None)),
        ({TBT: " 0.5 "}, Slo(None, 500)),
        ({TTFT: "30000", TBT: "0.001"}, Slo(30_000_000, 1)),
    ],
)
def test_objectives_are_milliseconds(headers: dict[str, str], expected: Slo) -> None:
    """Positive numbers, fractions allowed; one that is not there is none."""
    assert slo(headers) == expected


def test_an_objective_has_the_bounds_that_openapi_json_states() -> None:
    """A client that keeps to them is never refused."""
    shape = msgspec.json.schema(Ms)
    least, most = shape["minimum"], shape["maximum"]
    assert slo({TTFT: str(least), TBT: str(most)}) == Slo(1, most * 1_000)
    for beyond in (least / 10, most + 1):
        with pytest.raises(BadRequest):
            slo({TTFT: str(beyond)})


@pytest.mark.parametrize("name", [TTFT, TBT])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0.0001",
        "-5",
        "+5",
        "nan",
        "inf",
        "1e3",
        "1_000",
        "500, 900",
        "5 s",
        "9" * 400,
        "²",
        "0.0000001",
    ],
)
def test_a_bad_objective_names_its_header_and_the_remedy(name: str, text: str) -> None:
    """No number of milliseconds above zero is a 400."""
    with pytest.raises(BadRequest, match=f"{name}: .* write it like 500") as refused:
        slo({name: text})
    assert refused.value.param == name
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("7", 7), ("-100", -100), ("+100", 100), (" 5 ", 5)]
)
def test_priorities_are_whole_numbers(text: str, value: int) -> None:
    """From -100 to 100; none is 0."""
    assert priority({PRIORITY: text}) == value
    assert priority({}) == 0


@pytest.mark.parametrize("text", ["", "high", "101", "-101", "1.5", "1e1", "٣", "--1"])
def test_a_bad_priority_names_its_header_and_the_range(text: str) -> None:
    """Anything else is a 400."""
    with pytest.raises(BadRequest, match=f"{PRIORITY}: .*from -100 to 100") as refused:
        priority({PRIORITY: text})
    assert refused.value.param == PRIORITY


@pytest.mark.parametrize("text", ["acme", "a-1/b_2:c@d.e", " x ", "", "9" * 64])
def test_tenants_are_plain_names(text: str) -> None:
    """Up to 64 letters, digits and marks; none is nobody's."""
    assert tenant({TENANT: text}) == text.strip()
    assert tenant({}) == ""


@pytest.mark.parametrize("text", ["a b", "é", "x" * 65, "a,b", 'a"'])
def test_a_bad_tenant_names_its_header(text: str) -> None:
    """Anything else is a 400."""
    with pytest.raises(BadRequest, match=f"{TENANT}: .*up to 64") as refused:
        tenant({TENANT: text})
    assert refused.value.param == TENANT
