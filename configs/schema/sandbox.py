"""Section `sandbox`: where the code runs that models write, and what it may use there."""

from typing import Annotated

from msgspec import Meta

from rl_async.configs.base import Config, Positive, Seconds, doc


class SandboxConfig(Config, frozen=True):
    kind: Annotated[
        str,
        doc(
            "bubblewrap: namespaces of this machine's kernel; container: Docker's or Podman's, from image; "
            "sandbox_fusion: a server at url; or a class of your own as path.py:name (docs/reference/sandbox.md)."
        ),
    ] = "bubblewrap"
    image: Annotated[str, doc("Image of containers, with python3 and bash, on this machine already.")] = ""
    command: Annotated[tuple[str, ...], doc("What runs containers, as [docker] or [podman, --runtime, runc].")] = (
        "docker",
    )
    url: Annotated[str, doc("Base URL of a Sandbox Fusion server, e.g. http://127.0.0.1:8080.")] = ""
    timeout_s: Annotated[
        Seconds, doc("Wall-clock time of one program; a tool's is also below agent.tool_timeout_s.")
    ] = 8.0
    cpu_s: Annotated[Positive, doc("Processor time of one process.")] = 8
    memory_bytes: Annotated[
        int,
        Meta(
            ge=64 << 20,
            description="Address space of one process, refused beyond; a program whose processes hold more together is "
            "ended, at most a twentieth of a second late.",
        ),
    ] = 1 << 30
    workspace_bytes: Annotated[
        int, Meta(ge=1 << 16, description="All files of one episode or answer; they are kept in memory.")
    ] = 64 << 20
    processes: Annotated[Positive, doc("Processes and threads of one program at a time.")] = 64
    output_bytes: Annotated[Positive, doc("What one program may print; it is ended beyond.")] = 1 << 20
    packages: Annotated[
        tuple[str, ...],
        doc("Folders with Python packages that programs may read and import, such as a virtual environment's."),
    ] = ()
