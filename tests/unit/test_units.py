"""Sizes, times and rates: what is read, what is refused, and that formatting loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachelink_core import units
from cachelink_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8_000_000_000),
        ("8GiB", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 512 MiB ", 512 * 2**20),
        ("4kB", 4000),
        ("4KB", 4000),
        ("4096", 4096),
        ("7B", 7),
        (12, 12),
        ("0", 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "8gb", "8 G", "-1", -1, "1e9", "0.3B", True, None, 1.5, "8GBs", "٣B", [1]]
)
def test_what_is_no_size_is_named(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("30s", 30.0),
        ("2m", 120.0),
        ("500ms", 0.5),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1d", 86400.0),
        ("0.1s", 0.1),
        ("250us", 0.00025),
        ("45", 45.0),
        (45, 45.0),
        (0.25, 0.25),
    ],
)
def test_times(text: object, duration_s: float) -> None:
    assert units.parse_duration(text) == duration_s


@pytest.mark.parametrize(
    "text",
    ["", "s", "30 sec", "30S", "-1s", -1, "30m1h", "1h1h", "5s?", "inf", float("inf"), False, None],
)
def test_what_is_no_time_is_named(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1GB/s", 10**9), ("10Gbit/s", 1_250_000_000), ("2MiB/s", 2**21), ("125", 125), (125, 125)],
)
def test_rates(text: object, bytes_per_s: int) -> None:
    assert units.parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["1GB", "10Gbit", "1/s", "/s", "fast", -1, None, True, "1GB/m"])
def test_what_is_no_rate_is_named(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_rate(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**63))
def test_a_size_survives_its_text(size_bytes: int) -> None:
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes
    assert units.parse_rate(units.format_rate(size_bytes)) == size_bytes


@given(st.floats(0, 1e9))
def test_a_time_survives_its_text(duration_s: float) -> None:
    assert units.parse_duration(units.format_duration(duration_s)) == duration_s


def test_text_is_short() -> None:
    assert units.format_size(4_000_000_000) == "4GB"
    assert units.format_size(2**30) == "1GiB"
    assert units.format_duration(0.5) == "500ms"
    assert units.format_duration(90.0) == "90s"
    assert units.format_duration(0.0) == "0s"
