"""Draws the two figures, length.svg and alignment.svg, from the logs in docs/runs.

python docs/draw.py                            from what is there
python docs/draw.py runs/seq2seq_lstm ...      takes these runs' alignments first
"""

import html
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
COLORS = {  # seen on light and on dark
    "seq2seq_lstm": "#d9483b",
    "bahdanau": "#2f7fd6",
    "luong": "#d68a00",
    "luong-feeding": "#8e5bd0",
    "transformer": "#1f9d6b",
}
STYLE = "text{fill:#6e7781}.grid{stroke:#8886}.cell{fill:#2f7fd6}"
FONT = 'font-family="sans-serif" font-size="13"'
BOLD = 'font-weight="bold"'
CENTRED = 'text-anchor="middle"'
TO_THE_LEFT = 'text-anchor="end"'


def write_svg(name, width, height, parts):
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>'
    lines = [head, f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    (HERE / name).write_text("\n".join(lines))


def text(x, y, words, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'


def dashes(script):
    return ' stroke-dasharray="6 4"' if script.endswith("-feeding") else ""


class Panel:
    """BLEU against source length: a curve a script, a band from its worst seed to its best."""

    def __init__(self, left, title, runs, top):
        self.left = left
        self.top = top
        self.names = list(next(iter(runs.values()))[0])  # 1-10, 11-20, ...
        self.parts = [text(left, 24, title, BOLD), *self.grid()]
        for script, seeds in runs.items():
            table = np.array([[seed[name] for name in self.names] for seed in seeds])
            self.parts += self.curve(script, table)

    def x(self, k):
        return self.left + 30 + 62 * k

    def y(self, bleu):
        return 290 - 240 * bleu / self.top

    def grid(self):
        last = len(self.names) - 1
        parts = []
        for bleu in range(0, self.top + 1, self.top // 5):
            y = self.y(bleu)
            ends = f'x1="{self.left}" x2="{self.x(last) + 20}" y1="{y:.0f}" y2="{y:.0f}"'
            parts.append(f'<line class="grid" {ends}/>')
            parts.append(text(self.left - 6, y + 4, str(bleu), TO_THE_LEFT))
        for k, name in enumerate(self.names):
            parts.append(text(self.x(k), 310, name, CENTRED))
        parts.append(text(self.x(last / 2), 330, "words in the source sentence", CENTRED))
        return parts

    def points(self, values):
        return [f"{self.x(k):.0f},{self.y(value):.1f}" for k, value in enumerate(values)]

    def curve(self, script, table):  # table: a row a seed, a column a length
        color = COLORS[script]
        parts = []
        if len(table) > 1:
            band = self.points(table.min(0)) + self.points(table.max(0))[::-1]
            parts.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.2"/>')
        mean = self.points(table.mean(0))
        stroke = f'fill="none" stroke="{color}" stroke-width="2.5"{dashes(script)}'
        parts.append(f'<polyline points="{" ".join(mean)}" {stroke}/>')
        for point in mean:
            x, y = point.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
        return parts


def by_length(pattern):
    """{script: [BLEU by length of each seed]}, from the last lines of the logs."""
    runs = {}
    for script in COLORS:
        for path in sorted((HERE / "runs").glob(pattern.format(script))):
            result = json.loads(path.read_text().splitlines()[-1])
            runs.setdefault(script, []).append(result["bleu_by_length"])
    return runs


def draw_lengths():
    built_in = by_length("built-in-{}-?.jsonl")
    europarl = by_length("europarl-{}.jsonl")
    parts = Panel(50, "BLEU, built-in corpus, three seeds", built_in, 100).parts
    parts += Panel(490, "BLEU, Europarl English-French, one seed", europarl, 50).parts
    for x, (script, color) in zip((60, 215, 345, 455, 670), COLORS.items()):
        ends = f'x1="{x}" x2="{x + 24}" y1="348" y2="348"'
        parts.append(f'<line {ends} stroke="{color}" stroke-width="4"{dashes(script)}/>')
        name = script.removesuffix("-feeding") + ".py"
        parts.append(text(x + 30, 352, name + (" --input-feeding" if dashes(script) else "")))
    write_svg("length.svg", 940, 365, parts)


def draw_alignments():
    """One sentence under all four: a row a French word, a column the English word it came from."""
    parts = []
    left = 4
    for line in (HERE / "runs" / "alignment.jsonl").read_text().splitlines():
        run = json.loads(line)
        source, target = run["source"], run["target"]
        wide = 12 + 7.4 * max(map(len, target))
        name = run["script"] + ".py" + (" (gradient)" if run["script"] == "seq2seq_lstm" else "")
        parts.append(text(left + wide, 24, name, BOLD))
        for j, word in enumerate(source):
            place = f"translate({left + wide + 15 * j + 12:.0f},125) rotate(-90)"
            parts.append(f'<text transform="{place}">{html.escape(word)}</text>')
        for i, word in enumerate(target):
            parts.append(text(left + wide - 5, 143 + 15 * i, word, TO_THE_LEFT))
        for i, row in enumerate(run["alpha"]):
            for j, weight in enumerate(row):
                place = f'x="{left + wide + 15 * j:.0f}" y="{131 + 15 * i}" width="14" height="14"'
                parts.append(f'<rect class="cell" {place} opacity="{0.06 + 0.94 * weight:.2f}"/>')
        left += wide + 15 * len(source) + 8
    write_svg("alignment.svg", round(left), 360, parts)


def collect(folders):
    """The first pair of each run's align.npz, data.EXAMPLE, into runs/alignment.jsonl."""
    lines = []
    for folder in map(Path, folders):
        run = np.load(folder / "align.npz")
        line = dict(
            script=next(name for name in COLORS if folder.name.startswith(name)),
            source=str(run["source"][0]).split(),
            target=str(run["target"][0]).split(),
            alpha=run["alpha_0"][:-1, :-1].astype(float).round(3).tolist(),
        )
        lines.append(json.dumps(line))
    (HERE / "runs" / "alignment.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(sys.argv[1:])
    draw_lengths()
    draw_alignments()
