# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm", "pytest", "sacrebleu"]
# ///
"""Every result is compared with an independent reference: naive loops over the papers' equations,
finite differences, torch.nn, sacreBLEU, exhaustive search, or an uninterrupted run."""

import copy
import doctest
import gzip
import importlib
import inspect
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import typing
import zlib
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain, count, islice, product
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import sigmoid, softmax, tanh
from torch.utils._pytree import tree_map_only

import bahdanau
import data
from data import BOS, EOS, PAD, UNK

HERE = Path(__file__).parent
torch.set_num_threads(1)  # the models are tiny
# The scripts, with model sizes for the tests. A fifth script needs an entry here, and for its
# equations a loop in REFERENCES and its combinations of model flags in MODELS. The papers' values
# are in PAPERS, INIT, HALVED and test_dropout, which every script needs.
SCRIPTS = dict(
    seq2seq_lstm=dict(emb=6, hidden=5, layers=2),
    bahdanau=dict(emb=6, hidden=5, attn=7, maxout=4),
    luong=dict(emb=6, hidden=5, layers=2, window=2),
    transformer=dict(d_model=8, d_ff=10, heads=2, layers=2),
)
each_script = pytest.mark.parametrize("name", SCRIPTS)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def script(name):
    return importlib.import_module(name.split()[0])


# Score and kind of attention; the location score is defined for global attention only.
SCORE_NAMES = typing.get_args(script("luong").Config.__annotations__["score"])
LUONG = [("location", "global")]
LUONG += product([s for s in SCORE_NAMES if s != "location"], ["global", "local-m", "local-p"])
# Every combination of model flags listed here is compared with its reference loop. A new model flag
# goes here and into the reference.
MODELS = [
    "seq2seq_lstm",
    "seq2seq_lstm --no-reverse",
    "bahdanau",
    "transformer",
    "transformer --share-vocab --align-layer 1",
    "luong --score location --max-len 4",
]
for score, kind in LUONG:
    MODELS.append(f"luong --score {score} --attention {kind}")
    MODELS.append(f"luong --score {score} --attention {kind} --input-feeding")
LOCAL = "luong --attention local-p --input-feeding"  # its decoder takes one step at a time


def build(name, seed=0, std=0.5, **changes):
    """Return a script and a random float64 model, for a name with flags or without."""
    module = script(name)
    _, flags = data.parse_args(module.Config, module.__doc__, name.split()[1:])
    sizes = dict(src_vocab=13, tgt_vocab=11, dropout=0.0) | SCRIPTS[module.__name__]
    torch.manual_seed(seed)
    model = module.Model(module.Config(**sizes | flags | changes)).double().eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * std)  # weights initialized to zero would hide errors
    return module, model


def pad(rows):
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def random_batch(seed):
    """Return src and tgt of four pairs of 1 to 8 tokens; src has more padding than necessary."""
    r = random.Random(seed)
    lengths = (8, 1, r.randint(1, 8), r.randint(1, 8))
    sources = [r.sample(range(4, 13), n) + [EOS] for n in lengths]  # distinct, for naive_seq2seq
    targets = [[BOS, *r.choices(range(4, 11), k=r.randint(1, 8)), EOS] for _ in lengths]
    return F.pad(pad(sources), (0, 4)), pad(targets)


def assert_close(a, b, tolerance=1e-9, message=""):
    """Compare two tensors, or two lists or dicts of tensors; message introduces a failure."""
    limits = dict(rtol=0, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(a, b, **limits, msg=lambda details: f"{message}\n{details}".strip())


def built_in(n, split="train", max_len=30):
    """Return n pairs of the built-in corpus with at most max_len source words."""
    pairs = data.read_pairs(*data.built_in(split))
    return list(islice((pair for pair in pairs if len(pair[0]) <= max_len), n))


ATTENTIONS = ["bahdanau", "transformer"] + [f"luong {score} {kind}" for score, kind in LUONG]


@pytest.fixture(params=product(ATTENTIONS, range(3)), ids=str)
def attention(request):
    """Module, keywords, query (B,T,H), source (B,S,H), and a mask that hides all of row 0."""
    name, seed = request.param
    torch.manual_seed(seed)
    B, T, S = random.Random(seed).sample(range(3, 9), 3)
    H = 9 * (seed + 1)
    query = torch.randn(B, T, H).double()
    source = torch.randn(B, S, H).double()
    mask = torch.arange(S) >= torch.tensor([0, S, *torch.randint(1, S, (B - 2,))]).unsqueeze(1)
    if name == "bahdanau":
        module = bahdanau.AdditiveAttention(H, H - 1, 3)
        return module.double(), {}, query, source[..., 1:], mask
    if name == "transformer":
        module = script("transformer").MultiHeadAttention(H, seed + 1)
        return module.double(), dict(need_alpha=True), query, source, mask
    module = script("luong").LuongAttention(H, *name.split()[1:], window=2, positions=5)
    return module.double(), {}, query, source, mask


# ---- what the project promises first: shapes, and models that learn ------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_shapes(name):
    """Logits (B,T,V), alpha (B,T,S) whose rows sum to 1, states of constant shape, translations."""
    module, model = build(name)
    src, tgt = random_batch(1)
    B, S, T, V = *src.shape, tgt.size(1) - 1, model.cfg.tgt_vocab
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    assert logits.shape == (B, T, V)
    assert alpha.shape == module.align(model, src, tgt).shape == (B, T, S)
    assert_close(alpha.sum(-1), torch.ones(B, T), message="rows of alpha must sum to 1")
    assert not alpha.masked_select((src == PAD).unsqueeze(1)).any()
    memory = model.encode(src)
    state = model.init_state(memory, 5)
    shapes = [x.shape for x in state]
    logits, state = model.step(tgt[:, 0], state, memory)
    assert logits.shape == (B, V)
    assert [x.shape for x in state] == shapes
    for tokens in (module.greedy(model, src, 5), module.beam(model, src, 5, 3, 0.6)):
        assert len(tokens) == B
        assert 1 <= tokens.size(1) <= 5
        assert ((tokens == PAD) == ((tokens == EOS).cumsum(1) > (tokens == EOS))).all()
        with pytest.raises(AssertionError, match="must start with BOS"):
            module.align(model, src, tokens)
    for p in model.parameters():
        p.data.zero_()  # nothing depends on the source
    assert_close(module.align(model, src, tgt).sum(-1), torch.ones(B, T))


def larger(name):
    """Return sizes with which a model can learn."""
    sizes = SCRIPTS[script(name).__name__].items()
    return {field: n if field in ("layers", "heads", "window") else 8 * n for field, n in sizes}


@each_script
def test_overfits_32_pairs(name):
    """Every model learns to reproduce 32 training pairs exactly."""
    pairs = built_in(32, "test", max_len=7)
    vocabularies = data.build_vocabularies(pairs)
    sizes = larger(name)
    sizes |= dict(src_vocab=len(vocabularies[0]), tgt_vocab=len(vocabularies[1]))
    if "layers" in sizes:
        sizes["layers"] = 1  # deeper models need more steps
    module, model = build(name, 1, 0, **sizes, smoothing=0.0)
    batch = data.Bitext(pairs, vocabularies).batch(range(32))
    step = module.make_train_step(model, model.cfg, torch.optim.Adam(model.parameters(), 0.005))
    for _ in range(150):
        step(*batch)
    result = module.evaluate(model, pairs, vocabularies)
    assert result["bleu"] == pytest.approx(100)
    links = [data.links(alpha) for alpha in module.alignments(model, pairs, vocabularies)]
    assert result["aer"] == data.aer(links, [gold for _, _, gold in pairs])
    assert result["loss"] == pytest.approx(step(*batch).item(), abs=1e-5)
    assert result["ppl"] == pytest.approx(math.exp(result["loss"]))


# ---- the papers as naive float64 loops that yield p(y_i) and alpha_i for each target position ----
# p is a dict of the parameters by their names in the script, without ".weight".
def gru(p, name, x):
    """Return the states of torch's GRU, which has r * (U h) where the paper has U (r * h)."""
    W, U = (p[name.format(part)] for part in ("weight_ih", "weight_hh"))
    h = [torch.zeros_like(U[0])]
    for x_t in x:
        a_r, a_z, a = (W @ x_t).chunk(3)
        u_r, u_z, u = (U @ h[-1]).chunk(3)
        z = sigmoid(a_z + u_z)
        h.append((1 - z) * tanh(a + sigmoid(a_r + u_r) * u) + z * h[-1])
    return h[1:]


def lstm(p, name, x, state, bias):
    """Take one step of a multi-layer LSTM; return the top layer's h, and (h, c) of every layer."""
    new_state = []
    for layer, (h, c) in enumerate(state):
        W, U = (p[name.format(part, layer)] for part in ("weight_ih", "weight_hh"))
        gates = W @ x + U @ h
        if bias:  # torch has two
            gates = gates + p[name.format("bias_ih", layer)] + p[name.format("bias_hh", layer)]
        i, f, g, o = gates.chunk(4)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        x = sigmoid(o) * tanh(c)
        new_state.append((x, c))
    return x, new_state


def encode(p, name, source, cfg):
    """Return the encoder's top-layer states, keyed by position from 1, and its final state."""
    h_bar, state = {}, [(torch.zeros(cfg.hidden).double(),) * 2] * cfg.layers
    order = range(1, len(source) + 1)
    for s in reversed(order) if getattr(cfg, "reverse", True) else order:
        h_bar[s], state = lstm(p, name, p["E_x"][source[s - 1]], state, bias=False)
    return h_bar, state


def fixed_vector(p, source, target, cfg):
    """Sutskever et al., without alpha."""
    _, state = encode(p, "encoder.{}_l{}", source, cfg)
    for previous in target[:-1]:
        h, state = lstm(p, "decoder.{}_l{}", p["E_y"][previous], state, bias=True)
        yield softmax(p["W"] @ h + p["W.bias"], 0)


def naive_seq2seq(p, source, target, cfg, eps=1e-5):
    """Sutskever et al.; alpha is the sensitivity of log p to the scale of a source embedding."""
    slopes = []
    for token in source:
        change = eps * F.one_hot(torch.tensor(token), len(p["E_x"])).unsqueeze(1)
        scaled = (p | {"E_x": p["E_x"] * (1 + x)} for x in (change, -change))
        up, down = (torch.stack([*fixed_vector(q, source, target, cfg)]).log() for q in scaled)
        slopes.append((up - down).abs())  # finite differences
    for i, p_y in enumerate(fixed_vector(p, source, target, cfg)):
        slope = torch.stack([slope[i, target[i + 1]] for slope in slopes])
        yield p_y, slope / slope.sum()


def naive_rnnsearch(p, source, target, cfg):
    """Bahdanau et al."""
    x = [p["E_x"][token] for token in source]
    right = gru(p, "encoder.{}_l0", x)
    left = gru(p, "encoder.{}_l0_reverse", x[::-1])[::-1]
    h = [torch.cat(pair) for pair in zip(right, left)]  # (7)
    W_a, U_a, v_a = (p[f"attention.{key}"] for key in ("W_a", "U_a", "v_a"))
    s = tanh(p["W_s"] @ left[0] + p["W_s.bias"])  # A.2.2
    c = torch.zeros_like(h[0])
    for previous in target[:-1]:
        y = p["E_y"][previous]
        a_z, a_r, a = (p["cell.W"] @ y + p["cell.W.bias"] + p["cell.C"] @ c).chunk(3)
        u_z, u_r = (p["cell.U_zr"] @ s).chunk(2)
        z, r = sigmoid(a_z + u_z), sigmoid(a_r + u_r)  # A.1.1
        s = (1 - z) * s + z * tanh(a + p["cell.U"] @ (r * s))  # authors' code: s has read y
        e = torch.stack([v_a @ tanh(W_a @ s + U_a @ h_j) for h_j in h])  # A.1.2
        alpha = softmax(e, 0)  # (6)
        c = sum(alpha_j * h_j for alpha_j, h_j in zip(alpha, h))  # (5)
        t_tilde = p["U_o"] @ s + p["U_o.bias"] + p["V_o"] @ y + p["C_o"] @ c  # A.2.2
        t = torch.stack([max(pair) for pair in zip(t_tilde[::2], t_tilde[1::2])])  # maxout
        yield softmax(p["W_o"] @ t + p["W_o.bias"], 0), alpha


# To add a score to luong.py, add its name and formula here; p holds its parameters by name.
SCORES = dict(
    dot=lambda p, h_t, h_bar, s: h_t @ h_bar,
    general=lambda p, h_t, h_bar, s: h_t @ p["W_a"] @ h_bar,
    concat=lambda p, h_t, h_bar, s: p["v_a"][0] @ tanh(p["W_q"] @ h_t + p["W_k"] @ h_bar),
    location=lambda p, h_t, h_bar, s: (p["W_a"] @ h_t)[s - 1] if s <= len(p["W_a"]) else -math.inf,
)


def luong_alignment(p, cfg, h_t, h_bar, t):
    """Return a_t, keyed by source position."""
    p = {key.removeprefix("attention."): p[key] for key in p}
    S, D = len(h_bar), cfg.window
    p_t = min(t, S)  # local-m
    window = list(h_bar)  # global
    if cfg.attention == "local-p":
        p_t = S * sigmoid(p["v_p"][0] @ tanh(p["W_p"] @ h_t))  # (9)
    if cfg.attention != "global":
        window = [s for s in h_bar if p_t - D <= s <= p_t + D]
    assert cfg.score in SCORES, f"add the formula of {cfg.score} to SCORES in test_all.py"
    scores = [SCORES[cfg.score](p, h_t, h_bar[s], s) for s in window]
    align = softmax(torch.stack([torch.as_tensor(e).to(h_t) for e in scores]), 0)  # (7), (8)
    a_t = dict(zip(window, align))
    if cfg.attention == "local-p":
        a_t = {s: a_t[s] * torch.exp(-((s - p_t) ** 2) / (2 * (D / 2) ** 2)) for s in a_t}  # (10)
    return dict.fromkeys(h_bar, 0 * align[0]) | a_t


def naive_luong(p, source, target, cfg):
    """Luong et al."""
    h_bar, state = encode(p, "encoder.layers.{1}.{0}_l0", source, cfg)
    h_tilde = torch.zeros_like(h_bar[1])
    for t, previous in enumerate(target[:-1], 1):
        x = torch.cat([p["E_y"][previous], h_tilde]) if cfg.input_feeding else p["E_y"][previous]
        h_t, state = lstm(p, "decoder.layers.{1}.{0}_l0", x, state, bias=True)
        a_t = luong_alignment(p, cfg, h_t, h_bar, t)
        c_t = sum(a_t[s] * h_bar[s] for s in h_bar)
        h_tilde = tanh(p["W_c"] @ torch.cat([c_t, h_t]))  # (5)
        alpha = torch.stack([a_t[s] for s in sorted(h_bar)])
        yield softmax(p["W_s"] @ h_tilde, 0), alpha / alpha.sum()  # (6)


def embed(E, words):
    """Return the scaled embeddings (3.4) plus positional encodings (3.5)."""
    n, d = len(words), E.size(1)
    angle = [[pos / 10000 ** ((i - i % 2) / d) for i in range(d)] for pos in range(n)]
    PE = np.where(np.arange(d) % 2, np.cos(angle), np.sin(angle))
    return E[words] * math.sqrt(d) + torch.tensor(PE)


def multi_head(p, name, heads, x, others):
    """Attend from x to others by (1); return the output and the weights averaged over heads."""
    W_Q, (W_K, W_V) = p[f"{name}.W_Q"], p[f"{name}.W_KV"].chunk(2)
    K, V = ((torch.stack([*others]) @ W.T).chunk(heads, 1) for W in (W_K, W_V))
    weights = [softmax(k @ q / math.sqrt(len(q)), 0) for q, k in zip((W_Q @ x).chunk(heads), K)]
    out = [alpha @ v for alpha, v in zip(weights, V)]
    return p[f"{name}.W_O"] @ torch.cat(out), sum(weights) / heads


def feed_forward(p, name, x):
    inner = (p[f"{name}.ffn.0"] @ x + p[f"{name}.ffn.0.bias"]).clamp_min(0)
    return p[f"{name}.ffn.2"] @ inner + p[f"{name}.ffn.2.bias"]  # (2)


def add_norm(p, name, x, sublayer):
    x = x + sublayer
    x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
    return x * p[name] + p[f"{name}.bias"]  # 3.1


def naive_transformer(p, source, target, cfg):
    """Vaswani et al.; instead of masking, each decoder position attends to a prefix."""
    x, y = embed(p.get("E_x", p["E_y"]), source), embed(p["E_y"], target[:-1])
    for n in (f"encoder.{k}" for k in range(cfg.layers)):
        attended = [multi_head(p, f"{n}.self_attention", cfg.heads, x_j, x)[0] for x_j in x]
        x = [add_norm(p, f"{n}.norm_1", x_j, a) for x_j, a in zip(x, attended)]
        x = [add_norm(p, f"{n}.norm_2", x_j, feed_forward(p, n, x_j)) for x_j in x]
    alphas = []
    for n in (f"decoder.{k}" for k in range(cfg.layers)):
        prefixes = [(y_i, y[: i + 1]) for i, y_i in enumerate(y)]
        attended = [multi_head(p, f"{n}.self_attention", cfg.heads, *pair)[0] for pair in prefixes]
        y = [add_norm(p, f"{n}.norm_1", y_i, a) for y_i, a in zip(y, attended)]
        attended = [multi_head(p, f"{n}.cross_attention", cfg.heads, y_i, x) for y_i in y]
        y = [add_norm(p, f"{n}.norm_2", y_i, c) for y_i, (c, _) in zip(y, attended)]
        y = [add_norm(p, f"{n}.norm_3", y_i, feed_forward(p, n, y_i)) for y_i in y]
        alphas.append([alpha for _, alpha in attended])
    for y_i, alpha in zip(y, alphas[cfg.align_layer - 1]):
        yield softmax(p["E_y"] @ y_i, 0), alpha  # 3.4


# ---- each model and its reference loop ----------------------------------------------------------
REFERENCES = dict(seq2seq_lstm=naive_seq2seq, bahdanau=naive_rnnsearch)
REFERENCES |= dict(luong=naive_luong, transformer=naive_transformer)


@pytest.mark.parametrize("name", MODELS)
def test_equations(name):
    """log p, alpha and gradients of a padded batch match the naive loops; so does stepping."""
    seed = MODELS.index(name)
    module, model = build(name, seed, dropout=0.5)
    src, tgt = random_batch(seed)
    reference = REFERENCES[module.__name__]
    disagrees = f"{name} disagrees with its loop, {reference.__name__}() in test_all.py"
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    weights = dict(model.named_parameters())
    p = {key.removesuffix(".weight"): weights[key].detach().requires_grad_() for key in weights}
    loss = 0
    for b in range(len(src)):
        source = src[b][src[b] != PAD].tolist()
        target = tgt[b][tgt[b] != PAD].tolist()
        for i, (p_y, want_alpha) in enumerate(reference(p, source, target, model.cfg)):
            want_alpha = F.pad(want_alpha, (0, src.size(1) - len(source)))
            assert_close(alpha[b, i], want_alpha, 1e-7, f"{disagrees}: alpha")
            assert_close(logits[b, i].softmax(0), p_y, message=f"{disagrees}: p(y)")
            loss -= p_y[target[i + 1]].log()
    grads = torch.autograd.grad(module.summed_loss(logits, tgt[:, 1:]), list(weights.values()))
    wanted = torch.autograd.grad(loss, list(p.values()), allow_unused=True)
    unused = [key for key, want in zip(p, wanted) if want is None]
    assert not unused, f"{reference.__name__}() in test_all.py does not use {unused}"
    assert_close(dict(zip(p, grads)), dict(zip(p, wanted)), message=f"{disagrees}: gradients")
    with torch.inference_mode():
        memory = model.encode(src)
        state = model.init_state(memory, tgt.size(1))
        for t in range(tgt.size(1) - 1):
            one, state = model.step(tgt[:, t], state, memory)
            assert_close(one, logits[:, t], message=f"{name}: step() disagrees with forward()")
        found = module.align(model.train(), src.clone(), tgt.clone())  # without dropout
        assert_close(found, alpha)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_reorder(name):
    """A reordered state continues the hypotheses of the rows that it was taken from."""
    _, model = build(name)
    src = random_batch(1)[0][:1].expand(4, -1)
    prefixes = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 4], [BOS, 9, 4, 9], [BOS, 5, 5, 8]])
    rows = torch.tensor([2, 0, 2, 3])
    y = torch.tensor([10, 4, 6, 7])
    memory = model.encode(src)
    state = model.init_state(memory, 5)
    for token in prefixes.T:
        _, state = model.step(token, state, memory)
    logits, _ = model.step(y, model.reorder(state, rows), memory)
    want = model(src, torch.cat([prefixes[rows], y.unsqueeze(1)], 1))[:, -1]
    assert_close(logits, want, message=f"{name}: reorder() returns the state of other rows")


# ---- the attention classes ----------------------------------------------------------------------
def test_attention(attention):
    """Each query gives the same result and gradients on its own, with only the words it may see."""
    module, keywords, query, source, right = attention
    inputs = [*module.parameters(), query.requires_grad_(), source.requires_grad_()]
    B, T, S = *query.shape[:2], source.size(1)
    masks = [None, right, right.flip(1), right[:, torch.randperm(S)]]
    if getattr(module, "kind", "global") != "global" or getattr(module, "score", "") == "location":
        for wrong in (masks.pop(2), torch.arange(S).eq(1).expand(B, S)):
            with pytest.raises(AssertionError, match="on the right"):  # they count positions
                module(query, source, wrong)
        masks.pop()
    if keywords:  # multi-head: also a mask per query, which hides everything from some queries
        masks += [torch.rand(B, T, S) < p for p in (0.5, 0.9)]
    for mask in masks:
        if keywords:  # with alpha, and the fused kernel; with known keys and values; with a bias
            results = [module(query, source, mask, **keywords)]
            biases = [mask] if mask is None else [mask, module.bias(mask, query.dtype)]
            for bias, options in product(biases, ({}, keywords)):
                c, alpha = module(query, None, bias, KV=module.KV(source), **options)
                results.append((c, alpha if options else results[0][1]))
        else:
            results = [module(query, source, mask)]
            results.append(module(query, source, mask, keys=module.keys(source)))
        heads = [module.heads] if keywords else []
        assert [x.shape for x in results[0]] == [(B, T, source.size(2)), (B, *heads, T, S)]
        hidden = torch.zeros(B, 1, S, dtype=torch.bool) if mask is None else mask.view(B, -1, S)
        hidden = hidden.expand(B, T, S)
        want = [torch.zeros_like(x) for x in results[0]]
        for b, t in (~hidden.all(-1)).nonzero().tolist():
            step = dict(t=t + 1) if type(module).__name__ == "LuongAttention" else keywords
            seen = ~hidden[b, t]
            c, alpha = module(query[b : b + 1, t : t + 1], source[b : b + 1, seen], **step)
            want[0][b, t] = c[0, 0]
            want[1][b, ..., t, seen] = alpha[0, ..., 0, :]
        losses = [sum(x.square().sum() for x in result) for result in (want, *results)]
        options = dict(retain_graph=True, materialize_grads=True)
        grads = [torch.autograd.grad(x, inputs, **options) for x in losses]
        for result, grad in zip(results, grads[1:]):
            assert_close([*result, *grad], [*want, *grads[0]])
    for wrong in (right.double(), right[:, None, None], right[:, 1:], torch.ones(S, S).bool()):
        with pytest.raises(AssertionError, match="mask must be bool"):
            module(query, source, wrong, **keywords)
    with pytest.raises(AssertionError, match="query must be"):
        module(query[:, 0], source, right, **keywords)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without bf16
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_attention_precision(attention, device):
    """Every floating-point type, and autocast, give the float64 result up to rounding."""
    module, keywords, query, source, mask = attention
    exact, _ = module(query, source, mask, **keywords)
    for dtype in (torch.double, torch.float, None, torch.half, torch.bfloat16):  # None: autocast
        stored = dtype or torch.float
        eps = torch.finfo(dtype or torch.bfloat16).eps
        q = query.detach().to(device, stored).requires_grad_()
        h = source.detach().to(device, stored).requires_grad_()
        for options in [{}, keywords] if keywords else [{}]:  # multi-head: fused, then with alpha
            with torch.autocast(device, torch.bfloat16, enabled=dtype is None):
                c, alpha = module.to(device, stored)(q, h, mask.to(device), **options)
            (grad,) = torch.autograd.grad(c.square().sum(), h)
            assert grad.isfinite().all()
            assert not grad[0].any() and not c[0].any()  # all masked
            if getattr(module, "kind", None) != "local-p":  # rounding can move its window
                assert_close(c.cpu(), exact, 16 * eps)
                assert alpha is None or (alpha.double().sum(-1)[1:] - 1).abs().max() < 4 * eps


# ---- the papers' hyperparameters, initialization, schedules and dropout -------------------------
# fmt: off
PAPERS = {  # values of Config and of the optimizer, and millions of parameters
    "seq2seq_lstm paper": dict(  # section 3
        millions=384, Optimizer="SGD", momentum=0, lr=0.7, clip=5, steps=7.5 * 12e6 / 128, beam=12),
    "bahdanau paper": dict(  # section 4, A.2.3, appendix B, table 2
        emb=620, hidden=1000, attn=1000, maxout=500, src_vocab=30000, tgt_vocab=30000, max_len=50,
        Optimizer="Adadelta", rho=0.95, eps=1e-6, lr=1, clip=1, steps=288000, batch_sentences=80),
    "luong paper": dict(  # section 4.1, table 1
        emb=1000, hidden=1000, layers=4, tgt_vocab=50000, max_len=50, window=10, dropout=0.2,
        score="general", attention="local-p", input_feeding=True, replace_unk=True,
        Optimizer="SGD", momentum=0, lr=1, clip=5, steps=12 * 4.5e6 / 128),
    "transformer paper": dict(  # table 3 (which says 65 million), sections 5 and 6.1
        millions=63, heads=8, layers=6, dropout=0.1, smoothing=0.1, warmup=4000, cooldown=False,
        Optimizer="Adam", betas=(0.9, 0.98), eps=1e-9, clip=0, steps=100000, average=5, beam=4),
    "transformer medium": dict(d_model=128, d_ff=256, heads=4, layers=4, dropout=0.3),  # Wu et al.
}
# fmt: on


@pytest.mark.parametrize("name", PAPERS)
def test_paper_numbers(name):
    """Presets have the papers' values, and equal vocabulary sizes where the papers share one."""
    preset = getattr(script(name).Config, name.split()[1])
    with torch.device("meta"):
        model = script(name).Model(preset())
    optimizer = script(name).make_optimizer(model, preset())
    found = optimizer.param_groups[0] | vars(preset()) | dict(Optimizer=type(optimizer).__name__)
    found["millions"] = sum(p.numel() for p in model.parameters()) // 10**6
    assert {field: found[field] for field in PAPERS[name]} == PAPERS[name]
    separate = vars(preset(share_vocab=False))
    assert separate | dict(share_vocab=preset().share_vocab) == vars(preset())


# Pattern in the parameter's name, distribution, and its bound, standard deviation, value or gain:
INIT = dict(
    seq2seq_lstm=[(".", "uniform", 0.08)],
    bahdanau=[
        ("bias|v_a", "constant", 0),
        ("_hh|cell.U", "orthogonal", 1),
        ("_a", "normal", 0.001),
        (".", "normal", 0.01),
    ],
    luong=[(".", "uniform", 0.1)],
    transformer=[
        ("E_", "normal", 0.125),
        ("norm.*weight", "constant", 1),
        ("norm.*bias", "constant", 0),
        ("ffn.0", "uniform", 64**-0.5),  # torch's default for nn.Linear
        ("ffn.2", "uniform", 2048**-0.5),
        ("W_O", "glorot", 1),
        (".", "glorot", 2**-0.5),
    ],
)


@pytest.mark.parametrize("name", INIT)
def test_initialization(name):
    """Each parameter follows the first distribution whose pattern matches its name."""
    module = script(name)
    sizes = dict(d_model=64, layers=2) if name == "transformer" else dict(emb=30, hidden=40)
    torch.manual_seed(0)
    model = module.Model(module.Config.paper(src_vocab=300, tgt_vocab=200, **sizes))
    for key, p in model.named_parameters():
        matching = [rule for rule in INIT[name] if re.search(rule[0], key)]
        _, law, size = matching[0]
        error = f"{key}: not {law} {size}; a new parameter may need a rule in INIT"
        for W in p.split(p.size(-1)) if re.search("KV|_hh|cell.U", key) else [p]:
            if law in ("uniform", "glorot"):
                bound = size * math.sqrt(6 / sum(W.shape)) if law == "glorot" else size
                assert (1 - 8 / W.numel()) * bound < W.abs().max() <= bound, error
                assert abs(W.mean()) < 0.3 * bound, error
            elif law == "normal":
                assert W.std().item() == pytest.approx(size, rel=0.25), error
                assert abs(W.mean()) < 0.3 * size, error
            elif law == "constant":
                assert W.eq(size).all(), error
            else:
                assert_close(W @ W.T, torch.eye(len(W)), 1e-5)
    if name in ("bahdanau", "transformer"):  # the other papers name one distribution for all
        model.added = nn.LayerNorm(3)
        model.init_weights()
        assert model.added.weight.eq(1).all()


# The steps, out of 750, after which each paper halves its learning rate:
HALVED = {
    "seq2seq_lstm": [500, 550, 600, 650, 700],
    "bahdanau": [],
    "luong": [500, 563, 625, 688],
    "luong without dropout": [375, 450, 525, 600, 675],
}


@pytest.mark.parametrize("name", [*HALVED, "transformer"])
def test_schedule(name):
    """The paper's rate is halved or follows (3); the default warms up and decays linearly."""
    module = script(name)
    paper = module.Config.paper(steps=750, warmup=100, dropout=0.0 if "without" in name else 0.2)
    default = module.Config(steps=750, warmup=100)
    for n in range(1, 751):
        if name == "transformer":
            want = 512**-0.5 * min(n**-0.5, n * 100**-1.5)  # (3)
            want_default = 96**-0.5 * min(n**-0.5, n * 100**-1.5) * (751 - n) / 750
        else:
            want = paper.lr * 0.5 ** sum(n > step for step in HALVED[name])
            want_default = default.lr * min(n / 100, (751 - n) / 750)
        rates = module.learning_rate(paper, n), module.learning_rate(default, n)
        assert rates == pytest.approx((want, want_default)), f"step {n}; edit this test or HALVED"
    if name == "transformer":  # the peak of (3), for loops that do not set the rate
        rate = module.make_optimizer(nn.Linear(1, 1), default).param_groups[0]["lr"]
        assert rate == pytest.approx(module.learning_rate(default, 100) * 750 / 651)


@pytest.mark.parametrize("name", [*SCRIPTS, LOCAL])
def test_dropout(name):
    """Dropout is applied where the paper or the script's docstring says, and only in training."""
    _, model = build(name, dropout=0.5)
    src, tgt = random_batch(1)
    S, T, E, H, d_model = src.size(1), tgt.size(1) - 1, 6, 5, 8
    want = {  # the shapes of what dropout is applied to
        "seq2seq_lstm": [(S, E), (T, E), (T, H)],  # inputs of the LSTMs and the softmax
        "bahdanau": [(S, E), (S, 2 * H), (T, E), (T, 4)],  # 2H: annotations, 4: maxout
        "luong": [(S, E), (S, H), (T, E), (T, H), (T, H)],  # inputs of all layers and the softmax
        "transformer": [(S, d_model)] * 5 + [(T, d_model)] * 7,  # embeddings and sublayers
        LOCAL: [(S, E), (S, H), *[(E + H,), (H,)] * T, (T, H)],
    }
    dropped = []
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(lambda part, x, y: dropped.append(tuple(x[0].shape[1:])))
    noisy = model.train()(src, tgt[:, :-1])
    assert sorted(dropped) == sorted(want[name])
    assert (noisy - model.eval()(src, tgt[:, :-1])).abs().max() > 1e-3


# ---- decoding -----------------------------------------------------------------------------------
def ranked(model, src, hypotheses, penalty):
    """Return the hypotheses by log p / ((5 + length) / 6)^penalty, best first."""
    tgt = pad([[BOS, *tokens] for tokens in hypotheses])
    log_p = model(src.expand(len(tgt), -1), tgt[:, :-1]).log_softmax(-1)
    real = tgt[:, 1:] != PAD
    log_p = (log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1) * real).sum(1)
    score = log_p / ((5 + real.sum(1)) / 6) ** penalty
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


@pytest.mark.parametrize("name", [*SCRIPTS, LOCAL])
@pytest.mark.parametrize("seed", range(3))
def test_beam(name, seed):
    """Beam search matches a naive one: greedy if K is 1, exhaustive if K exceeds all choices."""
    module, model = build(name, seed, 0.5 + 0.2 * seed, tgt_vocab=5, dropout=0.5)
    src = torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD], [5, 8, EOS, PAD]])
    searches = [  # the maximum length of each translation, K, and the length penalty
        ([9, 12, 1], 1, 0.0),
        ([6, 4, 5], 2, 0.6),
        ([5, 6, 0], 3, 0.0),
        ([8, 4, 8], 3, 5.0),
        ([3, 3, 3], 40, 2.0 * seed),  # all 13 finished and 27 unfinished hypotheses
    ]
    for limits, K, penalty in searches:
        tokens = module.beam(model.train(), src, limits, K, penalty)  # without dropout
        for row, source, limit in zip(tokens, src, limits):
            want = naive_beam(model, source[None, source != PAD], limit, K, penalty)
            assert row.tolist() == want + [PAD] * (len(row) - len(want))


@pytest.mark.parametrize("K", [1, 2])
def test_translate(K):
    """Strings and lists are translated in order, to at most n + 50 words; <unk> can be replaced."""
    module, model = build("bahdanau", beam=K, length_penalty=20.0)
    words = [f"w{i}" for i in range(4, 13)]
    vocabularies = [data.Vocabulary(data.SPECIALS + words[:n]) for n in (9, 7)]
    lists = [words[:5], [], ["w9"], ["w5", "un\u00a0heard", "w4"]]
    texts = [" " + "  ".join(words) for words in lists]
    for bias in (5, -1000):  # in favor of EOS, then against it
        nn.init.constant_(model.W_o.bias[:3].detach(), bias)
        found = module.translate(model, texts, vocabularies)
        assert found == module.translate(model, lists, vocabularies)
        alphas = module.alignments(model, zip(lists, found), vocabularies)
        for words, got, alpha in zip(lists, found, alphas, strict=True):
            src = torch.tensor([[*vocabularies[0].encode(words), EOS]])
            (row,) = module.beam(model, src, len(words) + 50 if words else 0, K, 20.0)
            assert got == vocabularies[1].decode(row.tolist())
            tgt = torch.tensor([[BOS, *vocabularies[1].encode(got), EOS]])
            assert_close(torch.from_numpy(alpha), module.align(model, src, tgt)[0], 1e-6)
    assert [len(got) for got in found] == [55, 0, 51, 53]
    assert module.translate(model, lists, vocabularies, beam_size=3 - K) != found
    nn.init.constant_(model.W_o.bias[UNK].detach(), 1000)
    model.cfg.replace_unk = True
    (alpha,) = module.alignments(model, [(lists[0], ["<unk>"] * 55)], vocabularies)
    want = [lists[0][i] for i in alpha[:-1, :-1].argmax(1)]
    assert module.translate(model, lists[:2], vocabularies) == [want, []]
    mistakes = [(data.bleu, ["w4"], "w4"), (module.alignments, model, [["w4"] * 4], vocabularies)]
    mistakes.append((module.translate, model, "w4 w5", vocabularies))
    for function, *arguments in mistakes:
        with pytest.raises(AssertionError, match="expected"):
            function(*arguments)


@pytest.mark.parametrize("K", [1, 2])
def test_decoding_stops(K):
    """Decoding ends soon after the last sentence has ended or reached its limit."""
    module, model = build("transformer")
    calls = count()

    def eos_from_second_step(y, state, memory):
        logits, state = type(model).step(model, y, state, memory)
        logits[:, EOS] = 1000 if next(calls) else -1000
        logits[:K, EOS] = -1000  # never in the first sentence
        return logits, state

    model.step = eos_from_second_step
    tokens = module.beam(model, random_batch(1)[0], [16, 100, 100, 100], K)
    assert tokens.size(1) == 16
    assert (tokens[1:, 1] == EOS).all()
    assert not tokens.is_inference()  # so that they can be trained on
    assert next(calls) < 50  # of 100


# ---- training -----------------------------------------------------------------------------------
# Errors of weights after 12 steps:
ERRORS = {"cpu": 1e-12, "cuda": 1e-3, "cuda, fast, float32": 1e-3, "cuda, fast, bf16": 0.1}
STEPS = [  # optimizer, its options, micro-batches, what the loss is averaged over, maximum norm
    ("AdamW", dict(lr=0.01, eps=0.01, weight_decay=0.5), 1, "token", 0.2),
    ("AdamW", dict(lr=0.01, eps=0.01, weight_decay=0.5), 2, "sentence", 0),
    ("SGD", dict(lr=0.02, momentum=0.9), 2, "sentence", 0.2),
    ("SGD", dict(lr=0.02, momentum=0.9), 9, "token", 0),
]


@pytest.mark.parametrize("machine", ["cpu", *(pytest.param(x, marks=cuda) for x in [*ERRORS][1:])])
@pytest.mark.parametrize("kind, options, accumulate, per, clip", STEPS)
@each_script
def test_train_step(name, kind, options, accumulate, per, clip, machine, monkeypatch):
    """Matches a plain loop; weights are frozen at once or later, or not in the optimizer."""
    if machine == "cuda, fast, float32":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    recipe = dict(accumulate=accumulate, loss_per=per, smoothing=0.2, clip=clip)
    module, model = build(name, **recipe, fast="fast" in machine)
    model = model if machine == "cpu" else model.float().cuda()
    model.E_x.weight.requires_grad_(False)
    if not model.cfg.fast:
        model.unused = nn.Parameter(
            torch.ones_like(model.E_x.weight[0])
        )  # no gradient, so no weight decay
    doubled = model.E_y.weight.detach().repeat(1, 2)
    model.E_y.weight = nn.Parameter(doubled.chunk(2, 1)[0])  # with the strides of a slice
    plain = copy.deepcopy(model).to(doubled.device)  # flattens the weights for cuDNN again
    weights = [[p for k, p in x.named_parameters() if "encoder" not in k] for x in (model, plain)]
    ours, theirs = (getattr(torch.optim, kind)(x, **options) for x in weights)
    step = module.make_train_step(model, model.cfg, ours)
    start = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of a user's own loss
    for n in range(12):
        if n == 4:
            middle = copy.deepcopy(model.state_dict())
            model.E_y.weight.requires_grad_(False)
            plain.E_y.weight.requires_grad_(False)
        src, tgt = (x.to(doubled.device) for x in random_batch(n % (3 if n < 7 else 6)))
        log_p = plain.train()(src, tgt[:, :-1]).log_softmax(-1)
        correct = log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1)
        losses = -(0.8 * correct + 0.2 * log_p.mean(-1))[tgt[:, 1:] != PAD]
        assert step(src, tgt).item() == pytest.approx(losses.mean().item(), abs=ERRORS[machine])
        assert all((p.grad is None) != p.requires_grad for p in model.parameters() if p.ndim > 1)
        plain.zero_grad()
        (losses.sum() / (len(losses) if per == "token" else len(src))).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        theirs.step()
    for (key, p), q in zip(model.named_parameters(), plain.parameters()):
        for before, frozen in ((start, ("E_x", "encoder")), (middle, ("E_", "encoder"))):
            stays = key.startswith((*frozen, "unused"))
            why = "a frozen weight changed" if stays else "no gradient: an unused parameter?"
            assert torch.equal(p, before[key]) == stays, f"{name}: {key}: {why}"
        assert_close(p, q, ERRORS[machine], key)


# ---- data.py: the built-in corpus, vocabularies, batches, scores, pictures ----------------------
def test_corpus(tmp_path):
    """The files are what the grammar generates; splits are disjoint, links complete."""
    subprocess.run([sys.executable, data.CORPUS / "grammar.py", tmp_path], check=True)
    written = list(tmp_path.iterdir())
    assert len(written) == 8
    assert all(path.read_bytes() == (data.CORPUS / path.name).read_bytes() for path in written)
    splits = [built_in(10**6, split) for split in ("train", "valid", "test")]
    assert [len(split) for split in splits] == [25000, 500, 1000]
    for _, target, gold in splits[1] + splits[2]:
        assert {j for _, j in gold} == set(range(len(target)))
    simple = list(data.read_pairs(data.CORPUS / "simple.en", data.CORPUS / "simple.fr"))
    assert len(simple) == 150
    sources = [{tuple(source) for source, *_ in split} for split in (*splits, simple)]
    assert len(set.union(*sources)) == sum(map(len, sources))
    for side in (0, 1):  # every word of the simple sentences occurs in the training text
        words = set(chain(*(pair[side] for pair in simple)))
        assert words <= set(chain(*(pair[side] for pair in splits[0])))


def test_elision():
    """Before a vowel, French words have their other forms: l' homme, cet ami, un vieil arbre."""
    lines = (" ".join(target) for _, target in data.read_pairs(*data.built_in("train")))
    french = "\n".join(lines)
    nouns = "homme|enfant|ami|oiseau|animal|arbre|accord"  # masculine
    for form in ("l'", "d'", "cet", "bel", "nouvel", "vieil"):
        assert re.search(rf"\b{form} ({nouns})\b", french), form
    assert not re.search(rf"\b(le|ce|de|beau|nouveau|vieux) ({nouns})\b", french)
    assert not re.search(r"\b(la|ma|sa|de) (infirmière|école|union)\b", french)
    assert not re.search(r"\b(je|me|le|la|ne|que|de) (a|ai|est|aime|il|un)\b", french)


def test_vocabularies():
    """Words are sorted by frequency, then alphabetically; the example in the docstring works."""
    pairs = [(["b", "a", "a", "<pad>"], ["x"]), (["c", "a", "b"], ["x", "y", "<unk>"])]
    source, _ = data.build_vocabularies(pairs)
    assert source.encode(["a", "nowhere", "<pad>", "<unk>"]) == [4, UNK, UNK, UNK]
    assert source.decode([BOS, 4, UNK, EOS, 4, PAD]) == ["a", "<unk>"]
    assert data.build_vocabularies([("b a a <pad>", "x"), ("c a b", "x")])[0].words == source.words
    assert data.build_vocabularies(pairs, min_count=2)[0].words[4:] == ["a", "b"]
    assert data.build_vocabularies(pairs, sizes=(5, 5))[0].words[4:] == ["a"]
    for vocabulary in data.build_vocabularies(pairs, share=True):
        assert vocabulary.words[4:] == ["a", "b", "x", "c", "y"]
    large = data.Vocabulary(map(str, range(10**5)))
    assert data.Bitext([("99999", "")], [large, large]).tokens[0].tolist() == [99999, EOS]
    examples = doctest.testmod(data)
    assert (examples.failed, examples.attempted > 5) == (0, True)


def test_batches():
    """Batches stay within their limits and have little padding; every epoch is a new shuffle."""
    pairs = [*built_in(1500), ([], []), ([], ["x"]), (["a"], []), (["a"] * 900, ["x"] * 900)]
    bitext = data.Bitext(pairs, data.build_vocabularies(pairs))
    batches = list(islice(bitext.batches(600, 20, 1), 200))
    batches = [batch for batch in batches if batch[0].shape[1] < 900]  # the long pair is alone
    assert max(src.size + tgt[:, 1:].size for src, tgt in batches) <= 600
    assert max(len(src) for src, _ in batches) == 20
    assert max(src.size + tgt.size for src, tgt in batches) > 540
    assert len({(src.shape, tgt.shape) for src, tgt in batches}) < 40
    assert np.concatenate([x.flatten() == PAD for x in chain(*batches)]).mean() < 0.12
    assert sorted(chain(*bitext.rows_by_length(2000))) == list(range(len(pairs)))
    bitext.batch = lambda rows, multiple: sorted(rows.tolist())  # row numbers instead of token ids
    stream = list(islice(bitext.batches(600, 20, 1), 600))
    assert len({len(rows) for rows in stream[:9]}) > 1 and stream[:9] != stream[9:18]
    ends = np.cumsum([len(rows) for rows in stream]).tolist()
    n = ends.index(len(pairs)) + 1  # batches per epoch
    first, second = stream[:n], stream[n : 2 * n]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(len(pairs)))
    assert sum(rows in first for rows in second) < 0.3 * n
    for step in (1, n - 1, n, n + 5):  # seed and step alone determine a batch
        assert list(islice(bitext.batches(600, 20, 1, step), 5)) == stream[step : step + 5]
    assert list(islice(bitext.batches(600, 20, 2), n)) != stream[:n]


@pytest.mark.parametrize("seed", range(20))
def test_batch(seed):
    """A batch is what a loop over its sentences gives, and their words are those of the file."""
    r = random.Random(seed)
    pieces = [b"\xef\xbb\xbf", b"  ", b"\t\r", b"\x0b", b"a", "\xe9\xa0\u2028\x1c".encode()]
    lines = [b"".join(r.choices(pieces, k=r.randint(0, 9))) + b"\n" for _ in range(9)]
    texts = [line.decode("utf-8-sig").encode() for line in lines]
    sentences = [[word.decode() for word in text.split()] for text in texts]
    with mock.patch("builtins.open", lambda *_: io.BytesIO(b"".join(lines))):
        assert list(data.read("text")) == sentences
    pairs = list(zip(sentences, sentences[::-1]))
    vocabularies = data.build_vocabularies(pairs)
    bitext = data.Bitext(pairs, vocabularies)
    rows = r.choices(range(9), k=r.randint(1, 12))
    multiple = r.randint(1, 5)
    for side, begin in enumerate(([], [BOS])):
        ids = [vocabularies[side].encode(pairs[row][side]) for row in rows]
        length = 1 + max(map(len, ids))
        length += -length % multiple + len(begin)
        want = [[*begin, *x, EOS, *[PAD] * length][:length] for x in ids]
        assert bitext.batch(np.array(rows), multiple)[side].tolist() == want


def test_bleu():
    """BLEU equals sacreBLEU's, also on empty and short sentences."""
    sacrebleu = pytest.importorskip("sacrebleu")
    for seed in range(100):
        r = random.Random(seed)
        references = [r.choices("abcde", k=r.randint(seed % 2, 12)) for _ in range(r.randint(1, 6))]
        hypotheses = [r.choices("abcde", k=r.randint(0, 3 * (seed % 5))) for _ in references]
        for k in range(seed % 3, len(references)):
            hypotheses[k] = [w if r.random() < 0.8 else r.choice("abcfg") for w in references[k]]
        lines = [[" ".join(words) for words in side] for side in (hypotheses, references)]
        want = sacrebleu.corpus_bleu(lines[0], [lines[1]], tokenize="none").score
        assert data.bleu(hypotheses, references) == pytest.approx(want, abs=1e-6)
        assert data.bleu(*lines) == pytest.approx(want, abs=1e-6)  # strings
    assert data.bleu([], []) == 0


def test_scores():
    """BLEU by length is that of the sentences of each length; AER is that of the corpus."""
    hypotheses = ["a b c d", "a b x d", "", "a b c c", "a b", "a b c d"]
    pairs = [("x " * n, "a b c d") for n in (0, 1, 10, 11, 20, 41)]
    rows = {"1-10": hypotheses[:3], "11-20": hypotheses[3:5], "41-50": hypotheses[5:]}
    want = {key: data.bleu(row, ["a b c d"] * len(row)) for key, row in rows.items()}
    assert data.scores(pairs, hypotheses)["bleu_by_length"] == want
    gold = {(0, 0), (1, 2), (2, 1)}
    guess = {(0, 0), (1, 1)}
    assert data.aer([guess, gold], [gold, gold]) == pytest.approx(1 - 2 * 4 / (5 + 6))
    assert data.aer([set()], [set()]) == 0


def test_alignment_files(tmp_path):
    """.npz, .txt, .svg and the heatmap show the right weights at the right words."""
    alpha = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]])
    pair = ["red", "c<r"], ["voiture", "rouge", "."]
    data.write_alignments(tmp_path / "align", [pair, ("ab", "")], [alpha, np.ones((1, 2)) / 2])
    soft = np.load(tmp_path / "align.npz")
    assert [*soft["source"], *soft["target"]] == ["red c<r", "ab", "voiture rouge .", ""]
    assert np.array_equal(soft["alpha_0"], alpha)
    assert (tmp_path / "align.txt").read_text() == "0-1 1-0\n\n"
    picture = ElementTree.parse(tmp_path / "align.svg")
    cells = picture.iter("{http://www.w3.org/2000/svg}rect")
    assert [x.text for x in picture.iter() if x.tag.endswith("text")] == ["red", "c<r", *pair[1]]
    shades = sorted([float(cell.get(key)) for key in ("y", "x", "opacity")] for cell in cells)
    assert np.allclose([x[2] for x in shades], 0.07 + 0.93 * alpha[:3, :2].flatten(), atol=0.01)
    unknown = ["<unk>", "rouge", "<unk>", "<unk>"]  # the last two attend to EOS
    assert data.replace_unknown("red car", unknown, alpha) == ["car", "rouge", "red", "red"]
    rows = data.heatmap(*pair, alpha).split("\n")
    assert [row.split() for row in rows[:3]] == [["r", "c"], ["e", "<"], ["d", "r"]]
    assert rows[3:6] == ["voiture ··▓▓", "  rouge ▓▓░░", "      . ░░░░"]


# ---- the structure of the scripts, and the README -----------------------------------------------
@each_script
def test_structure(name):
    """The code below the marker is that of the other scripts; MODELS has all flags of the model."""
    marker = "# ---- the same in every script from here on ----\n"
    other = [*SCRIPTS][[*SCRIPTS].index(name) - 1]
    own, shared = (HERE / f"{name}.py").read_text().split(marker)
    same = shared == (HERE / f"{other}.py").read_text().split(marker)[1]
    assert same, f"{name}.py and {other}.py differ below the marker; change all scripts alike"
    assert not re.search(rf"^\s*(import|from) ({'|'.join(SCRIPTS)})\b", own + shared, re.M)
    assert not re.search("|".join([*SCRIPTS, script(name).Model.__name__]), shared)
    Config = script(name).Config
    assert Config.medium().fast and Config.paper().fast and Config.paper().compile
    fields = own.split("    # model\n")[1].split("    # training\n")[0]
    tested = " ".join(model for model in MODELS if model.startswith(name))
    for field in re.findall(r"^    (\w+): (?:bool|typing.Literal)", fields, re.M):
        flag = field.replace("_", "-")
        assert re.search(f"--(no-)?{flag}", tested), f"add {name} --{flag} to MODELS"


# The tests from here on run commands in a folder with text files and finished runs.
TEXT = ["--train", "train.en", "train.fr", "--valid", "valid.en.gz", "valid.fr.gz"]
PAIRS = built_in(60, "test", max_len=9)
AVERAGED = "bahdanau --average 2 --eval-every 2"  # its checkpoints hold several sets of weights


def small(name="bahdanau", text=TEXT):
    """Return a command that trains for eight steps and validates twice."""
    flags = "--lr 0.02 --warmup 1 --dropout 0.1 --batch-tokens 300 --eval-every 4 --steps 8"
    for field, size in SCRIPTS[name.split()[0]].items():
        flags += f" --{field.replace('_', '-')} {2 * size}"
    return [name, *text, *flags.split(), "--max-len", "20"]


def main(name, *args):
    script(name).main(["--device", "cpu", *map(str, args), *name.split()[1:]])


def run(*command, stdin=b"", status=0):
    """Run a command that exits with this status; return stdout and the lines on stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        found = 0
        try:
            main(*command)
        except SystemExit as stop:
            found = stop.code or 0
    assert found == status, stderr.getvalue()
    return stdout.getvalue(), stderr.getvalue().splitlines()


def write_text(name, pairs):
    for side, language in enumerate(("en", "fr")):
        lines = "".join(" ".join(pair[side]) + "\n" for pair in pairs)
        Path(f"{name}.{language}").write_text(lines, encoding="utf-8")


@pytest.fixture
def folder(tmp_path_factory, tmp_path, monkeypatch):
    """A working directory with finished runs and text files; three pairs are too long or empty."""
    template = tmp_path_factory.getbasetemp() / "template"
    if not template.exists():
        template.mkdir()
        monkeypatch.chdir(template)
        odd = [(["a"], ["a"] * 21), (["a"] * 21, ["a"]), ([], ["a"])]
        write_text("train", [*PAIRS[:19], odd[0], *PAIRS[19:], *odd[1:]])  # 20th: for test_held_out
        for language in ("en", "fr"):
            lines = Path(f"train.{language}").read_bytes()
            Path(f"train.{language}").write_bytes(b"\xef\xbb\xbf" + lines)  # a byte order mark
            valid = b"".join(lines.splitlines(keepends=True)[:3])
            Path(f"valid.{language}.gz").write_bytes(gzip.compress(valid))
        for name in (*SCRIPTS, AVERAGED):
            run(*small(name), "--out", f"runs/{name}")
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_readme(folder):
    """The README's first two Python blocks run, the second with the source of each class pasted
    into it; the classes reject unknown or unsuitable options."""
    text = (HERE / "README.md").read_text()
    first, second, _ = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {}
    exec(first, names)
    assert [alpha.shape[1] for alpha in names["alphas"]] == [7, 6]
    multi_head_attention = script("transformer").MultiHeadAttention
    classes = [bahdanau.AdditiveAttention, script("luong").LuongAttention, multi_head_attention]
    imports, after = re.split("from bahdanau .*\n", second)
    (example,) = re.findall(r"attention = (.+)", after)
    examples = [example, *re.findall(r"`(\w+Attention\(.+?\))`", text)]
    torch.manual_seed(1)
    names = {}
    for cls, call in zip(classes, examples, strict=True):
        if cls is multi_head_attention:
            after = after.replace("padding)", "padding, need_alpha=True)")
        exec(imports + inspect.getsource(cls) + after.replace(example, call), names)
        assert type(names["attention"]).__name__ == cls.__name__
        assert not names["alpha"][1, ..., 3:].any()
        assert names["alpha"].std(-1).all()  # not uniform
    for options in (("genral", "global"), ("dot", "local"), ("location", "local-m")):
        with pytest.raises(AssertionError, match="unknown|needs global"):
            names["LuongAttention"](64, *options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_decoding_another_model(device):
    """greedy and beam can be pasted alone, and need only the four calls in the README; they say so
    if a state is not a tuple."""
    pasted = dict(torch=torch, PAD=PAD, BOS=BOS, EOS=EOS)
    for function in (bahdanau.greedy, bahdanau.beam):
        exec(inspect.getsource(function), pasted)
    _, model = build("bahdanau", tgt_vocab=13)
    model = model.to(device)
    model.cfg = model.forward = None
    src = random_batch(0)[0].to(device)
    text = (HERE / "README.md").read_text()
    (calls,) = re.findall(r"```python\n(memory = .*?)```", text, re.S)
    names = dict(model=model, src=src, max_len=20, y=src[:, 0], rows=torch.tensor([2, 0]))
    exec(calls, names)
    assert names["logits"].shape == (4, 13)
    assert [len(x) for x in names["state"]] == [2, 2]
    searches = (["greedy"], ["beam", 5, 0.6])
    for function, *options in searches:
        found = pasted[function](model.train(), src, 20, *options)
        assert not model.training
        assert torch.equal(found, getattr(bahdanau, function)(model, src, 20, *options))
    first, later = model.init_state, model.step
    for function, *options in searches:
        model.init_state, model.step = (lambda *args: first(*args)[0]), later
        with pytest.raises(AssertionError, match="a tuple of tensors"):
            pasted[function](model, src, 20, *options)
        model.init_state, model.step = first, lambda *args: (later(*args)[0], later(*args)[1][0])
        model.reorder = None
        with pytest.raises(AssertionError, match="a tuple of tensors"):
            pasted[function](model, src, 20, *options)


# ---- own text, own code -------------------------------------------------------------------------
def contents():
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def read_log(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def contents_of_run(out):
    """Return weights, optimizer states, logs and links of a run, without times and file names."""
    saved = {file: torch.load(Path(out, file)) for file in ("last.pt", "model.pt")}
    saved |= dict(log=read_log(out), links=Path(out, "align.txt").read_text())
    for entry in saved["log"] + saved["last.pt"]["log"]:
        entry["seconds"] = entry["tokens_per_second"] = entry["gpu_memory_gib"] = None
    del saved["last.pt"]["files"], saved["model.pt"]["files"]
    return tree_map_only(torch.Tensor, lambda x: zlib.crc32(x.numpy().tobytes()), saved)


@each_script
def test_train_translate_align(name, folder):
    """A model trained on text files can translate, align and be tested, from its folder alone."""
    stdout, progress = run(*small(name), "--beam", 3, "--out", "new")
    scores = "loss {loss:.4f}, perplexity {ppl:.4g}, BLEU {bleu:.2f}\n".format(
        **read_log("new")[-1]
    )
    assert f"\nvalidation set: {scores}" in stdout
    soft = np.load("new/align.npz")
    example = str(soft["source"][0]), str(soft["target"][0])
    assert f"\n{data.heatmap(*example, soft['alpha_0'])}\n\n" in stdout
    before = contents()
    use = [name, "--out", "new"]
    text = "\n".join(["", *(" ".join(source) for source, _, _ in PAIRS[:30]), ""]).encode()
    translations, _ = run(*use, "--translate", stdin=text)
    assert translations.split("\n")[:4] == ["", *soft["target"]]
    stdout, _ = run(*use, "--align", *TEXT[1:3])
    model, vocabularies = script(name).load("new")
    assert "\ufeff" not in "".join(vocabularies[0].words)
    alphas = script(name).alignments(model, PAIRS, vocabularies)
    found = stdout.splitlines()
    assert found[:19] + found[20:-2] == [data.pharaoh(alpha) for alpha in alphas]
    assert run(*use, "--test", *TEXT[4:])[0].startswith(scores)
    assert contents() == before
    model.load_state_dict(torch.load("new/last.pt")["snapshots"][-1])
    (sample,) = script(name).translate(model, example[:1], vocabularies, beam_size=1)
    assert progress[-2:] == [f"    {example[0]} → {' '.join(sample)}", progress[-1]]


def test_built_in_corpus(folder, monkeypatch):
    """The default is the built-in corpus, whose test set has gold alignments."""
    for path in data.CORPUS.glob("*.*"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:80]
        Path(path.name).write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(data, "CORPUS", Path())
    stdout, progress = run(*small(text=[]), "--max-len", 30, "--out", "new")
    scores = "BLEU {bleu:.2f}, AER {aer:.3f}\n".format(**read_log("new")[-1])
    assert progress[-1] == "scoring the test set of 80 sentences"
    again, _ = run("bahdanau", "--out", "new", "--test", "test.en", "test.fr", "test.links")
    assert scores in stdout and scores in again
    example, reference = (Path(file).read_text().split("\n")[0] for file in ("test.en", "test.fr"))
    assert f"\nsource:    {example}\nmodel:     " in stdout
    assert f"\nreference: {reference}\n" in stdout


def test_held_out(folder, monkeypatch):
    """Without --valid, pairs 20, 40, ... validate, at most 1,000, also after --resume."""
    lines = list(data.read_pairs(*TEXT[1:3]))
    write_text("rest", [pair for n, pair in enumerate(lines, 1) if n % 20])
    write_text("every", lines[39::20])  # the 20th is too long
    text = ["--train", "rest.en", "rest.fr", "--valid", "every.en", "every.fr"]
    run(*small(text=text), "--out", "by_hand")
    fail_at(monkeypatch, bahdanau, "learning_rate", 6, Killed)
    with pytest.raises(Killed):
        run(*small(text=TEXT[:3]), "--out", "new")
    stdout, _ = run("bahdanau", "--resume", "--out", "new")
    assert "58 pairs (3 skipped), 2 held out for validation, vocab" in stdout
    assert contents_of_run("new") == contents_of_run("by_hand")
    write_text("long", [(["a"], ["b"])] * 20050)
    corpus = data.Corpus(bahdanau.Config(), ["long.en", "long.fr"], None, {})
    assert (len(corpus.train), len(corpus.valid)) == (19050, 1000)


def test_saved_weights(folder, monkeypatch):
    """model.pt is the best model on the validation set or, with --average, a mean."""
    for average in (1, 3, 9):
        losses = iter([2.0, 1.0, 3.0, 1.0, 1.0])  # of four validations and of the result
        monkeypatch.setattr(bahdanau, "mean_loss", lambda *_, losses=losses: next(losses))
        run(*small(), "--eval-every", 2, "--average", average, "--out", average)
    snapshots = torch.load("9/last.pt")["snapshots"]
    wants = {"1": snapshots[3]}
    for path, last in {"3": snapshots[1:], "9": snapshots}.items():
        wants[path] = {key: sum(weights[key] for weights in last) / len(last) for key in last[0]}
    for path, want in wants.items():
        model, _ = bahdanau.load(path, beam=3)
        assert not model.training
        assert model.cfg.beam == 3
        assert_close(model.state_dict(), want, 1e-6)


@each_script
def test_changed_scripts(name, folder, monkeypatch):
    """A renamed script with a new field loads runs of before; so does one pasted into a notebook; a
    script of another model says what is missing."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    new = "    new: float = -1.0  # new, 100%\n    # training\n"
    Path("renamed.py").write_text(source.replace("    # training\n", new), encoding="utf-8")
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "renamed", raising=False)
    text = " ".join(run("renamed", "--help")[0].split())
    assert "--new X new, 100% [-1.0] training:" in text
    assert re.search(r", paper: (0\.0|False)\]", text)  # presets are shown, also zeros
    saved = torch.load(f"runs/{name}/model.pt")
    del saved["config"]["fast"]  # as in a run of an earlier version
    torch.save(saved | dict(script=name, checksum=1), f"runs/{name}/model.pt")
    notebook = dict(__name__="notebook")
    exec(source, notebook)
    found = []
    for load, translate in (
        (x["load"], x["translate"]) for x in (notebook, vars(script("renamed")))
    ):
        model, vocabularies = load(f"runs/{name}")
        found.append(translate(model, [pair[0] for pair in PAIRS], vocabularies))
    assert found[0] == found[1]
    assert (model.cfg.new, model.cfg.fast) == (-1, False)
    assert script("renamed").load(f"runs/{name}", new=3)[0].cfg.new == 3
    with pytest.raises(data.InputError, match="trained with another script: here is no "):
        script("luong" if name == "bahdanau" else "bahdanau").load(f"runs/{name}")


def test_changed_model(folder, monkeypatch):
    """A model with another layer cannot resume a run, and does not damage it."""
    before = contents()
    layer = dict(new=nn.Linear(1, 1))
    monkeypatch.setattr(bahdanau.Model, "init_weights", lambda x: x._modules.update(layer))
    with pytest.raises(RuntimeError, match="new.weight"):
        run("bahdanau", "--resume", "--steps", 9)
    assert contents() == before


def test_translate_command(folder, monkeypatch):
    """Every line is translated, in order, whatever its bytes; a terminal also shows alignments, and
    splits and lower-cases words."""
    lines = [" ".join(PAIRS[k % 60][0]) if k % 7 else "" for k in range(4100)]  # in two chunks
    model, vocabularies = bahdanau.load("runs/bahdanau")
    want = [" ".join(x) for x in bahdanau.translate(model, lines, vocabularies)]
    stdout, _ = run("bahdanau", "--translate", stdin="\n".join(lines).encode())
    assert stdout.split("\n") == [*want, ""]
    odd = b"\n".join([b"\xef\xbb\xbf" + lines[1].encode() + b" \r", b"\xff\xfe\0", b"", b"he x y"])
    stdout, _ = run("bahdanau", "--translate", stdin=odd)
    first, _, empty, *rest = stdout.split("\n")
    assert (first, empty, len(rest)) == (want[1], "", 2)
    _, (warning,) = run("bahdanau", "--translate", stdin=b"x he b1\nx The.")
    assert warning.startswith("unknown words (3): x, b1, The. (")
    monkeypatch.setattr(os, "isatty", lambda _: True)
    stdout, (prompt, *_) = run("bahdanau", "--translate", stdin=b"He x\n\nhe")
    assert stdout.count("from 0.05 ·") == 2 and "Ctrl-D" in prompt  # none for the empty line
    vocabulary = data.Vocabulary(["the", "king", "mary", "'s", ",", "."])
    typed = {"The King, Mary's.": "the king , mary 's .", "X7 mary!": "X7 mary !"}
    for words, want in typed.items():
        assert " ".join(data.to_known(words.split(), vocabulary)) == want


def test_threads(monkeypatch):
    """Half of torch's threads, one to four, unless OMP_NUM_THREADS is set; no variable is set."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    for default in (1, 2, 6, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda default=default: default)
        run("bahdanau", "--help")
    assert os.environ == before
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run("bahdanau", "--help")
    assert chosen == [1, 1, 3, 4]


# ---- faults and --resume ------------------------------------------------------------------------
class Killed(BaseException):
    """Stands for SIGKILL: no handler of the scripts catches it."""


def fail_at(monkeypatch, owner, function, number, error):
    """Raise an error in the number-th call of owner.function."""
    calls = count(1)
    real = getattr(owner, function)

    def faulty(*args):
        if next(calls) == number:
            raise error
        return real(*args)

    monkeypatch.setattr(owner, function, faulty)


FAULTY_RUNS = [  # name, owner and function, number of the call that fails, error, message
    (AVERAGED, "bahdanau.learning_rate", 2, KeyboardInterrupt(), "interrupted"),
    (AVERAGED, "os.fsync", 3, OSError("No space left on device"), "No space left on device"),
]
# The first files that are renamed: last.pt; model.pt, last.pt and log.jsonl of two validations.
FAULTY_RUNS += [(AVERAGED, "os.replace", n, Killed(), None) for n in range(1, 8)]
FAULTY_RUNS += [(name, f"{name}.learning_rate", 6, Killed(), None) for name in SCRIPTS]


@pytest.mark.parametrize("name, place, number, error, message", FAULTY_RUNS)
def test_faults(name, place, number, error, message, folder, monkeypatch):
    """After a fault all files are intact, and the run can end bit for bit like an unbroken one. A
    run without a validation can also be started again, and no other one."""
    owner, function = place.split(".")
    with monkeypatch.context() as patch:
        fail_at(patch, importlib.import_module(owner), function, number, error)
        if message:
            status = 130 if message == "interrupted" else 2
            assert message in run(*small(name), "--out", "new", status=status)[1][-1]
        else:
            with pytest.raises(Killed):
                run(*small(name), "--out", "new")
    for path in Path("new").glob("*.pt"):
        torch.load(path)
    shutil.copytree("new", "again")
    if Path("new/last.pt").exists():
        run(name, "--resume", "--out", "new")
        assert contents_of_run("new") == contents_of_run(f"runs/{name}")
    if Path("again/model.pt").exists():
        assert "again: holds a run" in run(*small(name), "--out", "again", status=2)[1][-1]
    else:
        run(*small(name), "--out", "again")
        assert contents_of_run("again") == contents_of_run(f"runs/{name}")


def test_loss_is_not_finite(folder, monkeypatch):
    """Training stops before it saves weights that are not finite."""
    losses = iter([1.0, math.nan])
    monkeypatch.setattr(bahdanau, "mean_loss", lambda *_: next(losses))
    _, progress = run(*small(), "--out", "new", status=2)
    assert "step 8: loss not finite; --resume with a lower --lr" in progress[-1]
    assert len(torch.load("new/last.pt")["log"]) == 1


def test_resume(folder):
    """--resume continues a run with changed flags, and says what becomes of the learning rate."""
    _, progress = run("bahdanau", "--resume", "--steps", 12, "--eval-every", 1, "--lr", 0.001)
    assert [x.get("step") for x in read_log("runs/bahdanau")] == [4, 8, 9, 10, 11, 12, None]
    rates = 0.02 / 8, 0.001 * 4 / 12
    message = "learning rate: was {:.2g}, is now {:.2g} (see --steps and --lr)".format(*rates)
    assert message in progress
    seconds = [x["seconds"] for x in read_log("runs/bahdanau")[:-1]]
    assert seconds == sorted(seconds)  # the clock continues
    weights = bahdanau.load("runs/bahdanau")[0].state_dict()
    for flags in ("--beam 4 --length-penalty 2", ""):  # hold from now on, also without training
        stdout, _ = run("bahdanau", "--resume", *flags.split())
        model, _ = bahdanau.load("runs/bahdanau")
        assert (model.cfg.beam, model.cfg.length_penalty) == (4, 2)
        assert_close(model.state_dict(), weights)
        assert run("bahdanau", "--test", *TEXT[4:])[0] in stdout


def test_two_runs_at_once(folder, monkeypatch):
    """Of two runs that start in one folder, the second to validate stops, and destroys nothing."""
    real = data.log_validation

    def overtake(*args):  # called after the first validation of the inner run
        real(*args)
        raise KeyboardInterrupt

    def start_another(*args):
        monkeypatch.setattr(bahdanau, "mean_loss", mean_loss)
        monkeypatch.setattr(data, "log_validation", overtake)
        run(*small(), "--out", "new", status=130)
        monkeypatch.setattr(data, "log_validation", real)
        return mean_loss(*args)

    mean_loss = bahdanau.mean_loss
    monkeypatch.setattr(bahdanau, "mean_loss", start_another)
    _, lines = run(*small(), "--seed", 2, "--out", "new", status=2)
    assert "new: holds a run; add --resume" in lines[-1]
    run("bahdanau", "--resume", "--out", "new")
    assert contents_of_run("new") == contents_of_run("runs/bahdanau")


def test_torchrun_matches_one_process(folder, monkeypatch):
    """A run resumed with two processes ends like a run with one process, up to rounding."""
    command = [*small(), "--dropout", 0, "--batch-tokens", 36, "--out"]  # step 5 is one pair
    run(*command, "one")
    fail_at(monkeypatch, bahdanau, "learning_rate", 6, Killed)
    with pytest.raises(Killed):
        run(*command, "two")
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", HERE / "bahdanau.py"]
    torchrun += ["--out", "two", "--accumulate", "2", "--resume", "--device", "cpu"]
    done = subprocess.run([sys.executable, *torchrun], capture_output=True, text=True, timeout=300)
    assert done.stdout.count("60 pairs") == done.stderr.count("step 8") == 1, done.stderr
    for x, y in zip(read_log("one"), read_log("two"), strict=True):
        assert (x.get("step"), x["loss"]) == (y.get("step"), pytest.approx(y["loss"], abs=1e-4))


# ---- user errors --------------------------------------------------------------------------------
USER_ERRORS = [  # flags of bahdanau.py, or a script and its flags; a part of the error message
    ("--out new --train train.en nowhere", "No such file or directory: 'nowhere'"),
    ("--out new --train empty empty", "empty: the file is empty"),
    ("--out new --train train.en latin1", "latin1, line 2: not UTF-8"),
    ("--out new --train train.en short", "short: ends before line 2"),
    ("--out new --train short short", "short: too short to hold out every 20th pair; add --valid"),
    ("--valid train.en train.fr", "--valid SRC TGT needs --train SRC TGT"),
    ("--out new --train train.en train.fr --src-vocab 4", "no words left; see --min-count"),
    ("--test cut.gz train.fr", "cut.gz: not a .gz file, or damaged"),
    ("", "runs/bahdanau: holds a run; add --resume"),
    ("--out runs", "runs: not empty; choose another --out"),
    ("--translate --out nowhere", "no model.pt in nowhere; train first, or check --out"),
    ("--resume --out half", "half/last.pt: unreadable or damaged"),
    ("--translate --out code", "code/model.pt: unreadable or damaged"),  # and not executed
    ("--translate train.en", "unrecognized arguments: train.en"),
    ("--translate --hidden 12", "this run has hidden = 10, not 12"),
    ("--resume --average 3", "this run has average = 1, not 3"),
    ("--resume --train train.en train.fr", "--resume reads the text of the run"),
    ("--test train.en train.fr train.en", "train.en, line 1: expected links such as 0-0 1-2"),
    ("--test train.en train.fr links", "links, line 1: a link points past the sentence"),
    ("--dropout 1", "--dropout 1.0: must be in [0, 1)"),
    ("--optimizer x", "--optimizer: invalid choice"),
    ("--compile", "--compile needs --fast; add --fast or --no-compile"),
    ("luong --score location --attention local-p", "works only with --attention global"),
    ("transformer --heads 5", "a multiple of --heads 5"),
    ("--device mps", "--device mps: not available on this machine"),
    ("--out new", "out of GPU memory; try --accumulate"),
]


@pytest.mark.parametrize("flags, message", USER_ERRORS)
def test_user_errors(flags, message, folder, monkeypatch):
    """A user error is reported in one line, and nothing is written."""
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    if "memory" in message:
        monkeypatch.setattr(bahdanau, "Model", mock.Mock(side_effect=torch.OutOfMemoryError))
    files = dict(empty=b"", short=b"un\n", latin1=b"un\n\xe9\n", links=b"1-99")
    files |= {"cut.gz": gzip.compress(b"un")[:-1], "half/last.pt": b""}
    files["code/model.pt"] = b"cos\nmkdir\n(S'owned'\ntR."  # a pickle that calls os.mkdir("owned")
    for file, content in files.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(content)
    before = contents()
    command = flags if flags.startswith(tuple(SCRIPTS)) else f"bahdanau {flags}"
    _, (error,) = run(command, status=2)
    assert message in error
    assert contents() == before


# ---- what one reads is what runs, also on a GPU --------------------------------------------------
class Touched(bahdanau.RNNsearch):
    """A user's model: scheduled sampling with a coin in Python, and everything that can be seen."""

    coin, calls, seen = random.Random(0), 0, []

    def forward(self, src, tgt_in, need_alpha=False):
        if need_alpha:
            return super().forward(src, tgt_in, need_alpha)
        self.calls += 1
        memory = self.encode(src)
        state = self.init_state(memory)
        y, steps = tgt_in[:, 0], []
        for t in range(tgt_in.size(1)):
            logits, state = self.step(y, state, memory)
            steps.append(logits)
            if t + 1 < tgt_in.size(1):
                own = self.training and self.coin.random() < self.cfg.own_words
                y = logits.argmax(-1) if own else tgt_in[:, t + 1]
        print("largest logit:", logits.max().item())
        self.seen.append(logits.argmax(-1).tolist())
        return torch.stack(steps, 1)


def sampled(p, model, src, tgt, coin):
    """Return the loss of a batch for scheduled sampling: each sentence by the loop of its paper."""
    tosses = [coin.random() < model.cfg.own_words for _ in range(tgt.size(1) - 2)]
    total = 0
    for source, target in zip(src, tgt):
        source, target = source[source != PAD].tolist(), target[target != PAD].tolist()
        read = target[:1]
        for t in range(len(target) - 1):
            *_, (p_y, _) = naive_rnnsearch(p, source, [*read, EOS], model.cfg)
            total -= p_y[target[t + 1]].log()
            read.append(int(p_y.argmax()) if t < len(tosses) and tosses[t] else target[t + 1])
    return total / (tgt[:, 1:] != PAD).sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_changes_have_an_effect(device, capsys):
    """Scheduled sampling whose probability decays matches the naive loop; a counter, print and
    .item() in forward do what they say."""
    _, start = build("bahdanau", smoothing=0.0, clip=0.0)
    model = Touched(start.cfg)
    model.load_state_dict(start.state_dict())
    model = model.double().to(device)
    model.cfg.own_words = 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bahdanau.make_train_step(model, model.cfg, optimizer)
    Touched.coin, Touched.seen, coin = random.Random(5), [], random.Random(5)
    for n in range(1, 5):
        p = {key.removesuffix(".weight"): x.detach().cpu() for key, x in model.named_parameters()}
        src, tgt = random_batch(1)
        want = sampled(p, model, src, tgt, coin).item()
        assert step(src, tgt).item() == pytest.approx(want, abs=1e-9)
        assert (model.calls, len(model.seen)) == (n, n)
        model.cfg.own_words /= 2
    assert capsys.readouterr().out.count("largest logit: ") == 4
    assert model.seen[0] != model.seen[3]


# ---- on a GPU -----------------------------------------------------------------------------------
def train_on(device, name, seed=0, **changes):
    """Train for 50 steps on batches whose shapes recur; return the model and the losses."""
    recipe = dict(dropout=0.3, steps=60, warmup=10)
    module, model = build(name, 0, 0, **larger(name) | recipe | changes)
    optimizer = module.make_optimizer(model.float().to(device), model.cfg)
    step = module.make_train_step(model, model.cfg, optimizer)
    losses = []
    for n in range(50):
        torch.manual_seed(seed + n)
        optimizer.param_groups[0]["lr"] = module.learning_rate(model.cfg, n + 1)
        place = device if n % 2 else "cpu"  # a training step takes both
        src, tgt = (x.to(place) for x in random_batch(n * n % 7))
        losses.append(step(src, tgt).item())
    return model, torch.tensor(losses)


def decode_on_gpu(module, model):
    model = module.bf16_copy(model)
    sources = [random_batch(n)[0].cuda() for n in range(8)]
    found = [module.greedy(model, src, 20, fast=True).tolist() for src in sources]
    return found + [module.beam(model, src, 20, 3, 0.6, fast=True).tolist() for src in sources]


OPTIMIZERS = ["bahdanau --optimizer adadelta --lr 1", f"{LOCAL} --optimizer sgd --lr 0.5"]


@cuda
@pytest.mark.parametrize("name", [*SCRIPTS, *OPTIMIZERS])
def test_fast(name, monkeypatch):
    """With fast, CUDA graphs are used, match eager execution, and draw dropout masks from the seed;
    recorded and plain training agree."""
    model, losses = train_on("cuda", name, fast=True)
    assert losses[-10:].sum() < losses[:10].sum()
    assert torch.equal(losses, train_on("cuda", name, fast=True)[1])
    assert not torch.equal(losses, train_on("cuda", name, fast=True, seed=1)[1])
    assert next(script(name).bf16_copy(model).parameters()).dtype == torch.bfloat16
    _, cpu = train_on("cpu", name, dropout=0.0)
    _, plain = train_on("cuda", name, dropout=0.0)
    _, fast = train_on("cuda", name, dropout=0.0, fast=True)
    assert_close(plain[:10], cpu[:10], 1e-3)
    assert_close(fast[:10], plain[:10], 0.1)  # bf16
    found = decode_on_gpu(script(name), model)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    with pytest.raises(TypeError):
        train_on("cuda", name, fast=True)
    monkeypatch.setattr(script(name), "graphed", lambda function, _: function)
    assert decode_on_gpu(script(name), model) == found
    eager_model, eager_losses = train_on("cuda", name, fast=True)
    assert_close(losses, eager_losses, 1e-2)
    assert_close(model.state_dict(), eager_model.state_dict(), 1e-2)


@cuda
@each_script
def test_plain_by_default(name, folder, monkeypatch):
    """Without --fast, nothing in the section speed runs; with it, commands work, also on a CPU."""
    code = (HERE / f"{name}.py").read_text().split("# ---- speed")[1]
    command = [*small(name), "--device", "cuda"]
    sentences = [pair[0] for pair in PAIRS]
    with monkeypatch.context() as patch:
        for function in re.findall(r"^def (\w+)", code, re.M):
            patch.setattr(script(name), function, None)
        run(*command, "--beam", 2, "--out", "new")
        plain = read_log("new")
        model, vocabularies = script(name).load("new", "cuda")
        translations = script(name).translate(model, sentences, vocabularies)
    run(*command, "--fast", "--beam", 2, "--out", "fast")
    run(name, "--device", "cuda", "--resume", "--steps", 12, "--out", "fast")
    fast = read_log("fast")
    assert [line.get("step") for line in fast] == [4, 8, 12, None]
    assert fast[0]["loss"] == pytest.approx(plain[0]["loss"], abs=0.1)
    model, _ = script(name).load("new", "cuda", fast=True)
    found = script(name).translate(model, sentences, vocabularies)
    assert sum(x == y for x, y in zip(found, translations)) > 20  # of 60; the rest is bf16
    assert run(name, "--translate", "--out", "fast", stdin=b"the cat\nhe")[0].count("\n") == 2


@cuda
@pytest.mark.parametrize("mistake", ["raise", "item", "print", "memory"])
def test_after_a_failed_recording(mistake, monkeypatch):
    """An error in a user's model while it is recorded is shown as it is, and training goes on."""
    mistakes = {
        "raise": (IndexError, lambda: [][0]),
        "item": (RuntimeError, lambda: torch.rand(2, device="cuda").sum().item()),
        "print": (RuntimeError, lambda: print(torch.rand(2, device="cuda"))),
        "memory": (torch.OutOfMemoryError, lambda: torch.empty(2**45, device="cuda")),
    }
    wanted, error = train_on("cuda", "bahdanau", fast=True)[1], mistakes[mistake]
    _, model = build("bahdanau", fast=True)
    step = bahdanau.make_train_step(model.float().cuda(), model.cfg)
    step(*random_batch(1))
    with monkeypatch.context() as patch, pytest.raises(error[0]) as raised:
        patch.setattr(F, "dropout", lambda x, *_: F.relu(x) + (error[1]() or 0))
        step(*random_batch(2))
    assert raised.value.__context__ is None
    assert all(step(*random_batch(n)).isfinite() for n in (1, 2))
    assert torch.equal(train_on("cuda", "bahdanau", fast=True)[1], wanted)


@cuda
@each_script
def test_compile(name, folder, monkeypatch):
    """Compiled training matches the rest, also in two parts."""
    # A cache of its own, so that later training does not reuse kernels for these small shapes.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path("compiled").resolve()))
    _, fast = train_on("cuda", name, dropout=0.0, fast=True)
    _, split = train_on("cuda", name, dropout=0.0, fast=True, accumulate=2)
    model, compiled = train_on("cuda", name, dropout=0.0, fast=True, compile=True)
    assert_close(fast[:10], split[:10], 0.05)
    assert_close(fast, compiled, 0.05)
    decode_on_gpu(script(name), model)


if __name__ == "__main__":  # uv run test_all.py; options are pytest's
    sys.exit(pytest.main([__file__, "-q", "-rs", *sys.argv[1:]]))
