"""Opens attention.html, papers.html and index.html in a real browser, and uses them.

python docs/make/check_page.py [folder for screenshots]

Needs chromium and chromedriver (apt install chromium chromium-driver). Speaks WebDriver, so that
nothing else has to be installed.
"""

import base64
import itertools
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PAGE = Path(__file__).resolve().parent.with_name("attention.html")
PORT = 9527
WIDTHS = (420, 800, 1000, 1100, 1200, 1280, 1366, 1440, 1920)
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"


def call(path, body=None, method=None):
    """One WebDriver command."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/session{path}",
        None if body is None else json.dumps(body).encode(),
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


class Browser:
    """A browser with the page open."""

    def __init__(self, profile):
        options = dict(args=[*FLAGS.split(), f"--user-data-dir={profile}"])
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": dict(browser="ALL")}
        body = dict(capabilities=dict(alwaysMatch=wanted))
        self.path = "/" + call("", body)["sessionId"]
        self.post("/url", url=PAGE.as_uri())

    def post(self, path, **body):
        return call(self.path + path, body)

    def run(self, script):
        return self.post("/execute/sync", script=script, args=[])

    def devtools(self, command, **params):
        return self.post("/goog/cdp/execute", cmd=command, params=params)

    def key(self, name):
        """Presses and releases a key, as a reader would."""
        keys = [dict(type=kind, value=name) for kind in ("keyDown", "keyUp")]
        self.post("/actions", actions=[dict(type="key", id="keys", actions=keys)])

    def hover(self, selector):
        """Moves the mouse over the first such element."""
        found = self.post("/element", using="css selector", value=selector)
        move = dict(type="pointerMove", duration=0, x=0, y=0, origin=found)
        self.post("/actions", actions=[dict(type="pointer", id="mouse", actions=[move])])

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(call(self.path + "/screenshot")))


def opacities(browser, figure):
    """Of a figure's cells."""
    found = f"[...document.querySelectorAll('#{figure} rect')]"
    return browser.run(f"return {found}.map(cell => cell.getAttribute('fill-opacity'))")


def lit(browser):
    """How many cells are lit, figure by figure."""
    count = "f => f.querySelectorAll('rect.lit').length"
    return browser.run(f"return [...document.querySelectorAll('#models figure')].map({count})")


def check(browser):
    """What a reader does: slider, mouse, keyboard, another sentence, play."""
    text = "return document.getElementById('{}').textContent"
    last = opacities(browser, "bahdanau")
    clock = browser.run(text.format("clock"))
    browser.run("document.getElementById('step').focus()")
    for _ in range(20):
        browser.key("\ue012")  # the left arrow: to the beginning of training
    assert browser.run(text.format("clock")) == "after 0 steps (untrained)" != clock
    assert browser.run("return document.querySelectorAll('#bahdanau .wrong').length") > 3
    assert opacities(browser, "bahdanau") != last
    assert max(map(float, opacities(browser, "bahdanau"))) < 0.5 < max(map(float, last))

    browser.hover("#luong .word:nth-of-type(5)")
    assert len(set(lit(browser))) == 1 and lit(browser)[0] > 3, lit(browser)
    notes = browser.run(
        "return [...document.querySelectorAll('#models .note')].map(n => n.textContent)"
    )
    assert all(": " in note and "0." in note for note in notes), notes
    browser.hover("h1")
    assert lit(browser) == [0, 0, 0, 0]
    browser.run("document.querySelector('#models .word').focus()")
    assert len(set(lit(browser))) == 1 and lit(browser)[0] > 3

    sentence = "document.getElementById('sentence')"
    change = f"{sentence}.dispatchEvent(new Event('change'))"
    browser.run(f"{sentence}.value = 3; {change}")
    assert len(opacities(browser, "bahdanau")) == 7 * 8
    browser.run(f"{sentence}.value = 0; {change}")
    browser.run("document.getElementById('play').click()")
    time.sleep(2.2)
    assert browser.run(text.format("clock")) not in ("after 0 steps (untrained)", clock)
    browser.run("document.getElementById('play').click()")
    check_pronoun(browser)
    check_captions(browser)
    check_log(browser)


def check_log(browser):
    errors = [line for line in browser.post("/se/log", type="browser") if line["level"] != "INFO"]
    assert not errors, errors


def check_pronoun(browser):
    """The section about "it": the last word, the nouns, all heads, another word."""
    words = "[...document.querySelector('#deciding .strip').children]"
    entry = "b => [b.firstChild.textContent, +b.style.getPropertyValue('--weight')]"
    weights = f"return Object.fromEntries({words}.map({entry}))"
    said = "return document.querySelector('#twin-said [lang]').textContent"
    nouns = "document.getElementById('nouns')"
    expected = [  # (noun, its pronoun) if the last word is "tired", and if it is "dangerous"
        [("animal", "il"), ("street", "elle")],
        [("cow", "elle"), ("park", "il")],
        [("dog", "il"), ("forest", "elle")],
    ]
    for n, pair in enumerate(expected):
        browser.run(f"{nouns}.value = {2 * n}; {nouns}.dispatchEvent(new Event('change'))")
        for ending, (noun, pronoun) in enumerate(pair):
            browser.run(f"document.querySelectorAll('#endings button')[{ending}].click()")
            found = browser.run(weights)
            assert found[noun] > 0.5 > found[pair[1 - ending][0]], found
            assert f" {pronoun} était trop" in browser.run(said)
    visible = "return document.getElementById('heads').offsetHeight > 0"
    assert not browser.run(visible)
    browser.run("document.getElementById('all-heads').click()")
    assert browser.run(visible)
    assert browser.run("return document.querySelectorAll('#heads rect.lit').length") == 8 * 14
    lit = "return document.querySelector('#heads text.lit').textContent"
    assert browser.run(lit) == "it"
    browser.run(f"{words}[1].click()")
    assert browser.run(lit) == "dog"


def check_captions(browser):
    """The section about images: the slider, another image, and where the models look."""
    words = "[...document.querySelectorAll('#captions-{} .looks > span')].slice(1)"
    texts = f"return {words}.map(e => e.textContent).join(' ')"
    bright = f"return {words}.map(e => e.querySelectorAll('rect').length - 1)"
    reference = "return document.getElementById('reference-caption').textContent"
    scene = "document.getElementById('scene')"
    browser.run("document.getElementById('step-captions').focus()")
    for _ in range(20):
        browser.key("\ue012")
    assert browser.run("return document.querySelectorAll('#captioners .wrong').length") > 10
    for _ in range(20):
        browser.key("\ue014")  # the right arrow: to the end of training
    captions = set()
    for k in range(3):
        browser.run(f"{scene}.value = {k}; {scene}.dispatchEvent(new Event('change'))")
        captions.add(browser.run(reference))
        for attention in ("soft", "hard"):
            assert browser.run(texts.format(attention)) == browser.run(reference)
            assert all(n >= 1 for n in browser.run(bright.format(attention)))
        assert set(browser.run(bright.format("hard"))) == {1}  # one location per word
        outlined = "return document.querySelectorAll('#captions-hard path').length"
        objects = (len(browser.run(reference).split()) + 1) // 5
        assert browser.run(outlined) == 4 * objects  # in the image; at size, color and shape
    assert len(captions) == 3


def open_page(browser, name, width=1400, height=900, scheme="light", media=""):
    """Opens a page of docs/ in a window of this size; it must not be wider than the window."""
    size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    browser.devtools("Emulation.setDeviceMetricsOverride", **size)
    feature = dict(name="prefers-color-scheme", value=scheme)
    browser.devtools("Emulation.setEmulatedMedia", features=[feature], media=media)
    browser.post("/url", url="about:blank")  # so that a change of the hash alone loads the page
    browser.post("/url", url=PAGE.parent.as_uri() + "/" + name)
    assert browser.run("return document.documentElement.scrollWidth") <= width, (name, width)


def visible(browser, selector):
    """The ids of the elements that are displayed."""
    found = f"[...document.querySelectorAll('{selector}')]"
    return browser.run(f"return {found}.filter(e => e.getClientRects().length).map(e => e.id)")


def check_papers(browser):
    """papers.html: mouse, keyboard, two papers, phone, dark mode, print, no JavaScript."""
    assert PAGE.with_name("papers.html").stat().st_size <= 1_000_000
    lit = "return [...document.querySelectorAll('.lit')].map(e => e.id || e.dataset.lines)"
    open_page(browser, "papers.html#bahdanau")
    assert visible(browser, "article > header") == [""]
    assert not browser.run("return performance.getEntriesByType('resource')"), "loads something"
    links = "[...document.querySelectorAll('.eq')].flatMap(e => e.dataset.lines.split(' '))"
    assert browser.run(f"return {links}.length") > 80
    assert browser.run(f"return {links}.every(id => document.getElementById(id))")
    line = browser.run("return document.querySelectorAll('#bahdanau .eq')[3].dataset.lines")
    eq = f".eq[data-lines='{line}']"
    browser.run(f'document.querySelector("{eq}").scrollIntoView({{block: "center"}})')
    for selector in (f"{eq} .label", f"#{line}"):  # the equation lights its line, and vice versa
        browser.hover(selector)
        assert sorted(browser.run(lit)) == [line, line], browser.run(lit)
        browser.hover("nav")
        assert not browser.run(lit)
    for selector in (f"{eq} a", f"#{line}"):
        browser.run(f'document.querySelector("{selector}").focus()')
        assert sorted(browser.run(lit)) == [line, line]
    browser.run("document.getElementById('beside').focus()")
    browser.key("L")  # chooses Luong
    browser.key("\ue007")
    assert browser.run("return location.hash") == "#bahdanau+luong"
    assert (
        len(visible(browser, "article > header"))
        == 2
        == len(visible(browser, "[data-topic=Attention]"))
    )
    tops = "[...document.querySelectorAll('.shown [data-topic=Attention]')].map(e => e.offsetTop)"
    assert browser.run(f"return new Set({tops}).size") == 1
    browser.run("location.hash = '#flags'")
    assert visible(browser, "#flags") == ["flags"]
    names = browser.run("return [...document.querySelectorAll('article')].map(e => e.id)")
    for name in [*names, "luong+transformer"]:
        for width, scheme in ((390, "light"), (390, "dark"), (1000, "dark")):
            open_page(browser, f"papers.html#{name}", width, scheme=scheme)
            assert visible(browser, "article.shown h2")
    assert (
        browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    )
    open_page(browser, "papers.html#luong", 794, media="print")
    assert not visible(browser, "nav, details") and visible(browser, "#luong .code [id]")
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    browser.post("/url", url=PAGE.with_name("papers.html").as_uri())
    browser.devtools("Emulation.setScriptExecutionDisabled", value=False)
    assert len(visible(browser, "article")) == len(names) and not visible(browser, "#beside")


def check_widths(browser):
    """papers.html cuts no equation, at any width, in any tab and for any two papers."""
    names = browser.run("return [...document.querySelectorAll('article')].map(e => e.id)")
    pairs = ["+".join(pair) for pair in itertools.combinations(names[:-1], 2)]
    cut = """return [...document.querySelectorAll('article.shown math')].filter((math) => {
      const box = math.closest('.formula, p, td, h3'), edge = box.getBoundingClientRect().right;
      return box.scrollWidth > box.clientWidth || math.getBoundingClientRect().right > edge + 1;
    }).map((math) => math.getAttribute('alttext'))"""
    for width in WIDTHS:
        open_page(browser, "papers.html", width)
        for name in [*names, *pairs]:
            browser.run(f"location.hash = '#{name}'; dispatchEvent(new Event('hashchange'))")
            found = browser.run(cut)
            assert not found, f"cut at {width} pixels, papers.html#{name}: {found}"


def check_first_screen(browser):
    """attention.html: the first heatmap is visible without scrolling."""
    for width, height in ((420, 800), (1280, 720)):
        open_page(browser, "attention.html", width, height)
        box = "document.querySelector('#models svg').getBoundingClientRect()"
        bottom = browser.run(f"return {box}.bottom")
        assert bottom <= height, f"{width} x {height}: the first heatmap ends at {bottom}"


def check_index(browser):
    """index.html: one screen, and every link leads to a file."""
    for width, height in ((1200, 800), (390, 844)):
        open_page(browser, "index.html", width, height, "dark")
        assert browser.run("return document.documentElement.scrollHeight") <= height
    assert browser.run("return document.querySelector('img').naturalWidth") > 0
    links = browser.run("return [...document.links].map(a => a.getAttribute('href'))")
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    assert len(links) > 8 and not missing, missing


def take_screenshots(browser, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, height, scheme in (
        ("light", 1200, 4300, "light"),
        ("dark", 1200, 4300, "dark"),
        ("phone", 400, 7700, "light"),
    ):
        browser.post("/refresh")
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        browser.devtools("Emulation.setDeviceMetricsOverride", **size)
        feature = dict(name="prefers-color-scheme", value=scheme)
        browser.devtools("Emulation.setEmulatedMedia", features=[feature])
        wide = "return document.documentElement.scrollWidth"
        assert browser.run(wide) <= width, "wider than the window"
        browser.run("scrollTo(0, 0)")
        browser.screenshot(folder / f"{name}.png")


def take_screenshots_of_papers(browser, folder):
    for name, address, options in (
        ("light", "papers.html#bahdanau", dict(height=2000)),
        ("dark", "papers.html#transformer", dict(height=2000, scheme="dark")),
        ("two", "papers.html#bahdanau+luong", dict(height=2000)),
        ("differences", "papers.html#notes", dict(height=2000)),
        ("phone", "papers.html#luong", dict(width=390, height=4000)),
        ("print", "papers.html#bahdanau", dict(width=794, height=3000, media="print")),
        ("index", "index.html", dict(width=1200, height=800)),
    ):
        open_page(browser, address, **options)
        browser.screenshot(folder / f"papers-{name}.png")


def main():
    assert PAGE.stat().st_size <= 1_000_000
    driver = subprocess.Popen(["chromedriver", f"--port={PORT}"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(profile)
            try:
                check(browser)
                if sys.argv[1:]:
                    take_screenshots(browser, Path(sys.argv[1]))
                check_papers(browser)
                check_widths(browser)
                check_first_screen(browser)
                check_index(browser)
                check_log(browser)
                if sys.argv[1:]:
                    take_screenshots_of_papers(browser, Path(sys.argv[1]))
            finally:
                call(browser.path, method="DELETE")
    finally:
        driver.terminate()
    print("the pages work")


if __name__ == "__main__":
    main()
