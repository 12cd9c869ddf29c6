"""Hooks of mkdocs, which builds the site of documentation: parts of other files, and a check of what was built.

A line ``<!-- include: README.md#training-step -->`` of a page stands for the text under that heading of that file, up
to the next heading; without a heading, for the file without its title.  The files are those at the root of the
repository.

The pages of guard/docs are pages of the site, too.  Links between them and those of docs/ are what they are on GitHub,
such as ``../guard/docs/guard.md``; on the site all pages lie in one folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^<!-- include: (?P<file>[\w.]+)(?:#(?P<anchor>[\w-]+))? -->$", re.MULTILINE)
SNIPPET = re.compile(r"^<!-- snippet: .*?-->\n", re.MULTILINE | re.DOTALL)
ON_GITHUB = "https://github.com/dash-inductor/dash-inductor/blob/main/"
LOG = re.compile(r"\]\((?:\.\./\.\./docs/)?log/")
BETWEEN = re.compile(r"\]\(\.\./(?:guard/docs|\.\./docs)/")
"""Links between the two folders of pages."""
REQUESTS = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed|object)\b[^>]*\b(?:src|data)\s*=\s*["']?(?:https?:)?//[^"'\s>]*"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|edit|next|prev)\b)[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]*"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//[^"')\s]*|url\(["']?(?:https?:)?//[^"')\s]*""",
    re.IGNORECASE,
)
"""Text that makes a browser ask another host while it shows a page; a link that a reader may follow does not match."""


def slug(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and mkdocs generate it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def section(text: str, anchor: str) -> str:
    """Returns the text under the heading with this anchor, up to the next heading.

    Raises:
        ValueError: no heading has the anchor, or several have it.
    """
    plain = re.sub(r"^```.*?^```$", _no_headings, text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^(#+ .*)\n", plain, flags=re.MULTILINE)
    found = [body for heading, body in zip(parts[1::2], parts[2::2], strict=True) if slug(heading) == anchor]
    if len(found) != 1:
        raise ValueError(f"anchor={anchor!r} is not allowed: {len(found)} headings have it")
    return found[0].replace("\0", "#").strip() + "\n"


def _no_headings(block: re.Match[str]) -> str:
    """Masks a code block, so that comments in it are not taken for headings."""
    return block.group().replace("#", "\0")


def filled(markdown: str) -> str:
    """A page with the texts that it includes; what they link to in docs/ is linked from there."""

    def text_of(match: re.Match[str]) -> str:
        text = (ROOT / match["file"]).read_text(encoding="utf-8")
        text = section(text, match["anchor"]) if match["anchor"] else text.split("\n", 1)[1]
        return re.sub(rf"\]\((?:{re.escape(ON_GITHUB)})?(?:guard/)?docs/", "](", text)

    return INCLUDE.sub(text_of, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as mkdocs reads it: filled, without what only tests read, and with the links of the site.

    The log is no part of the site: it is linked where it is.
    """
    text = LOG.sub(f"]({ON_GITHUB}docs/log/", SNIPPET.sub("", filled(markdown)))
    return BETWEEN.sub("](", text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of guard/docs to the site."""
    from mkdocs.structure.files import File

    folder = ROOT / "guard" / "docs"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files.append(File(name, str(folder), config["site_dir"], config["use_directory_urls"]))
    return files


def on_post_build(config: Any) -> None:
    """Raises an error if a page of the built site would send a request to another host."""
    site = Path(config["site_dir"])
    pages = [path for suffix in ("html", "css", "svg") for path in site.rglob(f"*.{suffix}")]
    asking = {str(path.relative_to(site)): REQUESTS.findall(path.read_text(encoding="utf-8")) for path in pages}
    if found := {name: requests for name, requests in asking.items() if requests}:
        raise ValueError(f"pages ask other hosts: {found}")
