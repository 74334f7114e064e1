"""The report and the live page in Chromium, by playwright; skipped where there is none."""

import base64
import os
import re
import shutil
import threading
import unicodedata
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from fake_runs import make_run, make_seeds

import report.__main__ as report
from router import ROUTERS
from runtime.runs import read_runs
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


# elements that are wider than their place, and cannot be scrolled to
CUT_TEXTS = """() => [...document.querySelectorAll("main *")].filter(e => {
  const cut = ["hidden", "clip"].includes(getComputedStyle(e).overflowX);
  const scrolls = e.closest(".table") !== null;
  const box = e.getBoundingClientRect();
  const beyond = box.width > 0 && (box.left < -1 || box.right > innerWidth + 1);
  return (cut && e.scrollWidth > e.clientWidth + 1) || (beyond && !scrolls);
}).map(e => e.outerHTML.slice(0, 200))"""
# texts of a picture that are not wholly in its frame, or smaller than 11 px where it is 328 px wide
BAD_PICTURE_TEXTS = """() => {
  const svg = document.documentElement;
  const frame = svg.viewBox.baseVal;
  return [...svg.querySelectorAll("text")].filter(e => {
    const box = e.getBBox();
    const place = e.getCTM();
    const corners = [[box.x, box.y], [box.x + box.width, box.y + box.height]].map(
      ([x, y]) => new DOMPoint(x, y).matrixTransform(place));
    const scale = svg.getCTM().a;
    const xs = corners.map(p => p.x / scale), ys = corners.map(p => p.y / scale);
    const outside = Math.min(...xs) < -1 || Math.max(...xs) > frame.width + 1
      || Math.min(...ys) < -1 || Math.max(...ys) > frame.height + 1;
    const pixels = parseFloat(getComputedStyle(e).fontSize) * 328 / frame.width;
    return outside || (e.textContent.trim() && pixels < 10.9);
  }).map(e => e.textContent);
}"""


@pytest.fixture(scope="module")
def report_of_fifteen(tmp_path_factory):
    """The folder of a report of two seeds of every router, one of which failed."""
    out = tmp_path_factory.mktemp("fifteen")
    runs = make_seeds(out / "runs", dict.fromkeys(ROUTERS, 2.2), 2, noise=0.03)
    runs.append(make_run(out / "runs" / ("long-name-" * 8), "run.seed=2", until=0.4))
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    return out


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
def test_a_report_of_fifteen_routers_fits(browser, report_of_fifteen, width, scheme):
    """Nothing scrolls sideways but tables, no text is cut; names stay; text has contrast; links
    have places.
    """
    out = report_of_fifteen
    page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
    errors = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(f"file://{out}/report.html")
    assert page.evaluate(WIDEST) <= 0 and errors == []
    assert page.evaluate(CUT_TEXTS) == []
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


def test_no_text_of_a_picture_is_cut(browser, report_of_fifteen, tmp_path):
    """As Chromium lays it out: its fonts are not those that matplotlib measured."""
    page = browser.new_page()
    html = (report_of_fifteen / "report.html").read_text()
    pictures = re.findall(r'alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', html)
    assert len(pictures) > 5
    for title, data in pictures:
        file = tmp_path / "picture.svg"
        file.write_bytes(base64.b64decode(data))
        page.goto(file.as_uri())
        assert page.evaluate(BAD_PICTURE_TEXTS) == [], title
    page.close()


def test_the_printed_report_is_whole(browser, report_of_fifteen, tmp_path):
    """The PDF has every cell of every table, folded ones too."""
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    page = browser.new_page()
    page.goto(f"file://{report_of_fifteen}/report.html")
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    cells = page.evaluate("[...document.querySelectorAll('td')].map(e => e.textContent)")
    page.close()
    reader = pypdf.PdfReader(tmp_path / "report.pdf")
    text = "".join(sheet.extract_text() for sheet in reader.pages)
    text = unicodedata.normalize("NFKC", text)  # "fi" is one character there
    printed = "".join(text.split())
    wanted = {"".join(cell.split()) for cell in cells}
    assert len(wanted) > 200
    assert [cell for cell in wanted if cell not in printed] == []


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
