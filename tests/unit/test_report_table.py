"""Quantities as text: prefixes, the borders between them, and what is not a number."""

import math

import pytest

from meshwright.report import table


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512.5, "512.5 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),  # would read 1024.0 KiB
        (1.5e9, "1.4 GiB"),
        (16 * 2**30, "16.0 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**50, "5,000.0 PiB"),
        (-3 * 2**20, "-3.0 MiB"),
    ],
)
def test_bytes(size_bytes: float, text: str) -> None:
    assert table.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-10, "0.3 ns"),
        (5e-9, "5.0 ns"),
        (28e-6, "28.0 us"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.0 s"),  # would read 1000.0 ms
        (12, "12.0 s"),
        (119.4, "119.4 s"),
        (119.96, "2 min 0 s"),
        (125, "2 min 5 s"),
        (3599.6, "1 h 0 min"),
        (7199, "2 h 0 min"),
        (12_000, "3 h 20 min"),
        (3.6e6 + 60, "1,000 h 1 min"),
        (-0.5, "-500.0 ms"),
        (-300, "-5 min 0 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert table.format_seconds(seconds) == text


def test_rates_and_amounts() -> None:
    assert table.format_flops(0) == "0 FLOP"
    assert table.format_flops(2.5e18) == "2.5 EFLOP"
    assert table.format_flops_rate(1.25e14) == "125.0 TFLOP/s"
    assert table.format_flops_rate(999.96e9) == "1.0 TFLOP/s"
    assert table.format_bytes_rate(25e9) == "25.0 GB/s"
    assert table.format_bytes_rate(4e9) == "4.0 GB/s"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1024, "1,024"), (9999, "9,999"), (10_000, "10.0 k"), (1.3e9, "1.3 B"), (1.0e12, "1.0 T"), (2.5, "2.5")],
)
def test_count(count: float, text: str) -> None:
    assert table.format_count(count) == text


def test_ratio_and_percent() -> None:
    assert table.format_ratio(1.853) == "1.85x"
    assert table.format_percent(0.42) == "42.0 %"


@pytest.mark.parametrize("name", [name for name in dir(table) if name.startswith("format_") and name != "format_table"])
def test_unknown_and_infinite(name: str) -> None:
    format_quantity = getattr(table, name)
    assert format_quantity(math.nan) == "-"
    assert format_quantity(math.inf).startswith("inf")
    assert format_quantity(-math.inf).startswith("-inf")


def test_table() -> None:
    text = table.format_table(
        ["operator", "what", "seconds"], [["dot", "a", "1.5 ms"], ["all_reduce", "b", "120.0 us"]], left=2
    )
    assert text.splitlines() == [
        "operator    what   seconds",
        "----------  ----  --------",
        "dot         a       1.5 ms",
        "all_reduce  b     120.0 us",
    ]
    assert table.format_table(["name", "n"], []).splitlines() == ["name  n", "----  -"]
    with pytest.raises(ValueError, match=r"2 cells in row 1 .* needed 1"):
        table.format_table(["name"], [["a"], ["b", "c"]])
