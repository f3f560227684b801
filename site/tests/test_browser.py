"""The built site in a real browser: every live element and exercise against CPython's results."""

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
from builder.paths import HTML, lessons
from builder.slices import Exercise, exercises
from element_values import some_values
from live import page as live_page
from playwright.sync_api import Browser, Page, sync_playwright

CASES = {"memory": 10}
"""Random cases of each element; 30 where nothing is said."""
IN_PAGE = [exercise for path in lessons() for exercise in exercises(path) if exercise.in_page]
EXPLORE = [f"explore/{path.name}" for path in sorted(HTML.glob("explore/*.html"))]
LESSONS = [f"notebooks/{path.stem}.html" for path in lessons()]
ONE_OF_EACH = ["index.html", "reference/index.html", "reference/minillm.costs.html",
               "reference/minillm.serving.scheduler.html", "results.html", "teachers.html",
               "readme.html", "search.html"]  # fmt: skip


class Quiet(SimpleHTTPRequestHandler):
    """Files of the site, without a line for each."""

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The site, served on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, as $CHROMIUM names it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Browser, address: str) -> Iterator[Page]:
    """A page; the test fails for errors in it, missing files and requests to other hosts."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, base_url=address)
    wrong: list[str] = []
    tab = context.new_page()
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on(
        "request", lambda r: r.url.startswith((address, "data:", "blob:")) or wrong.append(r.url)
    )
    tab.on("response", lambda r: r.status < 400 or wrong.append(f"{r.status}: {r.url}"))
    yield tab
    context.close()
    assert not wrong, wrong


# Every page, read


class Links(HTMLParser):
    """What a page points to and what can be pointed to in it."""

    def __init__(self, path: Path):
        super().__init__()
        self.to: list[str] = []
        self.files: list[str] = []
        self.ids: set[str] = set()
        self.bare: list[str] = []  # images without a text
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """One tag."""
        found = dict(attributes)
        if found.get("id"):
            self.ids.add(found["id"])
        if tag == "a" and found.get("href"):
            self.to.append(found["href"])
        elif tag in ("script", "img", "source", "iframe") and found.get("src"):
            self.files.append(found["src"])
        elif tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.files.append(found["href"])
        if tag == "img" and not (found.get("alt") or "").strip():
            self.bare.append(found.get("src") or "")


def test_links_files_and_texts_for_images():
    pages = {path.relative_to(HTML).as_posix(): Links(path) for path in HTML.rglob("*.html")}
    wrong, n = [], 0
    for name, page in pages.items():
        wrong += [f"{name}: no text for {src}" for src in page.bare]
        for target in page.to + page.files:
            if urlparse(target).scheme in ("data", "mailto"):
                continue
            if urlparse(target).scheme:
                if target in page.files:
                    wrong.append(f"{name}: a file of another host, {target}")
                continue
            n += 1
            path, anchor = urldefrag(urljoin(name, target))
            path = unquote(path.partition("?")[0])
            if path and not (HTML / path).exists():
                wrong.append(f"{name}: {target} is not there")
            elif anchor and path in pages and unquote(anchor) not in pages[path].ids:
                wrong.append(f"{name}: {target} has no such place")
    assert not wrong, "\n".join(wrong[:40])
    assert len(pages) > 120 and n > 10_000


# Every kind of page, opened


@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_is_wider_than_the_screen(tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    wide = {}
    for name in [*ONE_OF_EACH, *EXPLORE, *LESSONS]:
        tab.goto(name, wait_until="domcontentloaded")
        real = tab.evaluate("document.documentElement.scrollWidth")
        if real > width:
            wide[name] = real
    assert not wide


def test_the_search_finds_a_word(tab):
    tab.goto("search.html?q=goodput")
    tab.wait_for_selector("#search-results li a")
    tab.wait_for_function("document.querySelectorAll('#search-results li').length > 3")


def test_without_scripts_every_element_has_its_picture(browser, address):
    context = browser.new_context(java_script_enabled=False, base_url=address)
    tab = context.new_page()
    for name in ["index.html", *EXPLORE]:
        tab.goto(name)
        assert tab.locator(".live .wide svg:visible, .live .wide .headline:visible").count()
    context.close()


def test_python_starts_with_the_first_question_only(tab):
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto("explore/calculator.html")
    tab.wait_for_timeout(300)
    assert not any("pyodide" in url for url in asked)
    tab.select_option("[name=dtype]", "int4")
    tab.wait_for_selector(".live[data-answered]", timeout=60_000)
    assert any("pyodide.asm.wasm" in url for url in asked)
    assert "computed in this page" in tab.inner_text(".live .state")


# Live elements


ASK = """async (questions) => {
  const found = [];
  for (const question of questions) {
    let html = null;
    const { error } = await python.ask(question, (picture) => (html = picture));
    found.push(error ?? html);
  }
  return found;
}"""


def test_every_element_gives_cpythons_pictures(tab):
    """The same text, to the last digit."""
    tab.goto("explore/calculator.html")
    tab.set_default_timeout(110_000)
    for name in live_page.ELEMENTS:
        cases = [some_values(name, seed) for seed in range(CASES.get(name, 30))]
        if name == "load":  # small ones
            cases = [{"model": "smollm2-135m", "places": 8}, {"model": "llama-2-70b"}]
        questions = [{"element": name, "values": values, "width": 640} for values in cases]
        for values, html in zip(cases, tab.evaluate(ASK, questions), strict=True):
            assert html == live_page.answer(name, values, 640), (name, values)


MOVE = """(slider) => {
  slider.value = slider.value > 0 ? slider.value - 1 : 1;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""


@pytest.mark.parametrize("where", ["index.html", *EXPLORE])
def test_a_control_redraws_the_picture(tab, where):
    tab.goto(where)
    for live in tab.locator(".live:not(:has(.go))").all():
        before = live.locator(".picture").inner_html()
        slider = live.locator("input[type=range][data-values]").first
        if slider.count():
            slider.evaluate(MOVE)
        else:
            live.locator("select").first.select_option(index=0)
        name = live.get_attribute("data-element")
        tab.wait_for_selector(f".live[data-element={name}][data-answered]", timeout=60_000)
        assert live.locator(".picture").inner_html() != before
        assert live.locator("svg, .headline").count()


def test_a_film_plays_without_python(tab):
    tab.goto("explore/scheduler.html")
    film = tab.locator(".wide .movie")
    assert film.locator("[data-frame]:not([hidden])").get_attribute("data-frame") == "9"
    film.locator(".back").click()
    assert film.locator("[data-frame]:not([hidden])").get_attribute("data-frame") == "8"
    film.locator(".on").click()
    film.locator(".play").click()
    tab.wait_for_function("document.querySelector('.wide .movie .film-bar input').value == '2'")


def test_what_you_do_by_hand(tab):
    tab.goto("explore/memory.html")
    live = tab.locator(".live[data-element=by_hand]")
    live.get_by_text("append 1 to A").click()
    tab.wait_for_selector(".live[data-element=by_hand][data-answered]", timeout=60_000)
    assert live.locator(".log li").count() == 4
    assert live.locator("input[type=text]").input_value().endswith("append A 1")


# Exercises and guesses

RUN = """async (runs) => {
  const found = [];
  for (const [before, learner, check] of runs)
    found.push((await python.ask({ exercise: { before, learner, check } })).result);
  return found;
}"""


def test_every_hole_fails_and_every_solution_passes(tab):
    tab.goto("explore/calculator.html")
    wrong = []
    for e in IN_PAGE:
        runs = [[e.before, text, e.check] for text in (e.hole, e.solution)]
        hole, solution = tab.evaluate(RUN, runs)
        if hole["passed"] or "NotImplementedError" not in hole["error"]:
            wrong.append((e.lesson, e.name, hole))
        if not solution["passed"] or solution["printed"] != e.output:
            wrong.append((e.lesson, e.name, solution, e.output))
    assert not wrong, "\n".join(map(str, wrong))


def test_the_pages_hold_the_exercises(tab):
    for path in lessons():
        inside = [e for e in exercises(path) if e.in_page]
        tab.goto(f"notebooks/{path.stem}.html", wait_until="domcontentloaded")
        assert tab.locator(".exercise").count() == len(inside)
        if inside:
            runs = json.loads((HTML / f"_static/exercises/{path.stem}.json").read_text("utf-8"))
            assert {name: run["before"] for name, run in runs.items()} == {
                e.name: e.before for e in inside
            }


def first_of(tab: Page, exercise: Exercise) -> None:
    """Open the lesson of an exercise."""
    tab.goto(f"notebooks/{exercise.lesson}.html")


def test_an_exercise_as_a_learner_does_it(tab):
    e = next(e for e in IN_PAGE if e.name == "chats_that_fit")
    first_of(tab, e)
    here = tab.locator(f".exercise[data-name={e.name}]")
    editor = here.locator("textarea")
    assert editor.input_value() == e.hole
    here.locator(".check").click()
    tab.wait_for_selector(".exercise.failed", timeout=60_000)
    assert "NotImplementedError" in here.locator(".told").inner_text()
    editor.fill(e.solution)
    here.locator(".check").click()
    tab.wait_for_selector(".exercise.passed", timeout=60_000)
    tab.reload()  # the text is kept
    assert editor.input_value() == e.solution
    # A loop without an end is ended, and the next try starts Python anew.
    here.evaluate("(element) => (element.dataset.limit = 1)")
    editor.fill("while True:\n    pass\n")
    here.locator(".check").click()
    tab.wait_for_selector(".exercise.failed", timeout=60_000)
    assert "more than 1 s" in here.locator(".told").inner_text()
    here.evaluate("(element) => (element.dataset.limit = 60)")
    here.locator(".anew").click()
    assert editor.input_value() == e.hole
    here.locator(".check").click()
    tab.wait_for_selector(".exercise.failed", timeout=60_000)
    assert "NotImplementedError" in here.locator(".told").inner_text()


GUESS = """() => document.querySelectorAll(".guess").forEach((form) => {
  form.querySelector("input").value = "7";
  form.querySelector("button").click();
})"""


def test_guesses_come_before_answers(tab):
    guessed = 0
    for name in LESSONS:
        tab.goto(name, wait_until="domcontentloaded")
        veiled = tab.locator(".veiled.on").count()
        if not veiled:
            continue
        tab.evaluate(GUESS)
        assert tab.locator(".veiled.on").count() == 0
        assert tab.locator(".veiled[data-said^='You guessed 7']").count() == veiled
        guessed += 1
    assert guessed >= 4
