"""Every result is compared with an independent reference: naive loops over the papers' equations,
finite differences, torch.nn, sacreBLEU, exhaustive search, or an uninterrupted run."""

import dataclasses
import doctest
import gzip
import html
import importlib
import inspect
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from contextlib import chdir, redirect_stderr, redirect_stdout
from itertools import chain, combinations, count, islice, product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import sigmoid, softmax, tanh

import data
from data import BOS, EOS, PAD, UNK
from docs import draw
from docs import show_attend_tell as captions

HERE = Path(__file__).parent
torch.set_num_threads(1)  # the models are tiny
torch.backends.mkldnn.set_flags(False)  # as in the scripts

SCRIPTS = dict(  # with model sizes for the tests
    seq2seq_lstm=dict(emb=6, hidden=5, layers=2),
    bahdanau=dict(emb=6, hidden=5, attn=7, maxout=4),
    luong=dict(emb=6, hidden=5, layers=2, window=2),
    transformer=dict(d_model=8, d_ff=10, heads=2, layers=2),
)
scripts = pytest.mark.parametrize("name", SCRIPTS)
LUONG = [*product(("dot", "general", "concat"), ("global", "local-m", "local-p"))]
LUONG += [("location", "global")]
ATTENTIONS = ["additive", "multi-head", *map(" ".join, LUONG)]
MODELS = {"seq2seq_lstm": {}, "bahdanau": {}, "transformer": {}}
MODELS["seq2seq_lstm forward"] = dict(reverse=False)
MODELS["transformer shared"] = dict(share_vocab=True, align_layer=1)
MODELS["luong few positions"] = dict(score="location", max_len=4)
for (score, kind), feeding in product(LUONG, (False, True)):
    flags = dict(score=score, attention=kind, input_feeding=feeding)
    MODELS[f"luong {score} {kind}{' feeding' * feeding}"] = flags


def script(name):
    return importlib.import_module(name.split()[0])


def build(name, seed=0, std=0.5, **changes):
    """Return a script and a random float64 model."""
    module = script(name)
    torch.manual_seed(seed)
    sizes = dict(src_vocab=13, tgt_vocab=11, dropout=0.0) | SCRIPTS[module.__name__]
    model = module.Model(module.Config(**sizes | MODELS.get(name, {}) | changes)).double().eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * std)  # weights initialized to zero would hide errors
    return module, model


def pad(rows):
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def random_batch(seed):
    """Return src and tgt of four pairs of 1 to 8 tokens."""
    r = random.Random(seed)
    lengths = (8, 1, r.randint(1, 8), r.randint(1, 8))
    sources = [r.sample(range(4, 13), n) + [EOS] for n in lengths]  # no repeats, for seq2seq()
    targets = [[BOS, *r.choices(range(4, 11), k=r.randint(1, 8)), EOS] for _ in lengths]
    return pad(sources), pad(targets)


def assert_close(a, b, tolerance=1e-9):
    """Compare two tensors, or two lists or dicts of tensors."""
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False)


# ---- the papers as naive float64 loops over a sentence pair: log p of each token, and alpha -----


def gru(p, name, x):
    """Return the states of torch's GRU, which has r * (U h + d) where the paper has U (r * h)."""
    W, U, b, d = (p[key] for key in p if key.startswith(f"{name}."))
    h = [torch.zeros_like(U[0])]
    for x_t in x:
        a_r, a_z, a = (W @ x_t + b).chunk(3)
        u_r, u_z, u = (U @ h[-1] + d).chunk(3)
        z = sigmoid(a_z + u_z)
        h.append((1 - z) * tanh(a + sigmoid(a_r + u_r) * u) + z * h[-1])
    return h[1:]


def lstm(p, name, x, state):
    """Take one step of a multi-layer LSTM; return the top layer's h, and (h, c) of every layer."""
    new_state = []
    for layer, (h, c) in enumerate(state):
        W, U, b, d = (p[key] for key in p if key.startswith(f"{name}.layers.{layer}."))
        i, f, g, o = (W @ x + U @ h + b + d).chunk(4)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        x = sigmoid(o) * tanh(c)
        new_state.append((x, c))
    return x, new_state


def encode(p, source, cfg):
    """Return the encoder's top-layer states, keyed by position from 1, and its final state."""
    h_bar, state = {}, [(torch.zeros(cfg.hidden).double(),) * 2] * cfg.layers
    order = range(1, len(source) + 1)
    for s in reversed(order) if getattr(cfg, "reverse", True) else order:
        h_bar[s], state = lstm(p, "encoder", p["E_x.weight"][source[s - 1]], state)
    return h_bar, state


def fixed_vector(p, source, target, cfg):
    """Return log p of each target token by Sutskever et al."""
    log_p, (_, state) = [], encode(p, source, cfg)
    for previous, token in zip(target, target[1:]):
        h, state = lstm(p, "decoder", p["E_y.weight"][previous], state)
        log_p.append(softmax(p["W.weight"] @ h + p["W.bias"], 0)[token].log())
    return torch.stack(log_p)


def seq2seq(p, source, target, cfg, eps=1e-5):
    """Sutskever et al.; alpha is the sensitivity of log p to the scale of a source embedding."""
    E, slopes = p["E_x.weight"], []
    for token in source:
        change = eps * F.one_hot(torch.tensor(token), len(E)).unsqueeze(1)
        scaled = (p | {"E_x.weight": E * (1 + x)} for x in (change, -change))
        up, down = (fixed_vector(q, source, target, cfg) for q in scaled)
        slopes.append((up - down).abs())  # finite differences
    return fixed_vector(p, source, target, cfg), (torch.stack(slopes) / sum(slopes)).T


def rnnsearch(p, source, target, cfg):
    """Bahdanau et al."""
    x = [p["encoder.E.weight"][token] for token in source]
    right = gru(p, "encoder.forward_rnn", x)
    left = gru(p, "encoder.backward_rnn", x[::-1])[::-1]
    h = [torch.cat(pair) for pair in zip(right, left)]  # (7)
    W, b, C = p["cell.W.weight"], p["cell.W.bias"], p["cell.C.weight"]
    U_zr, U = p["cell.U_zr.weight"], p["cell.U.weight"]
    W_a, U_a, v_a = (p[f"attention.{k}"] for k in ("W_a.weight", "U_a.weight", "v_a"))
    s = tanh(p["W_s.weight"] @ left[0] + p["W_s.bias"])  # A.2.2
    c, log_p, alphas = torch.zeros_like(h[0]), [], []
    for previous, token in zip(target, target[1:]):
        E_y = p["E.weight"][previous]
        a_z, a_r, a = (W @ E_y + b + C @ c).chunk(3)
        u_z, u_r = (U_zr @ s).chunk(2)
        z, r = sigmoid(a_z + u_z), sigmoid(a_r + u_r)  # A.1.1
        s = (1 - z) * s + z * tanh(a + U @ (r * s))  # the authors' order: s has read y_{i-1}
        e = torch.stack([v_a @ tanh(W_a @ s + U_a @ h_j) for h_j in h])  # A.1.2
        alpha = softmax(e, 0)  # (6)
        c = sum(a * h_j for a, h_j in zip(alpha, h))  # (5)
        t_tilde = p["U_o.weight"] @ s + p["U_o.bias"] + p["V_o.weight"] @ E_y + p["C_o.weight"] @ c
        t = torch.stack([max(pair) for pair in zip(t_tilde[::2], t_tilde[1::2])])  # maxout, A.2.2
        log_p.append(softmax(p["W_o.weight"] @ t + p["W_o.bias"], 0)[token].log())
        alphas.append(alpha)
    return torch.stack(log_p), torch.stack(alphas)


def luong_alignment(p, cfg, h_t, h_bar, t):
    """Return a_t, keyed by source position."""
    W_a, v_a, W_p, v_p = (p.get(f"attention.{k}.weight") for k in ("W_a", "v_a", "W_p", "v_p"))
    S, p_t, window = len(h_bar), t, h_bar
    if cfg.attention == "local-p":
        p_t = S * sigmoid(v_p[0] @ tanh(W_p @ h_t))  # (9)
    if cfg.attention != "global":
        window = [s for s in h_bar if min(p_t, S) - cfg.window <= s <= min(p_t, S) + cfg.window]
    score = dict(
        dot=lambda s: h_t @ h_bar[s],
        general=lambda s: h_t @ W_a @ h_bar[s],
        concat=lambda s: v_a[0] @ tanh(W_a @ torch.cat([h_t, h_bar[s]])),
        location=lambda s: W_a[s - 1] @ h_t if s <= len(W_a) else h_t[0] - math.inf,  # (8)
    )
    align = softmax(torch.stack([score[cfg.score](s) for s in window]), 0)  # (7)
    a_t = dict.fromkeys(h_bar, 0 * align[0]) | dict(zip(window, align))
    if cfg.attention == "local-p":
        for s in window:
            a_t[s] = a_t[s] * torch.exp(-((s - p_t) ** 2) / (2 * (cfg.window / 2) ** 2))  # (10)
    return a_t


def luong(p, source, target, cfg):
    """Luong et al."""
    h_bar, state = encode(p, source, cfg)
    h_tilde, log_p, alphas = torch.zeros_like(h_bar[1]), [], []
    for t, (previous, token) in enumerate(zip(target, target[1:]), 1):
        x = p["E_y.weight"][previous]
        h_t, state = lstm(p, "decoder", torch.cat([x, h_tilde]) if cfg.input_feeding else x, state)
        a_t = luong_alignment(p, cfg, h_t, h_bar, t)
        c_t = sum(a_t[s] * h_bar[s] for s in h_bar)
        h_tilde = tanh(p["W_c.weight"] @ torch.cat([c_t, h_t]))  # (5)
        log_p.append(softmax(p["W_s.weight"] @ h_tilde, 0)[token].log())  # (6)
        alphas.append(torch.stack([a_t[s] / sum(a_t.values()) for s in sorted(h_bar)]))
    return torch.stack(log_p), torch.stack(alphas)


def positional_encoding(n, d):
    angle = [[pos / 10000 ** ((i - i % 2) / d) for i in range(d)] for pos in range(n)]
    return torch.tensor(np.where(np.arange(d) % 2, np.cos(angle), np.sin(angle)))  # 3.5


def multi_head(p, name, heads, x, others):
    """Attend from x to others by (1); return the output and the weights averaged over heads."""
    W_Q, (W_K, W_V) = p[f"{name}.W_Q.weight"], p[f"{name}.W_KV.weight"].chunk(2)
    K, V = ((torch.stack([*others]) @ W.T).chunk(heads, 1) for W in (W_K, W_V))
    weights = [softmax(k @ q / math.sqrt(len(q)), 0) for q, k in zip((W_Q @ x).chunk(heads), K)]
    out = [alpha @ v for alpha, v in zip(weights, V)]
    return p[f"{name}.W_O.weight"] @ torch.cat(out), sum(weights) / heads


def add_norm(p, name, x, sublayer):
    x = x + sublayer
    x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def feed_forward(p, name, k, x):
    """Apply the feed-forward network (2), which is sublayer k of the layer."""
    inner = (p[f"{name}.ffn.0.weight"] @ x + p[f"{name}.ffn.0.bias"]).clamp_min(0)
    outer = p[f"{name}.ffn.2.weight"] @ inner + p[f"{name}.ffn.2.bias"]
    return add_norm(p, f"{name}.norm_{k}", x, outer)


def transformer(p, source, target, cfg):
    """Vaswani et al.; instead of masking, each decoder position attends to a prefix."""
    E, h, d = p["E_y.weight"], cfg.heads, cfg.d_model
    x = p.get("E_x.weight", E)[source] * math.sqrt(d) + positional_encoding(len(source), d)  # 3.4
    y = E[target[:-1]] * math.sqrt(d) + positional_encoding(len(target) - 1, d)
    for n in (f"encoder.{k}" for k in range(cfg.layers)):
        attended = [multi_head(p, f"{n}.self_attention", h, x_j, x)[0] for x_j in x]
        x = [add_norm(p, f"{n}.norm_1", x_j, a) for x_j, a in zip(x, attended)]  # 3.1
        x = [feed_forward(p, n, 2, x_j) for x_j in x]
    alphas = []
    for n in (f"decoder.{k}" for k in range(cfg.layers)):
        prefixes = [(y_i, y[: i + 1]) for i, y_i in enumerate(y)]
        attended = [multi_head(p, f"{n}.self_attention", h, *pair)[0] for pair in prefixes]
        y = [add_norm(p, f"{n}.norm_1", y_i, a) for y_i, a in zip(y, attended)]
        attended = [multi_head(p, f"{n}.cross_attention", h, y_i, x) for y_i in y]
        y = [add_norm(p, f"{n}.norm_2", y_i, c) for y_i, (c, _) in zip(y, attended)]
        y = [feed_forward(p, n, 3, y_i) for y_i in y]
        alphas.append([alpha for _, alpha in attended])
    log_p = [softmax(E @ y_i, 0)[token].log() for y_i, token in zip(y, target[1:])]
    return torch.stack(log_p), torch.stack(alphas[cfg.align_layer - 1])


REFERENCES = dict(seq2seq_lstm=seq2seq, bahdanau=rnnsearch, luong=luong, transformer=transformer)


@pytest.mark.parametrize("name", MODELS)
def test_equations(name):
    """log p, alpha and gradients of a padded batch match the naive loops; so does stepping."""
    seed = list(MODELS).index(name)
    (module, model), (src, tgt) = build(name, seed), random_batch(seed)
    pairs = [(s[s != PAD].tolist(), t[t != PAD].tolist()) for s, t in zip(src, tgt)]
    src, tgt = F.pad(src, (0, 4)), F.pad(tgt, (0, 3))
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    log_p = logits.log_softmax(-1).gather(-1, tgt[:, 1:, None]).squeeze(-1)
    p, loss = {key: value.detach().requires_grad_() for key, value in model.named_parameters()}, 0
    for b, (source, target) in enumerate(pairs):
        want, want_alpha = REFERENCES[module.__name__](p, source, target, model.cfg)
        assert_close(log_p[b, : len(want)], want)
        assert_close(alpha[b, : len(want), : len(source)], want_alpha, 1e-7)
        loss -= want.sum()
    grads = torch.autograd.grad(module.summed_loss(logits, tgt[:, 1:]), list(model.parameters()))
    assert_close(grads, torch.autograd.grad(loss, list(p.values())))
    assert_close(alpha.sum(-1), torch.ones(tgt[:, :-1].shape))
    assert not alpha.masked_select((src == PAD).unsqueeze(1)).any()
    with torch.inference_mode():
        src, tgt = src.clone(), tgt.clone()
        assert_close(module.align(model, src, tgt), alpha)
        memory = model.encode(src)
        state = model.init_state(memory)
        for t in range(tgt.size(1) - 1):
            one, state = model.step(tgt[:, t], state, memory)
            assert_close(one, logits[:, t])


# ---- the papers' hyperparameters ----------------------------------------------------------------

PAPERS = """
seq2seq_lstm emb=1000 hidden=1000 layers=4 src_vocab=160000 tgt_vocab=80000 reverse=True init=0.08
seq2seq_lstm Optimizer=SGD momentum=0 weight_decay=0 lr=0.7 clip=5.0 loss_per=sentence
seq2seq_lstm batch_sentences=128 dropout=0.0 smoothing=0.0 steps=703125 beam=12
bahdanau emb=620 hidden=1000 attn=1000 maxout=500 src_vocab=30000 tgt_vocab=30000 max_len=50
bahdanau Optimizer=Adadelta rho=0.95 eps=1e-06 weight_decay=0 lr=1.0 clip=1.0 loss_per=sentence
bahdanau init=0.01 init_attn=0.001 dropout=0.0 smoothing=0.0 batch_sentences=80 steps=288000
luong emb=1000 hidden=1000 layers=4 src_vocab=50000 tgt_vocab=50000 init=0.1
luong Optimizer=SGD momentum=0 weight_decay=0 lr=1.0 clip=5.0 loss_per=sentence
luong attention=local-p score=general window=10 input_feeding=True max_len=50 replace_unk=True
luong batch_sentences=128 dropout=0.2 smoothing=0.0 steps=421875
transformer d_model=512 d_ff=2048 heads=8 layers=6 dropout=0.1 smoothing=0.1 length_penalty=0.6
transformer Optimizer=Adam betas=(0.9,0.98) eps=1e-09 weight_decay=0 lr=1.0 clip=inf loss_per=token
transformer warmup=4000 cooldown=False batch_tokens=60000 steps=100000 average=5 beam=4
"""


@pytest.mark.parametrize("line", PAPERS.strip().split("\n"))
def test_paper_numbers(line):
    """Config.paper() and its optimizer use the paper's values."""
    name, *want = line.split()
    cfg = script(name).Config.paper()
    optimizer = script(name).make_optimizer(nn.Linear(2, 2), cfg)
    found = optimizer.param_groups[0] | vars(cfg) | dict(Optimizer=type(optimizer).__name__)
    fields = [entry.split("=")[0] for entry in want]
    assert [f"{field}={found[field]}".replace(" ", "") for field in fields] == want


@scripts
def test_presets(name):
    """Sizes are in order, and the papers' where known; --help shows all three values of a field."""
    Config, small, counts = script(name).Config, dict(src_vocab=100, tgt_vocab=100), []
    with torch.device("meta"):
        for cfg in (Config(**small), Config.medium(**small), Config.paper(**small), Config.paper()):
            counts.append(sum(p.numel() for p in script(name).Model(cfg).parameters()))
    assert counts[0] < counts[1] < counts[2]
    millions = dict(seq2seq_lstm=384, transformer=65)  # the Transformer's implies tied embeddings
    assert counts[3] / 1e6 == pytest.approx(millions.get(name, counts[3] / 1e6), rel=0.04)
    text = " ".join(run(name, "--help")[0].split())
    for field in dataclasses.fields(Config):
        values = [getattr(cfg, field.name) for cfg in (Config, Config.medium(), Config.paper())]
        shown = "{}, medium: {}, paper: {}" if len(set(values)) > 1 else "{}"
        flag, shown = "--" + field.name.replace("_", "-"), re.escape(shown.format(*values))
        assert re.search(rf"{flag}[ ,][^[]*\[{shown}\]", text), flag


def test_medium_transformer():
    """Config.medium() is Transformer-tiny, with one vocabulary of --src-vocab words by default."""
    Config, want = script("transformer").Config, dict(d_model=128, d_ff=256, heads=4, layers=4)
    want |= dict(dropout=0.3, lr=2.5, warmup=2000, batch_tokens=16384, steps=8000, eval_every=250)
    want |= dict(average=10, beam=5, length_penalty=1.0, src_vocab=20000, share_vocab=True)
    assert vars(Config.medium()).items() >= want.items()
    for preset in (Config.medium, Config.paper):
        cfg = preset(src_vocab=50)
        assert (cfg.src_vocab, cfg.tgt_vocab, cfg.share_vocab) == (50, 50, True)
        cfg = preset(src_vocab=50, tgt_vocab=60, share_vocab=False)
        assert (cfg.src_vocab, cfg.tgt_vocab, cfg.share_vocab) == (50, 60, False)


INIT = dict(seq2seq_lstm=". uniform 0.08", luong=". uniform 0.1")
INIT["bahdanau"] = "bias|v_a constant 0, _hh|cell.U orthogonal 1, _a normal 0.001, . normal 0.01"
INIT["transformer"] = "E_ normal 0.125, norm_..weight constant 1, bias constant 0"
INIT["transformer"] += ", W_O|ffn.2 glorot 0.5, . glorot 1"


@scripts
def test_initialization(name):
    """Each parameter follows the first distribution whose pattern matches its name."""
    module = script(name)
    sizes = dict(d_model=64, layers=2) if name == "transformer" else dict(emb=30, hidden=40)
    torch.manual_seed(0)
    model = module.Model(module.Config.paper(src_vocab=300, tgt_vocab=200, **sizes))
    rules = [rule.split() for rule in INIT[name].split(", ")]
    for key, p in model.named_parameters():
        law, size = next(rest for pattern, *rest in rules if re.search(pattern, key))
        for W in p.split(p.size(-1)) if re.search("KV|_hh|cell.U", key) else [p]:
            bound = float(size) * (math.sqrt(6 / sum(W.shape)) if law == "glorot" else 1)
            if law in ("uniform", "glorot"):
                assert abs(W.mean()) / 0.3 < bound >= W.abs().max() > 0.8 * bound, key
            elif law == "normal":
                assert W.std().item() == pytest.approx(bound, rel=0.25), key
            elif law == "constant":
                assert (bound == W).all(), key
            else:
                assert_close(W @ W.T, torch.eye(len(W)), 1e-5)
    # On its own the class must not start at v_a = 0, where W_a and U_a get no gradient.
    assert script("bahdanau").AdditiveAttention(4, 6, 50).v_a.std() > 0.05


# The steps of 750 after which the paper halves its rate:
SCHEDULES = [("seq2seq_lstm", [500, 550, 600, 650, 700]), ("bahdanau", []), ("transformer", None)]
SCHEDULES += [("luong", [500, 563, 625, 688]), ("luong without dropout", [375, 450, 525, 600, 675])]


@pytest.mark.parametrize("name, halved_after", SCHEDULES)
def test_schedule(name, halved_after):
    """The paper's rate is halved or follows (3); the default warms up and decays linearly."""
    module = script(name)
    cfg = module.Config.paper(steps=750, dropout=0.0 if "without" in name else 0.2)
    paper = [module.learning_rate(cfg, step) for step in range(1, 12001)]
    cfg = module.Config(lr=0.1, warmup=4, steps=10)
    default = [module.learning_rate(cfg, step) for step in range(1, 11)]
    if name == "transformer":
        want = [512**-0.5 * min(n**-0.5, n * 4000**-1.5) for n in range(1, 12001)]
        assert paper == pytest.approx(want)
        want = [0.1 * 96**-0.5 * min(n**-0.5, n / 8) * (11 - n) / 10 for n in range(1, 11)]
    else:
        assert [n for n in range(1, 750) if paper[n] == paper[n - 1] / 2] == halved_after
        assert len(set(paper[:750])) == 1 + len(halved_after)
        want = [0.1 * min(n / 4, (11 - n) / 10) for n in range(1, 11)]
    assert default == pytest.approx(want)


@pytest.fixture(params=product(ATTENTIONS, range(3)), ids=str)
def attention(request):
    """Module, keywords, query (B,T,H), source (B,S,H), and a mask that hides all of row 0."""
    name, seed = request.param
    torch.manual_seed(seed)
    (B, T, S), H = random.Random(seed).sample(range(3, 9), 3), 9 * (seed + 1)
    query, source = torch.randn(B, T, H).double(), torch.randn(B, S, H).double()
    mask = torch.arange(S) >= torch.tensor([0, S, *torch.randint(1, S, (B - 2,))]).unsqueeze(1)
    if name == "additive":
        module = script("bahdanau").AdditiveAttention(H, H - 1, 3)
        return module.double(), {}, query, source[..., 1:], mask
    if name == "multi-head":
        module = script("transformer").MultiHeadAttention(H, seed + 1)
        return module.double(), dict(need_alpha=True), query, source, mask
    module = script("luong").LuongAttention(H, *name.split(), window=2, positions=5)
    return module.double(), {}, query, source, mask


def test_attention(attention):
    """Every query gives the same, gradients included, alone with only the words it may see."""
    module, keywords, query, source, right = attention
    inputs = [*module.parameters(), query.requires_grad_(), source.requires_grad_()]
    (B, S), T, keys = right.shape, query.size(1), module.keys(source)
    masks = [None, right]
    if type(module).__name__ != "LuongAttention":  # which counts positions from the left
        masks += [right.flip(1), right[:, torch.randperm(S)]]
    if keywords:  # multi-head
        masks += [torch.ones(1, T, S).triu(1).bool(), torch.rand(B, T, S) < 0.4]
    for mask in masks:
        results = [module(query, source, mask, keys=k, **keywords) for k in (None, keys)]
        if keywords:
            results.append((module(query, source, mask)[0], results[0][1]))  # the fused kernel
        hidden = right & False if mask is None else mask
        hidden = hidden.view(len(hidden), -1, S).expand(B, T, S)
        want = [torch.zeros_like(x) for x in results[0]]
        for b, t in (~hidden.all(-1)).nonzero().tolist():
            step = dict(t=t + 1) if type(module).__name__ == "LuongAttention" else keywords
            seen = ~hidden[b, t]
            c, alpha = module(query[b : b + 1, t : t + 1], source[b : b + 1, seen], **step)
            want[0][b, t] = c[0, 0]
            want[1][b, ..., t, seen] = alpha[0, ..., 0, :]
        losses = [sum(x.square().sum() for x in result) for result in (want, *results)]
        grads = [torch.autograd.grad(x, inputs, None, True, materialize_grads=True) for x in losses]
        for result, grad in zip(results, grads[1:]):
            assert not result[0][hidden.all(-1)].any()
            assert not result[1].view(B, -1, T, S).movedim(1, 3)[hidden].any()
            assert_close([*result, *grad], [*want, *grads[0]])
    for wrong in (right.int(), right.double()):
        with pytest.raises(AssertionError, match="mask: expected bool"):
            module(query, source, wrong, **keywords)


def test_attention_precision(attention):
    """Every floating-point type, and autocast, give the float64 result up to rounding."""
    module, keywords, query, source, mask = attention
    exact, _ = module(query, source, mask, **keywords)
    for dtype in (torch.double, torch.float, None, torch.half, torch.bfloat16):  # None: autocast
        stored, eps = dtype or torch.float, torch.finfo(dtype or torch.bfloat16).eps
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            c, alpha = module.to(stored)(query.to(stored), source.to(stored), mask, **keywords)
        total = alpha.double().sum(-1)[1:]
        assert total.max() <= 1 + 4 * eps
        if getattr(module, "attention", None) != "local-p":  # rounding can move its window
            assert total.min() >= 1 - 4 * eps
            assert_close(c, exact, 16 * eps)


def test_layers_match_torch_nn():
    """Encoder and decoder layers match torch.nn's, gradients included."""
    module = script("transformer")
    torch.manual_seed(0)
    x, y = (torch.randn(3, n, 12, dtype=torch.double) for n in (5, 7))
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    future = torch.ones(7, 7).triu(1).bool()
    cfg = module.Config(d_model=12, d_ff=20, heads=3, dropout=0.0)
    ours = nn.ModuleList([module.EncoderLayer(cfg), module.DecoderLayer(cfg)]).double()
    layers = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    theirs = nn.ModuleList(layer(12, 3, 20, 0.0, batch_first=True) for layer in layers).double()
    weights = list(ours.parameters())  # in the same order as theirs, without biases in attention
    their_weights = [p for key, p in theirs.named_parameters() if not re.search("proj.*bias", key)]

    def split(matrices):  # torch.nn stacks W_Q on W_KV
        return [part for p in matrices for part in (p.split([12, 24]) if len(p) == 36 else [p])]

    for p, q in zip(weights, split(their_weights), strict=True):
        p.data.copy_(q)
    h, memory = ours[0](x, padding), theirs[0](x, src_key_padding_mask=padding)
    got, _ = ours[1](y, future.expand(3, -1, -1), ours[1].cross_attention.keys(h), padding)
    want = theirs[1](y, memory, tgt_mask=future, memory_key_padding_mask=padding)
    assert_close(h, memory)
    assert_close(got, want)
    (got.square().sum() + want.square().sum()).backward()
    assert_close([p.grad for p in weights], split([p.grad for p in their_weights]), 1e-8)


@pytest.mark.parametrize("name", [*SCRIPTS, "luong general local-p feeding"])
def test_dropout(name):
    """Dropout is applied where the paper or the script's docstring says, and only in training."""
    rates = dict(dropout=0.5, dropout_out=0.5) if name == "bahdanau" else dict(dropout=0.5)
    (_, model), (src, tgt) = build(name, **rates), random_batch(1)
    sublayers, dropped = [], []
    for key, part in model.named_modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(lambda part, x, y: dropped.append(x[0]))
        if key.endswith(("W_O", "ffn")):
            part.register_forward_hook(lambda part, x, y: sublayers.append(y))
    noisy = model.train()(src, tgt[:, :-1])
    S, T, E, H = src.size(1), tgt.size(1) - 1, *list(SCRIPTS[script(name).__name__].values())[:2]
    steps = [(E + H,), (H,)] * T if name.endswith("feeding") else [(T, E), (T, H)]
    want = [(S, E), (S, H), *steps, (T, H)]  # inputs of the two layers and of the softmax
    if name == "bahdanau":
        want = [(S, E), (S, 2 * H), (T, E), (T, 4)]  # embeddings, annotations and maxout layer
    if name == "transformer":
        want = [(S, 8)] * 5 + [(T, 8)] * 7
        embedded = [x for x in dropped if not any(x is y for y in sublayers)]
        assert len(sublayers) == 10 == len(dropped) - len(embedded)
        for x, E, tokens in zip(embedded, (model.E_x, model.E_y), (src, tgt[:, :-1])):
            assert_close((x - E(tokens) * 8**0.5)[0], positional_encoding(tokens.size(1), 8))
    assert sorted(tuple(x.shape[1:]) for x in dropped) == sorted(want)
    assert (noisy - model.eval()(src, tgt[:, :-1])).abs().max() > 1e-3


def ranked(model, src, hypotheses, penalty):
    """Return the hypotheses by log p / ((5 + length) / 6)^penalty, best first."""
    tgt = pad([[BOS, *tokens] for tokens in hypotheses])
    log_p = model(src.expand(len(tgt), -1), tgt[:, :-1]).log_softmax(-1)
    log_p = log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1)
    real = tgt[:, 1:] != PAD
    score = (log_p * real).sum(1) / ((5 + real.sum(1)) / 6) ** penalty
    return [hypotheses[i] for i in score.argsort(descending=True)]


def naive_beam(model, src, limit, K, penalty):
    """Beam search over lists: a hypothesis that ends leaves the beam, which shrinks by one."""
    live, finished = [[]], []
    for _ in range(limit):
        extended = [[*tokens, w] for tokens in live for w in range(1, model.cfg.tgt_vocab)]
        best = ranked(model, src, extended, 0)[: K - len(finished)] if extended else []
        finished += [tokens for tokens in best if tokens[-1] == EOS]
        live = [tokens for tokens in best if tokens[-1] != EOS]
    return ranked(model, src, finished or live, penalty)[0] if limit else []


@scripts
@pytest.mark.parametrize("seed", range(5))
def test_beam(name, seed):
    """Beam search matches a naive one (greedy if K is 1), and exhaustive search if wide enough."""
    module, model = build(name, seed, 0.5 + 0.2 * seed, tgt_vocab=5)
    src = torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD], [5, 8, EOS, PAD]])
    alone = [row[None, row != PAD] for row in src]
    searches = ([9, 12, 1], 1, 0.0), ([6, 4, 5], 2, 0.6), ([5, 6, 0], 3, 0.0), ([8, 4, 8], 3, 5.0)
    for limits, K, penalty in searches:
        tokens = module.beam(model, src, limits, K, penalty)
        for row, source, limit in zip(tokens, alone, limits):
            want = naive_beam(model, source, limit, K, penalty)
            assert row.tolist() == want + [PAD] * (len(row) - len(want))
    every = [[*tokens, EOS] for n in range(3) for tokens in product((BOS, UNK, 4), repeat=n)]
    for row, source in zip(module.beam(model, src, 3, 4**3, 2.0 * seed), alone):
        assert row[row != PAD].tolist() == ranked(model, source, every, 2.0 * seed)[0]


@pytest.mark.parametrize("K", [1, 2])
def test_translate(K):
    """Strings and lists are translated in order, to at most n + 50 words; <unk> can be replaced."""
    module, model = build("bahdanau", beam=K)
    words = [f"w{i}" for i in range(4, 13)]
    vocabularies = [data.Vocabulary(data.SPECIALS + words[:n]) for n in (9, 7)]
    texts = ["w4 w5 w6 w7 w8", "", "w9", " w5  un\u00a0heard w4 "]
    lists = [re.findall("[^ ]+", text) for text in texts]
    for bias in (5, -1000):  # in favor of EOS, then against it
        nn.init.constant_(model.W_o.bias[:3].detach(), bias)
        found = module.translate(model, texts, vocabularies)
        assert found == module.translate(model, lists, vocabularies)
        for words, got in zip(lists, found):
            src = torch.tensor([[vocabularies[0][word] for word in words] + [EOS]])
            (row,) = module.beam(model, src, len(words) + 50 if words else 0, K)
            assert got == vocabularies[1].decode(row.tolist())
    assert [len(got) for got in found] == [55, 0, 51, 53]
    assert module.translate(model, ["", ""], vocabularies) == [[], []]
    nn.init.constant_(model.W_o.bias[UNK].detach(), 1000)
    model.cfg = dataclasses.replace(model.cfg, replace_unk=True)
    (alpha,) = module.alignments(model, [(lists[0], ["<unk>"] * 55)], vocabularies)
    want = [lists[0][i] for i in alpha[:-1, :-1].argmax(1)]
    assert module.translate(model, texts[:1], vocabularies) == [want]
    for wrong in ("w4 w5", [5], [["w4", 5]], [None]):
        with pytest.raises(TypeError, match="sentence"):
            module.translate(model, wrong, vocabularies)


@scripts
@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
@pytest.mark.parametrize("per, clip", [("token", math.inf), ("sentence", 0), ("token", 0.1)])
def test_train_step(name, accumulate, per, clip, monkeypatch):
    """SGD follows the clipped gradient of the smoothed loss for any number of micro-batches."""
    module, model = build(name, accumulate=accumulate, loss_per=per, smoothing=0.2, clip=clip)
    weights = list(model.parameters())
    monkeypatch.setattr(module, "learning_rate", lambda cfg, step: 0.1 / step)
    step = module.make_train_step(model, model.cfg, torch.optim.SGD(weights))
    for n in (1, 2, 3):
        src, tgt = random_batch(n)
        log_p = model.eval()(src, tgt[:, :-1]).log_softmax(-1)
        log_p_token = log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1)
        losses = -(0.8 * log_p_token + 0.2 * log_p.mean(-1))[tgt[:, 1:] != PAD]
        mean = losses.mean() if per == "token" else losses.sum() / len(src)
        grads = torch.autograd.grad(mean, weights)
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads)).item()
        assert norm > 0.1
        scale = min(1, clip / norm) if clip else 1
        want = [p - 0.1 / n * scale * grad for p, grad in zip(weights, grads)]
        src, tgt = (F.pad(x, (0, 0, 0, n % 2)) for x in (src, tgt))  # a pair that is all padding
        assert step(src, tgt).item() == pytest.approx(losses.mean().item(), abs=1e-5)
        assert_close(weights, want, 1e-6)


@pytest.mark.parametrize("name", [*SCRIPTS, "luong concat local-m", "luong dot local-p feeding"])
def test_overfits_32_pairs(name):
    """Every model learns to reproduce 32 training pairs exactly."""
    module, pairs = script(name), data.toy(32, max_len=9)
    vocabularies = data.build_vocabularies(pairs)
    sizes = dict(zip(("src_vocab", "tgt_vocab"), (len(v.words) for v in vocabularies)))
    recipes = dict(luong=dict(emb=64, hidden=64, init=0.2, lr=0.02, warmup=8))
    recipes |= dict(transformer=dict(lr=0.5, warmup=60))
    recipe = dict(dropout=0.0, smoothing=0.0) | recipes.get(module.__name__, {})
    torch.manual_seed(1)
    model = module.Model(module.Config(**sizes, **recipe, **MODELS.get(name, {})))
    src, tgt = map(torch.from_numpy, data.Bitext(pairs, vocabularies).batch(np.arange(32)))
    step = module.make_train_step(model, model.cfg)
    result = module.evaluate(model, pairs, vocabularies)
    losses = [step(src, tgt).item()]
    assert result["loss"] == pytest.approx(losses[0], abs=1e-4)
    assert result["ppl"] == pytest.approx(math.exp(result["loss"]))
    while losses[-1] > 0.01 and len(losses) < 200:
        losses.append(step(src, tgt).item())
    assert losses[-1] < 0.02 < losses[0]
    found = module.translate(model, [pair[0] for pair in pairs], vocabularies)
    assert found == [pair[1] for pair in pairs]
    result = module.evaluate(model, pairs, vocabularies)
    links = [data.links(alpha) for alpha in module.alignments(model, pairs, vocabularies)]
    assert result["aer"] == data.aer(links, [pair[2] for pair in pairs])
    assert result["bleu"] == pytest.approx(100)


def test_structure():
    """The code below the marker is identical in all scripts; scripts are short and independent."""
    sources = {name: (HERE / f"{name}.py").read_text() for name in SCRIPTS}
    marker = "# ---- the same in every script from here on ----\n"
    _, (shared, *others) = zip(*(source.split(marker) for source in sources.values()))
    assert others == [shared] * 3 and len(shared.splitlines()) <= 360
    for name, source in sources.items():
        assert not re.search(rf"^\s*(import|from) ({'|'.join(SCRIPTS)})\b", source, re.MULTILINE)
        assert not re.search(rf"{name}|{script(name).Model.__name__}", shared)
        assert len(source.splitlines()) <= dict(luong=690, transformer=675).get(name, 640)


# ---- data.py: the built-in corpus, vocabularies, batches, scores, pictures ----------------------


def test_corpus_splits_and_seeds():
    """Splits share no source sentence, and the corpus depends on the seed alone."""
    splits = [data.toy(5000), data.toy(500, split="valid"), data.toy(500, split="test")]
    text = repr([(source, target, sorted(gold)) for source, target, gold in splits[0]])
    assert zlib.crc32(text.encode()) == 2369573823  # every figure in docs/ depends on this text
    splits = [{" ".join(pair[0]) for pair in split} for split in splits]
    for one, other in combinations(splits, 2):
        assert not one & other
    assert data.toy(50, seed=5) == data.toy(50, seed=5) != data.toy(50, seed=6)


VOWEL = "[aâeéèêiîoôuhœ]"  # every h in the corpus is mute
NEVER = [  # one pattern for English and one for French
    r"a (?:[ai]|e[^u])|an [^aei]|can not |hits |(?:he|she) (?:have|do|are|were) "
    r"|(?:am|is|are|has|have|do not|does not|can|cannot|must) \w+ in \w+ \d"
    r"|(?:not|never|cannot) \w+ (?:an?|some|many|two) |(?:dog|cat|cow|animal) because it ",
    rf"(?:le|la|je|me|ne|de|que|ce|ma|sa|beau|nouveau) {VOWEL}|\w+' (?!{VOWEL})"
    r"|(?:de|à) (?:le|les|des|de) |dans (?:le marché|l' école)",
]


TRANSLATIONS = r"""
european economic | économiques? européen(ne)?s?; european | européen(ne)?s?
(agreement|treaty|report|plan|budget) was signed | \w+ a été signé; in august 1992 | en août 1992
(law|reform|measure|decision)s were (signed|adopted) | \w+ ont été (signées|adoptées)
(law|reform|measure|decision|street|car) was \w+ because it | .* parce qu' elle
(agreement|treaty|report|plan|budget|park|hat) was \w+ because it | .* parce qu' il
not | (ne|n') pas; cannot | ne (peux|pouvons|pouvez|peut|peuvent) pas; horses | chevaux
(him|them|us) | (le|l'|les|nous); this (child|tree|animal) | cet \w+; red cars | voitures rouges
in the market | au marché; in the school | à l' école; many men | beaucoup d' hommes
some (small|new|beautiful|big) \w+ | d(e|') \w+[sx] \w+[sx]
(women|girls|queens|nurses|sisters) arrived | \w+ sont arrivées
(women|girls|queens|nurses|sisters) that (i|we|you|he|she|they) (loved|admired|watched) | .*ées
(loved|admired|watched|left) her (\.|and|but|or) | l' .*ée (\.|et|mais|ou)
the king 's (dog|cat|hat|book) | le (chien|chat|chapeau|livre) du roi
"""


def test_corpus():
    """Links cover each French word; no sentence is ambiguous, ungrammatical or mistranslated."""
    rules = dict(rule.split(" | ") for rule in re.split("; |\n", TRANSLATIONS.strip()))
    corpus, best, translations, found = data.toy(20000), [], {}, set()
    for source, target, gold in corpus:
        assert {i for i, _ in gold} <= set(range(len(source)))
        link = {j: i for i, j in sorted(gold, reverse=True)}
        assert sorted(link) == list(range(len(target)))
        best.append({(i, j) for j, i in link.items()})
        text = " ".join(source)
        assert translations.setdefault(text, target) == target
        for sentence, pattern in zip((text, " ".join(target)), NEVER):
            assert not re.search(rf"(?<!\S)(?:{pattern})", sentence), sentence
        for english, french in rules.items():
            for match in re.finditer(rf"(?<!\S){english}(?!\S)", text):
                first = text[: match.start()].count(" ")
                last = first + match[0].count(" ")
                linked = sorted({j for i, j in gold if first <= i <= last})
                translation = " ".join(target[j] for j in linked)
                assert re.fullmatch(french, translation), (match[0], translation)
                found.add(english)
    assert found == set(rules)
    assert data.aer(best, [pair[2] for pair in corpus]) < 0.01  # one link per word almost suffices
    english, french = ({word for pair in corpus for word in pair[side]} for side in (0, 1))
    assert len(english) > 200 < len(french) and set(data.EXAMPLE.split()) <= english
    assert {len(source) for source, *_ in corpus} == set(range(3, 31))
    assert max(len(source) for source, *_ in data.toy(200, max_len=80)) > 75


def test_vocabularies():
    """Words are sorted by frequency, then alphabetically; the example in the docstring works."""
    pairs = [(["b", "a", "a", "<pad>"], ["x"]), (["a", "c", "b"], ["x", "y", "<unk>"])]
    source, _ = data.build_vocabularies(pairs)
    assert [source[w] for w in ("a", "nowhere", "<pad>", "<unk>")] == [4, UNK, UNK, UNK]
    assert data.build_vocabularies(pairs, min_count=2)[0].words[4:] == ["a", "b"]
    one, two = data.build_vocabularies(pairs, share=True)
    assert one.words == two.words == [*data.SPECIALS, "a", "b", "x", "c", "y"]
    assert data.build_vocabularies(pairs, sizes=(5, 5))[0].words[4:] == ["a"]
    assert doctest.testmod(data).failed == 0 < 5 < doctest.testmod(data).attempted


def test_batches():
    """Batches stay within their limits, contain little padding, and have few distinct shapes."""
    pairs = [*data.toy(1500, max_len=40), ([], []), ([], ["x"]), (["a"], [])]
    bitext = data.Bitext(pairs, data.build_vocabularies(pairs))
    batches = list(islice(bitext.batches(600, 20, 1), 200))
    for src, tgt in batches:
        assert src.size + tgt[:, 1:].size <= 600 and (tgt[:, 0] == BOS).all()
        for x in (src, tgt):  # PAD follows EOS and nothing else
            assert ((x == PAD) == (np.cumsum(x == EOS, 1) > (x == EOS))).all()
    assert max(len(src) for src, _ in batches) == 20
    assert max(src.size + tgt.size for src, tgt in batches) > 540
    padding = sum((x == PAD).sum() for x in chain(*batches))
    assert padding < 0.1 * sum(x.size for x in chain(*batches))
    assert len({(src.shape, tgt.shape) for src, tgt in batches}) < 40
    assert sorted(chain(*bitext.rows_by_length(2000))) == list(range(len(pairs)))
    # Every epoch is a new shuffle of all pairs, and seed and step alone determine a batch.
    bitext.batch = lambda rows, unit: sorted(rows.tolist())  # row numbers instead of token ids
    stream = list(islice(bitext.batches(600, 20, 1), 600))
    n = bitext.batches_per_epoch
    for epoch in (stream[:n], stream[n : 2 * n]):
        assert sorted(chain(*epoch)) == list(range(len(pairs)))
    assert sum(rows in stream[:n] for rows in stream[n : 2 * n]) < 0.3 * n
    for step in (1, n - 1, n, n + 5):
        assert list(islice(bitext.batches(600, 20, 1, step), 5)) == stream[step : step + 5]
    assert list(islice(bitext.batches(600, 20, 2), n)) != stream[:n]


def test_bleu_matches_sacrebleu():
    """BLEU equals sacreBLEU's on random text, empty and short sentences, and by source length."""

    def reference(hypotheses, references):
        hypotheses, references = ([" ".join(x) for x in side] for side in (hypotheses, references))
        score = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none").score
        return pytest.approx(score, abs=1e-6)

    assert data.bleu([], []) == 0
    for seed in range(100):
        r = random.Random(seed)
        references = [r.choices("abcde", k=r.randint(seed % 2, 12)) for _ in range(r.randint(1, 6))]
        hypotheses = [r.choices("abcde", k=r.randint(0, 3 * (seed % 5))) for _ in references]
        for k in range(seed % 3, len(references)):
            hypotheses[k] = [w if r.random() < 0.8 else r.choice("abcfg") for w in references[k]]
        assert data.bleu(hypotheses, references) == reference(hypotheses, references)
    sources = [["x"] * n for n in (0, 1, 10, 11, 20, 41)]
    hypotheses, references = ["abcd", "abxd", "", "abcc", "ab", "abcd"], ["abcd"] * 6
    rows = {"1-10": slice(3), "11-20": slice(3, 5), "41-50": slice(5, 6)}
    want = {key: reference(hypotheses[row], references[row]) for key, row in rows.items()}
    pairs = zip(sources, map(list, references))
    assert data.scores(pairs, hypotheses)["bleu_by_length"] == want


def test_aer_by_hand():
    """AER is computed over the corpus and is not a mean over sentences."""
    gold, guess = {(0, 0), (1, 2), (2, 1)}, {(0, 0), (1, 1)}
    assert (data.aer([gold], [gold]), data.aer([{(5, 5)}], [gold])) == (0, 1)
    assert (data.aer([set()], [set()]), data.aer([guess], [gold])) == (0, pytest.approx(1 - 2 / 5))
    assert data.aer([guess, gold], [gold, gold]) == pytest.approx(1 - 2 * 4 / (5 + 6))


def test_alignment_files(tmp_path):
    """.npz, .txt, .svg and the heatmap show the right weights at the right words."""
    alpha = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]])
    pair = ["red", "car"], ["voiture", "rouge", "."]
    data.write_alignments(tmp_path / "align", [pair, (["a"], [])], [alpha, np.ones((1, 2)) / 2])
    soft = np.load(tmp_path / "align.npz")
    assert [*soft["source"], *soft["target"]] == ["red car", "a", "voiture rouge .", ""]
    assert np.array_equal(soft["alpha_0"], alpha)
    assert (tmp_path / "align.txt").read_text() == "0-1 1-0\n\n"
    picture = ElementTree.parse(tmp_path / "align.svg")
    cells = [node for node in picture.iter() if "rect" in node.tag]
    cells.sort(key=lambda cell: (float(cell.get("y")), float(cell.get("x"))))
    shades = [float(cell.get("opacity")) for cell in cells]
    assert np.allclose(shades, 0.07 + 0.93 * alpha[:3, :2].flatten(), atol=0.01)
    rows = data.heatmap(*pair, alpha).split("\n")
    assert [row.split() for row in rows[:3]] == [["r", "c"], ["e", "a"], ["d", "r"]]
    assert rows[3:6] == ["voiture ··▓▓", "  rouge ▓▓░░", "      . ░░░░"]


# ---- the command line ---------------------------------------------------------------------------

TEXT = ["--train", "train.en", "train.fr", "--valid", "valid.en.gz", "valid.fr.gz"]
PAIRS = data.toy(60, max_len=9)
AVERAGED = "bahdanau --average 2"  # its checkpoints hold several sets of weights


def small(name="bahdanau"):
    """Return a command that trains for eight steps and validates twice; append the folder."""
    flags = "--lr 0.2 --dropout 0.1 --batch-tokens 300 --max-len 20 --eval-every 4 --steps 8"
    for field, size in SCRIPTS[name.split()[0]].items():
        flags += f" --{field.replace('_', '-')} {2 * size}"
    return [name, *TEXT, "--warmup", "1", *flags.split(), "--out"]


def main(name, *args):
    script(name).main([*name.split()[1:], *map(str, args), "--device", "cpu"])


def run(*command, stdin=b"", allowed=(0,)):
    """Run a command in this process; return stdout and the lines on stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            main(*command)
        except SystemExit as stop:
            assert (stop.code or 0) in allowed, stderr.getvalue()
    return stdout.getvalue(), stderr.getvalue().splitlines()


def error_of(*command):
    """Return the one line on stderr of a command that fails with status 2."""
    _, (line,) = run(*command, allowed=[2])
    return line


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with finished runs and text files, in which three pairs are too long or empty."""
    folder = tmp_path_factory.mktemp("template")
    with chdir(folder):
        for side, language in enumerate(("en", "fr")):
            lines = [" ".join(pair[side]) + "\n" for pair in PAIRS]
            odd = [["a\n", "a " * 21 + "\n", "\n"], ["a " * 21 + "\n", "a\n", "a\n"]][side]
            Path(f"train.{language}").write_text("".join(lines + odd), encoding="utf-8")
            Path(f"valid.{language}.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
        run(*small(), "run")
        for name in (*SCRIPTS, AVERAGED):
            run(*small(name), f"whole {name}")
    return folder


@pytest.fixture
def folder(template, tmp_path, monkeypatch):
    """A copy of the template, as the working directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents():
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def read_log(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def fingerprint(out):
    """Return a hash of all weights, optimizer states, logs and links that a run saved."""
    saved = [torch.load(Path(out, "last.pt")), torch.load(Path(out, "model.pt")), read_log(out)]
    text = json.dumps(saved, default=torch.Tensor.tolist)  # floats keep all their digits
    text = re.sub(r'"(seconds|tokens_per_second)": [^,}]+', "", text)
    return hash(text + Path(out, "align.txt").read_text())


@pytest.mark.parametrize("name", [*SCRIPTS, "transformer --share-vocab", "luong --score location"])
def test_train_translate_align(name, folder):
    """A model trained on text files can translate, align and be tested, from its folder alone."""
    stdout, progress = run(*small(name), "new")
    *validations, result = read_log("new")
    assert [line["step"] for line in validations] == [4, 8]
    for shown, line in zip(progress, validations, strict=True):
        want = "step {step}, loss {loss:.3f}, valid {valid_loss:.3f}, ".format(**line)
        assert shown.startswith(want)
    scores = "loss {loss:.4f}, perplexity {ppl:.3f}, BLEU {bleu:.2f}\n".format(**result)
    assert "60 training pairs (3 skipped)" in stdout and scores in stdout
    soft = np.load("new/align.npz")
    assert len(Path("new/align.txt").read_text().splitlines()) == len(soft["source"]) == 3
    before, use = contents(), (name.split()[0], "--out", "new")
    text = "\n".join(["", *(" ".join(source) for source, _, _ in PAIRS[:30]), ""]).encode()
    translations, _ = run(*use, "--translate", stdin=text)
    assert translations.split("\n")[:4] == ["", *soft["target"]]
    stdout, _ = run(*use, "--align", *TEXT[1:3])
    model, vocabularies = script(name).load("new")
    alphas = script(name).alignments(model, PAIRS, vocabularies)
    assert stdout.splitlines()[:-3] == [data.pharaoh(alpha) for alpha in alphas]
    assert [x.shape for x in alphas] == [(len(t) + 1, len(s) + 1) for s, t, _ in PAIRS]
    assert scores in run(*use, "--test", *TEXT[4:])[0]
    assert contents() == before
    assert run(*use, "--translate", "--picture", "own.svg", stdin=text)[0] == translations
    assert len(re.findall(r">\d+\. ", Path("own.svg").read_text())) == 20  # numbered captions


def test_built_in_corpus(folder, monkeypatch):
    """The default is the built-in corpus in a new folder; --resume picks the latest folder."""
    monkeypatch.setattr(data, "toy", lambda n, toy=data.toy, **how: toy(n // 500 + 3, **how))
    for number in ("", "-2", "-3"):
        stdout, _ = run("bahdanau", *small()[7:-1], "--max-len", 8)
        assert f"all files are in runs/bahdanau{number}/" in stdout
        assert "103 training pairs" in stdout and f"\n{data.EXAMPLE}\n" in stdout
        assert 0 <= read_log(f"runs/bahdanau{number}")[-1]["aer"] <= 1
    os.utime("runs/bahdanau-2/last.pt", (4e9, 4e9))  # in the future
    assert "all files are in runs/bahdanau-2/" in run("bahdanau", "--resume", "--steps", 9)[0]
    assert "runs/luong*: no run found" in error_of("luong", "--translate")


def test_saved_weights(folder, monkeypatch):
    """model.pt is the best model on the current --valid files or, with --average, the mean."""
    losses = [2.0, 1.0, 3.0, 5.0, 6.0]  # the last two on other files
    for step, loss, best in zip(count(1), losses, (True, True, False, True, False)):
        monkeypatch.setattr(script("bahdanau"), "mean_loss", lambda *_, loss=loss: loss)
        command = [*small(), "new", "--eval-every", 1, "--steps", step, *["--resume"][: step - 1]]
        run(*command, *(["--valid", *TEXT[1:3]] if step > 3 else []))
        model, (last,) = torch.load("new/model.pt")["model"], torch.load("new/last.pt")["snapshots"]
        assert all(model[key].equal(last[key]) for key in last) == best
    run(*small(), "mean", "--eval-every", 2, "--average", 3)
    snapshots = torch.load("mean/last.pt")["snapshots"]
    mean = {key: sum(weights[key] for weights in snapshots) / 3 for key in snapshots[0]}
    for path in ("mean", Path("mean/model.pt"), "mean/last.pt"):
        model, _ = script("bahdanau").load(path, beam=3)
        assert (model.training, model.cfg.beam) == (False, 3)
        assert_close(model.state_dict(), mean, 1e-6)


def test_long_validation_pairs(folder):
    """Validation pairs of more than 1,000 words are ignored with one warning."""
    for file, odd in zip(TEXT[4:], ("he " * 2000 + "\nhe\n", "il\n" + "il " * 2000 + "\n")):
        Path(file).write_bytes(Path(file).read_bytes() + gzip.compress(odd.encode()))
    _, (warning, *steps) = run(*small(), "new")
    assert "valid.en.gz" in warning and [line[:4] for line in steps] == ["step", "step"]
    assert fingerprint("new") == fingerprint("whole bahdanau")


def test_terminal(folder, monkeypatch):
    """At a terminal, --translate prompts, draws heatmaps and names unknown words."""
    monkeypatch.setattr(os, "isatty", lambda _: True)
    text = f"{' '.join(PAIRS[0][0])}\n\nhe zzz yyy\n".encode()
    stdout, errors = run("bahdanau", "--translate", "--out", "run", stdin=text)
    assert errors == ["> > > unknown words: zzz yyy", "> "]
    assert stdout.count("from 0.05 ·") == 2


@scripts
def test_flags(name):
    """Every field of Config is a flag with a help text; negative values and NaN are rejected."""
    text, _ = run(name, "--help")
    for field in dataclasses.fields(script(name).Config):
        flag = "--" + field.name.replace("_", "-")
        assert re.search(rf"^  {flag}\b[^[]*\w+\s+\w+[^[]* \[{field.default}\W", text, re.M), flag
        for value in (-1, math.nan):
            with pytest.raises(data.InputError, match=flag):
                script(name).Config(**{field.name: value})


# ---- faults and --resume ------------------------------------------------------------------------

FAULTS = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda *_: signal.raise_signal(signal.SIGINT),
    "nan weights": lambda model, *_: next(model.parameters()).data.fill_(math.nan),
    "full disk": lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
}


def run_with_fault(fault, owner, function, number, *command):
    """Run a command in a child process, with a fault at the number-th call of owner.function."""
    calls, real = count(1), getattr(owner, function)

    def faulty(*args, **kwargs):
        if next(calls) == number:
            FAULTS[fault](*args)
        return real(*args, **kwargs)

    def child():
        # SIGINT is ignored if a shell started the tests in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        setattr(owner, function, faulty)
        with open("stdout", "w") as sys.stdout, open("stderr", "w") as sys.stderr:
            main(*command)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode, Path("stderr").read_text().splitlines()


FAULTY_RUNS = [
    ("interrupt", AVERAGED, script("bahdanau"), "learning_rate", 2, 130, "interrupted.*--resume"),
    ("nan weights", AVERAGED, script("bahdanau"), "mean_loss", 2, 2, "step 8: loss is not finite"),
    *(("full disk", AVERAGED, data, "write", n, 2, r"not written \(File too") for n in (1, 5, 8)),
    *(("kill", AVERAGED, os, "fsync", n, -9, "") for n in (1, 2, 5)),
    *(("kill", AVERAGED, os, "replace", n, -9, "") for n in range(1, 11)),
    *(("kill", name, script(name), "learning_rate", 6, -9, "") for name in SCRIPTS),
]


@pytest.mark.parametrize("fault, name, owner, function, number, status, message", FAULTY_RUNS)
def test_faults(fault, name, owner, function, number, status, message, folder):
    """After a fault all files are intact, and --resume ends bit for bit like an unbroken run."""
    found, lines = run_with_fault(fault, owner, function, number, *small(name), "new")
    assert found == status
    assert re.search(message, (lines or [""])[-1])
    assert all(re.match(r"step \d, loss", line) for line in lines[:-1])
    for path in Path("new").glob("*.pt"):
        torch.load(path)
    assert len(list(Path("new").glob("*.tmp"))) == (owner is os)  # written, but not yet renamed
    if Path("new/last.pt").exists():
        run(*small(name), "new", "--resume")
    else:  # stopped before the first checkpoint: there is nothing to resume
        assert "new/last.pt: not found" in error_of(*small(name), "new", "--resume")
        shutil.rmtree("new", ignore_errors=True)
        run(*small(name), "new")
    assert fingerprint("new") == fingerprint(f"whole {name}")


def test_closed_stderr(folder):
    """A run ends like any other if nobody reads its stderr, or if it has none."""
    command, children = [sys.executable, HERE / "bahdanau.py", *small()[1:]], []
    for out, first in (("unread", None), ("closed", lambda: os.close(2))):
        arguments = [*command, out, "--device", "cpu"]
        children.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, preexec_fn=first))
        children[-1].stderr.close()
    assert [child.wait() for child in children] == [0, 0]
    assert fingerprint("unread") == fingerprint("closed") == fingerprint("whole bahdanau")


def test_bad_checkpoints(folder):
    """A damaged, foreign or changed checkpoint is rejected, and code in it is not executed."""
    sound = Path("run/model.pt").read_bytes()
    other = Path("whole luong/last.pt").read_bytes()
    malicious = b"cos\nmkdir\n(S'owned'\ntR."  # a pickle that calls os.mkdir("owned")
    saved, changed = torch.load("run/last.pt"), [b"", sound[: len(sound) // 2], malicious, other]
    changed += [{k: saved[k] for k in saved if k != x} for x in ("config", "words", "snapshots")]
    for change in (dict(unknown=1), dict(hidden=12), dict(tgt_vocab=9)):
        changed.append(saved | dict(config=saved["config"] | change))
    for content in changed:
        for path in ("run/model.pt", "run/last.pt"):
            data.write(path, content, None if isinstance(content, bytes) else torch.save)
        before = contents()
        for args in (["--align", *TEXT[1:3]], ["--resume"]):
            line = error_of("bahdanau", *args, "--out", "run")
            assert re.match(r"run/\w+\.pt: not a checkpoint this script can load", line)
        assert contents() == before
    for key in ("files", "step", "log", "optimizer"):  # which only --resume needs
        torch.save({k: saved[k] for k in saved if k != key}, "run/last.pt")
        assert "run/last.pt: not a checkpoint" in error_of("bahdanau", "--resume", "--out", "run")
    if not torch.cuda.is_available():
        with pytest.raises(data.InputError, match="^(?!.* train).*CUDA"):
            script("bahdanau").load("whole bahdanau", device="cuda")


def test_resume(folder):
    """--resume can train longer, remembers the files, and rejects flags that change the model."""
    before = contents()
    flags = "--hidden 12,--seed 2,--batch-tokens 200,--paper,--share-vocab,--max-len 50"
    for flag in flags.split(","):
        line = error_of("bahdanau", *TEXT, "--resume", "--out", "run", *flag.split())
        assert re.search(r"--[\w-]+: \S+ in this run; leave the flag out", line)
    assert contents() == before
    shutil.copytree("run", "again")
    more = "--resume --steps 12 --eval-every 1 --lr 0.001 --warmup 3 --clip 2"
    run(*small(), "run", "--src-vocab", 30000, *more.split())  # more words than there are
    assert [entry.get("step") for entry in read_log("run")] == [4, 8, 9, 10, 11, 12, None]
    run("bahdanau", "--out", "again", *more.split())
    assert fingerprint("run") == fingerprint("again")


def test_torchrun_matches_one_process(folder):
    """A run resumed with two processes ends like a run with one process, up to rounding."""
    command = [*small(), "one", "--dropout", 0, "--batch-tokens", 40]  # some batches: one sentence
    run(*command)
    command += ["--out", "two"]
    assert run_with_fault("kill", script("bahdanau"), "learning_rate", 6, *command)[0] == -9
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", HERE / "bahdanau.py"]
    torchrun += [*map(str, command[1:]), "--accumulate", "2", "--resume", "--device", "cpu"]
    done = subprocess.run([sys.executable, *torchrun], capture_output=True, text=True, timeout=300)
    assert done.stdout.count("60 training pairs") == done.stderr.count("step 8") == 1, done.stderr
    for x, y in zip(read_log("one"), read_log("two"), strict=True):
        assert (x.get("step"), x["loss"]) == (y.get("step"), pytest.approx(y["loss"], abs=1e-4))
    weights = [torch.load(Path(out, "last.pt"))["snapshots"][-1] for out in ("one", "two")]
    assert_close(*weights, 1e-3)


TRAIN = "--train train.en train.fr --valid train.en"
USER_ERRORS = f"""
{TRAIN} nowhere | nowhere: cannot be read (No such // {TRAIN} truncated.gz | truncated.gz: cannot
{TRAIN} short | train.en has 63 lines, short has 1 // {TRAIN} latin1 | latin1, line 2: not UTF-8
{TRAIN} train.fr --min-count 999 | --min-count 999 // {TRAIN} train.fr --resume | new/last.pt
{TRAIN} train.fr --out run | run: already exists; add --resume // --dropout-out 1 | must be below 1
--train long long --valid train.en train.fr | no pair of 1 to 100 words
--train train.en train.fr --valid long long | 1,000 words // --dropout inf | must be below 1
--train train.en train.fr --valid empty empty | empty: the file is empty
--medium --paper | not allowed with argument --medium // --train train.en train.fr | give both
--align train.en latin1 --out run | latin1, line 2: not UTF-8
--align train.en train.fr --out run --picture train.en | --picture NAME.svg
--translate --out run --hidden 12 | --hidden: 10 in this run // transformer --heads 5 | --heads 5
luong --score location --attention local-p | works only with --attention global
"""


@pytest.mark.parametrize("line", re.split(" // |\n", USER_ERRORS.strip()))
def test_user_errors(line, folder):
    """A user error is reported in one line, and nothing is written."""
    args, message = line.split(" | ")
    name = args.split()[0] if args[0] != "-" else "bahdanau"
    files = dict(empty=b"", long=b"un " * 1001, short=b"un\n", latin1=b"un\n\xe9\n")
    files["truncated.gz"] = gzip.compress(b"un\n" * 60)[:-9]
    for file, content in files.items():
        Path(file).write_bytes(content)
    before = contents()
    assert message in error_of(name, "--out", "new", *args.removeprefix(name).split())
    assert contents() == before


def test_translate_keeps_line_order(folder):
    """Every input line gets one output line, in order, whatever it contains."""
    sources = [" ".join(source) for source, _, _ in PAIRS]
    lines = [sources[k % 60] if k % 7 else "" for k in range(4100)]  # more than one chunk
    use = "bahdanau", "--translate", "--out", "run"
    stdout, _ = run(*use, stdin="\n".join(lines).encode())
    model, vocabularies = script("bahdanau").load("run")
    want = [" ".join(x) for x in script("bahdanau").translate(model, lines, vocabularies)]
    assert stdout.split("\n") == [*want, ""]
    odd = [b"\xef\xbb\xbf" + lines[1].encode() + b" \r", b"\xff\xfe\0", b"he " * 1001, b"", b"x"]
    stdout, errors = run(*use, stdin=b"\n".join(odd))
    found = stdout.split("\n")
    assert (len(found), found[0], found[2:4]) == (6, want[1], ["", ""])
    assert [line for line in errors if "line 3: more than 1,000 words" in line]
    _, warnings = run(*use, stdin=b"unknown words\n" * 5000)
    assert warnings == ["100% of words unknown; tokenize as for training"] * 2  # once per chunk


# ---- documentation ------------------------------------------------------------------------------


def test_readme_commands():
    """Every script and flag in the README's commands exists."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    commands = re.findall(r"^[^#|\n]*?(\w+)\.py\b(.*)$", "\n".join(blocks), re.M)
    assert {name for name, _ in commands} >= {"bahdanau", "test_all"}
    for name, rest in commands:
        assert list(HERE.rglob(f"{name}.py")), name
        if name in SCRIPTS:
            known = set(re.findall(r"--[a-z-]+", run(name, "--help")[0]))
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, (name, rest)


def test_links_to_code():
    """Links to code point at the right lines."""
    pages = [HERE / "README.md", *HERE.glob("docs/*.md")]
    pattern = r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)"
    links = [(page, *link) for page in pages for link in re.findall(pattern, page.read_text())]
    assert len(links) >= 100
    for page, code, file, line in links:
        lines = (page.parent / file).read_text().split("\n")
        assert code in lines[int(line) - 1], (page.name, code, file, line)


def test_attention_page():
    """attention.html is current, and in it the models with attention output the references."""
    assert draw.page() == (HERE / "docs/attention.html").read_text()
    film = json.loads((HERE / "docs/runs/film.json").read_text())
    for model in film["models"][1:]:
        assert model["frames"][-1][1] == [target for _, target in film["pairs"]], model["script"]
    assert all(pair["said"] == pair["target"] for pair in film["twins"]["sentences"])


def test_papers_page():
    """papers.html has the current code of every script and every equation of equations.md."""
    page, text = ((HERE / "docs" / name).read_text() for name in ("papers.html", "equations.md"))
    equations = re.findall(r"```math\n(.*?)\n```", text, re.S)
    found = re.findall(r'<math alttext="(.*?)" display="block">', page)
    assert [html.unescape(latex) for latex in found] == equations and len(equations) > 70
    linked = {f"{name}-L{line}" for name, line in re.findall(r"(\w+)\.py#L(\d+)\)", text)}
    assert linked == set(re.findall(r'<span id="(\w+-L\d+)"', page))
    for name, article in re.findall(r'<article id="(\w+)"><header>(.*?)</article>', page, re.S):
        code = "".join(re.findall(r'<pre class="code".*?</pre>', article, re.S))
        code = html.unescape(re.sub("<.*?>", "", code))
        (file,) = [*HERE.glob(f"{name}.py"), *HERE.glob(f"docs/{name}.py")]
        assert code.split() == file.read_text().split(), name  # papers.html has fewer empty lines


def test_readme_python(folder):
    """The README's Python blocks run; the last one needs only the source of the classes."""
    shutil.copytree("run", "runs/fr")
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    random.seed(torch.manual_seed(1).initial_seed())
    names = {}
    exec(blocks[0], names)
    assert ElementTree.parse("man.svg").getroot().tag.endswith("svg")
    assert [alpha.shape[1] for alpha in names["alphas"]] == [5, 5]
    exec(blocks[1], names)
    best = names["alpha"][0, :-1].argmax(-1).flip(0)
    assert (best == torch.arange(len(best))).double().mean() > 0.7  # the anti-diagonal
    names, classes = {}, dict(bahdanau="Additive", luong="Luong", transformer="MultiHead")
    head, *examples = re.split(r"^(?=attention = )", blocks[2], flags=re.M)
    exec(head, names)
    for (name, cls), example in zip(classes.items(), examples, strict=True):
        exec(inspect.getsource(getattr(script(name), f"{cls}Attention")) + example, names)
        assert not names["alpha"][1, ..., 3:].any() and names["alpha"][0].all()
    _, alpha = names["Classifier"](9, 8, 8)(torch.tensor([[4, 5, PAD]]))
    assert alpha[0, 2] == 0 < alpha[0, :2].min()
    for options in (("concat", "local-p"), ("dot", "local-m"), ("location",)):
        names["LuongAttention"](64, *options)(names["source"], names["source"], names["mask"])


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
    assert type(model.attention) is script("bahdanau").AdditiveAttention
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


# ---- on a GPU -----------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU_MODELS = [(name, {}) for name in SCRIPTS] + [("bahdanau", dict(optimizer="adadelta", lr=1.0))]
GPU_MODELS += [("luong", dict(optimizer="sgd", lr=0.5, input_feeding=True, attention="local-p"))]


def train_on(device, name, seed=0, **changes):
    """Train for 50 steps on batches whose shapes recur; return the model and the losses."""
    sizes = {k: 8 * n if n > 2 else n for k, n in SCRIPTS[name].items()}  # layers, heads, window: 2
    sizes |= dict(src_vocab=13, tgt_vocab=11, dropout=0.3, steps=60, warmup=10)
    torch.manual_seed(0)
    model = script(name).Model(script(name).Config(**sizes | changes)).to(device)
    step, losses = script(name).make_train_step(model, model.cfg), []
    for n in range(50):
        torch.manual_seed(seed + n)
        src, tgt = (x.to(device if n % 2 else "cpu") for x in random_batch(n * n % 7))
        losses.append(step(src, tgt).item())
    return model, torch.tensor(losses)


def decode_on_gpu(module, model):
    sources = [random_batch(n)[0].cuda() for n in range(8)]
    found = [module.greedy(model, src, 20).tolist() for src in sources]
    return found + [module.beam(model, src, 20, 3, 0.6).tolist() for src in sources]


@cuda
@pytest.mark.parametrize("name, changes", GPU_MODELS)
def test_cuda_graphs(name, changes, monkeypatch):
    """CUDA graphs are used, match eager execution, and draw dropout masks from the seed."""
    model, losses = train_on("cuda", name, **changes)
    assert losses[-10:].sum() < losses[:10].sum()
    assert torch.equal(losses, train_on("cuda", name, **changes)[1])
    assert not torch.equal(losses, train_on("cuda", name, seed=1, **changes)[1])
    found = decode_on_gpu(script(name), model)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    with pytest.raises(TypeError):
        train_on("cuda", name, **changes)
    monkeypatch.setattr(script(name), "graphed", lambda function, *_: function)
    assert decode_on_gpu(script(name), model) == found
    eager_model, eager_losses = train_on("cuda", name, **changes)
    assert_close(losses, eager_losses, 1e-2)
    assert_close(model.state_dict(), eager_model.state_dict(), 1e-2)


@cuda
@scripts
def test_cuda_run(name, folder):
    """A run can be trained and resumed on a GPU, then used on the CPU."""
    command = [*small(name)[1:], "new", "--device", "cuda"]
    script(name).main(command)
    script(name).main([*command, "--steps", "16", "--resume"])
    assert [line.get("step") for line in read_log("new")] == [4, 8, 12, 16, None]
    assert run(name, "--translate", "--out", "new", stdin=b"the cat\nhe")[0].count("\n") == 2


@cuda
@scripts
def test_cuda_and_compile(name):
    """Losses on a GPU, compiled or not, match those on the CPU, and a compiled model can decode."""
    _, cpu = train_on("cpu", name, dropout=0.0)
    _, gpu = train_on("cuda", name, dropout=0.0)
    model, compiled = train_on("cuda", name, dropout=0.0, compile=True)
    assert_close(cpu[:10], gpu[:10], 0.1)  # bf16
    assert_close(gpu, compiled, 0.05)
    decode_on_gpu(script(name), model)


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.float])
def test_cuda_masks(dtype):
    """On a GPU, too, a query that sees no key gets zeros; the fused kernels average there."""
    torch.manual_seed(0)
    module = script("transformer").MultiHeadAttention(64, 4).to("cuda", dtype)
    source = torch.randn(3, 5, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.arange(5, device="cuda") >= torch.tensor([[0], [3], [5]], device="cuda")
    exact, _ = module(source, source, mask, need_alpha=True)
    for m in (mask, mask.unsqueeze(1).expand(3, 5, 5)):
        c, _ = module(source, source, m)
        assert not c[0].any()
        assert_close(c, exact, 0.02)
        (grad,) = torch.autograd.grad(c.square().sum(), source)
        assert grad.isfinite().all() and not grad[0].any()
