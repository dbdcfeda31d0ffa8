"""Each tracker as it is, offline: what its own files hold afterwards is what metrics.jsonl has, and nothing left this
machine.

A tracker works in a network namespace of its own, whose one way out counts packets; to it goes whatever is neither
loopback nor a socket file, the question of a name server for an address included.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

Series = dict[str, dict[int, float]]  # by metric: step -> value

LOG = """
import json, sys
from pathlib import Path
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig, TrackingConfig
from rl_async.trainer.trackers import Tracking
config = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"),
                   tracking=TrackingConfig(backends=(sys.argv[2],)), name="test")
for start, end in ((0, 3), (2, 5)):  # resumed, with one step trained again
    tracking = Tracking(config, Path(sys.argv[1]))
    for step in range(start, end):
        numbers = {"reward/mean": 0.5 + 0.1 * step, "loss/kl_reference": 1e-9 * step, "batch/bytes": 3e9 + step}
        evaluated = {"eval/reward": 0.75, "eval/math/pass@4": 0.875, "eval/math/pass@4/low": 0.5} if step == 1 else {}
        tracking.log(step, {"step": step, "version": step + 1, **numbers, **evaluated})
    assert sys.argv[2] in tracking._live, "it was dropped"
    tracking.close()
"""
CONNECT = """
import socket
try:
    socket.create_connection(("example.org", 443), 2)
except OSError:
    pass
"""
OUTSIDE = """
mount --bind "$1" /etc/resolv.conf && shift &&
ip link set lo up && ip link add out type veth peer name far &&
ip link set out arp off addrgenmode none && ip link set far up && ip link set out up &&
ip addr add 10.99.0.2/24 dev out && ip route add default dev out || exit 77
"$@" || exit
awk '$1 == "out:" { print "packets", $11 }' /proc/net/dev
"""


def packets_sent(folder: Path, *command: str) -> int:
    """Run a command in a namespace of its own; the packets that it sent to anywhere but this machine."""
    (folder / "resolv.conf").write_text("nameserver 10.99.0.1\noptions timeout:1 attempts:1\n")
    alone = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", OUTSIDE, "sh", folder / "resolv.conf"]
    try:
        done = subprocess.run([*alone, *command], cwd=folder, capture_output=True, text=True, timeout=170)
    except FileNotFoundError:
        pytest.skip("`apt-get install util-linux iproute2` installs what makes network namespaces")
    if done.returncode == 77:
        # The word "install" has CI count it (SkipRecorder), which must not pass without these tests.
        pytest.skip(f"no network namespace is allowed; install in a container with --privileged: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.rsplit("packets", 1)[1])


def known_id(folder: Path) -> str:
    """The id that a tracker's processes have, one after another."""
    return (folder / "run_id").read_text()


def read_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert [event.step for event in found["step"]] == [0, 1, 2, 3, 4]
    return {name: {event.step: event.value for event in values} for name, values in found.items()}


def read_swanlab(folder: Path) -> Series:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = defaultdict[str, dict[int, float]](dict)
    for file in sorted(folder.glob("swanlab/run-*/run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for record in map(Record.FromString, reader):
            if record.HasField("scalar"):
                found[record.scalar.key][record.scalar.step] = record.scalar.value.number
            if record.HasField("start"):
                assert record.start.id == known_id(folder / "swanlab")
        reader.close()
    return found


def read_wandb(folder: Path) -> Series:
    """W&B's records, out of its files as SwanLab takes them: W&B itself has no reader in Python any more."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    found = defaultdict[str, dict[int, float]](dict)
    for file in sorted(folder.glob(f"wandb/offline-run-*/run-{known_id(folder / 'wandb')}.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            for record in map(Record.FromString, iter(reader.scan, None)):
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        found[name][record.history.step.num] = json.loads(item.value_json)
    return found


def read_mlflow(folder: Path) -> Series:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rl-async")
    (run,) = client.search_runs([experiment.experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {
        name.replace(".", "/").replace("_at_", "@"): {m.step: m.value for m in history}
        for name, history in histories.items()
    }


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": read_tensorboard,
    "swanlab": read_swanlab,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


@pytest.mark.filterwarnings("ignore")  # theirs, while their files are read
@pytest.mark.parametrize(
    "tracker", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tensorboard")) for name in READERS]
)
def test_a_tracker_keeps_every_number_in_one_run_and_sends_nothing(tracker: str, tmp_path: Path) -> None:
    for module in {tracker, "swanlab"} if tracker == "wandb" else {tracker}:
        if find_spec(module) is None:
            pytest.skip(f"`python -m pip install 'rl-async[{module}]'` installs {module}")
    assert packets_sent(tmp_path, sys.executable, "-c", LOG, str(tmp_path), tracker) == 0
    kept: Series = defaultdict(dict)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            kept[name][row["step"]] = pytest.approx(value, rel=1e-6)  # TensorBoard keeps 32 bits
    assert READERS[tracker](tmp_path) == kept


def test_what_would_leave_this_machine_is_counted(tmp_path: Path) -> None:
    assert packets_sent(tmp_path, sys.executable, "-c", CONNECT) > 0
