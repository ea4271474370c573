"""Updates the line numbers in the documentation, then builds papers.html from equations.md.

pip install latex2mathml && python docs/make/papers.py

A link such as [`alpha = ...`](../bahdanau.py#L134) quotes the code of its line, so that its number
can be recomputed when the code moves. If the file contains the quoted code more than once, the link
means its first occurrence after the last heading that links to this file, or else the first of all.

A "##" section of equations.md whose "###" headings link to a script becomes a paper of the page.
"""

import html
import itertools
import keyword
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

MAKE = Path(__file__).resolve().parent
DOCS = MAKE.parent
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")
BLOCK = re.compile(r"```(\w+)\n(.*?)\n```|[^\n]+(?:\n[^\n]+)*", re.S)
INLINE = re.compile(r"\$`(.+?)`\$|`(.+?)`|\[(.+?)\]\((.+?)\)|\*\*(.+?)\*\*|\*(.+?)\*", re.S)
FUNCTION = "<mi>(?:cos|exp|log|max|min|sin|tanh)</mi>"
PYTHON = re.compile(
    r"""(?P<c>\#[^\n]*)                            # comments
    | (?P<s>(?:\b[bfr]+)?("{3}|["']).*?(?<!\\)\3)  # strings
    | (?P<n>\b\d[\w.]*(?:(?<=e)-\d+)?)             # numbers
    | (?P<d>(?<=\bdef[ ])\w+|(?<=\bclass[ ])\w+)   # names that are defined
    | (?P<k>\b(?:%s)\b)                            # keywords"""
    % "|".join(keyword.kwlist),
    re.S | re.X,
)
THIN_SPACE = '<mspace width="0.17em"/>'


def update_links(page):
    """Corrects the line numbers in a Markdown file; returns an error per link without its code."""
    section = {}  # file -> line of the last heading that links to it
    missing = []

    def correct(link):
        code, file, _ = link.groups()
        lines = (page.parent / file).read_text(encoding="utf-8").split("\n")
        found = [n for n, line in enumerate(lines, 1) if code in line]
        if not found:
            missing.append(f"{page.name}: NOT FOUND in {file}: {code}")
            return link[0]
        line = next((n for n in found if n >= section.get(file, 1)), found[0])
        if link.string[link.string.rfind("\n", 0, link.start()) + 1] == "#":
            section[file] = line
        return f"[`{code}`]({file}#L{line})"

    text = page.read_text(encoding="utf-8")
    updated = LINK.sub(correct, text)
    if updated != text:
        page.write_text(updated, encoding="utf-8")
    return missing


# ---- Markdown, as far as equations.md uses it ---------------------------------------------------


def escape(text):
    return html.escape(text, quote=False)


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


def inline(text):
    """HTML of a text with mathematics, code, links, bold and italic words and line breaks."""
    out, end = [], 0
    for match in INLINE.finditer(text):
        math, code, label, target, bold, italic = match.groups()
        out.append(escape(text[end : match.start()]))
        if math:
            out.append(mathml(math))
        elif code:
            out.append(f"<code>{escape(code)}</code>")
        elif label:
            out.append(f'<a href="{target}">{inline(label)}</a>')
        else:
            out.append(f"<b>{inline(bold)}</b>" if bold else f"<em>{inline(italic)}</em>")
        end = match.end()
    return ("".join(out) + escape(text[end:])).replace("\\\n", "<br>")


def table(text):
    rows = [[inline(cell.strip()) for cell in row[1:-1].split("|")] for row in text.split("\n")]
    head = "<th>" + "</th><th>".join(rows[0]) + "</th>"
    body = "".join("<tr><td>" + "</td><td>".join(row) + "</td></tr>" for row in rows[2:])
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def line_id(link):
    return f"{Path(link[2]).stem}-L{link[3]}"


def displayed(latex):
    """A displayed equation. Where there is no room for one line, it breaks before its relation,
    after a \\quad or \\qquad, and at the line breaks of the LaTeX."""
    text = re.sub(r"\\(?:begin|end)\{aligned\}|&", "", latex).strip()
    text = re.sub(r" (?=(?:=|\\propto|\\approx) )", r"\\\\", text, count=1)
    parts = re.split(r"\s*\\\\\s*|(?<=quad) ", text)
    return "<div>" + "".join(mathml(part, "block") for part in parts) + "</div>"


def equation(formulas, caption):
    """An equation (or none), its number, and links to its lines of code."""
    label, text = re.match(r"\*\*(.+?)\*\* (.*)", caption, re.S).groups()
    ids = " ".join(line_id(link) for link in LINK.finditer(text))
    text = LINK.sub(lambda link: f"[line {link[3]}](#{line_id(link)})", text)
    formula = "".join(map(displayed, formulas))
    caption = inline(text.replace(")\\\n", ") "))  # no line break between links without a remark
    return (
        f'<div class="eq" data-lines="{ids}"><div class="formula">{formula}</div>'
        f'<p>{caption}</p><span class="label">{label}</span></div>'
    )


def to_html(text):
    """HTML of the blocks of a section; formulas belong to the caption that follows them."""
    out, formulas = [], []
    for match in BLOCK.finditer(text):
        block, kind, content = match[0], match[1], match[2]
        if kind == "math":
            formulas.append(content)
        elif re.match(r"\*\*.+?\*\* \[`", block):
            out.append(equation(formulas, block))
            formulas = []
        elif formulas:
            sys.exit(f"equations.md: no caption after the equation {formulas[-1]}")
        elif kind == "diff":
            rows = (f'<span class="diff{r[:1]}">{r}</span>' for r in escape(content).split("\n"))
            out.append("<pre>" + "\n".join(rows) + "</pre>")
        elif block.startswith("|"):
            out.append(table(block))
        elif block.startswith("### "):
            out.append(f"<h3>{inline(block[4:])}</h3>")
        else:
            out.append(f"<p>{inline(block)}</p>")
    return "\n".join(out)


# ---- code ---------------------------------------------------------------------------------------


def highlight(source):
    """The lines of a Python file as HTML, with comments, strings, keywords and so on marked."""
    out, end = [], 0
    for match in PYTHON.finditer(source):
        rows = escape(match[0]).split("\n")
        marked = "\n".join(f"<i class={match.lastgroup}>{row}</i>" for row in rows)
        out.append(escape(source[end : match.start()]) + marked)
        end = match.end()
    return ("".join(out) + escape(source[end:])).split("\n")


def listings(path, starts, linked):
    """HTML of the code up to the first start, folded, and from each start to the next one."""
    source = path.read_text(encoding="utf-8").rstrip("\n")
    lines = source.split("\n")
    ids = [f"{path.stem}-L{n}" for n in range(1, len(lines) + 1)]
    ids = [f' id="{name}" tabindex="0"' if name in linked else "" for name in ids]
    rows = [f"<span{name}>{row}\n</span>" for name, row in zip(ids, highlight(source))]

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
            zip(cuts, cuts[1:]), lambda cut: any(ids[cut[0] - 1 : cut[1] - 1])
        )
        out.append("")  # functions and classes without a linked line are folded
        for shown, group in pieces:
            group = list(group)
            out[-1] += (pre if shown else fold)(group[0][0], group[-1][1] - 1)
    return out


# ---- the page -----------------------------------------------------------------------------------


def paper(title, body, linked):
    """(name of the script, article): the explanation of each section beside its code."""
    intro, *sections = re.split(r"^### ", body, flags=re.M)
    links = [LINK.search(section.split("\n")[0]) for section in sections]
    path = DOCS / links[0][2]
    starts = [int(link[3]) for link in links if link]
    assert starts == sorted(starts), f"{title}: the sections are not in the order of the code"
    top, *code = listings(path, starts, linked)
    out = [f"<header><h2>{title}</h2>{to_html(intro)}{top}</header>"]
    for section, link in zip(sections, links):
        heading, text = section.split("\n", 1)
        topic, _, _ = heading.partition(": ")
        of = f' <a href="#{line_id(link)}"><code>{link[1]}</code></a>' if link else ""
        text = f'<div class="text"><h3>{topic}{of}</h3>{to_html(text)}</div>'
        text += f'<div class="listing">{code.pop(0)}</div>' if link else ""
        name = "" if link else f' id="{topic.lower()}"'
        out.append(f'<section data-topic="{topic}"{name}>{text}</section>')
    return path.stem, f'<article id="{path.stem}">' + "\n".join(out) + "</article>"


def build():
    tabs, articles, notes = [], [], []
    text = (DOCS / "equations.md").read_text(encoding="utf-8")
    linked = {line_id(link) for link in LINK.finditer(text)}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, body = section.split("\n", 1)
        if re.search(r"^### .*#L", body, re.M):
            name, article = paper(title, body, linked)
            tabs.append(f'<a href="#{name}">{title}</a>')
            articles.append(article)
        else:
            notes.append(f"<h2>{title}</h2>{to_html(body)}")
    page = (MAKE / "papers_template.html").read_text(encoding="utf-8")
    for place, parts in dict(tabs=tabs, articles=articles, notes=notes).items():
        page = page.replace(f"<!-- {place} -->", "\n".join(parts))
    (DOCS / "papers.html").write_text(page, encoding="utf-8")


def main():
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    missing = [error for page in pages for error in update_links(page)]
    if missing:
        sys.exit("\n".join(missing))
    build()


if __name__ == "__main__":
    main()
