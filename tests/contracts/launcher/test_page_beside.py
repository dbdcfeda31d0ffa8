"""The page beside a run: a real process, which serves until its task is cancelled, and whose failure is told."""

import asyncio
from pathlib import Path

import httpx
import pytest

from rl_async.errors import UserError
from rl_async.launcher.runs.launch import PAGE_LOG, serve_beside
from tests.support.recordings import make_run


async def test_it_serves_until_it_is_cancelled(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    page = asyncio.create_task(serve_beside(run, told.set_result))
    async with asyncio.timeout(60), httpx.AsyncClient(follow_redirects=True) as browser:
        address = await told
        (await browser.get(address)).raise_for_status()
        listed = (await browser.get(f"{address.partition('/open/')[0]}/api/runs")).json()
        assert [one["name"] for one in listed] == ["run"]
        page.cancel()
        await asyncio.wait([page])
        with pytest.raises(httpx.ConnectError):
            await browser.get(address)


async def test_a_page_that_does_not_start_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError) as failed:  # there is no config.yaml
        await serve_beside(tmp_path, lambda address: pytest.fail(address))
    assert "tracking.view" in str(failed.value) and PAGE_LOG in str(failed.value)
    assert "config.yaml" in (tmp_path / "logs" / PAGE_LOG).read_text()
