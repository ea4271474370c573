"""Draws captions.svg: where show_attend_tell.py looks at each word, with soft and hard attention.

pip install -r docs/make/requirements.txt
python docs/make/draw_captions.py          draws the recording in docs/runs/captions.json
python docs/make/draw_captions.py --film   first trains both models again, 8 minutes on two cores
"""

import base64
import io
import sys

import numpy as np
from draw import BOLD, CENTERED, DOCS, as_text, as_weights, read, text, write, write_svg
from PIL import Image

RECORDED = (1, 100, 200, 400, 600, 900, 1300, 1800, 2700, 3600)  # training steps
STEPS = dict(soft=1800, hard=3600)  # hard attention learns more slowly
SCENES = (1, 2, 8, 23)  # of the validation set; attention.html says how they were chosen
PANEL, LEFT = 66, 150  # pixels: side of a panel, x of the first panel
OUTLINE = 'fill="none" stroke="#ffc400" stroke-width="1.3"'


def film():
    """Trains both models; records their captions and attention for the scenes."""
    sys.path.insert(0, str(DOCS))
    import show_attend_tell as script

    valid = script.make_scenes(max(SCENES) + 1, "valid")
    scenes = [valid[k] for k in SCENES]
    models = []
    for attention, steps in STEPS.items():
        cfg = script.Config(attention=attention, steps=steps)
        frames = []
        for step, (model, _) in enumerate(script.train(cfg), 1):
            if step in RECORDED:
                frames.append(look(script, model, scenes))
                print(attention, step, *frames[-1][1], sep="\n", flush=True)
        recorded = [n for n in RECORDED if n <= steps]
        models.append(dict(attention=attention, steps=recorded, frames=frames))
    content = dict(
        images=[png(scene.image) for scene in scenes],
        references=[" ".join(scene.words) for scene in scenes],
        owners=[scene.owner for scene in scenes],
        outlines=[[outline(region) for region in scene.regions] for scene in scenes],
        models=models,
    )
    write("captions.json", content)


def look(script, model, scenes):
    """Per scene: the weights of the model's own caption, and the caption."""
    tokens, s = script.greedy(model, script.to_tensors(scenes)[0])
    captions = [script.VOCABULARY.decode(row) for row in tokens.tolist()]
    weights = [as_text(rows[: len(words)].cpu().numpy()) for rows, words in zip(s, captions)]
    return [weights, [" ".join(words) for words in captions]]


def png(image):
    """An RGB image (3,height,width) as a PNG data URL."""
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def outline(region):
    """The border of a region as an SVG path, in pixels of the image."""
    padded = np.pad(region, 1)
    vertical = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    horizontal = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    return "".join([f"M{x} {y}v1" for y, x in vertical] + [f"M{x} {y}h1" for y, x in horizontal])


def light(weights):
    """The attention as SVG: a dark layer, and white cells, the larger the weight the brighter."""
    levels = np.round(8 * weights / weights.max()).astype(int)
    paths = ['<path d="M0 0h48v48h-48z" opacity="0.5"/>']
    for level in range(1, 9):
        corners = [(6 * (i % 8), 6 * (i // 8)) for i in np.flatnonzero(levels == level)]
        cells = "".join(f"M{x} {y}h6v6h-6z" for x, y in corners)
        if cells:
            paths.append(f'<path d="{cells}" fill="#fff" opacity="{0.85 * level / 8:.2f}"/>')
    return "".join(paths)


def draw_scene(content, k, y):
    """A scene and, for each word of its caption and each model, where the model looked."""
    size = 'width="48" height="48" style="image-rendering:pixelated"'
    parts = [
        f'<defs><image id="scene{k}" href="{content["images"][k]}" {size}/></defs>',
        f'<use href="#scene{k}" transform="translate(4,{y + 44}) scale(2)"/>',
    ]
    for row, model in enumerate(content["models"]):
        top = y + 24 + (PANEL + 6) * row
        label = f'transform="rotate(-90)" {BOLD} {CENTERED}'
        parts.append(text(-(top + PANEL / 2), LEFT - 10, model["attention"], label))
        weights = as_weights(model["frames"][-1][0][k], 64)
        for i, owner in enumerate(content["owners"][k]):
            panel = f'<use href="#scene{k}"/>{light(weights[i])}'
            if owner >= 0:
                panel += f'<path d="{content["outlines"][k][owner]}" {OUTLINE}/>'
            place = f"translate({LEFT + (PANEL + 4) * i},{top}) scale({PANEL / 48})"
            parts.append(f'<g transform="{place}">{panel}</g>')
    for i, word in enumerate(content["references"][k].split()):
        parts.append(text(LEFT + (PANEL + 4) * i + PANEL / 2, y + 16, word, CENTERED))
    return parts


if __name__ == "__main__":
    if sys.argv[1:] == ["--film"]:
        film()
    recorded = read("captions.json")
    height = 2 * PANEL + 50
    words = max(map(len, recorded["owners"][:2]))  # of the scenes with two objects
    width = LEFT + (PANEL + 4) * words
    parts = draw_scene(recorded, 0, 0) + draw_scene(recorded, 1, height)
    write_svg("captions.svg", width, 2 * height - 10, parts)
