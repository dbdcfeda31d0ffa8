"""Who may use the page: whoever opens the address that ``rl-async view`` prints, which holds a token.

The address sets a cookie, so that the token is in no link and no history entry of the page. As on every server of a
run, a request needs a host name by which the server may be called, which stops DNS rebinding, and has no ``Origin``.
"""

from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from rl_async.process.http_auth import Access, App, Headers, Receive, Scope, Send

OPEN = "/open/"  # followed by the token
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class PageAccess(Access):
    """Lets a browser in that has the token in its cookie, or opens OPEN with it."""

    def __init__(self, token: str, port: int) -> None:
        super().__init__(token)
        self.token = token
        self.cookie = f"rl-async-view-{port}"  # cookies of all ports of a host are one set

    def refusal(self, method: str, path: str, address: str | None, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason with which to refuse a request; None if it may pass."""
        given = list(headers)
        offered = path.removeprefix(OPEN) if path.startswith(OPEN) else self._of_cookie(given)
        if offered:
            given.append((b"authorization", b"Bearer " + offered.encode()))
        refused = super().refusal(method, path, address, given)
        if refused is not None:
            return 403, refused[1] if refused[0] == 403 else "open the address that `rl-async view` printed"
        return None if method in ("GET", "HEAD") else (403, "this page changes nothing")

    def _of_cookie(self, headers: Headers) -> str:
        for name, value in headers:
            if name == b"cookie":
                try:
                    found = SimpleCookie(value.decode("latin-1")).get(self.cookie)
                except CookieError:
                    return ""
                if found is not None:
                    return found.value
        return ""


class SecurityHeaders:
    """ASGI middleware that adds SECURITY_HEADERS to every answer."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)
