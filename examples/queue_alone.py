"""The transfer queue without a trainer: one thread produces samples, another reads them in batches."""

import threading

import numpy as np

from rl_async.messages import Sampling, Task, Trajectory
from rl_async.transfer_queue import SyncQueueClient, read_batches, serve


def sample_row(task: Task, group_id: int, sample: int, attempt: int) -> Trajectory:
    """Make a trajectory of as many tokens as the task's ground truth has characters, all of them trained."""
    tokens = len(task.ground_truth)
    return Trajectory(
        task_id=task.task_id,
        episode_id=f"{group_id}-{sample}-{attempt}",
        group_id=group_id,
        sample=sample,
        attempt=attempt,
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=bool),
        logprobs=np.zeros(tokens, dtype=np.float32),
        versions=[],
        sampling=Sampling(),
        reward=float(tokens),
    )


def produce(address: str) -> None:
    """Lease groups one at a time and put a row for each of their samples, until the queue is finished."""
    with SyncQueueClient(address, role="agent", name="producer") as queue:
        while not (leased := queue.lease(max_groups=1, wait_s=5.0)).finished:
            for group in leased.groups:
                for sample in group.samples:
                    queue.put(sample_row(group.task, group.group_id, sample, group.attempt))


def main() -> None:
    tasks = [Task(task_id=str(i), data_source="demo", prompt=[], ground_truth="x" * i) for i in range(8)]
    with serve(tasks, group_size=2, batch_groups=4) as address:
        producer = threading.Thread(target=produce, args=[address])
        producer.start()
        with SyncQueueClient(address, role="trainer", name="reader") as queue:
            for batch in read_batches(queue, steps=2):
                print(f"step {batch.step}: rewards {[row.reward for row in batch.rows]}")
            queue.finish()
        producer.join()


if __name__ == "__main__":
    main()
