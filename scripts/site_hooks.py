"""Hooks of mkdocs.yml: README.md is the site's first page, and whatever a page links to outside of docs/ comes along.

A page of the site has the path that it has in docs/; what lies elsewhere in the checkout has its path there. Links are written
for the checkout, and are turned into the site's.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = "README.md"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"[a-z]+:")


def site_path(path: str) -> str:
    """Of a file of the checkout, e.g. `flow.md` of `docs/flow.md`."""
    if path == HOME:
        return "index.md"
    return path.removeprefix("docs/")


def checkout_path(path: str) -> str:
    """The other way round."""
    if path == "index.md":
        return HOME
    return f"docs/{path}" if (ROOT / "docs" / path).is_file() else path


def find_target(page: str, link: str) -> str:
    """The file of the checkout to which a link of the page leads, of a folder its README.md; empty: it shows nothing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if (ROOT / path).is_file() else ""


def list_links(text: str) -> list[str]:
    """Paths that a page's links lead to within the checkout."""
    return [link for _, link, _ in LINK.findall(FENCED.sub("", text)) if link and not ELSEWHERE.match(link)]


def list_reachable() -> list[str]:
    """Every file of the checkout that the site's pages lead to, themselves included."""
    waiting = [HOME, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    seen = dict.fromkeys(waiting)
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        found = (find_target(page, link) for link in list_links((ROOT / page).read_text(encoding="utf-8")))
        new = [target for target in found if target and target not in seen]
        seen.update(dict.fromkeys(new))
        waiting += new
    return list(seen)


def rewrite(page: str, text: str) -> str:
    """The page's text with the site's links; a link to what the site does not show is its text alone."""

    def site_link(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if not link or ELSEWHERE.match(link):
            return match[0]
        target = find_target(page, link)
        if not target:
            return words if (ROOT / posixpath.join(posixpath.dirname(page), link)).exists() else match[0]
        here = posixpath.dirname(site_path(page)) or "."
        return f"[{words}]({posixpath.relpath(site_path(target), here)}{anchor})"

    parts, at = [], 0
    for block in FENCED.finditer(text):
        parts += [LINK.sub(site_link, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, LINK.sub(site_link, text[at:])])


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls it with the files of docs/: add those from elsewhere."""
    from mkdocs.structure.files import File

    for path in list_reachable():
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """mkdocs calls it with each page's text."""
    return rewrite(checkout_path(page.file.src_uri), markdown)
