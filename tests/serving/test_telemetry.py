"""Spans of requests: none without OpenTelemetry, and with it one each, in the client's trace, without any content."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("uvicorn")

from http_served import ask, said, served, until

from workbench.serving.http import telemetry

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_without_the_library_requests_are_answered_and_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(telemetry, "HAS_TELEMETRY", False)
    with served(said("ok")) as server:
        assert server.post(ask()).status == 200


class Recorder:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def start_span(self, name: str, **told: Any) -> Recorder:
        self.spans.append({"name": name, **told})
        return self

    def set_status(self, code: object) -> None:
        self.spans[-1]["status"] = code

    def end(self, end_time: int) -> None:
        self.spans[-1]["end_time"] = end_time


def test_a_span_has_the_parent_the_times_and_the_fields_and_errors_of_the_server_alone_are_failures(monkeypatch):
    api = pytest.importorskip("opentelemetry.trace")
    recorder = Recorder()
    monkeypatch.setattr(telemetry.trace, "get_tracer", lambda name: recorder)
    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"x-\xff", b"\xfe")]
    fields = {"status": 200, "finish": ["stop"], "key": None, "error": "what"}
    telemetry.record_span("POST /x", headers, seconds=1.5, fields=fields, is_failure=False)
    telemetry.record_span("GET other", [], seconds=0.0, fields={}, is_failure=True)
    first, second = recorder.spans
    parent = api.get_current_span(first["context"]).get_span_context()
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert first["end_time"] - first["start_time"] == 1_500_000_000
    assert first["attributes"] == {
        "workbench.status": 200,
        "workbench.finish": "['stop']",
        "workbench.error": "what",
    }
    assert ("status" in first, second["status"]) == (False, api.StatusCode.ERROR)


def test_each_request_is_a_span_of_the_trace_that_the_client_began(monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry.trace, "get_tracer", provider.get_tracer)
    with served(said("a secret answer")) as server:
        got = server.post(ask("a secret question"), traceparent=f"00-{TRACE}-{PARENT}-01", x_request_id="mine")
        assert got.status == 200
        assert server.get("/nowhere").status == 404
        until(lambda: len(exporter.get_finished_spans()) == 2)
    answered, refused = exporter.get_finished_spans()
    assert answered.name == "POST /v1/chat/completions"
    assert f"{answered.context.trace_id:032x}" == TRACE
    assert f"{answered.parent.span_id:016x}" == PARENT
    attributes = dict(answered.attributes)
    assert attributes["workbench.request_id"] == "mine"
    assert attributes["workbench.status"] == 200
    assert attributes["workbench.completion_tokens"] > 0
    assert answered.end_time - answered.start_time == pytest.approx(
        attributes["workbench.seconds"] * 1e9, rel=0.01, abs=2e3
    )
    assert "secret" not in str(attributes)
    assert refused.parent is None
    assert dict(refused.attributes)["workbench.status"] == 404
