"""Files outside of docs/ that the site shows too: README is its home, and pictures come from results/.

GitHub follows links from file to file. The site has docs/ at its root, so these links are rewritten on the way.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
OTHERS = [
    "LICENSE",
    "CITATION.cff",
    "results/*.png",
    "results/avx*/*.png",
    "results/pictures/*.svg",
    "examples/*.py",
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/."""
    from mkdocs.structure.files import File  # the tests collect this file where mkdocs is not installed

    for pattern in [*PAGES, *OTHERS]:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, in_site(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository lead to the same files in the site, and mark the tables of numbers."""
    here = page.file.src_uri
    folder = "" if here in map(in_site, PAGES) else posixpath.dirname(f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        if not (ROOT / target).exists():
            return match[0]
        return f"]({posixpath.relpath(in_site(target), posixpath.dirname(here) or '.')}{match['anchor'] or ''})"

    markdown = re.sub(r"\]\((?P<target>[^()#:]+)(?P<anchor>#[^)]*)?\)", rewritten, markdown)
    numbers = r'<div class="numbers" markdown="1">\n\n\g<table>\n</div>'
    return re.sub(r"<!-- table: .*? -->\n(?P<table>.*?)<!-- end -->", numbers, markdown, flags=re.DOTALL)


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
