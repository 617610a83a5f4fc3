"""Durations: every spelling, the round trip, and what is refused with which remedy."""

from __future__ import annotations

import math

import pytest

from trainwright.errors import UsageError
from trainwright.recipe import Duration


@pytest.mark.parametrize(
    ("text", "value", "unit", "canonical"),
    [
        ("1000steps", 1000, "steps", "1000steps"),
        ("1step", 1, "steps", "1steps"),
        ("1e3steps", 1000, "steps", "1000steps"),
        ("2ep", 2, "ep", "2ep"),
        ("2.5epochs", 2.5, "ep", "2.5ep"),
        ("1epoch", 1, "ep", "1ep"),
        ("5e-1ep", 0.5, "ep", "0.5ep"),
        ("60s", 60, "s", "60s"),
        ("0.5s", 0.5, "s", "0.5s"),
        ("90min", 5400, "s", "5400s"),
        ("1.5h", 5400, "s", "5400s"),
        ("7tok", 7, "tok", "7tok"),
        ("1.1ktok", 1100, "tok", "1100tok"),
        ("5Mtok", 5_000_000, "tok", "5000000tok"),
        ("0.3Gtok", 300_000_000, "tok", "300000000tok"),
        ("50000samples", 50_000, "samples", "50000samples"),
        (".25run", 0.25, "run", "0.25run"),
        ("1run", 1, "run", "1run"),
        ("1e-7run", 1e-7, "run", "1e-07run"),
    ],
)
def test_spellings_and_round_trip(text: str, value: float, unit: str, canonical: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit, str(duration)) == (value, unit, canonical)
    assert Duration.parse(str(duration)) == duration
    assert hash(Duration.parse(canonical)) == hash(duration)


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("1000", "which unit", "1000steps"),
        ("0.05", "which unit", "write 0.05run, 0.05ep, 0.05s or 0.05h"),
        ("", "number with a unit", "1000steps"),
        ("steps", "number with a unit", "1000steps"),
        ("10 ep", "without spaces", "10ep"),
        ("10stps", "not a unit", "10steps"),
        ("10mtok", "not a unit", "did you mean 10"),
        ("10days", "not a unit", "min, h"),
        ("-1ep", "negative", "1000steps"),
        ("0steps", "more than 0", "1000steps"),
        ("1.5steps", "counted whole", "2steps"),
        ("0.0001ktok", "counted whole", "1tok"),
        ("1.5run", "at most 1run", "0.1run"),
        ("1e999s", "finite", "1000steps"),
        ("1e300steps", "at most 2^53", "1000steps"),
        ("9" * 6000 + "steps", "finite", "1000steps"),
        ("nanep", "number with a unit", "1000steps"),
        ("infsteps", "number with a unit", "1000steps"),
        ("٣steps", "number with a unit", "1000steps"),
        ("10ep\n", "without spaces", "10ep"),
    ],
)
def test_refused(text: str, rule: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        Duration.parse(text)
    assert rule in caught.value.message
    assert remedy in caught.value.remedy


def test_zero_only_where_allowed() -> None:
    assert Duration.parse("0steps", allow_zero=True) == Duration(0, "steps")
    with pytest.raises(UsageError, match="more than 0"):
        Duration.parse("0steps")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.5])
def test_constructor_holds_the_rules(value: float) -> None:
    with pytest.raises(UsageError):
        Duration(value, "steps")
