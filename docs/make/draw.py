"""Draws attention.html and the figures of results.md and README.md from docs/runs.

python docs/make/draw.py          draws the data in docs/runs
python docs/make/draw.py --film   first trains the models again, about 15 minutes on two cores, and
                                  records their weights and outputs in docs/runs/film.json
"""

import html
import importlib
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

MAKE = Path(__file__).resolve().parent
DOCS = MAKE.parent
RECORDED = (0, 20, 40, 80, 120, 160, 240, 320, 480, 650, 900, 1250, 1600, 2000)  # and the last
CURVES = {  # curve -> color, visible on light and dark backgrounds
    "seq2seq_lstm.py, 1,000 units": "#d9483b",
    "bahdanau.py": "#2f7fd6",
    "luong.py without input feeding": "#d68a00",
    "luong.py with input feeding": "#8e5bd0",
    "transformer.py": "#1f9d6b",
}
BOTTLENECK = {
    "with attention": "#2f7fd6",
    "without": "#d9483b",
    "without, on training sentences": "#8a949e",
}
UNITS = (32, 64, 128, 256, 512, 1024)
SCRIPTS = {
    "seq2seq_lstm.py": "#d9483b",
    "bahdanau.py": "#2f7fd6",
    "luong.py": "#d68a00",
    "luong.py --input-feeding": "#8e5bd0",
    "transformer.py": "#1f9d6b",
}
STEPS = ("1-10", "11-20", "21-30", "31-40", "41-50", "> 50")
LENGTHS = ("1-10", "11-20", "21-30", "31-40", "41-50", "51-60")
STYLE = "text{fill:#6e7781}.grid{stroke:#8886}.cell{fill:#2f7fd6}"
FONT = 'font-family="sans-serif" font-size="13"'
BOLD = 'font-weight="bold"'
CENTERED = 'text-anchor="middle"'
TO_THE_LEFT = 'text-anchor="end"'


def read(name):
    return json.loads((DOCS / "runs" / name).read_text(encoding="utf-8"))


def write(name, content):
    (DOCS / "runs" / name).write_text(
        json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def write_svg(name, width, height, parts):
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>'
    lines = [head, f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    (DOCS / name).write_text("\n".join(lines), encoding="utf-8")


def text(x, y, words, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'


# ---- curves --------------------------------------------------------------------------------------
def read_lines(name):
    lines = (DOCS / "runs" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_length(name):
    """{curve: BLEU, a row per seed, a column per length} of the runs of a log that have a curve."""
    curves = {}
    for run in read_lines(name):
        if "curve" in run:
            scores = run["result"]["bleu_by_length"]
            row = [scores[length] for length in LENGTHS if length in scores]
            curves.setdefault(run["curve"], []).append(row)
    return {curve: np.array(rows) for curve, rows in curves.items()}


def by_units(length):
    """{curve: BLEU on sentences of a length, a row per seed, a column per size}."""
    scores = {}
    for run in read_lines("attention.jsonl"):
        if "curve" in run:
            column = UNITS.index(run["units"])
            sets = {"": run["result"], ", on training sentences": run["train"]}
            for name, result in sets.items():
                cells = scores.setdefault(run["curve"] + name, [[] for _ in UNITS])
                cells[column].append(result["bleu_by_length"][length])
    return {curve: table(cells) for curve, cells in scores.items()}


def table(columns):
    """An array with the given columns of different lengths, filled with NaN."""
    rows = itertools.zip_longest(*columns, fillvalue=np.nan)
    return np.array(list(rows))


def draw_panel(left, title, curves, ticks, colors, labels, below, scale=float):
    """A line per curve, the mean of its seeds, in a band from the worst seed to the best."""

    def x(k):
        return left + 30 + 62 * k

    def y(value):
        low, high = scale(ticks[0]), scale(ticks[-1])
        return 290 - 240 * (scale(value) - low) / (high - low)

    def points(columns, statistic):
        return [f"{x(k):.0f},{y(statistic(v)):.1f}" for k, v in columns if len(v)]

    parts = [text(left, 24, title, BOLD)]
    last = len(labels) - 1
    for tick in ticks:
        ends = f'x1="{left}" x2="{x(last) + 20}" y1="{y(tick):.0f}" y2="{y(tick):.0f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(text(left - 6, y(tick) + 4, f"{tick:,}", TO_THE_LEFT))
    for k, name in enumerate(labels):
        label = f"{name:,}" if isinstance(name, int) else name
        parts.append(text(x(k), 310, label, CENTERED))
    parts.append(text(x(last / 2), 330, below, CENTERED))
    for label, color in colors.items():
        if label not in curves:
            continue
        columns = [(k, values[~np.isnan(values)]) for k, values in enumerate(curves[label].T)]
        low, mean, high = (points(columns, statistic) for statistic in (np.min, np.mean, np.max))
        band = " ".join(low + high[::-1])
        parts.append(f'<polygon points="{band}" fill="{color}" opacity="0.2"/>')
        line = f'fill="none" stroke="{color}" stroke-width="2.5"'
        parts.append(f'<polyline points="{" ".join(mean)}" {line}/>')
    return parts


def draw_legend(colors, columns, rows):
    parts = []
    for n, (label, color) in enumerate(colors.items()):
        x, y = columns[n // rows], 352 + 22 * (n % rows)
        line = f'x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}"'
        parts.append(f'<line {line} stroke="{color}" stroke-width="4"/>')
        parts.append(text(x + 30, y, label))
    return parts


def draw_lengths():
    below = "words in the source sentence"
    long = by_length("long.jsonl")
    parts = draw_panel(50, "BLEU on long", long, range(0, 101, 20), CURVES, LENGTHS, below)
    europarl = by_length("europarl.jsonl")
    title = "BLEU, Europarl English-French"
    parts += draw_panel(490, title, europarl, range(0, 51, 10), CURVES, LENGTHS, below)
    write_svg("length.svg", 940, 390, parts + draw_legend(CURVES, (60, 345, 600), rows=2))


def draw_bottleneck():
    parts = draw_legend(BOTTLENECK, (60, 240, 360), rows=1)
    for left, length in ((50, "1-10"), (490, "21-30")):
        title = f"BLEU on sentences of {length} words"
        curves = by_units(length)
        ticks = range(0, 101, 20)
        parts += draw_panel(left, title, curves, ticks, BOTTLENECK, UNITS, "units")
    write_svg("bottleneck.svg", 940, 365, parts)


def draw_gradient():
    log = read_lines("gradient.jsonl")
    colors = {run["script"]: SCRIPTS[run["script"]] for run in log}
    parts = draw_legend(colors, (60, 230, 360, 470), rows=1)
    for left, state in ((60, "untrained"), (500, "trained")):
        curves = {}
        for run in log:
            if run["state"] == state:
                curves.setdefault(run["script"], []).append(run["gradient"])
        curves = {script: np.array(rows) for script, rows in curves.items()}
        ticks = (0.0001, 0.001, 0.01, 0.1, 1, 10)
        below = "LSTM steps between target word and source word"
        parts += draw_panel(left, state, curves, ticks, colors, STEPS, below, math.log)
    write_svg("gradient.svg", 950, 365, parts)


def draw_cost():
    parts = draw_legend(SCRIPTS, (60, 230, 360, 470, 690), rows=1)
    _, *log = read_lines("length.jsonl")
    lengths = sorted({entry["n"] for entry in log})
    panels = (
        (60, "training, ms per 1,000 tokens", "ms_per_1000_tokens", (0.3, 1, 3, 10, 30, 100)),
        (550, "greedy decoding of 64 sentences, ms per word", "ms_per_word", (0.1, 0.3, 1, 3, 10)),
    )
    for left, title, key, ticks in panels:
        curves = {}
        for entry in log:
            curves.setdefault(entry["name"].strip("`"), []).append(entry[key])
        curves = {name: np.array([values]) for name, values in curves.items()}
        below = "words in the source, and in the target"
        parts += draw_panel(left, title, curves, ticks, SCRIPTS, lengths, below, math.log)
    write_svg("cost.svg", 1060, 365, parts)


# ---- attention weights ---------------------------------------------------------------------------
def draw_weights(name, models, clock=None):
    """The weights of the first sentence of the film, after training or, with a clock, during it.

    The animation starts with a look at the end, because untrained weights look like an empty grid.
    """
    film = read("film.json")
    source, target = (side.split() for side in film["pairs"][0])
    times = sorted({n for model in film["models"][models] for n in model["steps"]})
    last = len(times) - 1
    shown = [last, last, *range(last), *[last] * 4] if clock else [last]  # which of the times
    left, top, wide = 96, 125, 15 * len(source) + 100
    bottom = top + 15 * len(target) + 18
    parts = []
    for model in film["models"][models]:
        no_weights = " (gradient)" if model["script"] == "seq2seq_lstm" else ""
        parts.append(text(left, 20, f"{model['script']}.py{no_weights}", BOLD))
        for i, word in enumerate(target):
            parts.append(text(left - 5, top + 12 + 15 * i, word, TO_THE_LEFT))
        weights = [as_weights(frame[0][0], len(source)) for frame in model["frames"]]
        frames = np.stack([weights[sum(n <= times[k] for n in model["steps"]) - 1] for k in shown])
        for j, word in enumerate(source):
            x = left + 15 * j
            place = f"translate({x + 11},{top - 7}) rotate(-90)"
            parts.append(f'<text transform="{place}">{html.escape(word)}</text>')
            for i in range(len(target)):
                parts.append(cell(x, top + 15 * i, frames[:, i, j], clock))
        left += wide
    width = left - 92
    for k, time in enumerate(times if clock else []):  # viewers without animation show the last
        states = ["visible" if n == k else "hidden" for n in shown]
        words = "after two minutes" if k == last else f"after {time:,} steps"
        place = f'x="{width / 2:.0f}" y="{bottom}" {CENTERED} {BOLD} visibility="{states[-1]}"'
        parts.append(f"<text {place}>{words}{animate('visibility', states, clock)}</text>")
    write_svg(name, width, bottom + 10, parts)


def cell(x, y, weights, clock):
    """A cell: its weight at every time; without animation, the last."""
    shades = [f"{0.06 + 0.94 * weight:.2f}".lstrip("0") for weight in weights]
    place = f'class="cell" x="{x}" y="{y}" width="14" height="14" opacity="{shades[-1]}"'
    if len(set(shades)) == 1:
        return f"<rect {place}/>"
    return f"<rect {place}>{animate('opacity', shades, clock)}</rect>"


def animate(attribute, values, clock):
    return f'<animate attributeName="{attribute}" values="{";".join(values)}" {clock}/>'


def as_text(alpha):
    """Two hexadecimal digits per weight, row by row."""
    return (alpha.clip(0, 1) * 255).round().astype(np.uint8).tobytes().hex()


def as_weights(text, columns):
    return np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, columns) / 255


def page():
    """attention.html: its template, with the recordings and logs of docs/runs inserted."""
    text = (MAKE / "attention_template.html").read_text(encoding="utf-8")
    for name in re.findall(r">/\* (\S+) \*/<", text):
        content = (DOCS / "runs" / name).read_text(encoding="utf-8").strip()
        if name.endswith(".jsonl"):
            content = f"[{','.join(content.splitlines())}]"
        text = text.replace(f"/* {name} */", content.replace("</", "<\\/"))
    return text


# ---- recording -----------------------------------------------------------------------------------
def film():
    """Trains and records the default models of the four scripts and the model of twins.py."""
    sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "corpus")]
    import twins  # here, because drawing needs no torch

    recorded = read("film.json")
    for model in recorded["models"]:
        script = importlib.import_module(model["script"])
        model["steps"], model["frames"] = train(script, recorded["pairs"])
    recorded["twins"] = twins.record(DOCS.parent / "runs" / "twins", seed=4)
    write("film.json", recorded)


def train(script, pairs):
    """A default run: the recorded steps and, for each, the weights and outputs of all pairs.

    The weights are those of the given translations (teacher forcing). The outputs are the model's.
    """
    import torch

    import data

    torch.backends.mkldnn.set_flags(False)  # as main of the scripts does on ARM
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--film"]:
        film()
    draw_bottleneck()
    draw_lengths()
    draw_gradient()
    draw_cost()
    draw_weights("alignment.svg", slice(4))
    draw_weights("learning.svg", slice(1, 4), 'dur="10s" repeatCount="3" calcMode="discrete"')
    (DOCS / "attention.html").write_text(page(), encoding="utf-8")
