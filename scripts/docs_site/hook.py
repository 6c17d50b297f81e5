"""MkDocs' hook: documents from all over the repository become pages, and links between them hold on the site.

On a forge a link names a file of the repository. On the site:

    docs/X.md                  ->  X.html                  a page
    SECURITY.md, */README.md   ->  the same path .html     a page, too (PAGES_OUTSIDE)
    a folder with a README     ->  the README's page
    any other file             ->  the file at `repo_url`, or its text alone where there is no address
    what is not there          ->  left as it is: MkDocs names it, and --strict fails
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
PAGES_OUTSIDE = (
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("benchmarks/README.md", "models/README.md", "shared/README.md", "tests/README.md", "tools/README.md"),
    *("services/cache/README.md", "services/cache/coppice_cache/core/README.md"),
    *("services/scheduler/README.md", "services/scheduler/coppice_scheduler/core/README.md"),
    *("services/scheduler/coppice_scheduler/edge/README.md", "services/gpu-worker/README.md"),
)

_SEARCHED_LAST = ("decisions/", "CHANGELOG.md", "DESIGN.md")  # who searches wants to know how, and then why

_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^()\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def page_of(path: str, root: Path) -> str | None:
    """Where a file of the repository is in MkDocs' own tree of sources; None where the site does not have it."""
    if (root / path).is_dir():
        path = posixpath.normpath(f"{path}/README.md")
    if path in PAGES_OUTSIDE:
        return path
    is_there = path.startswith(f"{DOCS}/") and (root / path).is_file()
    return path.removeprefix(f"{DOCS}/") if is_there else None


def source_of(page: str) -> str:
    """The reverse: the file of the repository that a page is made of."""
    return page if page in PAGES_OUTSIDE else f"{DOCS}/{page}"


def with_links_of_the_site(markdown: str, page: str, repository: str | None, root: Path = ROOT) -> str:
    """The text of `page` with each link to a file led to where that file is for a reader of the site."""
    source_folder = posixpath.dirname(source_of(page))

    def led(link: re.Match[str]) -> str:
        path, hash_mark, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:|/", path):
            return link[0]
        file = posixpath.normpath(posixpath.join(source_folder, path))
        if file.startswith("..") or not (root / file).exists():
            return link[0]
        there = page_of(file, root)
        if there is not None:
            return f"{link['mark']}[{link['text']}]({_from(page, there)}{hash_mark}{anchor})"
        return f"[{link['text']}]({repository.rstrip('/')}/blob/HEAD/{file})" if repository else str(link["text"])

    return _outside_of_code(markdown, lambda text: _LINK.sub(led, text))


def with_lists_set_apart(markdown: str) -> str:
    """A list right behind a paragraph is one on a forge; MkDocs wants an empty line between them."""
    lines: list[str] = []
    is_code = is_item = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        begins = bool(_ITEM.match(line))
        if begins and not is_item and not is_code and lines and lines[-1].strip():
            lines.append("")
        is_item = begins or (is_item and line.startswith(" "))
        lines.append(line)
    return "\n".join(lines) + "\n"


def with_pipes_of_the_site(markdown: str) -> str:
    """In a table a forge wants a pipe within code escaped, and takes the escape away; MkDocs does neither."""
    return _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def _from(page: str, other: str) -> str:
    return posixpath.relpath(other, posixpath.dirname(page) or ".")


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """What stands in a block of code stays as it is."""
    return "".join(part if part.startswith("```") else change(part) for part in _FENCED.split(markdown))


# ---- what MkDocs calls ----


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # of the site's own environment

    for path in PAGES_OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    del files
    if page.file.src_uri.startswith(_SEARCHED_LAST):
        page.meta.setdefault("search", {"boost": 0.4})
    changed = with_links_of_the_site(markdown, page.file.src_uri, config.repo_url or None)
    return with_lists_set_apart(with_pipes_of_the_site(changed))
