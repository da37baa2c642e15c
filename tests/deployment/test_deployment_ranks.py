"""A model on real ranks: answers as expected, captures, typed errors, interrupts, and a clean end."""

from __future__ import annotations

import gc
import os
import signal
import stat
import threading

import numpy as np
import pytest
from rank_helpers import command_line, environment, greedy_tokens, is_alive, picture_tokens, session_of, wait_gone
from safetensors.numpy import load_file

from workbench.base import ConfigError, DeploymentError, LayoutError, RequestError
from workbench.deployment import Deployment, LoadSummary
from workbench.deployment import started as started_module
from workbench.deployment.experts import expert_use
from workbench.loading import ExpertMemory
from workbench.placement import Layout
from workbench.serving import Engine, GenerationRequest, PlacedImage, SamplingParams
from workbench.serving.invariance import KnownAnswers, check_invariance, invariance_requests, tolerance_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]

LOGITS_LIMIT = 1e-3  # absolute, float32; tests/golden/k3-tiny-a
RELATIVE_LIMIT = 2e-5  # norm of the difference over norm of the expected tensor, the same source


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def pair(golden_root, progress):
    with Deployment.start(
        golden_root,
        Layout(tp=2),
        precision="fp32",
        num_slots=5,
        max_tokens=200,
        window_bytes=1 << 20,
        on_progress=progress.append,
    ) as deployment:
        yield deployment


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_all_prompts_together_give_the_expected_tokens(pair, prompts):
    assert greedy_tokens(pair, prompts.values()) == [prompt["greedy_fp32"] for prompt in prompts.values()]


@pytest.mark.parametrize("name", ["p1", "p150", *(pytest.param(x, marks=pytest.mark.slow) for x in ("p7", "p64"))])
def test_each_prompt_alone_gives_the_expected_tokens(pair, prompts, name):
    assert pair.generate(prompts[name]["token_ids"]) == prompts[name]["greedy_fp32"]


@pytest.mark.parametrize("step_tokens", [16, pytest.param(65, marks=pytest.mark.slow)])
def test_prompts_read_in_chunks_give_the_expected_tokens(pair, prompts, step_tokens):
    tokens = greedy_tokens(pair, prompts.values(), step_tokens=step_tokens)
    assert tokens == [prompt["greedy_fp32"] for prompt in prompts.values()]


@pytest.mark.parametrize("step_tokens", [512, pytest.param(7, marks=pytest.mark.slow)])
def test_the_prompt_with_two_pictures_gives_the_expected_tokens_through_the_service(pair, picture_prompt, step_tokens):
    assert picture_tokens(pair, picture_prompt, step_tokens=step_tokens) == picture_prompt[2]


def test_progress_came_from_every_rank_and_ends_complete(pair, progress):
    for rank in range(2):
        own = [p for p in progress if p.rank == rank]
        assert own[-1].bytes_read == own[-1].bytes_total > 0
        assert own[-1].fraction == 1.0


def test_ledgers_and_load_stats_account_for_what_each_rank_read(pair):
    for rank, (ledger, stats) in enumerate(zip(pair.ledgers, pair.load_stats, strict=True)):
        assert ledger["rank"] == rank
        assert ledger["rows"] == ledger["rows_written"]
        assert stats["bytes_assigned"] <= stats["bytes_read"] <= 1.02 * stats["bytes_assigned"]
        assert stats["window_bytes"] == 1 << 20


def test_stages_of_a_load_come_from_every_rank_with_its_progress_and_into_the_summary(pair, progress):
    summary = LoadSummary.of(pair.reports).to_json()
    for rank, record in enumerate(pair.load_stages):
        assert (record["rank"], record["bytes_by_stage"]["read"]) == (rank, pair.load_stats[rank]["bytes_read"])
        assert record["seconds"] == pair.load_stats[rank]["seconds"]
        assert [p.stages for p in progress if p.rank == rank][-1] == record["seconds_by_stage"]
        assert summary["ranks"][rank]["seconds_by_stage"] == record["seconds_by_stage"]
        assert record["seconds_by_stage"]["check"] > 0


def test_logits_of_whole_prompts_match_the_reference(pair, prompts, golden_root):
    expected = load_file(golden_root / "golden" / "text_fp32.safetensors")
    names = ["p64", "p1", "p7"]
    for use_cache in (True, False):
        result = pair.forward([prompts[name]["token_ids"] for name in names], use_cache=use_cache)
        for name, logits in zip(names, result.logits, strict=True):
            worst = np.abs(logits - expected[f"{name}.logits"]).max()
            assert worst < LOGITS_LIMIT, f"{name}: {worst:.2e}"


def test_captured_values_match_the_reference_layer_by_layer_on_both_ranks(pair, prompts, golden_root):
    expected = load_file(golden_root / "golden" / "text_fp32.safetensors")
    layers = range(pair.spec.num_layers)
    table = {f"layers.{i}.mixer_norm:in": f"p7.L{i}.attn_in" for i in layers}
    table |= {f"layers.{i}.ffn:out": f"p7.L{i}.ffn_out" for i in layers}
    table |= {f"layers.{i}:out.running": f"p7.L{i}.sum" for i in layers}
    table |= {"final_norm:out": "p7.final_hidden"}
    captured = pair.capture(list(table), prompts["p7"]["token_ids"])
    for rank, values in enumerate(captured):
        for ours, theirs in table.items():
            error = relative(values[ours], expected[theirs])
            assert error < RELATIVE_LIMIT, f"rank {rank} {ours}: {error:.2e}"
    assert relative(captured[0]["layers.2:out.running"], expected["p7.L3.sum"]) > RELATIVE_LIMIT


def test_states_and_latents_are_captured_from_the_rank_that_holds_them(pair, prompts, golden_root):
    expected = load_file(golden_root / "golden" / "text_fp32.safetensors")
    names = ["cache.state.0", "cache.latent.3", "layers.1.ffn.router:out.0", "layers.5:out.saved"]
    captured = pair.capture(names, prompts["p7"]["token_ids"])
    state = np.concatenate([values["cache.state.0"][0] for values in captured])  # heads are split over the ranks
    assert relative(state, expected["p7.L0.kda_state"]) < RELATIVE_LIMIT
    assert relative(captured[1]["cache.latent.3"][0], expected["p7.L3.latent"]) < RELATIVE_LIMIT
    assert captured[0]["layers.1.ffn.router:out.0"].shape == (7, 2)
    assert captured[0]["layers.5:out.saved"].shape[1:] == (7, pair.spec.hidden_size)


def test_forward_takes_pictures_and_leaves_the_serving_features_alone(pair, picture_prompt, golden_root):
    prompt, images, _ = picture_prompt
    placed = [
        PlacedImage(key=image.key, patches=image.patches, grid=image.grid, row=span.start, count=span.count)
        for span, image in zip(prompt.image_spans, images, strict=True)
    ]
    expected = load_file(golden_root / "golden" / "vision_fp32.safetensors")
    (logits,) = pair.forward([prompt.token_ids], [placed]).logits
    assert np.abs(logits - expected["mm.logits"]).max() < LOGITS_LIMIT
    assert [stats.num_images for stats in pair.stats()] == [0, 0]


def test_an_error_in_the_ranks_comes_back_typed_and_the_next_call_works(pair, prompts):
    with pytest.raises(RequestError, match=r"rank [01]: cannot capture 'nonsense'"):
        pair.capture(["nonsense"], [1, 2])
    with pytest.raises(DeploymentError, match=r"rank [01]: no command 'dance'"):
        pair._request("dance")
    with pytest.raises(RequestError, match="one for each of 1 replicas"):
        pair.step([(), ()])
    assert pair.generate(prompts["p7"]["token_ids"]) == prompts["p7"]["greedy_fp32"]


def test_generate_beside_an_engine_is_refused_for_both_would_use_the_same_slots(pair, prompts):
    engine = Engine(pair).start()
    try:
        with pytest.raises(DeploymentError, match="slots are in use"):
            pair.generate([1, 2])
        with pytest.raises(DeploymentError, match="slots are in use"):
            Engine(pair).start()
    finally:
        engine.stop()
    assert pair.generate(prompts["p7"]["token_ids"]) == prompts["p7"]["greedy_fp32"]


def test_stats_tell_memory_and_collectives_of_each_rank(pair):
    pair.generate([1, 2], SamplingParams(max_tokens=2))
    first, second = pair.stats()
    assert (first.rank, second.rank) == (0, 1)
    assert first.resident_bytes > 50 << 20
    assert first.cache_bytes > 0
    assert first.collectives["tp", "all_reduce"] == second.collectives["tp", "all_reduce"]
    assert "over tp ranks [0, 1], finished" in first.last_collective
    assert "bytes of weights" in pair.log_text(1)
    assert 0 < pair.ping() < 10


def test_an_interrupt_leaves_the_ranks_alive_and_the_next_call_works(pair, prompts):
    pids = pair.pids

    def generate_for_ever() -> None:
        while True:
            pair.generate(prompts["p7"]["token_ids"], SamplingParams(max_tokens=100))

    for delay in (0.05, 0.2, 0.31):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever()
    assert pair.generate(prompts["p7"]["token_ids"]) == prompts["p7"]["greedy_fp32"]
    assert pair.pids == pids
    assert all(is_alive(pid) for pid in pids)


def test_ranks_are_in_sessions_of_their_own_and_the_key_is_nowhere_to_be_seen(pair):
    for pid in pair.pids:
        assert session_of(pid) == pid != os.getsid(0)
        assert "authkey" not in command_line(pid)
        assert "KEY" not in environment(pid).replace("SSH_AUTH", "")
    assert stat.S_IMODE(pair.folder.stat().st_mode) == 0o700
    assert not (pair.folder / "control.sock").exists(), "nobody else can knock"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(pp=2, stages=(5, 3)),
        *(pytest.param(Layout(dp=2, ep=2, dispatch=x), marks=pytest.mark.slow) for x in ("all_to_all", "replicated")),
    ],
    ids=str,
)
def test_other_layouts_give_the_same_tokens_and_leave_nothing_behind(layout, golden_root, prompts, picture_prompt):
    deployment = Deployment.start(golden_root, layout, precision="fp32", num_slots=3, max_tokens=200)
    pids, folder = deployment.pids, deployment.folder
    expected = [prompt["greedy_fp32"] for prompt in prompts.values()]
    assert greedy_tokens(deployment, prompts.values()) == expected
    assert greedy_tokens(deployment, prompts.values(), step_tokens=33) == expected
    assert deployment.generate(prompts["p7"]["token_ids"]) == prompts["p7"]["greedy_fp32"]
    assert picture_tokens(deployment, picture_prompt, step_tokens=11) == picture_prompt[2]
    reference = load_file(golden_root / "golden" / "text_fp32.safetensors")
    result = deployment.forward(
        [prompts[name]["token_ids"] for name in ("p7", "p64", "p1")], capture=["layers.7.ffn:out"]
    )
    for name, logits in zip(("p7", "p64", "p1"), result.logits, strict=True):
        assert np.abs(logits - reference[f"{name}.logits"]).max() < LOGITS_LIMIT
    has_layer = [layout.coords(rank).pp == layout.pp - 1 for rank in range(layout.world_size)]
    assert [bool(values) for values in result.captured] == has_layer
    if layout.world_size == 1:
        close_and_check(deployment)
    del deployment  # the others are not closed: collecting the handle must be enough
    gc.collect()
    wait_gone(pids, 5)
    assert not folder.exists()


def close_and_check(deployment: Deployment) -> None:
    assert "running" in repr(deployment)
    with deployment:
        pass
    ends = [member.process.exit_text() for member in deployment._control.members if member.process is not None]
    assert ends == ["exit code 0"] * deployment.layout.world_size, "they end by themselves, not by a signal"
    assert "closed" in repr(deployment)
    deployment.close()
    with pytest.raises(DeploymentError, match="closed"):
        deployment.ping()


def test_what_does_not_fit_is_refused_before_any_process_starts(golden_root, tmp_path, monkeypatch):
    monkeypatch.setattr(started_module, "start_ranks", lambda *_args, **_options: pytest.fail("a process was started"))
    with pytest.raises(LayoutError, match="stages=\\(3,\\) hold 3 layers"):
        Deployment.start(golden_root, Layout(stages=(3,)))
    with pytest.raises(ConfigError, match="file is missing"):
        Deployment.start(tmp_path)
    with pytest.raises(RequestError, match="the model's context"):
        Deployment.start(golden_root, max_tokens=10**9)


def test_ranks_that_hold_a_part_of_their_experts_answer_the_same(pair, golden_root, prompts):
    memory = ExpertMemory(3_000_000)
    with Deployment.start(
        golden_root, Layout(tp=2, ep=2), precision="fp32", num_slots=5, max_tokens=200, expert_memory=memory
    ) as deployment:
        assert greedy_tokens(deployment, prompts.values()) == [p["greedy_fp32"] for p in prompts.values()]
        uses = expert_use(deployment)
        resident = [report.stats["resident_bytes"] for report in deployment.reports]
    assert all(0 < use.num_resident < use.num_used for use in uses)
    assert all(use.num_resident + use.num_ahead + use.num_waited == use.num_used for use in uses)
    assert all(use.num_used == 0 for use in expert_use(pair)), "they hold all"
    assert all(a.stats["resident_bytes"] > b for a, b in zip(pair.reports, resident, strict=True))


def test_guesses_that_hold_in_part_leave_the_answers_of_two_ranks_as_they_are(pair, prompts):
    """The state of every rank goes back to what is certain; only the one that samples knows what was accepted."""
    answers = {tuple(p["token_ids"]): p["greedy_fp32"] for p in prompts.values()}
    engine = Engine(pair, step_tokens=40, drafter=KnownAnswers(answers))
    requests = [
        GenerationRequest(token_ids=ids, sampling=SamplingParams(max_tokens=len(answer)))
        for ids, answer in answers.items()
    ]
    generations = [engine.submit(request) for request in requests]
    while engine.step_once():
        engine.scheduler.check()
    assert [[event.token_id for event in generation] for generation in generations] == list(answers.values())
    stats = engine.stats()
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        pytest.param(Layout(tp=2), marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_ranks_follow_the_same_tables_of_a_pool_too_small_for_all_at_once(golden_root, prompts, layout):
    sizes = {"num_slots": 4, "max_tokens": 63, "cache_tokens": 63, "num_snapshots": 1}
    with Deployment.start(golden_root, layout, precision="fp32", **sizes) as deployment:
        cache_bytes = [stats.cache_bytes for stats in deployment.stats()]
        engine = Engine(deployment, step_tokens=24, prefix_pages=6, page_tokens=3)
        asked = [*[prompts["p7"]] * 5, *[prompts["p1"]] * 3] * layout.dp
        generations = [
            engine.submit(GenerationRequest(token_ids=tuple(p["token_ids"]), sampling=SamplingParams(max_tokens=16)))
            for p in asked
        ]
        while engine.step_once():
            engine.scheduler.check()
            engine.scheduler.check_pages()
        assert engine.error is None
        assert [[event.token_id for event in each] for each in generations] == [p["greedy_fp32"] for p in asked]
        stats = engine.stats()
        assert stats.num_preempted > 0
        assert stats.num_cached_tokens > 0
        ranks = deployment.stats()
        assert [each.cache_bytes for each in ranks] == cache_bytes


@pytest.mark.slow
def test_answers_of_two_ranks_do_not_depend_on_their_company(pair):
    report = check_invariance(pair, invariance_requests(pair.spec, pair.info), tolerance=tolerance_of("fp32"))
    assert report.ok, report.render()
