"""Everything is held against something independent: equations as naive loops, finite differences,
torch.nn, sacreBLEU, exhaustive search, a run that was left alone.

python -m pytest -q test_all.py              all that is fast
python -m pytest -q -m slow test_all.py      every variant, more seeds, random kills, random input
"""

import ast
import collections
import contextlib
import dataclasses
import gzip
import importlib
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
from data import BOS, EOS, PAD, UNK

SKELETON_LINES = 360
SCRIPT_LINES = dict(luong=670)  # four scores and three kinds of attention; the others 640
MARKER = "# ---- the same in every script from here on ----\n"
HERE = Path(__file__).parent

warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # there is one: slow
torch.set_num_threads(1)  # the models here are tiny
torch.backends.mkldnn.set_flags(False)  # as the scripts do

SCRIPTS = dict(  # each with sizes to test it by
    seq2seq_lstm=dict(emb=6, hidden=5, layers=2),
    bahdanau=dict(emb=6, hidden=5, attn=7, maxout=4),
    luong=dict(emb=6, hidden=5, layers=2, D=2),
    transformer=dict(d_model=8, d_ff=10, heads=2, layers=2),
)
scripts = pytest.mark.parametrize("name", SCRIPTS)
MODELS = {
    "seq2seq_lstm": {},
    "seq2seq_lstm forward": dict(reverse=False),
    "bahdanau": {},
    "transformer": {},
    "transformer joint": dict(joint=True, align_layer=1),
    "luong forward": dict(reverse=False),
    "luong few positions": dict(score="location", max_len=4),
}
QUICK = [*MODELS, "luong dot global fed", "luong concat local-m", "luong general local-p fed"]
SCORES, KINDS = ("dot", "general", "concat", "location"), ("global", "local-m", "local-p")
for score, kind, fed in product(SCORES, KINDS, ("", " fed")):
    if score != "location" or kind == "global":
        flags = dict(score=score, attention=kind, input_feeding=bool(fed))
        MODELS[f"luong {score} {kind}{fed}"] = flags


def slowly(values, quick):
    """A test's parameters, of which only the quick ones are tried without -m slow."""
    return [pytest.param(v, marks=() if v in quick else pytest.mark.slow) for v in values]


@pytest.fixture(params=slowly(product(MODELS, range(3)), [*product(QUICK, range(2))]), ids=str)
def case(request):
    """A model's module, the model, and sentences for it."""
    name, seed = request.param
    return *build(name, seed), *sentences(seed)


@pytest.fixture(autouse=True)
def slow_when_asked(request):
    """A slow test is skipped unless -m slow is given."""
    slow = request.node.get_closest_marker("slow")
    if slow and "slow" not in request.config.option.markexpr:
        pytest.skip("python -m pytest -m slow")


def script(name):
    return importlib.import_module(name.split()[0])


def build(name, seed=0, spread=0.5, **changes):
    """A model's module, and the model, random and in float64."""
    module = script(name)
    torch.manual_seed(seed)
    sizes = dict(src_vocab=13, tgt_vocab=11, dropout=0.0) | SCRIPTS[module.__name__]
    model = module.Model(module.Config(**sizes | MODELS.get(name, {}) | changes)).double().eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * spread)  # so that no zero of the start hides a fault
    return module, model


def padded(rows):
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def unpadded(row):
    return [int(word) for word in row if word != PAD]


def sentences(seed):
    """src and tgt of sentences of 1 to 8 words, as the contract has them."""
    r = random.Random(seed)
    lengths = (8, 1, r.randint(1, 8), r.randint(1, 8))
    sources = [r.sample(range(4, 13), n) + [EOS] for n in lengths]  # no word twice
    targets = [[BOS, *r.choices(range(4, 11), k=r.randint(1, 8)), EOS] for _ in lengths]
    return padded(sources), padded(targets)


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape
    assert (a - b).abs().max() < tolerance


# ---- the papers as loops: (log p of each word, alpha), with weights p, of one sentence ----------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(np.array(x) - np.max(x))
    return x / x.sum()


def recurrent(p, name):
    return [p[f"{name}.{k}_l0"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def gru(p, name, x):
    """torch's GRU, the encoder's deviation from the paper: r o (U h + d), z weighs the old h."""
    W, U, b, d = recurrent(p, name)
    out = [np.zeros(U.shape[1])]
    for x_t in x:
        a_r, a_z, a = np.split(W @ x_t + b, 3)
        u_r, u_z, u = np.split(U @ out[-1] + d, 3)
        z = sigmoid(a_z + u_z)
        out.append((1 - z) * np.tanh(a + sigmoid(a_r + u_r) * u) + z * out[-1])
    return out[1:]


def lstm(p, name, x, state):
    """One step of a deep LSTM: the top layer's h, and (h, c) of every layer."""
    new = []
    for layer, (h, c) in enumerate(state):
        W, U, b, d = recurrent(p, f"{name}.layers.{layer}")
        i, f, g, o = np.split(W @ x + U @ h + b + d, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        x = sigmoid(o) * np.tanh(c)
        new.append((x, c))
    return x, new


def read(p, source, cfg):
    """h of the encoder's top layer, by position from 1 on, and the last state of every layer."""
    state, h_bar = [(np.zeros(cfg.hidden), np.zeros(cfg.hidden))] * cfg.layers, {}
    order = range(1, len(source) + 1)
    for s in reversed(order) if cfg.reverse else order:
        h_bar[s], state = lstm(p, "encoder", p["E_x.weight"][source[s - 1]], state)
    return h_bar, state


def seq2seq(p, source, target, cfg):
    """Sutskever et al., without saliency."""
    _, state = read(p, source, cfg)
    log_p = []
    for y_before, y in zip(target, target[1:]):
        h, state = lstm(p, "decoder", p["E_y.weight"][y_before], state)
        log_p.append(np.log(softmax(p["W.weight"] @ h + p["W.bias"]))[y])
    return np.array(log_p), None


def saliency(p, source, target, cfg, eps=1e-5):
    """How log p of each word moves when a source word's embedding grows, measured."""
    E, slopes = p["E_x.weight"], []
    for word in source:
        change = eps * np.eye(len(E))[word][:, None]
        up, _ = seq2seq(p | {"E_x.weight": E * (1 + change)}, source, target, cfg)
        down, _ = seq2seq(p | {"E_x.weight": E * (1 - change)}, source, target, cfg)
        slopes.append(np.abs(up - down))
    return (np.array(slopes) / np.sum(slopes, 0)).T


def rnnsearch(p, source, target, cfg):
    """Bahdanau et al."""
    x = [p["encoder.E.weight"][word] for word in source]
    right, left = gru(p, "encoder.right", x), gru(p, "encoder.left", x[::-1])[::-1]
    h = [np.concatenate(pair) for pair in zip(right, left)]  # (7)
    W, b, C = p["cell.W.weight"], p["cell.W.bias"], p["cell.C.weight"]
    U_zr, U = p["cell.U_zr.weight"], p["cell.U.weight"]
    W_a, U_a, v_a = (p[f"attention.{k}"] for k in ("W_a.weight", "U_a.weight", "v_a"))
    s = np.tanh(p["W_s.weight"] @ left[0] + p["W_s.bias"])  # A.2.2
    log_p, alphas = [], []
    for y_before, y in zip(target, target[1:]):
        E_y = p["E.weight"][y_before]
        alpha = softmax([v_a @ np.tanh(W_a @ s + U_a @ h_j) for h_j in h])  # (6), A.1.2
        c = sum(a * h_j for a, h_j in zip(alpha, h))  # (5)
        t_tilde = p["U_o.weight"] @ s + p["U_o.bias"]  # A.2.2: s_{i-1}, the state before this word
        t_tilde = t_tilde + p["V_o.weight"] @ E_y + p["C_o.weight"] @ c
        t = np.array([max(pair) for pair in zip(t_tilde[::2], t_tilde[1::2])])  # maxout
        log_p.append(np.log(softmax(p["W_o.weight"] @ t + p["W_o.bias"]))[y])
        alphas.append(alpha)
        a_z, a_r, a = np.split(W @ E_y + b + C @ c, 3)
        u_z, u_r = np.split(U_zr @ s, 2)
        z, r = sigmoid(a_z + u_z), sigmoid(a_r + u_r)  # A.1.1
        s = (1 - z) * s + z * np.tanh(a + U @ (r * s))
    return log_p, alphas


def luong_align(p, cfg, h_t, h_bar, t):
    """a_t of every position s of the source."""
    W_a, v_a, S, p_t, window = p.get("attention.W_a"), p.get("attention.v_a"), len(h_bar), t, h_bar
    if cfg.attention == "local-p":
        p_t = S * sigmoid(p["attention.v_p"] @ np.tanh(p["attention.W_p"] @ h_t))  # (9)
    if cfg.attention != "global":
        window = [s for s in h_bar if min(p_t, S) - cfg.D <= s <= min(p_t, S) + cfg.D]
    score = dict(
        dot=lambda s: h_t @ h_bar[s],
        general=lambda s: h_t @ W_a @ h_bar[s],
        concat=lambda s: v_a @ np.tanh(W_a @ np.concatenate([h_t, h_bar[s]])),
        location=lambda s: W_a[s - 1] @ h_t if s <= len(W_a) else -np.inf,  # (8)
    )
    align = softmax([score[cfg.score](s) for s in window])  # (7)
    a_t = dict.fromkeys(h_bar, 0.0) | dict(zip(window, align))
    if cfg.attention == "local-p":
        for s in window:
            a_t[s] *= math.exp(-((s - p_t) ** 2) / (2 * (cfg.D / 2) ** 2))  # (10)
    return a_t


def luong(p, source, target, cfg):
    """Luong et al."""
    h_bar, state = read(p, source, cfg)
    h_tilde, log_p, alphas = np.zeros(cfg.hidden), [], []
    for t, (y_before, y) in enumerate(zip(target, target[1:]), 1):
        x = p["E_y.weight"][y_before]
        h_t, state = lstm(p, "decoder", [*x, *h_tilde] if cfg.input_feeding else x, state)
        a_t = luong_align(p, cfg, h_t, h_bar, t)
        c_t = sum(a_t[s] * h_bar[s] for s in h_bar)
        h_tilde = np.tanh(p["W_c.weight"] @ np.concatenate([c_t, h_t]))  # (5)
        log_p.append(np.log(softmax(p["W_s.weight"] @ h_tilde))[y])  # (6)
        alphas.append([a_t[s] / sum(a_t.values()) for s in sorted(h_bar)])
    return log_p, alphas


def positions(n, d):
    angle = [[pos / 10000 ** ((i - i % 2) / d) for i in range(d)] for pos in range(n)]
    return np.where(np.arange(d) % 2, np.cos(angle), np.sin(angle))  # 3.5


def multi_head(p, name, heads, x, others):
    """MultiHead of one query over others by (1), and the mean of the heads' weights."""
    W_Q, W_K, W_V = np.split(p[f"{name}.W_QKV.weight"], 3)
    K, V = (np.split(np.array(others) @ W.T, heads, 1) for W in (W_K, W_V))
    weights = [softmax(k @ q / math.sqrt(len(q))) for q, k in zip(np.split(W_Q @ x, heads), K)]
    out = [alpha @ v for alpha, v in zip(weights, V)]
    return p[f"{name}.W_O.weight"] @ np.concatenate(out), np.mean(weights, 0)


def add_norm(p, name, x, change):
    x = x + change
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def feed_forward(p, name, k, x):
    """Sublayer k of a layer, (2)."""
    inner = np.maximum(0, p[f"{name}.ffn.0.weight"] @ x + p[f"{name}.ffn.0.bias"])
    change = p[f"{name}.ffn.2.weight"] @ inner + p[f"{name}.ffn.2.bias"]
    return add_norm(p, f"{name}.norm_{k}", x, change)


def transformer(p, source, target, cfg):
    """Vaswani et al.; the decoder sees exactly the words before."""
    E, h, d = p["E_y.weight"], cfg.heads, cfg.d_model
    x = p.get("E_x.weight", E)[source] * math.sqrt(d) + positions(len(source), d)  # 3.4, 3.5
    y = E[target[:-1]] * math.sqrt(d) + positions(len(target) - 1, d)
    for n in (f"encoder.{k}" for k in range(cfg.layers)):
        seen = [multi_head(p, f"{n}.self_attention", h, x_j, x)[0] for x_j in x]
        x = [add_norm(p, f"{n}.norm_1", x_j, a) for x_j, a in zip(x, seen)]  # 3.1
        x = [feed_forward(p, n, 2, x_j) for x_j in x]
    alphas = []
    for n in (f"decoder.{k}" for k in range(cfg.layers)):
        before = [(y_i, y[: i + 1]) for i, y_i in enumerate(y)]
        seen = [multi_head(p, f"{n}.self_attention", h, *pair)[0] for pair in before]
        y = [add_norm(p, f"{n}.norm_1", y_i, a) for y_i, a in zip(y, seen)]
        seen = [multi_head(p, f"{n}.source_attention", h, y_i, x) for y_i in y]
        y = [add_norm(p, f"{n}.norm_2", y_i, c) for y_i, (c, _) in zip(y, seen)]
        y = [feed_forward(p, n, 3, y_i) for y_i in y]
        alphas.append([alpha for _, alpha in seen])
    log_p = [np.log(softmax(E @ y_i))[word] for y_i, word in zip(y, target[1:])]
    return log_p, alphas[cfg.align_layer - 1]


ORACLES = dict(seq2seq_lstm=seq2seq, bahdanau=rnnsearch, luong=luong, transformer=transformer)
EMBEDDINGS = {"E_x.weight": 0, "encoder.E.weight": 0, "E_y.weight": 1, "E.weight": 1}


def test_equations(case):
    """log p, alpha and gradients are those of the naive loops and their finite differences."""
    module, model, src, tgt = case
    oracle, cfg, r, eps = ORACLES[module.__name__], model.cfg, random.Random(0), 1e-5
    pairs = [(unpadded(s), unpadded(t)) for s, t in zip(src, tgt)]
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    log_p = logits.log_softmax(-1).gather(-1, tgt[:, 1:, None]).squeeze(-1)
    p = {key: value.detach().numpy().copy() for key, value in model.named_parameters()}
    for b, (source, target) in enumerate(pairs):
        want, where = oracle(p, source, target, cfg)
        tolerance = 1e-6 if where is None else 1e-9
        where = np.array(saliency(p, source, target, cfg) if where is None else where)
        close(log_p[b, : len(want)], torch.tensor(np.array(want)))
        close(alpha[b, : len(want), : len(source)], torch.tensor(where), tolerance)
    module.summed_loss(logits[:1], tgt[:1, 1:]).backward()
    source, target = pairs[0]
    for key, value in model.named_parameters():
        at = [r.randrange(n) for n in value.shape]
        if key in EMBEDDINGS:  # of a word that occurs
            at[0] = r.choice((source, target[:-1])[EMBEDDINGS[key]])
        losses = []
        for change in (eps, -2 * eps):
            p[key][tuple(at)] += change
            losses.append(-sum(oracle(p, source, target, cfg)[0]))
        p[key][tuple(at)] += eps
        slope = (losses[0] - losses[1]) / (2 * eps)
        assert value.grad[tuple(at)].item() == pytest.approx(slope, rel=2e-5, abs=2e-5), (key, at)


# ---- the papers' recipes ------------------------------------------------------------------------

PAPERS = """
seq2seq_lstm emb=1000 hidden=1000 layers=4 src_vocab=160000 tgt_vocab=80000 reverse=True init=0.08
seq2seq_lstm Optimizer=SGD momentum=0 weight_decay=0 lr=0.7 clip=5.0 per=sentence sentences=128
seq2seq_lstm dropout=0.0 smoothing=0.0 steps=703125 beam=12
bahdanau emb=620 hidden=1000 attn=1000 maxout=500 src_vocab=30000 tgt_vocab=30000 max_len=50
bahdanau Optimizer=Adadelta rho=0.95 eps=1e-06 weight_decay=0 lr=1.0 clip=1.0 per=sentence
bahdanau init=0.01 init_attn=0.001 dropout=0.0 smoothing=0.0 sentences=80 steps=288000
luong emb=1000 hidden=1000 layers=4 src_vocab=50000 tgt_vocab=50000 reverse=True init=0.1
luong Optimizer=SGD momentum=0 weight_decay=0 lr=1.0 clip=5.0 per=sentence sentences=128
luong attention=local-p score=general D=10 input_feeding=True max_len=50 replace_unk=True
luong dropout=0.2 smoothing=0.0 steps=421875
transformer d_model=512 d_ff=2048 heads=8 layers=6 dropout=0.1 smoothing=0.1 beam=4 alpha=0.6
transformer Optimizer=Adam betas=(0.9,0.98) eps=1e-09 weight_decay=0 lr=1.0 clip=inf per=token
transformer warmup=4000 cooldown=False tokens=50000 steps=100000 average=5
"""


@pytest.mark.parametrize("line", PAPERS.strip().split("\n"))
def test_paper_numbers(line):
    """Sizes, recipe and optimiser are the paper's, and so is the batch of its longest sentences."""
    name, *want = line.split()
    module = script(name)
    cfg = module.Config.paper()
    optimizer = module.make_optimizer(nn.Linear(2, 2), cfg)
    found = optimizer.param_groups[0] | vars(cfg) | dict(Optimizer=type(optimizer).__name__)
    fields = [entry.split("=")[0] for entry in want]
    assert [f"{field}={found[field]}".replace(" ", "") for field in fields] == want
    if "sentences" in fields:
        longest = [["a"] * (cfg.max_len or 100)] * 2
        bitext, _ = data.learn([longest] * 2 * cfg.sentences)
        src, _ = next(bitext.batches(cfg.tokens, cfg.sentences, cfg.seed))
        assert len(src) == cfg.sentences


def test_paper_sizes():
    """As many parameters as the papers count; one Transformer matrix unless two sizes are asked."""
    for name, millions in (("seq2seq_lstm", 384), ("transformer", 65)):
        with torch.device("meta"):  # without memory for it
            model = script(name).Model(script(name).Config.paper())
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.04)
    for asked in ((37000,), (32000,), (100, 100), (100, 200)):
        cfg = script("transformer").Config.paper(**dict(zip(("src_vocab", "tgt_vocab"), asked)))
        model = script("transformer").Transformer(dataclasses.replace(cfg, layers=1, d_model=8))
        assert (cfg.src_vocab, cfg.tgt_vocab, cfg.joint) == (asked[0], asked[-1], asked[-1] != 200)
        tables = [len(p) for p in model.parameters() if len(p) in asked]
        assert sorted(tables) == sorted(set(asked))  # the output's matrix is the target's


STARTS = """
seq2seq_lstm . uniform 0.08
luong . uniform 0.1
bahdanau bias|v_a constant 0
bahdanau _hh|cell.U orthogonal 1
bahdanau _a normal 0.001
bahdanau . normal 0.01
transformer E_ normal 0.125
transformer norm_..weight constant 1
transformer bias constant 0
transformer W_O|ffn.2 glorot 0.5
transformer . glorot 1
"""


@scripts
def test_start(name):
    """Every weight begins as the first line says that knows it: U, N, B.1 or Glorot."""
    module = script(name)
    sizes = dict(d_model=64, layers=2) if name == "transformer" else dict(emb=30, hidden=40)
    torch.manual_seed(0)
    model = module.Model(module.Config.paper(src_vocab=300, tgt_vocab=200, **sizes))
    laws = [line.split()[1:] for line in STARTS.splitlines() if line.startswith(name)]
    for key, p in model.named_parameters():
        law, size = next(rest for pattern, *rest in laws if re.search(pattern, key))
        for W in p.split(p.size(-1)) if re.search("QKV|_hh|cell.U", key) else [p]:
            bound = float(size) * (math.sqrt(6 / sum(W.shape)) if law == "glorot" else 1)
            if law in ("uniform", "glorot"):
                assert 0.8 * bound < W.abs().max() <= bound, key
                assert abs(W.mean()) < 0.3 * bound, key
            elif law == "normal":
                assert W.std().item() == pytest.approx(bound, rel=0.25), key
            elif law == "constant":
                assert (bound == W).all(), key
            else:
                close(W @ W.T, torch.eye(len(W)), 1e-5)
    assert script("bahdanau").AdditiveAttention(4, 6, 50).v_a.std() > 0.05  # alone it is of use


@pytest.mark.parametrize("name", [*SCRIPTS, "luong dry"])
def test_schedule(name):
    """The paper's rate is halved after its turns, or (3); the small one's rises and falls to 0."""
    module, dry = script(name), dict(dropout=0.0) if "dry" in name else {}
    turns = {"seq2seq_lstm": (500, 550, 600, 650, 700), "luong": (500, 562.5, 625, 687.5)}
    turns |= {"luong dry": (375, 450, 525, 600, 675), "bahdanau": ()}
    paper, small = module.Config.paper(steps=750, **dry), module.Config(lr=0.1, warmup=4, steps=10)
    for step in range(1, 751):
        fall = max(11 - step, 0) / 10
        want = 0.1 * min(step / 4, fall)
        if name == "transformer":
            want = 0.1 * 96**-0.5 * min(step**-0.5, step * 4**-1.5) * fall
            rate = 512**-0.5 * min((10 * step) ** -0.5, 10 * step * 4000**-1.5)
            assert module.learning_rate(paper, 10 * step) == pytest.approx(rate)
        else:
            rate = paper.lr / 2 ** sum(step - 1 >= turn for turn in turns[name])
            assert module.learning_rate(paper, step) == rate
        assert module.learning_rate(small, step) == pytest.approx(want)


def test_what_makes_no_sense_is_refused():
    """By Config, from Python as from the command line, and by the attention class."""
    nonsense = [dict(steps=0), dict(dropout=1.0), dict(smoothing=1.0), dict(lr=math.nan)]
    wrong = [(name, flags) for name in SCRIPTS for flags in (*nonsense, dict(src_vocab=4))]
    wrong += [("luong", dict(score="location", attention="local-m"))]
    wrong += [("transformer", dict(d_model=10)), ("transformer", dict(align_layer=7))]
    for name, flags in wrong:
        for make in (script(name).Config, script(name).Config.paper):
            with pytest.raises(data.InputError, match="--" + min(flags).replace("_", "-")):
                make(**flags)
    for flags in (dict(score="Dot"), dict(attention="x"), dict(score=None)):
        with pytest.raises(ValueError):
            script("luong").LuongAttention(32, **flags)


# ---- parts, properties, searches, training ------------------------------------------------------


def attend(cls, sizes, mask):
    """Two sentences of three words, seen from five places, by a class with random weights."""
    torch.manual_seed(0)
    attention, queries, h = cls(8, *sizes), torch.rand(2, 5, 8), torch.rand(2, 3, 8)
    if cls.__name__ == "AdditiveAttention":
        return attention(queries[:, 0], attention.U_a(h), h, mask)
    if cls.__name__ == "LuongAttention":
        return attention(queries, attention.keys(h), h, mask)
    Q, _, _ = attention.project(queries).unbind(2)
    K, V = attention.project(h, "KV").unbind(2)
    return attention(Q, K, V, mask if mask is None else mask[:, None, None], need_alpha=True)


ATTENTION = [("bahdanau", "AdditiveAttention", (8, 6)), ("transformer", "MultiHeadAttention", (2,))]
LOOKS = ((), ("concat", "local-p"), ("dot", "local-m"), ("location",))
ATTENTION += [("luong", "LuongAttention", look) for look in LOOKS]


@pytest.mark.parametrize("name, cls, sizes", ATTENTION)
def test_attention_classes_can_be_lifted(name, cls, sizes):
    """The class's source alone computes the same; a mask is True where nobody may look."""
    original, lifted = getattr(script(name), cls), {}
    imports = "import math, torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
    exec(imports + inspect.getsource(original), lifted)
    nothing, last = torch.zeros(2, 3).bool(), torch.tensor([[False, False, True]] * 2)
    for mask in (None, nothing, last):
        c, alpha = attend(lifted[cls], sizes, mask)
        for a, b in zip((c, alpha), attend(original, sizes, mask)):
            assert a.equal(b)
        for a, b in zip((c, alpha), attend(lifted[cls], sizes, None)):
            assert a.equal(b) == (mask is not last)
        assert (alpha[..., :2] > 0).all()
        assert ((alpha[..., 2] == 0) == (mask is last)).all()


@pytest.mark.parametrize("seed", range(4))
def test_attention_is_the_fused_kernel(seed):
    """Equation (1) and the kernel that hides its weights: outputs and gradients, any mask."""
    attention = script("transformer").MultiHeadAttention.attention
    torch.manual_seed(seed)
    B, h, T, S, d = torch.randint(1, 7, (5,)).tolist()
    inputs = [torch.randn(B, h, n, d, dtype=torch.double, requires_grad=True) for n in (T, S, S)]
    some = torch.arange(S) > torch.randint(0, S, (B, 1, 1, 1))
    for mask in (some, torch.ones(T, S).triu(1).bool(), torch.zeros(T, S).bool(), None):
        plain, _ = attention(*inputs, mask, need_alpha=True)
        fused, _ = attention(*inputs, mask)
        close(plain, fused)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (plain, fused))):
            close(a, b)


def same_weights(theirs, ours):
    """Gives a layer of torch.nn's and ours the same weights: pairs of parameters."""
    renamed = {"self_attn": "self_attention", "multihead_attn": "source_attention", "norm": "norm_"}
    renamed |= {"out_proj": "W_O", "linear1": "ffn.0", "linear2": "ffn.2", "in_proj_": "W_QKV."}
    own, same = dict(ours.named_parameters()), []
    for key, p in theirs.named_parameters():
        for old, new in renamed.items():
            key = key.replace(old, new)
        nn.init.normal_(p, 0, 0.5 if key in own else 0)  # the paper's attention has no biases
        if key in own:
            own[key].data.copy_(p)
            same.append((p, own[key]))
    assert len(same) == len(own)
    return same


@pytest.mark.parametrize("seed", range(3))
def test_layers_equal_torch_nn(seed):
    """Encoder layer and decoder layer against torch.nn's own, gradients included."""
    module = script("transformer")
    torch.manual_seed(seed)
    x, y = (torch.randn(3, n, 12, dtype=torch.double) for n in (5, 7))
    pad = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    mask, future = pad[:, None, None], torch.ones(7, 7).triu(1).bool()
    cfg, sizes = module.Config(d_model=12, d_ff=20, heads=3, dropout=0.0), (12, 3, 20, 0.0)
    encoder, ours = nn.TransformerEncoderLayer(*sizes, batch_first=True), module.EncoderLayer(cfg)
    same = same_weights(encoder.double(), ours.double())
    memory, h = encoder(x, src_key_padding_mask=pad), ours(x, mask)
    decoder, ours = nn.TransformerDecoderLayer(*sizes, batch_first=True), module.DecoderLayer(cfg)
    same += same_weights(decoder.double(), ours.double())
    want = decoder(y, memory, tgt_mask=future, memory_key_padding_mask=pad)
    got, _ = ours(y, future, ours.source_attention.project(h, "KV"), mask)
    close(memory, h)
    close(want, got)
    (want.square().sum() + got.square().sum()).backward()
    for a, b in same:
        close(a.grad, b.grad, 1e-8)


@pytest.mark.parametrize("name", [*SCRIPTS, "luong general local-p fed"])
def test_dropout(name):
    """In training alone, and only there where the paper has it, or the script says."""
    _, model = build(name, dropout=0.5)
    src, tgt = sentences(1)
    made, dropped = [], []
    for key, part in model.named_modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(lambda part, x, y: dropped.append(x[0]))
        if key.endswith(("W_O", "ffn")):  # a sublayer's output
            part.register_forward_hook(lambda part, x, y: made.append(y))
    noisy = model.train()(src, tgt[:, :-1])
    S, T, E, H = src.size(1), tgt.size(1) - 1, *list(SCRIPTS[script(name).__name__].values())[:2]
    steps = [(E + H,), (H,)] * T if name.endswith("fed") else [(T, E), (T, H)]
    want = [(S, E), (S, H), *steps, (T, H)]  # each layer's input, the softmax's
    if name == "bahdanau":
        want = [(S, E), (S, 2 * H), (T, E)]  # embeddings, annotations
    if name == "transformer":
        want = [(S, 8)] * 5 + [(T, 8)] * 7
        rest = [x for x in dropped if not any(x is y for y in made)]
        assert len(made) == 10 == len(dropped) - len(rest)
        for x, E, words in zip(rest, (model.E_x, model.E_y), (src, tgt[:, :-1])):
            close(x, E(words) * 8**0.5 + torch.tensor(positions(words.size(1), 8)))
    assert sorted(tuple(x.shape[1:]) for x in dropped) == sorted(want)
    assert (noisy - model.eval()(src, tgt[:, :-1])).abs().max() > 1e-3


def test_padding_and_batchmates_change_nothing(case):
    """Logits, alpha, gradients and greedy's words are those of each sentence alone."""
    module, model, src, tgt = case
    wide, long, weights = F.pad(src, (0, 4)), F.pad(tgt, (0, 3)), list(model.parameters())
    logits, alpha = model(wide, long[:, :-1], need_alpha=True)
    loss, losses = module.summed_loss(logits, long[:, 1:]), 0
    tokens = module.greedy(model, wide, 10)
    for b in range(len(src)):
        x, y = torch.tensor([unpadded(src[b])]), torch.tensor([unpadded(tgt[b])])
        one, where = model(x, y[:, :-1], need_alpha=True)
        losses = losses + module.summed_loss(one, y[:, 1:])
        close(logits[b, : one.size(1)], one[0])
        close(alpha[b, : one.size(1), : x.size(1)], where[0])
        assert unpadded(tokens[b]) == unpadded(module.greedy(model, x, 10)[0])
    for a, b in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(losses, weights)):
        close(a, b)


def test_the_future_is_invisible(case):
    """Stepping gives what the parallel pass gives, and other words later change nothing before."""
    _, model, src, tgt = case
    logits, memory = model(src, tgt[:, :-1]), model.encode(src)
    state = model.start(memory)
    for t in range(tgt.size(1) - 1):
        one, state = model.step(tgt[:, t], state, memory)
        close(one, logits[:, t])
        other = torch.cat([tgt[:, :t], (tgt[:, t:-1] + 1) % 11], 1)
        change = (model(src, other) - logits).abs().amax(-1)
        assert change[:, :t].sum() < 1e-9
        assert change[:, t:].amax(1).min() > 1e-6


def test_alpha(case):
    """Rows sum to 1, padding gets exactly 0, with gradients, without, and in inference mode."""
    module, model, src, tgt = case
    alphas = [module.align(model, src, tgt), model(src, tgt[:, :-1], need_alpha=True)[1]]
    with torch.inference_mode():
        _, alpha = model(src.clone(), tgt[:, :-1].clone(), need_alpha=True)
    for found in (*alphas, alpha.clone()):
        close(found, alphas[0])
        close(found.sum(-1), torch.ones(tgt[:, :-1].shape))
        assert found.min() == 0 == found.masked_select((src == PAD).unsqueeze(1)).max()
    if module.__name__ == "seq2seq_lstm":  # where no source word matters, none is preferred
        nn.init.zeros_(model.E_x.weight)
        even = (src != PAD) / (src != PAD).sum(1, keepdim=True)
        close(module.align(model, src, tgt), even.unsqueeze(1).expand_as(found), 1e-6)


def test_greedy(case):
    """Each word is the forced logits' best; EOS ends, PAD follows, limits are each one's own."""
    module, model, src, _ = case
    tokens = module.greedy(model, src, 10)
    forced = model(src, F.pad(tokens, (1, 0), value=BOS))[:, :-1, 1:].argmax(-1) + 1  # never PAD
    for row, best in zip(tokens.tolist(), forced.tolist()):
        end = next((k for k, word in enumerate(row) if word == EOS), len(row))
        assert row[: end + 1] == best[: end + 1] and set(row[end + 1 :]) <= {PAD}
    limits = torch.tensor([3, 0, 10, 1])
    want = tokens.masked_fill(torch.arange(tokens.size(1)) >= limits.unsqueeze(1), PAD)
    short = module.greedy(model, src, limits.tolist())
    assert F.pad(short, (0, want.size(1) - short.size(1))).equal(want)


SOURCES = torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD], [5, 8, EOS, PAD]])
ALONE = [torch.tensor([unpadded(row)]) for row in SOURCES]


def log_likelihoods(model, src, hypotheses):
    """log p of each list of target words, step by step."""
    tgt = padded([[BOS, *words] for words in hypotheses])
    memory = model.encode(src.expand(len(tgt), -1))
    state, total = model.start(memory), 0
    for before, word in pairwise(tgt.T):
        logits, state = model.step(before, state, memory)
        log_p = logits.log_softmax(-1).gather(-1, word.unsqueeze(1)).squeeze(1)
        total = total + log_p.masked_fill(word == PAD, 0)
    return total.tolist()


def ranked(model, src, hypotheses, penalty):
    """The hypotheses, the best first."""
    found = zip(log_likelihoods(model, src, hypotheses), hypotheses)
    scored = [(log_p / ((5 + len(words)) / 6) ** penalty, words) for log_p, words in found]
    return [words for _, words in sorted(scored, reverse=True)]


def naive_beam(model, src, limit, K, penalty):
    """Lists instead of tensors, and every hypothesis computed anew for each word."""
    hypotheses = [[]]
    for _ in range(limit):
        grown = []
        for words in hypotheses:
            ended = words[-1:] == [EOS]
            grown += [words] if ended else [[*words, w] for w in range(1, model.cfg.tgt_vocab)]
        hypotheses = ranked(model, src, grown, penalty)[:K]
    return hypotheses[0]


@scripts
@pytest.mark.parametrize("seed", slowly(range(6), (0, 1)))
def test_beam(name, seed):
    """What the naive search finds, each sentence as if alone; wide enough, the best of all."""
    module, model = build(name, seed, (0.5, 0.8, 1.2)[seed % 3], tgt_vocab=5)
    for limits, K, penalty in ([6, 4, 5], 2, 0.6), ([5, 6, 0], 3, 0.0), ([3, 4, 6], 3, 3.0):
        tokens = module.beam(model, SOURCES, torch.tensor(limits), K, penalty)
        for row, source, limit in zip(tokens, ALONE, limits):
            (alone,) = module.beam(model, source, limit, K, penalty)
            assert unpadded(row) == unpadded(alone) == naive_beam(model, source, limit, K, penalty)
            assert (row[len(unpadded(row)) :] == PAD).all()
    assert module.beam(model, SOURCES, 7, 1).equal(module.greedy(model, SOURCES, 7))
    every = [[EOS], *([w, EOS] for w in (BOS, UNK, 4))]
    every += [list(words) for words in product((BOS, UNK, 4), (BOS, UNK, 4), range(1, 5))]
    for row, source in zip(module.beam(model, SOURCES, 3, 4**3, 2.0 * seed), ALONE):
        assert unpadded(row) == ranked(model, source, every, 2.0 * seed)[0]


@pytest.mark.parametrize("first", slowly(range(0, 200, 20), (0,)))
def test_beam_by_chance(first):
    """Of a model that is a table: one that has ended takes one place, a second would do harm."""
    for seed in range(first, first + 20):
        module, model = build("bahdanau", seed, tgt_vocab=5)
        table = 2 * torch.randn(997, 5, dtype=torch.double)

        def start(memory, room=None):
            return ((~memory[2]).sum(1),)

        def step(y, state, memory, table=table):
            past = (state[0] * 31 + y * 7 + 1) % 997  # of all that came before
            return table[past], (past,)

        model.start, model.step = start, step
        for row, source in zip(module.beam(model, SOURCES, 8, 3, 5.0), ALONE):
            assert unpadded(row) == naive_beam(model, source, 8, 3, 5.0), seed


@scripts
def test_beam_is_worth_it(name):
    """Over many random models a beam finds likelier translations than greedy does, on average."""
    gains = []
    for seed in range(11):
        module, model = build(name, seed, 0.7, tgt_vocab=9)
        found = module.greedy(model, SOURCES, 8), module.beam(model, SOURCES, 8, 4)
        for first, best, source in zip(*found, ALONE):
            both = unpadded(first), unpadded(best)
            if both[0][-1:] == [EOS] or len(both[0]) == 8:  # a beam never says PAD
                plain, wide = log_likelihoods(model, source, both)
                gains.append(wide - plain)
    assert len(gains) > 15
    assert np.mean(gains) > 0.05


def vocabularies(*sizes):
    return [data.Vocabulary(data.SPECIALS + [f"w{i}" for i in range(4, n)]) for n in sizes]


@scripts
def test_unknown_words(name, monkeypatch):
    """model.cfg says how to search; with replace_unk an <unk> becomes the word alpha points at."""
    module, model = build(name, 3, beam=3, alpha=0.2)
    words, texts = vocabularies(13, 11), ["w4 w5 w6", "", "w7 ghost w9 w4", ["unheard", "w4"]]

    def fixed_beam(model, src, limit, K, penalty):
        assert (K, penalty) == (3, 0.2)
        return torch.tensor([[UNK, 4, UNK, 5, UNK, EOS] if n else [PAD] * 6 for n in limit])

    monkeypatch.setattr(module, "beam", fixed_beam)
    plain = module.translate(model, texts, words)
    assert plain == [["<unk>", "w4", "<unk>", "w5", "<unk>"] if text else [] for text in texts]
    model.cfg = dataclasses.replace(model.cfg, replace_unk=True)
    for text, before, after in zip(texts, plain, module.translate(model, texts, words)):
        source = data.words_of(text)
        (alpha,) = module.alignments(model, [(text, before)], words)
        best = [source[np.argmax(row[: len(source)])] for row in alpha[: len(before)]]
        assert after == [b if word == "<unk>" else word for b, word in zip(best, before)]


@pytest.mark.parametrize("K", [1, 2])
def test_translate(K):
    """Strings or lists, in their order, each as if alone, n + 50 words at most; nothing else."""
    module, model = build("bahdanau", beam=K)
    words, texts = vocabularies(13, 11), ["w4 w5 w6 w7 w8", "", "w9", " w5  un\u00a0heard w4 "]
    for bias in (5, -1000):  # how likely the end is
        nn.init.constant_(model.W_o.bias[:3].detach(), bias)
        found = module.translate(model, texts, words)
        assert found == module.translate(model, [re.findall("[^ ]+", x) for x in texts], words)
        for text, got in zip(texts, found):
            src = torch.tensor([[words[0][word] for word in re.findall("[^ ]+", text)] + [EOS]])
            (row,) = module.beam(model, src, src.size(1) + 49 if text else 0, K)
            assert got == words[1].decode(row.tolist())
    assert [len(got) for got in found] == [55, 0, 51, 53]
    for wrong in ([5], [["w4", 5]], [None], ["w4", 5], 5):
        with pytest.raises(TypeError):
            module.translate(model, wrong, words)
    assert module.translate(model, [], words) == module.alignments(model, [], words) == []


@scripts
def test_evaluate(name):
    """Loss, perplexity, BLEU and AER are what single sentences and sacreBLEU give."""
    module, model = build(name, 3, dropout=0.5, src_vocab=40, tgt_vocab=30)
    r, words, pairs = random.Random(0), vocabularies(40, 30), []
    for n in (1, 4, 7, 10, 11, 14):
        source, target = ([f"w{r.randrange(4, 30)}" for _ in range(k)] for k in (n, 15 - n))
        pairs.append((source, target, {(0, 0), (1, 0)}))
    got = module.evaluate(model.train(), pairs, words)  # which must not matter
    losses, links, hits = [], 0, 0
    for source, target, gold in pairs:
        src = torch.tensor([[words[0][word] for word in source] + [EOS]])
        tgt = torch.tensor([[BOS] + [words[1][word] for word in target] + [EOS]])
        logits, alpha = model.eval()(src, tgt[:, :-1], need_alpha=True)
        losses += F.cross_entropy(logits[0], tgt[0, 1:], reduction="none").tolist()
        best = alpha[0, :-1].argmax(-1).tolist()
        found = {(i, j) for j, i in enumerate(best) if i < len(source)}
        links += len(found) + len(gold)
        hits += len(found & gold)
    hypotheses = module.translate(model, [source for source, _, _ in pairs], words)
    want = dict(loss=np.mean(losses), ppl=math.exp(np.mean(losses)), aer=1 - 2 * hits / links)
    for key, rows in {"bleu": slice(6), "1-10": slice(4), "11-20": slice(4, 6)}.items():
        texts = [" ".join(words) for words in hypotheses[rows]]
        references = [" ".join(target) for _, target, _ in pairs[rows]]
        want[key] = sacrebleu.corpus_bleu(texts, [references], tokenize="none").score
    assert got | got.pop("bleu_by_length") == pytest.approx(want, rel=1e-5)
    again = module.evaluate(model, [list(map(" ".join, pair[:2])) for pair in pairs], words)
    assert again.items() >= (got | dict(aer=None)).items()  # strings, and no gold


@pytest.mark.parametrize("name", slowly(SCRIPTS, ("seq2seq_lstm", "transformer")))
@pytest.mark.parametrize("pieces", [1, 2, 3, 9])
@pytest.mark.parametrize("per, clip", [("token", math.inf), ("sentence", 0), ("token", 0.1)])
def test_train_step(name, pieces, per, clip, monkeypatch):
    """SGD moves by the step's rate times the smoothed mean loss's gradient, in so many pieces."""
    module, model = build(name, accumulate=pieces, per=per, smoothing=0.2, clip=clip)
    weights = list(model.parameters())
    monkeypatch.setattr(module, "learning_rate", lambda cfg, step: 0.1 / step)
    optimizer = torch.optim.SGD(weights)
    for n in (1, 2, 3):
        if n != 2:  # an optimizer that was saved counts on
            saved, optimizer = optimizer.state_dict(), torch.optim.SGD(weights)
            optimizer.load_state_dict(saved)
            step = module.make_train_step(model, model.cfg, optimizer)
        src, tgt = sentences(n)
        logits = model.eval()(src, tgt[:, :-1])
        log_p = logits.log_softmax(-1)
        word = log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1)
        losses = -(0.8 * word + 0.2 * log_p.mean(-1))[tgt[:, 1:] != PAD]
        close(module.summed_loss(logits, tgt[:, 1:], 0.2), losses.sum())
        mean = losses.mean() if per == "token" else losses.sum() / len(src)
        grads = torch.autograd.grad(mean, weights)
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads)).item()
        want = [p - 0.1 / n * grad * min(1, clip / norm or 1) for p, grad in zip(weights, grads)]
        assert norm > 0.1
        assert step(src, tgt).item() == pytest.approx(losses.mean().item(), abs=1e-5)
        assert model.training
        for a, b in zip(weights, want):
            close(a, b, 1e-6)


@pytest.mark.parametrize("name", slowly(MODELS, [*SCRIPTS, *QUICK[-2:]]))
def test_overfits_32_pairs(name):
    """Learns 32 pairs to 100 %: every sentence word for word."""
    module, pairs = script(name), data.toy(32, max_len=9)
    bitext, words = data.learn(pairs, joint="joint" in name)
    easy = dict(luong=dict(emb=64, hidden=64, init=0.2, lr=0.02, warmup=8))
    easy |= dict(transformer=dict(lr=0.5, warmup=60))
    flags = dict(dropout=0.0, smoothing=0.0) | easy.get(module.__name__, {}) | MODELS[name]
    flags |= dict(src_vocab=len(words[0].words), tgt_vocab=len(words[1].words))
    torch.manual_seed(1)
    model = module.Model(module.Config(**flags))
    src, tgt = (torch.from_numpy(x) for x in bitext.batch(np.arange(32)))
    step = module.make_train_step(model, model.cfg)
    losses = [step(src, tgt).item()]
    while losses[-1] > 0.01 and len(losses) < 200:
        losses.append(step(src, tgt).item())
    assert losses[-1] < 0.02 < losses[0]
    found = module.translate(model, [pair[0] for pair in pairs], words)
    assert found == [pair[1] for pair in pairs]


# ---- the scripts as text ------------------------------------------------------------------------


@scripts
def test_anatomy(name):
    """Short enough; a skeleton that is the same everywhere and knows no model; no borrowing."""
    source = (HERE / f"{name}.py").read_text()
    paper, skeleton = source.split(MARKER)
    classes = dict(zip(SCRIPTS, ("Seq2Seq", "RNNsearch", "LuongNMT", "Transformer")))
    assert script(name).Model.__name__ == classes[name]
    for other, cls in classes.items():
        assert (HERE / f"{other}.py").read_text().split(MARKER)[1] == skeleton
        assert not re.search(rf"{other}|{cls}", skeleton)
        assert not re.search(rf"^\s*(import|from) {other}\b", source, re.MULTILINE)
    assert len(ast.get_docstring(ast.parse(paper)).splitlines()) <= 25
    assert max(len(line) for line in source.splitlines()) <= 100
    for node in ast.parse(skeleton).body:
        if isinstance(node, ast.FunctionDef):
            assert len((ast.get_docstring(node) or "\n\n").splitlines()) == 1, node.name
            assert node.end_lineno - node.lineno < 45, node.name
    assert len(skeleton.splitlines()) <= SKELETON_LINES
    assert len(source.splitlines()) <= SCRIPT_LINES.get(name, 640)


def faults(tree):
    """The lines that break the house style: one idea a line."""
    tests = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.While))]
    welcome = {id(node) for test in tests for node in ast.walk(test)}
    allowed = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr) and id(node) not in welcome:
            yield node.lineno, "a walrus outside if and while"
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Lambda):
            yield node.lineno, "a lambda with a name"
        docstring = isinstance(getattr(getattr(node, "value", None), "value", None), str)
        if isinstance(node, ast.Expr) and not docstring and not isinstance(node.value, allowed):
            yield node.lineno, "an expression for its effect"
    starts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    yield from ((line, "two statements") for line in set(starts) if starts.count(line) > 1)


@pytest.mark.parametrize("name", [*SCRIPTS, "data"])
def test_house_style(name):
    """Walruses in tests alone, no lambda with a name, no effects as statements, one a line."""
    assert not list(faults(ast.parse((HERE / f"{name}.py").read_text())))
    for line in ("y = (x := 1)", "f = lambda: 1", "a and b()", "f(), g()", "a(); b()", "if a: b()"):
        assert list(faults(ast.parse(line))), line


# ---- the built-in corpus ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus():
    return data.toy(5000)


def test_corpus_gold(corpus):
    """Every French word comes from somewhere, and one link a word is nearly the whole truth."""
    best = []
    for source, target, gold in corpus:
        assert all(0 <= i < len(source) and 0 <= j < len(target) for i, j in gold)
        assert {j for _, j in gold} == set(range(len(target)))
        best.append({(min(i for i, k in gold if k == j), j) for j in range(len(target))})
    assert data.aer(best, [gold for *_, gold in corpus]) < 0.01


def test_corpus_splits_and_seeds(corpus):
    """Splits share no source; the seed decides, and nothing else does."""
    seen = {}
    for split in ("train", "valid", "test"):
        seen[split] = {" ".join(pair[0]) for pair in data.toy(1000, seed=3, split=split)}
    for one, other in itertools.combinations(seen.values(), 2):
        assert not one & other
    assert not {" ".join(pair[0]) for pair in corpus} & (seen["valid"] | seen["test"])
    assert data.toy(50, seed=5) == data.toy(50, seed=5) != data.toy(50, seed=6)
    code = "import data, zlib; print(zlib.crc32(repr([p[:2] for p in data.toy(200)]).encode()))"
    said = set()
    for seed in "12":
        env = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        said.add(subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True).stdout)
    assert len(said) == 1 and said != {""}
    with pytest.raises(data.InputError, match="--max-len 2: must be 3 to 1000"):
        data.toy(1, max_len=2)
    with pytest.raises(ValueError, match="weird"):
        data.toy(1, split="weird")


def test_corpus_language(corpus):
    """Enough words, every length, elisions and contractions, one French for each English."""
    for side in (0, 1):
        assert len({word for pair in corpus for word in pair[side]}) >= 200
    assert {len(source) for source, *_ in corpus} == set(range(3, 31))
    assert max(len(source) for source, *_ in data.toy(200, max_len=80)) > 75
    vowel = "aâeéèêiîoôuhœ"
    elided = ("le", "la", "je", "me", "ne", "de", "que", "ce", "ma", "sa")
    french = collections.defaultdict(set)
    for source, target, _ in corpus:
        french[" ".join(source)].add(" ".join(target))
        for a, b in itertools.pairwise(target):
            assert not (a in elided and b[0] in vowel), target
            assert not (a.endswith("'") and b[0] not in vowel), target
            assert not (a in ("de", "à") and b in ("le", "les", "des", "de")), target
        for a, b in itertools.pairwise(source):
            assert not (a == "a" and re.match("[ai]|e[^u]", b)), source
            assert not (a == "an" and b[0] not in "aei"), source
    assert all(len(said) == 1 for said in french.values())


class Search(data.Grammar):
    """The grammar, made to say a given sentence: it tries every choice in turn."""

    def __init__(self, words):
        super().__init__(0)
        self.wanted = words
        self.path = []  # of choices: [taken, how many there are]

    def choice(self, n):
        """The next choice of the path; a new one begins with its first way."""
        if len(self.path) == self.depth:
            self.path.append([0, n])
        self.depth += 1
        return self.path[self.depth - 1][0]

    def random(self):
        return (0.0, 0.999)[self.choice(2)]

    def pick(self, key):
        """Only what says a word of the sentence, if it says one at all."""
        known = {*self.wanted, "a", "not"}  # "a" may become "an", "not" a part of "cannot"
        options = []
        for entry in data.WORDS[key]:
            forms = entry[0].split("/") if isinstance(entry, list) else []
            if isinstance(entry, data.Word):
                forms = [entry.english, entry.base, entry.third, entry.past]
            if not forms or known & {*forms, f"{forms[0]}s"}:
                options.append(entry)
        if not options:
            raise LookupError
        return options[self.choice(len(options))]

    def say(self, word):
        next_word = self.wanted[len(self.english) : len(self.english) + 1]
        if next_word not in ([word], ["an"] if word == "a" else []):
            raise LookupError
        return super().say(word)

    def run(self, length):
        """The first pair that is the sentence, or None."""
        while True:
            self.depth = 0
            try:
                pair = self.sentence(length)
                if pair[0] == self.wanted:
                    return pair
            except LookupError:
                pass
            del self.path[self.depth :]
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return None
            self.path[-1][0] += 1


SAID = """
the agreement on the european economic area was signed in august 1992 .
l' accord sur la zone économique européenne a été signé en août 1992 .
the animal did not cross the street because it was too tired .
l' animal n' a pas traversé la rue parce qu' il était trop fatigué .
the animal did not cross the street because it was too dangerous .
l' animal n' a pas traversé la rue parce qu' elle était trop dangereuse .
i saw a cat on the mat
j' ai vu un chat sur le tapis
he hit me with a pie
il m' a frappé avec une tarte
a school that she visited is loved
une école qu' elle a visitée est aimée
the nurses ' cat saw her .
le chat des infirmières l' a vue .
the women that we admired arrived .
les femmes que nous avons admirées sont arrivées .
he never finds my small red cars .
il ne trouve jamais mes petites voitures rouges .
you cannot see them .
vous ne pouvez pas les voir .
the law was not signed in march 1996 .
la loi n' a pas été signée en mars 1996 .
a big cow slept near the house .
une grosse vache a dormi près de la maison .
this plan of the minister is important .
ce plan du ministre est important .
she danced in the market .
elle a dansé au marché .
she danced in the school .
elle a dansé à l' école .
she danced in a school .
elle a dansé dans une école .
she danced in the street .
elle a dansé dans la rue .
mary drew her hat .
marie a dessiné son chapeau .
mary drew his hats .
marie a dessiné ses chapeaux .
the girls slept because they were tired .
les filles ont dormi parce qu' elles étaient fatiguées .
i kept her pies because they were useful .
j' ai gardé ses tartes parce qu' elles étaient utiles .
many men saw some small birds near the garden
beaucoup d' hommes ont vu de petits oiseaux près du jardin
this child has drawn a beautiful tree
cet enfant a dessiné un bel arbre
""".strip().split("\n")

UNSAID = """
the women arrives .
she have slept .
a cat sleep .
he hits her .
i do not hit her .
i can not sing .
the law is signed in march 1996 .
i have slept in march 1996 .
i sing in march 1996 .
i saw a cat that sleeps in march 1996 .
he always slept in march 1996 .
the pie is difficult .
the street is black .
the city is left .
the house was crossed .
the plan of the plan is important .
the cat saw the dog because it was tired .
he did not see a cat .
we saw us .
""".strip().split("\n")


def sentences_said(english):
    """All that the grammar says for this English: French and gold."""
    words = english.split()
    lengths = range(len(words) - 1, len(words) + 4)
    return [pair for pair in (Search(words).run(length) for length in lengths) if pair]


@pytest.mark.parametrize("english, french", list(zip(SAID[::2], SAID[1::2])))
def test_the_grammar_says(english, french):
    """With this French and no other."""
    found = sentences_said(english)
    assert {" ".join(target) for _, target, _ in found} == {french}
    if english == data.EXAMPLE:
        english_of = (0, 1, 2, 3, 6, 5, 4, 7, 7, 8, 9, 10, 11, 12)
        assert found[0][2] == set(zip(english_of, range(14)))


@pytest.mark.parametrize("english", UNSAID)
def test_the_grammar_does_not_say(english):
    """Wrong words, wrong times, odd things, and what could be said in two ways."""
    assert not sentences_said(english)


# ---- text, batches, scores, pictures ---------------------------------------------------------


def test_vocabularies():
    """Frequent words first, then by the alphabet; pairs without a word or too long are left out."""
    pairs = [(["b", "a", "a", "<pad>"], ["x"]), (["a", "c", "b"], ["x", "y", "<unk>"])]
    source, target = data.learn(pairs)[1]
    assert source.words == ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c"]
    assert [source[w] for w in ("a", "nowhere", "<pad>", "<unk>")] == [4, UNK, UNK, UNK]
    assert source.decode([4, 6, UNK, EOS, PAD, PAD]) == ["a", "c", "<unk>"]
    assert data.learn(pairs, min_count=2)[1][0].words[4:] == ["a", "b"]
    one, two = data.learn(pairs, joint=True)[1]
    assert one.words == two.words == [*data.SPECIALS, "a", "b", "x", "c", "y"]
    bitext, (source, _) = data.learn(pairs, sizes=(5, 5))
    assert (source.words[4:], bitext.unknown()) == (["a"], 4 / 7)  # of the side that has more
    pairs = [(["a"], ["b"]), ([], ["b"]), (["a"], []), (["a"] * 4, ["b"]), (["a"], ["b"] * 4)]
    bitext, vocabularies = data.learn(pairs, max_len=3)
    for found in (bitext, data.Bitext(pairs, vocabularies, 3)):
        assert (len(found), found.skipped) == (1, 4)
        assert [x.tolist() for x in found.batch(np.array([0]))] == [[[4, EOS]], [[BOS, 4, EOS]]]
    assert len(data.Bitext(pairs, vocabularies)) == 5  # to score and translate, all are there


def test_batches():
    """Few shapes, which come again, and little padding; none is too large."""
    pairs = [*data.toy(1500, max_len=40), ([], []), ([], ["x"]), (["a"], [])]
    bitext, _ = data.learn(pairs)
    made = list(itertools.islice(bitext.batches(600, 20, 1), 200))
    for src, tgt in made:
        assert src.dtype == tgt.dtype == np.int64 and (tgt[:, 0] == BOS).all()
        assert src.size + tgt[:, 1:].size <= 600
        for x in (src, tgt):
            assert ((x == PAD) == (np.cumsum(x == EOS, 1) > (x == EOS))).all()
    assert data.cut(np.full(999, 7), 14 * 781, 999, rounded=True)[1] == 768
    assert max(len(x) for x, _ in made) == 20 and max(x.size + y.size for x, y in made) > 540
    for side in zip(*made):
        assert sum((x == PAD).sum() for x in side) < 0.1 * sum(x.size for x in side)
    shapes = collections.Counter((src.shape, tgt.shape) for src, tgt in made)
    assert len(shapes) < 40 and shapes.most_common(1)[0][1] > 10
    scored = bitext.in_order(2000)
    assert sorted(itertools.chain(*scored)) == list(range(len(pairs)))
    most = [2000 // max(32, 2 * max(n[x].max() for n in bitext.lengths)) for x in scored]
    assert all(len(x) == n for x, n in zip(scored[:-1], most)) and len(scored[-1]) <= most[-1]
    assert 5 * sum((bitext.batch(x)[0] == PAD).sum() for x in scored) < bitext.lengths[0].sum()


def test_the_step_alone_says_which_batch():
    """Every epoch holds every pair once, in other company; from step k on comes what comes k-th."""
    bitext, _ = data.learn(data.toy(1500, max_len=20))
    bitext.batch = lambda rows, unit: sorted(rows.tolist())  # numbers of pairs, not their words
    stream = list(itertools.islice(bitext.batches(600, 20, 1), 600))
    n = next(k for k in range(600) if sum(map(len, stream[:k])) >= 1500)
    for epoch in (stream[:n], stream[n : 2 * n], stream[2 * n : 3 * n]):
        assert sorted(itertools.chain(*epoch)) == list(range(1500))
    company, sizes = set(map(str, stream[:n])), list(map(len, stream))
    assert len(company.intersection(map(str, stream[n : 2 * n]))) < 0.3 * n
    assert sizes[:n] != sizes[n : 2 * n]
    for step in (0, 1, 7, n - 1, n, n + 5, 2 * n):
        later = itertools.islice(bitext.batches(600, 20, 1, step), 5)
        assert list(later) == stream[step : step + 5]
    assert stream[:n] != list(itertools.islice(bitext.batches(600, 20, 2), n))


def their_bleu(hypotheses, references):
    said, wanted = ([" ".join(words) for words in side] for side in (hypotheses, references))
    return pytest.approx(sacrebleu.corpus_bleu(said, [wanted], tokenize="none").score, abs=1e-6)


def test_bleu_equals_sacrebleu():
    """On random text, with empty sentences, with very short ones, and by the source's length."""
    assert data.bleu([], []) == 0
    for seed in range(100):
        r = random.Random(seed)
        references = [r.choices("abcde", k=r.randint(seed % 2, 12)) for _ in range(r.randint(1, 6))]
        hypotheses = [r.choices("abcde", k=r.randint(0, 3 * (seed % 5))) for _ in references]
        for k in range(seed % 3, len(references)):
            hypotheses[k] = [w if r.random() < 0.8 else r.choice("abcfg") for w in references[k]]
        assert data.bleu(hypotheses, references) == their_bleu(hypotheses, references)
    sources = [["x"] * n for n in (0, 1, 10, 11, 20, 41)]
    hypotheses, references = ["abcd", "abxd", "", "abcc", "ab", "abcd"], ["abcd"] * 6
    by_length = data.bleu_by_length(sources, hypotheses, references)
    for name, rows in {"1-10": slice(3), "11-20": slice(3, 5), "41-50": slice(5, 6)}.items():
        assert by_length.pop(name) == their_bleu(hypotheses[rows], references[rows])
    assert not by_length


def test_aer_by_hand():
    """Of the corpus, and no mean of sentences."""
    gold, guess = {(0, 0), (1, 2), (2, 1)}, {(0, 0), (1, 1)}
    assert (data.aer([gold], [gold]), data.aer([{(5, 5)}], [gold])) == (0, 1)
    assert (data.aer([set()], [set()]), data.aer([guess], [gold])) == (0, pytest.approx(1 - 2 / 5))
    assert data.aer([guess, gold], [gold, gold]) == pytest.approx(1 - 2 * 4 / (5 + 6))


def test_alignment_files(tmp_path):
    """.npz: the soft weights; .txt: each target word's maximum, no end marks; .svg: a picture."""
    alpha = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]])
    pair = ["red", "car"], ["voiture", "rouge", "."]
    data.write_alignments(tmp_path / "align", [pair, (["a"], [])], [alpha, np.ones((1, 2)) / 2])
    soft = np.load(tmp_path / "align.npz")
    assert [*soft["source"], *soft["target"]] == ["red car", "a", "voiture rouge .", ""]
    assert np.array_equal(soft["alpha_0"], alpha)
    assert (tmp_path / "align.txt").read_text() == "0-1 1-0\n\n"
    root = ElementTree.parse(tmp_path / "align.svg").getroot()
    cells = [(float(c.get("y")), float(c.get("x")), c) for c in root.iter() if "rect" in c.tag]
    shades = [float(cell.get("opacity")) for _, _, cell in sorted(cells, key=lambda c: c[:2])]
    assert np.allclose(shades, 0.07 + 0.93 * alpha[:3, :2].flatten(), atol=0.01)
    rows = data.heatmap(*pair, alpha).split("\n")
    assert [row.split() for row in rows[:3]] == [["r", "c"], ["e", "a"], ["d", "r"]]
    assert rows[3:6] == ["voiture ··▓▓", "  rouge ▓▓░░", "      . ░░░░"]


def test_pictures_are_bounded():
    """Whatever the sentence, the picture is small and well formed, and the heatmap printable."""
    many, long = (["a"] * 3000, ["b"] * 3000), (["x" * 5000], ["z" * 5000])
    odd = ["\x1b[31m", "\0", "<&>\"'", "\ufffe", "\u202e"], ["a\nb", "]]>"]
    for source, target in (many, long, odd, ([], [])):
        alpha = np.broadcast_to(0.5, (len(target) + 1, len(source) + 1))
        picture = data.svg(tuple(source), tuple(target), alpha)
        root = ElementTree.fromstring(picture)
        assert len(picture) < 500_000
        assert max(float(root.get("width")), float(root.get("height"))) < 2000
        lines = data.heatmap(source, target, alpha).split("\n")
        assert len(lines) < 100 and all(x.isprintable() and len(x) < 200 for x in lines)


# ---- the command line -----------------------------------------------------------------------

TEXT = ["--train", "train.en", "train.fr", "--valid", "valid.en.gz", "valid.fr.gz"]
MEAN = ["--steps", "2", "--every", "1", "--average", "2"]
PAIRS = data.toy(60, max_len=9)


def small(name):
    """A command that trains in a moment: eight steps, two looks at valid."""
    flags = "--warmup 1 --lr 0.2 --dropout 0.1 --tokens 300 --every 4 --steps 8"
    for field, size in SCRIPTS[name.split()[0]].items():
        flags += f" --{field.replace('_', '-')} {2 * size}"
    return [name, *TEXT, *flags.split(), "--out"]


SMALL = small("bahdanau")


def main(name, *args):
    script(name).main([*name.split()[1:], *map(str, args), "--device", "cpu"])


def run(*command, stdin=b"", allowed=(0,)):
    """stdout, and the lines on stderr, of the command line in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()

    def opened(path, *args, **how):
        return io.BytesIO(stdin) if path == 0 else open(path, *args, **how)

    speak = contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr)
    with pytest.MonkeyPatch.context() as patch, speak[0], speak[1]:
        patch.setattr(data, "open", opened, raising=False)
        try:
            main(*command)
        except SystemExit as stop:
            assert (stop.code or 0) in allowed, stderr.getvalue()
    return stdout.getvalue(), stderr.getvalue().splitlines()


def refusal(*command):
    """The one line of a command that ends with status 2."""
    _, (line,) = run(*command, allowed=[2])
    return line


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with text, gzipped where it is to validate on, and two finished runs."""
    folder = tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder):
        for side, language in enumerate(("en", "fr")):
            lines = [" ".join(pair[side]) + "\n" for pair in PAIRS]
            Path(f"train.{language}").write_text("".join(lines), encoding="utf-8")
            Path(f"valid.{language}.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
        run(*SMALL, "run")
        run(*SMALL, "mean", *MEAN)
    return folder


@pytest.fixture
def folder(template, tmp_path, monkeypatch):
    """A copy of the template, as the working directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents():
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def read_log(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def checkpoint(*path):
    return torch.load(Path(*path), weights_only=True)


def same(a, b):
    """Are two things equal, bit for bit, but for what a clock says?"""
    if isinstance(a, dict):
        clock = "seconds", "tokens_per_second"
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in clock)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def same_run(a, b):
    """Two runs ended with the same weights, optimisers, logs and alignments."""
    for file in ("last.pt", "model.pt"):
        assert same(checkpoint(a, file), checkpoint(b, file)), file
    assert same(read_log(a), read_log(b))
    assert Path(a, "align.txt").read_bytes() == Path(b, "align.txt").read_bytes()


VARIANTS = ["transformer --joint", "luong --score location", "luong --attention local-p"]


@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS, "luong --score concat --input-feeding"])
def test_train_translate_align(name, folder):
    """Train on one's own text, then use the folder alone; what only reads writes nothing."""
    stdout, _ = run(*small(name), "new")
    *looks, result = read_log("new")
    assert [line["step"] for line in looks] == [4, 8]
    assert {"final", "aer", "bleu_by_length", "seconds", "seed"} <= set(result)
    scores = "loss {loss:.4f}, perplexity {ppl:.3f}, BLEU {bleu:.2f}\n".format(**result)
    assert "60 pairs, 0 left out" in stdout and scores in stdout
    soft = np.load("new/align.npz")
    assert np.allclose(soft["alpha_0"].sum(1), 1, atol=1e-5)
    assert len(Path("new/align.txt").read_text().splitlines()) == len(soft["source"]) == 3
    words, config = (checkpoint("new/model.pt")[key] for key in ("words", "config"))
    assert (words[0] == words[1]) == config["joint"]
    before, use = contents(), (name.split()[0], "--out", "new")
    lines = ["", *(" ".join(source) for source, _, _ in PAIRS[:3]), "", "words nobody knows"]
    stdout, _ = run(*use, "--translate", stdin="\n".join(lines).encode())
    assert stdout.split("\n")[:-2] == ["", *soft["target"], ""]
    stdout, _ = run(*use, "--align", *TEXT[1:3])
    for line, (source, target, _) in zip(stdout.splitlines(), PAIRS, strict=True):
        links = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert all(i < len(source) and j < len(target) for i, j in links)
        assert len({j for _, j in links}) == len(links)
    assert scores in run(*use, "--test", *TEXT[4:])[0]
    assert contents() == before
    run(*use, "--align", *TEXT[1:3], "--picture", "picture.svg")
    groups = [node for node in ElementTree.parse("picture.svg").iter() if node.tag.endswith("}g")]
    assert len(groups) == 20


def test_without_flags(folder, monkeypatch):
    """The built-in corpus, scored against gold; a folder for each run, the latest one is used."""
    toy = data.toy
    monkeypatch.setattr(data, "toy", lambda n, **how: toy(n // 500 + 3, **how))
    for number in ("", "-2", "-3"):
        stdout, _ = run("bahdanau", *SMALL[7:-1], "--max-len", 8)
        assert f"everything is in runs/bahdanau{number}/" in stdout
        assert "103 pairs" in stdout and f"\n{data.EXAMPLE}\n" in stdout
        assert 0 <= read_log(f"runs/bahdanau{number}")[-1]["aer"] <= 1
    for name, age in (("bahdanau", 100), ("bahdanau-2", 10), ("bahdanau-3", 50)):
        os.utime(Path("runs", name, "log.jsonl"), (time.time() - age,) * 2)
    assert "everything is in runs/bahdanau-2/" in run("bahdanau", "--resume", "--steps", 9)[0]
    assert "runs/luong*: no such run" in refusal("luong", "--translate")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave torchrun out" in refusal("luong", "--translate")


def test_which_weights_are_kept(folder, monkeypatch):
    """Those that scored best on valid or, with --average N, the mean of the last N looks'."""
    for average in (1, 3):
        losses = iter([4.0, 1.0, 3.0, 2.0])
        monkeypatch.setattr(script("bahdanau"), "loss_of", lambda *_, x=losses: next(x, 5.0))
        run(*SMALL, f"mean-{average}", "--steps", 4, "--every", 1, "--average", average)
    recent = checkpoint("mean-3/last.pt")["recent"]
    assert same(checkpoint("mean-1/model.pt")["model"], recent[0])  # the second of four
    assert same(checkpoint("mean-1/last.pt")["recent"], recent[2:])
    for key, p in checkpoint("mean-3/model.pt")["model"].items():
        close(p, sum(weights[key] for weights in recent) / 3, 1e-6)


def test_load(folder):
    """A folder or a checkpoint, str or Path; flags change how it decodes, and not what it is."""
    load, saved = script("bahdanau").load, checkpoint("run/model.pt")
    for path in ("run", Path("run"), "run/model.pt", Path("run/last.pt")):
        model, vocabularies = load(path, beam=3)
        assert (model.training, model.cfg.beam) == (False, 3)
        assert same(dict(model.state_dict()), dict(saved["model"]))
        assert [vocabulary.words for vocabulary in vocabularies] == saved["words"]
    with pytest.raises(data.InputError, match="--hidden"):
        load("run", hidden=3)


def test_progress(folder):
    """A line at each look, or a bar where there is a terminal; in a thread as in any other."""
    look = "step {step}, loss {loss:.3f}, valid {valid_loss:.3f}, 0 s"
    wanted = [look.format(**line) for line in read_log("run")[:-1]]
    assert [re.sub(r"\d+ s$", "0 s", line) for line in run(*SMALL, "new")[1]] == wanted
    terminal, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    terminal.isatty = lambda: True
    with contextlib.redirect_stderr(terminal):
        thread = threading.Thread(target=main, args=[*SMALL, "newer"])
        thread.start()
        thread.join()
    same_run("run", "newer")
    assert all(shown in terminal.getvalue() for shown in ("8/8", wanted[1][8:-5]))
    assert signal.getsignal(signal.SIGINT) is handler


@scripts
def test_help_explains_every_flag(name):
    """Each field of Config is a flag, with an explanation and its default."""
    text, _ = run(name, "--help")
    for field in dataclasses.fields(script(name).Config):
        flag = "--" + field.name.replace("_", "-")
        entry = re.search(rf"^  {flag}\b(.*?)^( ? ?\S|\Z)", text, re.M | re.S)
        words = " ".join(entry[1].split())
        assert re.search(rf"\w+ \w+.* \[{field.default}\W", words), flag


# ---- faults ---------------------------------------------------------------------------------


def begin(work, *args):
    """The number of a child process that does work(*args), and speaks to files."""
    child = os.fork()
    if child:
        return child
    status, name = 99, os.getpid()
    try:
        with open(f"{name}.out", "w") as sys.stdout, open(f"{name}.err", "w") as sys.stderr:
            status = work(*args) or 0
    except SystemExit as stop:
        status = stop.code
    finally:
        os._exit(status)


def end(child):
    """(exit status, negative for a signal; stdout; the lines on stderr) of a child process."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    stdout, stderr = (Path(f"{child}.{name}").read_text() for name in ("out", "err"))
    return status, stdout, stderr.splitlines()


HAPPEN = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda *_: signal.raise_signal(signal.SIGINT),
    "bad weights": lambda model, *_: next(model.parameters()).data.fill_(math.nan),
    "bad loss": lambda bar, line: line.update(loss=math.inf),
    "full disk": lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
}


def sabotaged(fault, owner, function, number, *command):
    """What becomes of a command if something happens in the number-th call of owner.function."""
    count, real = itertools.count(1), getattr(owner, function)

    def faulty(*args, **how):
        if next(count) == number:
            HAPPEN[fault](*args)
        return real(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, faulty)
        return end(begin(main, *command))


FAULTS = [
    ("interrupt", data, "some_pairs", 1, 130, "^stopped$"),
    ("interrupt", script("bahdanau"), "update", 2, 130, "goes on with --resume --out new$"),
    ("bad weights", script("bahdanau"), "update", 2, 2, "step 2: the loss is not finite"),
    ("bad loss", data, "show", 2, 2, "step 2: the loss is not finite"),
    *(("full disk", data, "write", n, 2, "not written, File too large; wh") for n in (1, 5, 8)),
    *(("kill", data, "write", n, -signal.SIGKILL, "") for n in range(1, 11)),
    *(("kill", os, "replace", n, -signal.SIGKILL, "") for n in range(1, 11)),
]


@pytest.mark.parametrize("fault, owner, function, number, status, message", FAULTS)
def test_faults(fault, owner, function, number, status, message, folder):
    """One line, what was saved before is whole, and --resume ends as if nothing had been."""
    found, _, lines = sabotaged(fault, owner, function, number, *SMALL, "new", *MEAN)
    assert found == status and re.search(message, (lines or [""])[-1])
    assert all(re.match(r"step \d, loss", line) for line in lines[:-1])
    for path in Path("new").glob("*.pt"):
        checkpoint(path)  # is whole
    assert fault == "kill" or not list(Path("new").glob("*.tmp"))
    run(*SMALL, "new", *MEAN, *["--resume"] * Path("new").exists())
    same_run("mean", "new")


@scripts
def test_killed_between_two_looks(name, folder):
    """kill -9 at some step: --resume goes on from the last look, and not a bit differs."""
    again = [name, "--resume", "--out"]
    for function, number, command in (("make_optimizer", 1, small(name)), ("update", 6, again)):
        assert sabotaged("kill", script(name), function, number, *command, "parts")[0] == -9
    assert checkpoint("parts/last.pt")["step"] == 4
    run(*again, "parts")
    run(*small(name), "whole")
    same_run("whole", "parts")


def test_writing(tmp_path, monkeypatch):
    """On the disk before it takes its place; under a name that no other process uses."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda number: print(Path("file").read_text()))
    monkeypatch.setattr(os, "replace", lambda part, path: print(part, Path(part).read_text()))
    said = [end(begin(data.write, "file", b"new"))[1].split() for _ in range(2)]
    assert [words[::2] for words in said] == [["old", "new"], ["old", "new"]]
    assert said[0][1] != said[1][1]


class Malicious:
    def __reduce__(self):  # what a checkpoint must not do to whoever loads it
        return os.mkdir, ("owned",)


def test_bad_checkpoints(folder):
    """One line, nothing that is in it is run, and it stays as it is."""
    sound, saved = Path("run/model.pt").read_bytes(), checkpoint("run/model.pt")
    bad = [b"", sound[: len(sound) // 2], sound[:-1], b"hello\n"]
    for other in (Malicious(), saved | dict(model=Malicious()), [1], saved | dict(script="luong")):
        torch.save(other, "other")
        bad.append(Path("other").read_bytes())
    for content in bad:
        for path in (Path("run/model.pt"), Path("run/last.pt")):
            path.write_bytes(content)
        before = contents()
        for args in (["--align", *TEXT[1:3]], [*TEXT, "--resume"], ["--resume"]):
            line = refusal("bahdanau", *args, "--out", "run")
            assert re.match(r"run/\w+\.pt: not a sound checkpoint", line)
        assert contents() == before
    assert "luong.py" in line
    assert not Path("owned").exists()


def test_resume(folder, monkeypatch):
    """The first command again with --resume, and more steps; or without files: it knows them."""
    before = contents()
    refused = ["--hidden 12", "--seed 2", "--dropout 0.3", "--tokens 200", "--paper", "--joint"]
    for flags in (*refused, "--src-vocab 50", "--min-count 2", "--max-len 50"):
        line = refusal("bahdanau", *TEXT, "--resume", "--out", "run", *flags.split())
        assert re.search(r"--[\w-]+: \S+ in this run; leave it out", line)
    assert contents() == before
    shutil.copytree("run", "again")
    more = "--resume --steps 12 --every 1 --lr 0.001 --warmup 3 --clip 2"
    run(*SMALL, "run", "--src-vocab", 30000, *more.split())
    assert [entry.get("step") for entry in read_log("run")] == [4, 8, 9, 10, 11, 12, None]
    monkeypatch.setattr(data, "toy", None)  # not the built-in corpus
    run("bahdanau", "--out", "again", *more.split())
    same_run("run", "again")
    for file in ("model.pt", "log.jsonl", "align.npz", "align.txt", "align.svg"):
        Path("again", file).unlink()
    run("bahdanau", "--out", "again", "--resume")  # last.pt is enough, if only to report
    assert sorted(os.listdir("again")) == sorted(os.listdir("run"))
    run("bahdanau", "--out", "again", "--resume", "--steps", 13)
    command = [*SMALL, "joint", "--joint", "--tgt-vocab", 20]  # which says nothing with --joint
    run(*command)
    run(*command, "--resume")


def claim_them(who, moment):
    """Claims a hundred folders, each at its moment, and notes those it got."""
    for k in range(100):
        while time.perf_counter() < moment + 0.003 * k:
            pass
        with contextlib.suppress(data.InputError):
            data.claim(Path(f"runs/{k}"))
            Path(f"{who}-{k}").touch()


def test_two_runs_with_one_name(folder):
    """Whoever comes second gets a line, be it in the same instant; --resume wants a first one."""
    moment = time.perf_counter() + 0.2
    for child in [begin(claim_them, who, moment) for who in "ab"]:
        assert end(child)[0] == 0
    assert all(Path(f"a-{k}").exists() != Path(f"b-{k}").exists() for k in range(100))
    for gone in ("nothing", "log.jsonl", "last.pt"):
        Path("run", gone).unlink(missing_ok=True)
        before = contents()
        assert "run: is a run already; add --resume, or name another" in refusal(*SMALL, "run")
        assert contents() == before
    assert "nowhere" in refusal(*SMALL, "nowhere", "--resume")


def unread(*command):
    """A command whose stdout nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    with open(1, "w", closefd=False) as sys.stdout:
        main(*command)


def test_closed_streams(folder, monkeypatch):
    """2>&- is no reason to stop; a reader that has seen enough is no error."""
    assert end(begin(unread, "bahdanau", "--align", *TEXT[1:3], "--out", "run")) == (0, "", [])
    monkeypatch.setattr(sys, "stderr", None)  # what Python makes of 2>&-
    main(*SMALL, "new")
    same_run("run", "new")


def test_torchrun_equals_one_process(folder):
    """One process begins, two go on, of which one speaks: as if alone, to float rounding."""
    command = [*SMALL, "one", "--dropout", 0, "--tokens", 40]  # some batches have a single row
    run(*command)
    command += ["--out", "two"]
    assert sabotaged("interrupt", script("bahdanau"), "update", 6, *command)[0] == 130
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    torchrun += [HERE / "bahdanau.py", *command[1:], "--accumulate", 2, "--resume"]
    how = dict(capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    done = subprocess.run([*map(str, torchrun), "--device", "cpu"], timeout=300, **how)
    assert (done.stdout.count("60 pairs"), done.stderr.count("step 8")) == (1, 1), done.stderr
    for x, y in zip(read_log("one"), read_log("two"), strict=True):
        assert (x.get("step"), x["loss"]) == (y.get("step"), pytest.approx(y["loss"], abs=1e-4))
    weights = [checkpoint(out, "last.pt")["recent"][-1] for out in ("one", "two")]
    for p, q in zip(*(w.values() for w in weights), strict=True):
        close(p, q, 1e-3)


# ---- bad input ------------------------------------------------------------------------------

FRENCH = "".join(" ".join(pair[1]) + "\n" for pair in PAIRS).encode()
BAD_TEXT = {  # what is said about it
    "bad ends after line 1": b"un\n",
    "bad, line 2: not UTF-8": b"un\n\xe9\n",
    "bad, line 2: has a NUL byte": b"un\nun\0\n",
    "bad, line 1: has CR LF": FRENCH.replace(b"\n", b"\r\n"),
    "bad, line 1: has a byte-order mark": b"\xef\xbb\xbf" + FRENCH,
    "bad, line 1: ": FRENCH.decode().encode("utf-16"),
    "bad.gz: cannot be read": FRENCH,
    "bad.gz: cannot be read, ": gzip.compress(FRENCH)[:-20],
}


def test_bad_text(folder):
    """File and line are named, in training and in use, and nothing is written."""
    for message, content in BAD_TEXT.items():
        file = re.match("[a-z.]+", message)[0]
        Path(file).write_bytes(content)
        before = sorted(folder.rglob("*"))
        for args in (["--train", "train.en", file, *TEXT[3:]], [*TEXT[:4], "train.en", file]):
            assert message in refusal("bahdanau", *args, "--out", "new")
        for mode in ("--align", "--test"):
            assert message in refusal("bahdanau", mode, "train.en", file, "--out", "run")
        assert sorted(folder.rglob("*")) == before


MISTAKES = """
--train train.en nowhere --valid train.en train.fr | nowhere: cannot be read, No such file
--train empty empty --valid train.en train.fr | no pair of 1 to 100 words
--train train.en train.fr --valid empty empty | empty: is empty
--train train.en train.fr | give both
--train train.en train.fr --valid train.en train.fr --min-count 999 | --min-count 999
--train train.en train.fr --translate | not allowed with
--test train.en train.fr --out run --picture a.svg | --picture a.svg: goes with
--align train.en train.fr --out run --picture train.en | --picture train.en: name a file
--device cuda:99 | invalid choice: 'cuda:99'
--step 3 | --step
--every 0 | --every 0: must be at least 1
--src-vocab 4 | --src-vocab 4: must be at least 5
--dropout inf | --dropout inf: must be below 1
--seed 9223372036854775808 | must be below 9223372036854775808
--max-len 100000 | --max-len 100000: must be 3 to 1000
--train train.en train.fr --valid train.en train.fr --out /proc/new | /proc/new
--translate --out nowhere | nowhere
--translate --out run --hidden 12 | --hidden: 10 in this run
--train train.en train.fr --valid train.en train.fr --out train.en | train.en
luong --score location --attention local-p | use --attention global
transformer --heads 5 | --heads 5
transformer --align-layer 3 | --align-layer
"""


@pytest.mark.parametrize("line", MISTAKES.strip().split("\n"))
def test_mistakes(line, folder):
    """A user's mistake gets one line that says what is wrong, and leaves no trace."""
    args, message = line.split(" | ")
    name = args.split()[0] if args[0] != "-" else "bahdanau"
    Path("empty").touch()
    before = sorted(folder.rglob("*"))
    assert message in refusal(name, "--out", "new", *args.removeprefix(name).split())
    assert sorted(folder.rglob("*")) == before


def test_nonsense_values_of_every_flag(folder):
    """Each is refused in one line that names the flag, before anything is written."""
    for field in dataclasses.fields(script("bahdanau").Config):
        flag = "--" + field.name.replace("_", "-")
        for value in ("-1", "nan"):
            assert flag in refusal("bahdanau", *TEXT, f"{flag}={value}", "--out", "new")
    assert not Path("new").exists()


def test_odd_lines_in_training(folder):
    """Too long or empty: left out, and counted. Many words unknown: a line with their share."""
    with open("train.en", "a") as en, open("train.fr", "a") as fr:
        print("a b", "a " * 101, "", sep="\n", file=en)
        print("a " * 101, "a b", "a", sep="\n", file=fr)
    counts = collections.Counter(word for source, _, _ in PAIRS for word in source)
    lost = 1 - sum(n for _, n in counts.most_common(2)) / counts.total()
    for size, wanted in ((6, [True, False]), (1000, [False])):
        stdout, lines = run(*SMALL, f"new{size}", "--steps", 1, "--src-vocab", size)
        assert "60 pairs, 3 left out" in stdout
        assert [f"{lost:.0%} of " in line for line in lines] == wanted


def test_lines_are_answered_in_their_order(folder):
    """2,500 lines like each of them alone; what is too long or no text, line for line."""
    sources = [" ".join(source) for source, _, _ in PAIRS]
    lines = [sources[k % 60] if k % 7 else "" for k in range(2501)]
    use = "bahdanau", "--translate", "--out", "run"
    stdout, _ = run(*use, stdin="\n".join(lines).encode())
    model, vocabularies = script("bahdanau").load("run")
    alone = {line: script("bahdanau").translate(model, [line], vocabularies) for line in sources}
    assert stdout.split("\n")[:-1] == [" ".join(*alone.get(line, [""])) for line in lines]
    first = b"\xef\xbb\xbf" + sources[0].encode() + b" \r"
    odd = b"\n".join([first, b"\xff\xfe\0", b"", b"he " * 1001, b"end"])
    stdout, lines = run(*use, "--replace-unk", stdin=odd)
    found = stdout.split("\n")
    assert (len(found), found[2], found[3]) == (6, "", "")
    assert found[0] == " ".join(*alone[sources[0]]) or "<unk>" in alone[sources[0]][0]
    assert [line for line in lines if "line 4: more than 1,000 words" in line]
    assert run(*use)[0] == ""


def dirty(r, content):
    """content as it may arrive: with bytes put in, taken out, changed; or cut."""
    odd = [b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf", b" " * 50, b"a " * 150, b"a " * 1200, b""]
    for _ in range(r.choice((1, 1, 2, 10))):
        at = r.randrange(len(content) + 1)
        put = r.choice([*odd, r.randbytes(4), content[at : at + 40]])
        content = content[:at] + put + content[at + r.choice((0, 1, 5)) :]
    return content[: r.choice((None, r.randrange(len(content) + 1)))]


@pytest.mark.slow
@scripts
def test_random_input(name, folder):
    """Random bytes in every file there is, 100 times: a run or one line, and no damage."""
    new, use = [*small(name), "new", *MEAN], [name, "--out", "made"]
    run(*new, "--out", "made")
    commands = [*use, "--translate"], [*use, "--align", *TEXT[1:3]], [*use, "--resume"], new
    sound, seen, r = contents(), set(), random.Random(name)
    for path in 20 * [Path(file) for file in (*TEXT[1:3], *TEXT[4:], "made/last.pt")]:
        spoilt = dirty(r, sound[path])
        path.write_bytes(spoilt)
        for number, command in enumerate(commands):
            before = contents()
            stdout, lines = run(*command, stdin=spoilt, allowed=(0, 2))
            told = [line for line in lines if not re.search("loss .* s$|unk|empty$", line)]
            assert len(told) <= 1, (command, lines)
            assert not told or contents() == before or "not finite" in told[0], (command, told)
            assert number or stdout.count("\n") == len(io.BytesIO(spoilt).readlines())
            seen.add((number, len(told)))
        shutil.rmtree("new", ignore_errors=True)
        for path, whole in sound.items():
            path.write_bytes(whole)
    assert len(seen) == 7  # all are translated


def translate_many():
    for n in (8000, 100_000):
        lines = "".join(" ".join(PAIRS[k % 60][0]) + "\n" for k in range(n))
        stdout, _ = run("bahdanau", "--translate", "--out", "run", stdin=lines.encode())
        print(stdout.count("\n"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@pytest.mark.slow
def test_many_lines_in_little_memory(folder):
    """100,000 lines take hardly more memory than 8,000."""
    few, peak, many, later_peak = map(int, end(begin(translate_many))[1].split())
    assert (few, many, later_peak < 1.2 * peak) == (8000, 100_000, True)


def test_readme_commands_exist():
    """Every script and flag that README's commands name is there."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    commands = re.findall(r"^[^#|\n]*?(\w+)\.py\b(.*)$", "\n".join(blocks), re.M)
    assert {name for name, _ in commands} >= {"bahdanau", "test_all"}
    for name, rest in commands:
        assert list(HERE.rglob(f"{name}.py")), name
        if name in SCRIPTS:
            known = set(re.findall(r"--[a-z-]+", run(name, "--help")[0]))
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, (name, rest)


def test_links_point_at_the_right_lines():
    """Each piece of code stands on the line it is linked to; the page is of its film."""
    pages = [HERE / "README.md", *HERE.glob("docs/*.md")]
    pattern = r"\[`([^`]+)`\]\((?:\.\./)?(\w+\.py)#L(\d+)\)"
    rows = [row for page in pages for row in re.findall(pattern, page.read_text())]
    assert len(rows) >= 12
    for code, file, line in rows:
        assert code in (HERE / file).read_text().split("\n")[int(line) - 1], (code, file, line)
    film = (HERE / "docs/runs/film.json").read_text().strip().replace("</", "<\\/")
    page = (HERE / "docs/page.html").read_text().replace("/* film */", film)
    assert page == (HERE / "docs/attention.html").read_text()


def test_readme_python(folder):
    """README's lines from Python, as they stand there, do what they say."""
    shutil.copytree("run", "runs/fr")
    names = {"src": torch.tensor([[4, 5, EOS]]), "tgt": torch.tensor([[BOS, 6, EOS, PAD]])}
    shapes = dict(s=(2, 512), h=(2, 5, 1024), h_t=(2, 3, 512), h_bar=(2, 5, 512))
    for name, shape in (shapes | dict(y=(2, 3, 512), x=(2, 5, 512))).items():
        names[name] = torch.randn(shape)
    names["mask"] = torch.arange(5) >= torch.tensor([[5], [3]])
    kinds = ["AdditiveAttention", "LuongAttention", "MultiHeadAttention"]
    names |= {kind: getattr(script(name), kind) for name, kind in zip([*SCRIPTS][1:], kinds)}
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    exec(blocks[0], names)
    assert ElementTree.parse("man.svg").getroot().tag.endswith("svg")
    assert [alpha.shape[1] for alpha in names["alphas"]] == [5, 5]
    exec(blocks[1], names)
    assert names["alpha"].shape == (1, 3, 3)
    exec(blocks[2], names)
    assert names["out"].shape == (2, 3, 512)
    assert (names["alpha"][1, :, :, 3:] == 0).all()


def test_wrong_types(folder):
    """A TypeError that says what to give, never a translation of letters."""
    with pytest.raises(data.InputError, match="--per tokens: must be one of token, sentence"):
        script("bahdanau").Config(per="tokens")
    model, vocabularies = script("bahdanau").load("run")
    for wrong in ("the cat", [3], [["a", 4]], [None]):
        with pytest.raises(TypeError, match="sentence"):
            script("bahdanau").translate(model, wrong, vocabularies)
    for wrong in (("the cat", "le chat"), [("the cat", 5)]):
        with pytest.raises(TypeError, match="sentence"):
            script("bahdanau").alignments(model, wrong, vocabularies)


def test_pictures_of_own_sentences(folder):
    """--picture draws the first twenty sentences; words that nobody knows get one warning."""
    lines = "\n".join(" ".join(source) for source, *_ in PAIRS[:30]) + "\n"
    command = ["bahdanau", "--translate", "--out", "run"]
    plain, errors = run(*command, stdin=lines.encode())
    drawn, _ = run(*command, "--picture", "own.svg", stdin=lines.encode())
    assert plain == drawn
    assert not errors
    titles = [title.text for title in ElementTree.parse("own.svg").iter() if "title" in title.tag]
    assert len(titles) == sum(
        len(source) * len(line.split())
        for (source, *_), line in zip(PAIRS[:20], plain.split("\n"), strict=False)
    )
    _, errors = run(*command, stdin=b"nobody knows this\n" * 2500)
    assert len(errors) == 1
    assert "a fifth of the words are unknown" in errors[0]


def test_at_a_terminal(folder, monkeypatch):
    """A prompt, a translation and its heatmap, line by line."""
    monkeypatch.setattr(os, "isatty", lambda _: True)
    said, errors = run("bahdanau", "--translate", "--out", "run", stdin=b"the cat sleeps .\nhe\n")
    assert errors == ["> > > "] or "".join(errors).count("> ") == 3
    assert said.count("from 0.05 ·") == 2


TOKENS = """\ufeffL'accord, c'est signé. | L' accord , c' est signé .
The king's dog didn't sleep. | The king 's dog didn 't sleep .
Aujourd'hui 3.5% of 1,000 (or so)... | Aujourd' hui 3.5 % of 1,000 ( or so ) ...
Mr. Smith: "qu'il dort!" | Mr. Smith : " qu' il dort ! "
the nurses&apos; cafe\u0301 हिन्दी | the nurses ' café हिन्दी
 | """


def test_tokenize():
    """As Moses splits it, once for all, a line for a line; what is not UTF-8 is refused."""
    raw, words = zip(*(line.split(" | ") for line in TOKENS.split("\n")))
    command = ["env", "PYTHONIOENCODING=ascii", sys.executable, HERE / "data.py"]
    done = subprocess.run(command, input="\r\n".join(raw + words).encode(), capture_output=True)
    assert done.stdout.decode() == "\n".join(2 * words)
    done = subprocess.run(command, input=b"one\rtwo\ncaf\xe9\n", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr[:15]) == (2, b"one two\n", b"stdin, line 2: ")


# ---- on a GPU -------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRIED = [*((name, {}) for name in SCRIPTS), ("bahdanau", dict(optimizer="adadelta", lr=1.0))]
TRIED += [("luong", dict(optimizer="sgd", lr=0.5, input_feeding=True, attention="local-p"))]


def batch(n, pad=False):
    """Some sentences; without padding their sources have one length, and shapes come again."""
    r = random.Random(n)
    src, tgt = torch.full((4, 8), PAD), torch.full((4, 9), PAD)
    for row in range(4):
        S, T = 5 + (n + pad * row) % 3, 3 + (n + row) % 5
        src[row, : S + 1] = torch.tensor([*r.choices(range(4, 13), k=S), EOS])
        tgt[row, : T + 2] = torch.tensor([BOS, *r.choices(range(4, 11), k=T), EOS])
    return src[:, (src != PAD).any(0)], tgt


def trained(name, seed=0, device="cuda", pad=False, **changes):
    """(model, losses) of 50 steps, over shapes in any order."""
    sizes = {k: n if k in ("layers", "heads", "D") else 8 * n for k, n in SCRIPTS[name].items()}
    sizes |= dict(src_vocab=13, tgt_vocab=11, dropout=0.3, steps=60, warmup=10)
    torch.manual_seed(0)
    model = script(name).Model(script(name).Config(**sizes | changes)).to(device)
    step, losses = script(name).make_train_step(model, model.cfg), []
    for n in range(50):
        torch.manual_seed(seed + n)
        src, tgt = (x.to(device if n % 2 else "cpu") for x in batch(n * n, pad))
        losses.append(step(src, tgt).item())
    return model, torch.tensor(losses)


def found_by(module, model):
    """What greedy and beam search find, padded sources and all."""
    sources = [batch(n, pad=n % 2)[0].cuda() for n in range(8)]
    found = [module.greedy(model, src, 20).tolist() for src in sources]
    return found + [module.beam(model, src, 20, 3, 0.6).tolist() for src in sources]


@cuda
@pytest.mark.parametrize("name, changes", TRIED)
def test_graphs_change_nothing(name, changes, monkeypatch):
    """Replayed as without graphs, to bf16's rounding; the seed decides a replayed dropout."""
    (model, losses), (_, again), (_, other) = (trained(name, s, **changes) for s in (0, 0, 1))
    assert losses[-10:].sum() < losses[:10].sum()
    assert torch.equal(losses, again)
    assert not torch.equal(losses, other)
    found = found_by(script(name), model)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    with pytest.raises(TypeError):
        trained(name, **changes)
    monkeypatch.setattr(script(name), "graphed", lambda function, *_: function)
    assert found_by(script(name), model) == found
    plain_model, plain_losses = trained(name, **changes)
    close(losses, plain_losses, 1e-2)
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        close(p, q, 1e-2)


@cuda
@scripts
def test_padded_sources_on_a_gpu(name):
    """Sources of several lengths give the losses they give on a CPU."""
    cpu, gpu = (trained(name, device=d, pad=True, dropout=0.0)[1] for d in ("cpu", "cuda"))
    close(cpu[:10], gpu[:10], 0.1)


@cuda
@scripts
def test_a_run_on_a_gpu(name, folder):
    """The command line, from training to the last line of the log; on, and back to a CPU."""
    command = [*small(name)[1:], "new", "--device", "cuda"]
    script(name).main(command)
    script(name).main([*command, "--steps", "16", "--resume"])
    assert [look.get("step") for look in read_log("new")] == [4, 8, 12, 16, None]
    assert run(name, "--translate", "--out", "new", stdin=b"the cat\nhe")[0].count("\n") == 2


@cuda
@scripts
def test_compiled(name):
    """--compile changes nothing, and the compiled model can be used as it is."""
    (_, plain), (model, losses) = (trained(name, dropout=0.0, compile=c) for c in (False, True))
    close(plain, losses, 0.05)
    assert len(found_by(script(name), model)) == 16
