"""Draws attention.html and the figures of results.md, speed.md and README.md from docs/runs.

python docs/make/draw.py          draws the data in docs/runs
python docs/make/draw.py --film   first trains the models again, about 25 minutes on two cores, and
                                  records their weights and outputs: film.json and captions.json
"""

import html
import importlib
import json
import math
import re
import sys
from bisect import bisect
from collections import defaultdict
from pathlib import Path

import numpy as np

DOCS = Path(__file__).resolve().parents[1]
RED, BLUE, ORANGE, PURPLE, GREEN = "#d9483b", "#2f7fd6", "#d68a00", "#8e5bd0", "#1f9d6b"
BOTTLENECK = {"with attention": BLUE, "without": RED, "without, on training sentences": "#8a949e"}
CURVES = {
    "seq2seq_lstm.py, 1,000 units": RED,
    "bahdanau.py": BLUE,
    "luong.py without input feeding": ORANGE,
    "luong.py with input feeding": PURPLE,
    "transformer.py": GREEN,
}
SCRIPTS = {
    "seq2seq_lstm.py": RED,
    "bahdanau.py": BLUE,
    "luong.py": ORANGE,
    "luong.py --input-feeding": PURPLE,
    "transformer.py": GREEN,
}
STYLE = "text{fill:#6e7781}.grid{stroke:#8886}.cell{fill:#2f7fd6}"
BOLD = 'font-weight="bold"'
CENTERED = 'text-anchor="middle"'
TO_THE_LEFT = 'text-anchor="end"'
CLOCK = 'dur="10s" repeatCount="3" calcMode="discrete"'
OUTLINE = 'fill="none" stroke="#ffc400" stroke-width="1.3"'


def read_json(name):
    """A file of docs/runs as JSON; a log is a list."""
    content = (DOCS / "runs" / name).read_text(encoding="utf-8").strip()
    return f"[{','.join(content.splitlines())}]" if name.endswith(".jsonl") else content


def read(name):
    return json.loads(read_json(name))


def write(name, content):
    line = json.dumps(content, ensure_ascii=False) + "\n"
    (DOCS / "runs" / name).write_text(line, encoding="utf-8")


def write_svg(name, width, height, parts):
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    )
    lines = [head, f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    (DOCS / name).write_text("\n".join(lines), encoding="utf-8")


def text(x, y, words, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'


# ---- curves --------------------------------------------------------------------------------------
def draw_panel(left, title, points, ticks, colors, labels, below, scale=float):
    """A line per curve, the mean of its seeds, in a band from the worst seed to the best. Points
    are triples (curve, label, value); those of other curves and labels are left out."""
    seeds = defaultdict(list)
    for curve, label, value in points:
        seeds[curve, label].append(value)
    columns = {label: left + 30 + 62 * k for k, label in enumerate(labels)}  # label -> x
    right = columns[labels[-1]] + 20

    def y(value):
        low, high = scale(ticks[0]), scale(ticks[-1])
        return 290 - 240 * (scale(value) - low) / (high - low)

    parts = [text(left, 24, title, BOLD)]
    for tick in ticks:
        ends = f'x1="{left}" x2="{right}" y1="{y(tick):.0f}" y2="{y(tick):.0f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(text(left - 6, y(tick) + 4, f"{tick:,}", TO_THE_LEFT))
    for label, x in columns.items():
        words = f"{label:,}" if isinstance(label, int) else label
        parts.append(text(x, 310, words, CENTERED))
    parts.append(text((left + right + 10) / 2, 330, below, CENTERED))
    for curve, color in colors.items():
        found = [
            (x, seeds[curve, label]) for label, x in columns.items() if (curve, label) in seeds
        ]
        if found:
            low, mean, high = (
                [f"{x},{y(statistic(values)):.1f}" for x, values in found]
                for statistic in (min, np.mean, max)
            )
            band = " ".join(low + high[::-1])
            parts.append(f'<polygon points="{band}" fill="{color}" opacity="0.2"/>')
            line = f'fill="none" stroke="{color}" stroke-width="2.5"'
            parts.append(f'<polyline points="{" ".join(mean)}" {line}/>')
    return parts


def draw_legend(colors, columns, rows=1):
    parts = []
    for n, (label, color) in enumerate(colors.items()):
        x, y = columns[n // rows], 352 + 22 * (n % rows)
        line = f'x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}"'
        parts.append(f'<line {line} stroke="{color}" stroke-width="4"/>')
        parts.append(text(x + 30, y, label))
    return parts


def draw_lengths():
    panels = (
        (50, "BLEU on long", "long.jsonl", range(0, 101, 20)),
        (490, "BLEU, Europarl English-French", "europarl.jsonl", range(0, 51, 10)),
    )
    labels = ("1-10", "11-20", "21-30", "31-40", "41-50", "51-60")
    below = "words in the source sentence"
    parts = []
    for left, title, log, ticks in panels:
        points = []
        for run in read(log):
            scores = run["result"]["bleu_by_length"]
            points += [(run.get("curve"), *point) for point in scores.items()]
        parts += draw_panel(left, title, points, ticks, CURVES, labels, below)
    write_svg("length.svg", 940, 390, parts + draw_legend(CURVES, (60, 345, 600), rows=2))


def draw_bottleneck():
    parts = draw_legend(BOTTLENECK, (60, 240, 360))
    runs = [run for run in read("attention.jsonl") if "curve" in run]
    units = sorted({run["units"] for run in runs})
    for left, length in ((50, "1-10"), (490, "21-30")):
        points = []
        for run in runs:
            for key, name in dict(result="", train=", on training sentences").items():
                score = run[key]["bleu_by_length"][length]
                points.append((run["curve"] + name, run["units"], score))
        title = f"BLEU on sentences of {length} words"
        parts += draw_panel(left, title, points, range(0, 101, 20), BOTTLENECK, units, "units")
    write_svg("bottleneck.svg", 940, 365, parts)


def draw_gradient():
    log = read("gradient.jsonl")
    colors = {run["script"]: SCRIPTS[run["script"]] for run in log}
    parts = draw_legend(colors, (60, 230, 360, 470))
    ticks = (0.0001, 0.001, 0.01, 0.1, 1, 10)
    labels = ("1-10", "11-20", "21-30", "31-40", "41-50", "> 50")
    below = "LSTM steps between target word and source word"
    for left, state in ((60, "untrained"), (500, "trained")):
        points = []
        for run in log:
            if run["state"] == state:
                points += [(run["script"], *point) for point in zip(labels, run["gradient"])]
        parts += draw_panel(left, state, points, ticks, colors, labels, below, math.log)
    write_svg("gradient.svg", 950, 365, parts)


def draw_cost():
    panels = (
        (60, "training, ms per 1,000 tokens", "ms_per_1000_tokens", (0.3, 1, 3, 10, 30, 100)),
        (550, "greedy decoding of 64 sentences, ms per word", "ms_per_word", (0.1, 0.3, 1, 3, 10)),
    )
    parts = draw_legend(SCRIPTS, (60, 230, 360, 470, 690))
    _, *log = read("length.jsonl")
    lengths = sorted({entry["n"] for entry in log})
    below = "words in the source, and in the target"
    for left, title, key, ticks in panels:
        points = [(entry["name"].strip("`"), entry["n"], entry[key]) for entry in log]
        parts += draw_panel(left, title, points, ticks, SCRIPTS, lengths, below, math.log)
    write_svg("cost.svg", 1060, 365, parts)


# ---- attention weights ---------------------------------------------------------------------------
def as_text(alpha):
    """Two hexadecimal digits per weight, row by row."""
    return (alpha.clip(0, 1) * 255).round().astype(np.uint8).tobytes().hex()


def as_weights(text, columns):
    return np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, columns) / 255


def draw_weights(name, models, end=None):
    """The weights of the first sentence of the film at the end of training or, with a label for the
    end, an animation. It starts with the end: untrained weights look like an empty grid."""
    film = read("film.json")
    source, target = (side.split() for side in film["pairs"][0])
    *times, last = sorted({n for model in film["models"][models] for n in model["steps"]})
    shown = [last, last, *times, last, last, last, last] if end else [last]
    left, top, wide = 96, 125, 15 * len(source) + 100
    bottom = top + 15 * len(target) + 18
    parts = []
    for model in film["models"][models]:
        no_weights = " (gradient)" if model["script"] == "seq2seq_lstm" else ""
        parts.append(text(left, 20, f"{model['script']}.py{no_weights}", BOLD))
        for i, word in enumerate(target):
            parts.append(text(left - 5, top + 12 + 15 * i, word, TO_THE_LEFT))
        frames = [model["frames"][bisect(model["steps"], time) - 1] for time in shown]
        weights = np.stack([as_weights(frame[0][0], len(source)) for frame in frames])
        for j, word in enumerate(source):
            x = left + 15 * j
            place = f"translate({x + 11},{top - 7}) rotate(-90)"
            parts.append(f'<text transform="{place}">{html.escape(word)}</text>')
            for i in range(len(target)):
                shades = [f"{0.06 + 0.94 * weight:.2f}".lstrip("0") for weight in weights[:, i, j]]
                place = f'class="cell" x="{x}" y="{top + 15 * i}" width="14" height="14"'
                parts.append(animated("rect", place, "opacity", shades))
        left += wide
    width = left - 92
    for time in [*times, last] if end else []:  # viewers without animation show the last
        states = ["visible" if n == time else "hidden" for n in shown]
        place = f'x="{width / 2:.0f}" y="{bottom}" {CENTERED} {BOLD}'
        words = end if time == last else f"after {time:,} steps"
        parts.append(animated("text", place, "visibility", states, words))
    write_svg(name, width, bottom + 10, parts)


def animated(tag, place, attribute, values, words=""):
    """An element with an attribute that changes, unless all values are equal; the last remains."""
    place = f'{place} {attribute}="{values[-1]}"'
    if len(set(values)) == 1:
        return f"<{tag} {place}/>"
    steps = f'<animate attributeName="{attribute}" values="{";".join(values)}" {CLOCK}/>'
    return f"<{tag} {place}>{words}{steps}</{tag}>"


def light(weights):
    """Attention on an image: a dark layer, and white cells, the larger the weight the brighter."""
    levels = np.round(8 * weights / weights.max()).astype(int)
    paths = ['<path d="M0 0h48v48h-48z" opacity="0.5"/>']
    for level in sorted({*levels} - {0}):
        corners = [(6 * (i % 8), 6 * (i // 8)) for i in np.flatnonzero(levels == level)]
        cells = "".join(f"M{x} {y}h6v6h-6z" for x, y in corners)
        paths.append(f'<path d="{cells}" fill="#fff" opacity="{0.85 * level / 8:.2f}"/>')
    return "".join(paths)


def draw_captions():
    """Two images and, for each word and model of show_attend_tell.py, where the model looked."""
    film = read("captions.json")
    panel, left = 66, 150  # side of a panel, x of the first panel
    height = 2 * panel + 50
    parts = []
    for k, y in enumerate((0, height)):
        size = 'width="48" height="48" style="image-rendering:pixelated"'
        parts.append(f'<defs><image id="scene{k}" href="{film["images"][k]}" {size}/></defs>')
        parts.append(f'<use href="#scene{k}" transform="translate(4,{y + 44}) scale(2)"/>')
        for row, model in enumerate(film["models"]):
            top = y + 24 + (panel + 6) * row
            label = f'transform="rotate(-90)" {BOLD} {CENTERED}'
            parts.append(text(-(top + panel / 2), left - 10, model["attention"], label))
            weights = as_weights(model["frames"][-1][0][k], 64)
            for i, owner in enumerate(film["owners"][k]):
                look = f'<use href="#scene{k}"/>{light(weights[i])}'
                if owner >= 0:
                    look += f'<path d="{film["outlines"][k][owner]}" {OUTLINE}/>'
                place = f"translate({left + (panel + 4) * i},{top}) scale({panel / 48})"
                parts.append(f'<g transform="{place}">{look}</g>')
        for i, word in enumerate(film["references"][k].split()):
            parts.append(text(left + (panel + 4) * i + panel / 2, y + 16, word, CENTERED))
    width = left + (panel + 4) * max(map(len, film["owners"][:2]))
    write_svg("captions.svg", width, 2 * height - 10, parts)


def page():
    """attention.html: its template, with the recordings and logs of docs/runs inserted."""
    text = (DOCS / "make" / "attention_template.html").read_text(encoding="utf-8")
    for name in re.findall(r">/\* (\S+) \*/<", text):
        text = text.replace(f"/* {name} */", read_json(name).replace("</", "<\\/"))
    return text


# ---- recording -----------------------------------------------------------------------------------
def film():
    """Trains and records the models of attention.html, for the sentences and images recorded."""
    sys.path[:0] = [str(DOCS), str(DOCS.parent), str(DOCS.parent / "corpus")]
    import twins  # here, because drawing needs no torch

    recorded = read("film.json")
    for model in recorded["models"]:
        script = importlib.import_module(model["script"])
        untrained = twins.prepare(script)
        model["steps"], model["frames"] = train(script, *untrained, recorded["pairs"])
    recorded["twins"] = twins.record(DOCS.parent / "runs" / "twins", seed=4)
    write("film.json", recorded)
    recorded = read("captions.json")
    for model in recorded["models"]:
        model["frames"] = train_captions(model, recorded["references"])
    write("captions.json", recorded)


def train(script, corpus, model, pairs):
    """A default run: the recorded steps and, for each, the outputs of the model for all pairs and
    the weights of the given translations (teacher forcing)."""
    import torch

    cfg = model.cfg
    optimizer = script.make_optimizer(model, cfg)
    train_step = script.make_train_step(model, cfg, optimizer)
    steps = (0, 20, 40, 80, 120, 160, 240, 320, 480, 650, 900, 1250, 1600, 2000)
    steps = [n for n in steps if n < cfg.steps] + [cfg.steps]
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


def train_captions(recorded, references):
    """Trains a model of show_attend_tell.py and returns what is recorded at each step."""
    import show_attend_tell as script

    valid = script.make_scenes(24, "valid")
    scenes = [valid[k] for k in (1, 2, 8, 23)]  # attention.html says how they were chosen
    assert references == [" ".join(scene.words) for scene in scenes]
    images, _ = script.to_tensors(scenes)
    frames = []
    cfg = script.Config(attention=recorded["attention"], steps=recorded["steps"][-1])
    for step, (model, _) in enumerate(script.train(cfg), 1):
        if step in recorded["steps"]:
            tokens, s = script.greedy(model, images)  # the model's own captions
            said = [script.VOCABULARY.decode(row) for row in tokens.tolist()]
            weights = [as_text(rows[: len(words)].cpu().numpy()) for rows, words in zip(s, said)]
            frames.append([weights, [" ".join(words) for words in said]])
            print(cfg.attention, step, *frames[-1][1], sep="\n", flush=True)
    return frames


if __name__ == "__main__":
    if sys.argv[1:] == ["--film"]:
        film()
    draw_bottleneck()
    draw_lengths()
    draw_gradient()
    draw_cost()
    draw_captions()
    draw_weights("alignment.svg", slice(4))
    draw_weights("learning.svg", slice(1, 4), "after two minutes")
    draw_weights("learning-narrow.svg", slice(1, 2), "after two minutes")  # for phones
    (DOCS / "attention.html").write_text(page(), encoding="utf-8")
