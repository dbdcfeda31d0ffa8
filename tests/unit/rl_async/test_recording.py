"""What a recording has: the groups of each step as they were trained last, and their rows."""

import hashlib
import itertools
import json
import math
import statistics
import sys
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rl_async import tracing
from rl_async.errors import ConfigError, ProtocolError, UserError
from rl_async.evaluation import (
    EXACT,
    Answer,
    mean_change_of,
    mean_of,
    paired_p,
    pass_at,
    summarize,
    summarize_with_total,
    wilson,
)
from rl_async.messages import Media
from rl_async.recording import (
    Recording,
    evaluation_file,
    evaluations,
    forget_trained,
    images_file,
    is_whole,
    place_of,
    read_images,
    read_trajectories,
    task_of,
    trained_file,
    write_trajectories,
)
from rl_async.tracing import VARIABLES
from rl_async.trainer.records import append_trained
from tests.conftest import make_rows


def record(run: Path, step: int, lineage: int = 0, shift: int = 0) -> None:
    rows = [msgspec.structs.replace(row, group_id=row.group_id + shift) for row in make_rows(step)]
    write_trajectories(run / "trajectories" / f"step-{step:06d}-lineage{lineage}-rank0.jsonl.gz", rows[1::2])
    write_trajectories(run / "trajectories" / f"step-{step:06d}-lineage{lineage}-rank1.jsonl.gz", rows[::2])
    append_trained(run / "trained.jsonl", lineage, step, rows)


def test_groups_come_in_the_order_of_training_with_their_rows(tmp_path: Path) -> None:
    for step in (0, 1):
        record(tmp_path, step)
    recording = Recording(tmp_path)
    trained = make_rows(0) + make_rows(1)
    assert [group.group for group in recording.groups] == list(dict.fromkeys(row.group_id for row in trained))
    for group in recording.groups:
        expected = [row for row in make_rows(group.step) if row.group_id == group.group]
        rows = recording.rows(group.step, group.group)
        assert rows.keys() == group.samples == {row.sample for row in expected}
        found = {row.key: row.tokens_hash() for of_sample in rows.values() for row in of_sample}
        assert found == {row.key: row.tokens_hash() for row in expected}


def test_a_recording_of_an_older_version_is_read_and_compared_by_its_hashes(tmp_path: Path) -> None:
    record(tmp_path, 0)
    path = tmp_path / "trained.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, row in zip(lines, make_rows(0), strict=True):
        assert line.pop("tokens_hash") == row.tokens_hash()
        line["tokens_sha256"] = hashlib.sha256(row.token_ids.astype("<i4").tobytes()).hexdigest()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group, *_) = Recording(tmp_path).groups
    assert Recording(tmp_path).rows(0, group.group)
    lines[0]["tokens_sha256"] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="disagree"):
        Recording(tmp_path).rows(0, group.group)


def test_a_step_that_was_trained_again_is_as_it_was_trained_last(tmp_path: Path) -> None:
    record(tmp_path, 0)
    record(tmp_path, 0, lineage=1, shift=100)
    recording = Recording(tmp_path)
    assert {group.group for group in recording.groups} == {row.group_id + 100 for row in make_rows(0)}
    assert recording.rows(0, recording.groups[0].group)


def test_a_resumed_lineage_voids_what_an_older_one_trained_from_there_on(tmp_path: Path) -> None:
    for step in range(6):
        record(tmp_path, step)
    for step in (2, 3):
        record(tmp_path, step, lineage=1, shift=100)
    append_trained(tmp_path / "trained.jsonl", 0, 6, make_rows(6))  # by a trainer that did not know of its successor
    groups = Recording(tmp_path).groups
    assert sorted({(group.lineage, group.step) for group in groups}) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [group.step for group in groups] == sorted(group.step for group in groups)


def test_an_evaluation_that_lacks_episodes_is_listed_and_told_by_its_name(tmp_path: Path) -> None:
    files = [evaluation_file(tmp_path, step, whole=step != 1) for step in range(3)]
    for file in files:
        write_trajectories(file, [])
    assert evaluations(tmp_path / "trajectories") == dict(enumerate(files))
    assert [is_whole(file) for file in files] == [True, False, True]


def test_only_the_files_of_the_lineage_that_counts_are_read(tmp_path: Path) -> None:
    record(tmp_path, 0)
    rows = [msgspec.structs.replace(row, group_id=row.group_id + 100) for row in make_rows(0)]
    write_trajectories(tmp_path / "trajectories" / "step-000000-lineage1-rank0.jsonl.gz", rows)
    (group, *_) = Recording(tmp_path).groups
    assert Recording(tmp_path).rows(0, group.group).keys() == group.samples


@pytest.mark.parametrize("harm", ["segment", "tokens", "torn"])
def test_rows_that_are_not_as_they_were_trained_are_refused(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz"
    rows = make_rows(0, 1, 2)
    rows.append(msgspec.structs.replace(rows[-1], segment=1, token_ids=rows[-1].token_ids[::-1].copy()))
    append_trained(tmp_path / "trained.jsonl", 0, 0, rows)
    write_trajectories(file, rows)
    assert [row.segment for row in Recording(tmp_path).rows(0, 0)[1]] == [0, 1]
    if harm == "segment":
        write_trajectories(file, rows[:-1])
    elif harm == "tokens":
        other = msgspec.structs.replace(rows[0], token_ids=(rows[0].token_ids + 1).astype(np.int32))
        write_trajectories(file, [other, *rows[1:]])
    else:
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        Recording(tmp_path).rows(0, 0)


def test_a_task_names_its_place(tmp_path: Path) -> None:
    record(tmp_path, 0)
    group = Recording(tmp_path).groups[-1]
    assert place_of(task_of(group)) == (group.step, group.group)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        _ = Recording(tmp_path).groups


def test_a_group_whose_trajectories_are_missing_is_refused(tmp_path: Path) -> None:
    append_trained(tmp_path / "trained.jsonl", 0, 0, make_rows(0))
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        Recording(tmp_path).rows(0, 0)


def test_images_that_were_not_recorded_are_refused(tmp_path: Path) -> None:
    image = Media.of(b"image", "image/png", 0)
    rows = [msgspec.structs.replace(row, media=[image]) for row in make_rows(0)]
    write_trajectories(tmp_path / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)
    append_trained(tmp_path / "trained.jsonl", 0, 0, rows)
    with pytest.raises(ConfigError, match="images"):
        Recording(tmp_path).rows(0, rows[0].group_id)


def test_images_are_recorded_once_and_deleted_with_their_step(tmp_path: Path) -> None:
    image, other = Media.of(b"image", "image/png", 0), Media.of(b"other", "image/png", 2)
    rows = [msgspec.structs.replace(row, media=[image, other]) for row in make_rows(0)]
    file = trained_file(tmp_path, 0, 0, 0)
    write_trajectories(file, rows, media={image.sha256: b"image", other.sha256: b"other"})
    append_trained(tmp_path / "trained.jsonl", 0, 0, rows)
    recording = Recording(tmp_path)
    assert recording.rows(0, rows[0].group_id)
    assert recording.images == {image.sha256: b"image", other.sha256: b"other"}
    assert read_images(file, [other.sha256, "0" * 64]) == {other.sha256: b"other"}
    images_file(file).write_bytes(b"no archive")
    with pytest.raises(UserError, match="damaged"):
        read_images(file, [image.sha256])
    forget_trained(tmp_path, 1)
    assert not any((tmp_path / "trajectories").iterdir())


def test_experts_are_not_recorded(tmp_path: Path) -> None:
    row = msgspec.structs.replace(make_rows(0)[0], routed_experts=np.zeros((4, 2, 2), np.uint8))
    write_trajectories(tmp_path / "rows.jsonl.gz", [row])
    (back,) = read_trajectories(tmp_path / "rows.jsonl.gz")
    assert back.routed_experts is None and back.tokens_hash() == row.tokens_hash()


@pytest.mark.parametrize(
    "experts", [np.zeros((99, 2, 2), np.uint8), np.zeros((4, 2), np.uint8), np.zeros((4, 2, 2), np.int32)]
)
def test_a_row_with_experts_of_another_shape_or_type_is_refused(experts: np.ndarray) -> None:
    row = make_rows(0)[0]
    msgspec.structs.replace(row, routed_experts=np.zeros((len(row.token_ids), 2, 2), np.uint16)).header()
    with pytest.raises(ProtocolError, match="routed_experts"):
        msgspec.structs.replace(row, routed_experts=experts).header()


# Estimates against enumeration, closed forms and published tables, and what an evaluation comes to.


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 3, 4)])
def test_pass_at_k_counts_the_subsets_with_a_pass(samples: int, passed: int, k: int) -> None:
    subsets = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_against_published_values() -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    for passed, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        assert wilson(passed / trials, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("count", "quantile"), [(4, 3.182), (6, 2.571), (11, 2.228), (31, 2.042)])
def test_means_of_other_numbers_than_shares_have_students_interval(count: int, quantile: float) -> None:
    values = [float(n) for n in range(-1, count - 1)]
    mean, half = statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(count)
    assert mean_of(values) == pytest.approx((mean, mean - half, mean + half), rel=2e-3)


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0], [0.5, 0.5, 0.5]])
def test_changes_that_do_not_show_how_they_vary_have_a_wide_interval(values: list[float]) -> None:
    mean, low, high = mean_change_of(values)
    assert low < 0 < mean and high - low > 0.7 and -1 <= low <= mean <= high <= 1
    assert mean_change_of([5.0] * 3) == (5.0, -math.inf, math.inf)


@pytest.mark.parametrize("tasks", [32, 64])
def test_the_fewer_tasks_changed_the_narrower_is_the_interval(tasks: int) -> None:
    found = [mean_change_of([1.0] * changed + [0.0] * (tasks - changed)) for changed in range(4)]
    widths = [high - low for _, low, high in found]
    assert widths == sorted(set(widths))
    assert found[0] == pytest.approx((0.0, -1.96 / (tasks + 2), 1.96 / (tasks + 2)), rel=1e-4)


@pytest.mark.parametrize(("better", "worse"), [(0.02, 0.02), (0.1, 0.0), (0.2, 0.1), (0.5, 0.5), (0.9, 0.05)])
def test_the_interval_of_a_change_covers_the_true_one(better: float, worse: float) -> None:
    """The chance, summed over all outcomes of 30 tasks, that the interval has the true mean change."""
    tasks, covered = 30, 0.0
    for up in range(tasks + 1):
        for down in range(tasks + 1 - up):
            _, low, high = mean_change_of([1.0] * up + [-1.0] * down + [0.0] * (tasks - up - down))
            ways = math.comb(tasks, up) * math.comb(tasks - up, down)
            chance = ways * better**up * worse**down * max(0.0, 1 - better - worse) ** (tasks - up - down)
            covered += chance * (low <= better - worse <= high)
    assert covered > 0.93


@pytest.mark.parametrize("changes", [[0.5, -0.25, 0.75, 0.0, 0.25], [1.0] * 5, [0.0, 0.0], [], [0.1, 0.2, -0.3]])
def test_few_changes_are_tested_exactly(changes: list[float]) -> None:
    flips = [abs(sum(s * c for s, c in zip(signs, changes))) for signs in product([1, -1], repeat=len(changes))]
    assert paired_p(changes) == pytest.approx(sum(flip >= abs(sum(changes)) - 1e-9 for flip in flips) / len(flips))


@pytest.mark.parametrize(("better", "worse"), [(30, 10), (12, 10), (25, 5)])
def test_many_changes_of_one_size_agree_with_the_sign_test(better: int, worse: int) -> None:
    """Where all changes are of one size, the randomization test is the two-sided sign test."""
    count = better + worse
    assert count > EXACT
    tail = sum(math.comb(count, k) for k in range(worse + 1)) / 2**count
    found = paired_p([1.0] * better + [-1.0] * worse)
    assert found == pytest.approx(min(1.0, 2 * tail), abs=4 * math.sqrt(tail / 16384) + 1 / 16384)
    assert found == paired_p([1.0] * better + [-1.0] * worse)


def test_a_total_is_added_to_several_sources_alone() -> None:
    one = [Answer("a", "t", 1.0)]
    assert summarize_with_total(one, 1.0) == summarize(one, 1.0)
    several = [*one, Answer("b", "t", 0.0)]
    *sources, total = summarize_with_total(several, 1.0)
    assert sources == summarize(several, 1.0)
    assert (total.source, total.tasks, total.average.value) == ("all", 2, 0.5), "tasks of the same name are two"


def test_the_roles_of_a_task_count_once_in_the_total() -> None:
    """Of a zero-sum game each role wins half the time, and one of both roles always."""
    games = [
        Answer("g", f"t{task}", float(won), role)
        for task in range(200)
        for role, won in (("first", task % 2), ("second", 1 - task % 2))
    ]
    *_, total = summarize_with_total(games, 1.0)
    assert (total.tasks, total.episodes, total.average.value) == (200, 200, 0.5)
    assert {k: found.value for k, found in total.passed.items()} == {1: 0.5}


@pytest.mark.parametrize("weights", [*itertools.permutations((0.7, 0.2, 0.1)), (0.1,) * 10])
def test_a_perfect_answer_passes_whatever_its_weights_round_to(weights: tuple[float, ...]) -> None:
    (line,) = summarize([Answer("s", "t", sum(weights)), Answer("s", "t", sum(weights) - 1e-6)], 1.0)
    assert line.passed[1].value == 0.5


def test_metrics_have_each_estimate_with_its_interval_and_nothing_that_is_no_number() -> None:
    (line,) = summarize([Answer("s", "t", 1.0), Answer("s", "t", 3.0), Answer("s", "u", 5.0)], 3.0)
    metrics = line.metrics()
    assert math.isinf(line.average.high)
    assert metrics.keys() == {"s/tasks", "s/samples", "s/avg", "s/pass@1", "s/pass@1/low", "s/pass@1/high"}
    assert (metrics["s/samples"], metrics["s/avg"], metrics["s/pass@1"]) == (1.0, 3.5, 0.75)


def test_a_source_without_a_name_has_one_as_a_metric() -> None:
    (line,) = summarize([Answer("", "t", 1.0)], 1.0)
    assert line.metrics()["unnamed/avg"] == 1.0


# Tracing that is off costs nothing, and one that cannot work is refused only where it was asked for.


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No OpenTelemetry is installed, and no variable set."""
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_off_nothing_is_read_imported_or_kept(missing: None, tmp_path: Path) -> None:
    before = set(sys.modules)
    with tracing.traced("", tmp_path / "no such run", "queue"):
        assert tracing.now() == 0
        tracing.add("1.0.0", "chat", tracing.now(), {})
        with tracing.span("1.0.0", "chat", {}) as found:
            found["more"] = 1
    assert not {name for name in set(sys.modules) - before if name.startswith("opentelemetry")}


def test_an_endpoint_without_the_package_is_refused_and_names_the_key(missing: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.otlp_endpoint"):
        tracing.is_wanted("http://127.0.0.1:4318")


def test_a_variable_of_the_machine_without_the_package_is_no_error(
    missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[0], "http://127.0.0.1:4318")
    assert not tracing.is_wanted("")


otel = pytest.mark.skipif(
    find_spec("opentelemetry") is None, reason="no OpenTelemetry; install it with pip install 'rl-async[otel]'"
)


@otel
@pytest.mark.parametrize(
    ("share", "least", "most"), [("0", 0, 0), ("0.25", 150, 350), ("1", 1000, 1000), ("", 1000, 1000)]
)
def test_every_process_samples_the_same_share_of_traces(
    share: str, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.SHARE, share)
    sent = [sampled(role) for role in ("queue", "worker")]
    assert sent[0] == sent[1] and least <= len(sent[0]) <= most


@pytest.mark.parametrize("share", ["x", "-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.SHARE, share)
    with pytest.raises(ConfigError, match=tracing.SHARE):
        tracing._sampled_share()


def sampled(role: str) -> set[int]:
    """Return those of 1,000 episodes of which a process would begin a trace."""
    spans = tracing.Spans("http://127.0.0.1:1", "run", role)
    spans.close()
    return {episode for episode in range(1000) if spans.begins(f"{episode}.0.0")}


def test_traces_are_limited_to_a_rate_and_to_a_minute_of_it_at_once() -> None:
    limit, slow, none = tracing.TraceLimit(2.0), tracing.TraceLimit(0.001), tracing.TraceLimit(None)
    assert sum(limit.take(1000.0) for _ in range(500)) == 2 * tracing.BURST_S
    assert sum(limit.take(1000.0 + second / 10) for second in range(100)) == pytest.approx(20, abs=1)
    assert sum(limit.take(9000.0) for _ in range(500)) == 2 * tracing.BURST_S, "what is not used is not saved up"
    assert sum(slow.take(1.0) for _ in range(9)) == 1, "at any rate there is a first one"
    assert all(none.take(0.0) for _ in range(500))


class FakeSpans(tracing.Spans):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self._run, self.sent = "run", list[tuple[Any, Any]]()

    def _send(self, name: str, context: Any, parent: Any, *others: Any) -> None:
        self.sent.append((context, parent))


@otel
def test_a_span_below_a_header_is_in_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    with tracing.span("1.0.0", "chat", {}, key="1.0.0.0"):
        header = tracing.traceparent("1.0.0", "1.0.0.0")
        tracing.add_below(header, "decode", 1, 2, {})
    for refused in ("", "00-12-34-01", header.replace("00-", "ff-", 1), f"{header}-more"):
        tracing.add_below(refused, "decode", 1, 2, {})
    (below, parent), (chat, _) = fake.sent
    assert (parent.trace_id, parent.span_id) == (chat.trace_id, chat.span_id)
    assert below.trace_id == chat.trace_id and below.span_id != chat.span_id


@otel
def test_an_episode_without_a_trace_has_neither_spans_nor_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    with tracing.span("", "chat", {}):
        tracing.add("", "train", tracing.now(), {})
    assert tracing.traceparent("", "0") == "" and not fake.sent
