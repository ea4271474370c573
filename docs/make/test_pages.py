"""Tests of the pages in a real browser, at three widths.

pip install -r docs/make/requirements.txt && python -m pytest -q docs/make/test_pages.py

Without selenium, or without a browser and its driver (apt install chromium chromium-driver), they
are skipped.
"""

import itertools
import shutil
from pathlib import Path

import pytest

NEEDS_SELENIUM = "needs selenium; run: pip install -r docs/make/requirements.txt"
NEEDS_BROWSER = "needs a browser and its driver; run: apt install chromium chromium-driver"
webdriver = pytest.importorskip("selenium.webdriver", reason=NEEDS_SELENIUM)

DOCS = Path(__file__).resolve().parent.parent
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
WIDTHS = (420, 1000, 1280)
BY_HAND = "setInterval = (next) => (tick = next); clearInterval = () => (tick = null);"


@pytest.fixture(scope="module")
def driver():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    service = shutil.which("chromedriver")
    if not (program and service):
        pytest.skip(NEEDS_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", dict(browser="ALL"))
    for flag in FLAGS:
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(service)) as driver:
        driver.implicitly_wait(10)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=BY_HAND))
        yield driver


@pytest.fixture(params=WIDTHS)
def browser(driver, request):
    """A window of one of the widths; whatever a test does there must not log an error."""
    size = dict(width=request.param, height=900, deviceScaleFactor=1, mobile=request.param < 500)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield driver
    assert not [line for line in driver.get_log("browser") if line["level"] != "INFO"]


def open_page(browser, name):
    browser.get("about:blank")  # so that a change of the hash alone loads the page
    browser.get(f"{DOCS.as_uri()}/{name}")
    assert_fits(browser)


def assert_fits(browser):
    wide, window = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= window, f"{browser.current_url}: {wide} pixels wide in a window of {window}"


def each(browser, selector, expression="e.textContent"):
    """The values of a JavaScript expression of e, for each element e."""
    script = f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})"
    return browser.execute_script(script, selector)


def find(browser, selector):
    return browser.find_element("css selector", selector)


def test_index(browser):
    """index.html: the image is there, and all links lead to pages."""
    open_page(browser, "index.html")
    assert min(each(browser, "img", "e.naturalWidth")) > 0
    links = each(browser, "a", "e.getAttribute('href')")
    assert len(links) >= 8 and {Path(link).suffix for link in links} == {".html"}


def test_guides(browser):
    """Every page made from Markdown fits, and so do its folded parts; its images are there."""
    for source in ["README.md", *DOCS.glob("*.md")]:
        open_page(browser, Path(source).stem.lower() + ".html")
        each(browser, "details", "e.open = true")
        assert_fits(browser)
        assert all(each(browser, "img", "e.naturalWidth")), f"{source}: no image"


def test_attention(browser):
    """attention.html: each film plays once when it is in view, and "it" attends to another noun."""
    open_page(browser, "attention.html")
    assert each(browser, "#descriptions button") == ["play"]
    for film in ("translations", "descriptions"):
        browser.execute_script(f"{film}.scrollIntoView({{block: 'center'}})")
        button = browser.find_element("xpath", f"//*[@id='{film}']/button[.='stop']")  # it plays
        slider = find(browser, f"#{film} input")
        last = slider.get_property("max")
        for _ in range(int(last)):
            browser.execute_script("tick()")  # what the timer would call
        assert (slider.get_property("value"), button.text) == (last, "play")
        button.click()
        assert (slider.get_property("value"), button.text) == ("0", "stop")
        slider.send_keys(webdriver.Keys.RIGHT)
        assert (slider.get_property("value"), button.text) == ("1", "play")
    for ending, pronoun in (("first", "il"), ("last", "elle")):
        find(browser, f"#endings button:{ending}-child").click()
        assert f" {pronoun} était trop" in find(browser, "#twin-said [lang]").text
    assert_fits(browser)


def test_papers(browser):
    """papers.html opens at bahdanau; no paper or pair of papers has a cut heading or equation."""
    open_page(browser, "papers.html")
    assert each(browser, "article:not([hidden])", "e.id") == ["bahdanau"]
    names = each(browser, "article", "e.id")
    pairs = ["+".join(pair) for pair in itertools.combinations(names[:-1], 2)]
    each(browser, "#bahdanau .eq a", "e.focus()")
    assert len(each(browser, ".lit")) >= 2  # an equation and its line
    for place in names + pairs:
        browser.execute_script("scrollTo(0, 9999); location.hash = arguments[0]", place)
        browser.execute_script("dispatchEvent(new Event('hashchange'))")  # rather than wait for it
        first, *_ = place.split("+")
        top, *_ = each(browser, f"#{first} h2", "e.getBoundingClientRect().top")
        bottom, *_ = each(browser, "nav", "e.getBoundingClientRect().bottom")
        assert 0 <= top < 900 and bottom <= top, f"#{place}: the heading is cut"
        cut = each(browser, ".formula", "e.scrollWidth > e.clientWidth && e.textContent")
        assert not any(cut), f"#{place} cuts equations: {cut}"
        assert_fits(browser)
