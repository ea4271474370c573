"""Draws attention.html and the figures of results.md and README.md from docs/runs.

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
RECORDED = (0, 20, 40, 80, 120, 160, 240, 320, 480, 650, 900, 1250, 1600, 2000)  # and the last
CURVES = {  # curve -> color, visible on light and dark backgrounds
    "seq2seq_lstm.py, 256 units": "#d9483b",
    "seq2seq_lstm.py, about 1,000 units": "#8a6d5c",
    "bahdanau.py": "#2f7fd6",
    "luong.py without input feeding": "#d68a00",
    "luong.py with input feeding": "#8e5bd0",
    "transformer.py": "#1f9d6b",
}
STEPS = {"1,700 steps": "#8a949e", "6,800 steps": "#d68a00", "27,200 steps": "#2f7fd6"}
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


# ---- BLEU by length ------------------------------------------------------------------------------
def by_length(name):
    """{curve: BLEU, a row per seed, a column per length} of the runs of a log that have a curve."""
    curves = {}
    for line in (DOCS / "runs" / name).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if "curve" in run:
            scores = run["result"]["bleu_by_length"]
            row = [scores[length] for length in LENGTHS if length in scores]
            curves.setdefault(run["curve"], []).append(row)
    return {curve: np.array(rows) for curve, rows in curves.items()}


def draw_panel(left, title, curves, top, colors):
    """A line per curve, the mean of its seeds, in a band from the worst seed to the best."""

    def x(k):
        return left + 30 + 62 * k

    def y(bleu):
        return 290 - 240 * bleu / top

    def points(values):
        return [f"{x(k):.0f},{y(value):.1f}" for k, value in enumerate(values)]

    parts = [text(left, 24, title, BOLD)]
    lengths = LENGTHS[: next(iter(curves.values())).shape[1]]
    last = len(lengths) - 1
    for bleu in range(0, top + 1, top // 5):
        ends = f'x1="{left}" x2="{x(last) + 20}" y1="{y(bleu):.0f}" y2="{y(bleu):.0f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(text(left - 6, y(bleu) + 4, str(bleu), TO_THE_LEFT))
    for k, name in enumerate(lengths):
        parts.append(text(x(k), 310, name, CENTERED))
    parts.append(text(x(last / 2), 330, "words in the source sentence", CENTERED))
    for label, color in colors.items():
        if label not in curves:
            continue
        table = curves[label]
        band = " ".join(points(table.min(0)) + points(table.max(0))[::-1])
        mean = " ".join(points(table.mean(0)))
        parts.append(f'<polygon points="{band}" fill="{color}" opacity="0.2"/>')
        parts.append(f'<polyline points="{mean}" fill="none" stroke="{color}" stroke-width="2.5"/>')
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
    parts = draw_panel(50, "BLEU on long", by_length("long.jsonl"), 100, CURVES)
    europarl = by_length("europarl.jsonl")
    parts += draw_panel(490, "BLEU, Europarl English-French", europarl, 50, CURVES)
    write_svg("length.svg", 940, 390, parts + draw_legend(CURVES, (60, 345, 600), rows=2))


def draw_bottleneck():
    runs = by_length("attention.jsonl")
    parts = draw_legend(STEPS, (60, 215, 370), rows=1)
    for left, title, script in ((50, "without", "seq2seq_lstm.py"), (300, "with", "luong.py")):
        curves = {steps: runs[f"{script}, {steps}"] for steps in STEPS}
        parts += draw_panel(left, f"BLEU {title} attention", curves, 100, STEPS)
    write_svg("bottleneck.svg", 520, 365, parts)


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
    draw_weights("alignment.svg", slice(4))
    draw_weights("learning.svg", slice(1, 4), 'dur="10s" repeatCount="3" calcMode="discrete"')
    (DOCS / "attention.html").write_text(page(), encoding="utf-8")
