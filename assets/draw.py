"""Draws the README's two figures from the logs in assets/runs: python assets/draw.py [run folders, whose alignments to take]"""
import html, json, sys
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent
SCRIPTS = {"seq2seq_lstm": "#d9483b", "bahdanau": "#2f7fd6", "luong": "#d68a00", "luong-feeding": "#8e5bd0", "transformer": "#1f9d6b"}  # seen on light and on dark
STYLE = "text{fill:#6e7781}.grid{stroke:#8886}.cell{fill:#2f7fd6}"


def svg(name, width, height, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
    (HERE / name).write_text("\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"]))


def text(x, y, words, more=""): return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'


def dashes(script): return ' stroke-dasharray="6 4"' * script.endswith("-feeding")


def panel(left, title, runs, top):
    """BLEU by source length: a line a script through the mean of its seeds, a band from the worst to the best."""
    x, y = lambda k: left + 30 + 62 * k, lambda bleu: 290 - 240 * bleu / top
    names = list(next(iter(runs.values()))[0])
    out = [text(left, 24, title, 'font-weight="bold"')]
    for bleu in range(0, top + 1, top // 5):
        out += [f'<line class="grid" x1="{left}" x2="{x(len(names) - 1) + 20}" y1="{y(bleu):.0f}" y2="{y(bleu):.0f}"/>']
        out += [text(left - 6, y(bleu) + 4, str(bleu), 'text-anchor="end"')]
    out += [text(x(k), 310, name, 'text-anchor="middle"') for k, name in enumerate(names)]
    out += [text(x((len(names) - 1) / 2), 330, "words in the source sentence", 'text-anchor="middle"')]
    for script, seeds in runs.items():
        table = np.array([[seed[name] for name in names] for seed in seeds])
        line = lambda values: " ".join(f"{x(k):.0f},{y(value):.1f}" for k, value in values)
        low, high, mean = (list(enumerate(f(0))) for f in (table.min, table.max, table.mean))
        if len(table) > 1: out += [f'<polygon points="{line(low + high[::-1])}" fill="{SCRIPTS[script]}" opacity="0.2"/>']
        out += [f'<polyline points="{line(mean)}" fill="none" stroke="{SCRIPTS[script]}" stroke-width="2.5"{dashes(script)}/>']
        out += [f'<circle cx="{x(k):.0f}" cy="{y(value):.1f}" r="3.5" fill="{SCRIPTS[script]}"/>' for k, value in mean]
    return out


def by_length(pattern):
    logs = {script: sorted((HERE / "runs").glob(pattern.format(script))) for script in SCRIPTS}
    return {script: [json.loads(path.read_text().splitlines()[-1])["bleu_by_length"] for path in paths] for script, paths in logs.items() if paths}


def lengths():
    parts = panel(50, "BLEU, built-in corpus, three seeds", by_length("built-in-{}-?.jsonl"), 100)
    parts += panel(490, "BLEU, Europarl English-French, one seed", by_length("europarl-{}.jsonl"), 50)
    for x, (script, color) in zip((60, 215, 345, 455, 670), SCRIPTS.items()):
        parts += [f'<line x1="{x}" x2="{x + 24}" y1="348" y2="348" stroke="{color}" stroke-width="4"{dashes(script)}/>']
        parts += [text(x + 30, 352, script.replace("-feeding", ".py --input-feeding") if dashes(script) else script + ".py")]
    svg("length.svg", 940, 365, parts)


def alignments():
    """The same sentence under all four: each row a French word, each column the English word it came from."""
    parts, left = [], 4
    for line in (HERE / "runs" / "alignment.jsonl").read_text().splitlines():
        script, source, target, alpha = json.loads(line).values()
        wide = 12 + 7.4 * max(map(len, target))
        parts += [text(left + wide, 24, script + ".py" + " (gradient)" * (script == "seq2seq_lstm"), 'font-weight="bold"')]
        parts += [f'<text transform="translate({left + wide + 15 * j + 12:.0f},125) rotate(-90)">{html.escape(word)}</text>' for j, word in enumerate(source)]
        parts += [text(left + wide - 5, 143 + 15 * i, word, 'text-anchor="end"') for i, word in enumerate(target)]
        parts += [f'<rect class="cell" x="{left + wide + 15 * j:.0f}" y="{131 + 15 * i}" width="14" height="14" opacity="{0.06 + 0.94 * a:.2f}"/>'
                  for i, row in enumerate(alpha) for j, a in enumerate(row)]
        left += wide + 15 * len(source) + 8
    svg("alignment.svg", round(left), 360, parts)


def collect(folders):
    """The first pair of each run's align.npz, which is data.EXAMPLE, into runs/alignment.jsonl."""
    lines = []
    for folder in map(Path, folders):
        run = np.load(folder / "align.npz")
        source, target = str(run["source"][0]).split(), str(run["target"][0]).split()
        script = next(s for s in SCRIPTS if folder.name.startswith(s))
        lines.append(json.dumps(dict(script=script, source=source, target=target, alpha=run["alpha_0"][:-1, :-1].astype(float).round(3).tolist())))
    (HERE / "runs" / "alignment.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]: collect(sys.argv[1:])
    lengths(), alignments()
