"""A tab of Chromium on the page of ``rl-async view``."""

import os
import shutil
from typing import Any

CHROMIUM = os.environ.get("RL_ASYNC_CHROMIUM") or shutil.which("chromium")
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}


class Tab:
    """A page that must not complain, nor ask anybody else for anything."""

    def __init__(self, browser: Any, address: str, size: str = "wide", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.base = address.partition("/open/")[0]
        self.page.goto(address)

    def open(self, place: str) -> Any:
        self.page.goto(f"{self.base}#{place}" if self.base.startswith("file:") else f"{self.base}/#{place}")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith(self.base) for url in self.requested)
