"""The console in a browser, on `coppice up` with two tenants: pages show what the stack does, and say what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coppice_cli.tenants.operations import add_tenant
from tests.e2e.console.browsing import NARROW, PAGES, WIDE, Console, ask, console
from tests.e2e.up.test_up import Up, started
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide
NUM_BLOCKS = 64  # few: what streams compute soon takes the place of what was cached
SYSTEM = "You answer questions about Python for people who begin to program, in short sentences with an example. "


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    limits = {"concurrency": 64, "weight": 2, "requests_per_minute": 6000, "tokens_per_month": 1_000_000}
    fields: dict[str, dict[str, Any]] = {"acme": limits, "nova": {}}
    found = {name: add_tenant(file, name, {"guarantee_share": 0.4, **of}, "main") for name, of in fields.items()}
    return {**found, "file": str(file)}


@pytest.fixture(scope="module")
def up(keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    options = ("--num-blocks", str(NUM_BLOCKS), "--tenants", keys["file"], "--request-log", str(folder / "requests"))
    with started(folder, *options) as running:
        for name in ("acme", "nova"):
            ask(running, keys[name], SYSTEM + "What is a number?")
        yield running


@pytest.fixture
def shown(browser: Any, up: Up) -> Iterator[Console]:
    with console(browser, up) as opened:
        yield opened


# ---- playground


def test_of_two_tenants_the_one_that_has_sent_it_hits_and_the_other_misses(
    shown: Console, keys: dict[str, str]
) -> None:
    shown.open("playground")
    for side, name in (("A", "acme"), ("B", "nova")):
        shown.page.fill(f"[data-side={side}] input[type=password]", keys[name])
    assert "Two keys" in shown.text(".ask p")
    shown.page.click("button.main")
    assert (shown.verdict("A"), shown.verdict("B")) == ("hit", "miss")
    cached = {side: shown.page.locator(f"[data-side={side}] .tokens .cached").count() for side in "AB"}
    computed = {side: shown.page.locator(f"[data-side={side}] .tokens .computed").count() for side in "AB"}
    assert cached["A"] > 0
    assert cached["B"] < 16, "no more than the beginning of all chats"
    assert cached["A"] + computed["A"] == cached["B"] + computed["B"], "both sent the same tokens"
    prompt = shown.page.text_content("[data-side=A] .tokens")
    assert "What does sorted do?" in prompt
    assert prompt == shown.page.text_content("[data-side=B] .tokens")
    assert shown.text("[data-side=A] .answer") == shown.text("[data-side=B] .answer") != ""
    facts = shown.text("[data-side=A] .facts")
    assert f"{cached['A']} of {cached['A'] + computed['A']} prompt tokens" in facts
    assert shown.page.locator("[data-side=A] .costs rect").count() > 1


def test_an_answer_leads_to_its_waterfall(shown: Console, keys: dict[str, str]) -> None:
    shown.open("playground")
    shown.page.fill("[data-side=A] input[type=password]", keys["acme"])
    shown.page.fill("[data-side=B] input[type=text]", "other")
    assert "the same tenant twice" in shown.text(".ask p")
    shown.page.click("button.main")
    assert (shown.verdict("A"), shown.verdict("B")) == ("hit", "miss")
    shown.page.click("[data-side=A] .costs a")
    shown.see(".waterfall .stage[data-kind=decode]")
    assert "acme" in shown.text("dl.facts")


def test_keys_are_kept_nowhere(shown: Console, keys: dict[str, str]) -> None:
    shown.open("playground")
    shown.page.fill("[data-side=A] input[type=password]", keys["acme"])
    shown.page.click("button.main")
    shown.verdict("A")
    kept = shown.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert keys["acme"] not in kept
    assert "sorted" not in kept
    shown.page.reload()
    assert shown.page.input_value("[data-side=A] input[type=password]") == ""


def test_without_a_key_the_playground_says_what_to_do(browser: Any, up: Up) -> None:
    with console(browser, up, may_fail=True) as shown:  # the browser itself notes the 401
        shown.open("playground")
        assert "coppice tenants add" in shown.text(".ask p")
        shown.page.click("button.main")
        assert "coppice tenants add" in shown.text(".notice.error")


# ---- blocks


def test_the_map_changes_while_streams_run(shown: Console, up: Up, keys: dict[str, str]) -> None:
    shown.open("blocks")
    shown.see("canvas")
    before = shown.picture()
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(ask, up, keys[name], f"{SYSTEM}Question {number}: {name}", max_tokens=120)
            for number in range(12)
            for name in ("acme", "nova")
        ]
        for kind in ("granted", "cached", "evicted"):
            shown.see(f".log li[data-kind={kind}]")
        assert shown.picture() != before
        for one in running:
            one.result()
    assert "tenant/acme" in shown.text(".log")
    assert f"{NUM_BLOCKS} blocks of 16 tokens" in shown.text(".map")
    assert "planned for by session" in shown.text(".map")
    bars = shown.text(".bars")
    assert "of 25 guaranteed" in bars
    assert "tenant/nova" in bars
    assert shown.page.locator(".bars b.guarantee").count() == 2


def test_a_block_is_told_with_the_keyboard_and_in_either_order(shown: Console, up: Up, keys: dict[str, str]) -> None:
    ask(up, keys["acme"], SYSTEM + "What is a list?")
    shown.open("blocks")
    shown.see(".bars .domain")
    shown.page.focus("canvas")
    shown.page.keyboard.press("ArrowRight")
    assert shown.text(".place").startswith("Block 0: ")
    shown.page.keyboard.press("ArrowRight")
    assert shown.text(".place").startswith("Block 1: ")
    by_place = shown.picture()
    shown.page.select_option("select[aria-label=Order]", "domain")
    assert shown.picture() != by_place
    shown.page.keyboard.press("Home")


# ---- requests, and who waits


def test_a_waterfall_opens_by_id(shown: Console, up: Up, keys: dict[str, str]) -> None:
    ask(up, keys["nova"], SYSTEM + "What is a tuple?", "looked-for-7")
    shown.open("requests")
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("looked-for-7")
    shown.see("tbody tr:only-child")
    shown.page.keyboard.press("Enter")
    shown.see("h1:text-is('looked-for-7')")
    for kind in ("prefill", "decode"):
        shown.see(f".waterfall .stage[data-kind={kind}]")
    assert "generated for" in shown.text(".why")
    assert "nova" in shown.text("dl.facts")
    assert "sorted" not in shown.page.content()


def test_requests_are_filtered(shown: Console, up: Up, keys: dict[str, str]) -> None:
    for name in ("acme", "nova"):
        ask(up, keys[name], SYSTEM + "What is a set?", f"of-{name}")
    shown.open("requests")
    shown.see("text=of-nova")
    shown.page.select_option("select[aria-label=Tenant]", "acme")
    shown.see("text=of-acme")
    assert shown.page.locator("text=of-nova").count() == 0


def test_a_request_that_is_not_there_and_a_port_that_does_not_answer(browser: Any, up: Up) -> None:
    with console(browser, up, may_fail=True) as shown:
        shown.open("requests", "nobody-sent-this")
        assert "No such request is kept." in shown.text(".notice.empty")
        port = up.find(r"requests +http://127.0.0.1:(\d+)")
        shown.page.route(f"**:{port}/**", lambda route: route.abort())
        for name in ("requests", "waits", "tenants"):
            shown.open(name)
            said = shown.text(".notice.error")
            assert f"does not answer at http://127.0.0.1:{port}" in said
            assert "--metrics-port" in said
            assert "--console-origins" in said


def open_tenants(shown: Console) -> None:
    shown.open("tenants")
    shown.see("text=waits most for")
    wait_for(lambda: shown.page.locator("tbody").count() == 3, "memory, limits and requests are drawn")


def test_tenants_and_their_waits(shown: Console, up: Up, keys: dict[str, str]) -> None:
    for name in ("acme", "nova"):
        ask(up, keys[name], SYSTEM + "What is a range?")
    open_tenants(shown)
    shown.see("[data-tenant=acme]")
    memory, _, requests = shown.page.locator("tbody").all_inner_texts()
    assert "tenant/acme" in memory
    assert "tenant/nova" in memory
    assert "acme" in requests
    assert "nova" in requests

    def of_idle_tenants() -> list[list[str]]:
        limits = shown.page.locator("tbody").nth(1).inner_text()
        rows = sorted(row.split("\t") for row in limits.splitlines())
        return rows if all(row[1:3] == ["0", "0"] for row in rows) else []

    acme, nova = wait_for(of_idle_tenants, "nobody runs or waits")
    assert acme[:6] == ["acme", "0", "0", "64", "256", "2"]
    assert [re.sub(r"^[\d,]+ of ", "", limit) for limit in acme[6:]] == ["6,000", "–", "1,000,000"]
    assert all(limit.startswith(tuple("123456789")) for limit in (acme[6], acme[8])), "left, and used"
    assert nova == ["nova", "0", "0", "256", "256", "1", "–", "–", "–"]


def record(number: int, tenant: str, *stages: list[object], cause: str = "decode") -> dict[str, object]:
    """As the scheduler tells an answered call."""
    numbers = {"status": 200, "end": "stop", "tokens_in": 20, "tokens_out": 8, "queue_ms": 40, "ttft_ms": 90}
    call = {"id": f"request-{number}", "call": f"chatcmpl-{number}", "at": "2026-01-01T00:00:00.000Z"}
    return {**numbers, **call, "tenant": tenant, "cause": cause, "stages": stages}


WORK = (["front_door", 0, 2], ["acquire", 2, 4], ["prefill", 4, 90], ["decode", 90, 300], ["front_door", 300, 301])


def test_who_only_worked_waited_for_nobody(shown: Console) -> None:
    shown.answers("/requests", {"requests": [record(1, "acme", *WORK), record(2, "nova", *WORK, cause="front_door")]})
    shown.open("waits")
    assert "Nobody has waited." in shown.text(".notice.empty")
    assert "newest 2 requests" in shown.text(".notice.empty")
    open_tenants(shown)
    assert all("nothing" in row for row in shown.page.locator("tbody").last.inner_text().splitlines())


def test_what_was_refused_has_not_failed(shown: Console) -> None:
    statuses = (200, 200, 400, 422, 429, 499, 500, 503, 504)
    requests = [{**record(number, "acme", *WORK), "status": status} for number, status in enumerate(statuses)]
    shown.answers("/requests", {"requests": requests})
    open_tenants(shown)
    assert shown.page.locator("tbody").last.inner_text().split("\t")[:5] == ["acme", "9", "3", "1", "3"]


def test_a_tenant_that_waits_and_one_that_is_waited_for_have_one_name(shown: Console) -> None:
    full, slot = ["pool_full", 0, 500, "tenant/acme", 40], ["no_slot", 500, 600, "acme", 3]
    slow, own = ["slow_step", 600, 650, "worker-0", 90], ["queued", 0, 30, "", 2]
    requests = [record(1, "nova", full, slot, slow, cause="pool_full"), record(2, "acme", own, *WORK)]
    shown.answers("/requests", {"requests": requests})
    shown.open("waits")
    shown.see(".graph text")
    rows = [row.split("\t")[:3] for row in shown.page.locator("tbody tr").all_inner_texts()]
    assert rows == [
        ["nova", "no block was free", "acme"],
        ["nova", "no running slot was free", "acme"],
        ["nova", "a slow step", "worker-0"],
        ["acme", "in the queue", "acme"],
    ]
    names = shown.page.locator(".graph text").all_text_contents()
    assert names == ["nova", "acme", "acme", "worker-0"]


def test_waits_of_a_stack_are_drawn(shown: Console, up: Up, keys: dict[str, str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, up, keys["acme"], f"{number}: {SYSTEM}", max_tokens=60) for number in range(24)]
        for one in running:
            one.result()
    shown.open("waits")
    shown.see(".graph text")
    assert "front door" not in shown.text("tbody")


# ---- tree


def test_a_node_and_a_prompt_are_explained(shown: Console, up: Up, keys: dict[str, str]) -> None:
    text = SYSTEM + "What is a dictionary, and when do I use it? Say it in one sentence."
    ask(up, keys["acme"], text)
    shown.open("tree", "tenant%2Facme")
    shown.see(".icicle .node")
    shown.page.locator(".icicle .node").first.click()
    assert "blocks of the prompt" in shown.text("section.chosen")
    assert re.search("evicted after all|It is a leaf|cannot be evicted", shown.text("section.chosen"))
    unsalted = shown.page.locator(".trees section:not(:has(h2:has-text('salt')))")
    unsalted.locator(".icicle .node:not(.pinned)").last.click()
    assert re.search("Only its own domain can evict it|Others may evict up to", shown.text("section.chosen"))
    shown.page.fill("textarea", text)
    shown.page.fill("input[type=password]", keys["acme"])
    shown.page.click("text=Explain >> nth=-1")
    assert "tokens are cached" in shown.text("form [role=status] p")
    assert shown.page.locator(".icicle .node.marked").count() > 0


# ---- the frame


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_every_page_fits_in_either_theme(
    browser: Any, up: Up, size: tuple[int, int], theme: str, tmp_path: Path
) -> None:
    """Pictures stay where COPPICE_SCREENSHOTS names a folder."""
    folder = Path(os.environ.get("COPPICE_SCREENSHOTS", tmp_path))
    with console(browser, up, size, theme) as shown:
        for name in PAGES:
            shown.open(name)
            shown.page.wait_for_load_state("networkidle") if name == "playground" else shown.see(".card")
            shown.page.wait_for_timeout(500)
            shown.page.screenshot(path=folder / f"{name}-{size[0]}-{theme}.png")
            assert shown.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name
        red, *_ = shown.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red < 128) == (theme == "dark")


def test_keys_of_the_keyboard_open_pages_and_change_the_theme(shown: Console) -> None:
    shown.open("playground")
    for place, name in enumerate(PAGES, 1):
        shown.page.keyboard.press(str(place))
        shown.see(f"nav a[aria-current=page][href='#/{name}']")
    background = "getComputedStyle(document.body).backgroundColor"
    before = shown.page.evaluate(background)
    shown.page.keyboard.press("t")
    shown.page.keyboard.press("t")
    assert shown.page.evaluate(background) != before
    shown.page.reload()
    assert shown.page.evaluate(background) != before, "the theme is remembered"
    reached = set()
    for _ in range(12):
        shown.page.keyboard.press("Tab")
        reached.add(shown.page.evaluate("document.activeElement.getAttribute('href') ?? document.activeElement.id"))
    assert reached >= {*(f"#/{name}" for name in PAGES), "theme"}


# ---- without tenants


def test_without_a_tenants_file_salts_keep_the_sides_apart(browser: Any, tmp_path: Path) -> None:
    """And before anything was sent, pages say what to do."""
    with started(tmp_path, "--num-blocks", str(NUM_BLOCKS)) as running, console(browser, running) as shown:
        for name, words in (
            ("tree", "cached"),
            ("waits", "Nobody has waited."),
            ("requests", "No request has ended yet."),
        ):
            shown.open(name)
            assert words in shown.text(".notice.empty")
            assert "playground" in shown.text(".notice.empty")
        shown.open("playground")
        assert "no tenants file" in shown.text(".ask p")
        shown.page.click("button.main")
        assert (shown.verdict("A"), shown.verdict("B")) == ("hit", "miss")
        shown.page.fill("[data-side=B] input[type=text]", "tenant-a")
        shown.page.click("button.main:enabled")
        shown.see("[data-side=B][data-verdict=hit]")
