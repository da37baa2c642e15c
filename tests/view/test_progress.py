"""Watching a load: counts over ranks, a bar for terminals, silence elsewhere."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest

from workbench.view import LoadWatch, TerminalProgress, load_progress, terminal_progress
from workbench.view.panel import progress_html
from workbench.view.progress import MAX_SAMPLES


def report(rank: int, done: int, total: int = 1000, seconds: float = 1.0, tensor: str = "w") -> SimpleNamespace:
    return SimpleNamespace(rank=rank, bytes_read=done, bytes_total=total, seconds=seconds, tensor=tensor)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_snapshot_adds_over_ranks_and_estimates_the_rest() -> None:
    watch = LoadWatch(num_ranks=2)
    assert watch.snapshot().fraction == 0.0
    assert watch.snapshot().seconds_left is None
    watch(report(1, 250, seconds=0.5))
    watch(report(0, 250, seconds=1.0))
    snapshot = watch.snapshot()
    assert [rank.rank for rank in snapshot.ranks] == [0, 1]
    assert (snapshot.bytes_read, snapshot.bytes_total, snapshot.seconds) == (500, 2000, 1.0)
    assert snapshot.fraction == pytest.approx(0.25)
    assert snapshot.bytes_per_s == pytest.approx(500)
    assert snapshot.seconds_left == pytest.approx(3.0)
    assert not snapshot.is_done
    line = snapshot.line()
    assert " 25% · 500 B of 2 kB · 500 B/s · 3 s left · 2 of 2 ranks" in line
    assert line.count("█") == 6


def test_all_expected_ranks_must_be_done() -> None:
    watch = LoadWatch(num_ranks=2)
    watch(report(0, 1000))
    assert not watch.snapshot().is_done
    watch(report(1, 1000, seconds=4.0))
    assert watch.snapshot().is_done
    assert "in 4 s" in watch.snapshot().line()


def test_a_rank_with_nothing_to_read_is_done() -> None:
    watch = LoadWatch()
    watch(report(0, 0, total=0, seconds=0.0))
    assert watch.snapshot().is_done
    assert watch.snapshot().fraction == 1.0


def test_samples_stay_bounded_and_keep_first_and_last() -> None:
    watch = LoadWatch()
    for i in range(1, 5001):
        watch(report(3, i, total=5000, seconds=i * 0.01))
    samples = watch.samples()[3]
    assert len(samples) <= MAX_SAMPLES
    assert samples[0] == (0.0, 0)
    assert samples[-1] == (50.0, 5000)
    assert samples == sorted(samples)


def test_reports_from_many_threads_are_all_counted() -> None:
    watch = LoadWatch()
    threads = [
        threading.Thread(target=lambda rank=rank: [watch(report(rank, i)) for i in range(1, 201)]) for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.version == 800
    assert watch.snapshot().bytes_read == 800


def test_terminal_redraws_at_most_ten_times_a_second_and_ends_its_line() -> None:
    stream, clock = Terminal(), Clock()
    progress = TerminalProgress(stream=stream, clock=clock)
    for i in range(1, 1000):
        clock.now = i * 0.001
        progress(report(0, i))
    assert stream.getvalue().count("\r") == 10
    assert "\n" not in stream.getvalue()
    progress(report(0, 1000))
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1
    assert "100% · 1 kB of 1 kB" in stream.getvalue()
    progress.close()
    assert stream.getvalue().count("\n") == 1


def test_ranks_that_repeat_their_end_draw_one_line() -> None:
    stream = Terminal()
    progress = TerminalProgress(num_ranks=2, stream=stream, clock=Clock())
    for rank, done in ((0, 1000), (0, 1000), (1, 500), (1, 1000), (1, 1000), (0, 1000)):
        progress(report(rank, done))
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().rstrip().endswith("2 of 2 ranks")


def test_a_shorter_line_covers_the_longer_one_before() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream=stream, clock=Clock())
    progress._draw("a long line")
    progress._draw("short")
    assert stream.getvalue() == "\ra long line\rshort      "


def test_an_interrupted_load_leaves_the_cursor_on_a_fresh_line() -> None:
    stream = Terminal()

    def interrupted() -> None:
        with TerminalProgress(stream=stream, clock=Clock()) as progress:
            progress(report(0, 10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().endswith("\n")


def test_nothing_is_written_where_no_terminal_listens() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream=stream) as progress:
        for done in (10, 1000):
            progress(report(0, done))
    assert stream.getvalue() == ""
    assert progress.watch.snapshot().is_done


def test_outside_a_notebook_the_watcher_is_a_terminal_bar() -> None:
    assert isinstance(load_progress(num_ranks=2), TerminalProgress)
    assert isinstance(terminal_progress(), TerminalProgress)


def test_panel_names_ranks_and_tensors_and_escapes_them() -> None:
    watch = LoadWatch(num_ranks=2)
    watch(report(0, 250, tensor="<img src=x onerror=alert(1)>"))
    watch(report(1, 1000, tensor="layers.3.w"))
    shown = progress_html(watch.snapshot(), None, title="<b>Loading</b>")
    assert "<img" not in shown
    assert "<b>" not in shown
    assert "&lt;img" in shown
    assert "rank 1" in shown
    assert "1 kB · done" in shown
    assert "width:25.0%" in shown
