"""`harbor:FOLDER`: Harbor's tasks, played and judged in a workspace of the sandbox; `extra_info.task` names the task.

The workspace has the files that the task's Dockerfile copies, and the tools `bash` and `python`. The tests come into it
when the episode is over, so nothing that the model ran has seen them; like Harbor's they run where the model worked.
Features that a sandbox without images, network and further services lacks are refused by name: keys of `task.toml` as
unknown ones, Dockerfile instructions beyond FROM, WORKDIR, COPY and ENV with their line.
"""

import asyncio
import logging
import math
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rl_async.agent_loop.environments.session import Services
from rl_async.agent_loop.tools.tool import CallableTool
from rl_async.agent_loop.tools.tool_registry import BASH, PYTHON, CodeTools
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.files import UNDECODABLE
from rl_async.messages import Task
from rl_async.sandbox import Language, Result, Sandbox, SandboxLost, SandboxRefused, Workspace

log = logging.getLogger("rl_async.agent_loop")

# --- a task's Dockerfile --------------------------------------------------------------------------------------------

ROOT = "/app"
_INSTRUCTION = re.compile(r"([A-Za-z]+)\s+(.+)", re.DOTALL)


class Image(NamedTuple):
    """``files``: sources by their paths in the workspace, which has /app as ``app``."""

    workdir: str
    env: dict[str, str]
    files: dict[str, Path]


class _Reader:
    """The state of the image after the instructions that were read."""

    def __init__(self, context: Path) -> None:
        self._context = context
        self.workdir, self.based = "", False
        self.env = dict[str, str]()
        # Sources by absolute path.
        self.files = dict[str, Path]()

    def read(self, name: str, rest: str) -> None:
        """Apply an instruction. Raises ValueError saying what is not supported."""
        if name == "FROM":
            if self.based:
                raise ValueError("a second FROM is not supported")
            self.based = True
        elif name == "WORKDIR":
            self.workdir = self._below_root(_literal(rest))
        elif name == "ENV":
            self.env |= _variables(rest)
        elif name == "COPY":
            self._copy(shlex.split(_literal(rest)))
        else:
            raise ValueError(f"{name} is not supported, only FROM, WORKDIR, COPY and ENV: there is no image to build")

    def _below_root(self, path: str) -> str:
        """Return an absolute path, which is below ROOT."""
        if not path.startswith("/") and not self.workdir:
            raise ValueError(f"{path!r} is relative, and no WORKDIR was set before")
        joined = posixpath.normpath(posixpath.join(self.workdir, path))
        if joined != ROOT and not joined.startswith(f"{ROOT}/"):
            raise ValueError(f"{joined} is not in {ROOT}, which alone can be written")
        return joined

    def _copy(self, words: list[str]) -> None:
        if len(words) < 2 or words[0].startswith(("-", "[", "<<")) or any(set("*?[") & set(word) for word in words):
            raise ValueError("COPY takes sources and a destination; options, patterns and lists are not supported")
        *sources, given = words
        target = self._below_root(given)
        folders = {ROOT, self.workdir, *(posixpath.dirname(path) for path in self.files)}
        into = len(sources) > 1 or given.endswith(("/", "/.")) or given == "." or target in folders
        for source in sources:
            path = self._context / posixpath.normpath(f"/{source}").lstrip("/")
            if path.is_dir():
                below = [file for file in files_below(path) if file != self._context / "Dockerfile"]
                self.files |= {f"{target}/{file.relative_to(path)}": file for file in below}
            elif path.is_file() and not path.is_symlink():
                self.files[f"{target}/{path.name}" if into else target] = path
            else:
                raise ValueError(f"COPY: {path} is neither a file nor a folder")


def read_dockerfile(context: Path) -> Image:
    """Read the Dockerfile of a folder. Raises DataError naming it and the line that is wrong or not supported."""
    file = context / "Dockerfile"
    if (ignoring := context / ".dockerignore").exists():
        raise DataError(f"{ignoring}: not supported; COPY what is wanted")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}; tasks with an image made elsewhere are not supported") from error
    reader = _Reader(context)
    for number, line in _logical_lines(text):
        if (found := _INSTRUCTION.fullmatch(line)) is None:
            raise DataError(f"{file}:{number}: {line!r} is no instruction")
        try:
            reader.read(found[1].upper(), found[2])
        except ValueError as error:
            raise DataError(f"{file}:{number}: {error}") from None
    if not reader.based or not reader.workdir:
        raise DataError(f"{file}: needs FROM and WORKDIR {ROOT}")
    return Image(reader.workdir, reader.env, {path.removeprefix("/"): source for path, source in reader.files.items()})


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder. Raises DataError for links and special files."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: links and special files are not supported")
        if path.is_file():
            yield path


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield instructions with the number of their first line: comments and empty lines left out, continued lines
    joined."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        continued = line.rstrip().endswith("\\")
        parts.append(line.strip().removesuffix("\\"))
        if not continued:
            yield begun, "".join(parts).strip()
            parts = []
    if parts:
        yield begun, "".join(parts).strip()


def _literal(text: str) -> str:
    if "$" in text:
        raise ValueError(f"variables are not supported: {text}")
    return text.strip()


def _variables(rest: str) -> dict[str, str]:
    """Read ENV: KEY=VALUE ..., or the older KEY VALUE."""
    words = shlex.split(_literal(rest))
    if "=" in words[0]:
        pairs = [word.partition("=")[::2] for word in words]
    else:
        name, _, value = rest.strip().partition(" ")
        pairs = [(name, value.strip())]
    if wrong := [name for name, _ in pairs if not name.isidentifier()]:
        raise ValueError(f"ENV: {wrong[0]!r} is no name of a variable")
    return dict(pairs)


# --- a task's folder ------------------------------------------------------------------------------------------------

# Benchmarks put a canary above the text of a task, which is not part of it.
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)
_None = Annotated[list[Any], msgspec.Meta(max_length=0)]


class _Section(msgspec.Struct, forbid_unknown_fields=True):
    # The sandbox has no network either way.
    network_mode: Literal["public", "no-network"] = "public"


class _Agent(_Section):
    timeout_sec: float | None = None


class _Verifier(_Section):
    timeout_sec: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    env: dict[str, str] = {}


class _Environment(_Section):
    build_timeout_sec: float = 600.0
    cpus: int | None = None
    memory: str | None = None
    memory_mb: int | None = None
    storage: str | None = None
    storage_mb: int | None = None
    gpus: Literal[0] | None = None
    os: Literal["linux"] = "linux"
    allow_internet: bool | None = None
    env: dict[str, str] = {}
    mcp_servers: _None = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: str = ""
    schema_version: str = ""
    source: str | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    verifier: _Verifier = msgspec.field(default_factory=_Verifier)
    agent: _Agent = msgspec.field(default_factory=_Agent)
    environment: _Environment = msgspec.field(default_factory=_Environment)
    solution: dict[str, Any] = {}
    artifacts: list[Any] = []


class Placed(NamedTuple):
    """A file to be put into the workspace, at a path relative to it."""

    path: str
    data: bytes
    executable: bool


class HarborTask(NamedTuple):
    """The content of a task's folder. Programs get the variables ``env``, and the tests ``verifier_env`` besides."""

    name: str
    instruction: str
    workdir: str
    env: dict[str, str]
    verifier_env: dict[str, str]
    verifier_s: float
    files: list[Placed]
    tests: list[Placed]


def task_folders(folder: Path) -> list[Path]:
    """Return the folders of tasks in ``folder``. Raises DataError if it has none."""
    if found := sorted(file.parent for file in folder.glob("*/task.toml")):
        return found
    raise DataError(f"{folder}: no folder in it has a task.toml, so it holds no tasks of Harbor")


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises DataError naming the file that is missing, wrong or not supported."""
    # Raises for links, which could lead out of the folder.
    list(files_below(folder))
    config = _config(folder / "task.toml")
    image = read_dockerfile(folder / "environment")
    for of_compose in ("docker-compose.yaml", "docker-compose.yml"):
        if (file := folder / "environment" / of_compose).exists():
            raise DataError(f"{file}: a task of several containers is not supported")
    if not (test := folder / "tests" / "test.sh").is_file():
        raise DataError(f"{test}: no such file; it judges what was done")
    instruction = _CANARY.sub("", _text(folder / "instruction.md"))
    if not instruction.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty")
    return HarborTask(
        folder.name,
        instruction,
        image.workdir,
        image.env | config.environment.env,
        config.verifier.env,
        config.verifier.timeout_sec,
        [_placed(path, source) for path, source in image.files.items()],
        [_placed(f"tests/{file.relative_to(folder / 'tests')}", file) for file in files_below(folder / "tests")],
    )


def _config(file: Path) -> _File:
    try:
        config = msgspec.toml.decode(_text(file), type=_File)
    except (*UNDECODABLE, ValueError) as error:
        raise DataError(f"{file}: {error}; other keys and values are not supported") from error
    for section in ("environment", "verifier"):
        for name, value in getattr(config, section).env.items():
            if not name.isidentifier() or "$" in value:
                raise DataError(f"{file}: {section}.env.{name}: variables of this machine are not handed to tasks")
    return config


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from error


def _placed(path: str, source: Path) -> Placed:
    return Placed(path, source.read_bytes(), bool(source.stat().st_mode & 0o100))


# --- an episode -----------------------------------------------------------------------------------------------------

# The folders at the root that tasks use.
TOP = ("app", "tests", "logs")
# The first of these files that exists has the reward.
REWARDS = ("logs/verifier/reward.json", "logs/verifier/reward.txt")
_COMMANDS: dict[Language, str] = {"bash": "bash", "python": "python3"}
# The log quotes so many bytes of the tests' output.
_LAST = 500
# Removes files that the model put in the place of the tests and their reward; none of its programs runs any more.
_CLEAR = "rm -rf tests logs/verifier && mkdir -p tests logs/verifier logs/agent logs/artifacts"


def harbor_tasks(folder: str) -> "Callable[[Task, Services], Harbor]":
    """Return a function that makes the environment of a row. Raises ConfigError if the folder holds no tasks.

    The function raises DataError for a row that names no folder.
    """
    try:
        task_folders(Path(folder))
    except DataError as error:
        raise ConfigError(f"agent.environment=harbor:{folder}: {error}") from error

    def episode(task: Task, services: Services) -> Harbor:
        name = task.extra.get("task")
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise DataError(f"task {task.task_id}: harbor needs extra_info.task, the name of a folder, not {name!r}")
        return Harbor(Path(folder) / name, services.sandbox(), services.config)

    return episode


class Harbor:
    """An episode of a task."""

    # The sandbox has deadlines.
    own_deadlines = True

    def __init__(self, folder: Path, sandbox: Sandbox, config: RunConfig) -> None:
        self._folder, self._sandbox, self._config = folder, sandbox, config
        self._opened: _Opened | None = None

    async def reset(self) -> None:
        """Open the workspace; the task's prompt says all there is to say. Raises DataError for a wrong task."""
        task = await asyncio.to_thread(read_task, self._folder)
        self._opened = _Opened(task, await self._sandbox.open(top=TOP))
        try:
            await self._opened.place(task.files, f"mkdir -p logs/agent {shlex.quote(task.workdir.lstrip('/'))}")
        except (SandboxLost, SandboxRefused) as error:
            raise EnvironmentFailed(f"harbor: {self._folder}: its files cannot be placed: {error}") from error

    def tools(self) -> Sequence[CallableTool]:
        assert self._opened is not None
        return CodeTools(self._opened, self._config).bind([BASH, PYTHON])

    async def reward(self) -> Mapping[str, float]:
        """Let the tests judge what was done. Without a usable reward it is worth 0, and ``verified`` is 0."""
        assert self._opened is not None
        try:
            rewards = await self._opened.judged()
        except _Unjudged as error:
            log.warning("harbor: %s: worth 0: %s", self._folder, error)
            return {"score": 0.0, "verified": 0.0}
        if "reward" not in rewards and len(rewards) != 1:
            raise EnvironmentFailed(f"harbor: {self._folder}: none of the rewards {list(rewards)} is `reward`")
        score = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
        return {**rewards, "score": score, "verified": 1.0}

    async def close(self) -> None:
        """Forget the workspace."""
        if self._opened is not None:
            await self._opened.close()


class _Unjudged(Exception):
    """The tests left no reward: the message says why."""


class _Opened:
    """The workspace of a task, which starts programs in the task's folder with its variables. CodeTools use it, too."""

    def __init__(self, task: HarborTask, workspace: Workspace) -> None:
        self._task, self._workspace = task, workspace

    async def open(self) -> "_Opened":
        """Return the workspace, which is open already."""
        return self

    async def close(self) -> None:
        await self._workspace.close()

    async def run(self, language: Language, code: str, *, seconds: float | None = None) -> Result:
        return await self._start([_COMMANDS[language], "-c", code], self._task.env, seconds)

    async def place(self, files: Sequence[Placed], program: str) -> None:
        """Run a program in bash, then write files. Raises SandboxRefused if either fails."""
        executable = [file.path for file in files if file.executable]
        await self._prepare(program)
        for file in files:
            await self._workspace.put(file.path, file.data)
        if executable:
            await self._prepare(shlex.join(["chmod", "+x", *executable]))

    async def judged(self) -> dict[str, float]:
        """Run the tests and return their rewards. Raises _Unjudged, and EnvironmentFailed if the workspace is lost."""
        task = self._task
        try:
            await self.place(task.tests, _CLEAR)
            argv = ["bash", "/tests/test.sh"]
            ended = await self._start(argv, task.env | task.verifier_env, task.verifier_s)
            return await self._rewards(_how(ended))
        except SandboxRefused as error:
            raise _Unjudged(str(error)) from error
        except SandboxLost as error:
            raise EnvironmentFailed(f"harbor: {task.name}: {error}") from error

    async def _rewards(self, how: str) -> dict[str, float]:
        for path in REWARDS:
            try:
                text = await self._workspace.get(path)
            except SandboxRefused:
                continue
            try:
                return _numbers(text, as_json=path.endswith(".json"))
            except ValueError as error:
                raise _Unjudged(f"/{path} is no reward: {error}; {how}") from error
        raise _Unjudged(f"the tests wrote no /{' or /'.join(REWARDS)}; {how}")

    async def _prepare(self, program: str) -> None:
        ended = await self._workspace.run("bash", program)
        if ended.exit != 0:
            raise SandboxRefused(f"{program.partition(' ')[0]}: {_how(ended)}")

    async def _start(self, argv: Sequence[str], env: Mapping[str, str], seconds: float | None) -> Result:
        variables = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
        program = f"cd {shlex.quote(self._task.workdir)} && {variables}exec {shlex.join(argv)}"
        return await self._workspace.run("bash", program, seconds=seconds)


def _how(ended: Result) -> str:
    """Describe how a program ended, with the end of its output."""
    last = (ended.stdout + ended.stderr)[-_LAST:].decode(errors="replace").strip()
    return f"ended by the limit of {ended.limit}, {last!r}" if ended.limit else f"exit code {ended.exit}, {last!r}"


def _numbers(text: bytes, *, as_json: bool) -> dict[str, float]:
    """Read a reward, or several by name: text with a number, or JSON. Raises ValueError."""
    read = msgspec.json.decode(text, type=float | bool | dict[str, float | bool]) if as_json else float(text)
    rewards = {name: float(value) for name, value in (read if isinstance(read, dict) else {"reward": read}).items()}
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"not finite: {rewards}")
    return rewards


def write_rows(folder: Path, out: Path) -> tuple[int, list[DataError]]:
    """Write a JSONL file with a row for each task in ``folder``; return their number, and the errors of other tasks.

    Raises DataError if no task can be played.
    """
    rows, refused = list[bytes](), list[DataError]()
    for path in task_folders(folder):
        try:
            task = read_task(path)
        except DataError as error:
            refused.append(error)
            continue
        row = {
            "data_source": "harbor",
            "prompt": [{"role": "user", "content": task.instruction}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": len(rows), "task": task.name},
        }
        rows.append(msgspec.json.encode(row))
    if not rows:
        raise DataError(f"{folder}: no task of it can be played; the first one: {refused[0]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"\n".join(rows) + b"\n")
    return len(rows), refused
