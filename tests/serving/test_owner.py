"""A runner has one driver at a time: its slots know no request, and two drivers would mix their sequences unseen."""

from __future__ import annotations

import pytest
from serving_fakes import EchoRunner
from test_engine import request

from workbench.base import DeploymentError
from workbench.serving import Engine
from workbench.serving.owner import driving


def test_a_second_engine_on_a_runner_is_refused_until_the_first_has_stopped() -> None:
    runner = EchoRunner()
    first, second = Engine(runner).start(), Engine(runner)
    try:
        with pytest.raises(DeploymentError, match=r"slots are in use \(found an engine"):
            second.start()
        assert [event.token_id for event in first.submit(request([7], max_tokens=2))] == [7, 7]
    finally:
        first.stop()
    second.start()
    try:
        assert [event.token_id for event in second.submit(request([8], max_tokens=2))] == [8, 8]
    finally:
        second.stop()


def test_starting_twice_is_harmless_and_another_runner_is_free() -> None:
    one, other = Engine(EchoRunner()), Engine(EchoRunner())
    try:
        assert one.start().start() is one
        other.start()
    finally:
        one.stop()
        other.stop()


def test_an_engine_that_failed_leaves_the_runner_to_the_next() -> None:
    def break_down() -> None:
        raise ValueError("planted")

    runner = EchoRunner(gate=break_down)
    first = Engine(runner).start()
    with pytest.raises(DeploymentError, match="planted"):
        list(first.submit(request([7], max_tokens=2)))
    assert first._thread is not None
    first._thread.join(5)
    Engine(runner).start().stop()


def test_a_block_that_fails_frees_the_runner() -> None:
    runner = EchoRunner()
    with pytest.raises(DeploymentError, match="a trial"), driving(runner, "a trial"):
        Engine(runner).start()
    Engine(runner).start().stop()
