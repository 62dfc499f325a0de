from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismmoe.errors import UsageError
from vismmoe.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 1048576),
        (17, 17),
        ("6GiB", 6 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 * 2**29),
        ("1KiB", 1024),
        ("2kB", 2000),
        ("3 B", 3),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "6G", "-1", "1e9", "6 GiB please", "1.5.2MB", "0x10", "inf", "nan", "1,5GB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="6GiB"):
        parse_size(text)


@given(st.integers(0, 2**70))
def test_whole_bytes_survive_unchanged_however_large(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back_within_a_percent(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= size_bytes / 100


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**20 - 1, "1.00 MiB"), (123 * 2**20, "123 MiB")],
)
def test_sizes_are_shown_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
