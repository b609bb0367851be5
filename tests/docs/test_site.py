"""The docs as a site: every link leads somewhere, every public name and every option is documented.

The site itself is built once, strictly, as `make docs` builds it.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lmhead
from lmhead.cli.app import command as whole_command

sys.path.append(str(Path(__file__).parent))
from test_pages import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TASKS = ("trim", "generate", "train", "see", "explore", "steer", "serve", "scaling")


class Seen(HTMLParser):
    """What a page of the site holds: anchors, links, and what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.ids |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link":
            self.fetched.append(values.get("href", ""))
        elif "src" in values:
            self.fetched.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_no_dead_link_and_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: Seen(path.read_text(encoding="utf-8")) for path in site.glob("*.html")}
    assert len(pages) > len(PAGES)  # and 404.html
    for path, page in pages.items():
        for address in page.fetched:
            assert not address.startswith(("http:", "https:", "//")), f"{path.name}: {address}"
        if path.name == "404.html":
            continue
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path.name}: {link}"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = Seen((site / "reference.html").read_text(encoding="utf-8"))
    names = {f"lmhead.{name}" for name in lmhead.__all__}
    assert len(names) > 60
    assert names - reference.ids == set()


def test_every_public_name_has_an_example() -> None:
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    missing = [n for n in lmhead.__all__ if not re.search(rf"\blmhead\.{n}\b|`{n}\b", text)]
    assert missing == []


def options(part: Any = None, words: tuple[str, ...] = ("lmhead",)) -> Iterator[tuple[str, Any]]:
    """Yield every parameter of every command, with the command's words."""
    part = whole_command() if part is None else part
    for param in part.params:
        yield " ".join(words), param
    for name, inner in getattr(part, "commands", {}).items():
        yield from options(inner, (*words, name))


def test_every_option_is_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (lmhead[^\n]*)\n\n```text\n(.*?)^```", page, re.M | re.S))
    seen = 0
    for command, param in options():
        if getattr(param, "hidden", False):
            continue
        seen += 1
        option = param.param_type_name == "option"
        name = param.opts[0] if option else (param.metavar or param.name.upper()).rstrip(".")
        assert getattr(param, "help", None), f"{command} {name} has no help"
        assert name in parts[command], f"docs/cli.md leaves out {command} {name}"
    assert seen > 300


@pytest.mark.parametrize("task", TASKS)
def test_a_task_begins_with_code_that_is_run(task: str) -> None:
    page = blocks((DOCS / f"{task}.md").read_text(encoding="utf-8"))
    code = (b for b in page if b.language in ("console", "python"))
    first = next(b for b in code if "installs a package" not in b.not_run)
    assert not first.not_run, f"{task}.md begins with code that no test runs"


def test_pages_that_are_no_part_of_the_site_link_to_what_exists() -> None:
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
    for page in (ROOT / name for name in names):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"[a-z]+:|#", link):
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


def test_the_classifiers_are_the_pythons_that_were_tried() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(about["classifiers"]))
    tried = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tried is not None
    assert tried[1].split() == [f"python{version}" for version in named]
    assert about["version"] == lmhead.__version__


def test_the_changelog_has_the_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
