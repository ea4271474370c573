"""Everything is held against something independent: equations as naive loops, finite differences, sacreBLEU, counting.

python -m pytest -q test_all.py                  all that is fast
python -m pytest -q -m slow test_all.py          random kills, random input, 100,000 lines: about ten minutes
"""

import ast, collections, contextlib, functools, gzip, importlib, io, itertools, json, math, os, pickle, random, re, signal, struct, subprocess, sys, time, warnings, zipfile
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

import data
from data import BOS, EOS, PAD, UNK

warnings.filterwarnings(
    "ignore", category=pytest.PytestUnknownMarkWarning
)  # there is one mark, "slow"
torch.set_num_threads(1)  # the models here are tiny
torch.backends.mkldnn.enabled = False  # as the scripts do
HERE = Path(__file__).parent
MARKER = "# ---- the same in every script from here on ----\n"

# one entry a script: its model, small sizes to test it with, and a call for each attention class that a reader may lift
SCRIPTS = {
    "seq2seq_lstm": ("Seq2Seq", dict(emb=6, hidden=5, layers=2), {}),
    "bahdanau": (
        "RNNsearch",
        dict(emb=6, hidden=5, attn=7, maxout=4),
        {
            "AdditiveAttention": lambda C: C(4, 6, 5)(
                rand(2, 4), rand(2, 3, 5), rand(2, 3, 6), torch.tensor([[False, False, True]] * 2)
            )
        },
    ),
    "luong": (
        "LuongNMT",
        dict(emb=6, hidden=5, layers=2, D=2),
        {
            "LuongAttention": lambda C: [
                x
                for score, attention in (("general", "global"), ("concat", "local-p"))
                for x in (
                    lambda m: m(
                        rand(2, 5, 4),
                        m.keys(rand(2, 3, 4)),
                        rand(2, 3, 4),
                        torch.tensor([2, 1]),
                        torch.arange(1, 6),
                    )
                )(C(4, score, attention))
            ]
        },
    ),
    "transformer": (
        "Transformer",
        dict(d_model=8, d_ff=10, heads=2, layers=2),
        {
            "MultiHeadAttention": lambda C: (
                lambda m: m(
                    *m.project(rand(2, 5, 8), 0, 1).unbind(2),
                    *m.project(rand(2, 3, 8), 1).unbind(2),
                    torch.tensor([[[[0, 0, -math.inf]]]]),
                    need_alpha=True,
                )
            )(C(8, 2))
        },
    ),
}
# the models: each script's, and all that luong.py's flags can make of it
LUONG = [
    dict(score=score, attention=attention, input_feeding=feeding)
    for attention in ("global", "local-m", "local-p")
    for score in ("dot", "general", "concat", "location")
    for feeding in (False, True)
    if (score, attention) not in (("location", "local-m"), ("location", "local-p"))
]
MODELS = {
    "seq2seq_lstm": {},
    "seq2seq_lstm --no-reverse": dict(reverse=False),
    "bahdanau": {},
    "transformer": {},
    "transformer --joint": dict(joint=True, src_vocab=13, tgt_vocab=13, align_layer=1),
    "luong --no-reverse": dict(reverse=False),
    "luong, more words than positions": dict(score="location", max_len=4),
}
MODELS |= {
    f"luong --score {v['score']} --attention {v['attention']}{' --input-feeding' * v['input_feeding']}": v
    for v in LUONG
}
scripts, models = pytest.mark.parametrize("name", SCRIPTS), pytest.mark.parametrize("name", MODELS)


def rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def script(name):
    return re.match(r"\w+", name).group()


def build(name, seed=0, **changes):
    """A random model in float64, its module and its config."""
    module, (cls, sizes, _) = importlib.import_module(script(name)), SCRIPTS[script(name)]
    torch.manual_seed(seed)
    cfg = module.Config(
        **dict(src_vocab=13, tgt_vocab=11, dropout=0.0) | sizes | MODELS.get(name, {}) | changes
    )
    model = getattr(module, cls)(cfg).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.5)  # so that no zero of the initialisation hides a fault
    return module, cfg, model


def sentences(seed, B=None, S=None, T=None, V=(13, 11)):
    """A random batch with sentences of different lengths, as the contract has it."""
    r = random.Random(seed)
    B, S, T = B or r.randint(2, 5), S or r.randint(3, 9), T or r.randint(3, 9)
    pairs = [
        (
            [r.randrange(4, V[0]) for _ in range(r.randint(1, S - 1))],
            [r.randrange(4, V[1]) for _ in range(r.randint(1, T - 1))],
        )
        for _ in range(B)
    ]
    src, tgt = torch.full((B, S), PAD), torch.full((B, T + 1), PAD)
    for row, (s, t) in enumerate(pairs):
        src[row, : len(s) + 1] = torch.tensor(s + [EOS])
        tgt[row, : len(t) + 2] = torch.tensor([BOS] + t + [EOS])
    return src[:, : max(len(s) + 1 for s, _ in pairs)], tgt[:, : max(len(t) + 2 for _, t in pairs)]


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape and (a - b).abs().max() < tolerance, (
        a.shape,
        b.shape,
        (a - b).abs().max(),
    )


# ---- the papers, equation by equation ----------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def torch_gru(x, W, U, b, c):
    """torch's GRU, the encoder's deviation from the paper: r o (U h + c), and z weighs the old state."""
    h, out, n = np.zeros(U.shape[1]), [], U.shape[1]
    for x_t in x:
        a, u = W @ x_t + b, U @ h + c
        r, z = sigmoid(a[:n] + u[:n]), sigmoid(a[n : 2 * n] + u[n : 2 * n])
        h = (1 - z) * np.tanh(a[2 * n :] + r * u[2 * n :]) + z * h
        out.append(h)
    return out


def torch_lstm(p, name, x, state):
    """One step of a deep LSTM: the top layer's h, and (h, c) of every layer."""
    new = []
    for layer, (h, c) in enumerate(state):
        W, U, b, d = (
            p[f"{name}.layers.{layer}.{k}_l0"]
            for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        i, f, g, o = np.split(W @ x + U @ h + b + d, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        x = sigmoid(o) * np.tanh(c)
        new.append((x, c))
    return x, new


def softmax(x):
    x = np.exp(np.array(x) - np.max(x))
    return x / x.sum()


def seq2seq(p, source, target, cfg):
    """Sutskever et al. Saliency by finite differences: how log p(y_i) moves when x_j grows by a factor."""

    def log_p(factor):
        state = [(np.zeros(cfg.hidden), np.zeros(cfg.hidden))] * cfg.layers
        x = [f * p["E_x.weight"][w] for f, w in zip(factor, source)]
        for x_j in x[::-1] if cfg.reverse else x:
            _, state = torch_lstm(p, "encoder", x_j, state)
        out = []
        for y_before, y in zip(target, target[1:]):
            h, state = torch_lstm(p, "decoder", p["E_y.weight"][y_before], state)
            out.append(np.log(softmax(p["W.weight"] @ h + p["W.bias"]))[y])
        return np.array(out)

    n, eps = len(source), 1e-5
    slope = np.array(
        [
            np.abs(log_p(np.ones(n) + eps * np.eye(n)[j]) - log_p(np.ones(n) - eps * np.eye(n)[j]))
            / (2 * eps)
            for j in range(n)
        ]
    ).T
    return log_p(np.ones(n)), slope / slope.sum(1, keepdims=True)


def luong(p, source, target, cfg):
    """Luong et al., one sentence, one word, one source position at a time; s and t count from 1."""
    state, h_bar, S = [(np.zeros(cfg.hidden), np.zeros(cfg.hidden))] * cfg.layers, {}, len(source)
    for s in range(S, 0, -1) if cfg.reverse else range(1, S + 1):
        h_bar[s], state = torch_lstm(p, "encoder", p["E_x.weight"][source[s - 1]], state)
    W_a, v_a = p.get("attention.W_a"), p.get("attention.v_a")
    score = {
        "dot": lambda h_t, s: h_t @ h_bar[s],
        "general": lambda h_t, s: h_t @ W_a @ h_bar[s],
        "concat": lambda h_t, s: v_a @ np.tanh(W_a @ np.concatenate([h_t, h_bar[s]])),
        "location": lambda h_t, s: W_a[s - 1] @ h_t if s <= len(W_a) else -np.inf,
    }[cfg.score]  # (8)
    h_tilde, log_p, alphas = np.zeros(cfg.hidden), [], []
    for t, (y_before, y) in enumerate(zip(target, target[1:]), 1):
        E_y = p["E_y.weight"][y_before]
        h_t, state = torch_lstm(
            p, "decoder", np.concatenate([E_y, h_tilde]) if cfg.input_feeding else E_y, state
        )
        window, weight = range(1, S + 1), lambda s: 1.0
        if cfg.attention != "global":
            p_t = (
                min(t, S)
                if cfg.attention == "local-m"
                else S * sigmoid(p["attention.v_p"] @ np.tanh(p["attention.W_p"] @ h_t))
            )  # (9)
            window = [s for s in window if p_t - cfg.D <= s <= p_t + cfg.D]
            if cfg.attention == "local-p":
                weight = lambda s: math.exp(-((s - p_t) ** 2) / (2 * (cfg.D / 2) ** 2))
        a_t = dict(zip(window, softmax([score(h_t, s) for s in window])))  # (7)
        a_t = {s: a * weight(s) for s, a in a_t.items()}  # (10)
        c_t = sum(a * h_bar[s] for s, a in a_t.items())
        h_tilde = np.tanh(p["W_c.weight"] @ np.concatenate([c_t, h_t]))  # (5)
        log_p.append(np.log(softmax(p["W_s.weight"] @ h_tilde))[y])  # (6)
        alphas.append([a_t.get(s, 0.0) / sum(a_t.values()) for s in range(1, S + 1)])
    return log_p, alphas


def transformer(p, source, target, cfg):
    """Vaswani et al., one position and one head at a time, the decoder seeing exactly the words before."""
    d, d_k = cfg.d_model, cfg.d_model // cfg.heads

    def embed(E, words):
        PE = [
            [
                math.sin(pos / 10000 ** (i / d))
                if i % 2 == 0
                else math.cos(pos / 10000 ** ((i - 1) / d))
                for i in range(d)
            ]
            for pos in range(len(words))
        ]
        return [E[w] * math.sqrt(d) + pe for w, pe in zip(words, np.array(PE))]  # 3.4, 3.5

    def attention(name, x, others):
        """(MultiHead of one query over others, the heads' mean weights)"""
        W_Q, W_K, W_V = np.split(p[f"{name}.W_QKV.weight"], 3)
        K, V = np.array(others) @ W_K.T, np.array(others) @ W_V.T
        q, heads, weights = W_Q @ x, [], []
        for head in range(cfg.heads):
            part = slice(head * d_k, (head + 1) * d_k)
            weights.append(softmax([q[part] @ k[part] / math.sqrt(d_k) for k in K]))  # (1)
            heads.append(sum(a * v[part] for a, v in zip(weights[-1], V)))
        return p[f"{name}.W_O.weight"] @ np.concatenate(heads), np.mean(weights, 0)

    def norm(name, x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def ffn(name, x):
        return (
            p[f"{name}.ffn.2.weight"]
            @ np.maximum(0, p[f"{name}.ffn.0.weight"] @ x + p[f"{name}.ffn.0.bias"])
            + p[f"{name}.ffn.2.bias"]
        )  # (2)

    x = embed(p.get("E_x.weight", p["E_y.weight"]), source)
    for n in (f"encoder.{k}" for k in range(cfg.layers)):
        x = [norm(f"{n}.norm_1", x_j + attention(f"{n}.self_attention", x_j, x)[0]) for x_j in x]
        x = [norm(f"{n}.norm_2", x_j + ffn(n, x_j)) for x_j in x]
    y, alphas = embed(p["E_y.weight"], target[:-1]), []
    for k, n in enumerate(f"decoder.{k}" for k in range(cfg.layers)):
        y = [
            norm(f"{n}.norm_1", y_i + attention(f"{n}.self_attention", y_i, y[: i + 1])[0])
            for i, y_i in enumerate(y)
        ]
        seen = [attention(f"{n}.attention", y_i, x) for y_i in y]
        y = [norm(f"{n}.norm_2", y_i + c) for y_i, (c, _) in zip(y, seen)]
        y = [norm(f"{n}.norm_3", y_i + ffn(n, y_i)) for y_i in y]
        if k + 1 == (cfg.align_layer or cfg.layers):
            alphas = [alpha for _, alpha in seen]
    return [np.log(softmax(p["E_y.weight"] @ y_i))[w] for y_i, w in zip(y, target[1:])], alphas


def rnnsearch(p, source, target, cfg):
    """Bahdanau et al., one sentence, one word, one source position at a time. Returns log p(y_i) for every i, and alpha."""
    gru = lambda side: (
        p[f"encoder.{side}.{k}_l0"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    x = [p["encoder.E.weight"][w] for w in source]
    right, left = torch_gru(x, *gru("right")), torch_gru(x[::-1], *gru("left"))[::-1]
    h = [np.concatenate([f, b]) for f, b in zip(right, left)]  # (7)
    n = len(left[0])
    W_z, W_r, W = np.split(p["cell.W.weight"], 3)
    b_z, b_r, b = np.split(p["cell.W.bias"], 3)
    C_z, C_r, C = np.split(p["cell.C.weight"], 3)
    U_z, U_r = np.split(p["cell.U_zr.weight"], 2)
    s = np.tanh(p["W_s.weight"] @ left[0] + p["W_s.bias"])  # A.2.2
    log_p, alphas = [], []
    for y_before, y in zip(target, target[1:]):
        e = [
            p["attention.v_a"]
            @ np.tanh(p["attention.W_a.weight"] @ s + p["attention.U_a.weight"] @ h_j)
            for h_j in h
        ]
        alpha = np.exp(e) / np.exp(e).sum()  # (6)
        c = sum(a * h_j for a, h_j in zip(alpha, h))  # (5)
        E_y = p["E.weight"][y_before]
        z = sigmoid(W_z @ E_y + b_z + U_z @ s + C_z @ c)  # A.1.1
        r = sigmoid(W_r @ E_y + b_r + U_r @ s + C_r @ c)
        s_tilde = np.tanh(W @ E_y + b + p["cell.U.weight"] @ (r * s) + C @ c)
        s = (1 - z) * s + z * s_tilde
        t_tilde = p["U_o.weight"] @ s + p["U_o.bias"] + p["V_o.weight"] @ E_y + p["C_o.weight"] @ c
        t = np.array(
            [max(t_tilde[2 * k], t_tilde[2 * k + 1]) for k in range(len(t_tilde) // 2)]
        )  # maxout
        o = p["W_o.weight"] @ t + p["W_o.bias"]
        log_p.append(o[y] - np.log(np.exp(o).sum()))
        alphas.append(alpha)
    assert n == len(s)
    return log_p, alphas


ORACLES = {
    "seq2seq_lstm": seq2seq,
    "bahdanau": rnnsearch,
    "luong": luong,
    "transformer": transformer,
}


@pytest.mark.parametrize(
    "name, seed", [(name, seed) for name in MODELS for seed in range(1 if "--score" in name else 2)]
)
def test_equations(name, seed):
    """Outputs, alphas and gradients equal the paper's equations written as naive loops and their finite differences."""
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed)
    y = tgt[:, 1:]
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    log_p = logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    p = {k: v.detach().numpy().copy() for k, v in model.named_parameters()}
    strip = lambda row: [w for w in row.tolist() if w != PAD]
    oracle = lambda b: ORACLES[script(name)](p, strip(src[b]), strip(tgt[b]), cfg)
    for b in range(len(src)):
        want, where = oracle(b)
        close(log_p[b, : len(want)], torch.tensor(np.array(want)))
        close(
            alpha[b, : len(want), : len(where[0])],
            torch.tensor(np.array(where)),
            1e-6 if "seq2seq" in name else 1e-9,
        )  # saliency: finite differences
    module.nll(logits[:2], y[:2]).backward()

    def loss(key, at, change):
        p[key][at] += change
        total = -sum(sum(oracle(b)[0]) for b in range(2))
        p[key][at] -= change
        return total

    r, eps = random.Random(seed), 1e-5
    for key, value in model.named_parameters():
        for _ in range(2):
            at = tuple(r.randrange(n) for n in value.shape)
            if value.size(0) in (11, 13) and "E" in key:
                at = (
                    r.choice([w for w in (*src[:2].flatten(), *tgt[:2].flatten()) if w < 11]),
                    at[1],
                )  # a word that occurs
            slope, grad = (
                (loss(key, at, eps) - loss(key, at, -eps)) / (2 * eps),
                value.grad[at].item(),
            )
            assert abs(slope - grad) < 2e-5 * max(1, abs(grad)), (key, at)


def test_bahdanau_paper_recipe():
    module = importlib.import_module("bahdanau")
    cfg = module.Config.paper(src_vocab=40, tgt_vocab=50, emb=20, hidden=40, attn=30, maxout=25)
    model = module.RNNsearch(cfg)
    std = {k: v.std().item() for k, v in model.named_parameters()}
    for key, value in model.named_parameters():
        if key.endswith(("bias", "v_a")) or ".bias_" in key:
            assert (value == 0).all(), key
        elif "_hh" in key or key in ("cell.U.weight", "cell.U_zr.weight"):
            for gate in value.split(40):
                close(gate @ gate.T, torch.eye(40), 1e-5)
        else:
            assert abs(std[key] / (0.001 if "_a." in key else 0.01) - 1) < 0.25, key
    (group,) = module.make_optimizer(model, cfg).param_groups
    assert (
        (group["rho"], group["eps"], group["lr"]) == (0.95, 1e-6, 1.0)
        and cfg.clip == 1.0
        and cfg.sentences == 80
    )
    full = module.Config.paper()
    assert (full.emb, full.hidden, full.attn, full.maxout, full.src_vocab, full.tgt_vocab) == (
        620,
        1000,
        1000,
        500,
        30000,
        30000,
    )


def on_paper(name, **changes):
    """The paper's model at full size, without memory for it."""
    module = importlib.import_module(name)
    with torch.device("meta"):
        return module.Config.paper(**changes), getattr(module, SCRIPTS[name][0])(
            module.Config.paper(**changes)
        )


def test_seq2seq_paper_recipe():
    cfg, model = on_paper("seq2seq_lstm")
    assert (cfg.layers, cfg.hidden, cfg.emb, cfg.src_vocab, cfg.tgt_vocab, cfg.reverse) == (
        4,
        1000,
        1000,
        160000,
        80000,
        True,
    )
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 384  # section 3.4
    assert (cfg.clip, cfg.per, cfg.sentences, cfg.dropout, cfg.smoothing) == (
        5.0,
        "sentence",
        128,
        0.0,
        0.0,
    )
    module = importlib.import_module("seq2seq_lstm")
    small = module.Seq2Seq(module.Config.paper(src_vocab=50, tgt_vocab=60, emb=30, hidden=20))
    for key, p in small.named_parameters():
        assert 0.07 < p.abs().max() <= 0.08 and abs(p.mean()) < 0.02, key
    optimizer = module.make_optimizer(small, cfg)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0
    assert (
        cfg.steps == 7.5 * 12e6 / 128
        and len(
            data.Bitext([(["a"] * 100, ["b"] * 100)] * 128, [collections.Counter()] * 2).cut(
                cfg.tokens, cfg.sentences
            )
        )
        == 1
    )
    epochs = lambda n: module.learning_rate(
        module.Config.paper(steps=7500), int(n * 1000) + 1
    )  # 7.5 epochs of 1,000 steps
    assert [epochs(n) for n in (0, 4.999, 5, 5.499, 5.5, 6, 6.5, 7, 7.499)] == [
        0.7,
        0.7,
        0.35,
        0.35,
    ] + [0.7 / 2**k for k in (2, 3, 4, 5, 5)]


def test_luong_paper_recipe():
    cfg, model = on_paper("luong")
    assert (cfg.layers, cfg.hidden, cfg.emb, cfg.src_vocab, cfg.tgt_vocab, cfg.reverse, cfg.D) == (
        4,
        1000,
        1000,
        50000,
        50000,
        True,
        10,
    )
    assert (cfg.clip, cfg.per, cfg.sentences, cfg.dropout, cfg.smoothing, cfg.max_len) == (
        5.0,
        "sentence",
        128,
        0.2,
        0.0,
        50,
    )
    assert (cfg.attention, cfg.score, cfg.input_feeding) == ("local-p", "general", True)
    module = importlib.import_module("luong")
    small = module.LuongNMT(module.Config.paper(src_vocab=50, tgt_vocab=60, emb=30, hidden=20))
    for key, p in small.named_parameters():
        assert 0.08 < p.abs().max() <= 0.1 and abs(p.mean()) < 0.03, key
    optimizer = module.make_optimizer(small, cfg)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0
    assert (
        cfg.steps == 12 * 4.5e6 / 128
        and len(
            data.Bitext([(["a"] * 50, ["b"] * 50)] * 128, [collections.Counter()] * 2).cut(
                cfg.tokens, cfg.sentences
            )
        )
        == 1
    )
    assert (
        len(on_paper("luong", score="location", attention="global")[1].attention.W_a) == 51
    )  # 50 words and the end mark
    epochs = lambda n, length, **k: module.learning_rate(
        module.Config.paper(steps=length * 100, **k), int(n * 100) + 1
    )
    assert [epochs(n, 12) for n in (0, 7.99, 8, 9, 11.99)] == [
        1,
        1,
        1 / 2,
        1 / 4,
        1 / 16,
    ]  # with dropout: 12 epochs, halved after 8
    assert [epochs(n, 10, dropout=0.0) for n in (0, 4.99, 5, 6, 9.99)] == [
        1,
        1,
        1 / 2,
        1 / 4,
        1 / 32,
    ]  # without: 10, after 5
    for flags in LUONG:  # DistributedDataParallel stumbles over a weight that is never used
        model = module.LuongNMT(module.Config(src_vocab=13, tgt_vocab=11, emb=6, hidden=5, **flags))
        src, tgt = sentences(1)
        model(src, tgt[:, :-1]).sum().backward()
        assert all(p.grad is not None for p in model.parameters()), flags


def test_transformer_paper_recipe():
    cfg, model = on_paper("transformer")
    assert (cfg.layers, cfg.d_model, cfg.d_ff, cfg.heads, cfg.dropout, cfg.smoothing) == (
        6,
        512,
        2048,
        8,
        0.1,
        0.1,
    )
    assert (
        abs(sum(p.numel() for p in model.parameters()) / 65e6 - 1) < 0.04 and model.E_x is model.E_y
    )  # table 3
    two = on_paper("transformer", src_vocab=100, tgt_vocab=200)[1]
    assert [two.E_x.weight.shape[0], two.E_y.weight.shape[0]] == [100, 200] and not any(
        p.shape[0] in (100, 200) and k[:2] != "E_" for k, p in two.named_parameters()
    )
    module = importlib.import_module("transformer")
    (group,) = module.make_optimizer(
        module.Transformer(module.Config(src_vocab=9, tgt_vocab=9)), cfg
    ).param_groups
    assert (group["betas"], group["eps"], cfg.warmup, cfg.clip) == (
        (0.9, 0.98),
        1e-9,
        4000,
        math.inf,
    )
    assert (cfg.tokens, cfg.steps, cfg.per, cfg.cooldown) == (
        50000,
        100000,
        "token",
        False,
    ) and cfg.sentences >= 50000 // 2
    some = module.Config(d_model=96, warmup=400, steps=1000, lr=2.0)
    assert [module.learning_rate(some, n) for n in (1, 401)] == pytest.approx(
        [2 * 96**-0.5 * 400**-1.5, 2 * 96**-0.5 * 401**-0.5 * 0.6]
    )
    model = module.Transformer(module.Config(src_vocab=300, tgt_vocab=300, d_model=64))
    assert all(abs(E.weight.std() * 8 - 1) < 0.05 for E in (model.E_x, model.E_y))
    for key, p in model.named_parameters():
        for W in (p.chunk(3) if "QKV" in key else [p]) if p.ndim == 2 and key[:2] != "E_" else []:
            last = key.endswith(("W_O.weight", "ffn.2.weight"))
            assert (
                0.9
                < W.abs().max() / math.sqrt(6 / sum(W.shape)) * (math.sqrt(2 * 2) if last else 1)
                <= 1
            ), key  # Glorot; 2 layers
        if key.endswith("bias"):
            assert (p == 0).all(), key
    for step in (1, 100, 3999, 4000, 4001, 100000):
        assert module.learning_rate(cfg, step) == pytest.approx(
            512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        )


def test_attention_is_the_fused_kernel():
    """Equation (1) in plain sight and the kernel that hides its weights: outputs and gradients."""
    attention = importlib.import_module("transformer").MultiHeadAttention.attention
    for seed in range(6):
        torch.manual_seed(seed)
        B, h, T, S, d = (random.Random(seed).randint(1, 6) for _ in range(5))
        Q, K, V = (
            torch.randn(B, h, n, d, dtype=torch.double, requires_grad=True) for n in (T, S, S)
        )
        some = torch.rand(B, 1, 1, S) < 0.4
        some[..., 0] = False
        for hidden in (some, torch.ones(T, S, dtype=torch.bool).triu(1)):
            mask = torch.zeros(hidden.shape, dtype=torch.double).masked_fill(hidden, -torch.inf)
            plain, alpha = attention(Q, K, V, mask, need_alpha=True)
            fused, none = attention(Q, K, V, mask)
            assert (alpha.masked_select(hidden) == 0).all()
            close(plain, fused)
            assert none is None
            want, got = (
                torch.autograd.grad(out.square().sum(), (Q, K, V)) for out in (plain, fused)
            )
            for a, b in zip(want, got):
                close(a, b)


def theirs_and_ours(seed, decoder):
    """A layer of torch.nn's and ours with its weights; torch's attention gets no biases, as in the paper."""
    module = importlib.import_module("transformer")
    torch.manual_seed(seed)
    cfg = module.Config(d_model=12, d_ff=20, heads=3, dropout=0.0)
    theirs = (torch.nn.TransformerDecoderLayer if decoder else torch.nn.TransformerEncoderLayer)(
        12, 3, 20, 0.0, batch_first=True
    ).double()
    ours = (module.DecoderLayer if decoder else module.EncoderLayer)(cfg).double()
    pairs = [
        (theirs.linear1, ours.ffn[0]),
        (theirs.linear2, ours.ffn[2]),
        (theirs.norm1, ours.norm_1),
        (theirs.norm2, ours.norm_2),
    ]
    attentions = [(theirs.self_attn, ours.self_attention)]
    if decoder:
        pairs, attentions = (
            [*pairs, (theirs.norm3, ours.norm_3)],
            [*attentions, (theirs.multihead_attn, ours.attention)],
        )
    with torch.no_grad():
        for a, b in pairs:
            for x, y in zip((a.weight, a.bias), (b.weight, b.bias)):
                y.copy_(x.normal_())
        for a, b in attentions:
            a.in_proj_bias.zero_(), a.out_proj.bias.zero_()
            for x, y in zip((a.in_proj_weight, a.out_proj.weight), (b.W_QKV, b.W_O)):
                y.weight.copy_(x)
    grads = lambda: [
        *((x.grad, y.grad) for a, b in pairs for x, y in ((a.weight, b.weight), (a.bias, b.bias))),
        *((b.W_QKV.weight.grad, a.in_proj_weight.grad) for a, b in attentions),
        *((b.W_O.weight.grad, a.out_proj.weight.grad) for a, b in attentions),
    ]
    return theirs, ours, grads


@pytest.mark.parametrize("seed", range(3))
def test_layers_equal_torch_nn(seed):
    """EncoderLayer, DecoderLayer and MultiHeadAttention against torch.nn's own, with the same weights: outputs, weights, gradients."""
    x, y = (
        torch.randn(3, n, 12, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        for n in (5, 7)
    )
    pad, future = (
        torch.arange(5) >= torch.tensor([[5], [3], [1]]),
        torch.ones(7, 7, dtype=torch.bool).triu(1),
    )
    mask, ahead = (
        torch.zeros(m.shape, dtype=torch.double).masked_fill(m, -torch.inf)
        for m in (pad[:, None, None], future)
    )
    theirs, ours, grads = theirs_and_ours(seed, decoder=False)
    want, got = theirs(x, src_key_padding_mask=pad), ours(x, mask)
    close(want, got)
    (want.square().sum() + got.square().sum()).backward()
    for a, b in grads():
        close(a, b, 1e-8)
    theirs, ours, grads = theirs_and_ours(seed, decoder=True)
    want = theirs(y, x, tgt_mask=future, memory_key_padding_mask=pad)
    got, alpha = ours(y, ahead, ours.attention.project(x, 1), mask, need_alpha=True)
    close(want, got)
    (want.square().sum() + got.square().sum()).backward()
    for a, b in grads():
        close(a, b, 1e-8)
    want, weights = theirs.multihead_attn(y, x, x, key_padding_mask=pad, average_attn_weights=False)
    got, alpha = ours.attention(
        *ours.attention.project(y, 0, 1).unbind(2),
        *ours.attention.project(x, 1).unbind(2),
        mask,
        need_alpha=True,
    )
    close(want, got), close(weights, alpha)


def test_transformer_drops_where_the_paper_does():
    """On embedding + position and on each sublayer's output before it is added, and nowhere else."""
    module, cfg, model = build("transformer", dropout=0.5)
    src, tgt = sentences(1)
    made, dropped = [], []
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.register_forward_hook(lambda m, x, y: dropped.append(x[0]))
        elif isinstance(m, torch.nn.Sequential):
            m.register_forward_hook(lambda m, x, y: made.append(y))
        elif isinstance(m, module.MultiHeadAttention):
            m.W_O.register_forward_hook(lambda m, x, y: made.append(y))
    noisy = model.train()(src, tgt[:, :-1])
    words = [x for x in dropped if not any(x is y for y in made)]
    assert len(made) == len(dropped) - 2 == 5 * cfg.layers and all(
        any(y is x for x in dropped) for y in made
    )
    for x, E, ids in zip(words, (model.E_x, model.E_y), (src, tgt[:, :-1])):
        PE = torch.tensor(
            [
                [
                    (math.cos if i % 2 else math.sin)(pos / 10000 ** ((i - i % 2) / 8))
                    for i in range(8)
                ]
                for pos in range(ids.size(1))
            ]
        )
        close(x, E(ids) * 8**0.5 + PE, 1e-6)
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    quiet = model(src, tgt[:, :-1])
    close(quiet, model.eval()(src, tgt[:, :-1]))
    assert (noisy - quiet).abs().max() > 1e-3


@pytest.mark.parametrize(
    "name", ["seq2seq_lstm", "luong", "luong --score general --attention global --input-feeding"]
)
def test_lstms_drop_their_inputs(name):
    """The input of every layer, fed h~ included, and what enters the softmax; with nothing to drop, training is evaluation."""
    module, cfg, model = build(name if name in MODELS else "luong --no-reverse", dropout=0.5)
    src, tgt = sentences(1)
    dropped, T, E, H = [], tgt.size(1) - 1, cfg.emb, cfg.hidden
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.register_forward_hook(lambda m, x, y: dropped.append(tuple(y.shape[1:])))
    model.train()(src, tgt[:, :-1])
    steps = (
        [(E + H,), (H,)] * T if getattr(cfg, "input_feeding", False) else [(T, E), (T, H)]
    )  # of two layers
    assert cfg.layers == 2 and sorted(dropped) == sorted(
        [(E,), (H,), *steps, (T, H)]
    )  # the encoder's are packed, the last is the softmax's
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        if isinstance(m, torch.nn.LSTM):
            assert m.dropout == 0 and m.num_layers == 1
    close(model(src, tgt[:, :-1]), model.eval()(src, tgt[:, :-1]))


def test_saliency_of_nothing():
    """Where no source word matters, none is preferred."""
    module, cfg, model = build("seq2seq_lstm")
    with torch.no_grad():
        model.E_x.weight.zero_()
    src, tgt = sentences(2)
    alpha, words = module.align(model, src, tgt), (src != PAD).double()
    close(alpha, (words / words.sum(1, keepdim=True)).unsqueeze(1).expand_as(alpha))


@pytest.mark.parametrize("compiling", (False, True))
@pytest.mark.parametrize("seed", range(3))
def test_label_smoothing(seed, compiling, monkeypatch):
    """(1 - e) of the target's log-probability and e of the mean over all words; nothing for padding; also as it is compiled."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    module, r = importlib.import_module("transformer"), torch.Generator().manual_seed(seed)
    logits, y = (
        torch.randn(3, 4, 7, generator=r).double().requires_grad_(),
        torch.randint(0, 7, (3, 4), generator=r),
    )
    y[0, 3] = PAD
    want = sum(
        -0.9 * q[w] - 0.1 * q.mean()
        for q, w in zip(logits.flatten(0, 1).log_softmax(-1), y.flatten())
        if w != PAD
    )
    close(module.nll(logits, y, 0.1), want)
    close(*(torch.autograd.grad(loss, logits)[0] for loss in (module.nll(logits, y, 0.1), want)))
    assert (
        module.nll(logits.bfloat16(), y).dtype == torch.float
        and module.nll(logits, y).dtype == torch.double
    )


# ---- properties, over random shapes -------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("seed", range(3))
def test_padding_changes_nothing(name, seed):
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed)
    wide = lambda x, n: torch.nn.functional.pad(x, (0, n), value=PAD)
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    more, alpha_more = model(wide(src, 4), wide(tgt[:, :-1], 3), need_alpha=True)
    close(more[:, : logits.size(1)], logits)
    close(alpha_more[:, : alpha.size(1), : alpha.size(2)], alpha)
    assert (module.greedy(model, wide(src, 4), 12) == module.greedy(model, src, 12)).all()
    model.zero_grad()
    module.nll(logits, tgt[:, 1:]).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    module.nll(more, wide(tgt, 3)[:, 1:]).backward()
    for p, grad in zip(model.parameters(), grads):
        close(p.grad, grad)


@models
@pytest.mark.parametrize("seed", range(3))
def test_the_future_is_invisible(name, seed):
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed, T=8)
    tgt_in = tgt[:, :-1]
    for t in range(1, tgt_in.size(1)):
        other = tgt_in.clone()
        other[:, t:] = torch.randint(4, 11, other[:, t:].shape)
        close(model(src, other)[:, :t], model(src, tgt_in)[:, :t])
    assert (
        model(src, other)[:, t:] - model(src, tgt_in)[:, t:]
    ).abs().max() > 1e-6  # the present is not


@models
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_equals_its_sentences(name, seed):
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed)
    logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
    tokens = module.greedy(model, src, 10)
    for b in range(len(src)):
        S, T = (src[b] != PAD).sum(), (tgt[b] != PAD).sum() - 1
        one, where = model(src[b : b + 1, :S], tgt[b : b + 1, :T], need_alpha=True)
        close(one[0], logits[b, :T])
        close(where[0], alpha[b, :T, :S])
        alone = module.greedy(model, src[b : b + 1, :S], 10)[0].tolist()
        assert alone + [PAD] * (tokens.size(1) - len(alone)) == tokens[b].tolist()


@models
@pytest.mark.parametrize("seed", range(3))
def test_stepping_equals_the_forward_pass(name, seed):
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed)
    logits, memory = model(src, tgt[:, :-1]), model.encode(src)
    state = model.start(memory)
    for t in range(tgt.size(1) - 1):
        one, state = model.step(tgt[:, t], state, memory)
        close(one, logits[:, t])


@models
@pytest.mark.parametrize("seed", range(3))
def test_alpha(name, seed):
    module, cfg, model = build(name, seed)
    src, tgt = sentences(seed)
    alpha = module.align(model, src, tgt)
    assert alpha.shape == (len(src), tgt.size(1) - 1, src.size(1)) and (alpha >= 0).all()
    close(alpha.sum(-1), torch.ones_like(alpha[..., 0]))
    assert (alpha.masked_select((src == PAD).unsqueeze(1)) == 0).all() and (src == PAD).any()


@models
@pytest.mark.parametrize("seed", range(3))
def test_greedy(name, seed):
    """Each token is the argmax of the forced logits of what came before; EOS ends, PAD follows, limits are each one's own."""
    module, cfg, model = build(name, seed)
    src, _ = sentences(seed)
    tokens = module.greedy(model, src, 10)
    forced = model(src, torch.cat([torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]], 1)).argmax(
        -1
    )
    for row, best in zip(tokens.tolist(), forced.tolist()):
        end = next((k for k, w in enumerate(row) if w in (EOS, PAD)), len(row))
        assert row[: end + 1] == best[: end + 1] and set(row[end + 1 :]) <= {PAD}
    limits = torch.randint(0, 10, (len(src),))
    for row, short, limit in zip(
        tokens.tolist(), module.greedy(model, src, limits).tolist(), limits.tolist()
    ):
        want = row[:limit] + [PAD] * 10
        assert short == want[: len(short)] and set(want[len(short) :]) <= {PAD}


def log_likelihood(model, src, words):
    """log p of target words, by one forced pass."""
    tgt = torch.tensor([[BOS, *words]])
    return model(src, tgt[:, :-1]).log_softmax(-1)[0].gather(1, tgt[0, 1:, None]).sum().item()


def naive_beam(model, src, limit, K, alpha):
    """Lists instead of tensors, and a forced pass for every hypothesis."""
    ended = lambda words: words[-1:] == [EOS]
    known = functools.cache(lambda words: log_likelihood(model, src, words))
    score = lambda words: known(tuple(words)) / ((5 + len(words)) / 6) ** alpha
    hypotheses = [[]]
    for _ in range(limit):
        grown = [
            words + [w] for words in hypotheses if not ended(words) for w in range(1, model.V)
        ] + [words for words in hypotheses if ended(words)]
        hypotheses = sorted(grown, key=score, reverse=True)[:K]
    return hypotheses[0]


def for_beam(name, seed, V, scale):
    """A model whose every word counts, of V target words, and sources of several lengths."""
    module, _, model = build(name, seed, tgt_vocab=V)
    model.V = V
    with torch.no_grad():
        [p.normal_(0, scale) for p in model.parameters()]
    return (
        module,
        model.eval(),
        torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD], [5, 8, EOS, PAD]]),
    )


@scripts
@pytest.mark.parametrize("seed", range(3))
def test_beam(name, seed):
    """As wide as all there is: the best of all sequences. Narrower: what the naive search finds, each sentence as if alone."""
    module, model, src = for_beam(name, seed, 5, (0.5, 0.8, 1.2)[seed])
    one = lambda b: src[b : b + 1, : int((src[b] != PAD).sum())]
    strip = lambda row: [w for w in row.tolist() if w != PAD]
    every = [
        [*head, w]
        for n in range(3)
        for head in itertools.product((BOS, UNK, 4), repeat=n)
        for w in range(1, 5)
        if n == 2 or w == EOS
    ]
    for alpha in ((3.0,), (0.0,), ())[seed]:
        wide = module.beam(model, src, 3, 4**3, alpha)
        for b in range(3):
            assert strip(wide[b]) == max(
                every,
                key=lambda words: (
                    log_likelihood(model, one(b), words) / ((5 + len(words)) / 6) ** alpha
                ),
            )
    for limits, K, alpha in ([6, 4, 5], 2, 0.6), ([5, 6, 3], 3, 0.0), ([3, 4, 6], 3, 3.0):
        tokens = module.beam(model, src, torch.tensor(limits, dtype=torch.int32), K, alpha)
        for b, limit in enumerate(limits):
            alone = module.beam(model, one(b), limit, K, alpha)[0]
            assert strip(tokens[b]) == strip(alone) == naive_beam(model, one(b), limit, K, alpha)
            assert (tokens[b, len(strip(alone)) :] == PAD).all()
    assert module.beam(model, src, 7, 1).equal(module.greedy(model, src, 7))


class Chance(torch.nn.Module):
    """A model that is a table: what follows depends on all that came before, by chance."""

    def __init__(self, seed, V=5):
        super().__init__()
        self.V, self.table = (
            V,
            torch.nn.Parameter(
                2
                * torch.randn(
                    997, V, generator=torch.Generator().manual_seed(seed), dtype=torch.double
                )
            ),
        )

    def encode(self, src):
        return (src.sum(1),)

    def start(self, memory, room=None):
        return memory

    def pick(self, state, rows):
        return (state[0][rows],)

    def step(self, y, state, memory):
        return self.table[past := (state[0] * 31 + y * 7 + 1) % 997], (past,)

    def forward(self, src, tgt_in):
        state, out = self.encode(src), []
        for y in tgt_in.T:
            logits, state = self.step(y, state, None)
            out.append(logits)
        return torch.stack(out, 1)


@pytest.mark.parametrize("seed", (25, 31, 45, 52, 54))
def test_beam_by_chance(seed):
    """One that has ended takes one place and no more: here a second one would push out what wins in the end."""
    model, src = (
        Chance(seed).eval(),
        torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD], [5, 8, EOS, PAD]]),
    )
    for row, alone in zip(
        importlib.import_module("bahdanau").beam(model, src, 8, 3, 5.0).tolist(), src.split(1)
    ):
        assert [w for w in row if w != PAD] == naive_beam(model, alone, 8, 3, 5.0)


@scripts
def test_beam_is_worth_it(name):
    """Over many random models a beam finds likelier translations than greedy decoding does, on average."""
    gain = []
    for seed in range(11):
        module, model, src = for_beam(name, seed, 9, 0.7)
        found = [
            [row.tolist() for row in search]
            for search in (module.greedy(model, src, 8), module.beam(model, src, 8, 4))
        ]
        for b in range(3):
            source = src[b : b + 1, : int((src[b] != PAD).sum())]
            cut = [
                row[b][
                    : next((k + 1 for k, w in enumerate(row[b]) if w in (EOS, PAD)), len(row[b]))
                ]
                for row in found
            ]
            if PAD not in cut[0]:
                gain.append(
                    log_likelihood(model, source, cut[1]) - log_likelihood(model, source, cut[0])
                )  # a beam never says PAD
    assert (
        len(gain) > 15
        and sum(gain) / len(gain) > 0.05
        and sum(g >= -1e-9 for g in gain) > 0.8 * len(gain)
    )


@scripts
def test_unknown_words(name, monkeypatch):
    """With --replace-unk an <unk> becomes the source word its row of alpha points at; nothing else changes."""
    module, model, _ = for_beam(name, 3, 6, 0.7)
    vocabularies = (
        data.Vocabulary(data.SPECIALS + list("abcdefghi")),
        data.Vocabulary(data.SPECIALS + ["x", "y"]),
    )
    sentences = [list("abc"), [], list("ghost"), ["unheard", "a"]]
    said = lambda src, limit: torch.tensor(
        [[UNK, 4, UNK, 5, UNK, EOS] if n else [PAD] * 6 for n in limit]
    )
    monkeypatch.setattr(
        module,
        "beam",
        lambda model, src, limit, K, alpha: said(src, limit) if (K, alpha) == (3, 0.2) else None,
    )
    plain, replaced = (
        module.translate(
            model, sentences, vocabularies, module.Config(beam=3, alpha=0.2, replace_unk=on)
        )
        for on in (False, True)
    )
    alphas = module.alignments(model, list(zip(sentences, plain)), vocabularies)
    assert (
        plain[0] == ["<unk>", "x", "<unk>", "y", "<unk>"]
        and plain[1] == replaced[1] == []
        and len(set(map(tuple, replaced))) == 4
    )
    for source, before, after, alpha in zip(sentences, plain, replaced, alphas):
        assert len(before) == len(after)
        for j, (a, b) in enumerate(zip(before, after)):
            assert b == (source[int(np.argmax(alpha[j][: len(source)]))] if a == "<unk>" else a)


@scripts
def test_averaged_checkpoints(name, files, monkeypatch, capsys):
    """The last N are kept, and only those; a run translates with their mean, and says so when there are too few."""
    folder, _ = files
    module = importlib.import_module(name)
    go = lambda *flags: module.main(
        [*train_flags(folder), "--steps", "20", *small(name), "--out", str(folder / "run"), *flags]
    )
    widths, beam = set(), module.beam
    monkeypatch.setattr(
        module,
        "beam",
        lambda model, src, limit, K, alpha: (
            widths.add((K, alpha)) or beam(model, src, limit, K, alpha)
        ),
    )
    go("--average", "3", "--beam", "2", "--alpha", "0.5")
    assert widths == {(2, 0.5)}  # the report's, too
    found = sorted((folder / "run").glob("step-*.pt"))
    assert [path.name for path in found] == [f"step-{step:09}.pt" for step in (12, 16, 20)]
    weights = [torch.load(path, weights_only=True)["model"] for path in found]
    for N, parts in ((3, weights), (2, weights[1:])):
        model, cfg, _ = module.restore(folder / "run", torch.device("cpu"), {"average": N})
        assert (cfg.average, cfg.beam) == (N, 2)
        for key, p in model.state_dict().items():
            close(p, sum(w[key].double() for w in parts) / N, 1e-6)
    best = torch.load(folder / "run" / "model.pt", weights_only=True)["model"]
    for key, p in (
        module.restore(folder / "run", torch.device("cpu"), {"average": 1})[0].state_dict().items()
    ):
        assert p.equal(best[key])
    capsys.readouterr()
    module.main(
        [
            "--align",
            str(folder / "train.en"),
            str(folder / "train.fr"),
            "--average",
            "9",
            "--out",
            str(folder / "run"),
        ]
    )  # as many as there are
    assert capsys.readouterr().out.count("\n") == 60
    go("--resume", "--average", "1", "--steps", "24")
    assert sorted((folder / "run").glob("step-*.pt")) == found
    for path in found:
        path.unlink()
    with pytest.raises(SystemExit) as stop:
        module.main(["--translate", "--average", "4", "--out", str(folder / "run")])
    assert (
        stop.value.code == 2
        and "holds no checkpoints to average; train with --average 4" in capsys.readouterr().err
    )


@scripts
@pytest.mark.parametrize("per, smoothing", [("token", 0.0), ("token", 0.2), ("sentence", 0.0)])
def test_train_step(name, per, smoothing, monkeypatch):
    """One SGD step moves the weights by lr times the clipped gradient of the mean loss; the loss returned is that of a token."""
    module, cfg, model = build(name, per=per, smoothing=smoothing, clip=0.1)
    src, tgt = sentences(3)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    log_p = model(src, tgt[:, :-1]).log_softmax(-1)
    log_p = (1 - smoothing) * log_p.gather(-1, tgt[:, 1:].unsqueeze(-1)).squeeze(
        -1
    ) + smoothing * log_p.mean(-1)
    tokens = tgt[:, 1:] != PAD
    (-log_p[tokens].sum() / (tokens.sum() if per == "token" else len(src))).backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters()}
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    model.zero_grad()
    monkeypatch.setattr(module, "learning_rate", lambda cfg, step: 0.5)
    loss = module.make_train_step(model, cfg, torch.optim.SGD(model.parameters()))(src, tgt)
    assert norm > 0.1 and abs(loss.item() + log_p[tokens].mean().item()) < 1e-5
    for k, p in model.named_parameters():
        close(p, before[k] - 0.5 * grads[k] * 0.1 / norm, 1e-6)


@scripts
def test_the_step_keeps_the_schedule(name):
    """make_train_step sets the learning rate of each step, and goes on counting with an optimizer that was saved."""
    module, cfg, model = build(name, steps=9, warmup=4)
    for n in range(1, 4):
        optimizer, saved = (
            module.make_optimizer(model, cfg),
            optimizer.state_dict() if n > 1 else None,
        )
        if saved:
            optimizer.load_state_dict(saved)
        module.make_train_step(model, cfg, optimizer)(*sentences(n))
        assert optimizer.param_groups[0]["lr"] == module.learning_rate(cfg, n)
    assert len(
        {module.learning_rate(cfg, n) for n in range(1, 10)}
    ) == 9 and 0 <= module.learning_rate(cfg, 1000) < module.learning_rate(cfg, 4)


@models
def test_overfits_32_pairs(name):
    """Learns 32 pairs to 100 %: every sentence word for word."""
    module = importlib.import_module(script(name))
    pairs = data.toy(32, max_len=9)
    bitext, words = data.learn(pairs, joint="joint" in name)
    quick = dict(
        luong=dict(emb=64, hidden=64, init=0.2, lr=0.02, warmup=8),
        transformer=dict(lr=0.5, warmup=60),
    ).get(script(name), {})
    cfg = module.Config(
        **dict(dropout=0.0, smoothing=0.0)
        | quick
        | MODELS[name]
        | dict(zip(("src_vocab", "tgt_vocab"), (len(v.words) for v in words)))
    )
    torch.manual_seed(1)
    model = getattr(module, SCRIPTS[script(name)][0])(cfg)
    src, tgt = map(torch.from_numpy, bitext.batch(np.arange(32)))
    step = module.make_train_step(model, cfg)
    losses = [step(src, tgt).item()]
    while losses[-1] > 0.01 and len(losses) < 200:
        losses.append(step(src, tgt).item())
    assert losses[-1] < 0.02 < losses[0]
    assert module.translate(model, [s for s, *_ in pairs], words) == [t for _, t, *_ in pairs]


@scripts
def test_alpha_without_gradients(name):
    """The alignment is the same inside no_grad and inference_mode, where saliency has to ask for gradients itself."""
    _, _, model = build(name)
    alphas = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            src, tgt = sentences(4)  # made inside: an inference tensor
            alphas.append(model(src, tgt[:, :-1], need_alpha=True)[1].detach().clone())
    for alpha in alphas:
        close(alpha, alphas[0])


@scripts
def test_evaluate(name):
    """Loss, perplexity, BLEU and AER of a random model equal what loops over single sentences and sacreBLEU give."""
    module, cfg, model = build(name, 3, dropout=0.5, src_vocab=40, tgt_vocab=30)
    r, words = (
        random.Random(0),
        [data.Vocabulary(data.SPECIALS + [f"w{i}" for i in range(4, n)]) for n in (40, 30)],
    )
    sentence = lambda n: [f"w{r.randrange(4, n)}" for _ in range(r.randint(1, 14))]
    pairs = [(sentence(40), sentence(30), {(0, 0), (1, 0)}) for _ in range(12)]
    model.train()  # the scores must not depend on it
    got = module.evaluate(model, pairs, words)
    model.eval()
    loss, links, hypotheses = [], [], []
    for source, target, _ in pairs:
        src, tgt = (
            torch.tensor([[words[0][w] for w in source] + [EOS]]),
            torch.tensor([[BOS] + [words[1][w] for w in target] + [EOS]]),
        )
        logits, alpha = model(src, tgt[:, :-1], need_alpha=True)
        loss += (-logits[0].log_softmax(-1))[range(len(target) + 1), tgt[0, 1:]].tolist()
        best = [
            max(range(len(source) + 1), key=lambda i: alpha[0, j, i]) for j in range(len(target))
        ]
        links.append({(i, j) for j, i in enumerate(best) if i < len(source)})
        y = []
        while len(y) < 2 * len(source) + 10 and y[-1:] not in ([EOS], [PAD]):
            y.append(model(src, torch.tensor([[BOS] + y]))[0, -1].argmax().item())
        hypotheses.append(" ".join(words[1].words[i] for i in y if i not in (EOS, PAD)))
    assert got["loss"] == pytest.approx(np.mean(loss), abs=1e-5) and got["ppl"] == pytest.approx(
        math.exp(np.mean(loss)), rel=1e-5
    )
    score = lambda rows: (
        sacrebleu.corpus_bleu(
            [hypotheses[k] for k in rows], [[" ".join(pairs[k][1]) for k in rows]], tokenize="none"
        ).score
    )
    assert got["bleu"] == pytest.approx(score(range(12)), abs=1e-6)
    short = [k for k, p in enumerate(pairs) if len(p[0]) <= 10]
    assert set(got["bleu_by_length"]) == {"1-10", "11-20"} and got["bleu_by_length"][
        "1-10"
    ] == pytest.approx(score(short), abs=1e-6)
    assert got["aer"] == pytest.approx(
        1 - 2 * sum((0, 0) in l or (1, 0) in l for l in links) / (sum(map(len, links)) + 24)
    )
    assert (
        len({module.nll(model.train()(src, tgt[:, :-1]), tgt[:, 1:]).item() for _ in range(3)}) == 3
    )  # dropout is on in training


def test_bahdanau_schedule():
    module = importlib.import_module("bahdanau")
    cfg = module.Config(lr=0.1, warmup=4, steps=10)
    assert [round(module.learning_rate(cfg, n), 4) for n in (1, 2, 4, 6, 10)] == [
        0.025,
        0.05,
        0.07,
        0.05,
        0.01,
    ]
    assert module.learning_rate(cfg, 11) == module.learning_rate(cfg, 99) == 0  # and never below
    assert {module.learning_rate(module.Config.paper(), n) for n in (1, 1000, 299999)} == {1.0}


# ---- the scripts as text ------------------------------------------------------------------------------------------------


@scripts
def test_anatomy(name):
    source = (HERE / f"{name}.py").read_text()
    paper, skeleton = source.split(MARKER)
    assert (
        len(source.splitlines()) <= 500
        and len(ast.get_docstring(ast.parse(source)).splitlines()) <= 25
    )
    assert (
        SCRIPTS[name][0] not in skeleton and name not in skeleton
    )  # the skeleton never asks which model it has
    assert {(HERE / f"{other}.py").read_text().split(MARKER)[1] for other in SCRIPTS} == {
        skeleton
    } and len(paper.splitlines()) <= 230
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & (set(SCRIPTS) - {name})


@scripts
def test_attention_classes_can_be_lifted(name):
    source = (HERE / f"{name}.py").read_text()
    classes = {
        n.name: ast.get_source_segment(source, n)
        for n in ast.parse(source).body
        if isinstance(n, ast.ClassDef) and "Attention" in n.name
    }
    assert set(classes) == set(SCRIPTS[name][2])
    for cls, call in SCRIPTS[name][2].items():
        alone = {}
        exec(
            "import math, torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
            + classes[cls],
            alone,
        )
        torch.manual_seed(0)
        lifted = call(alone[cls])
        torch.manual_seed(0)
        for a, b in zip(lifted, call(getattr(importlib.import_module(name), cls)), strict=True):
            close(a, b)
        assert (lifted[-1][..., -1] == 0).all() and (lifted[-1][..., 0] > 0).all()  # the mask


# ---- the built-in corpus ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus():
    return data.toy(8000)


def test_corpus_gold(corpus):
    for source, target, gold in corpus:
        assert (
            all(0 <= i < len(source) and 0 <= j < len(target) for i, j in gold)
            and 3 <= len(source) <= 30
        )
        assert {j for _, j in gold} == set(
            range(len(target))
        )  # every French word comes from somewhere
    argmax = [
        {(next(i for i in range(30) if (i, j) in gold), j) for j in range(len(target))}
        for _, target, gold in corpus
    ]
    assert data.aer(argmax, [gold for *_, gold in corpus]) < 0.01


def test_corpus_splits_and_seeds(corpus):
    seen = {
        split: {" ".join(s) for s, *_ in data.toy(1500, seed=3, split=split)}
        for split in ("train", "valid", "test")
    }
    for a, b in itertools.combinations(seen.values(), 2):
        assert not a & b
    assert not {" ".join(s) for s, *_ in corpus} & (seen["valid"] | seen["test"])
    assert data.toy(50, seed=5) == data.toy(50, seed=5) != data.toy(50, seed=6)
    code = "import data, zlib; print(zlib.crc32(repr([(s, t, sorted(g)) for s, t, g in data.toy(300)]).encode()))"
    run = lambda seed: (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=HERE,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        ).stdout
    )
    assert run("1") == run("2") != ""


def test_corpus_language(corpus):
    """At least 200 types a side, all lengths up to any maximum, agreement and elision, nothing said twice."""
    assert all(len({w for pair in corpus for w in pair[side]}) >= 200 for side in (0, 1))
    assert {len(s) for s, *_ in corpus} == set(range(3, 31))
    assert max(len(s) for s, *_ in data.toy(300, max_len=80)) > 75 and {
        len(s) for s, *_ in data.toy(20, max_len=3)
    } == {3}
    vowel = "aâeéèêiîoôuhœ"
    feminine, articles = (
        {"le": 0, "un": 0, "ce": 0, "la": 1, "une": 1, "cette": 1},
        {"the", "a", "an", "this"},
    )
    gender = collections.defaultdict(set)
    for source, target, gold in corpus:
        for j, (a, b) in enumerate(zip(target, target[1:])):
            assert not (
                a in ("le", "la", "je", "me", "ne", "de", "que", "ce", "ma", "sa") and b[0] in vowel
            ), target
            assert not (a.endswith("'") and b[0] not in vowel), target
            assert a != "de" or b not in ("le", "les", "des", "de"), target
            if a in feminine and articles & {source[i] for i, k in gold if k == j}:
                gender[b].add(feminine[a])
        for a, b in zip(source, source[1:]):
            assert not (a == "a" and re.match("[ai]|e[^u]", b) or a == "an" and b[0] not in "aei")
    assert len(gender) > 50 and not {
        w for w, g in gender.items() if len(g) > 1
    }  # a noun, or an adjective's form, has one gender
    long = max(corpus, key=lambda pair: len(pair[0]))[0]
    grams = collections.Counter(zip(long, long[1:], long[2:], long[3:], long[4:]))
    assert max(grams.values()) == 1


class Search(data.Grammar):
    """The grammar, made to say a given sentence: every choice is tried in turn, and given up at the first wrong word."""

    def __init__(self, words):
        super().__init__(0)
        self.target, self.known, self.path = words, {*words, "a"}, []  # "a" may yet become "an"

    def choice(self, n):
        if len(self.path) == self.depth:
            self.path.append([0, n])
        self.depth += 1
        return self.path[self.depth - 1][0]

    def pick(self, options):
        spoken = [
            x
            for x in options
            if not isinstance(x, (list, tuple))
            or set(np.hstack(x[: 1 + 3 * (len(x) > 6)])) & self.known
        ]
        if not spoken:
            raise LookupError
        return spoken[self.choice(len(spoken))]

    def chance(self, p):
        return self.choice(2) == 1

    def say(self, word):
        if [word] != self.target[len(self.en) : len(self.en) + 1] and (
            word,
            *self.target[len(self.en) : len(self.en) + 1],
        ) != ("a", "an"):
            raise LookupError
        return super().say(word)

    def run(self, length):
        while True:
            self.depth = 0
            try:
                pair = self.sentence(length)
                if pair[0] == self.target:
                    return pair
            except LookupError:
                pass
            del self.path[self.depth :]
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return None
            self.path[-1][0] += 1


@pytest.mark.parametrize(
    "english, french",
    [
        (data.EXAMPLE, "l' accord sur la zone économique européenne a été signé en août 1992 ."),
        (
            "the animal did not cross the street because it was too tired .",
            "l' animal n' a pas traversé la rue parce qu' il était trop fatigué .",
        ),
        ("i saw a cat on the mat", "j' ai vu un chat sur le tapis"),
        ("he hit me with a pie", "il m' a frappé avec une tarte"),
        ("a school that she visited is loved", "une école qu' elle a visitée est aimée"),
        ("the nurses ' cat saw her .", "le chat des infirmières l' a vue ."),
        (
            "the women that we admired arrived .",
            "les femmes que nous avons admirées sont arrivées .",
        ),
        ("he never finds my small red cars .", "il ne trouve jamais mes petites voitures rouges ."),
        ("the women arrives .", None),
        ("she have slept .", None),
        ("a cat sleep .", None),
    ],
)
def test_known_sentences_are_in_the_language(english, french):
    """The grammar says these, with this French and no other; what is wrong has no derivation."""
    words = english.split()
    found = [
        pair
        for pair in (Search(words).run(length) for length in range(len(words) - 1, len(words) + 4))
        if pair
    ]
    assert {" ".join(target) for _, target, _ in found} == ({french} if french else set())
    if (
        english == data.EXAMPLE
    ):  # l'-the accord-agreement sur-on la-the zone-area économique-economic européenne-european ...
        assert found[0][2] == {
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (6, 4),
            (5, 5),
            (4, 6),
            (7, 7),
            (7, 8),
            (8, 9),
            (9, 10),
            (10, 11),
            (11, 12),
            (12, 13),
        }


# ---- vocabularies and batches -------------------------------------------------------------------------------------------


def test_vocabulary():
    pairs = [("b a a <pad>".split(), "x".split()), ("a c b".split(), "x y <unk>".split())]
    source, target = data.learn(pairs)[1]
    assert source.words == ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c"] and target.words[
        4:
    ] == ["x", "y"]
    assert [source[w] for w in ("a", "nowhere", "<pad>", "<s>", "<unk>")] == [4, UNK, UNK, UNK, UNK]
    assert data.learn(pairs, sizes=(5, None))[1][0].words[4:] == ["a"]
    assert data.learn(pairs, min_count=2)[1][0].words[4:] == ["a", "b"]
    one, two = data.learn(pairs, joint=True)[1]
    assert one.words == two.words and set(one.words[4:]) == {"a", "b", "c", "x", "y"}


def test_batches(corpus):
    bitext, words = data.learn(corpus, max_len=25)
    kept = [p for p in corpus if len(p[0]) <= 25 and len(p[1]) <= 25]
    assert len(bitext) == len(kept) and bitext.skipped == len(corpus) - len(kept) > 0
    text = lambda src, tgt: [
        (
            tuple(words[0].words[i] for i in s if i > UNK),
            tuple(words[1].words[i] for i in t if i > UNK),
        )
        for s, t in zip(src, tgt)
    ]
    epoch = lambda *a, **k: list(bitext.epoch(1500, *a, **k))
    one = epoch(seed=1, epoch=0)
    assert collections.Counter(p for b in one for p in text(*b)) == collections.Counter(
        (tuple(s), tuple(t)) for s, t, _ in kept
    )
    assert all(src.size + tgt.size <= 1500 and src.dtype == np.int64 for src, tgt in one)
    assert all(
        (src[:, -1] != PAD).any() and (tgt[:, -1] != PAD).any() and (tgt[:, 0] == BOS).all()
        for src, tgt in one
    )
    assert sum((s == PAD).sum() + (t == PAD).sum() for s, t in one) < 0.1 * sum(
        s.size + t.size for s, t in one
    )
    same = lambda a, b: (
        len(a) == len(b)
        and all(
            (x == y).all()
            for p, q in zip(a, b)
            for x, y in zip(p, q)
            if x.shape == y.shape or pytest.fail("shape")
        )
    )
    assert same(one, epoch(seed=1, epoch=0)) and same(one[7:], epoch(seed=1, epoch=0, skip=7))
    order = lambda batches: [p for b in batches for p in text(*b)]
    assert order(one) != order(epoch(seed=1, epoch=1)) and order(one) != order(
        epoch(seed=2, epoch=0)
    )
    assert max(len(src) for src, _ in epoch(sentences=6)) == 6
    grid = epoch(
        seed=1, even=True
    )  # for a GPU: no source is padded, and shapes come again, in one epoch as in the next
    assert collections.Counter(order(grid)) == collections.Counter(order(one)) and all(
        (src != PAD).all() and src.size + tgt.size <= 1500 for src, tgt in grid
    )
    shapes = lambda batches: collections.Counter((src.shape, tgt.shape) for src, tgt in batches)
    assert shapes(grid) == shapes(epoch(seed=1, epoch=1, even=True)) and len(
        {tgt.shape[1] for _, tgt in grid}
    ) < 0.7 * len({tgt.shape[1] for _, tgt in one})
    assert (
        sum((t == PAD).sum() for _, t in grid) < 0.1 * sum(s.size + t.size for s, t in grid)
        and max(len(src) for src, _ in epoch(sentences=6, even=True)) == 6
    )
    ranks, joint = (
        [epoch(seed=1, rank=r, world=3) for r in range(3)],
        list(bitext.epoch(4500, seed=1)),
    )
    assert [sum((tgt[:, 0] == BOS).sum() for _, tgt in batches) for batches in zip(*ranks)] == [
        len(src) for src, _ in joint
    ]
    pairs = lambda batches: collections.Counter(
        p for src, tgt in batches for p in text(src[tgt[:, 0] == BOS], tgt[tgt[:, 0] == BOS])
    )
    assert sum(map(pairs, ranks), collections.Counter()) == pairs(joint) == pairs(one)
    few = [
        list(data.Bitext([(["a"], ["b"])] * 2, words).epoch(100, rank=r, world=5)) for r in range(5)
    ]  # more processes than pairs
    assert [len(batches) for batches in few] == [1] * 5 and [tgt.any() for ((_, tgt),) in few] == [
        True
    ] * 2 + [False] * 3


# ---- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_bleu_equals_sacrebleu(seed):
    r = random.Random(seed)
    sentence = lambda most: [
        r.choice("abcde") for _ in range(r.randint(0 if seed % 2 else 1, most))
    ]
    references = [sentence(12) for _ in range(r.randint(1, 6))]
    hypotheses = [
        [w if r.random() < 0.8 else r.choice("abcdefg") for w in ref]
        if r.random() < 0.6
        else sentence(3 if seed % 3 else 12)
        for ref in references
    ]
    want = sacrebleu.corpus_bleu(
        [" ".join(h) for h in hypotheses], [[" ".join(t) for t in references]], tokenize="none"
    ).score
    assert abs(data.bleu(hypotheses, references) - want) < 1e-6


def test_bleu_of_nothing():
    for hyps, refs in (([[]], [["a"]]), ([["a"]], [[]]), ([[]], [[]])):
        want = sacrebleu.corpus_bleu(
            [" ".join(h) for h in hyps], [[" ".join(t) for t in refs]], tokenize="none"
        ).score
        assert abs(data.bleu(hyps, refs) - want) < 1e-6
    assert data.bleu([], []) == 0


def test_aer_by_hand():
    gold, guess = {(0, 0), (1, 2), (2, 1)}, {(0, 0), (1, 1)}
    assert (
        data.aer([gold], [gold]) == 0
        and data.aer([{(5, 5)}], [gold]) == 1
        and data.aer([set()], [set()]) == 0
    )
    assert data.aer([guess], [gold]) == pytest.approx(1 - 2 * 1 / (2 + 3))
    assert data.aer([guess, gold], [gold, gold]) == pytest.approx(
        1 - 2 * 4 / (5 + 6)
    )  # of the corpus, not a mean of sentences


# ---- the command line ---------------------------------------------------------------------------------------------------


def small(name):
    return [
        *itertools.chain.from_iterable(
            (f"--{k.replace('_', '-')}", str(2 * v)) for k, v in SCRIPTS[name][1].items()
        ),
        *"--dropout 0.1 --tokens 300 --every 4 --device cpu".split(),
    ]


def write_text(tmp_path):
    """60 pairs to train on and a few of them, gzipped, to validate on."""
    pairs = data.toy(60, max_len=9)
    for side, name in enumerate(("en", "fr")):
        text = "".join(" ".join(p[side]) + "\n" for p in pairs)
        (tmp_path / f"train.{name}").write_text(text, encoding="utf-8")
        with gzip.open(tmp_path / f"valid.{name}.gz", "wt", encoding="utf-8") as file:
            file.write(text[: text.index("\n", 400) + 1] if side else "")
    lines = len(gzip.open(tmp_path / "valid.fr.gz").readlines())
    with gzip.open(tmp_path / "valid.en.gz", "wt", encoding="utf-8") as file:
        file.writelines(" ".join(p[0]) + "\n" for p in pairs[:lines])
    return tmp_path, pairs


@pytest.fixture
def files(tmp_path):
    return write_text(tmp_path)


def train_flags(folder):
    return [
        "--train",
        str(folder / "train.en"),
        str(folder / "train.fr"),
        "--valid",
        str(folder / "valid.en.gz"),
        str(folder / "valid.fr.gz"),
    ]


def shell(name, *args, stdin=None):
    return subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


@scripts
def test_train_translate_align(name, files, capsys):
    """Through real processes: train on your own text, then use the folder alone."""
    folder, pairs = files
    out = folder / "run"
    done = shell(name, *train_flags(folder), "--out", out, "--steps", 8, *small(name))
    assert done.returncode == 0 and "BLEU" in done.stdout and done.stderr == "", done.stderr
    log = [json.loads(line) for line in open(out / "log.jsonl")]
    assert [line["step"] for line in log[:-1]] == [4, 8] and log[-1]["final"] is True
    assert {"bleu", "aer", "ppl", "bleu_by_length", "seconds", "tokens_per_second", "seed"} <= set(
        log[-1]
    )
    soft = np.load(out / "align.npz")
    assert np.allclose(soft["alpha_0"].sum(1), 1, atol=1e-5) and len(
        open(out / "align.txt").readlines()
    ) == len(soft["source"])
    assert (out / "align.svg").read_text().startswith("<svg")
    text = [" ".join(s) for s, *_ in pairs[:5]] + ["", "words nobody knows"]
    said = shell(name, "--translate", "--out", out, "--device", "cpu", stdin="\n".join(text) + "\n")
    assert (
        said.returncode == 0
        and len(said.stdout.split("\n")) == len(text) + 1
        and said.stdout.split("\n")[5] == ""
    )
    importlib.import_module(name).main(
        [
            "--align",
            str(folder / "train.en"),
            str(folder / "train.fr"),
            "--out",
            str(out),
            "--device",
            "cpu",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(pairs)
    for line, (source, target, _) in zip(lines, pairs):
        found = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert all(i < len(source) and j < len(target) for i, j in found) and len(
            {j for _, j in found}
        ) == len(found)


@pytest.mark.parametrize("flags", LUONG, ids=lambda v: " ".join(map(str, v.values())))
def test_luong_variants_on_the_command_line(flags, files, capsys):
    """Each trains, stops, goes on and aligns."""
    folder, pairs = files
    module = importlib.import_module("luong")
    words = [
        "--score",
        flags["score"],
        "--attention",
        flags["attention"],
        "--input-feeding" if flags["input_feeding"] else "--no-input-feeding",
    ]
    go = lambda out, *more: module.main(
        [*train_flags(folder), *small("luong"), *words, "--out", str(folder / out), *more]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "note", lambda *a: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            go("parts", "--steps", "4", "--every", "2")
    go("parts", "--resume", "--every", "2")
    last = torch.load(folder / "parts" / "last.pt", weights_only=True)
    assert last["now"]["step"] == 4 and {k: last["config"][k] for k in flags} == flags
    capsys.readouterr()
    module.main(
        [
            "--align",
            str(folder / "train.en"),
            str(folder / "train.fr"),
            "--out",
            str(folder / "parts"),
            "--device",
            "cpu",
        ]
    )
    assert len(capsys.readouterr().out.splitlines()) == len(pairs)


def test_transformer_joint_and_layers(files, capsys):
    """--joint through training, a checkpoint and translation; --align-layer chooses among the layers of a trained run."""
    folder, pairs = files
    module, run = (
        importlib.import_module("transformer"),
        ["--out", str(folder / "run"), "--device", "cpu"],
    )
    module.main([*train_flags(folder), *small("transformer"), "--joint", "--steps", "4", *run])
    content = torch.load(folder / "run" / "model.pt", weights_only=True)
    assert content["words"][0] == content["words"][1] and torch.equal(
        content["model"]["E_x.weight"], content["model"]["E_y.weight"]
    )
    assert {w for p in pairs for w in p[0] + p[1]} == set(content["words"][0][4:])
    capsys.readouterr()
    said = set()
    for layer in ("0", "1", "4"):
        module.main(
            [
                "--align",
                str(folder / "train.en"),
                str(folder / "train.fr"),
                "--align-layer",
                layer,
                *run,
            ]
        )
        said.add(capsys.readouterr().out)
    assert len(said) == 2  # 0 is the last one, 4
    with pytest.raises(SystemExit):
        module.main(
            ["--align", str(folder / "train.en"), str(folder / "train.fr"), "--d-model", "32", *run]
        )
    assert "--d-model: 16 in this run" in capsys.readouterr().err


@scripts
def test_the_best_model_is_kept(name, files, monkeypatch, capsys):
    """model.pt is the one that scored best on valid, not the last one; it is the one that is reported."""
    folder, _ = files
    module, losses = importlib.import_module(name), iter([3.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(module, "loss_of", lambda *a: next(losses))
    seen = {}
    monkeypatch.setattr(
        module,
        "evaluate",
        lambda model, *a, old=module.evaluate: seen.update(model.state_dict()) or old(model, *a),
    )
    module.main([*train_flags(folder), "--out", str(folder / "run"), "--steps", "12", *small(name)])
    best, last = (
        torch.load(folder / "run" / f, weights_only=True) for f in ("model.pt", "last.pt")
    )
    assert (
        last["now"]["step"] == 12
        and [line["valid_loss"] for line in last["now"]["log"]] == [3.0, 1.0, 2.0]
        and set(best) == {"script", "config", "words", "model"}
    )
    assert all(torch.equal(seen[k], best["model"][k]) for k in seen) and any(
        not torch.equal(last["model"][k], seen[k]) for k in seen
    )


def one_step(name, rank, world, path, B=5):
    """A step of plain SGD on every world-th row: unlike Adam's, it shows the gradient's scale."""
    module, cfg, model = build(name, clip=1e9)
    src, tgt = sentences(5, B=B)
    rows = (
        slice(rank, None, world) if rank < B else slice(1)
    )  # a process without a row of its own: one without a target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "learning_rate", lambda cfg, step: 0.1)
        module.make_train_step(model, cfg, torch.optim.SGD(model.parameters()))(
            src[rows], tgt[rows] * (rank < B)
        )
    if rank == 0:
        torch.save(model.state_dict(), path)


def torchrun(script, *args):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            str(script),
            *map(str, args),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes make of each script: a run, a run that stopped and went on, and single steps."""
    folder = write_text(tmp_path_factory.mktemp("two"))[0]
    with (
        open(folder / "train.en", "a") as en,
        open(folder / "train.fr", "a") as fr,
    ):  # a pair that fills a batch alone
        for file in (en, fr):
            file.write("the cat " * 48 + "\n")
    flags = [*train_flags(folder), "--steps", "16"]
    (folder / "worker.py").write_text(f"""import sys; sys.path.insert(0, {str(HERE)!r})
import importlib, test_all, torch.distributed as dist
dist.init_process_group()
dist.init_process_group = dist.destroy_process_group = lambda *a: None  # several runs in one group
said = sys.stdout
def stop(*args): raise ZeroDivisionError
for name in test_all.SCRIPTS:
    module = importlib.import_module(name)
    note = module.note
    def run(out, *more):
        sys.stdout = said
        module.main([*{flags!r}, *test_all.small(name), "--dropout", "0", "--tokens", "80", "--out", {str(folder)!r} + "/" + name + out, *more])
    run("-two")
    module.note = stop
    try: run("-parts")
    except ZeroDivisionError: module.note = note
    dist.barrier()  # until the first one has saved
    run("-parts", "--resume")
    for B in (5, 1): test_all.one_step(name, dist.get_rank(), 2, f"{folder}/{{name}}{{B}}.pt", B)""")
    done = torchrun(folder / "worker.py")
    assert done.returncode == 0, done.stderr
    return folder, flags, done.stdout


@scripts
def test_two_processes_equal_one(name, two_processes, capsys):
    """torchrun with two processes and half the batch each gives the loss curve of one process, and the same step;
    a run that stops and goes on there ends with the same weights."""
    folder, flags, said = two_processes
    importlib.import_module(name).main(
        [
            *flags,
            *small(name),
            "--dropout",
            "0",
            "--tokens",
            "160",
            "--out",
            str(folder / f"{name}-one"),
        ]
    )
    assert said.count("61 pairs") == 3 * len(SCRIPTS) and said.count("BLEU by") == 2 * len(
        SCRIPTS
    )  # one process speaks
    one, two, parts = (
        [json.loads(line) for line in open(folder / f"{name}-{out}" / "log.jsonl")]
        for out in ("one", "two", "parts")
    )
    assert len(one) == len(two) == len(parts) == 5
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a.get("step") == b.get("step")
    one, two, parts = (
        torch.load(folder / f"{name}-{out}" / "last.pt", weights_only=True)
        for out in ("one", "two", "parts")
    )
    assert one["now"]["tokens"] == two["now"]["tokens"] and two["now"]["epoch"] > 0
    for a, b in zip(two["model"].values(), parts["model"].values(), strict=True):
        assert torch.equal(a, b)
    for B in (5, 1):
        one_step(name, 0, 1, folder / "alone.pt", B)
        for a, b in zip(
            torch.load(folder / f"{name}{B}.pt").values(),
            torch.load(folder / "alone.pt").values(),
            strict=True,
        ):
            close(a, b, 1e-6)


def test_a_crash_of_one_process_ends_the_others(files):
    folder, _ = files
    (folder / "worker.py").write_text(f"""import os, sys; sys.path.insert(0, {str(HERE)!r})
import luong, data
epoch = data.Bitext.epoch
def crash(*args):
    for k, batch in enumerate(epoch(*args)):
        if k == 5 and os.environ["RANK"] == "1": os._exit(7)
        yield batch
data.Bitext.epoch = crash
luong.main({[*train_flags(folder), "--steps", "100000", *small("luong"), "--tokens", "80", "--out", str(folder / "run")]!r})""")
    assert torchrun(folder / "worker.py").returncode != 0
    assert torch.load(folder / "run" / "last.pt", weights_only=True)["now"]["step"] == 4


# ---- faults ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def slow_when_asked(request):
    if request.node.get_closest_marker("slow") and "slow" not in request.config.option.markexpr:
        pytest.skip("python -m pytest -m slow test_all.py")


@pytest.fixture(autouse=True)
def own_signals():
    """The scripts' main sets handlers; the tests' own come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def forked(work):
    """work() in a child process: its exit status, negative for a signal."""
    if not (child := os.fork()):
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
            try:
                work()
            except SystemExit as stop:
                os._exit(stop.code or 0)
            except BaseException:
                os._exit(99)
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def same_run(a, b):
    """Two folders whose runs ended with bit-identical weights, optimisers, positions and logs."""
    for file in ("last.pt", "model.pt"):
        x, y = (torch.load(folder / file, weights_only=True) for folder in (a, b))
        flat = lambda v: (
            [(k, *rest) for k in v for rest in flat(v[k])] if isinstance(v, dict) else [(v,)]
        )
        clean = lambda v: {k: w for k, w in v.items() if k not in ("seconds", "log")}
        for part in x.keys() | y.keys():
            for p, q in zip(
                *(
                    flat(
                        clean(v[part])
                        if part == "now"
                        else v[part]
                        if isinstance(v[part], dict)
                        else {"": v[part]}
                    )
                    for v in (x, y)
                ),
                strict=True,
            ):
                assert p[:-1] == q[:-1] and (
                    torch.equal(p[-1], q[-1]) if isinstance(p[-1], torch.Tensor) else p[-1] == q[-1]
                ), (file, part, p[:-1])
    logs = [
        [
            {
                k: v
                for k, v in json.loads(line).items()
                if k not in ("seconds", "tokens_per_second", "peak_memory_gib")
            }
            for line in open(folder / "log.jsonl")
        ]
        for folder in (a, b)
    ]
    assert logs[0] == logs[1] and logs[0][-1]["final"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@scripts
def test_killed_three_times(name, files, capsys):
    """SIGKILL at a random step, three times in a row, then to the end: not a bit differs from a run that was left alone."""
    folder, _ = files
    module, r = importlib.import_module(name), random.Random(name)
    go = lambda out, *more: module.main(
        [*train_flags(folder), "--steps", "24", *small(name), "--out", str(folder / out), *more]
    )
    go("whole")
    reached = []
    for kill in range(3):
        count, nll = itertools.count(1), module.nll
        at = r.randint(5, 9) if kill else 2  # the first one before anything is saved but the start

        def deadly(*args):
            if torch.is_grad_enabled() and next(count) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return nll(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "nll", deadly)
            assert forked(lambda: go("parts", *["--resume"] * (kill > 0))) == -signal.SIGKILL
        reached.append(torch.load(folder / "parts" / "last.pt", weights_only=True)["now"]["step"])
    assert reached[0] == 0 < reached[1] < reached[2] < 24
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # and once more, after the best model was written and before all that goes with it
        patch.setattr(
            os,
            "replace",
            lambda a, b, replace=os.replace: (
                os.kill(os.getpid(), signal.SIGKILL)
                if str(b).endswith("last.pt")
                else replace(a, b)
            ),
        )
        assert forked(lambda: go("parts", "--resume")) == -signal.SIGKILL
    go("parts", "--resume")
    same_run(folder / "whole", folder / "parts")


@pytest.mark.parametrize("name, number", list(zip(SCRIPTS, (signal.SIGINT, signal.SIGTERM) * 2)))
def test_told_to_stop(name, number, files, monkeypatch, capsys):
    """Ctrl-C and SIGTERM save at once, say how to go on, and going on gives the run that was not stopped."""
    folder, _ = files
    module = importlib.import_module(name)
    go = lambda out, *more: module.main(
        [*train_flags(folder), "--steps", "12", *small(name), "--out", str(folder / out), *more]
    )
    go("whole")
    capsys.readouterr()
    count, nll = itertools.count(1), module.nll
    with monkeypatch.context() as patch:
        patch.setattr(
            module,
            "nll",
            lambda *a: (
                torch.is_grad_enabled() and next(count) == 7 and os.kill(os.getpid(), number),
                nll(*a),
            )[1],
        )
        with pytest.raises(SystemExit) as stop:
            go("parts")
    stderr = capsys.readouterr().err
    assert (
        stop.value.code == 130
        and stderr.count("\n") == 1
        and f"stopped at step 7; repeat the command with --resume --out {folder / 'parts'}"
        in stderr
    )
    assert torch.load(folder / "parts" / "last.pt", weights_only=True)["now"]["step"] == 7
    go("parts", "--resume")
    same_run(folder / "whole", folder / "parts")


def test_told_to_stop_in_the_last_look(files, monkeypatch, capsys):
    folder, _ = files
    module, before = importlib.import_module("bahdanau"), signal.getsignal(signal.SIGTERM)
    go = lambda *more: module.main(
        [
            *train_flags(folder),
            "--steps",
            "4",
            *small("bahdanau"),
            "--out",
            str(folder / "run"),
            *more,
        ]
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            module,
            "loss_of",
            lambda *a, loss_of=module.loss_of: (os.kill(os.getpid(), signal.SIGTERM), loss_of(*a))[
                1
            ],
        )
        with pytest.raises(SystemExit) as stop:
            go()
    assert (
        stop.value.code == 130
        and "stopped at step 4; repeat the command" in capsys.readouterr().err
        and signal.getsignal(signal.SIGTERM) == before
    )
    go("--resume")
    assert "BLEU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_torchrun_told_to_stop(number, files):
    """The signal reaches torchrun alone: every process ends, one says how to go on, and what is saved goes on."""
    folder, _ = files
    script = [
        str(HERE / "luong.py"),
        *train_flags(folder),
        *small("luong"),
        "--tokens",
        "80",
        "--every",
        "5",
        "--out",
        str(folder / "run"),
    ]
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            *script,
            "--steps",
            "100000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (folder / "run" / "log.jsonl").exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(number)
    stderr = run.communicate(timeout=60)[1]
    (step,) = re.findall(
        rf"luong.py: stopped at step (\d+); repeat the command with --resume --out {folder / 'run'}\n",
        stderr,
    )
    assert (
        torch.load(folder / "run" / "last.pt", weights_only=True)["now"]["step"] == int(step) >= 5
    )
    if number == signal.SIGTERM:
        alone = subprocess.run(
            [sys.executable, *script, "--resume"], capture_output=True, text=True
        )  # one process cannot go on exactly with what two began
        assert alone.returncode == 2 and "number of processes" in alone.stderr


@scripts
@pytest.mark.parametrize("way", ["loss", "gradient", "signal"])
def test_not_finite(name, way, files, monkeypatch, capsys):
    """A loss, or weights, that are not finite end the run: step, rate and batch are named, what was saved is untouched."""
    folder, _ = files
    module, count = importlib.import_module(name), itertools.count(1)
    nll, saved, at = module.nll, {}, 7 if way == "signal" else 8

    def broken(logits, y, *rest):
        if not torch.is_grad_enabled() or next(count) != at:
            return nll(logits, y, *rest)
        saved.update({file.name: file.read_bytes() for file in (folder / "run").iterdir()})
        if way == "loss":
            return nll(logits, y, *rest) * math.inf
        if at != 8:
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # not a step that is looked at, but the last one before a stop
        logits.register_hook(lambda grad: grad * math.nan)
        return nll(logits, y, *rest)  # the loss is still sound

    monkeypatch.setattr(module, "nll", broken)
    with pytest.raises(SystemExit) as stop:
        module.main(
            [*train_flags(folder), "--steps", "12", *small(name), "--out", str(folder / "run")]
        )
    stderr, sizes = capsys.readouterr().err, {k: 2 * v for k, v in SCRIPTS[name][1].items()}
    rate = module.learning_rate(module.Config(steps=12, **sizes), at)
    assert (
        stop.value.code == 2
        and stderr.count("\n") == 1
        and re.search(
            rf"step {at}, epoch \d, batch \d+, learning rate {rate:.2g}: the loss is (inf|nan)",
            stderr,
        )
    )
    assert {
        file.name: file.read_bytes() for file in (folder / "run").iterdir()
    } == saved and torch.load(folder / "run" / "last.pt", weights_only=True)["now"]["step"] == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("place", ["first", "later", "report"])
def test_full_disk(place, files, monkeypatch, capsys):
    """One line, and what was saved before is whole."""
    import resource

    folder, _ = files
    module, out = importlib.import_module("bahdanau"), folder / "run"
    go = lambda *more: module.main(
        [*train_flags(folder), "--steps", "12", *small("bahdanau"), "--out", str(out), *more]
    )
    if place != "first":  # half a run, saved
        with monkeypatch.context() as patch:
            patch.setattr(module, "note", lambda *a: sys.exit(0))
            with pytest.raises(SystemExit):
                go()
    before = {file.name: file.read_bytes() for file in out.iterdir()} if out.exists() else {}
    assert ("last.pt" in before) == (place != "first")
    save, limit = module.save, lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))

    def full():
        os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = open(2, "w")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if place != "report":
            limit(10000)
        module.save = lambda path, content: (
            str(path).endswith(".npz") and limit(200),
            save(path, content),
        )[1]
        go(*["--resume"] * (place != "first"))

    assert forked(full) == 2
    (line,) = (folder / "stderr").read_text().splitlines()
    assert re.search(
        {"report": r"align\.npz"}.get(place, r"(model|last)\.pt")
        + ": not written, File too large; what was there is whole",
        line,
    )
    left = {file.name: file.read_bytes() for file in out.iterdir()}
    if place == "report":
        assert json.loads(left["log.jsonl"].splitlines()[-1])["step"] == 12 and set(left) == {
            "model.pt",
            "last.pt",
            "log.jsonl",
        }
    else:
        assert left == before


class Malicious:
    def __reduce__(self):
        return os.mkdir, (str(Path.cwd() / "owned"),)


@scripts
def test_bad_checkpoints(name, files, monkeypatch, capsys):
    folder, _ = files
    monkeypatch.chdir(folder)
    module, other = (
        importlib.import_module(n) for n in (name, "luong" if name != "luong" else "bahdanau")
    )
    for m in (module, other):
        m.main([*train_flags(folder), "--steps", "4", *small(m.__name__), "--out", m.__name__])
    sound, use = (
        (folder / name / "model.pt").read_bytes(),
        lambda out: ["--align", "train.en", "train.fr", "--out", out, "--device", "cpu"],
    )
    pickled = io.BytesIO()
    torch.save({"script": name, "config": {}, "words": [[], []], "model": Malicious()}, pickled)
    with zipfile.ZipFile(folder / name / "model.pt") as parts:
        weights = max(
            (part for part in parts.infolist() if "/data/" in part.filename),
            key=lambda info: info.file_size,
        )  # not the pickle
    middle = (
        weights.header_offset
        + 30
        + sum(struct.unpack("<HH", sound[weights.header_offset + 26 :][:4]))
        + weights.file_size // 2
    )

    def torn(**changes):
        file, content = io.BytesIO(), torch.load(folder / name / "model.pt", weights_only=True)
        torch.save({k: v for k, v in (content | changes).items() if v is not None}, file)
        return file.getvalue()

    bad = {
        "no model": torn(model=None),
        "other fields": torn(config={"colour": 3}),
        "empty": b"",
        "truncated": sound[:middle],
        "flipped": sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :],
        "malicious": pickled.getvalue(),
        "pickle": pickle.dumps(Malicious()),
        "text": b"hello\n",
        "other": (folder / other.__name__ / "model.pt").read_bytes(),
    }
    capsys.readouterr()
    for kind, content in bad.items():
        (folder / kind).mkdir()
        for file in ("model.pt", "last.pt"):
            (folder / kind / file).write_bytes(content)
        for args in (use(kind), [*train_flags(folder), "--resume", "--out", kind]):
            with pytest.raises(SystemExit) as stop:
                module.main(args)
            stdout, stderr = capsys.readouterr()
            want = f"made by {other.__name__}.py" if kind == "other" else "not a sound checkpoint"
            assert (
                stop.value.code == 2 and stdout == "" and stderr.count("\n") == 1 and want in stderr
            ), (kind, stderr)
        assert (
            all((folder / kind / file).read_bytes() == content for file in ("model.pt", "last.pt"))
            and not (folder / "owned").exists()
        )


@scripts
def test_resume_changes_only_what_may_change(name, files, monkeypatch, capsys):
    folder, _ = files
    module, out = importlib.import_module(name), str(folder / "run")
    go = lambda *more: module.main([*train_flags(folder), "--out", out, *more])
    go("--steps", "4", *small(name))
    before = (folder / "run" / "last.pt").read_bytes()
    capsys.readouterr()
    size = {"transformer": ["--heads", "2"]}.get(name, ["--hidden", "12"])
    for flags in (
        size,
        ["--seed", "2"],
        ["--dropout", "0.3"],
        ["--tokens", "200"],
        ["--paper"],
        ["--joint"],
    ):
        with pytest.raises(SystemExit) as stop:
            go("--resume", *flags)
        stderr = capsys.readouterr().err
        assert (
            stop.value.code == 2
            and stderr.count("\n") == 1
            and "in this run; leave it out" in stderr
        ), (flags, stderr)
    with monkeypatch.context() as patch:
        patch.setattr(data, "toy", lambda n, toy=data.toy, **how: toy(50, **how))
        with pytest.raises(SystemExit) as stop:
            module.main(["--out", out, "--resume"])  # the built-in corpus
    assert (
        stop.value.code == 2
        and "other text" in capsys.readouterr().err
        and (folder / "run" / "last.pt").read_bytes() == before
    )
    text = (folder / "train.fr").read_text()
    (folder / "train.fr").write_text(text.replace("le", "la", 1))  # as many pairs, another word
    with pytest.raises(SystemExit) as stop:
        go("--resume", "--steps", "6")
    assert stop.value.code == 2 and "other text" in capsys.readouterr().err
    (folder / "train.fr").write_text(text)
    go(
        "--resume",
        *small(name),
        "--src-vocab",
        "30000",
        "--steps",
        "6",
        "--every",
        "1",
        "--lr",
        "0.001",
        "--warmup",
        "3",
        "--clip",
        "2",
    )  # the same command, and more
    steps = [json.loads(line).get("step") for line in open(folder / "run" / "log.jsonl")]
    assert steps == [4, 5, 6, None]


# ---- bad input --------------------------------------------------------------------------------------------------------------


@scripts
def test_bad_input_gets_one_line(name, files, capsys):
    folder, _ = files
    module = importlib.import_module(name)
    good = (folder / "train.fr").read_bytes()
    bad = {
        "short.fr": b"un\n",
        "latin.fr": b"un\n\xe9\n",
        "empty": b"",
        "nul.fr": good[:50] + b"\0" + good[50:],
        "crlf.fr": good.replace(b"\n", b"\r\n"),
        "bom.fr": b"\xef\xbb\xbf" + good,
        "utf16.fr": good.decode().encode("utf-16"),
        "cut.fr.gz": gzip.compress(good)[:-20],
        "no.fr.gz": good,
        "long": b"a " * 500 + b"\n",
    }
    for file, content in bad.items():
        (folder / file).write_bytes(content)
    (folder / "junk").mkdir()
    for file in ("model.pt", "last.pt"):
        (folder / "junk" / file).write_bytes(b"not a checkpoint")
    train, valid = [str(folder / "train.en"), str(folder / "train.fr")], train_flags(folder)[3:]
    other = lambda file: ["--train", train[0], str(folder / file), *valid]
    cases = {
        "no such file": other("nowhere.fr"),
        "short.fr ends after line 1": other("short.fr"),
        "latin.fr, line 2": other("latin.fr"),
        "is a directory": other("."),
        f"nul.fr, line {good[:50].count(10) + 1}: has a NUL byte": other("nul.fr"),
        "crlf.fr, line 1: has CR LF;": other("crlf.fr"),
        "bom.fr, line 1: has a byte-order mark": other("bom.fr"),
        "utf16.fr, line 1": other("utf16.fr"),
        "cut.fr.gz": other("cut.fr.gz"),
        "no.fr.gz": other("no.fr.gz"),
        "no pair": ["--train", str(folder / "empty"), str(folder / "empty"), *valid],
        "no pair of 1 to 100 words": [
            "--train",
            str(folder / "long"),
            str(folder / "long"),
            *valid,
        ],
        "is empty": ["--train", *train, "--valid", str(folder / "empty"), str(folder / "empty")],
        "--valid": ["--train", *train],
        "go together": valid,
        "not allowed with": ["--train", *train, *valid, "--translate"],
        "invalid choice: 'cuda:99'": ["--device", "cuda:99"],
        "invalid choice: 'meta'": ["--device", "meta"],
        "--optimizer" if name != "transformer" else "--per": [
            "--optimizer" if name != "transformer" else "--per",
            "magic",
        ],
        "unrecognized": ["--nonsense"],
        "train first": ["--translate", "--out", str(folder / "nowhere")],
        "nowhere/last.pt: no such file": ["--resume", "--out", str(folder / "nowhere")],
        "not a sound checkpoint": ["--translate", "--out", str(folder / "junk")],
        "--max-len 2: must be 3 to 1000": ["--max-len", "2"],
        "--max-len 100000: must be 3 to 1000": ["--max-len", "100000"],
        "holds a run already": ["--out", str(folder / "junk")],
        "is a file or": ["--out", train[0]],
        "latin.fr, line 2: not": ["--align", str(folder / "latin.fr"), train[1], "--out", "RUN"],
    }
    cases |= {
        "luong": {
            "--D 0": ["--D", "0"],
            "--attention global": "--score location --attention local-p".split(),
            "--score": ["--score", "cosine"],
        },
        "transformer": {
            "--heads 5": ["--heads", "5"],
            "layers 1 to 2": ["--align-layer", "3"],
            "--align-layer -1": ["--align-layer", "-1"],
        },
    }.get(name, {})
    module.main([*train_flags(folder), "--steps", "1", *small(name), "--out", str(folder / "RUN")])
    capsys.readouterr()
    for message, args in cases.items():
        before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
        with pytest.raises(SystemExit) as stop:
            module.main(
                [
                    "--out",
                    str(folder / "new"),
                    *(str(folder / a) if a == "RUN" else a for a in args),
                ]
            )
        stdout, stderr = capsys.readouterr()
        assert (
            stop.value.code == 2
            and message.lower() in stderr.lower()
            and stderr.count("\n") == 1
            and stdout == ""
        ), (message, stderr)
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before, message


@scripts
def test_nonsense_values_of_every_flag(name, tmp_path, capsys):
    module, tried = importlib.import_module(name), 0
    zero = {"seed", "max_len", "align_layer", "dropout", "smoothing", "alpha"}
    shared = (
        {
            field.name
            for field in module.dataclasses.fields(importlib.import_module("bahdanau").Config)
        }
        if name != "bahdanau"
        else {}
    )
    for field in (
        field for field in module.dataclasses.fields(module.Config) if field.name not in shared
    ):  # the others are checked by the same lines
        values = {
            int: ["-1", "1.5", "nan", str(10**30)],
            float: ["-0.1", "x", "nan", *["inf"] * (field.name != "clip")],
            bool: [],
        }.get(field.type, ["x"])
        if field.type in (int, float) and field.name not in zero:
            values += ["0"]
        if field.name in ("dropout", "smoothing"):
            values += ["1", "1.5"]
        if "vocab" in field.name:
            values += ["2", "4"]
        for value in values:
            tried += 1
            with pytest.raises(SystemExit) as stop:
                module.main(
                    ["--out", str(tmp_path / "run"), f"--{field.name.replace('_', '-')}={value}"]
                )
            stdout, stderr = capsys.readouterr()
            assert (
                stop.value.code == 2
                and stderr.count("\n") == 1
                and stdout == ""
                and f"--{field.name.replace('_', '-')}" in stderr
            ), (field.name, value, stderr)
    assert tried >= (4 if shared else 60) and not list(tmp_path.iterdir())


def test_sizes_beyond_memory(files, capsys):
    folder, before = files[0], sorted(files[0].rglob("*"))
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("bahdanau").main(
            [
                *train_flags(folder),
                *small("bahdanau"),
                "--steps",
                "1",
                "--hidden",
                "2000000000",
                "--out",
                str(folder / "run"),
            ]
        )
    stderr = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and stderr.count("\n") == 1
        and "not enough memory" in stderr
        and sorted(folder.rglob("*")) == before
    )


def test_words_that_become_unknown(files, capsys):
    """Warns when the vocabulary keeps too little, with the rate, and trains all the same; says nothing when it is large enough."""
    folder, pairs = files
    module = importlib.import_module("bahdanau")
    for size in ("6", "1000"):
        module.main(
            [
                *train_flags(folder),
                *small("bahdanau"),
                "--steps",
                "1",
                "--src-vocab",
                size,
                "--out",
                str(folder / size),
            ]
        )
        words = collections.Counter(w for p in pairs for w in p[0])
        lost = 1 - sum(n for _, n in words.most_common(int(size) - 4)) / words.total()
        stderr = capsys.readouterr().err
        assert (
            (f"{lost:.0%} of the words" in stderr and stderr.count("\n") == 1)
            if size == "6"
            else stderr == ""
        )


def test_long_lines(files, capsys):
    """Too long to train on: left out, and counted. Too long to translate: an empty line, and its number."""
    folder, pairs = files
    module, run = (
        importlib.import_module("bahdanau"),
        ["--out", str(folder / "run"), "--device", "cpu"],
    )
    with open(folder / "train.en", "a") as en, open(folder / "train.fr", "a") as fr:
        en.write("a b\n" + "a " * 101 + "\n\n"), fr.write("a " * 101 + "\na b\na\n")
    module.main([*train_flags(folder), *small("bahdanau"), "--steps", "1", *run])
    assert "60 pairs, 3 left out" in capsys.readouterr().out
    for name, text in (
        ("a", "he\n" + "he " * 1001 + "\n" + "he " * 1000 + "\n"),
        ("b", "il\n" + "il il\n" * 2),
    ):
        (folder / name).write_text(text)
    module.main(["--align", str(folder / "a"), str(folder / "b"), *run])
    stdout, stderr = capsys.readouterr()
    assert (
        [bool(line) for line in stdout.split("\n")[:-1]]
        in ([True, False, True], [False, False, True], [True, False, False])
        and "line 2: more than 1,000 words" in stderr
        and stderr.count("\n") == 1
    )


# ---- random input, random kills: python -m pytest -m slow test_all.py ----------------------------------------------------


def dirty(r, content):
    """content as it may arrive: cut, with bytes changed, put in, taken out, doubled; or anything at all."""
    kind = r.randrange(7)
    if kind == 0:
        return content[: r.randrange(len(content) + 1)]
    if kind == 1:
        return r.randbytes(r.choice((0, 1, 7, 300)))
    if kind == 2:
        return bytes(
            r.choice(b"ab \n\r\t\0\xef\xbb\xbf\xe9\xff<unk></s>") for _ in range(r.randrange(200))
        )
    content = bytearray(content)
    for _ in range(r.choice((1, 1, 2, 10))):
        at = r.randrange(len(content) + 1)
        if kind == 3:
            content[at : at + 1] = r.randbytes(1)
        if kind == 4:
            content[at:at] = r.choice(
                (
                    b"\n",
                    b"\r\n",
                    b"\0",
                    b"\xef\xbb\xbf",
                    b" " * 50,
                    b"a " * r.choice((5, 150, 1200)),
                    r.randbytes(4),
                )
            )
        if kind == 5:
            del content[at : at + r.choice((1, 5, 100))]
        if kind == 6:
            content[at:at] = content[at : at + 40]
    return bytes(content)


def call(module, args, stdin=b""):
    """(exit status, stdout lines, stderr lines) of main, or a failure where a user would see a traceback or wait for ever."""
    out, err = io.StringIO(), io.StringIO()
    with (
        open("stdin", "wb+") as file,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        file.write(stdin), file.seek(0)
        keep, status = os.dup(0), 0
        os.dup2(file.fileno(), 0)
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"hangs: {args}"))
        signal.alarm(60)
        try:
            module.main([*args, "--device", "cpu"])
        except SystemExit as stop:
            status = stop.code
        finally:
            signal.alarm(0), os.dup2(keep, 0), os.close(keep)
    return status, out.getvalue().split("\n")[:-1], err.getvalue().split("\n")[:-1]


def flags_of(r, module):
    """Some flags with values that may or may not make sense, none of them beyond the machine's memory."""
    fields = r.sample([f for f in module.dataclasses.fields(module.Config)], r.randint(1, 4))
    number = {
        int: ["-1", "0", "1", "2", "3", "7", "16", "x", "", "1e3", "9" * 30],
        float: ["-1", "0", "0.5", "1", "1e30", "1e-30", "inf", "nan", "-inf", "x"],
    }
    big = {
        "steps",
        "every",
        "tokens",
        "sentences",
        "seed",
        "warmup",
        "min_count",
        "max_len",
        "D",
        "src_vocab",
        "tgt_vocab",
    }  # no memory goes with them
    flags = []
    for f in fields:
        name = f.name.replace("_", "-")
        if f.type is bool:
            flags.append(r.choice((f"--{name}", f"--no-{name}", f"--{name}=yes")))
        else:
            flags.append(
                f"--{name}={r.choice(number.get(f.type, ['x', '', *getattr(f.type, '__args__', ())]) + [str(10**6)] * (f.type is int and f.name in big - {'steps'}))}"
            )
    return flags + r.sample(
        ["--paper=1", "--resume", "--nonsense", "--translate", "x", "--out"], r.random() < 0.2
    )


@pytest.mark.slow
@scripts
def test_random_input(name, tmp_path, monkeypatch):
    """Random flags, random bytes and truncations of every file there is, 600 times: a run or one clear line, and nothing damaged."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    module, r, seen = importlib.import_module(name), random.Random(name), collections.Counter()
    fixed = [*train_flags(tmp_path), *small(name), "--steps", "2", "--every", "1"]
    assert call(module, [*fixed, "--out", "run"])[0] == 0
    sound = {
        file: file.read_bytes()
        for file in (
            *tmp_path.glob("train.*"),
            *tmp_path.glob("valid.*"),
            Path("run/model.pt"),
            Path("run/last.pt"),
            Path("run/log.jsonl"),
        )
    }
    for case in range(600):
        kind, stdin, out = case % 6, b"", f"new{case}"
        if kind == 0:
            args = [*fixed, "--out", out, *flags_of(r, module)]
        elif kind in (1, 2):
            file = r.choice([file for file in sound if file.parent == tmp_path])
            file.write_bytes(dirty(r, sound[file]))
            args = [*fixed, "--out", out]
        elif kind == 3:
            file = Path("run", r.choice(("model.pt", "last.pt")))
            file.write_bytes(dirty(r, sound[file]))
            args = r.choice(
                (
                    ["--align", "train.en", "train.fr", "--out", "run"],
                    [*fixed, "--steps", "3", "--resume", "--out", "run"],
                )
            )
        elif kind == 4:
            args, stdin = ["--translate", "--out", "run"], dirty(r, sound[tmp_path / "train.en"])
        else:
            for side in ("a", "b"):
                Path(side).write_bytes(
                    dirty(r, sound[tmp_path / "train.en"])
                    if side == "a" or r.random() < 0.5
                    else Path("a").read_bytes()
                )
            args = ["--align", "a", "b", "--out", "run"]
        before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
        status, said, errors = call(module, args, stdin)
        after = {
            file: file.read_bytes()
            for file in Path().rglob("*")
            if file.is_file() and file != Path("stdin")
        }
        assert status in (0, 2) and not any("Traceback" in line for line in errors), (
            args,
            status,
            errors,
        )
        if status:
            assert len(
                [line for line in errors if "become <unk>" not in line and "left empty" not in line]
            ) == 1 and errors[-1].startswith(f"{name}.py: "), (args, errors)
        if kind in (4, 5) or status:  # all that was there is as it was
            assert all(
                after.get(file) == content
                for file, content in before.items()
                if file != Path("stdin")
            ), (args, errors)
            if kind in (1, 2, 5) and status:
                assert not Path(out).exists(), (args, errors)
        if kind == 4:
            assert status == 0 and len(said) == stdin.count(b"\n") + (
                not stdin.endswith(b"\n") and stdin != b""
            ), (stdin, said)
        if kind == 5 and not status:
            assert len(said) == len(list(data.read("a")))
        assert not list(Path().rglob("*.tmp"))
        seen[kind, status] += 1
        for file, content in sound.items():
            file.write_bytes(content)
        for file in set(after) - set(before):
            file.unlink()
        for folder in Path().glob("new*"):
            folder.rmdir() if not list(folder.iterdir()) else None
    seen.update({(1, status): seen[2, status] for status in (0, 2)})
    assert (
        min(seen[kind, status] for kind in (0, 1, 3, 5) for status in (0, 2)) >= 5
        and seen[4, 0] == 100
    ), seen


@pytest.mark.slow
@scripts
def test_killed_at_any_moment(name, files):
    """Real processes, killed a random moment after a random checkpoint, three times in a row: the same run, bit for bit."""
    folder, _ = files
    r, last = random.Random(name), folder / "parts" / "last.pt"
    go = lambda out, *more: subprocess.Popen(
        [
            sys.executable,
            str(HERE / f"{name}.py"),
            *train_flags(folder),
            *small(name),
            "--steps",
            "200",
            "--every",
            "2",
            "--out",
            str(folder / out),
            *more,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    stamp = lambda: last.stat().st_mtime_ns if last.exists() else None
    assert go("whole").wait() == 0
    for kill in range(3):
        run, before = go("parts", *["--resume"] * (kill > 0)), stamp()
        for _ in range(r.randint(1, 25)):  # checkpoints
            while stamp() == before and run.poll() is None:
                time.sleep(0.001)
            before = stamp()
        time.sleep(r.uniform(0, 0.05))
        assert run.poll() is None, run.stderr.read()
        run.kill(), run.wait()
    run = go("parts", "--resume")
    assert run.wait() == 0, run.stderr.read()
    same_run(folder / "whole", folder / "parts")


@pytest.mark.slow
@scripts
def test_many_lines_in_little_memory(name, files):
    """100,000 lines, in order, in the memory that 2,000 need and not much more; a reader that leaves is no error."""
    folder, pairs = files
    subprocess.run(
        [
            sys.executable,
            str(HERE / f"{name}.py"),
            *train_flags(folder),
            *small(name),
            "--steps",
            "60",
            "--out",
            str(folder / "run"),
        ],
        check=True,
        capture_output=True,
    )
    code = f"import sys, resource; sys.path.insert(0, {str(HERE)!r}); import {name}; {name}.main(); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    peak, said = {}, {}
    for n in (2000, 100000):
        text = "".join(
            " ".join(pairs[k % len(pairs)][0]) + "\n" if k % 7 else "\n" for k in range(n)
        )
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                "--translate",
                "--out",
                str(folder / "run"),
                "--device",
                "cpu",
            ],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        peak[n], said[n] = int(done.stderr), done.stdout.split("\n")
        assert len(said[n]) == n + 1 and not any(said[n][::7])
    assert (
        said[100000][:2000] == said[2000][:2000]
        and said[100000][420:840] == said[100000][84420:84840]
        and peak[100000] < 1.3 * peak[2000]
    ), peak
    (folder / "text").write_text(text)
    command = f"{sys.executable} {HERE / name}.py --translate --out {folder / 'run'} --device cpu < {folder / 'text'} | head -n 3"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    assert (
        done.returncode == 0 and done.stderr == "" and done.stdout.split("\n")[:3] == said[2000][:3]
    )


@scripts
def test_no_run_is_overwritten(name, tmp_path, monkeypatch):
    """Without --out each training gets a folder of its own, and the last one is used."""
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    where = lambda *args: module.folder(module.parse(args)).as_posix()
    assert where() == where("--translate") == f"runs/{name}"
    for n, want in enumerate((name, f"{name}-2")):
        (tmp_path / "runs" / want).mkdir(parents=True)
        for file in ("last.pt", "model.pt"):
            (tmp_path / "runs" / want / file).touch()
        assert (
            where("--resume") == where("--align", "a", "b") == f"runs/{want}"
            and where() == f"runs/{name}-{n + 2}"
        )
    assert where("--out", "there") == "there"


def test_two_runs_with_one_name(files, monkeypatch, capsys):
    """Whoever comes second, even while the first is still reading its text, is refused."""
    folder, _ = files
    module = importlib.import_module("bahdanau")
    go = lambda seed: module.main(
        [
            *train_flags(folder),
            *small("bahdanau"),
            "--steps",
            "2",
            "--seed",
            seed,
            "--out",
            str(folder / "run"),
        ]
    )
    learn = data.learn
    monkeypatch.setattr(
        data, "learn", lambda *a: (monkeypatch.setattr(data, "learn", learn), go("2"), learn(*a))[2]
    )
    with pytest.raises(SystemExit) as stop:
        go("1")
    assert stop.value.code == 2 and "File exists" in capsys.readouterr().err
    assert torch.load(folder / "run" / "last.pt", weights_only=True)["config"]["seed"] == 2


@scripts
def test_help_explains_every_flag(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    fields = [f.name for f in module.dataclasses.fields(module.Config)]
    for flag in [
        "train",
        "valid",
        "out",
        "translate",
        "align",
        "paper",
        "resume",
        "device",
        *fields,
    ]:
        entry = re.search(rf"^  --{flag.replace('_', '-')}\b.*?(?=^  -|\Z)", text, re.M | re.S)
        assert entry and len(entry.group().split()) > 4, flag
        if flag in fields:
            assert "(default:" in re.sub(r"\s+", " ", entry.group()), flag


def test_readme_commands_exist():
    """Every script and flag that README's commands name is there."""
    commands = re.findall(
        r"^[^#|\n]*?(\w+\.py)\b(.*)$",
        "\n".join(re.findall(r"```(?:sh|bash)\n(.*?)```", (HERE / "README.md").read_text(), re.S)),
        re.M,
    )
    assert {script for script, _ in commands} >= {"bahdanau.py", "test_all.py"}
    for script, rest in commands:
        assert (HERE / script).exists(), script
        if script[:-3] in SCRIPTS:
            source = (HERE / script).read_text()
            for flag in re.findall(r"--([a-z-]+)", rest):
                assert f'"--{flag}"' in source or re.search(
                    rf"^    {flag.replace('-', '_')}: ", source, re.M
                ), (script, flag)


def test_readme_points_at_the_right_lines():
    """The paper-to-code map: each piece of code stands on the line it is linked to."""
    rows = re.findall(r"\[`([^`]+)`\]\((\w+\.py)#L(\d+)\)", (HERE / "README.md").read_text())
    assert len(rows) >= 12
    for code, file, line in rows:
        assert code in (HERE / file).read_text().split("\n")[int(line) - 1], (code, file, line)


def test_readme_explains_the_flags_of_luong():
    text = (HERE / "README.md").read_text()
    for field in importlib.import_module("luong").dataclasses.fields(
        importlib.import_module("luong").Config
    ):
        assert re.search(rf"^\| .*`--{field.name.replace('_', '-')}\b.*<br>", text, re.M), (
            field.name
        )


def test_readme_diff_is_true():
    """Each line that README's excerpt takes away is bahdanau.py's, each that it adds is luong.py's."""
    (excerpt,) = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    text = {
        sign: (HERE / f"{name}.py").read_text().split("\n")
        for sign, name in (("-", "bahdanau"), ("+", "luong"))
    }
    lines = [line for line in excerpt.split("\n") if line]
    assert len(lines) > 20
    for line in lines:
        assert any(code.split("  #")[0].rstrip() == line[1:] for code in text[line[0]]), line


# ---- on a GPU ----------------------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GRAPHS = [
    ("seq2seq_lstm", {}),
    ("bahdanau", {}),
    ("bahdanau", dict(optimizer="adadelta", lr=1.0)),
    ("luong", {}),
    ("luong", dict(optimizer="sgd", lr=0.5)),
    ("luong", dict(input_feeding=True, attention="local-p")),
    ("transformer", dict(warmup=10)),
]


def on_gpu(name, batches, graphed, seeds=None, **changes):
    """Losses, weights and greedy translations after a step a batch, replayed from graphs or done launch by launch."""
    module, sizes = (
        importlib.import_module(name),
        {k: v if k in ("layers", "heads", "D") else 8 * v for k, v in SCRIPTS[name][1].items()},
    )
    torch.manual_seed(0)
    cfg = module.Config(**dict(src_vocab=13, tgt_vocab=11, dropout=0.0, steps=60) | sizes | changes)
    model, recorded = module.Model(cfg).cuda(), []
    with pytest.MonkeyPatch.context() as patch:
        record = (
            module.record if graphed else lambda f, inputs, *_, **__: (lambda: f(*inputs), inputs)
        )
        patch.setattr(
            module,
            "record",
            lambda f, inputs, graphs, *more, **soon: (
                record(f, inputs, graphs, *more, **soon),
                recorded.append([g for g in graphs.values() if g]),
            )[0],
        )
        step, losses = module.make_train_step(model, cfg), []
        for n, (src, tgt) in enumerate(batches):
            if seeds:
                torch.manual_seed(seeds[n])
            losses.append(step(src.cuda() if n % 2 else src, tgt.cuda() if n % 2 else tgt).item())
        trained, wide = len(recorded), [batches[k][0].cuda() for k in (0, 1, 0, 0, 2, 1)]
        tokens = [module.greedy(model, src, 3 + n % 2).tolist() for n, src in enumerate(wide)]
        tokens += [
            module.beam(model, src, 3 + n % 2, 2 + n % 2, 0.6).tolist()
            for n, src in enumerate(wide)
        ]
    assert bool(any(recorded[:trained])) == bool(any(recorded[trained:])) == graphed
    return losses, [p.detach().cpu() for p in model.parameters()], tokens


def even(seed):
    """Some shapes in any order, the sources of each batch of one length."""
    r, out = random.Random(seed), []
    for n in range(50):
        src, tgt = sentences(seed + n, *r.choice([(4, 5, 6), (3, 7, 6), (4, 5, 9)]))
        out.append(
            (torch.randint(4, 13, src.shape, generator=torch.Generator().manual_seed(n)), tgt)
        )
    return out


@cuda
@pytest.mark.parametrize("name, changes", GRAPHS)
def test_graphs_change_nothing(name, changes):
    """50 steps over shapes in any order and greedy decoding: from graphs as without them, to bf16's rounding."""
    (losses, weights, tokens), (losses_2, weights_2, tokens_2) = (
        on_gpu(name, even(1), graphed, **changes) for graphed in (True, False)
    )
    assert sum(losses[-10:]) < sum(losses[:10]) and tokens == tokens_2
    close(torch.tensor(losses), torch.tensor(losses_2), 1e-2)
    for a, b in zip(weights, weights_2):
        close(a, b, 1e-2)


@cuda
@pytest.mark.parametrize("name, changes", GRAPHS)
def test_the_seed_decides_on_a_gpu(name, changes):
    """The dropout of a replayed step is that of the seed set before it, so that a run can be gone on with."""
    runs = [
        on_gpu(name, even(2), graphed, seeds, dropout=0.3, **changes)[0]
        for graphed, seeds in (
            (True, range(50)),
            (True, range(50)),
            (False, range(50)),
            (True, range(1, 51)),
        )
    ]
    assert runs[0] == runs[1] != runs[3]
    close(torch.tensor(runs[0]), torch.tensor(runs[2]), 1e-2)


@cuda
@scripts
def test_padded_sources_on_a_gpu(name, monkeypatch):
    """Sources of several lengths are not recorded, and give the loss they give on a CPU."""
    module, cfg, model = build(name)
    src, tgt = sentences(1)
    model, other = model.float(), build(name)[2].float().cuda()
    steps = module.make_train_step(model, cfg), module.make_train_step(other, cfg)
    record = module.record
    monkeypatch.setattr(
        module,
        "record",
        lambda f, inputs, graphs, *more, **soon: (
            record(f, inputs, graphs, *more, **soon) if not graphs else pytest.fail("recorded")
        ),
    )
    for _ in range(3):
        assert steps[0](src, tgt).item() == pytest.approx(steps[1](src, tgt).item(), rel=0.1)


@cuda
@scripts
def test_a_run_on_a_gpu(name, files, capsys):
    """The command line, from training to the last line of the log, and a translation."""
    (folder, _), module = files, importlib.import_module(name)
    module.main(
        [
            *train_flags(folder),
            "--steps",
            "30",
            *small(name),
            "--device",
            "cuda",
            "--out",
            str(folder / "run"),
        ]
    )
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert (
        lines[-1]["final"]
        and [line["step"] for line in lines[:-1]] == [*range(4, 29, 4), 30]
        and lines[-2]["loss"] < lines[0]["loss"]
    )
