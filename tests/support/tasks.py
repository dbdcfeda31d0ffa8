"""Tasks for tests of the queue's sampling policies."""

from rl_async.messages import Task


def easy_or_hard(number: int) -> Task:
    """Two tasks of the data set ``easy`` to one of ``hard``, with five priorities in turn."""
    return Task(
        task_id=f"t{number}",
        data_source="",
        prompt=[],
        ground_truth="",
        priority=float(number * 7 % 5),
        source="easy" if number % 3 else "hard",
    )
