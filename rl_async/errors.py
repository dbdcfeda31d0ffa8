"""The error tree. Every error that a user can cause names the place and a remedy.

RlAsyncError
├── UserError            bad config, data, paths or user code; the command line prints it and exits with 2
│   ├── ConfigError      names the key and the file and line, or the argument
│   ├── DataError        names the file, the row and the column
│   ├── JournalError     the queue's journal cannot be read or written; names the file or server and a remedy
│   └── CheckpointDamaged no undamaged checkpoint is left to continue from; names the files
├── ProtocolError        a malformed or unexpected message from another process
│   └── AccessDenied     the queue does not allow this with the client's key; names the verb and the roles that may
├── EngineError          an engine refused or failed a request
│   ├── EngineRejected   a bad request, which is never retried
│   │   └── SchemaRejected  for its JSON schema
│   └── EngineLost       connection lost or timed out; the request may be replayed elsewhere
├── WeightSyncError      names the engine, the phase and the bucket
│   └── RanksLost        another rank of the trainer died or hangs; names it. All ranks restart together
├── EnvironmentFailed    an environment raised, missed a deadline or broke the protocol; names it and the method
├── McpServerLost        an MCP server cannot be used; names it and its last words
├── RequestRefused       an agent program sent the gateway an unsupported request; names the field
├── RowsChanged          rows came with other tokens than their producer announced; names them and who kept them
├── RowsLost             trajectories were lost with a payload shard, and are generated again
├── TrainerReplaced      another trainer has resumed the run; names both lineages. Nothing is changed by the older one
├── QueueLost            the transfer queue did not answer within the deadline
├── RunFailed            a run that rl_async.launch started ended badly; has its last error and names its output
├── CheckpointFailed     a checkpoint could not be written; names the step and the cause
├── OutOfMemory          a device has no memory left; names the stage of a step, its planned memory and the key
├── RewardsMissing       no episode of a batch could be scored; names the step and the scorer's message
├── TrainingDiverged     a NaN or infinite number; names the step and the batch
└── PolicyDrifted        the data is too far off-policy; names the metric, its value, the limit and the step
"""

import signal
from collections.abc import Mapping

# Exit codes. Starting a process again helps after EXIT_RESTART only.
# The process lost another one, or crashed.
EXIT_RESTART = 1
# UserError: one line `error: ...` on standard error, no traceback.
EXIT_USER = 2
# A named error ended the process, such as divergence or a missed deadline.
EXIT_FAILED = 3
# Plus the signal's number, as in shells: the process was asked to end before its work was done. Schedulers would take 0
# for success.
EXIT_SIGNAL = 128
EXIT_STOPPED = frozenset({EXIT_SIGNAL + signal.SIGTERM, EXIT_SIGNAL + signal.SIGINT})


class RlAsyncError(Exception):
    """Base of all errors raised by this project."""


class UserError(RlAsyncError):
    """Something the user wrote is wrong; the message names the place and the fix."""


class ConfigError(UserError):
    """A config key, value or combination is wrong."""


class DataError(UserError):
    """A row of a data set is wrong."""


class JournalError(UserError):
    """The queue's journal cannot be read or written, or another process holds it."""


class CheckpointDamaged(UserError):
    """A checkpoint is damaged, and no older one can replace it."""


class ProtocolError(RlAsyncError):
    """A message from another process does not follow the protocol."""


class AccessDenied(ProtocolError):
    """The transfer queue does not allow a request with this client's key, or any request without one."""


class EngineError(RlAsyncError):
    """An engine refused or failed a request. ``status``: of its HTTP answer; 0 without one."""

    status = 0


class EngineRejected(EngineError):
    """The engine understood the request and refuses it; a retry would be refused too."""


class SchemaRejected(EngineRejected):
    """The engine cannot keep answers to the request's JSON schema; no other engine is asked."""


class EngineLost(EngineError):
    """The engine cannot be reached or did not answer in time."""


class EpisodeTimeout(RlAsyncError):
    """A user's loop or environment did not end within agent.episode_timeout_s."""


class EnvironmentFailed(RlAsyncError):
    """A user's environment or simulated user raised, missed its deadline, or answered with something unusable."""


class McpServerLost(RlAsyncError):
    """An MCP server cannot be started or reached, or ended too often; names it and its last words."""


class RequestRefused(RlAsyncError):
    """The gateway refuses a request of an agent program. ``status`` is HTTP's; ``code`` and ``param`` as OpenAI's."""

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.param, self.status = code, param, status


class WeightSyncError(RlAsyncError):
    """A weight transfer failed; names the engine, the phase and the bucket."""


class RanksLost(WeightSyncError):
    """Another rank of the trainer died or hangs; names it. This rank is sound and restarts with the others."""


class TrainerReplaced(RlAsyncError):
    """A trainer of a newer lineage has resumed the run, so this one, which was taken for dead, is refused."""


class QueueLost(RlAsyncError):
    """The transfer queue did not answer within the deadline."""


class QueueReplaced(QueueLost):
    """Another queue answers at the address, without the state of the one before."""


class RowsLost(RlAsyncError):
    """Rows of a batch were lost with a payload shard; they are generated again, so reserve the batch again."""


class RowsChanged(RlAsyncError):
    """Rows came with other bytes than their producer announced. ``tokens_hash`` has what came, by row key."""

    def __init__(self, message: str, tokens_hash: Mapping[tuple[int, int, int], str]) -> None:
        super().__init__(message)
        self.tokens_hash = tokens_hash


class RunFailed(RlAsyncError):
    """A run ended badly; has the run's own last error, and names the file with its output."""


class CheckpointFailed(RlAsyncError):
    """A checkpoint could not be written; names the step and the cause."""


class OutOfMemory(RlAsyncError):
    """A device has no memory left; names the stage of a step, its planned memory, and the key to change."""


class RewardsMissing(RlAsyncError):
    """No row of a batch has a reward; names the step and the scorer's message."""


class TrainingDiverged(RlAsyncError):
    """The loss, the gradient or a weight is not finite; names the step and the batch."""


class PolicyDrifted(RlAsyncError):
    """The data is too far off-policy, so the guard ends the run; names the metric, its value, limit and step."""
