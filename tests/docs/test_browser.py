"""The site in a real browser: no page scrolls sideways, and its search finds the page that answers a question."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.docs.code import ROOT
from tests.docs.test_site import COPIED, TOOLS
from tests.planner.browser import CONTRAST, browser

pytestmark = pytest.mark.services

QUESTIONS = {
    "CUDA out of memory": "how_to/out_of_memory",
    "model does not fit on one GPU": "how_to/out_of_memory",
    "use several GPUs": "how_to/several_devices",
    "train on several machines": "how_to/several_nodes",
    "submit a SLURM job": "how_to/slurm",
    "resume training from a checkpoint": "how_to/resume",
    "loss is NaN": "troubleshooting/nan",
    "training hangs": "troubleshooting/hang",
    "training is slow": "troubleshooting/slow",
    "bf16 mixed precision": "how_to/precision",
    "offload optimizer to CPU": "how_to/less_memory",
    "early stopping": "how_to/callbacks",
    "save checkpoint to S3": "how_to/cloud_storage",
    "Jupyter notebook": "how_to/notebooks",
    "hyperparameter search with Optuna": "how_to/sweeps",
    "fine-tune with LoRA": "how_to/fine_tune",
    "export to ONNX": "how_to/export",
    "migrate from Lightning": "coming_from/lightning",
    "custom training loop": "how_to/custom_loop",
    "install": "start/install",
}
"""Words that a newcomer types, and the page that must be among the first three results."""

_LAYOUT = """
const frame = document.querySelector('iframe'), found = [];
for (const page of INPUT) {
  await new Promise(done => { frame.onload = done; frame.src = '/' + page; });
  const root = frame.contentDocument.documentElement, body = frame.contentDocument.body;
  // Colors change at once, and the marks of headings, which appear under the pointer, are not shown.
  body.insertAdjacentHTML('beforeend',
    '<style>* {transition: none !important} .headerlink {display: none !important}</style>');
  for (const width of [1440, 390]) for (const scheme of ['default', 'slate']) {
    frame.style.width = width + 'px';
    body.setAttribute('data-md-color-scheme', scheme);
    found.push({page, scheme, width, seen: root.clientWidth, needed: root.scrollWidth,
      faint: width === 390 ? [] : faint(frame.contentDocument.querySelector('article') ?? body)});
  }
}
return found;
"""
# The results of the search are in a shadow tree, which a worker fills.
_SEARCH = """
const frame = document.querySelector('iframe'), found = {};
const pause = () => new Promise(done => setTimeout(done, 50));
await new Promise(done => { frame.onload = done; frame.src = '/'; });
const page = frame.contentDocument, view = frame.contentWindow;
page.querySelector('.md-search__button').click();
let root, input;
while (!(root = [...page.querySelectorAll('*')].map(each => each.shadowRoot).find(each => each
  && (input = each.querySelector('input'))))) await pause();
const links = () => [...root.querySelectorAll('[role=listbox] a[href]')].map(each => each.getAttribute('href'));
const type = text => {
  Object.getOwnPropertyDescriptor(view.HTMLInputElement.prototype, 'value').set.call(input, text);
  input.dispatchEvent(new view.Event('input', {bubbles: true}));
};
for (const question of INPUT) {
  type(question);
  // Each link repeats the question. The links change before the results do.
  const word = encodeURIComponent(question).replaceAll('%20', '+');
  for (let i = 0; i < 200 && !links().some(each => each.includes('h=' + word)); i++) await pause();
  for (let old = ''; old !== (old = links().join()); ) for (let i = 0; i < 20; i++) await pause();
  found[question] = links();
}
return found;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    project = tmp_path_factory.mktemp("project")
    for name in COPIED:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "mkdocs.yml", project)
    subprocess.run(["make", TOOLS / ".installed", f"DOCS={TOOLS}"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run([TOOLS / "bin" / "zensical", "build", "--strict"], cwd=project, check=True, capture_output=True)
    return project / "site"


@pytest.fixture
def server(site: Path) -> Iterator[_Server]:
    """A server of the site."""
    server = _Server(site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class _Server(ThreadingHTTPServer):
    """Server of a folder, and of a page that runs a script and sends back its result."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=folder))
        self.script = ""
        self.result: Any = None
        self.has_result = threading.Event()

    def run(self, script: str, value: Any, profile: Path) -> Any:
        """Return the result of ``script`` in a browser, with ``value`` as ``INPUT``."""
        self.script = f"const INPUT = {json.dumps(value)};{script}"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1600,1200"]
        words = [browser(), *options, f"--user-data-dir={profile}", f"http://127.0.0.1:{self.server_port}/run"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert self.has_result.wait(300), "the browser sent no result"
        finally:
            process.kill()
            process.wait()
        return self.result


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path != "/run":
            super().do_GET()
            return
        send = "fetch('/', {method: 'POST', body: JSON.stringify(await run().catch(String))})"
        frame = '<iframe style="border:0;width:1440px;height:1000px"></iframe>'
        self._answer(
            f"<!doctype html><body>{frame}<script>const run = async () => {{{self.server.script}}};"
            f"(async () => {{{send}}})()</script>".encode()
        )

    def do_POST(self) -> None:
        self.server.result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"")
        self.server.has_result.set()

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def test_no_page_scrolls_sideways_or_has_faint_text(server: _Server, site: Path, tmp_path: Path) -> None:
    pages = sorted(f"{path.parent.relative_to(site)}/".removeprefix("./") for path in site.rglob("index.html"))
    assert len(pages) >= 60
    site.joinpath("wide").mkdir(exist_ok=True)
    site.joinpath("wide", "index.html").write_text('<!doctype html><div style="width:500px;color:#999">.</div>')
    found = server.run(CONTRAST + _LAYOUT, [*pages, "wide/"], tmp_path)
    assert all(row["width"] - 20 <= row["seen"] <= row["width"] for row in found)  # a page can have a vertical bar
    wide = {(row["page"], row["width"]) for row in found if row["needed"] > row["seen"]}
    assert wide == {("wide/", 390)}
    assert len(found) == 4 * (len(pages) + 1)
    assert {each[-1] for row in found for each in row["faint"]} == {'<div style="width:500px;color:#999">.</div>'}


def test_search_finds_the_page_that_answers_a_question(server: _Server, tmp_path: Path) -> None:
    found = server.run(_SEARCH, list(QUESTIONS), tmp_path)
    assert isinstance(found, dict), found
    missing = {}
    for question, page in QUESTIONS.items():
        links = [urlsplit(link).path.strip("/") for link in found[question]]
        if page not in list(dict.fromkeys(links))[:3]:
            missing[question] = links[:5]
    assert not missing
