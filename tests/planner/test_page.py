"""The planner's page: its content, its safety, its independence of other files, and its layout in a real browser."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roomier.planner.choice import Considered
from roomier.planner.measured.record import record_from
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.report.page import (
    COLOURS,
    NAMES,
    fragment_of,
    joined,
    page_of,
    page_of_record,
    phases_of,
    round_ticks,
    show_in_notebook,
)
from tests.covering import few
from tests.planner.browser import look_at
from tests.planner.page_examples import GIB, choice, forecast, grid, record

VOID = {"meta", "br", "path", "rect"}


class Balance(HTMLParser):
    """Parser that asserts that each element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def text_of(page: str) -> str:
    without_style = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_style)).replace("\u00a0", " ")


@pytest.mark.parametrize(
    "page",
    [
        page_of(choice(), grid(), record()),
        page_of(choice(fits=False)),
        page_of_record(record(allocator_bytes=30 * GIB)),
        fragment_of(choice()),
        fragment_of(forecast("ddp", 4.0, 0.1, 0.1)),
    ],
    ids=["all parts", "no plan fits", "report", "choice in a notebook", "forecast in a notebook"],
)
def test_every_page_is_well_formed_and_needs_no_network(page: str) -> None:
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)|https?://|<script", page.split("</style>", 1)[1])
    assert "http" not in page.split("</style>", 1)[0]
    assert len(page) < 200_000


def test_the_page_contains_the_choice() -> None:
    made = choice()
    text = text_of(page_of(made, grid(), subject="GPT, 1.7 B parameters"))
    chosen = made.chosen
    assert chosen is not None
    assert "zero2, bf16-mixed" in text
    assert "GPT, 1.7 B parameters" in text
    assert f"{chosen.peak_bytes / GIB:.1f} GiB" in text
    assert "The peak is at forward of gpt.head" in text
    assert "needs more than the budget" in text
    assert "BatchNorm takes statistics of each micro-batch" in text
    assert "data sheets" in text
    assert "✕ 46.2 GiB" not in text
    assert "✕ 49.0 GiB" in text  # 2048 tokens, 16 samples: 8 + 2048 * 16 / 800
    for kind in COLOURS:
        assert NAMES[kind] in text


def test_if_no_plan_fits_the_page_names_the_nearest() -> None:
    text = text_of(page_of(choice(fits=False)))
    assert "No plan fits" in text
    assert "The nearest plan, zero2, bf16-mixed" in text
    assert "exceeds the budget by" in text


def test_names_of_the_user_are_escaped() -> None:
    evil = "<script>alert(1)</script>\"'"
    made = choice(place=evil)
    assert made.chosen is not None
    intervals = [dataclasses.replace(each, place=evil) for each in made.chosen.timeline]
    made = dataclasses.replace(made, chosen=dataclasses.replace(made.chosen, timeline=tuple(intervals)))
    page = page_of(made, title=evil, subject=evil)
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 5


def test_plans_rejected_for_the_same_reason_share_one_row() -> None:
    made = choice()
    refused = [
        Considered(forecast(name, 1.0, 0.1, 0.1).plan, 4, None, False, "saves nothing")
        for name in ("ddp", "zero1", "ddp")
    ]
    text = text_of(page_of(dataclasses.replace(made, considered=(*made.considered, *refused), num_plans=144)))
    assert "ddp, zero1 saves nothing" in text
    assert text.count("saves nothing") == 1
    assert "144 plans were compared" in text


def test_a_report_contains_forecast_measurement_and_difference() -> None:
    found = record()
    text = text_of(page_of_record(found, {"Speed": "3 samples/s"}))
    assert found.error < -0.01
    assert found.error_text in text
    assert "rank 1, the largest of 2 ranks" in text
    assert "Speed 3 samples/s" in text
    assert "A note." in text


def test_a_record_is_restored_from_plain_data() -> None:
    for found in (record(), record(num_ranks=1, allocator_bytes=30 * GIB)):
        stored = found.as_dict()
        again = record_from(stored)
        assert again.as_dict() == stored
        assert again.line() == found.line()
        assert again.forecast.machine == found.forecast.machine
        assert again.forecast.plan == found.forecast.plan
        assert [each.peak_bytes for each in again.worst.timeline] == [each.peak_bytes for each in found.worst.timeline]


def test_the_line_of_a_record_contains_forecast_and_measurement() -> None:
    found = record()
    assert re.fullmatch(
        r"memory: forecast \d+\.\d\d GiB, measured \d+\.\d\d GiB at forward of gpt\.head \(-\d\.\d %\)",
        found.line(),
    )
    assert record(allocator_bytes=30 * GIB).measured_bytes == 30 * GIB


def test_neighbors_of_many_intervals_are_merged_without_losing_a_peak() -> None:
    step = forecast("zero3", 8.0, 1.0, 0.6).timeline * 40
    drawn = joined(step, 100)
    assert 50 < len(drawn) < 300
    assert max(each.peak_bytes for each in drawn) == max(each.peak_bytes for each in step)
    assert [name for name, _, _ in phases_of(drawn)] == [name for name, _, _ in phases_of(step)]
    assert joined(step[:10]) == list(step[:10])


@pytest.mark.parametrize("top_bytes", [1, 700, 1024, 3000, 5 * 2**20, 1.6 * GIB, 39.4 * GIB, 900 * GIB, 1.2e15])
def test_ticks_are_few_round_and_below_the_top(top_bytes: float) -> None:
    ticks = round_ticks(top_bytes)
    assert 2 <= len(ticks) <= 11
    assert ticks[0] == (0, "0")
    assert all(number <= top_bytes for number, _ in ticks)
    assert all(len(text) <= 9 for _, text in ticks)


def test_a_step_without_bytes_can_be_drawn() -> None:
    nothing: dict[Kind, int] = {}
    empty = dataclasses.replace(forecast("ddp", 1.0, 0.1, 0.1), fixed_bytes={})
    empty = dataclasses.replace(empty, timeline=(Interval("rest", "", nothing, nothing, nothing),), time=None)
    assert "0 B" in text_of(fragment_of(empty))


@pytest.mark.parametrize("is_dark", few([False, True]), ids=["light", "dark"])
def test_the_browser_layout_has_no_faults(tmp_path: Path, is_dark: bool) -> None:
    long_name = "encoder.layers.with_a_very_long_name.transformer_blocks.17.feed_forward"
    made = choice(place=long_name)
    chosen = made.chosen
    assert chosen is not None
    places = tuple(dataclasses.replace(each, place=f"{long_name}.{each.place}") for each in chosen.timeline)
    made = dataclasses.replace(made, chosen=dataclasses.replace(chosen, timeline=places))
    page = page_of(made, grid(), record() if is_dark else None, subject="a model")
    for found in look_at(page, (380, 760, 1200), tmp_path, is_dark=is_dark):
        assert found["scroll_width"] <= found["width"]
        for fault in ("outside", "clipped", "shapes_outside", "overlaps", "faint"):
            assert found[fault] == [], f"{fault} at {found['width']} px"
        assert found["num_shapes"] > 60
        assert found["ground"] == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")
        assert found["text"] == ("rgb(230, 233, 237)" if is_dark else "rgb(28, 33, 39)")


def test_a_notebook_displays_choices_and_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    show_in_notebook()  # does nothing without IPython
    shown: dict[type, Callable[[Any], str]] = {}
    formatter = SimpleNamespace(for_type=shown.__setitem__)
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    show_in_notebook()
    for each in (choice(), forecast("ddp", 4.0, 0.1, 0.1)):
        assert shown[type(each)](each) == fragment_of(each)
