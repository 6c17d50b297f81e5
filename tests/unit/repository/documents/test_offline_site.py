"""What counts as loaded from elsewhere on a page of the site, and what is only a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs_site.offline import loaded_from_elsewhere, main


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<script src="//cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example" crossorigin>',
        '<img alt="" src="http://example.com/x.png">',
        '<p style="background: url(https://example.com/x.png)">',
        "<style>@import 'https://fonts.example/css';</style>",
        '<object data="https://example.com/x.svg"></object>',
    ],
)
def test_what_a_browser_loads_is_found(text: str) -> None:
    assert len(loaded_from_elsewhere(text, ".html")) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://semver.org">Semantic Versioning</a>',
        '<link rel="canonical" href="https://docs.example/">',
        '<script src="assets/javascripts/bundle.js"></script>',
        '<link rel="stylesheet" href="../assets/main.css">',
        '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
        "<code>&lt;img src=https://example.com&gt;</code>",
        '<img src="data:image/png;base64,AAAA//8=">',
    ],
)
def test_links_and_what_the_site_has_are_left_alone(text: str) -> None:
    assert not loaded_from_elsewhere(text, ".html")


def test_style_sheets_are_looked_at() -> None:
    text = "a { background: url(data:image/svg+xml;utf8,x) } b { background: url('https://example.com/y.png') }"
    assert loaded_from_elsewhere(text, ".css") == ["https://example.com/y.png"]


def test_a_site_is_refused_with_the_page_and_the_address(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == f"{tmp_path} holds no site"
    (tmp_path / "index.html").write_text("<p>")
    assert main([str(tmp_path)]) is None
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "page.html").write_text('<script src="https://cdn.example/x.js"></script>')
    assert main([str(tmp_path)]) == "inside/page.html loads https://cdn.example/x.js"
