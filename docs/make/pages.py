"""Updates the line numbers in the documentation, then makes its pages from the Markdown files.

pip install -r docs/make/requirements.txt && python docs/make/pages.py

A link such as [`alpha = ...`](../bahdanau.py#L134) quotes the code of its line, so that its number
can be recomputed when the code moves. It means the first line of the file that contains the code.

Every Markdown file becomes a page. In papers.html, a "##" section of equations.md whose "###"
headings link to a script becomes a paper beside its code.
"""

import html
import itertools
import os
import re
import sys
from pathlib import Path

import pygments
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

MAKE = Path(__file__).resolve().parent
DOCS = MAKE.parent
ROOT = DOCS.parent
SOURCES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")
FORMULA = re.compile(r"^```math\n(.+?)\n```\n\n", re.M | re.S)
EQUATION = re.compile(
    rf"((?:{FORMULA.pattern})*)^\*\*([^*]+)\*\* (\[`.+?)(?=\n\n|\n*\Z)", re.M | re.S
)
FUNCTION = "<mi>(?:cos|exp|log|max|min|sin|tanh)</mi>"
THIN_SPACE = '<mspace width="0.17em"/>'


def update_links(page):
    """Corrects the line numbers in a Markdown file; returns an error per link without its code."""
    missing = []

    def correct(link):
        code, file, number = link.groups()
        lines = (page.parent / file).read_text(encoding="utf-8").split("\n")
        line = next((n for n, line in enumerate(lines, 1) if code in line), None)
        if not line:
            missing.append(f"{page.name}: {file} does not contain {code!r}; quote its new line")
        return f"[`{code}`]({file}#L{line or number})"

    text = page.read_text(encoding="utf-8")
    updated = LINK.sub(correct, text)
    if updated != text:
        page.write_text(updated, encoding="utf-8")
    return missing


# ---- equations ----------------------------------------------------------------------------------


def mathml(latex, display="inline"):
    """MathML of an equation; corrects what latex2mathml does with signs, words and spaces.

    All of it is inline, so that lines can break between the parts of a displayed equation.
    """
    out = convert(latex, display=display)
    style = ' displaystyle="true"' if display == "block" else ""
    out = f'<math alttext="{html.escape(latex)}"{style}>{out[out.index(">") + 1 :]}'
    out = re.sub(r"(<math[^>]*><mrow>)<mo>(?=&#x0002B;)", r'\1<mo form="infix">', out)
    out = out.replace("<mi>;</mi>", '<mo separator="true">;</mo>')
    out = out.replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")  # \sim
    out = re.sub("<mo>(max|min|&#x0221E;|&#x02202;)</mo>", r"<mi>\1</mi>", out)  # infinity, partial
    out = re.sub("(?<=</mo>)(?<!&#x00029;</mo>)<mo>&#x02212;", '<mo form="prefix">&#x02212;', out)
    out = out.replace('</mi><mi mathvariant="normal">', "")  # joins the letters of a word
    out = re.sub(f"(</m(?:i|n|sub|sup|subsup|row)>)(?={FUNCTION})", rf"\1{THIN_SPACE}", out)
    return re.sub(f"({FUNCTION})(?=<mi>)", rf"\1{THIN_SPACE}", out)


def displayed(latex):
    """A displayed equation. Where there is no room for one line, it breaks before its relation,
    after a \\quad or \\qquad, and at the line breaks of the LaTeX."""
    text = re.sub(r"\\(?:begin|end)\{aligned\}|&", "", latex).strip()
    text = re.sub(r" (?=(?:=|\\propto|\\approx) )", r"\\\\", text, count=1)
    parts = re.split(r"\s*\\\\\s*|(?<=quad) ", text)
    return "<div>" + "".join(mathml(part, "block") for part in parts) + "</div>"


def line_id(link):
    return f"{Path(link[2]).stem}-L{link[3]}"


def equation(match):
    """An equation (or none), its number, and links to its lines of code."""
    formulas, _, label, text = match.groups()
    formula = "".join(map(displayed, FORMULA.findall(formulas)))
    formula = f'<div class="formula">{formula}</div>' if formula else ""
    ids = " ".join(line_id(link) for link in LINK.finditer(text))
    text = LINK.sub(lambda link: f"[line {link[3]}](#{line_id(link)})", text)
    text = text.replace(")\\\n", ") ")  # no line break between links without a remark
    caption = f'<p>{MARKDOWN.renderInline(text)}</p><span class="label">{label}</span>'
    return f'<div class="eq" data-lines="{ids}">{formula}{caption}</div>'


# ---- text and code ------------------------------------------------------------------------------


def highlight(code, language, _=""):
    """HTML of code. To keep the pages small, only what style.css colors is marked."""
    lexer = get_lexer_by_name(language or "text")
    out = pygments.highlight(code, lexer, HtmlFormatter(nowrap=True))
    out = re.sub(r'<span class="(?!c|g|k|m|s|nf|nc|fm|ow)\w+">(.*?)</span>', r"\1", out)
    return re.sub(r'\.<span class="fm">(\w+)</span>', r".\1", out)  # calls: super().__init__()


MARKDOWN = MarkdownIt(options_update=dict(highlight=highlight)).enable("table")
MARKDOWN.use(anchors_plugin, max_level=4)  # the ids that GitHub gives to headings


def to_html(text):
    """HTML of a section. Markdown leaves HTML as it is, so mathematics is converted first."""
    text = re.sub(r"\$`(.+?)`\$", lambda match: mathml(match[1]), text)
    text = EQUATION.sub(equation, text)
    without_caption = FORMULA.search(text)
    assert not without_caption, f"equations.md: no caption after {without_caption[0]}"
    return MARKDOWN.render(text)


def listings(path, starts, linked):
    """HTML of the code up to the first start, folded, and from each start to the next one."""
    source = path.read_text(encoding="utf-8").rstrip("\n")
    lines = source.split("\n")
    code = highlight(source, "python").split("\n")
    ids = [f"{path.stem}-L{n}" for n in range(1, len(lines) + 1)]
    attributes = [f' id="{name}" tabindex="0"' if name in linked else "" for name in ids]
    rows = [f"<span{attribute}>{row}\n</span>" for attribute, row in zip(attributes, code)]

    def pre(first, last):  # without the empty lines at the end
        while not lines[last - 1]:
            last -= 1
        style = f"counter-reset: n {first - 1}"
        return f'<pre class="code" style="{style}">{"".join(rows[first - 1 : last])}</pre>'

    def fold(first, last):
        names = re.findall(r"^(?:class|def) (\w+)", "\n".join(lines[first - 1 : last]), re.M)
        names = ["docstring", "imports"] * (first == 1) + [f"<code>{name}</code>" for name in names]
        summary = f"<summary>lines {first} to {last}: {', '.join(names)}</summary>"
        return f"<details>{summary}{pre(first, last)}</details>"

    def decorated(n):  # the first decorator of the function in line n
        return decorated(n - 1) if lines[n - 2].strip().startswith("@") else n

    starts = [*map(decorated, starts), len(lines) + 1]
    out = [fold(1, starts[0] - 1)]
    for first, end in zip(starts, starts[1:]):
        inside = (n for n in range(first + 1, end) if re.match("@|class |def ", lines[n - 1]))
        cuts = [first, *(n for n in inside if decorated(n) == n), end]
        pieces = itertools.groupby(
            zip(cuts, cuts[1:]), lambda cut: any(attributes[cut[0] - 1 : cut[1] - 1])
        )
        out.append("")  # functions and classes without a linked line are folded
        for shown, group in pieces:
            group = list(group)
            out[-1] += (pre if shown else fold)(group[0][0], group[-1][1] - 1)
    return out


# ---- the page -----------------------------------------------------------------------------------


def paper(title, body, linked, notation):
    """(name of the script, article): the explanation of each section beside its code."""
    intro, *sections = re.split(r"^### ", body, flags=re.M)
    links = [LINK.search(section.split("\n")[0]) for section in sections]
    path = DOCS / next(link[2] for link in links if link)
    starts = [int(link[3]) for link in links if link]
    assert starts == sorted(starts), f"{title}: the sections are not in the order of the code"
    top, *code = listings(path, starts, linked)
    intro = to_html(intro) + f"<details><summary>Notation</summary>{notation}</details>"
    out = [f'<header><h2>{title}</h2>{intro}<div class="box">{top}</div></header>']
    for section, link in zip(sections, links):
        heading, text = section.split("\n", 1)
        topic, _, _ = heading.partition(": ")
        of = f' <a href="#{line_id(link)}"><code>{link[1]}</code></a>' if link else ""
        text = f'<div class="text"><h3>{topic}{of}</h3>{to_html(text)}</div>'
        text += f'<div class="listing box">{code.pop(0)}</div>' if link else ""
        name = "" if link else f' id="{topic.lower()}"'
        out.append(f'<section data-topic="{topic}"{name}>{text}</section>')
    return path.stem, f'<article id="{path.stem}">' + "\n".join(out) + "</article>"


def papers_page():
    """papers.html: the equations and the code, in the template."""
    tabs, articles, notes = [], [], []
    text = (DOCS / "equations.md").read_text(encoding="utf-8")
    linked = {line_id(link) for link in LINK.finditer(text)}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, body = section.split("\n", 1)
        if title == "Notation":  # folded, in every paper
            notation = to_html(body)
        elif re.search(r"^### .*#L", body, re.M):
            name, article = paper(title, body, linked, notation)
            tabs.append(f'<a href="#{name}">{title}</a>')
            articles.append(article)
        else:
            notes.append(f"<h2>{title}</h2>{to_html(body)}")
    page = (MAKE / "papers_template.html").read_text(encoding="utf-8")
    for place, parts in dict(tabs=tabs, articles=articles, notes=notes).items():
        page = page.replace(f"<!-- {place} -->", "\n".join(parts))
    return page


# ---- the other pages ----------------------------------------------------------------------------


def page_name(source):
    return f"{source.stem.lower()}.html"


def link_pages(text, source, ids):
    """Replaces links to Markdown files by links to pages, to code by links to papers.html."""

    def replace(match):
        attribute, path, anchor = match[1], match[2] or source.name, match[3] or ""
        if path == source.name and anchor[1:] in ids:
            return f'{attribute}="{anchor}"'
        target = (source.parent / path).resolve()
        if target in SOURCES:
            return f'{attribute}="{page_name(target)}{anchor}"'
        for name in (target.stem + anchor.replace("#", "-"), target.stem):
            if target.suffix == ".py" and name in ids:
                return f'{attribute}="papers.html#{name}"'
        return f'{attribute}="{os.path.relpath(target, DOCS)}{anchor}"'

    return re.sub(r'\b(href|src|srcset)="(?!\w+:)([^"#]*)(#[^"]*)?"', replace, text)


def guide(source, ids):
    """The page of a Markdown file, in the template."""
    text = source.read_text(encoding="utf-8")
    title = re.search("^# (.+)", text)[1]
    text = FORMULA.sub(lambda match: f'<div class="formula">{displayed(match[1])}</div>\n\n', text)
    text = re.sub(r"\$`(.+?)`\$", lambda match: mathml(match[1]), text)
    page = (MAKE / "guide_template.html").read_text(encoding="utf-8")
    page = page.replace(f'href="{page_name(source)}"', 'aria-current="page"')
    body = link_pages(MARKDOWN.render(text), source, ids)
    return page.replace("<!-- title -->", title).replace("<!-- body -->", body)


def build():
    """{name: HTML} of all pages that are made from Markdown."""
    papers = papers_page()
    ids = set(re.findall(' id="(.+?)"', papers))
    papers = link_pages(papers, DOCS / "equations.md", ids)
    guides = {page_name(source): guide(source, ids) for source in SOURCES}
    return {"papers.html": papers} | guides


def main():
    missing = [error for source in SOURCES for error in update_links(source)]
    if missing:
        sys.exit("\n".join(missing))
    for name, page in build().items():
        (DOCS / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
