"""A run whose collector gets one trace for each episode, with the spans of the queue, the worker, the engine and the
trainer, or of as many episodes as the limit allows."""

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.agents.kinds import TASKS
from tests.chaos.agents.user_code import write_tasks
from tests.e2e.small_runs import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]
for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.proto"):
    pytest.importorskip(module, reason="python -m pip install 'rl-async[otel]' installs OpenTelemetry's SDK")
LOOP = Path(__file__).parents[1] / "chaos" / "agents" / "user_code.py"
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=3", "eval.every=0", "eval.tasks=4"),
    *(f"agent.loop={LOOP}:play", f"data.path={TASKS}", *HARDLY_WARM),
]


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP and keeps them by trace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.traces: dict[bytes, list[Any]] = defaultdict(list)
        self.paths: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert isinstance(self.server, Collector)
        self.server.paths.add(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
                self.server.traces[span.trace_id].append(span)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def operations(spans: list[Any]) -> set[str]:
    return {name for span in spans if (name := attributes(span).get("gen_ai.operation.name"))}


def test_every_trained_episode_has_one_trace_from_admission_to_gradient(workplace: Path, collector: Collector) -> None:
    write_tasks(workplace / TASKS)
    endpoint = f"tracking.otlp_endpoint=http://127.0.0.1:{collector.server_port}"
    succeed(
        workplace, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "traced", *SMALL, endpoint
    )
    assert collector.paths == {"/v1/traces"}
    trained = (workplace / "runs" / "traced" / "trained.jsonl").read_text().splitlines()
    episodes = {(row["group"], row["sample"]) for row in map(json.loads, trained)}
    found = set()
    for spans in collector.traces.values():
        if "train" not in {span.name for span in spans}:
            continue  # of a group that no step took any more
        (root,) = [span for span in spans if not span.parent_span_id]
        about = attributes(root)
        found.add((about["rl_async.group"], about["rl_async.sample"]))
        assert {"episode", "wait for worker", "wait for batch", "reward", "train"} <= {span.name for span in spans}
        assert operations(spans) == {"invoke_agent", "chat", "execute_tool"}
        (agent,) = [span for span in spans if span.name.startswith("invoke_agent ")]
        (chat,) = [span for span in spans if span.name.startswith("chat ")]
        assert agent.parent_span_id == root.span_id and chat.parent_span_id == agent.span_id
        assert attributes(chat)["gen_ai.usage.output_tokens"] > 0
        sampling = [span for span in spans if span.name in ("wait for engine", "prefill", "decode")]
        assert [span.name for span in sampling] == ["wait for engine", "prefill", "decode"]
        assert {span.parent_span_id for span in sampling} == {chat.span_id}
        assert attributes(sampling[2])["gen_ai.usage.output_tokens"] == attributes(chat)["gen_ai.usage.output_tokens"]
        assert all(chat.start_time_unix_nano <= span.start_time_unix_nano for span in sampling)
        assert sampling[2].end_time_unix_nano <= chat.end_time_unix_nano
        assert {attributes(span)["gen_ai.tool.name"] for span in spans if span.name.startswith("execute_tool ")} == {
            "calculator"
        }
        ids = {span.span_id for span in spans}
        assert len(ids) == len(spans) and all(span.parent_span_id in ids for span in spans if span is not root)
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in spans)
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    assert found == episodes
    publications = [spans for spans in collector.traces.values() if "publish" in {span.name for span in spans}]
    assert len(publications) == 4, "the initial weights, and those after each step"
    for spans in publications:
        (root,) = [span for span in spans if span.name == "publish"]
        (engine,) = [span for span in spans if span is not root]
        assert (engine.name, engine.parent_span_id) == ("update engine", root.span_id) and not root.parent_span_id
        assert attributes(engine)["rl_async.version"] == attributes(root)["rl_async.version"]
        assert root.start_time_unix_nano <= engine.start_time_unix_nano
        assert engine.end_time_unix_nano <= root.end_time_unix_nano


def test_a_limit_leaves_whole_traces(workplace: Path, collector: Collector) -> None:
    write_tasks(workplace / TASKS)
    more = (f"tracking.otlp_endpoint=http://127.0.0.1:{collector.server_port}", "tracking.traces_per_s=0.002")
    succeed(workplace, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "few", *SMALL, *more)
    (spans,) = [spans for spans in collector.traces.values() if "publish" not in {span.name for span in spans}]
    names = {span.name for span in spans}
    assert {"episode", "wait for worker", "wait for batch", "reward", "train", "wait for engine", "decode"} <= names
    assert len([span for span in spans if not span.parent_span_id]) == 1
