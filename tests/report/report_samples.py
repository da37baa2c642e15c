"""Reports to test with: an ordinary one, and the same with a given text in every place that holds text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from PIL import Image

from workbench.base import Table
from workbench.report import Day0Report, Gate, Picture, SampleAnswer, Section
from workbench.view import bytes_by_role, latency_bars, load_timeline


def png_bytes(size: tuple[int, int] = (5, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def sample_report(text: Callable[[str], str] = lambda plain: plain, **changes: Any) -> Day0Report:
    """A report with every part filled in; `text` replaces each string in it."""
    t = text
    gates = (
        Gate(
            id=t("checkpoint.audit"),
            layer=t("checkpoint"),
            question=t("Are the files whole?"),
            threshold=0,
            value=0,
            relation="<=",
            unit=t("findings"),
            evidence=t("560 tensors in 11 files"),
            conditions=t("deep audit"),
            proof=t("a torn file"),
        ),
        Gate(id=t("serving.text"), layer=t("serving"), question=t("Right word?"), threshold=t("blue"), value=t("blue")),
        Gate(
            id=t("cluster.links"),
            layer=t("cluster"),
            question=t("How fast?"),
            threshold=1e9,
            value=None,
            relation=">=",
            unit=t("B/s "),
            evidence=t("one device only"),
            is_optional=True,
        ),
    )
    answer = SampleAnswer(
        question=t("What is this?"),
        answer=t("A red card."),
        pictures=(Picture(data=png_bytes(), caption=t("card.png")),),
        num_prompt_tokens=37,
        num_tokens=4,
        first_token_s=0.042,
        end_to_end_s=0.11,
        note=t("greedy"),
        expected=t("A green card."),
        is_right=False,
    )
    section = Section(
        title=t("Loading"),
        text=t("Each rank read its own bytes."),
        tables=(Table(columns=(t("file"), "bytes"), rows=((t("a"), 5),), title=t("Files"), note=t("all of them")),),
        charts=(
            bytes_by_role({t("routed_expert"): 90, "head": 10}, what=t("the model")),
            load_timeline({0: [(0.0, 0), (1.0, 5)], 1: [(0.0, 0), (1.0, 7)]}),
            latency_bars({"first_token_s": {"p50": 0.1, "p99": 0.2}, "num_requests": 2}),
        ),
    )
    values: dict[str, Any] = {
        "model": t("Kimi K3 tiny"),
        "checkpoint": t("data/k3-tiny"),
        "weights_kind": "dummy",
        "weights_note": t("random"),
        "gates": gates,
        "created_at": t("2026-11-29T19:30:00+00:00"),
        "hardware": t("a CPU"),
        "versions": {
            "workbench": t("0.1.0"),
            "git_commit": t("abcdef0123456789"),
            "git_dirty": True,
            "packages": {t("torch"): t("2.13.0")},
        },
        "environment": {t("layout"): t("tp2"), "command": t("workbench day0")},
        "machine": {
            t("host"): t("vm"),
            "devices": [{"name": t("CPU"), "features": [{"name": t("bf16 matmul"), "is_supported": True}]}],
        },
        "answers": (answer,),
        "sections": (section,),
        "seconds": 23.4,
        "next_steps": (t("Serve it: `workbench serve k3`"), t("compare")),
    }
    return Day0Report(**{**values, **changes})
