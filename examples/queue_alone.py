"""The transfer queue without a trainer: one thread makes samples, another reads them in batches. `python FILE`."""

import threading

import numpy as np

from rl_async.messages import Sampling, Task, Trajectory
from rl_async.transfer_queue import SyncQueueClient, read_batches, serve


def produce(address: str) -> None:
    with SyncQueueClient(address, role="agent", name="producer") as queue:
        while not (leased := queue.lease(max_groups=1, wait_s=5.0)).finished:
            for group in leased.groups:
                for sample in group.samples:
                    n, here = len(group.task.ground_truth), (group.group_id, sample, group.attempt)
                    ids, zeros = np.arange(n, dtype=np.int32), np.zeros(n, np.float32)
                    row = dict(zip(("group_id", "sample", "attempt"), here), token_ids=ids, logprobs=zeros)
                    row |= {"loss_mask": ids >= 0, "versions": [], "sampling": Sampling(), "reward": float(n)}
                    queue.put(Trajectory(task_id=group.task.task_id, episode_id=str(here), **row))


tasks = [Task(task_id=str(i), data_source="demo", prompt=[], ground_truth="x" * i) for i in range(8)]
with serve(tasks, group_size=2, batch_groups=4) as address, SyncQueueClient(address, role="trainer", name="me") as me:
    producer = threading.Thread(target=produce, args=[address])
    producer.start()
    for batch in read_batches(me, steps=2):
        print(f"step {batch.step}: rewards {[row.reward for row in batch.rows]}")
    me.finish()
    producer.join()
