"""Latencies of a server that is known to the token, derived exactly from a clock that the server sets."""

from __future__ import annotations

import pytest
from scripted_server import PROMPT_TOKENS, Script, ScriptedServer, ended, role, said, scripted, thought, usage
from serving_fakes import ScriptRunner, byte_tokenizer

from workbench.profiling import Question, RequestTiming, ServerTarget, ServiceTarget, Slo, measure_goodput, summarise
from workbench.serving import MultimodalInferenceService
from workbench.serving.client import RemoteService


def target_of(server: ScriptedServer, *, timeout_s: float = 30.0, **options: object) -> ServerTarget:
    service = RemoteService(server.url, timeout_s=timeout_s, clock=server.clock)
    return ServerTarget(service, clock=server.clock, **options)  # type: ignore[arg-type]


def ask(server: ScriptedServer, **options: object) -> RequestTiming:
    return ask_all(server, target_of(server, **options), 1)[0]  # type: ignore[arg-type]


def ask_all(server: ScriptedServer, target: ServerTarget, number: int) -> list[RequestTiming]:
    """One after another, each at 100 s."""
    timings = []
    for _ in range(number):
        server.clock.now_s = 100.0
        timings.append(target.ask(Question(text="hi", label="short")))
    return timings


ONE_THREE_NONE_FIVE = (
    (100.25, role()),
    (100.5, said("a", total=1)),
    (101.5, said("bcd", total=4)),
    (102.5, said("", total=4)),
    (103.5, said("efghi", total=9)),
    (103.75, ended(total=9)),
    (104.0, usage(9)),
)


def test_one_three_none_and_five_tokens_a_chunk() -> None:
    with scripted(Script(ONE_THREE_NONE_FIVE)) as server:
        timing = ask(server)
    assert timing.counted_by == "running usage"
    assert timing.num_tokens == 9
    assert timing.num_prompt_tokens == PROMPT_TOKENS
    assert timing.first_token_s == 0.5, "neither the role nor an empty chunk is a token"
    assert timing.gaps == ((1 / 3, 3), (2 / 5, 5))
    assert timing.per_token_s == 3.0 / 8
    assert timing.longest_pause_s == 2.0
    assert timing.end_to_end_s == 4.0
    summary = summarise([timing])
    assert summary.inter_token_s is not None
    assert (summary.inter_token_s.count, summary.inter_token_s.p50, summary.inter_token_s.low) == (8, 2 / 5, 1 / 3)
    assert server.asked[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_reasoning_is_the_first_token_and_counts() -> None:
    script = Script(
        [
            (100.1, role()),
            (101.0, thought("hm", total=2)),
            (102.0, thought("m", total=3, name="reasoning")),
            (103.0, said("yes", total=6)),
            (103.5, ended(total=7)),
        ]
    )
    with scripted(script) as server:
        timing = ask(server)
    assert timing.first_token_s == 1.0
    assert timing.num_tokens == 7
    assert timing.arrivals == ((100.1, 0), (101.0, 2), (102.0, 1), (103.0, 3), (103.5, 1))
    assert timing.per_token_s == 2.5 / 5


def test_a_server_that_counts_only_at_the_end_is_counted_by_the_tokenizer_or_by_spreading() -> None:
    events = [(100.5, said("ab")), (101.0, said("c")), (102.0, said("def")), (102.5, ended()), (103.0, usage(6))]
    with scripted(Script(events), Script(events)) as server:
        spread = ask(server)
        cut = ask(server, token_ends=lambda text: list(range(1, len(text) + 1)))
    assert (spread.counted_by, cut.counted_by) == ("spread total", "tokenizer")
    assert [count for _, count in spread.arrivals] == [2, 1, 3, 0, 0]
    assert [count for _, count in cut.arrivals] == [2, 1, 3, 0, 0]
    assert cut.per_token_s == 1.5 / 4


def test_where_nobody_counts_there_are_no_figures_per_token() -> None:
    with scripted(Script([(100.5, said("ab")), (101.0, said("c"))])) as server:
        timing = ask(server)
    assert timing.counted_by == "chunks"
    assert (timing.first_token_s, timing.per_token_s, timing.num_tokens) == (0.5, None, 0)
    assert timing.longest_pause_s == 0.5
    slow = Slo(per_token_s=100.0)
    assert slow.broken_by(timing) == ("per_token_s",), "nobody can say that it was kept"
    assert "tokens counted by chunks" in summarise([timing]).render()


def test_a_server_that_knows_no_running_count_is_asked_again_without_and_then_never() -> None:
    events = [(100.5, said("ab")), (101.0, usage(2))]
    with scripted(Script(events), Script(events), refuses_running_usage=True) as server:
        timings = ask_all(server, target_of(server), 2)
    assert [timing.error for timing in timings] == ["", ""]
    assert ["continuous_usage_stats" in each["stream_options"] for each in server.asked] == [True, False, False]


def test_a_wrong_question_does_not_teach_that_the_server_cannot_count() -> None:
    good = Script([(100.5, said("a", total=1))])
    with scripted(Script(status=400), Script(status=400), good) as server:
        wrong, right = ask_all(server, target_of(server), 2)
    assert wrong.error.startswith("RequestError: as the script says")
    assert right.counted_by == "running usage"


def test_failures_are_told_apart_and_have_no_latencies() -> None:
    partial = [(100.5, said("ab", total=2))]
    told = [*partial, (100.6, {"error": {"message": "out of memory"}})]
    scripts = [Script(status=429), Script(status=500), Script(partial, then="cut"), Script(told)]
    with scripted(*scripts) as server:
        timings = ask_all(server, target_of(server), len(scripts))
    kinds = [timing.error.partition(":")[0] for timing in timings]
    assert kinds == ["QueueFullError", "DeploymentError", "DeploymentError", "DeploymentError"]
    assert timings[2].error.startswith("DeploymentError: the stream broke off")
    assert timings[2].num_tokens == 2, "what had come is kept"
    assert all(timing.first_token_s is None and timing.end_to_end_s is None for timing in timings)
    summary = summarise(timings)
    assert (summary.num_requests, summary.num_failed, summary.first_token_s) == (4, 4, None)
    assert measure_goodput(timings, Slo(end_to_end_s=1e9)).num_good == 0


def test_a_stall_ends_at_the_limit_of_silence() -> None:
    with scripted(Script([(100.5, said("ab", total=2))], then="stall")) as server:
        timing = ask(server, timeout_s=0.3)
    assert timing.error.startswith("DeploymentError: the stream broke off")
    assert "timed out" in timing.error


def test_a_pause_in_the_middle_is_seen_though_the_mean_hides_it() -> None:
    events = [(100.0 + 0.1 * n, said("x", total=n)) for n in range(1, 11)]
    events += [(105.0, said("y", total=11)), (105.1, said("z", total=12))]
    with scripted(Script(events)) as server:
        timing = ask(server)
    assert timing.longest_pause_s == 4.0
    assert timing.per_token_s == pytest.approx(5.0 / 11)


def test_events_that_are_no_chunks_and_odd_usage_are_let_be() -> None:
    odd = {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": "many"}}
    with scripted(Script([(100.1, b": waiting\n\n"), (100.5, odd), (100.7, {"choices": [], "usage": [1]})])) as server:
        timing = ask(server)
    assert (timing.error, timing.counted_by) == ("", "chunks")
    with scripted(Script([(100.1, {"choices": [5]})], then="done")) as server:
        assert "no chunk of an answer" in ask(server).error


def test_an_answer_of_the_client_has_a_time_for_every_token() -> None:
    with scripted(Script(ONE_THREE_NONE_FIVE)) as server:
        reply = RemoteService(server.url, clock=server.clock).stream("hi", running_usage=True)
        list(reply)
    assert reply.answer is not None
    assert reply.answer.timings.token_s == (0.5, 1.5, 1.5, 1.5, 3.5, 3.5, 3.5, 3.5, 3.5)


def test_a_service_in_this_process_is_counted_by_ids() -> None:
    tokenizer = byte_tokenizer(10_000)
    runner = ScriptRunner([*b"hello", tokenizer.markers.end_of_msg])
    with MultimodalInferenceService(runner, tokenizer, None) as service:
        timing = ServiceTarget(service).ask(Question(text="hi", max_tokens=9, label="x"))
        too_long = ServiceTarget(service).ask(Question(text="hi", max_tokens=10**6))
    assert (timing.num_tokens, timing.counted_by, timing.error, timing.label) == (5, "ids", "", "x")
    assert timing.num_prompt_tokens > 0
    assert timing.first_token_s is not None
    assert timing.end_to_end_s is not None
    assert 0 < timing.first_token_s <= timing.end_to_end_s
    assert too_long.error.startswith("PromptTooLongError")
