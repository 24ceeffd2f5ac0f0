"""The documentation: its code runs, prints what it says, and its pages can be built and read."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stratagem as sg
from benchmarks import tables
from stratagem.searcher.improvement.neighbours import MOVES
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.schedules.named_schedules import SCHEDULES
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS
from tests.support.brief_timing import timed_briefly
from tests.support.chromium import CHROMIUM, MISSING, Chromium
from tests.support.chromium import Page as Tab
from tests.support.pages import RUNNABLE, Page, blocks_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

ELSEWHERE = {
    "exports.md": "what it shows is run by test_exports.py and test_exports_run.py",
    "gpu-results.md": "its commands are for machines with GPUs",
}
"""Pages whose code is not run here, and why."""

WITH_CODE = [
    page
    for page in PAGES
    if page not in ELSEWHERE
    and any(b.language in RUNNABLE and not b.reason for b in blocks_of((DOCS / page).read_text()))
]


@pytest.fixture
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, a cache, modules and tables of kinds that a page may change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    kinds = (KINDS, KERNELS, HANDLERS, SCHEDULES, MOVES)
    before = [dict(table) for table in kinds]
    modules = set(sys.modules)
    with timed_briefly():
        yield
    for table, kept in zip(kinds, before, strict=True):
        table.clear()
        table.update(kept)
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs_and_prints_what_the_page_says(page: str) -> None:
    assert Page(DOCS / page).run()


class TestBlocks:
    def test_what_is_not_run_says_why(self) -> None:
        for page in PAGES:
            text = (DOCS / page).read_text()
            for block in blocks_of(text):
                assert "not run:" not in block.code
            assert text.count("<!-- not run:") == sum(bool(b.reason) for b in blocks_of(text))

    def test_a_wrong_result_is_found(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        page = tmp_path / "page.md"
        page.write_text("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
        with pytest.raises(AssertionError, match="line 4: the block before it prints\n2"):
            Page(page).run()

    def test_a_failing_command_is_found(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        page = tmp_path / "page.md"
        for code, said in (("false", "line 1"), ("stratagem clusters nowhere", "nowhere")):
            page.write_text(f"```bash\n{code}\n```\n")
            with pytest.raises(AssertionError, match=said):
                Page(page).run()

    def test_files_errors_and_reasons(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        page = tmp_path / "page.md"
        page.write_text(
            '```python title="mine.py"\nx = 5\n```\n<!-- not run: no -->\n```bash\nfalse\n```\n'
            "```python\nfrom mine import x\nraise ValueError(x)\n```\n"
        )
        with pytest.raises(ValueError, match="5") as caught:
            Page(page).run()
        assert caught.traceback[-1].lineno == 9
        del sys.modules["mine"]


class TestNames:
    def test_files_that_are_named_are_there(self) -> None:
        texts = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        folders = "simulator|search|profiler|executor|src|docs|tests|benchmarks|examples"
        named = re.compile(rf"`((?:{folders})/[\w./-]*)`")
        found = [(text.name, name) for text in texts for name in named.findall(text.read_text())]
        assert len(found) > 50
        assert [each for each in found if not (ROOT / each[1]).exists()] == []


RETURNED = {
    *("Annotated", "AnnotationRegret", "Calibration", "Comparison", "Export", "Robustness"),
    *("Verdict", "Constraints", "TriedOptions"),
}
"""Entries of the reference that nobody makes: answers of functions, and parts of `Space`."""


class TestReference:
    def test_every_public_name_has_an_entry(self) -> None:
        text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
        entries = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
        assert len(set(entries)) == len(entries)
        public = [getattr(sg, name) for name in dir(sg) if name != "__version__"]
        modules = [each for each in public if inspect.ismodule(each)]
        names = [(each, name) for each in modules for name in each.__all__ if not name.isupper()]
        public += [getattr(module, name) for module, name in names]
        values = {id(each) for each in public if not inspect.ismodule(each)}
        described = {entry: pydoc.locate(entry) for entry in entries}
        assert values <= {id(each) for each in described.values()}
        others = [entry for entry, each in described.items() if id(each) not in values]
        assert {each.rpartition(".")[2] for each in others} == RETURNED


class TestTables:
    def test_the_page_has_the_lines_that_were_measured(self) -> None:
        assert tables.page(DOCS / "performance") == (DOCS / "performance.md").read_text()

    def test_lines_without_the_fields_are_left_out(self) -> None:
        lines = [{"a": 1234, "b": True}, {"a": 2}, {"a": 0.00012345, "b": False}]
        made = tables.table(lines, {"a": "what", "b": "equal"}).splitlines()
        assert made[1:] == ["|---:|---|", "| 1,234 | yes |", "| 0.0001234 | **no** |"]

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("other", "{}", "no section for it"),
            ("delta", "{}\nhello", "line 2 is no JSON"),
            ("delta", "[1]", r"line 1: \[1\] is no JSON object"),
        ],
    )
    def test_what_is_no_measurement_is_refused(self, tmp_path, name, text, said) -> None:
        (tmp_path / f"{name}.jsonl").write_text(text)
        with pytest.raises(ValueError, match=said):
            tables.page(tmp_path)


class TestFigures:
    def test_the_replay_is_drawn_as_it_is(self) -> None:
        spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
        assert spec is not None
        assert spec.loader is not None
        figures = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(figures)
        top, bottom = figures.draw_delta().axes
        bars = [[(p.get_x(), p.get_width()) for p in axes.patches] for axes in (top, bottom)]
        moved = np.array(bars[1]) - np.array(bars[0])
        assert moved[figures.CHANGED, 1] == 2
        assert set(moved[figures.CHANGED + 1 : figures.NUM_LAYERS, 0]) == {2.0}
        assert not moved[: figures.CHANGED].any()

    def test_every_figure_of_a_page_is_there(self) -> None:
        for page in PAGES:
            text = (DOCS / page).read_text()
            for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
                assert (DOCS / page).parent.joinpath(link).is_file(), (page, link)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built; warnings are errors."""
    for package in ("material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing: pip install 'stratagem[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the pages are served, as a host of static files does."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def visit(page: Tab, url: str) -> None:
    """Open a page, and wait until it is drawn."""
    page.send("Page.navigate", url=url)
    page.wait("location.protocol === 'http:' && document.readyState === 'complete'")
    page.settle()


@pytest.mark.slow
class TestSite:
    @pytest.mark.slow
    def test_every_page_is_built_and_listed(self, site: Path) -> None:
        start = (site / "index.html").read_text()
        for page in PAGES:
            name = page.removesuffix(".md") + ".html"
            assert (site / name).is_file()
            assert f'href="{name}"' in start or name == "index.html"

    @pytest.mark.slow
    def test_examples_of_docstrings_are_code(self, site: Path) -> None:
        text = (site / "api" / "search.html").read_text()
        assert "Examples:" in text
        assert "<p>&gt;&gt;&gt;" not in text

    @pytest.mark.slow
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_pages_can_be_read_on_narrow_screens(self, address, tmp_path, scheme) -> None:
        if CHROMIUM is None:
            pytest.skip(MISSING)
        with Chromium(tmp_path) as browser:
            for name in ("index", "your-model", "delta", "performance", "api/search"):
                with browser.page() as page:
                    page.prefer(scheme)
                    page.resize(400, 800)
                    visit(page, f"{address}/{name}.html")
                    assert page.value("document.documentElement.scrollWidth") <= 400, name
                    used = page.value("document.body.dataset.mdColorScheme")
                    assert used == {"light": "default", "dark": "slate"}[scheme]
                    assert not page.errors
                    assert all(url.startswith((address, "data:")) for url in page.requests)

    @pytest.mark.slow
    def test_search_finds_a_word(self, address: str, tmp_path: Path) -> None:
        if CHROMIUM is None:
            pytest.skip(MISSING)
        with Chromium(tmp_path) as browser, browser.page() as page:
            visit(page, f"{address}/index.html?q=microbatch")
            page.wait("document.querySelectorAll('.md-search-result__link').length > 1")
            links = page.value(
                "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
            )
            assert any("words.html" in link for link in links)
