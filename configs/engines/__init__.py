"""What the rest of the system needs to know of each kind of rollout engine, declared once per kind.

``traits.py`` defines EngineTraits, one file per kind declares its own, and ``ENGINES`` lists them. The config checks,
the launcher, the doctor and the command line go through these declarations; none of them compares the name of a kind.

To add a kind: its file here, its name in ``EngineKind`` and ``ENGINES``, and its code in ``rollout_server/<kind>`` with
one line in ``rollout_server/connect.py``. Nothing here imports more than the standard library, since the processes of
vLLM and SGLang, in their own environments, read it too.
"""

from collections.abc import Mapping
from typing import Literal

from rl_async.configs.engines.embedded import EMBEDDED
from rl_async.configs.engines.sglang import SGLANG
from rl_async.configs.engines.traits import EngineTraits
from rl_async.configs.engines.vllm import VLLM

EngineKind = Literal["embedded", "vllm", "sglang"]

ENGINES: Mapping[str, EngineTraits] = {"embedded": EMBEDDED, "vllm": VLLM, "sglang": SGLANG}
