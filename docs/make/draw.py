"""Draws length.svg, alignment.svg, learning.svg and attention.html from docs/runs.

python docs/make/draw.py          draws the data in docs/runs
python docs/make/draw.py --film   first trains the models again, about 15 minutes on two cores, and
                                  records their weights and outputs in docs/runs/film.json
"""

import html
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np

MAKE = Path(__file__).resolve().parent
DOCS = MAKE.parent
SCRIPTS = ["seq2seq_lstm", "bahdanau", "luong", "transformer"]
RECORDED = (0, 20, 40, 80, 120, 160, 240, 320, 480, 650, 900, 1250, 1600, 2000)  # and the last
SENTENCES = """
the agreement on the european economic area was signed in august 1992 .
l' accord sur la zone économique européenne a été signé en août 1992 .
her queen 's important economic law was signed .
la loi économique importante de sa reine a été signée .
the law was not signed in march 1996 .
la loi n' a pas été signée en mars 1996 .
i saw a cat on the mat
j' ai vu un chat sur le tapis
he hit me with a pie
il m' a frappé avec une tarte
you cannot see them .
vous ne pouvez pas les voir .
the decision that this king accepted was very important .
la décision que ce roi a acceptée était très importante .
we never loved the poor strange friends and her friend arrives .
nous n' avons jamais aimé les pauvres amis étranges et son ami arrive .
my girl 's house was empty .
la maison de ma fille était vide .
a girl has sung near the park .
une fille a chanté près du parc .
they admired us in august 1996 because my forest is loved .
ils nous ont admirés en août 1996 parce que ma forêt est aimée .
my famous boy does not find her cat that left us with a girl .
mon garçon célèbre ne trouve pas son chat qui nous a quittés avec une fille .
"""
COLORS = {  # visible on light and dark backgrounds
    "seq2seq_lstm": "#d9483b",
    "bahdanau": "#2f7fd6",
    "luong": "#d68a00",
    "transformer": "#1f9d6b",
    "seq2seq_lstm-large": "#d9483b",
    "luong-feeding": "#8e5bd0",
}
LABELS = {
    "seq2seq_lstm-large": "seq2seq_lstm.py, 1,000 units",
    "luong-feeding": "luong.py --input-feeding",
}
LENGTHS = ("1-10", "11-20", "21-30", "31-40", "41-50", "51-60")
STYLE = "text{fill:#6e7781}.grid{stroke:#8886}.cell{fill:#2f7fd6}"
FONT = 'font-family="sans-serif" font-size="13"'
BOLD = 'font-weight="bold"'
CENTERED = 'text-anchor="middle"'
TO_THE_LEFT = 'text-anchor="end"'


def write_svg(name, width, height, parts):
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>'
    lines = [head, f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    (DOCS / name).write_text("\n".join(lines))


def text(x, y, words, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'


def dashes(script):
    return ' stroke-dasharray="6 4"' if script in LABELS else ""


class Panel:
    """BLEU by source length: a curve per script, a band from its worst to its best seed."""

    def __init__(self, left, title, runs, top):
        self.left = left
        self.top = top
        self.parts = [text(left, 24, title, BOLD), *self.grid()]
        for script, seeds in runs.items():
            table = np.array([[seed[name] for name in LENGTHS] for seed in seeds])
            self.parts += self.curve(script, table)

    def x(self, k):
        return self.left + 30 + 62 * k

    def y(self, bleu):
        return 290 - 240 * bleu / self.top

    def grid(self):
        last = len(LENGTHS) - 1
        parts = []
        for bleu in range(0, self.top + 1, self.top // 5):
            y = self.y(bleu)
            ends = f'x1="{self.left}" x2="{self.x(last) + 20}" y1="{y:.0f}" y2="{y:.0f}"'
            parts.append(f'<line class="grid" {ends}/>')
            parts.append(text(self.left - 6, y + 4, str(bleu), TO_THE_LEFT))
        for k, name in enumerate(LENGTHS):
            parts.append(text(self.x(k), 310, name, CENTERED))
        parts.append(text(self.x(last / 2), 330, "words in the source sentence", CENTERED))
        return parts

    def points(self, values):
        return [f"{self.x(k):.0f},{self.y(value):.1f}" for k, value in enumerate(values)]

    def curve(self, script, table):  # table: a row per seed, a column per length
        color = COLORS[script]
        parts = []
        band = self.points(table.min(0)) + self.points(table.max(0))[::-1]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.2"/>')
        mean = self.points(table.mean(0))
        stroke = f'fill="none" stroke="{color}" stroke-width="2.5"{dashes(script)}'
        parts.append(f'<polyline points="{" ".join(mean)}" {stroke}/>')
        for point in mean:
            x, y = point.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
        return parts


def curve_of(run):
    """The key in COLORS of the curve that a run belongs to, or None."""
    script, flags = run["script"].removesuffix(".py"), run["flags"]
    if "--attention local-p" in flags:
        return None
    if "--hidden 1000" in flags:
        return f"{script}-large"
    return f"{script}-feeding" if "--input-feeding" in flags else script


def by_length(name):
    """{curve: [BLEU by length of each seed]} of an experiment."""
    curves = {}
    for line in (DOCS / "runs" / name).read_text().splitlines():
        run = json.loads(line)
        curves.setdefault(curve_of(run), []).append(run["result"]["bleu_by_length"])
    return {curve: curves[curve] for curve in COLORS if curve in curves}


def draw_lengths():
    built_in = by_length("long.jsonl")
    europarl = by_length("europarl.jsonl")
    parts = Panel(50, "BLEU, built-in corpus", built_in, 100).parts
    parts += Panel(490, "BLEU, Europarl English-French", europarl, 50).parts
    places = [(60, 352), (215, 352), (345, 352), (455, 352), (60, 374), (285, 374)]
    for (x, y), (script, color) in zip(places, COLORS.items()):
        ends = f'x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}"'
        parts.append(f'<line {ends} stroke="{color}" stroke-width="4"{dashes(script)}/>')
        parts.append(text(x + 30, y, LABELS.get(script, script + ".py")))
    write_svg("length.svg", 940, 390, parts)


def draw_alignments():
    """alignment.svg: the first sentence of the film in all four models, at the end of training."""
    film = json.loads((DOCS / "runs" / "film.json").read_text())
    source, target = (side.split() for side in film["pairs"][0])
    wide, parts, left = 92, [], 4
    for model in film["models"]:
        name = model["script"] + ".py"
        name += " (gradient)" if model["script"] == "seq2seq_lstm" else ""
        parts.append(text(left + wide, 24, name, BOLD))
        for j, word in enumerate(source):
            place = f"translate({left + wide + 15 * j + 12},125) rotate(-90)"
            parts.append(f'<text transform="{place}">{html.escape(word)}</text>')
        for i, word in enumerate(target):
            parts.append(text(left + wide - 5, 143 + 15 * i, word, TO_THE_LEFT))
        weights, _ = model["frames"][-1]
        for i, row in enumerate(as_weights(weights[0], len(source))):
            for j, weight in enumerate(row):
                place = f'x="{left + wide + 15 * j}" y="{131 + 15 * i}" width="14" height="14"'
                parts.append(f'<rect class="cell" {place} opacity="{0.06 + 0.94 * weight:.2f}"/>')
        left += wide + 15 * len(source) + 8
    write_svg("alignment.svg", left, 360, parts)


def film():
    """Trains and records the default models of the four scripts and the model of twins.py."""
    sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "corpus")]
    import twins  # here, because drawing needs no torch

    lines = SENTENCES.strip().split("\n")
    pairs = list(zip(lines[::2], lines[1::2]))
    models = []
    for name in SCRIPTS:
        steps, frames = train(importlib.import_module(name), pairs)
        models.append(dict(script=name, steps=steps, frames=frames))
    recorded = twins.record(DOCS.parent / "runs" / "twins", as_text)
    content = dict(pairs=pairs, models=models, twins=recorded)
    (DOCS / "runs" / "film.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")


def train(script, pairs):
    """A default run: the recorded steps and, for each, the weights and outputs of all pairs.

    The weights are those of the given translations (teacher forcing). The outputs are the model's.
    """
    import torch

    import data

    torch.backends.mkldnn.set_flags(False)
    cfg = script.Config()
    corpus = data.Corpus(cfg, train=None, valid=None, saved={})  # the built-in corpus
    cfg.src_vocab, cfg.tgt_vocab = map(len, corpus.vocabularies)
    torch.manual_seed(cfg.seed)
    model = script.Model(cfg)
    optimizer = script.make_optimizer(model, cfg)
    train_step = script.make_train_step(model, cfg, optimizer)
    steps = [n for n in RECORDED if n < cfg.steps] + [cfg.steps]
    frames = []
    batches = corpus.train.batches(cfg.batch_tokens, cfg.batch_sentences, cfg.seed)
    for n, batch in enumerate(batches):
        if n in steps:
            said = script.translate(model, [source for source, _ in pairs], corpus.vocabularies)
            alphas = script.alignments(model, pairs, corpus.vocabularies)
            weights = [as_text(alpha[:-1, :-1]) for alpha in alphas]
            frames.append([weights, [" ".join(words) for words in said]])
            print(script.__name__, n, *said[0], flush=True)
        if n == cfg.steps:
            return steps, frames
        torch.manual_seed(hash((cfg.seed, 0, n + 1)))  # as in script.train
        optimizer.param_groups[0]["lr"] = script.learning_rate(cfg, n + 1)
        train_step(*map(torch.from_numpy, batch))


def as_text(alpha):
    """Two hexadecimal digits per weight, row by row."""
    return (alpha.clip(0, 1) * 255).round().astype(np.uint8).tobytes().hex()


def as_weights(text, columns):
    return np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, columns) / 255


def page():
    """attention.html: its template, with each >/* name */< replaced by docs/runs/name.json."""
    text = (MAKE / "attention_template.html").read_text()
    for name in re.findall(r">/\* (\w+) \*/<", text):
        content = (DOCS / "runs" / f"{name}.json").read_text().strip()
        text = text.replace(f"/* {name} */", content.replace("</", "<\\/"))
    return text


def draw_learning(seconds=10):
    """learning.svg: the first sentence while three models train; without animation, the end.

    The animation starts with a look at the end, because untrained weights look like an empty grid.
    """
    film = json.loads((DOCS / "runs" / "film.json").read_text())
    source, target = (side.split() for side in film["pairs"][0])
    wide, parts, left = 92, [], 4
    times = sorted({n for model in film["models"][1:] for n in model["steps"]})
    clock = f'dur="{seconds}s" repeatCount="3" calcMode="discrete"'
    last = len(times) - 1
    shown = [last] * 2 + list(range(len(times))) + [last] * 3  # which of the times, with pauses
    for model in film["models"][1:]:
        parts.append(text(left + wide, 20, model["script"] + ".py", BOLD))
        for i, word in enumerate(target):
            parts.append(text(left + wide - 5, 137 + 15 * i, word, TO_THE_LEFT))
        weights = [as_weights(frame[0][0], len(source)) for frame in model["frames"]]
        frames = np.stack([weights[sum(n <= times[k] for n in model["steps"]) - 1] for k in shown])
        for j, word in enumerate(source):
            x = left + wide + 15 * j
            place = f"translate({x + 11},118) rotate(-90)"
            parts.append(f'<text transform="{place}">{html.escape(word)}</text>')
            for i in range(len(target)):
                parts.append(cell(x, 125 + 15 * i, frames[:, i, j], clock))
        left += wide + 15 * len(source) + 8
    bottom = 125 + 15 * len(target) + 18
    for k, time in enumerate(times):  # without animation the last step is shown
        states = ["visible" if n == k else "hidden" for n in shown]
        values = f'<animate attributeName="visibility" values="{";".join(states)}" {clock}/>'
        words = "after two minutes" if k == last else f"after {time:,} steps"
        still = "visible" if k == last else "hidden"
        place = f'x="{left / 2:.0f}" y="{bottom}" {CENTERED} {BOLD} visibility="{still}"'
        parts.append(f"<text {place}>{words}{values}</text>")
    write_svg("learning.svg", round(left), bottom + 10, parts)


def cell(x, y, weights, clock):
    """One animated cell: its weight at every recorded step; without animation, the last."""
    shades = [f"{0.06 + 0.94 * weight:.2f}".lstrip("0") for weight in weights]
    place = f'class="cell" x="{x}" y="{y}" width="14" height="14" opacity="{shades[-1]}"'
    if len(set(shades)) == 1:
        return f"<rect {place}/>"
    values = f'<animate attributeName="opacity" values="{";".join(shades)}" {clock}/>'
    return f"<rect {place}>{values}</rect>"


if __name__ == "__main__":
    if sys.argv[1:] == ["--film"]:
        film()
    draw_lengths()
    draw_alignments()
    draw_learning()
    (DOCS / "attention.html").write_text(page())
