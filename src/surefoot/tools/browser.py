"""A web browser as tools: Chromium through Playwright, one for all episodes, a fresh profile for each.

What a page says is untrusted text. Must not know what the pages are for.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from surefoot.core.errors import ConfigError
from surefoot.tools.base import Tool, ToolError, ToolFault, tool, tools_of
from surefoot.tools.resident import Resident

T = TypeVar("T")
_STARTING_SECONDS = 30.0
_CLOSING_SECONDS = 10.0
_SETTLING_SECONDS = 0.1  # a click leads away a moment after it was made
_MOST_ELEMENTS = 60
_MOST_NAME = 80
# What can be clicked or typed into, in the order of the page.
_INTERACTIVE = (
    "a[href], button, input:not([type=hidden]), select, textarea, [contenteditable=true], "
    "[role=button], [role=link], [role=checkbox], [role=tab], [role=menuitem], [role=option]"
)
_DESCRIBE = """element => {
  const tag = element.tagName.toLowerCase();
  const kind = element.getAttribute("role") || {a: "link", select: "list", textarea: "field"}[tag]
    || (tag !== "input" ? tag
      : {checkbox: "checkbox", radio: "radio", submit: "button", button: "button"}[element.type] || "field");
  const label = element.labels && element.labels.length ? element.labels[0].innerText : "";
  const name = element.getAttribute("aria-label") || label || element.innerText || element.placeholder
    || element.getAttribute("title") || element.name || "";
  const state = element.type === "checkbox" || element.type === "radio" ? (element.checked ? "on" : "off")
    : tag === "input" || tag === "textarea" ? element.value : "";
  return [kind, tag === "input" && kind === "button" ? element.value || name : name, state];
}"""


class Browser:
    """One Chromium for all episodes, started by the first. Close it at the end.

    ``hosts`` are the only hosts that pages may speak to (``"*"``: all, ``"*.example.org"``: a domain's); the
    browser itself cannot resolve any other. ``executable``: a Chromium of your own. ``seconds``: the
    deadline of one action. ``limit``: most characters of a result. ``sandboxed``: Chromium's own sandbox;
    by default wherever it can be had, which is not for root. Raises ConfigError without Playwright.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        executable: str | None = None,
        seconds: float = 10.0,
        limit: int = 6000,
        sandboxed: bool | None = None,
    ) -> None:
        try:
            self._playwright: Any = importlib.import_module("playwright.async_api")
        except ImportError as error:
            raise ConfigError('a browser needs Playwright: pip install "surefoot[browser]"') from error
        if not hosts or isinstance(hosts, str):
            raise ConfigError(f"Browser.hosts is {hosts!r}; name the hosts that pages may speak to")
        for name, value in (("seconds", seconds), ("limit", limit)):
            if not value > 0:
                raise ConfigError(f"Browser: {name} is {value}; it must be > 0")
        self.hosts, self.executable, self.seconds, self.limit = tuple(hosts), executable, seconds, limit
        self.sandboxed = os.geteuid() != 0 if sandboxed is None else sandboxed
        self._home = Resident("the browser")
        self._starting = asyncio.Lock()
        self._driver: Any = None
        self._chromium: Any = None

    def session(self) -> BrowserSession:
        """A browser for one episode, with cookies and history of its own."""
        return BrowserSession(self)

    def close(self) -> None:
        """End Chromium with all sessions. Closing twice is no error."""
        self._home.stop(self._end(), _CLOSING_SECONDS)

    def allows(self, url: str) -> bool:
        """Whether a page may be at ``url``: http or https, and an allowed host."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        return parts.scheme in ("http", "https") and any(_matches(host, item.lower()) for item in self.hosts)

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` where the browser lives; what goes wrong there becomes a ToolError or ToolFault."""
        return await self._home.call(self._translated(work))

    async def page_of(self, context: Any) -> tuple[Any, Any]:
        """(context, page) of a session, a new context when there is none. Runs where the browser lives."""
        chromium = await self._started()
        if context is None:
            context = await chromium.new_context(
                accept_downloads=False,
                locale="en-US",
                timezone_id="UTC",
                viewport={"width": 1280, "height": 800},
                service_workers="block",
            )
            context.set_default_timeout(self.seconds * 1000)
            await context.route("**/*", self._filter)
        pages = context.pages
        return context, pages[-1] if pages else await context.new_page()

    async def _started(self) -> Any:
        async with self._starting:
            if self._chromium is None or not self._chromium.is_connected():
                await self._end()
                async with asyncio.timeout(_STARTING_SECONDS):
                    self._driver = await self._playwright.async_playwright().start()
                    self._chromium = await self._driver.chromium.launch(
                        executable_path=self.executable,
                        args=self._arguments(),
                        chromium_sandbox=self.sandboxed,
                    )
            return self._chromium

    def _arguments(self) -> list[str]:
        """The allow-list below all pages: it also holds for redirects and sockets, which no filter sees."""
        if "*" in self.hosts:
            return []
        return ["--host-resolver-rules=MAP * ~NOTFOUND" + "".join(f", EXCLUDE {host}" for host in self.hosts)]

    async def _filter(self, route: Any) -> None:
        url = str(route.request.url)
        if self.allows(url) or url.startswith(("data:", "blob:")):
            await route.continue_()
        else:
            await route.abort("blockedbyclient")

    async def _end(self) -> None:
        chromium, driver, self._chromium, self._driver = self._chromium, self._driver, None, None
        if chromium is not None and chromium.is_connected():
            await chromium.close()
        if driver is not None:
            await driver.stop()

    async def _translated(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self.seconds + _STARTING_SECONDS):
                return await work()
        except self._playwright.TimeoutError as error:
            raise ToolError(f"the page did not answer within {self.seconds:g} s") from error
        except self._playwright.Error as error:
            said = str(error).split("\n")[0][:200]
            if self._chromium is None or not self._chromium.is_connected():
                raise ToolFault(f"the browser is gone: {said}") from error
            raise ToolError(said) from error
        except (TimeoutError, OSError) as error:
            raise ToolFault(f"the browser cannot be started: {type(error).__name__}: {error}") from error


def _matches(host: str, pattern: str) -> bool:
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


class BrowserSession:
    """The browser of one episode: open a page, click, type, read. Close it with the episode.

    Each action shows the page's title, address and numbered elements; a number is good until the next action.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context: Any = None
        self._elements: list[Any] = []

    def tools(self) -> tuple[Tool, ...]:
        """The session's tools."""
        seconds = self._browser.seconds + _STARTING_SECONDS
        return tuple(replace(item, seconds=seconds, limit=self._browser.limit) for item in tools_of(self))

    async def close(self) -> None:
        """Forget the session's pages and cookies."""
        context, self._context, self._elements = self._context, None, []
        if context is not None:
            await self._browser.call(context.close)

    @tool
    async def browser_open(self, url: str) -> str:
        """Open a page by its address and list what can be clicked or typed into."""
        if not self._browser.allows(url):
            raise ToolError(f"{url[:200]} may not be opened; allowed: {', '.join(self._browser.hosts)}")
        return await self._browser.call(lambda: self._open(url))

    @tool
    async def browser_click(self, element: int) -> str:
        """Click an element by its number in the last list."""
        return await self._browser.call(lambda: self._act(element, "click"))

    @tool
    async def browser_type(self, element: int, text: str, submit: bool = False) -> str:
        """Type a text into an element by its number, replacing what is there; then press Enter if asked."""
        return await self._browser.call(lambda: self._act(element, "type", text, submit))

    @tool
    async def browser_back(self) -> str:
        """Go back to the page before."""
        return await self._browser.call(self._back)

    @tool
    async def browser_text(self) -> str:
        """Read the text of the page."""
        return await self._browser.call(self._text)

    @tool
    async def browser_tree(self) -> str:
        """Read the page as a tree of roles and names, as a screen reader sees it."""
        return await self._browser.call(self._tree)

    # ---- where the browser lives

    async def _page(self) -> Any:
        self._context, page = await self._browser.page_of(self._context)
        return page

    async def _open(self, url: str) -> str:
        page = await self._page()
        await page.goto(url, wait_until="load")
        return await self._view()

    async def _back(self) -> str:
        page = await self._page()
        await page.go_back(wait_until="load")
        return await self._view()

    async def _act(self, element: int, action: str, text: str = "", submit: bool = False) -> str:
        if not 1 <= element <= len(self._elements):
            raise ToolError(f"there is no element {element}; the last list has {len(self._elements)}")
        found = self._elements[element - 1]
        if action == "click":
            await found.click()
        else:
            await found.fill(text)
            if submit:
                await found.press("Enter")
        return await self._view()

    async def _view(self) -> str:
        """Title, address and elements of the page that is in front now."""
        await asyncio.sleep(_SETTLING_SECONDS)
        page = await self._page()
        await page.wait_for_load_state("load")
        if page.url != "about:blank" and not self._browser.allows(page.url):
            address = page.url
            await page.goto("about:blank")
            raise ToolError(f"the page led to {address[:200]}, which may not be opened")
        self._elements = []
        lines = [f"{_line(await page.title()) or '(no title)'}", str(page.url)]
        for handle in await page.query_selector_all(_INTERACTIVE):
            if len(self._elements) == _MOST_ELEMENTS:
                lines.append(f"(more than {_MOST_ELEMENTS} elements; the rest is left out)")
                break
            if await handle.is_visible():
                self._elements.append(handle)
                kind, name, state = (_line(part) for part in await handle.evaluate(_DESCRIBE))
                lines.append(f"[{len(self._elements)}] {kind} {name!r}" + (f" = {state!r}" if state else ""))
        return "\n".join(lines)

    async def _text(self) -> str:
        page = await self._page()
        lines = str(await page.inner_text("body")).splitlines()
        return (
            "\n".join(line for line in (part.strip() for part in lines) if line) or "(the page has no text)"
        )

    async def _tree(self) -> str:
        page = await self._page()
        return str(await page.locator("body").aria_snapshot()) or "(the page is empty)"


def _line(text: object) -> str:
    return " ".join(str(text).split())[:_MOST_NAME]
