"""The rigs that are run by hand: chaos, fuzz and agent programs, and their judges."""

import gzip
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from rl_async import messages as m
from rl_async.process import guard
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.server import Gate
from tests.agent_programs.puppet import Lines as TrialLines
from tests.agent_programs.puppet import template
from tests.agent_programs.trial import MOST_DIFFERENCE, unproven
from tests.chaos.agents.__main__ import all_rounds
from tests.chaos.agents.kinds import (
    FOLDERS,
    HOST,
    KINDS,
    PROGRAM,
    SERVER,
    USER_CODE,
    VICTIMS,
    Process,
    Seen,
    kill,
    left_behind,
    processes,
    victims,
)
from tests.chaos.history import Expected, problems
from tests.chaos.host.proxy import Proxy
from tests.chaos.host.whole_run import KINDS as WHOLE_KINDS
from tests.chaos.host.whole_run import NAMES, Fault, Kind
from tests.chaos.run import NO_NAMESPACES, RUN_KINDS, all_faults
from tests.fuzz.queue import CheckedQueue, Keys, requests, trajectory
from tests.support.flakes import MOST_FLAKES, MOST_TRIES, Session, flaky_tests, judge, read_session, run_again
from tests.support.queue import lost, stale, twice, whole_lines

# Which processes a chaos run of agents strikes, and how it tells what is left behind.


def test_kinds_and_their_roles_are_struck_equally_often() -> None:
    rounds = all_rounds(12 * len(KINDS), list(KINDS), random.Random(0))
    assert {len(roles) for roles in rounds.values()} == {12}
    for name, roles in rounds.items():
        assert set(Counter(roles).values()) == {len(roles) // len(KINDS[name].victims)}
        assert set(roles) == set(KINDS[name].victims) <= set(VICTIMS)


GUARD = ("python", "-I", "-S", guard.__file__, "17", "/tmp/folder")


def process(pid: int, parent: int, *argv: str, name: str = "python") -> Process:
    return Process(pid, 0, parent, name, argv)


@pytest.mark.parametrize(
    ("role", "argv", "name"),
    [
        ("agent worker", ("python", "-P", "-m", "rl_async.agent_loop", "--run", "x"), "python"),
        ("gateway", ("python", "-P", "-m", "rl_async.agent_loop.gateway", "--run", "x"), "python"),
        ("environment host", ("python", "-P", "-m", f"rl_async.{HOST}"), "python"),
        ("guard of an environment host", (*GUARD, "python", "-P", "-m", f"rl_async.{HOST}"), "python"),
        ("guard of an MCP server", (*GUARD, "npx", "server"), "python"),
        ("sandbox", ("bwrap", "--new-session"), "bwrap"),
        ("first process of a sandbox", ("python3", "-I", "-S", "/inside.py"), "python3"),
        ("rl-async play", ("python", "-m", "rl_async.launcher.cli", "play", "runs/x"), "python"),
    ],
)
def test_a_process_is_known_by_its_command(role: str, argv: tuple[str, ...], name: str) -> None:
    running = [process(1, 0, *argv, name=name), process(2, 1, "sleep", "600", name="sleep")]
    assert [found.pid for found in victims(role, running)] == [1]


def test_what_a_host_started_is_its_child() -> None:
    running = [
        process(1, 0, *GUARD, "python", "-P", "-m", f"rl_async.{HOST}"),
        process(2, 1, "python", "-P", "-m", f"rl_async.{HOST}"),
        process(3, 2, "sh"),
    ]
    assert [found.pid for found in victims("container of an environment", running)] == [3]


def test_a_killed_process_is_gone_and_no_other_of_its_number_is_struck() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        (found,) = [one for one in processes() if one.pid == child.pid]
        assert not kill(found._replace(started=found.started + 1)) and child.poll() is None
        assert kill(found)
        child.wait()
    assert not kill(found) and found.pid not in {one.pid for one in processes() if one.started == found.started}


def test_what_the_kinds_start_is_there() -> None:
    assert all(path.is_file() for path in (PROGRAM, SERVER, USER_CODE))


def test_a_process_a_file_and_a_socket_are_named_while_they_are_there(tmp_path: Path) -> None:
    before = Seen.now()
    file, bound = FOLDERS[0] / f"chaos-agents-test-{os.urandom(8).hex()}", str(tmp_path / "bound")
    with subprocess.Popen(["sleep", "600"]) as child, socket.socket(socket.AF_UNIX) as listener:
        file.touch()
        listener.bind(bound)
        found = left_behind(before, within_s=0.0)
        file.unlink()
        child.kill()
    ours = {f"file {file}", f"socket {bound}"}
    assert ours < set(found) and any(line.startswith(f"process {child.pid} ") for line in found)
    again = left_behind(before, within_s=0.0)
    assert not ours & set(again) and not any(line.startswith(f"process {child.pid} ") for line in again)


EXPECTED = Expected(steps=2, groups=1, samples=2, staleness=1)
Lines = dict[str, list[dict[str, Any]]]  # by file


def history() -> Lines:
    """Step 0 was trained by lineage 0, step 1 by lineages 0 and 1: the run was killed and went on after step 0."""
    files: Lines = {"trained.jsonl": [], "metrics.jsonl": [], "ledger.jsonl": []}
    for group in (0, 1, 2):
        files["ledger.jsonl"].append({"event": "admit", "group": group, "partition": "train", "samples": 2})
    for lineage, step in ((0, 0), (0, 1), (1, 1)):
        files["metrics.jsonl"].append({"step": step, "lineage": lineage})
        files["ledger.jsonl"].append({"event": "reserve", "step": step, "groups": [step]})
        rows = files.setdefault(f"trajectories/step-{step:06d}-lineage{lineage}-rank0.jsonl.gz", [])
        for sample in (0, 1):
            tokens = [step, sample, 7]
            digest = xxh3_128_hexdigest(np.array(tokens, dtype="<i4").tobytes())
            key = {"step": step, "lineage": lineage, "group": step, "sample": sample, "segment": 0}
            files["trained.jsonl"].append(key | {"tokens_hash": digest})
            if (lineage, step) != (1, 1):  # a rollback trains what was put before
                files["ledger.jsonl"].append(
                    {"event": "put", "stored": [[step, sample, [digest]]]},
                )
            rows.append(
                {"group_id": step, "sample": sample, "segment": 0, "token_ids": tokens, "versions": [[[0, 0], 0, 2]]}
            )
    return files


def write(folder: Path, files: Lines) -> Path:
    (folder / "trajectories").mkdir()
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


def of_step_1(files: Lines) -> list[dict[str, Any]]:
    return files["trajectories/step-000001-lineage1-rank0.jsonl.gz"]


DAMAGE: dict[str, Callable[[Lines], object]] = {
    "a row was trained twice": lambda files: files["trained.jsonl"].append(files["trained.jsonl"][-1]),
    "a row was not trained": lambda files: files["trained.jsonl"].pop(),
    "a step was not trained": lambda files: files["trained.jsonl"].__delitem__(slice(2, None)),
    "a group was trained in two steps": lambda files: [row.update(group=0) for row in files["trained.jsonl"]],
    "an older lineage after a newer one": lambda files: files["trained.jsonl"][0].update(lineage=2),
    "no metrics": lambda files: files["metrics.jsonl"].pop(),
    "other tokens": lambda files: of_step_1(files)[0]["token_ids"].append(1),
    "too stale": lambda files: of_step_1(files)[0].update(versions=[[[0, -1], 0, 2]]),
    "a lost trajectory": lambda files: of_step_1(files).pop(),
    "an extra trajectory": lambda files: of_step_1(files).append(of_step_1(files)[0] | {"sample": 2}),
    "another batch was reserved": lambda files: files["ledger.jsonl"][-1].update(groups=[2]),
    "tokens that nobody announced": lambda files: files["ledger.jsonl"].__delitem__(-2),
    "forgotten groups": lambda files: files["ledger.jsonl"].extend(
        {"event": "admit", "group": group, "partition": "train", "samples": 2} for group in (3, 4)
    ),
}


def test_a_good_history_has_no_problems(tmp_path: Path) -> None:
    assert problems(write(tmp_path, history()), EXPECTED) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    files = history()
    DAMAGE[damage](files)
    assert problems(write(tmp_path, files), EXPECTED) != []


# Which faults a chaos run gets.


def test_every_kind_strikes_every_role_equally_often() -> None:
    struck = Counter(all_faults(len(WHOLE_KINDS) * 16, list(WHOLE_KINDS), random.Random(0)))
    for kind, roles in WHOLE_KINDS.items():
        assert {struck[Fault(role, kind)] for role in roles} == {16 // len(roles)}


@pytest.mark.parametrize("kinds", [list(WHOLE_KINDS), list(NO_NAMESPACES)])
def test_a_few_faults_have_all_kinds_and_roles(kinds: list[str]) -> None:
    faults = all_faults(6 * len(kinds), kinds, random.Random(0))
    assert {fault.kind for fault in faults} == set(kinds)
    assert {fault.role for fault in faults} >= set(NAMES)


def test_the_first_two_kinds_of_runs_allow_every_fault() -> None:
    faults = all_faults(200, list(WHOLE_KINDS), random.Random(0))
    assert all(any(kind.allows(fault) for kind in RUN_KINDS[:2]) for fault in faults)
    assert not Kind(gateway=True, network=False).allows(Fault("queue", "loss"))
    assert not Kind(gateway=True, network=False, disks=False).allows(Fault("run folder", "full"))
    assert not Kind(gateway=True, network=True).allows(Fault("worker", "kill"))


def test_a_proxy_holds_and_cuts_what_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy("127.0.0.1", server.getsockname)
        with socket.create_connection(("127.0.0.1", proxy.port), 30) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"a")
                assert far.recv(1) == b"a"
                far.settimeout(0.2)
                held = threading.Thread(target=proxy.strike, args=("hold", 1.0, random.Random(0)))
                held.start()
                near.sendall(b"b")
                with pytest.raises(TimeoutError):
                    far.recv(1)
                held.join()
                far.settimeout(30)
                assert far.recv(1) == b"b"
                proxy.cut()
                assert near.recv(1) == far.recv(1) == b""
        proxy.close()


# The fuzzer sends every kind of message, and notices what it is there to notice.


def test_every_kind_of_request_is_among_them():
    made = {type(request) for request in requests(random.Random(0), trajectory(0, 0, 0), "")}
    assert made == set(m.REQUESTS)


def send(server: CheckedQueue, sender: bytes, request: m.Request) -> m.Reply:
    return server.handle([sender, *wire.encode(bytes(8), request)])[0].response.reply


def test_a_queue_that_lets_everybody_do_everything_is_noticed(monkeypatch):
    server = CheckedQueue(Keys())
    register = m.RegisterEngine(engine_id="e", url="http://x", kind="vllm")
    assert isinstance(send(server, b"worker", register), m.Refused)
    assert isinstance(send(server, b"operator", register), m.Done)
    monkeypatch.setattr(Gate, "forbidden", lambda *_: None)
    with pytest.raises(AssertionError):
        send(server, b"worker", m.RegisterEngine(engine_id="f", url="http://x", kind="vllm"))


def test_a_queue_that_does_not_fence_a_replaced_trainer_is_noticed(monkeypatch):
    server = CheckedQueue(Keys())
    assert isinstance(send(server, b"trainer", m.Resume(step=0, lineage=1)), m.Resumed)
    assert isinstance(send(server, b"trainer", m.Finish(lineage=0)), m.Refused)
    monkeypatch.setattr(Book, "fence", lambda *_: None)
    with pytest.raises(AssertionError):
        send(server, b"trainer", m.Finish(lineage=0))


def test_a_journal_that_misses_something_is_noticed():
    server = CheckedQueue(Keys())
    send(server, b"worker", m.Lease(worker="w", max_groups=1, wait_s=0.0))
    server.check_replay()
    server.seen.pop()
    with pytest.raises(AssertionError):
        server.check_replay()


# The judges that the rigs of the queue share accept a good history and notice each kind of damage.


def test_a_group_in_two_steps_is_named_and_one_with_several_rows_of_a_step_is_not() -> None:
    assert twice({0: [1, 1, 2], 1: [3]}) == []
    assert len(twice({0: [1, 2], 1: [2], 2: [2]})) == 2


def test_acknowledged_samples_are_trained_with_their_tokens_or_excused() -> None:
    acknowledged = [((1, 0), "a"), ((2, 0), "b")]
    assert lost(acknowledged, {(1, 0): "a", (2, 0): "b"}) == []
    assert lost(acknowledged, {(1, 0): "a"}, lambda group: group == 2) == []
    assert len(lost(acknowledged, {(1, 0): "a"})) == 1
    assert len(lost(acknowledged, {(1, 0): "a", (2, 0): "other"}, lambda group: group == 2)) == 1


def test_the_bound_itself_is_fresh_enough() -> None:
    assert not stale(3, 2, 1) and stale(3, 1, 1)


def test_a_torn_last_line_and_a_missing_file_are_no_lines(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"b": ')
    assert whole_lines(tmp_path / "lines") == [{"a": 1}]
    assert whole_lines(tmp_path / "missing") == []


# The trial of agent programs: when it counts as passed, and what its tiny model is.


TEXT = TrialLines(shown="Observation:\nN")


def row(*turns: str, sample: int = 0) -> dict[str, Any]:
    said = [turn.partition(":") for turn in turns]
    return {"group_id": 1, "sample": sample, "turns": [{"role": role, "text": text} for role, _, text in said]}


CALLED = row("user:go", "assistant:call", "tool:5", "assistant:5")
WRITTEN = [row("user:go", "assistant:call"), row("user:go. Observation:\n5", "assistant:5")]


@pytest.mark.parametrize(("lines", "rows"), [(TrialLines(), [CALLED]), (TEXT, WRITTEN)])
def test_a_trial_in_which_tools_were_called_is_passed(lines: TrialLines, rows: list[dict[str, Any]]) -> None:
    assert unproven(lines, rows, 0.0, 0) == []


@pytest.mark.parametrize(
    ("lines", "rows", "difference", "given_back"),
    [
        (TrialLines(), [], 0.0, 0),
        (TrialLines(), [row("user:go", "assistant:5")], 0.0, 0),
        (TrialLines(), [row("user:go", "assistant:call", "tool:5")], 0.0, 0),
        (TrialLines(), WRITTEN, 0.0, 0),
        (TEXT, WRITTEN[1:], 0.0, 0),
        (TEXT, [WRITTEN[0], WRITTEN[0]], 0.0, 0),
        (TrialLines(), [CALLED], MOST_DIFFERENCE, 0),
        (TrialLines(), [CALLED], float("nan"), 0),
        (TrialLines(), [CALLED], 0.0, 1),
    ],
)
def test_a_trial_that_shows_nothing_is_not(
    lines: TrialLines, rows: list[dict[str, Any]], difference: float, given_back: int
) -> None:
    assert unproven(lines, rows, difference, given_back)


def test_only_a_model_that_thinks_has_a_template_with_thoughts() -> None:
    assert "</think>" in template(TrialLines(thinks=True)) and "</think>" not in template(TrialLines())
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "5"}]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    for lines in (TrialLines(), TrialLines(thinks=True)):
        said = environment.from_string(template(lines)).render(messages=messages)
        assert said == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"


# Second tries of failed tests: the verdict, and real sessions of tests that fail once, twice or are skipped.


ROOT = Path(__file__).parents[2]
FAILED = pytest.ExitCode.TESTS_FAILED


def session(*tests: str, status: int | None = FAILED, in_setup: Sequence[str] = ()) -> Session:
    return Session(dict.fromkeys([*tests, *in_setup], "AssertionError"), status, set(in_setup))


def test_tests_that_pass_alone_are_flaky_and_the_stage_passes() -> None:
    verdict = judge(session("a", "b"), 0, lambda tests: True)
    assert verdict.flaky == ["a", "b"] and not verdict.broken and not verdict.why


def test_a_test_that_fails_again_fails_the_stage() -> None:
    verdict = judge(session("a", "b"), 0, lambda tests: tests == ["a"])
    assert verdict.flaky == ["a"] and verdict.broken == ["b"] and verdict.why


@pytest.mark.parametrize("passes", [True, False])
def test_tests_of_a_file_that_fail_in_their_set_up_are_tried_together_and_count_as_one(passes: bool) -> None:
    shared = [f"a.py::{number}" for number in range(MOST_TRIES + 1)]
    tried: list[Sequence[str]] = []

    def pass_alone(tests: Sequence[str]) -> bool:
        tried.append(tests)
        return passes or tests != shared

    verdict = judge(session("a.py::own", "b.py::own", in_setup=shared), 0, pass_alone)
    assert tried == [["a.py::own"], ["b.py::own"], shared]
    assert verdict.flaky == ["a.py::own", "b.py::own", *([shared[0]] if passes else [])]
    assert list(verdict.broken) == ([] if passes else [shared[0]])
    assert bool(verdict.why) is not passes


@pytest.mark.parametrize(("known", "new", "passes"), [(0, 3, True), (0, 4, False), (3, 1, False), (2, 1, True)])
def test_more_flaky_tests_than_are_tolerated_fail_the_run(known: int, new: int, passes: bool) -> None:
    assert MOST_FLAKES == 3
    verdict = judge(session(*map(str, range(new))), known, lambda tests: True)
    assert bool(verdict.why) is not passes


@pytest.mark.parametrize(
    "ended",
    [
        session(status=None),
        session("a", status=None),
        session(status=FAILED),
        session("a", status=pytest.ExitCode.INTERRUPTED),
        session("a", status=pytest.ExitCode.INTERNAL_ERROR),
        session(status=pytest.ExitCode.NO_TESTS_COLLECTED),
        session(*map(str, range(MOST_TRIES + 1))),
    ],
    ids=["never began", "killed", "nothing failed", "interrupted", "internal error", "no tests", "too many"],
)
def test_a_session_that_single_tests_do_not_explain_fails_without_a_second_try(ended: Session) -> None:
    def never(tests: Sequence[str]) -> bool:
        raise AssertionError(f"{tests} were tried again")

    assert judge(ended, 0, never).why


TESTS = """
import pathlib
import pytest

def fails_first(name):
    mark = pathlib.Path(__file__).with_name(name)
    known = mark.exists()
    mark.touch()
    assert known, "the first try fails"

@pytest.mark.parametrize("text", ["a b", "x::y[z]"])
def test_once(text):
    fails_first(text.replace(":", ""))

def test_passes():
    pass

def test_twice():
    assert pathlib.Path(__file__).with_name("mended").exists()

def test_nested():
    import subprocess, sys
    here = pathlib.Path(__file__).with_name("nested")
    here.mkdir(exist_ok=True)
    (here / "test_it.py").write_text("def test_it(): pass")
    subprocess.run([sys.executable, "-m", "pytest", str(here)], check=True)
    assert False, "behind a session of its own"

@pytest.fixture(scope="module")
def shared():
    fails_first("shared")

@pytest.mark.parametrize("number", range(2))
def test_of_a_fixture(shared, number):
    pass

def test_skips_later():
    if pathlib.Path(__file__).with_name("mended").exists():
        pytest.skip("nothing was tried")
    raise ValueError("at first")
"""


def first_session(folder: Path, chosen: str, *options: str) -> Path:
    """Run the tests above in ``folder`` as a stage of ``.ci/run`` does, and return what it recorded."""
    (folder / "test_them.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.support.outcomes -p no:cacheprovider\n")
    record = folder / "failures.jsonl"
    command = [sys.executable, "-m", "pytest", "-k", chosen, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": f"--failures={record}"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60, check=False)
    return record


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one process", "workers"]
)
def test_a_test_that_fails_once_is_named_with_its_first_failure(
    there: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    record, report = first_session(there, "once or passes", *options), there / "build" / "flakes.txt"
    assert run_again(record, report) == 0
    assert sorted(flaky_tests(report)) == ["test_them.py::test_once[a b]", "test_them.py::test_once[x::y[z]]"]
    assert "the first try fails" in report.read_text()
    assert "FLAKY: test_them.py::test_once[a b]" in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_fixture_that_fails_once_is_one_flake(there: Path) -> None:
    record, report = first_session(there, "fixture or passes"), there / "flakes.txt"
    assert len(read_session(record).failures) == 2
    assert run_again(record, report) == 0
    assert flaky_tests(report) == ["test_them.py::test_of_a_fixture[0]"]


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record, report = first_session(there, "once or twice"), there / "flakes.txt"
    assert run_again(record, report) == 1
    assert len(flaky_tests(report)) == 2
    assert "FAILED TWICE: test_them.py::test_twice" in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_second_try_that_is_skipped_does_not_pass(there: Path) -> None:
    record = first_session(there, "skips_later")
    (there / "mended").touch()
    assert run_again(record, there / "flakes.txt") == 1


@pytest.mark.slow
def test_a_session_records_failures_and_its_end(there: Path) -> None:
    recorded = read_session(first_session(there, "twice"))
    assert list(recorded.failures) == ["test_them.py::test_twice"] and recorded.status == FAILED


@pytest.mark.slow
def test_a_session_within_a_test_does_not_write_into_the_record(there: Path) -> None:
    recorded = read_session(first_session(there, "twice or nested"))
    assert sorted(recorded.failures) == ["test_them.py::test_nested", "test_them.py::test_twice"]
    assert recorded.status == FAILED


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_fails_the_run(there: Path) -> None:
    (there / "test_broken.py").write_text("import nowhere_to_be_found\n")
    record = first_session(there, "passes or broken")
    assert run_again(record, there / "flakes.txt") == 1


@pytest.mark.slow
def test_slow_tests_and_listed_ones_are_selected(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p tests.support.outcomes\nmarkers =\n  slow\n  nightly")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_listed(): pass\ndef test_other(): pass\n"
        "@pytest.mark.slow\n@pytest.mark.nightly\ndef test_nightly(): pass\n"
    )
    (tmp_path / "test_two.py").write_text("def test_of_a_listed_module(): pass\n")
    (tmp_path / "list").write_text("test_one.py::test_listed\ntest_two.py\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}

    def selected(file: str) -> set[str]:
        done = subprocess.run(
            [*command, f"--slow-or-listed={file}"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    assert selected("list") == {"test_slow", "test_listed", "test_of_a_listed_module"}
    assert selected("none") == {"test_slow"}


# TEST_SEED repeats a session: the same examples of property tests and the same draws, also on xdist's workers.


CONFTEST = """
from tests.support.seed import SessionSeed

def pytest_configure(config):
    config.pluginmanager.register(SessionSeed(config))
"""
SEED_TESTS = """
import os, random
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st

def note(value):
    with Path(os.environ["DRAWN"]).open("a") as file:
        file.write(f"{value}\\n")

@settings(max_examples=20, database=None, deadline=None, derandomize=False)
@given(st.lists(st.integers()))
def test_property(values):
    note(values)

@pytest.fixture(scope="session")
def model():
    random.seed(0)
    return random.random()

@pytest.fixture(scope="session")
def drawn():
    return random.random()

def test_of_its_own(model):
    note(random.random())

def test_of_a_fixture(model, drawn):
    note(f"{drawn} {random.random()}")

def test_that_fails():
    assert False
"""


def seeded_session(folder: Path, *options: str, passed: int = 3, **environment: str) -> tuple[list[str], str]:
    """What the tests drew, in some order, and what was printed."""
    drawn = folder / "drawn"
    drawn.unlink(missing_ok=True)
    plain = {name: value for name, value in os.environ.items() if name not in ("TEST_SEED", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
        env=plain | {"PYTHONPATH": str(ROOT), "DRAWN": str(drawn)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"1 failed, {passed} passed" in done.stdout, done.stdout + done.stderr
    return sorted(drawn.read_text().splitlines()), done.stdout


@pytest.mark.slow
def test_the_same_seed_draws_the_same_and_is_printed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_random.py").write_text(SEED_TESTS)
    first, printed = seeded_session(tmp_path)
    seed = printed.partition("TEST_SEED=")[2].split()[0]
    assert printed.count(f"TEST_SEED={seed}") == 2, "at the start, and where a test failed"
    assert len(first) > 20
    assert seeded_session(tmp_path, TEST_SEED=seed)[0] == first
    assert seeded_session(tmp_path, "-n", "2", TEST_SEED=seed)[0] == first
    assert seeded_session(tmp_path, f"--hypothesis-seed={seed}")[0] == first
    assert seeded_session(tmp_path, TEST_SEED=f"{int(seed) + 1}")[0] != first


@pytest.mark.slow
def test_a_test_draws_alone_as_it_does_behind_another_that_makes_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_random.py").write_text(SEED_TESTS)
    together, _ = seeded_session(tmp_path, TEST_SEED="7")
    alone, _ = seeded_session(tmp_path, "-k", "test_of_a_fixture or test_that_fails", passed=1, TEST_SEED="7")
    assert len(alone) == 1 and alone[0] in together
