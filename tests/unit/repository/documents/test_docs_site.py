"""The site of the documentation: its menu has every page, links hold, and what it quotes is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from coppice_cache.edge.settings import CacheSettings
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_up.options import UpOptions
from coppice_worker.edge.settings import WorkerSettings
from scripts.docs_site import hook

ROOT = Path(__file__).resolve().parents[4]
DOCS = ROOT / "docs"
CODE = ("services", "shared/coppice", "tools")
RESULTS = ROOT / "benchmarks" / "results"
MESSAGE_CHARS_MIN = 12


class _Loader(yaml.SafeLoader):
    """Tags of MkDocs (`!ENV`, `!!python/...`) stand for their values."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    return loaded


def pages_in(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_in(entry)


def test_the_menu_has_each_page_once_or_says_why_not() -> None:
    site = settings()
    listed = list(pages_in(site["nav"]))
    left_out = str(site["not_in_nav"]).split()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(hook.PAGES_OUTSIDE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {page for page in pages if not any(fnmatch(f"/{page}", pattern) for pattern in left_out)}
    decisions = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    unlisted = [page for page in pages - set(listed) if Path(page).name not in decisions]
    assert not unlisted, "neither in the menu nor in the list of decisions"


def test_the_build_is_strict_and_continuous_integration_runs_it() -> None:
    """With --quiet MkDocs counts no warnings, and --strict finds nothing."""
    build = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "$(MKDOCS) build" in line]
    assert build == ["\t$(MKDOCS) build --strict"]
    assert "\nmake docs\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_each_readme_of_the_repository_is_a_page() -> None:
    """Or a link to its folder would lead nowhere on the site."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("benchmarks", "models", "services", "shared", "tests", "tools")
        for path in (ROOT / folder).rglob("README.md")
    }
    assert found <= set(hook.PAGES_OUTSIDE)


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("OPERATING.md", "[x](API.md#tools)", "[x](API.md#tools)"),
        ("OPERATING.md", "[x](../SECURITY.md#internal-connections)", "[x](SECURITY.md#internal-connections)"),
        ("OPERATING.md", "[x](#tenants)", "[x](#tenants)"),
        ("OPERATING.md", "[x](https://example.com/a)", "[x](https://example.com/a)"),
        ("README.md", "[x](docs/API.md)", "[x](API.md)"),
        ("README.md", "[x](docs/decisions)", "[x](decisions/README.md)"),
        ("services/cache/README.md", "[x](../../docs/OPERATING.md)", "[x](../../OPERATING.md)"),
        ("decisions/0001-identity-of-blocks.md", "[x](../DESIGN.md#i5)", "[x](../DESIGN.md#i5)"),
        ("HOW_IT_WORKS.md", "![x](images/parts.svg)", "![x](images/parts.svg)"),
        ("ALERTS.md", "[rules `a`](../deploy/prometheus/alerts.yml)", "rules `a`"),
        ("ALERTS.md", "[x](../deploy/gone.yml)", "[x](../deploy/gone.yml)"),
        ("ALERTS.md", "[x](../../elsewhere.md)", "[x](../../elsewhere.md)"),
        ("ALERTS.md", "```\n[x](../SECURITY.md)\n```", "```\n[x](../SECURITY.md)\n```"),
    ],
)
def test_links_lead_to_where_the_site_has_it(page: str, link: str, there: str) -> None:
    assert hook.with_links_of_the_site(link, page, None) == there


def test_with_an_address_of_the_repository_files_are_links() -> None:
    link = hook.with_links_of_the_site("[x](../deploy/prometheus/alerts.yml)", "ALERTS.md", "https://h/o/n/")
    assert link == "[x](https://h/o/n/blob/HEAD/deploy/prometheus/alerts.yml)"


def test_no_document_links_to_what_is_not_there() -> None:
    """What the site's own check would find, without its tools."""
    broken = []
    for page in [*(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")), *hook.PAGES_OUTSIDE]:
        source = ROOT / hook.source_of(page)
        text = re.sub(r"^```.*?^```", "", source.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)", text):
            if not target.startswith(("http", "mailto:")) and not (source.parent / target).exists():
                broken.append(f"{page}: {target}")
    assert not broken


def test_a_list_behind_a_paragraph_is_set_apart() -> None:
    text = "Words:\n- one\n  more\n- two\nend\n```\nx\n- code\n```\n"
    assert hook.with_lists_set_apart(text) == "Words:\n\n- one\n  more\n- two\nend\n```\nx\n- code\n```\n"


def test_pipes_in_code_of_a_table_need_no_escape() -> None:
    text = "| `a\\|b` | c \\| d |\n`a\\|b`\n"
    assert hook.with_pipes_of_the_site(text) == "| `a|b` | c \\| d |\n`a\\|b`\n"


# ---- what pages quote ----


@cache
def texts_of_the_code() -> str:
    """All literal texts, parts of f-strings each for itself, and scripts as they are."""
    found: list[str] = []
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    found += [path.read_text(encoding="utf-8") for path in (ROOT / "services").rglob("*.js")]
    return re.sub(r"%(?:\.\d)?[a-z]", "\0", "\0".join(found))


def messages(document: str) -> Iterator[str]:
    """The literal parts of what the first cells of tables, and lines of lists, quote as said by the server."""
    for line in document.splitlines():
        if line.startswith(("| `", "| ``", "- `")):
            quote = re.match(r"(?:\||-) (?:``(?P<long>.+?)``|`(?P<short>[^`]+)`)", line)
            assert quote is not None, line
            yield from (part.strip() for part in (quote["long"] or quote["short"]).split("…"))


def unsaid(document: str) -> list[str]:
    parts = [part for part in messages(document) if len(part) >= MESSAGE_CHARS_MIN and " " in part]
    commands = ("coppice ", "curl ", "mode: ")
    return [part for part in parts if not part.startswith(commands) and part not in texts_of_the_code()]


def test_what_troubleshooting_quotes_is_what_the_code_says() -> None:
    document = (DOCS / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    assert len(list(messages(document))) > 50
    assert not unsaid(document)
    assert unsaid("| `port … was eaten by a bear` | x |\n| `the device hangs; the process ends` |") == [
        "was eaten by a bear"
    ]


def test_flags_that_migrating_names_exist() -> None:
    ours = {
        "--" + name.replace("_", "-")
        for model in (CacheSettings, ServiceSettings, WorkerSettings)
        for name in model.model_fields
    } | {"--" + name.replace("_", "-") for name in UpOptions.__dataclass_fields__}
    document = (DOCS / "MIGRATING.md").read_text(encoding="utf-8")
    table = document.split("## Flags")[1].split("## Routes")[0]
    cells = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    named = {flag for cell in cells for flag in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(named) > 25
    assert not {flag for flag in named if flag not in ours and flag.replace("--no-", "--") not in ours}


def test_metrics_that_pages_name_exist() -> None:
    reference = (DOCS / "METRICS.md").read_text(encoding="utf-8")
    for page in ("MIGRATING.md", "TROUBLESHOOTING.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        cells = re.sub(r"^\| [^|]*\| [^|]*\| (?=`vllm|the same|as vLLM)", "", text, flags=re.MULTILINE)
        named = set(re.findall(r"`((?:coppice_|vllm:)[a-z_]+)`", cells))
        assert named
        assert not {name for name in named if f"`{name}`" not in reference}, page


def test_results_that_benchmarks_name_exist() -> None:
    text = (DOCS / "BENCHMARKS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9-]+\.json)`", text))
    assert named <= {path.name for path in RESULTS.glob("*.json")}
    assert len(named) > 20
