"""Every model against something independent: naive loops, torch.nn, sacreBLEU, exhaustive search.

python -m pytest -q test_1.py              all that is fast
python -m pytest -q -m slow test_1.py      every variant of Luong's model, and more seeds
"""

import ast
import dataclasses
import importlib
import inspect
import math
import random
import re
import warnings
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
from data import BOS, EOS, PAD, UNK

SKELETON_LINES = 360
SCRIPT_LINES = 640
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
    slow = pytest.mark.slow
    return [pytest.param(v, marks=() if v in quick else slow, id=f"{v}") for v in values]


scripts = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(params=slowly(product(MODELS, range(3)), [*product(QUICK, range(2))]))
def case(request):
    """A model's module, the model, and sentences for it."""
    name, seed = request.param
    return *build(name, seed), *sentences(seed)


@pytest.fixture(autouse=True)
def slow_when_asked(request):
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
        seen = [multi_head(p, f"{n}.attention", h, y_i, x) for y_i in y]
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
    renamed = {"self_attn": "self_attention", "multihead_attn": "attention", "in_proj_": "W_QKV."}
    renamed |= {"out_proj": "W_O", "linear1": "ffn.0", "linear2": "ffn.2", "norm": "norm_"}
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
    got, _ = ours(y, future, ours.attention.project(h, "KV"), mask)
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
    want = [(E,), (H,), *steps, (T, H)]  # each layer's input, the encoder's packed; the softmax's
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
    forced = model(src, F.pad(tokens, (1, 0), value=BOS)).argmax(-1)[:, :-1]
    for row, best in zip(tokens.tolist(), forced.tolist()):
        end = next((k for k, word in enumerate(row) if word in (EOS, PAD)), len(row))
        assert row[: end + 1] == best[: end + 1]
        assert set(row[end + 1 :]) <= {PAD}
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
    words, texts = vocabularies(13, 11), ["w4 w5 w6 w7 w8", "", "w9", " w5  unheard w4 "]
    for bias in (5, -1000):  # how likely the end is
        nn.init.constant_(model.W_o.bias[:3].detach(), bias)
        found = module.translate(model, texts, words)
        assert found == module.translate(model, [text.split() for text in texts], words)
        for text, got in zip(texts, found):
            src = torch.tensor([[words[0][word] for word in text.split()] + [EOS]])
            (row,) = module.beam(model, src, len(text.split()) + 50 if text else 0, K)
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
    model.train()  # the scores must not depend on it
    got = module.evaluate(model, pairs, words)
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
    assert module.evaluate(model, [pair[:2] for pair in pairs], words)["aer"] is None


@scripts
@pytest.mark.parametrize("pieces", [1, 2, 3, 9])
@pytest.mark.parametrize("per, smoothing, clip", [("token", 0.2, math.inf), ("sentence", 0.0, 0.1)])
def test_train_step(name, pieces, per, smoothing, clip, monkeypatch):
    """SGD moves by the step's rate times the mean loss's gradient, clipped, in so many pieces."""
    module, model = build(name, accumulate=pieces, per=per, smoothing=smoothing, clip=clip)
    weights = list(model.parameters())
    monkeypatch.setattr(module, "learning_rate", lambda cfg, step: 0.5 / step)
    optimizer = torch.optim.SGD(weights)
    for n in (1, 2):
        saved, optimizer = optimizer.state_dict(), torch.optim.SGD(weights)
        optimizer.load_state_dict(saved)  # the steps are counted on
        step = module.make_train_step(model, model.cfg, optimizer)
        src, tgt = sentences(n)
        logits = model.eval()(src, tgt[:, :-1])
        log_p = logits.log_softmax(-1)
        word = log_p.gather(-1, tgt[:, 1:, None]).squeeze(-1)
        losses = -((1 - smoothing) * word + smoothing * log_p.mean(-1))[tgt[:, 1:] != PAD]
        close(module.summed_loss(logits, tgt[:, 1:], smoothing), losses.sum())
        mean = losses.mean() if per == "token" else losses.sum() / len(src)
        grads = torch.autograd.grad(mean, weights)
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads)).item()
        want = [p - 0.5 / n * grad * min(1, clip / norm) for p, grad in zip(weights, grads)]
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
    assert len(source.splitlines()) <= SCRIPT_LINES


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
