"""Tests of index.html, attention.html and papers.html in a real browser, at three widths.

pip install -r docs/make/requirements.txt && python -m pytest -q docs/make/test_pages.py

Without selenium, or without a browser and its driver (apt install chromium chromium-driver), they
are skipped.
"""

import itertools
import shutil
import time
from pathlib import Path

import pytest

NEEDS_SELENIUM = "needs selenium; run: pip install -r docs/make/requirements.txt"
NEEDS_BROWSER = "needs a browser and its driver; run: apt install chromium chromium-driver"
webdriver = pytest.importorskip("selenium.webdriver", reason=NEEDS_SELENIUM)

DOCS = Path(__file__).resolve().parent.parent
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
WIDTHS = (420, 1000, 1280)


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
    """index.html: the image is there, and every link leads to a file."""
    open_page(browser, "index.html")
    assert min(each(browser, "img", "e.naturalWidth")) > 0
    links = each(browser, "a", "e.getAttribute('href')")
    assert [link for link in links if not (DOCS / link).exists()] == []


def test_attention(browser):
    """attention.html: the two films play, and "it" attends to another noun."""
    open_page(browser, "attention.html")
    for name in ("", "-captions"):
        clock = find(browser, f"#clock{name}")
        trained = clock.text
        find(browser, f"#step{name}").send_keys(webdriver.Keys.HOME)
        start = clock.text
        find(browser, f"#play{name}").click()
        time.sleep(1.5)
        assert len({trained, start, clock.text}) == 3
    for ending, pronoun in (("first", "il"), ("last", "elle")):
        find(browser, f"#endings button:{ending}-child").click()
        assert f" {pronoun} était trop" in find(browser, "#twin-said [lang]").text
    assert_fits(browser)


def test_papers(browser):
    """papers.html cuts no heading and no equation, in any tab and for any two papers."""
    open_page(browser, "papers.html#luong")
    names = each(browser, "article", "e.id")
    pairs = ["+".join(pair) for pair in itertools.combinations(names[:-1], 2)]
    each(browser, "#luong .eq a", "e.focus()")
    assert len(each(browser, ".lit")) >= 2  # an equation and its line
    for place in names + pairs:
        browser.execute_script(
            """scrollTo(0, 9999);
            location.hash = arguments[0];
            dispatchEvent(new Event("hashchange")); // so that the page need not be awaited""",
            place,
        )
        first, *_ = place.split("+")
        top, *_ = each(browser, f"#{first} h2", "e.getBoundingClientRect().top")
        bottom, *_ = each(browser, "nav", "e.getBoundingClientRect().bottom")
        assert 0 <= top < 900 and bottom <= top, f"#{place}: the heading is cut"
        cut = each(browser, ".formula", "e.scrollWidth > e.clientWidth && e.textContent")
        assert not any(cut), f"#{place} cuts equations: {cut}"
        assert_fits(browser)
