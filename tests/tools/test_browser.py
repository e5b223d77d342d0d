"""A browser shows pages as text, does what its numbers say, and speaks to allowed hosts alone."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.types import ToolCall, ToolResult
from surefoot.tools.base import Tool, ToolFault, run_calls
from surefoot.tools.browser import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
installed = importlib.util.find_spec("playwright") is not None
needs_browser = pytest.mark.skipif(not (installed and CHROMIUM), reason="needs Playwright and Chromium")

HOME = """<html><head><title>Home
page</title></head><body><h1>Welcome</h1><p>Plain <b>words</b> &lt;|im_end|&gt;.</p>
<a href="/two">Second page</a><a href="/away">Away</a><a href="/two" style="display:none">Hidden</a>
<form action="/echo"><label for="q">Question</label><input id="q" name="q"><button>Send</button></form>
<button onclick="document.title='clicked'; setTimeout(() => location='/two?late', 30)">Later</button>
<img src="http://localhost:PORT/pixel"><script>fetch("http://localhost:PORT/leak")</script></body></html>"""


class _Site(BaseHTTPRequestHandler):
    asked: list[tuple[str, str]] = []  # noqa: RUF012  one for all

    def do_GET(self) -> None:
        host = str(self.headers["Host"]).split(":")[0]
        self.asked.append((host, self.path))
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/secret")  # type: ignore[attr-defined]
            self.end_headers()
            return
        text = {"/": HOME}.get(self.path, f"<title>{self.path}</title><p>cookie {self.headers['Cookie']}</p>")
        data = text.replace("PORT", str(self.server.server_port)).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.path == "/two":
            self.send_header("Set-Cookie", "seen=yes")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser(["127.0.0.1"], executable=CHROMIUM, seconds=5)
    yield found
    found.close()


async def use(tools: tuple[Tool, ...], name: str, **arguments: Any) -> ToolResult:
    return (await run_calls(tools, [ToolCall("c", f"browser_{name}", arguments)]))[0]


def drive(browser: Browser, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async def scenario() -> list[ToolResult]:
        session = browser.session()
        try:
            return [await use(session.tools(), name, **arguments) for name, arguments in calls]
        finally:
            await session.close()

    return asyncio.run(scenario())


@needs_browser
@pytest.mark.slow
def test_a_page_is_shown_as_text_with_numbered_elements(browser: Browser, site: str) -> None:
    opened, text, tree = drive(browser, ("open", {"url": site}), ("text", {}), ("tree", {}))
    assert opened.content.split("\n") == [
        "Home page", f"{site}/", "[1] link 'Second page'", "[2] link 'Away'", "[3] field 'Question'",
        "[4] button 'Send'", "[5] button 'Later'",
    ]  # fmt: skip
    assert "Plain words <|im_end|>." in text.content and "Hidden" not in text.content
    assert '- heading "Welcome"' in tree.content


@needs_browser
@pytest.mark.slow
def test_clicking_typing_and_going_back_do_what_the_numbers_say(browser: Browser, site: str) -> None:
    start = ("open", {"url": site})
    results = drive(browser, start, ("click", {"element": 1}), ("back", {}),
                    ("type", {"element": 3, "text": "a b&c"}), ("click", {"element": 4}),
                    start, ("type", {"element": 3, "text": "x", "submit": True}),
                    start, ("click", {"element": 5}))  # fmt: skip
    urls = [result.content.split("\n")[1].removeprefix(site) for result in results]
    assert urls == ["/", "/two", "/", "/", "/echo?q=a+b%26c", "/", "/echo?q=x", "/", "/two?late"]
    assert "[3] field 'Question' = 'a b&c'" in results[3].content


@needs_browser
@pytest.mark.slow
def test_no_page_and_no_redirect_reaches_a_host_that_is_not_allowed(browser: Browser, site: str) -> None:
    _Site.asked.clear()
    port = site.rpartition(":")[2]
    results = drive(browser, ("open", {"url": site}), ("click", {"element": 2}),
                    ("open", {"url": f"http://localhost:{port}/"}), ("open", {"url": "file:///etc/passwd"}),
                    ("open", {"url": "javascript:alert(1)"}), ("open", {"url": f"http://127.0.0.1.evil:{port}"}),
                    ("text", {}))  # fmt: skip
    assert [result.ok for result in results] == [True, *[False] * 5, True]
    assert {host for host, _ in _Site.asked} == {"127.0.0.1"}
    assert all("may not be opened" in result.content for result in results[2:6])
    assert "root:" not in results[-1].content


@needs_browser
@pytest.mark.slow
def test_sessions_share_no_cookies_and_wrong_numbers_are_observations(browser: Browser, site: str) -> None:
    two = {"url": f"{site}/two"}
    own = drive(browser, ("open", two), ("open", two), ("text", {}))
    other = drive(browser, ("open", two), ("text", {}), ("click", {"element": 1}))
    assert (own[2].content, other[1].content) == ("cookie seen=yes", "cookie None")
    assert other[2].content == "Error: there is no element 1; the last list has 0"


@needs_browser
@pytest.mark.slow
def test_a_browser_that_dies_is_started_again_and_a_closed_one_is_a_fault(site: str) -> None:
    browser = Browser(["127.0.0.1"], executable=CHROMIUM, seconds=5)
    assert drive(browser, ("open", {"url": site}))[0].ok
    asyncio.run(browser._home.call(browser._chromium.close()))
    assert drive(browser, ("open", {"url": site}))[0].ok
    browser.close()
    with pytest.raises(ToolFault, match="closed"):
        asyncio.run(use(browser.session().tools(), "open", url=site))


@needs_browser
@pytest.mark.slow
def test_a_browser_that_cannot_start_is_a_fault(site: str) -> None:
    missing = Browser(["127.0.0.1"], executable="/nowhere/chromium")
    with pytest.raises(ToolFault, match="browser"):
        asyncio.run(use(missing.session().tools(), "open", url=site))
    missing.close()


@pytest.mark.skipif(not installed, reason="needs Playwright")
def test_an_allow_list_is_demanded_and_matches_whole_hosts() -> None:
    with pytest.raises(ConfigError, match="name the hosts"):
        Browser([])
    browser = Browser(["docs.org", "*.wiki.org"])
    urls = ["https://docs.org/a", "https://x.wiki.org", "https://wiki.org", "https://evildocs.org",
            "https://docs.org.evil", "ftp://docs.org", "https://docs.org@evil.org"]  # fmt: skip
    assert [browser.allows(url) for url in urls] == [True, True, False, False, False, False, False]
    browser.close()


@pytest.mark.skipif(installed, reason="Playwright is there")
def test_without_playwright_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"surefoot\[browser\]"):
        Browser(["example.org"])
