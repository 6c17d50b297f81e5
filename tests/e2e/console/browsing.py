"""A real browser on a real stack: Debian's Chromium through Playwright, and the pages of the console in it."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.up.test_up import Up

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-background-networking"]
WAIT_MS = 60_000
WIDE, NARROW = (1280, 900), (390, 844)
PAGES = ("playground", "blocks", "requests", "tree", "tenants", "waits")


@contextmanager
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; Debian, Ubuntu: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Console:
    """The console of a stack in one tab. `errors` is what the browser complained of."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)

    def open(self, name: str, argument: str = "") -> None:
        self.page.goto(f"{self.url}#/{name}{'/' + argument if argument else ''}")
        self.page.wait_for_selector("#state.good")

    def text(self, selector: str) -> str:
        return str(self.page.wait_for_selector(selector).inner_text())

    def see(self, selector: str) -> Any:
        return self.page.wait_for_selector(selector)

    def verdict(self, side: str) -> str:
        self.see(f"[data-side={side}][data-verdict] .facts dt")
        return str(self.page.get_attribute(f"[data-side={side}]", "data-verdict"))

    def answers(self, path: str, body: object) -> None:
        """From now on whoever asks for this path on any port gets `body`."""
        headers = {"Access-Control-Allow-Origin": self.url.rstrip("/"), "Access-Control-Allow-Credentials": "true"}
        self.page.route(
            re.compile(rf"//[^/]+{re.escape(path)}(\?.*)?$"), lambda route: route.fulfill(json=body, headers=headers)
        )

    def picture(self) -> str:
        """What the map shows."""
        return str(self.page.evaluate("document.querySelector('canvas').toDataURL()"))


@contextmanager
def console(
    browser: Any, up: Up, size: tuple[int, int] = WIDE, theme: str = "light", *, may_fail: bool = False
) -> Iterator[Console]:
    """`may_fail`: the browser may complain, of an address that does not answer."""
    width, height = size
    options = {"viewport": {"width": width, "height": height}, "color_scheme": theme}
    with console_at(browser, up.find(r"console +(\S+)"), may_fail=may_fail, **options) as opened:
        yield opened


@contextmanager
def console_at(browser: Any, url: str, *, may_fail: bool = False, **options: Any) -> Iterator[Console]:
    """`options`: of the browser's context."""
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    opened = Console(context.new_page(), url)
    opened.page.on("console", lambda said: said.type in ("error", "warning") and opened.errors.append(said.text))
    opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
    yield opened
    context.close()
    assert may_fail or not opened.errors


def ask(up: Up, key: str, text: str, request_id: str = "", max_tokens: int = 8) -> dict[str, Any]:
    """A chat's whole answer."""
    body = {"model": "coppice-demo", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    headers |= {"X-Request-Id": request_id} if request_id else {}
    url = up.find(r"OpenAI API +(\S+)") + "/chat/completions"
    raw = json.dumps({**body, "ignore_eos": True, "temperature": 0}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, raw, headers), timeout=60) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found
