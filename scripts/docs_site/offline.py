"""`python -m scripts.docs_site.offline FOLDER`: exit code 1 when a page of a built site loads something from elsewhere.

Links that a reader follows may lead anywhere. What a browser loads by itself comes from the folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_FOLLOWED = frozenset({"alternate", "author", "canonical", "edit", "help", "license", "next", "prev", "search"})
_LOADING = ("src", "srcset", "poster", "data")
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


class _Loads(HTMLParser):
    """Addresses that are loaded with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        addresses = [values[name] for name in _LOADING if name in values]
        if tag == "link" and not set(values.get("rel", "").lower().split()) <= _FOLLOWED:
            addresses.append(values.get("href", ""))
        self.found += [address for address in addresses if _ELSEWHERE.match(address.strip())]
        self.found += _CSS.findall(values.get("style", ""))


def loaded_from_elsewhere(text: str, suffix: str) -> list[str]:
    """Of one file of a site."""
    if suffix == ".css":
        return _CSS.findall(text)
    page = _Loads()
    page.feed(text)
    return page.found + _CSS.findall("".join(re.findall(r"<style.*?</style>", text, re.DOTALL)))


def findings(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for address in loaded_from_elsewhere(path.read_text(encoding="utf-8"), path.suffix):
                yield f"{path.relative_to(site)} loads {address}"


def main(arguments: list[str]) -> str | None:
    site = Path(arguments[0])
    if not (site / "index.html").is_file():
        return f"{site} holds no site"
    found = list(findings(site))
    return "\n".join(found) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
