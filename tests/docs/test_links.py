"""Every link of the pages leads to a file of the checkout, and to a heading where it names one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.product import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def every_page() -> list[Path]:
    folders = ("docs", "benchmarks", "examples", "tests")
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in sorted((ROOT / folder).rglob("*.md")))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names of the headings, as a page on the web has them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text.replace("&lt;", "<").replace("&gt;", ">")).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return frozenset(found)


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def broken(page: Path, root: Path = ROOT) -> list[str]:
    found = []
    for link in LINK.findall(without_blocks(page.read_text(encoding="utf-8"))):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{page.relative_to(root)}: {link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{page.relative_to(root)}: {link}: there is no such heading")
    return found


def test_links_lead_somewhere() -> None:
    wrong = [sentence for page in every_page() for sentence in broken(page)]
    assert wrong == [], "\n".join(wrong)


def test_every_page_can_be_come_upon_from_the_first() -> None:
    """By links, from README.md on."""
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        waiting += [(page.parent / link).resolve() for link in links if link and not ELSEWHERE.match(link)]
    assert sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md") if page not in seen) == []


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `name` & more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-name--more) [c](other.md#twice-1) [d](gone.md) [e](other.md#gone) [f](https://x.y)\n"
        "```\n[g](gone.md)\n```\n[h](#gone)\n"
    )
    assert broken(page, tmp_path) == [
        "page.md: gone.md: there is no such file",
        "page.md: other.md#gone: there is no such heading",
        "page.md: #gone: there is no such heading",
    ]
