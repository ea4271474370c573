"""Tests of docs/: links, generated pages, diffs, show_attend_tell.py and language_model.py.

python -m pytest -q docs/make    test_pages.py needs a browser
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
from itertools import chain, combinations, islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import sigmoid, tanh

MAKE = Path(__file__).resolve().parent
DOCS = MAKE.parent
ROOT = DOCS.parent
sys.path[:0] = map(str, (ROOT, DOCS, MAKE))

import draw  # noqa: E402
import language_model  # noqa: E402
import show_attend_tell as captions  # noqa: E402

import bahdanau  # noqa: E402
import data  # noqa: E402
from data import BOS, EOS  # noqa: E402

torch.set_num_threads(1)  # the models are tiny
torch.backends.mkldnn.set_flags(False)  # as the scripts do on ARM

UPDATE_LINKS = "run: pip install -r docs/make/requirements.txt && python docs/make/pages.py"
UPDATE_PAGE = "run: python docs/make/draw.py"


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9, check_dtype=False)


def read(path):
    return path.read_text(encoding="utf-8")


# ---- documents -----------------------------------------------------------------------------------
def test_links_to_code():
    """Links to code point at the right lines."""
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    pattern = r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)"
    links = [(page, *link) for page in pages for link in re.findall(pattern, read(page))]
    assert len(links) >= 100
    for page, code, file, line in links:
        lines = read(page.parent / file).split("\n")
        found = int(line) <= len(lines) and code in lines[int(line) - 1]
        assert found, f"{page.name}: {file}, line {line} is not {code}; {UPDATE_LINKS}"


def test_model_lines():
    """README's link to the model in bahdanau.py covers all classes of the model."""
    lines = read(ROOT / "bahdanau.py").splitlines()
    first = next(n for n, line in enumerate(lines, 1) if line.startswith("class "))
    last = lines.index("@dataclasses.dataclass") - 2
    assert f"bahdanau.py#L{first}-L{last})" in read(ROOT / "README.md")


def test_attention_page():
    """attention.html is current, and in it the models with attention output the references."""
    assert draw.page() == read(DOCS / "attention.html"), UPDATE_PAGE
    film = json.loads(read(DOCS / "runs/film.json"))
    references = [target for _, target in film["pairs"]]
    for model in film["models"][1:]:
        assert model["frames"][-1][1] == references, f"{model['script']}; {UPDATE_PAGE} --film"
    assert all(pair["said"] == pair["target"] for pair in film["twins"]["sentences"])


def test_pages():
    """The pages are what pages.py makes, and no link of any page is dead or leads to Markdown."""
    pytest.importorskip("mdit_py_plugins", reason="pip install -r docs/make/requirements.txt")
    import pages

    for name, page in pages.build().items():
        assert page == read(DOCS / name), f"{name}; {UPDATE_LINKS}"
    for page in DOCS.glob("*.html"):
        for path, anchor in re.findall(r'href="(?!\w+:)([^"#]*)#?([^"]*)"', read(page)):
            target = DOCS / path if path else page
            assert target.exists() and target.suffix != ".md", f"{page.name}: {path}"
            is_there = target.suffix != ".html" or f' id="{anchor}"' in read(target)
            assert is_there or not anchor, f"{page.name}: {path}#{anchor}"


def test_speed():
    """The tables of speed.md are those of its logs."""
    import compare

    text = read(DOCS / "speed.md")
    found = re.findall(r"^\|.*\|$", text, re.M)
    want = list(compare.tables())
    assert found == want, "run: python docs/make/compare.py tables"


def test_diff():
    """The diff of two scripts in equations.md consists of their lines, without comments."""
    text = read(DOCS / "equations.md")
    (excerpt,) = re.findall(r"```diff\n(.*?)\n```", text, re.S)
    files = {"-": "bahdanau.py", "+": "luong.py"}
    for sign, line in ((row[0], row[1:]) for row in filter(None, excerpt.split("\n"))):
        code = [row.split("  #")[0] for row in read(ROOT / files[sign]).split("\n")]
        assert line in code, f"{files[sign]} has no line {line.strip()}; edit equations.md"


# ---- exercises -----------------------------------------------------------------------------------
def blocks(language):
    text = read(DOCS / "exercises.md")
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.S)


def change(folder, diff):
    """Applies a diff that has no line numbers: each old line occurs once in the folder's files."""
    for sign, line in ((row[0], row[1:]) for row in diff.split("\n")):
        if sign != "+":
            files = [x for x in folder.glob("*.py") if read(x).split("\n").count(line) == 1]
            assert len(files) == 1, f"found in {len(files)} files: {line}; edit exercises.md"
            lines = read(files[0]).split("\n")
            at = lines.index(line) + (sign == " ")
        if sign == "+":
            lines.insert(at, line)
            at += 1
        elif sign == "-":
            del lines[at]
        files[0].write_text("\n".join(lines), encoding="utf-8")


def run_python(folder, expected, *command):
    """Runs a command; what it prints must contain the expected pattern."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert re.search(expected, printed), f"{command}: {printed}; edit exercises.md"


@pytest.fixture
def copies(tmp_path):
    """A folder with copies of the scripts, which a test may change, and a part of the corpus."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "corpus").mkdir()
    for file in chain(*map(data.CORPUS.glob, ("*.en", "*.fr", "*.links"))):
        lines = read(file).splitlines(keepends=True)
        (tmp_path / "corpus" / file.name).write_text("".join(lines[:20]), encoding="utf-8")
    return tmp_path


TINY_RUN = ["--steps", "2", "--device", "cpu"]
TESTS = ["-m", "pytest", "-q", "test_all.py", "-k"]


def test_new_score(copies):
    """With the new score of exercise 9, the tests of that score pass, and the new flag works."""
    (diff,) = [x for x in blocks("diff") if "scaled=lambda" in x]
    change(copies, diff)
    run_python(copies, r"(?m)^[1-9]\d* passed", *TESTS, "scaled")
    run_python(copies, "BLEU", "luong.py", "--score", "scaled", *TINY_RUN)


def test_exercises(copies):
    """The changes in exercises.md can be made, and the changed scripts run."""
    reading, *changes = blocks("diff")
    change(copies, reading)
    run_python(copies, r"\b[1-9]\d* failed", *TESTS, "equations and bahdanau")
    for diff in changes:
        change(copies, diff)
    run_python(copies, "", "seq2seq_lstm.py", "--no-reverse", "--out", "runs/forward", *TINY_RUN)
    run_python(copies, "", "bahdanau.py", "--out", "runs/printed", *TINY_RUN)
    for script in ("seq2seq_lstm.py", "bahdanau.py", "luong.py", "transformer.py"):
        run_python(copies, "BLEU", script, *TINY_RUN)
    for code in blocks("python")[:-1]:
        run_python(copies, r"\A[\d., \[\]\n-]+\Z", "-c", code)


def test_training_loop():
    """The training loop, the last block, learns to reverse digits, and to align them."""
    torch.manual_seed(1)
    names = {}
    exec(blocks("python")[-1], names)
    assert names["alpha"][0, :-1].argmax(-1).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


# ---- show_attend_tell.py -------------------------------------------------------------------------
def test_scenes():
    """Splits share no caption; the pixels of an object have the color that its caption names."""
    splits = [captions.make_scenes(200, split) for split in ("train", "valid", "test")]
    descriptions = [{" ".join(scene.words) for scene in split} for split in splits]
    assert not any(one & other for one, other in combinations(descriptions, 2))
    names, colors = list(captions.COLORS), np.array(list(captions.COLORS.values()))
    for scene in splits[0]:
        assert not (scene.regions.sum(0) > 1).any()  # a pixel belongs to one object
        for word, owner in zip(scene.words, scene.owner, strict=True):
            assert (owner >= 0) == (word in (*names, *captions.SHAPES, "small", "large"))
            if word in names and scene.regions[owner].sum() > 9:
                color = scene.image[:, scene.regions[owner]].mean(1)
                assert names[np.abs(colors - color).sum(1).argmin()] == word


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_captions_overfit(attention):
    """A model memorizes three captions; its attention is the class of bahdanau.py, unchanged."""
    cfg = captions.Config(attention=attention, scenes=3, batch=8, steps=60, warmup=10)
    *_, (model, loss) = captions.train(cfg)
    assert type(model.attention) is bahdanau.AdditiveAttention
    scenes = captions.make_scenes(3, "train")
    images, tgt = captions.to_tensors(scenes)
    tokens, s = captions.greedy(model, images, max_len=tgt.size(1) - 1)
    assert tokens.tolist() == tgt[:, 1:].tolist() and s.shape == (*tokens.shape, 64)
    assert loss < 0.1 and captions.evaluate(model, scenes)["exact"] == 100


def small_captioner(**flags):
    """A random float64 model with given annotations (1,3,4) instead of a CNN, and a caption."""
    torch.manual_seed(2)
    model = captions.Captioner(captions.Config(features=4, emb=3, hidden=5, attn=6, **flags))
    model.encoder = nn.Identity()
    return model.double(), torch.randn(1, 3, 4).double(), torch.tensor([[BOS, 5, 7, EOS]])


def test_soft_context():
    """Weights, gated context and penalty of soft attention match plain loops."""
    model, a, tgt = small_captioner(lambda_d=0.7)
    h, f = torch.randn(1, 5).double(), model.attention
    z, alpha, _ = model.attend(h, model.encode(a))
    e = [f.v_a @ tanh(f.W_a.weight @ h[0] + f.U_a.weight @ a[0, i]) for i in range(3)]
    want = [x.exp() / sum(y.exp() for y in e) for x in e]
    beta = sigmoid(model.f_beta.weight @ h[0] + model.f_beta.bias)
    assert_close(alpha[0], torch.stack(want))
    assert_close(z[0], beta * sum(want[i] * a[0, i] for i in range(3)))
    logits, alpha, s = model(a, F.pad(tgt[:, :-1], (0, 2)))  # padding is not counted
    value, log_p = captions.objective(model.cfg, F.pad(tgt[:, 1:], (0, 2)), logits, alpha, s)
    penalty = sum((1 - sum(alpha[0, t, i] for t in range(3))) ** 2 for i in range(3))
    assert_close(value, log_p - 0.7 * penalty)


def test_hard_estimator(monkeypatch):
    """Weighted by their probabilities, the estimates of all paths sum to the exact gradient."""
    model, a, tgt = small_captioner(attention="hard", lambda_r=1, lambda_e=0.3, expected=0)
    parameters = [*model.parameters()]
    estimate, objective, log_ps = [0] * len(parameters), 0, set()
    locations = chain(*product(range(3), repeat=3))
    monkeypatch.setattr(torch, "multinomial", lambda *_: torch.tensor([[next(locations)]]))
    for _ in range(27):
        logits, alpha, s = model.train()(a, tgt[:, :-1])
        value, log_p = captions.objective(model.cfg, tgt[:, 1:], logits, alpha, s, b=-1.7)
        log_ps.add(log_p.item())
        p, H = (alpha * s).sum(-1).prod(), -(alpha * alpha.log()).sum()
        objective = objective + p * log_p.sum() + 0.3 * p.item() * H  # eq. (10), and the entropy
        grads = torch.autograd.grad(value.sum(), parameters, retain_graph=True, allow_unused=True)
        estimate = [old if g is None else old + p.item() * g for old, g in zip(estimate, grads)]
    exact = torch.autograd.grad(objective, parameters, allow_unused=True)
    assert len(log_ps) == 27  # every path is different
    for got, want in zip(estimate, exact, strict=True):
        assert_close(torch.as_tensor(got), torch.zeros(()) if want is None else want)


# ---- language_model.py ---------------------------------------------------------------------------
@pytest.mark.parametrize("kind", language_model.MODELS)
def test_language_model(kind):
    """A model memorizes three texts and is blind to later words; perplexities and the equations of
    its attention match plain loops."""
    pairs = list(data.read_pairs(*data.built_in("train")))[:3]
    vocabulary, _ = data.build_vocabularies(pairs, share=True)
    texts = language_model.to_texts(pairs, vocabulary.encode)
    args = argparse.Namespace(model=kind, steps=200, seed=1)
    *_, (model, _) = language_model.train(args, texts, len(vocabulary))
    sources, targets = map(list, zip(*pairs))
    assert language_model.translate(model, sources, vocabulary) == targets
    x = language_model.pad(texts)
    with torch.no_grad():
        log_p = model.eval()(x).log_softmax(-1)
        changed = x.clone()
        changed[:, 5:] = 6
        later = model(changed).log_softmax(-1)
        torch.testing.assert_close(later[:, :5], log_p[:, :5])
        if kind == "attention":
            h = model.lstm(model.E(x[:1]))[0][0]
            W_K, W_V = model.attention.W_KV.weight.chunk(2)
            e = [model.attention.W_Q(h[4]) @ W_K @ h[i] / math.sqrt(len(h[i])) for i in range(5)]
            alpha = torch.stack(e).softmax(0)
            c = model.attention.W_O(sum(alpha[i] * (W_V @ h[i]) for i in range(5)))
            logits = model.W(torch.tanh(model.W_c(torch.cat([c, h[4]]))))
            torch.testing.assert_close(logits.log_softmax(0), log_p[0, 4])
        if kind == "transformer":
            layers = model.layers
            model.layers = nn.ModuleList()  # what is left: embeddings, positions, output
            D = language_model.D
            angles = [[t / 10000 ** (2 * (i // 2) / D) for i in range(D)] for t in range(5)]
            PE = [[(math.sin, math.cos)[i % 2](a) for i, a in enumerate(row)] for row in angles]
            y = model.E(x[:1, :5]) * math.sqrt(D) + torch.tensor(PE).to(x.device)
            torch.testing.assert_close(model(x[:1, :5]), y @ model.E.weight.T)
            model.layers = layers
    losses = dict(english=[], french=[])
    for row, text, (source, _) in zip(log_p.tolist(), texts, pairs):
        for t, y in enumerate(text[1:]):
            half = "english" if t <= len(source) else "french"
            if y != BOS:
                losses[half].append(-row[t][y])
    want = {half: math.exp(sum(values) / len(values)) for half, values in losses.items()}
    assert language_model.perplexities(model, texts) == pytest.approx(want)


# ---- the command lines of both scripts -----------------------------------------------------------
@pytest.mark.parametrize("script", [captions, language_model])
def test_language_and_captions_commands(monkeypatch, capsys, tmp_path, script):
    """On little text and few scenes: progress, labeled lines, a log and a picture."""
    make_scenes, read_pairs = captions.make_scenes, data.read_pairs
    monkeypatch.setattr(captions, "make_scenes", lambda _, split: make_scenes(20, split))
    monkeypatch.setattr(data, "read_pairs", lambda *files: islice(read_pairs(*files), 20))
    monkeypatch.setattr(sys, "argv", ["script", "--steps", "3", "--out", f"{tmp_path}/new/run"])
    script.main()
    printed, progress = capsys.readouterr()
    assert re.search(r"step 3, \d+ s: train loss \d.*\n    .+ → ", progress)
    assert re.search(r"\nmodel: .*\nreference: (?s:.*)\ntest set: ", printed)
    entry, result = map(json.loads, read(tmp_path / "new/run/log.jsonl").splitlines())
    assert (entry["step"], result["steps"]) == (3, 3) and "bleu" in result
    assert read(tmp_path / "new/run/attention.svg").startswith("<svg")
