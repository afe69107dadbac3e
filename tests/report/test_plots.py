from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from ingot.report.plots import (
    MAX_POINTS,
    MAX_TOOLTIPS,
    PlotLine,
    PlotPanel,
    StripSegment,
    bar_chart,
    line_chart,
    share_bar,
    strip,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SERIES = st.dictionaries(
    st.integers(0, 10**9).map(float) | NUMBERS, NUMBERS, min_size=1, max_size=30
).map(lambda points: sorted(points.items()))
LOOKS = st.sampled_from(["line", "faint", "area", "dots"])


def a_line(points: list[tuple[float, float]], look: str = "line", name: str = "a") -> PlotLine:
    return PlotLine(name, "train", [x for x, _ in points], [y for _, y in points], look)


def tree(markup: Markup) -> ElementTree.Element:
    """Well-formed, or an error."""
    return ElementTree.fromstring(f"<r>{markup}</r>")


@given(lines=st.lists(st.tuples(SERIES, LOOKS), min_size=1, max_size=3), floor=st.booleans())
def test_any_finite_numbers_give_a_plot_within_its_frame(
    lines: list[tuple[list[tuple[float, float]], str]], floor: bool
) -> None:
    drawn = line_chart(
        [PlotPanel([a_line(points, look) for points, look in lines], 100, floor=floor)], "label"
    )
    for path in tree(drawn).iter("path"):
        numbers = [
            float(number) for number in re.findall(r"-?[\d.]+", path.attrib["d"].replace("h0", ""))
        ]
        assert all(0 <= number <= 1000 for number in numbers), path.attrib["d"]
    for style in [
        element.attrib["style"] for element in tree(drawn).iter() if "style" in element.attrib
    ]:
        assert not re.search("nan|inf", style)


def test_nothing_to_draw_draws_nothing() -> None:
    assert line_chart([], "x") == ""
    assert line_chart([PlotPanel([a_line([])], 100)], "x") == ""
    assert bar_chart([]) == ""
    assert bar_chart([("a", 0.0, "0", "own")]) == ""
    assert bar_chart([("a", float("nan"), "0", "own")]) == ""


def test_the_value_under_the_pointer_is_that_of_its_step() -> None:
    loss, checked = (
        a_line([(1, 9.0), (2, 8.0), (3, 7.5)], name="train"),
        a_line([(2, 8.25)], "dots", name="validation"),
    )
    drawn = tree(line_chart([PlotPanel([loss, checked], 100)], "loss"))
    tips = [" ".join("".join(tip.itertext()).split()) for tip in drawn.iter("b")]
    assert tips == ["step 1train 9.000", "step 2train 8.000validation 8.250", "step 3train 7.500"]
    widths = [
        float(match)
        for match in re.findall(
            r"width:([\d.]+)%", str(line_chart([PlotPanel([loss], 100)], "loss"))
        )
    ]
    assert sum(widths) == 100.0


@pytest.mark.parametrize(
    ("first", "last", "labels"),
    [(1, 1, ["1"]), (1, 3, ["1", "2", "3"]), (101, 299, ["150", "200", "250"])],
)
def test_an_axis_has_whole_steps_and_two_labels_where_there_are_two(
    first: int, last: int, labels: list[str]
) -> None:
    points = [(float(step), 2.0) for step in (first, last)]
    drawn = tree(line_chart([PlotPanel([a_line(points)], 100)], "x", tick_count=2))
    (axis,) = [each for each in drawn.iter("div") if each.attrib["class"] == "across"]
    assert [label.text for label in axis.iter("span")] == labels


def test_many_points_make_a_plot_of_bounded_size() -> None:
    points = [(float(step), float(step % 97)) for step in range(100_000)]
    drawn = tree(line_chart([PlotPanel([a_line(points)], 100)], "x"))
    (path,) = [path for path in drawn.iter("path") if "line" in path.attrib["class"]]
    assert path.attrib["d"].count("L") <= MAX_POINTS + 2
    assert len(list(drawn.iter("b"))) <= MAX_TOOLTIPS + 2


def test_bars_are_as_long_as_their_values() -> None:
    drawn = tree(
        bar_chart([("own", 1.0, "1.0", "own"), ("other", 4.0, "4.0", "other")], (0.9, 1.1))
    )
    assert [
        rect.attrib["width"] for rect in drawn.iter("rect") if rect.attrib["class"] == "bar"
    ] == ["25%", "100%"]
    (whisker,) = [rect for rect in drawn.iter("rect") if rect.attrib["class"] == "whisker"]
    assert (whisker.attrib["x"], whisker.attrib["width"]) == ("22.5%", "5%")
    assert 'width="50%"' in share_bar(0.5)
    assert 'width="100%"' in share_bar(7.0)


def test_names_are_escaped() -> None:
    drawn = str(
        line_chart([PlotPanel([a_line([(1, 1), (2, 2)], name="<b>&")], 100, title="<i>")], '"<u>')
    )
    assert "<b>&" not in drawn
    assert "<i>" not in drawn.replace("<i style", "")
    assert "&lt;b&gt;&amp;" in drawn
    tree(Markup(drawn))


def test_a_strip_has_its_pieces_where_they_belong() -> None:
    drawn = tree(
        strip(
            [
                StripSegment(0, 1, "a", ("one", "<x>")),
                StripSegment(1, 4, "b", ("three",)),
                StripSegment(3, 3, "empty"),
            ],
            4,
            20,
            "label",
            unit="hours",
            pins=[StripSegment(2, 2, "c", ("here", "why"))],
        )
    )
    pieces = [
        (rect.attrib["class"], rect.attrib["x"], rect.attrib["width"])
        for rect in drawn.iter("rect")
    ]
    assert pieces == [("piece a", "0%", "25%"), ("piece b", "25%", "75%")]
    assert [(pin.attrib["class"], pin.attrib["cx"]) for pin in drawn.iter("circle")] == [
        ("mark c", "50%")
    ]
    tips = [
        (
            tip.attrib["style"],
            tip.attrib["class"],
            "|".join("".join(word.itertext()) for word in tip.iter() if word.text),
        )
        for tip in drawn.iter("i")
    ]
    assert tips == [
        ("left:25%;width:75%;--at:50%", "late", "three"),
        ("left:0%;width:25%;--at:50%", "early", "one|<x>"),
        ("left:50%;width:0%;--at:50%", "early", "here|why"),
    ]
    assert ["".join(span.itertext()) for span in drawn.iter("span")][:5] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]
    assert "across" not in strip([StripSegment(0, 1, "a")], 1, 20, "label")


def test_a_strip_of_no_length_is_none_and_one_of_very_many_pieces_is_bounded() -> None:
    assert strip([], 0, 20, "x") == ""
    assert strip([StripSegment(0, 1, "a")], float("nan"), 20, "x") == ""
    many = [StripSegment(number, number + 1, "a", ("x",)) for number in range(20_000)]
    assert len(strip(many, 20_000, 20, "x", pins=many)) < 40_000
    few = strip([*many, StripSegment(100, 1000, "wide", ("z",))], 20_000, 20, "x")
    assert "piece wide" in few
