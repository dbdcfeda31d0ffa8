"""A pool whose own process stood still, in real time."""

import asyncio
import time

from rl_async.rollout_server.pool import LATE_S
from tests.unit.rollout_server.test_pool import V1, make_pool, registry, request, result


async def test_a_token_that_came_while_this_process_was_held_up_is_in_time() -> None:
    pool, engines = make_pool(timeout_s=0.3, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engines["a"].hold.clear()
    asking = asyncio.create_task(pool.generate(request(), session="s"))
    await engines["a"].asked.wait()
    asyncio.get_running_loop().call_later(0.1, engines["a"].hold.set)
    time.sleep(0.4 + LATE_S)  # noqa: ASYNC251  the process is to stand still
    assert len((await asking).token_ids) == 3
