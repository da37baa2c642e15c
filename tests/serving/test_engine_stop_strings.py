"""Stop strings over text in pieces: no leak, no needless delay, the same result however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.base import RequestError
from workbench.serving.stop import StopMatcher

STOPS = ("ab", "abc", "\nUser:")


def shown(stops, pieces) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.is_stopped


@pytest.mark.parametrize(
    ("text", "visible", "stopped"),
    [
        ("hello abc tail", "hello ", True),
        ("xxab", "xx", True),
        ("\nUse", "\nUse", False),
        ("fine\nUser: hi", "fine", True),
        ("\n\nUser:", "\n", True),
        ("aab", "a", True),
        ("aaa", "aaa", False),
        ("", "", False),
        ("ab", "", True),
    ],
)
def test_text_fed_one_character_at_a_time(text, visible, stopped):
    assert shown(STOPS, text) == (visible, stopped)


def test_only_a_true_prefix_is_held_back():
    matcher = StopMatcher(("\nUser:",))
    assert [matcher.feed(c) for c in "a\nUx\n"] == ["a", "", "", "\nUx", ""]
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""


def test_nothing_comes_after_the_match():
    matcher = StopMatcher(("ab",))
    assert matcher.feed("1ab2") == "1"
    assert matcher.feed("3") == matcher.flush() == ""


def test_a_longer_stop_does_not_delay_a_shorter_one_inside_it():
    assert shown(("abcd", "bc"), "xabc") == ("xa", True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abU\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abU\n:", max_size=5), max_size=6),
)
def test_the_result_does_not_depend_on_the_cuts(stops, pieces):
    whole = "".join(pieces)
    result = shown(stops, pieces)
    assert result == shown(stops, [whole]) == shown(stops, whole)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert result == (whole, False)
    else:
        first = min(ends)
        longest = max(len(stop) for stop in stops if whole[:first].endswith(stop))
        assert result == (whole[: first - longest], True)


@pytest.mark.parametrize("stops", [("",), ("a", ""), "abc", (1,)])
def test_an_empty_or_mistyped_stop_is_refused(stops):
    with pytest.raises(RequestError, match="non-empty strings"):
        StopMatcher(stops)
