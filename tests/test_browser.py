"""The report and the live page in Chromium, by playwright; skipped where there is none."""

import os
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from fake_runs import make_run, make_seeds

import report.__main__ as report
from report.runs import read_runs
from router import ROUTERS
from scripts.watch import make_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
WIDEST = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# the lowest ratio of a text's luminance to its page's, by WCAG 2
CONTRAST = """() => {
  const light = text => {
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b + .05;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const ratios = [...document.querySelectorAll("body *")].filter(e => e.innerText).map(e => {
    const text = light(getComputedStyle(e).color);
    return Math.max(text, page) / Math.min(text, page);
  });
  return Math.min(...ratios);
}"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [360, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_of_fifteen_routers_fits(browser, tmp_path_factory, width, scheme, call):
    """Nothing scrolls sideways but tables; names stay; text has contrast; links have places."""
    out = tmp_path_factory.getbasetemp() / "browser-report"
    if not out.exists():
        runs = make_seeds(out / "runs", dict.fromkeys(ROUTERS, 2.2), 2, noise=0.03)
        call(report.main, *runs, "--out", out)
    page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
    errors = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(f"file://{out}/report.html")
    assert page.evaluate(WIDEST) <= 0 and errors == []
    assert page.evaluate(CONTRAST) >= 4.5
    table = page.locator(".table").first
    name = table.locator("tbody td").first
    before = name.bounding_box()["x"]
    table.evaluate("e => e.scrollLeft = 200")
    assert name.bounding_box()["x"] == before
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    folded = page.locator("details:not([open])")
    assert folded.count() > 0
    row = folded.last.locator("tr").last
    assert not row.is_visible()
    page.emulate_media(media="print")
    assert row.bounding_box()["height"] > 0  # what is folded is printed too
    page.close()


@contextmanager
def serve(folder, port=0):
    """Serve the live page of the runs in a folder; yields the port."""
    with make_server(port, lambda: read_runs([folder])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_live_page_keeps_its_place_and_survives_its_server(browser, tmp_path):
    """A new run, the server's end, and its return: scroll, focus, fold and pictures stay."""
    runs = tmp_path / "runs"
    make_seeds(runs, dict.fromkeys(ROUTERS, 2.2), 2, noise=0.03)
    page = browser.new_page(viewport={"width": 360, "height": 700})
    page.set_default_timeout(180_000)  # drawing 30 runs waits for a busy machine
    page.add_init_script("window.setTimeout = (run) => { window.reload = run; };")
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    with serve(runs) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        assert "Updated at" in page.locator("#live").inner_text()
        overview = page.locator(".table").first
        overview.focus()
        overview.evaluate("e => e.scrollLeft = 60")
        page.locator("details").last.evaluate("e => e.open = true")
        page.evaluate("scrollTo(0, 300)")
        page.evaluate("document.querySelector('img').mark = 1")
        place = "[scrollY, document.activeElement.scrollLeft, document.querySelector('img').mark]"
        metrics = runs / "kern0/metrics.jsonl"
        with metrics.open("a") as file:
            file.write('{"step": 1000, "tokens": 1, "train/loss": 1.2345}\n')
        assert page.evaluate("reload().then(() => document.body.innerText)").count("1.2345") == 1
        assert page.evaluate(place) == [300, 60, 1]
        assert page.locator("details").last.evaluate("e => e.open")
    page.evaluate("reload()")
    assert "The server is gone" in page.locator("#live").inner_text()
    make_run(runs / "new", "run.seed=7")
    with serve(runs, port):
        page.evaluate("reload()")
        assert "Updated at" in page.locator("#live").inner_text()
        assert "31 runs" in page.title() and "runs/new" in page.locator("main").inner_text()
        assert page.locator("details").last.evaluate("e => e.open")
    assert errors == []
    page.close()


def test_a_reload_sends_what_changed(tmp_path):
    """The page is small, pictures are apart; no byte where nothing changed."""
    runs = tmp_path / "runs"
    make_seeds(runs, {"kern": 2.0, "tanh": 2.1}, 2)
    with serve(runs) as port:
        reply = urllib.request.urlopen(f"http://127.0.0.1:{port}/")
        tag = reply.headers["ETag"]
        assert len(reply.read()) < 30_000
        request = urllib.request.Request(f"http://127.0.0.1:{port}/")
        request.add_header("If-None-Match", tag)
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(request)
