"""Every citation of the contract has its heading in `docs/DESIGN.md`, and all that is named there exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
DESIGN = ROOT / "docs" / "DESIGN.md"
SUFFIXES = frozenset({".py", ".md", ".pml", ".proto"})
NOT_OURS = frozenset({"build", "dist"})  # beside folders whose names begin with a dot
NOT_WRITTEN = ("shared/coppice_rpc/", "benchmarks/results/")  # generated, or recorded
REGISTRIES = (
    "tools/coppice_sim/mutants/registry.py",
    "tools/coppice_sim/mutants/copies.py",
    "tools/coppice_sim/mutants/leaks.py",
    "tools/coppice_sim/mutants/moves.py",
    "tools/coppice_sim/mutants/owners.py",
    "tools/coppice_sim/mutants/versions.py",
    "tests/unit/cache/machine/test_mutants.py",
)
INVARIANTS = tuple(f"i{number}" for number in range(1, 20))
RULES = tuple(f"rule-{number}" for number in range(1, 10))
PARTS = ("**Statement.**", "**Why.**", "**Kept in**", "**Asked by**", "**Red without it.**")

_GAP = r"(?:\s|\n\s*#)+"  # a comment may break in the middle of a citation
_MORE = rf"(?:(?:,|{_GAP}(?:and|to)|-){_GAP}?\d+[a-z]?\b)*"
# Not the data types of a tensor file, `I8 U8`; but the assertions of the models, `I9_free_while_used`.
INVARIANT = re.compile(r"(?<![A-Za-z0-9_])I([1-9]\d*)(?![A-Za-z0-9]|[ ]U\d)")
RULE = re.compile(rf"\b[Rr]ule(?:{_GAP}(\d+)\b|s{_GAP}(\d+\b{_MORE}))")
SECTION = re.compile(
    rf"\b(?:DESIGN(?:\.md)?,?{_GAP}(?:sections?{_GAP})?|[Dd]esign,?{_GAP}sections?{_GAP})(\d+[a-z]?\b{_MORE})"
)
OWN_SECTION = re.compile(rf"\bsections?{_GAP}(\d+[a-z]?\b{_MORE})")  # within the contract itself
LINK = re.compile(r"DESIGN\.md#([A-Za-z0-9-]+)")
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[A-Za-z_][\w./-]*/[\w.-]+\.(?:py|md|json|ya?ml|toml|proto|cpp|pml)")
MUTANT = re.compile(r"\bmutant\s+`([^`\n]+)`")
MODEL_RULE = re.compile(r"X_[A-Z_]+")


class Citation(NamedTuple):
    line: int
    text: str
    anchor: str


def all_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in NOT_OURS]
    return [path for one in top for path in ([one] if one.is_file() else one.rglob("*")) if path.is_file()]


def written_files() -> list[Path]:
    """All that people wrote, but for this file, whose wrong citations are meant."""
    found = [path for path in all_files() if path.suffix in SUFFIXES]
    kept = [path for path in found if not path.relative_to(ROOT).as_posix().startswith(NOT_WRITTEN)]
    return sorted(path for path in kept if path != Path(__file__).resolve())


def numbers_of(listed: str) -> list[str]:
    """`3 to 5, 7 and 6a` names 3, 4, 5, 7 and 6a."""
    names: list[str] = []
    is_range = False
    for word in re.findall(r"\d+[a-z]?|\bto\b|-", listed):
        if word in ("to", "-"):
            is_range = True
        elif is_range and word.isdecimal() and names[-1].isdecimal():
            names += [str(number) for number in range(int(names[-1]) + 1, int(word) + 1)]
            is_range = False
        else:
            names.append(word)
            is_range = False
    return names


def citations(text: str, *, is_contract: bool = False) -> Iterator[Citation]:
    def cited(found: re.Match[str], anchor: str) -> Citation:
        line = text.count("\n", 0, found.start()) + 1
        return Citation(line, " ".join(found.group().split()), anchor)

    for found in INVARIANT.finditer(text):
        yield cited(found, f"i{found[1]}")
    for found in RULE.finditer(text):
        for name in numbers_of(found[1] or found[2]):
            yield cited(found, f"rule-{name}")
    for pattern in (SECTION, OWN_SECTION) if is_contract else (SECTION,):
        for found in pattern.finditer(text):
            for name in numbers_of(found[1]):
                yield cited(found, f"section-{name}")
    for found in LINK.finditer(text):
        yield cited(found, found[1])


def wrong_citations(text: str, anchors: frozenset[str], *, is_contract: bool = False) -> list[Citation]:
    return [found for found in citations(text, is_contract=is_contract) if found.anchor not in anchors]


@cache
def contract() -> str:
    return DESIGN.read_text(encoding="utf-8")


@cache
def anchors() -> frozenset[str]:
    return frozenset(ANCHOR.findall(contract()))


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def mutants() -> frozenset[str]:
    """Names of those that stand at the top of a registry."""
    names = set()
    for registry in REGISTRIES:
        tree = ast.parse((ROOT / registry).read_text(encoding="utf-8"))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        for call in (node for one in assigned for node in ast.walk(one) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "Mutant" and isinstance(call.args[0], ast.Constant):
                names.add(str(call.args[0].value))
    return frozenset(names)


def what_does_not_exist(text: str) -> list[str]:
    """Files, functions, mutants and rules of the models that a text names in backticks."""
    missing = [f"mutant {name}" for name in MUTANT.findall(text) if name not in mutants()]
    model_rules = frozenset(MODEL_RULE.findall((ROOT / "models" / "check").read_text(encoding="utf-8")))
    for name in QUOTED.findall(text):
        path, _, function = name.partition("::")
        if Path(path).suffix in SUFFIXES:
            if not (ROOT / path).is_file() or (function and function not in functions_of(ROOT / path)):
                missing.append(name)
        elif function or (MODEL_RULE.fullmatch(name) and name not in model_rules):
            missing.append(name)
    return missing


def section_under(anchor: str) -> str:
    """From an anchor to the next one."""
    return contract().split(f'<a id="{anchor}"></a>\n', 1)[1].split("<a id=", 1)[0]


def test_every_citation_has_its_heading() -> None:
    wrong = []
    for path in written_files():
        text = path.read_text(encoding="utf-8")
        for found in wrong_citations(text, anchors(), is_contract=path == DESIGN):
            wrong.append(f"{path.relative_to(ROOT)}:{found.line}: {found.text}: no anchor {found.anchor}")
    assert not wrong, "\n".join(wrong)


def test_the_citations_are_seen() -> None:
    """Far fewer than there are: the patterns, or the files, would be wrong."""
    seen: Counter[str] = Counter()
    cited = set()
    for path in written_files():
        if path != DESIGN:
            for found in citations(path.read_text(encoding="utf-8")):
                seen[re.split(r"[-\d]", found.anchor, maxsplit=1)[0]] += 1
                cited.add(found.anchor)
    assert seen["i"] >= 130, seen
    assert seen["rule"] >= 40, seen
    assert seen["section"] >= 7, seen
    assert cited >= {*INVARIANTS, *RULES}, f"nobody cites {sorted({*INVARIANTS, *RULES} - cited)}"


def test_every_anchor_stands_above_its_heading_once() -> None:
    found = ANCHOR.findall(contract())
    assert len(found) == len(set(found))
    assert set(found) >= {*INVARIANTS, *RULES}
    for anchor in found:
        heading = section_under(anchor).splitlines()[0].lstrip("# ").lower()
        name = anchor.replace("rule-", "rule ").replace("section-", "")
        assert re.match(rf"{re.escape(name)}\b", heading), f"{anchor} stands above {heading!r}"


@pytest.mark.parametrize("anchor", [*INVARIANTS, *RULES])
def test_each_says_what_holds_why_where_and_what_notices(anchor: str) -> None:
    under = section_under(anchor)
    places = [under.find(part) for part in PARTS]
    assert -1 not in places, f"{anchor} lacks {PARTS[places.index(-1)]}"
    assert places == sorted(places)
    assert re.search(r"`[^`]+\.(?:py|pml)`", under[places[2] : places[3]]), f"{anchor} is kept in no file"
    assert re.search(r"mutant\s+`|`tests/[^`]+::", under[places[4] :]), f"{anchor}: no test goes red"


def test_all_that_the_contract_names_exists() -> None:
    assert len([name for name in QUOTED.findall(contract()) if Path(name.partition("::")[0]).suffix in SUFFIXES]) > 100
    assert len(MUTANT.findall(contract())) > 30
    assert not what_does_not_exist(contract())


def names_of_no_file(text: str, files: list[str]) -> list[str]:
    """Paths in backticks, whole or from some folder on, that no file has. Routes and hidden folders begin otherwise."""
    named = [name for name in QUOTED.findall(text) if FILE.fullmatch(name)]
    return [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]


def test_files_that_documents_name_exist() -> None:
    files = [
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts
    ]
    documents = [path for path in written_files() if path.suffix == ".md"]
    assert sum(len(FILE.findall(path.read_text(encoding="utf-8"))) for path in documents) > 300
    missing = {path.name: names_of_no_file(path.read_text(encoding="utf-8"), files) for path in documents}
    assert not {name: paths for name, paths in missing.items() if paths}
    assert names_of_no_file("`state/gone.py`, `core/state.py`", ["a/state.py", "core/my_state.py"]) == [
        "state/gone.py",
        "core/state.py",
    ]


WRONG = """
    x = 1  # as I20 says, and the design, section 6b, rule
           # 12, or rules 7 to 10; "I0" and I7 are no news
(DESIGN 12), DESIGN.md section 4, DESIGN sections 5 and 9a, docs/DESIGN.md#i99 and docs/DESIGN.md#rule-3
assert(used || I21_never);
"""


def test_wrong_citations_are_found() -> None:
    found = wrong_citations(WRONG, anchors())
    assert Counter(citation.anchor for citation in found) == Counter(
        ["i20", "i21", "i99", "rule-10", "rule-12", "section-12", "section-6b", "section-9a"]
    )
    assert {citation.line for citation in found if citation.anchor in ("i20", "rule-12", "section-6b")} == {2}
    assert [citation.anchor for citation in citations(WRONG) if citation.anchor in anchors()] == (
        ["i7", "rule-7", "rule-8", "rule-9", "section-4", "section-5", "rule-3"]
    )


@pytest.mark.parametrize(
    "text",
    ["I/O and I2C", "I64 U64", "HI7, I5x, _I9", "a rule that 3 know", "rules of 2", "by design 4 of them", "redesign"],
)
def test_what_is_no_citation_is_left_alone(text: str) -> None:
    assert not list(citations(text))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`tests/test_nowhere.py`", "tests/test_nowhere.py"),
        ("`tests/test_tidy.py::test_nothing`", "tests/test_tidy.py::test_nothing"),
        ("`nowhere::test_nothing`", "nowhere::test_nothing"),
        ("mutant\n  `no such protection`", "mutant no such protection"),
        ("`X_NO_SUCH_RULE`", "X_NO_SUCH_RULE"),
    ],
)
def test_what_does_not_exist_is_found(text: str, missing: str) -> None:
    assert what_does_not_exist(text) == [missing]
