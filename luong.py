# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Luong attention: look back after the recurrent step, everywhere or through a window, and remember where one looked.
Luong, Pham, Manning 2015, Effective Approaches to Attention-based Neural Machine Translation, arXiv 1508.04025

    h_t = LSTM([y_{t-1} ; h~_{t-1}])             the decoder's top layer; h~ only with input feeding 3.3
    score(h_t, h-_s) = h_t^T h-_s                dot; general: h_t^T W_a h-_s; concat: v_a^T tanh(W_a [h_t ; h-_s])
    a_t(s) = softmax_s(score(h_t, h-_s))         the alignment                                       (7)
    a_t = softmax(W_a h_t)                       location: instead of a score                        (8)
    p_t = S sigmoid(v_p^T tanh(W_p h_t))         centre of the window |s - p_t| <= D (local-m: t)    (9)
    a_t(s) *= exp(-(s - p_t)^2 / (2 sigma^2))    local-p only, sigma = D/2                           (10)
    c_t = sum_s a_t(s) h-_s                      the context
    h~_t = tanh(W_c [c_t ; h_t])                 the attentional state                               (5)
    p(y_t | y_<t, x) = softmax(W_s h~_t)                                                             (6)
    python luong.py                              built-in corpus: BLEU 96, AER 0.030 after 99 s on two CPU cores
    python luong.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr

Deviations from the paper
- Where the paper is silent: the source is reversed, but s counts from 1 in reading order, the end mark last, else p_t = t
  would start at the wrong end; p_t = t stops at the last word; the location score goes with global attention alone.
- By (10) a_t sums to less than 1. The model uses it so; the alpha it returns is scaled to sum to 1, as all do.
- --steps counts as the paper's 12 epochs (10 without dropout). bf16 on CUDA, for speed. The beam of 10 is ours.
- Without --paper: small, Adam, label smoothing, no input feeding, greedy, to learn in two minutes.
"""
import argparse, copy, dataclasses, inspect, io, itertools, json, math, os, re, signal, sys, time, typing, weakref, zlib
from pathlib import Path
from zipfile import ZipFile
import numpy as np, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from tqdm import tqdm
import data
from data import BOS, EOS, PAD, UNK

@dataclasses.dataclass
class Config:
    src_vocab: int = 30000  # source words kept, the most frequent ones (4 special ones counted); the others become <unk>
    tgt_vocab: int = 30000  # target words kept, likewise
    emb: int = 128          # size of a word embedding
    hidden: int = 128       # cells of each LSTM layer
    layers: int = 1         # LSTM layers, in the encoder and in the decoder
    score: typing.Literal["dot", "general", "concat", "location"] = "general"  # how h_t is compared with each h-_s, 3.1
    attention: typing.Literal["global", "local-m", "local-p"] = "global"  # to all of the source or to a window around p_t, 3.2
    input_feeding: bool = False  # h~_{t-1} is part of the decoder's next input, 3.3
    D: int = 10             # words in the window on each side of p_t
    reverse: bool = True    # read the source backwards
    dropout: float = 0.2    # on the input of each LSTM layer and on what enters the softmax
    init: float = 0.15      # every weight is drawn between this and its negative
    optimizer: typing.Literal["adam", "sgd"] = "adam"  # sgd is the paper's
    lr: float = 0.006       # learning rate
    warmup: int = 30        # steps until Adam's learning rate is reached; from there it falls to 0
    clip: float = 1.0       # a gradient of greater norm is scaled down to it
    smoothing: float = 0.1  # label smoothing; the paper has none
    per: typing.Literal["token", "sentence"] = "token"  # the gradient is that of the mean loss of a token, or of a sentence
    tokens: int = 1024      # source and target tokens in a batch of one process, padding counted
    sentences: int = 1000   # sentences in a batch of one process at most
    steps: int = 1700       # training steps
    every: int = 200        # steps between two looks at the validation set
    max_len: int = 0        # words in a sentence to train on at most (0: 30 in the built-in corpus, 100 in your own text)
    min_count: int = 1      # rarer words become <unk>
    joint: bool = False     # one vocabulary for both languages, of --src-vocab words
    beam: int = 1           # hypotheses kept in decoding; 1 is greedy
    alpha: float = 0.0      # in decoding log p is divided by the length penalty ((5 + |y|) / 6)^alpha
    replace_unk: bool = False  # an <unk> in a translation becomes the source word it is aligned with
    average: int = 1        # the weights used are the mean of those at the last so many looks at the validation set, if above 1
    seed: int = 1           # of all that is random
    def __post_init__(self):
        if self.score == "location" and self.attention != "global":
            raise data.InputError("--score location gives weights to the whole source; use it with --attention global")
    @classmethod
    def paper(cls, **overrides):
        """Section 4.1, the best single model of table 1. 12 epochs of 4.5 million pairs, 128 a batch, are 421,875 steps."""
        return cls(**dict(src_vocab=50000, tgt_vocab=50000, emb=1000, hidden=1000, layers=4, attention="local-p", beam=10,
                          input_feeding=True, init=0.1, smoothing=0.0, optimizer="sgd", lr=1.0, clip=5.0, per="sentence",
                          sentences=128, tokens=13184, max_len=50, steps=421875, every=5000, replace_unk=True) | overrides)

# x source, y target, h_t decoder's state, h_bar (h-) encoder's states, a_t alignment, c_t context, h_tilde (h~), p_t centre.
# Shapes: B batch, S source length, T target length (1 when stepping), E embedding, H hidden, L layers, V vocabulary.
class LuongAttention(nn.Module):
    """Where in the source is target word t? Asked of one step or of all at once."""
    def __init__(self, hidden, score="general", attention="global", D=10, positions=101):
        super().__init__()
        self.score, self.attention, self.D = score, attention, D
        weight = lambda *shape: nn.Parameter(torch.empty(shape).uniform_(-0.1, 0.1))
        if score == "general": self.W_a = weight(hidden, hidden)
        if score == "concat": self.W_a, self.v_a = weight(hidden, 2 * hidden), weight(hidden)
        if score == "location": self.W_a = weight(positions, hidden)              # words past the last position get nothing
        if attention == "local-p": self.W_p, self.v_p = weight(hidden, hidden), weight(hidden)
    def keys(self, h_bar):                                        # what of the score does not depend on t: once a sentence
        if self.score == "general": return h_bar @ self.W_a.T                     # W_a h-_s                    (B,S,H)
        if self.score == "concat": return h_bar @ self.W_a[:, h_bar.size(-1):].T  # h-_s's half of W_a [h_t ; h-_s]
        return h_bar
    def forward(self, h_t, keys, h_bar, length, t):               # h_t (B,T,H)  keys, h_bar (B,S,H)  length (B,)  t (T,) from 1
        S, s = length.view(-1, 1, 1).float(), torch.arange(1.0, h_bar.size(1) + 1, device=h_bar.device)
        if self.score in ("dot", "general"): e = h_t @ keys.mT                                         # (B,T,S)
        if self.score == "concat": e = ((h_t @ self.W_a.T[:len(self.W_a)]).unsqueeze(2) + keys.unsqueeze(1)).tanh() @ self.v_a
        if self.score == "location": e = F.pad(h_t @ self.W_a.T, (0, len(s) - len(self.W_a)), value=-torch.inf)   # eq. (8)
        if self.attention == "global": outside = s > S                                                 # padding
        if self.attention == "local-m": p_t = torch.minimum(t.view(-1, 1), S)                          # p_t = t, at most S
        if self.attention == "local-p": p_t = S * torch.sigmoid(torch.tanh(h_t @ self.W_p.T) @ self.v_p).unsqueeze(-1)  # (9)
        if self.attention != "global": outside = (s > S) | ((s - p_t).abs() > self.D)                  # and beyond the window
        a_t = e.masked_fill(outside, -torch.inf).softmax(-1)                                           # eq. (7)   (B,T,S)
        if self.attention == "local-p": a_t = a_t * torch.exp(-(s - p_t) ** 2 / (2 * (self.D / 2) ** 2))   # eq. (10)
        return a_t.to(e.dtype) @ h_bar, a_t                                                            # c_t (B,T,H), a_t

class DeepLSTM(nn.Module):  # with dropout on the input of each layer; torch's own cannot be recorded: a new seed makes it wait
    def __init__(self, size, hidden, layers, dropout):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(hidden if n else size, hidden, batch_first=True) for n in range(layers))
        self.drop = nn.Dropout(dropout)
    def forward(self, x, state=None):                                    # x (B,T,E) or packed  state: h and c, each (L,B,H)
        last = [state and tuple(part[n:n + 1] for part in state) for n in range(len(self.layers))]
        for n, layer in enumerate(self.layers):
            x, last[n] = layer(self.drop(x) if torch.is_tensor(x) else x._replace(data=self.drop(x.data)), last[n])
        return x, tuple(map(torch.cat, zip(*last)))

class LuongNMT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.E_x, self.E_y = (nn.Embedding(n, cfg.emb) for n in (cfg.src_vocab, cfg.tgt_vocab))
        self.encoder = DeepLSTM(cfg.emb, cfg.hidden, cfg.layers, cfg.dropout)
        self.decoder = DeepLSTM(cfg.emb + cfg.hidden * cfg.input_feeding, cfg.hidden, cfg.layers, cfg.dropout)
        self.attention = LuongAttention(cfg.hidden, cfg.score, cfg.attention, cfg.D, positions=(cfg.max_len or 100) + 1)
        self.W_c, self.W_s = (nn.Linear(*n, bias=False) for n in ((2 * cfg.hidden, cfg.hidden), (cfg.hidden, cfg.tgt_vocab)))
        self.drop, self.reverse, self.input_feeding = nn.Dropout(cfg.dropout), cfg.reverse, cfg.input_feeding
        for p in self.parameters(): nn.init.uniform_(p, -cfg.init, cfg.init)      # section 4.1
    def encode(self, src):
        length, place, x = (src != PAD).sum(1, keepdim=True), torch.arange(src.size(1), device=src.device), self.E_x(src)
        turn = ((length - 1 - place) % src.size(1)).unsqueeze(-1)     # turns the words around, padding stays behind them
        if self.reverse: x = x.gather(1, turn.expand_as(x))
        pack = not one_length(src)
        if pack: x = nn.utils.rnn.pack_padded_sequence(x, length.squeeze(1).cpu(), batch_first=True, enforce_sorted=False)
        h_bar, state = self.encoder(x)                                # state: every layer's h and c after the last word
        if pack: h_bar, _ = nn.utils.rnn.pad_packed_sequence(h_bar, batch_first=True, total_length=src.size(1))
        if self.reverse: h_bar = h_bar.gather(1, turn.expand_as(h_bar))           # turned again: in reading order
        return self.attention.keys(h_bar), h_bar, length.squeeze(1), *state       # (B,S,H), (B,S,H), (B,), 2 x (L,B,H)
    def start(self, memory, room=None):
        _, h_bar, length, h, c = memory
        return h, c, torch.zeros_like(h_bar[:, 0]), torch.ones_like(length[:1])                     # h, c, h~_0, t = 1
    def pick(self, state, rows): return *(x[:, rows] for x in state[:2]), state[2][rows], state[3]   # of some hypotheses
    def attend(self, h_t, memory, t):                                             # h_t (B,T,H)  t (T,)
        c_t, a_t = self.attention(h_t, *memory[:3], t)
        return torch.tanh(self.W_c(torch.cat([c_t, h_t], -1))), a_t                                 # eq. (5)   (B,T,H), (B,T,S)
    def advance(self, y, state, memory):                                          # y (B,E): one step
        h, c, h_tilde, t = state
        x, layers = torch.cat([y, h_tilde], -1) if self.input_feeding else y, []                    # section 3.3
        for layer, *last in zip(self.decoder.layers, h, c):
            layers.append(torch.lstm_cell(self.drop(x), last, *layer.all_weights[0]))
            x = layers[-1][0]
        h, c = map(torch.stack, zip(*layers))
        h_tilde, a_t = self.attend(x.unsqueeze(1), memory, t)
        return (h, c, h_tilde.squeeze(1), t + 1), a_t
    def step(self, y, state, memory):                                             # y (B,)
        state, _ = self.advance(self.E_y(y), state, memory)
        return self.W_s(self.drop(state[2])), state                                                 # eq. (6)
    def forward(self, src, tgt_in, need_alpha=False):
        y, state, steps = self.E_y(tgt_in), self.start(memory := self.encode(src)), []            # (B,T,E)
        if self.input_feeding:                                    # every step waits for the h~ of the one before
            for y_t in y.unbind(1):
                state, a_t = self.advance(y_t, state, memory)
                steps.append((state[2], a_t.squeeze(1)))
            h_tilde, a_t = (torch.stack(x, 1) for x in zip(*steps))               # (B,T,H), (B,T,S)
        else:                                                     # none does: the whole target in one call
            h_t, _ = self.decoder(y, state[:2])
            h_tilde, a_t = self.attend(h_t, memory, torch.arange(1, tgt_in.size(1) + 1, device=src.device))
        logits = self.W_s(self.drop(h_tilde))                                     # eq. (6)   (B,T,V)
        return (logits, a_t / a_t.sum(-1, keepdim=True)) if need_alpha else logits

def make_optimizer(model, cfg):
    return (torch.optim.SGD if cfg.optimizer == "sgd" else torch.optim.Adam)(model.parameters(), lr=cfg.lr)
def learning_rate(cfg, step):
    if cfg.optimizer == "adam": return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    epochs, constant = (12, 8) if cfg.dropout else (10, 5)        # section 4.1: after the constant ones, halved with each
    return cfg.lr * 0.5 ** max(epochs * (step - 1) // cfg.steps - constant + 1, 0)
Model, Parts = LuongNMT, (LuongAttention,)                      # Parts: what torch.compile fuses, if there are steps enough

# ---- the same in every script from here on ----

def ranks(): return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
def one_length(src):  # is no source padded? While a graph is recorded nobody can look, but only such are: see make_train_step
    return src.is_cuda and torch.cuda.is_current_stream_capturing() or bool((src[:, -1] != PAD).all())
def twin(model):  # what computes: on CUDA a model like it in bf16, with weights still to be copied; elsewhere the model itself
    if not next(model.parameters()).is_cuda: return model
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention makes a plan for every new shape, and takes long over it
    with torch.inference_mode(False): copied = copy.deepcopy(model).half()  # LSTMs lay out half for cuDNN, but not bf16
    for p in copied.parameters(): p.data = p.data.view(torch.bfloat16)
    return copied

def record(f, inputs, graphs, most, at_once=False):
    """(g, places): g() is f(*places), and places hold the inputs. On CUDA, when inputs of these shapes come a second time, f is
    recorded as a graph (at_once: the first time, but for the very first call), and replayed from then on: one launch."""
    key = tuple(x.shape for x in inputs)
    if key not in graphs and len(graphs) > most: graphs.popitem()  # the newest makes room: those that come often came first
    if not inputs[0].is_cuda or key not in graphs and not (at_once and graphs):
        graphs[key] = None
        return lambda: f(*inputs), inputs
    if not graphs.get(key):
        places, graph, recorded = [x.clone() for x in inputs], torch.cuda.CUDAGraph(), [g for g in graphs.values() if g]
        pool, stream = (recorded[0][0].pool(), recorded[0][3]) if recorded else (None, torch.cuda.Stream(inputs[0].device))
        with torch.cuda.stream(stream):  # not torch.cuda.graph, which empties the cache every time: once is enough
            torch.cuda.synchronize(), recorded or torch.cuda.empty_cache(), graph.capture_begin(pool, "relaxed")
            try: graphs[key] = graph, places, f(*places), stream
            finally: graph.capture_end()
    graph, places, out, _ = graphs[key]
    for place, x in zip(places, inputs): place.copy_(x)
    return lambda: graph.replay() or out, places
def nll(logits, y, eps=0.0):  # negative log-likelihood of y (B,T), summed, label-smoothed by eps, 0 for padding
    z, y, V = logits.to(torch.promote_types(logits.dtype, torch.float)).flatten(0, 1), y.flatten(), logits.size(-1)
    if not torch.compiler.is_compiling(): return F.cross_entropy(z, y, ignore_index=PAD, reduction="sum", label_smoothing=eps)
    q = (torch.arange(V, device=y.device) == y.unsqueeze(1)).to(z) * (1 - eps) + eps / V  # the same, but the compiler fuses it
    return ((z.logsumexp(-1) - (q * z).sum(-1)) * (y != PAD)).sum()

def make_train_step(model, cfg, optimizer=None):
    """step(src, tgt) -> loss per target token: forward, backward, clip, update; on CUDA in bf16, weights in float32."""
    optimizer, (_, world), device = optimizer or make_optimizer(model, cfg), ranks(), next(model.parameters()).device
    cuda, graphs, inner, loss_fn = device.type == "cuda", {}, twin(model), nll
    weights, copies = list(model.parameters()), list(inner.parameters())
    if cuda and cfg.steps >= 50000:  # that many win back the minute that compiling takes
        torch._dynamo.config.suppress_errors, loss_fn, tune = True, torch.compile(nll), torch._inductor.config.triton
        if hasattr(tune, "mix_order_reduction"): tune.mix_order_reduction = False  # torch 2.11: a slower gradient of LayerNorm
        for part in inner.modules(): isinstance(part, Parts) and part.compile()
    net = nn.parallel.DistributedDataParallel(inner) if world > 1 else inner
    for p in weights: p.grad = torch.zeros_like(p) if cuda else None
    for g in optimizer.param_groups: g.update(lr=torch.zeros((), device=device) if cuda else 0.0, capturable=cuda, fused=cuda)
    def update(src, tgt):
        with torch.no_grad(): cuda and torch._foreach_copy_(copies, weights)
        count, logits = torch.stack([(tgt[:, 1:] != PAD).sum(), (tgt[:, 0] != PAD).sum()]), net(src, tgt[:, :-1])
        if world > 1: dist.all_reduce(count)  # a token weighs the same on whichever process it is
        scale = world / count[0 if cfg.per == "token" else 1]  # times world: DistributedDataParallel takes the processes' mean
        ((loss := loss_fn(logits, tgt[:, 1:], cfg.smoothing)) * scale).backward()
        if cuda: torch._foreach_copy_([p.grad for p in weights], [p.grad for p in copies])
        if cfg.clip < math.inf: nn.utils.clip_grad_norm_(weights, cfg.clip)
        optimizer.step(), inner.zero_grad()
        if world > 1: dist.all_reduce(loss := loss.detach())
        return loss.detach() / count[0]
    def step(src, tgt):
        inner.training or inner.train()
        for group in optimizer.param_groups:
            group["step"] = n = group.get("step", 0) + 1  # the optimizer keeps the count
            group["lr"] = group["lr"].fill_(learning_rate(cfg, n)) if cuda else learning_rate(cfg, n)
        again = graphs if world == 1 and one_length(src) else {}
        src, tgt = ((x.pin_memory() if cuda and not x.is_cuda else x).to(device, non_blocking=cuda) for x in (src, tgt))
        return record(update, (src, tgt), again, most=500, at_once=loss_fn is nll)[0]().clone()  # nothing compiles meanwhile
    return step
def beam(model, src, max_len, K, alpha=0.0, kept=weakref.WeakKeyDictionary()):
    """The best of K hypotheses a sentence by log p / ((5 + |y|) / 6)^alpha, Wu et al. 2016: (B,T'), EOS kept, PAD after it.
    One that has ended keeps its score and its place. max_len, one for all or one each, counts EOS."""
    net, graphs = src.is_cuda and kept.get(model) or (twin(model).eval(), {})
    if net is not model: kept[model] = net, graphs
    def step(out, y, t, left, score, alpha, *rest):  # all of them changed in place
        (logits, state), ended = net.step(y, rest[n:], rest[:n]), (left <= 0).unsqueeze(1)                   # (BK,V), (BK,1)
        if K == 1: y.copy_(logits.argmax(-1).masked_fill_(left <= 0, PAD))  # greedy: the likeliest word
        else:
            (log_p := logits.log_softmax(-1, score.dtype))[:, PAD].fill_(-torch.inf)
            gain, words = log_p.topk(min(K, log_p.size(1)))  # no more of a hypothesis can be among the best     (BK,K) each
            gain.masked_fill_(ended, -torch.inf)[:, :1].masked_fill_(ended, 0)  # after the end nothing follows, at no cost
            total, length = score.view(-1, 1) + gain, ((out != PAD).sum(1, True) + ~ended).to(score.dtype)
            best = (total / ((5 + length) / 6) ** alpha).view(len(score), -1).topk(K)[1]                     # (B,K) of K K
            best += total.numel() // len(score) * torch.arange(len(score), device=y.device).unsqueeze(1)     # of all in total
            score.copy_(total.flatten()[best]), y.copy_(words.masked_fill_(ended, PAD).flatten()[best.flatten()])
            state, *_ = net.pick(state, rows := best.flatten() // gain.size(1)), out.copy_(out[rows]), left.copy_(left[rows])
        out.scatter_(1, t.expand(len(y), 1), y.unsqueeze(1)), t.add_(1), left.sub_(1).masked_fill_((y == EOS) | (y == PAD), 0)
        for old, new in zip(rest[n:], state): old.copy_(new)
    with torch.inference_mode():
        if net is not model: torch._foreach_copy_(list(net.parameters()), list(model.parameters()))
        left = torch.as_tensor(max_len).to(src).expand(len(src)).repeat_interleave(K)
        memory, longest, zero = net.encode(src.repeat_interleave(K, 0)), int(left.max()), src.new_zeros(1)
        n, exact = len(memory), torch.promote_types(next(net.parameters()).dtype, torch.float)
        score = torch.tensor([[0.0] + [-math.inf] * (K - 1)] * len(src), dtype=exact, device=src.device)     # one begins
        places = (src.new_full((len(left), room := longest + -longest % 8), PAD), torch.full_like(left, BOS), zero, left, score)
        places += (score.new_tensor(alpha), *memory, *net.start(memory, room))  # room: in eights, so that shapes come again
        for t in range(longest):
            if (t % 8 == 0 or not src.is_cuda) and (places[3] <= 0).all(): break  # rarely: to look is to wait for the GPU
            if t < 2: go, places = record(step, places, graphs, most=1)
            go()
    return (out := places[0][::K])[:, :max(int((out != PAD).sum(1).max()), min(longest, 1))].clone()  # each first one
def greedy(model, src, max_len): return beam(model, src, max_len, 1)

@torch.no_grad()
def align(model, src, tgt): return model.eval()(src, tgt[:, :-1], need_alpha=True)[1]  # alpha (B,T,S) of a given target
def each(use, model, pairs, vocabularies, tokens=4096):  # use(src, tgt) of all pairs, like lengths in a batch; results in order
    bitext, device, out = data.Bitext(pairs, vocabularies), next(model.parameters()).device, [None for _ in pairs]
    for rows in bitext.cut(tokens):
        for row, result in zip(rows, use(*(torch.from_numpy(x).to(device) for x in bitext.batch(rows)))): out[row] = result
    return out
def translate(model, sentences, vocabularies, cfg=Config()):
    search = lambda src, _: beam(model, src, (2 * (n := (src != PAD).sum(1)) + 8) * (n > 1), cfg.beam, cfg.alpha).tolist()
    found = each(search, model, [(words, []) for words in sentences], vocabularies, max(4096 // cfg.beam, 1))  # n counts EOS
    found = [[vocabularies[1].words[i] for i in ids if i not in (PAD, EOS)] for ids in found]
    if not cfg.replace_unk: return found
    alphas = alignments(model, pairs := list(zip(sentences, found)), vocabularies)
    return [[x[a[:-1].argmax()] if w == "<unk>" else w for a, w in zip(alpha, y)] for alpha, (x, y) in zip(alphas, pairs)]
def alignments(model, pairs, vocabularies):  # alpha of each pair, target words and EOS by source words and EOS
    found = each(lambda src, tgt: align(model, src, tgt).float().cpu().numpy(), model, pairs, vocabularies)
    return [alpha[:len(target) + 1, :len(source) + 1] for alpha, (source, target, *_) in zip(found, pairs)]
@torch.no_grad()
def loss_of(model, pairs, vocabularies):  # per target token, EOS counted
    loss = lambda src, tgt: map(nll, model.eval()(src, tgt[:, :-1]).unsqueeze(1), tgt[:, None, 1:])
    return float(sum(each(loss, model, pairs, vocabularies))) / sum(len(p[1]) + 1 for p in pairs)
def evaluate(model, pairs, vocabularies, cfg=Config()):  # translations against the references, alignments against gold, if any
    hypotheses, buckets = translate(model, [p[0] for p in pairs], vocabularies, cfg), {}
    for (source, target, *_), hypothesis in zip(pairs, hypotheses):
        buckets.setdefault(max(len(source) - 1, 0) // 10, []).append((hypothesis, target))
    loss, gold = loss_of(model, pairs, vocabularies), [p[2] for p in pairs if len(p) > 2]
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bleu": data.bleu(hypotheses, [p[1] for p in pairs]),
            "aer": data.aer([data.links(alpha) for alpha in alignments(model, pairs, vocabularies)], gold) if gold else None,
            "bleu_by_length": {f"{10 * k + 1}-{10 * k + 10}": data.bleu(*zip(*v)) for k, v in sorted(buckets.items())}}

def dump(path, pairs, alphas):  # .npz: the soft weights; .txt: Pharaoh links, a line a pair; .svg: the first pair as a picture
    sides = {side: [" ".join(pair[k]) for pair in pairs] for k, side in enumerate(("source", "target"))}
    np.savez_compressed(soft := io.BytesIO(), **sides, **{f"alpha_{k}": alpha for k, alpha in enumerate(alphas)})
    save(f"{path}.npz", soft.getvalue())
    save(f"{path}.txt", "".join(data.pharaoh(alpha) + "\n" for alpha in alphas).encode())
    save(f"{path}.svg", data.svg(*pairs[0][:2], alphas[0]).encode())
def save(path, content):  # whole or not at all: beside the old file, then in its place; of several processes the first one does
    part = Path(f"{path}.tmp")
    if ranks()[0]: return
    try:
        with open(part, "wb") as file: file.write(content), file.flush(), os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error: raise data.InputError(f"{path}: not written, {error.strerror}; what was there is whole") from None
    finally: part.unlink(missing_ok=True)
def note(out, log): save(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log).encode())
def load(path, device, flags={}, keys=("model",)):  # (checkpoint, vocabularies); a few flags may be new, the others are the run
    if not path.exists(): raise data.InputError(f"{path}: no such file; train first, or name the run's folder with --out")
    try:
        with ZipFile(path) as parts: fault = parts.testzip()  # torch.load would not notice a changed byte
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        script, config, words = (checkpoint[key] for key in ("script", "config", "words"))
        if script == Path(__file__).stem: Config(**config), [checkpoint[key] for key in keys]
    except Exception as error: fault = type(error).__name__
    if fault: raise data.InputError(f"{path}: not a sound checkpoint ({fault}); copy it again, or train again")
    if script != Path(__file__).stem: raise data.InputError(f"{path}: made by {script}.py; use that")
    for name in flags.keys() - {"src_vocab", "tgt_vocab"}:
        if name in "steps every lr warmup clip align_layer beam alpha replace_unk average".split(): config[name] = flags[name]
        if flags[name] != config[name]: fail(f"--{name}: {config[name]} in this run; leave it out".replace("_", "-"))
    return checkpoint, [data.Vocabulary(side) for side in words]

def restore(out, device, flags={}):  # (model, its Config, vocabularies): the best one, or the mean of the last --average ones
    checkpoint, vocabularies = load(out / "model.pt", device, flags)
    model = Model(cfg := Config(**checkpoint["config"])).to(device)
    last = sorted(out.glob("step-*.pt"))[-cfg.average:] if cfg.average > 1 else [out / "model.pt"]
    if not last: raise data.InputError(f"{out}: holds no checkpoints to average; train with --average {cfg.average}")
    weights = [load(path, device)[0]["model"] for path in last]
    model.load_state_dict({name: sum(w[name] for w in weights) / len(weights) for name in weights[0]})
    return model, cfg, vocabularies
def fit(model, cfg, corpus, valid, vocabularies, out, resume=None):
    """Trains for cfg.steps. out/model.pt is the model that scored best on valid, out/last.pt all it takes to go on exactly."""
    (rank, world), device, optimizer, noted = ranks(), next(model.parameters()).device, make_optimizer(model, cfg), []
    now = resume["now"] if resume else {"step": 0, "epoch": 0, "batch": 0, "tokens": 0, "seconds": 0.0, "log": []}
    text = [world, zlib.crc32(repr([pair[:2] for pair in valid]).encode()), *map(zlib.crc32, corpus.tokens)]  # to know it again
    if resume and resume["text"] != text: raise data.InputError(f"{out}: had another text or number of processes; give that")
    if resume: model.load_state_dict(resume["model"]), optimizer.load_state_dict(resume["optimizer"])
    def keep(name):
        content = {"script": Path(__file__).stem, "config": vars(cfg), "words": [v.words for v in vocabularies]}
        if name == "last.pt": content |= {"optimizer": optimizer.state_dict(), "now": now, "text": text}
        torch.save(content | {"model": model.state_dict()}, memory := io.BytesIO())  # torch.save crashes when the disk is full
        save(out / name, memory.getbuffer())
    if not resume: keep("last.pt")
    before = {n: signal.signal(n, lambda n, _: noted.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    train_step, clock, told, late = make_train_step(model, cfg, optimizer), time.perf_counter(), False, []
    even, score = device.type == "cuda" and world == 1, math.nan  # even: shapes come again, see record
    with tqdm(total=cfg.steps, initial=now["step"], unit="step", disable=True if rank else None) as bar:
        while now["step"] < cfg.steps and not told:
            for src, tgt in corpus.epoch(cfg.tokens, cfg.sentences, cfg.seed, now["epoch"], now["batch"], rank, world, even):
                torch.manual_seed(hash((cfg.seed, rank, now["step"])))  # so that no random state need be saved
                loss = train_step(torch.from_numpy(src), torch.from_numpy(tgt))
                count = torch.tensor([(src[tgt[:, 0] != PAD] != PAD).sum() + (tgt[:, 1:] != PAD).sum(), len(noted)])
                if world > 1: dist.all_reduce(count)
                now.update(step=(step := now["step"] + 1), batch=now["batch"] + 1, tokens=now["tokens"] + int(count[0]))
                rate, told, look = learning_rate(cfg, step), bool(count[1]), step == cfg.steps or step % cfg.every == 0
                at = f"step {step}, epoch {now['epoch']}, batch {now['batch']}, learning rate {rate:.2g}"
                late += [(at, loss)] + [(at, loss_of(model, valid, vocabularies)) for _ in range(look or told)]
                for _ in range(len(late) * (look or told or len(late) > 20 * even)):  # seldom: reading waits for the GPU
                    at, score = late.pop(0)
                    if not math.isfinite(score): raise data.InputError(f"{at}: the loss is {score:f}; --resume with lower --lr")
                now["seconds"], clock = now["seconds"] + time.perf_counter() - clock, time.perf_counter()
                bar.set_postfix(loss=f"{score:.3f}", refresh=False), bar.update()
                if look and all(score < line["valid_loss"] for line in now["log"]): keep("model.pt")
                if look and cfg.average > 1: keep(f"step-{step:09}.pt")
                for old in sorted(out.glob("step-*.pt"))[:-cfg.average] * (look and cfg.average > 1): old.unlink(True)
                if look: now["log"].append(dict(step=step, loss=float(loss), valid_loss=score, lr=rate, seconds=now["seconds"]))
                if look or told: keep("last.pt"), note(out, now["log"])
                if told or step == cfg.steps: break
            else: now.update(epoch=now["epoch"] + 1, batch=0)
    for number, handler in before.items(): signal.signal(number, handler)
    if noted or told: raise KeyboardInterrupt(f"stopped at step {now['step']}; repeat the command with --resume --out {out}")
    return now
def train(args, device):
    begin, out, resume, new = time.perf_counter(), folder(args), None, not folder(args).exists()
    if args.resume: resume, vocabularies = load(out / "last.pt", device, args.config, ("model", "optimizer", "now", "text"))
    elif ranks()[0] == 0 and (out.is_file() or any(out.glob("*.pt")) or (out / "log.jsonl").exists()):
        raise data.InputError(f"{out}: is a file or holds a run already; add --resume, or name another --out")
    if bool(args.train) != bool(args.valid): raise data.InputError("--train SRC TGT and --valid SRC TGT go together; give both")
    cfg = Config(**resume["config"] if resume else args.config)
    if args.train:
        pairs, valid = data.read_pairs(*args.train), list(data.read_pairs(*args.valid))
        if not valid: raise data.InputError(f"{args.valid[0]}: is empty; give at least one pair")
        test, example = valid, valid[0][0]  # your own text is scored on what the best model was chosen by
    else:
        sizes, example = {"train": 50000, "valid": 500, "test": 1000}, data.EXAMPLE.split()
        pairs, valid, test = (data.toy(n, max_len=cfg.max_len or 30, split=split) for split, n in sizes.items())
    limit = (cfg.max_len or 100) if args.train else None  # the built-in corpus keeps to it by itself
    if resume: corpus = data.Bitext(pairs, vocabularies, limit)
    else: corpus, vocabularies = data.learn(pairs, (cfg.src_vocab, cfg.tgt_vocab), cfg.min_count, cfg.joint, limit)
    cfg.src_vocab, cfg.tgt_vocab = (len(v.words) for v in vocabularies)
    if not len(corpus): raise data.InputError(f"{args.train[0]}: no pair of 1 to {limit} words a side; see --max-len")
    unknown = max(float((x == UNK).sum() / (x > EOS).sum()) for x in corpus.tokens)
    if unknown > 0.2: warn(f"{unknown:.0%} of the words on one side become <unk>; see --src-vocab, --tgt-vocab and --min-count")
    torch.manual_seed(cfg.seed)
    model = Model(cfg).to(device)
    print(f"{len(corpus):,} pairs, {corpus.skipped:,} left out; {cfg.src_vocab:,} and {cfg.tgt_vocab:,} words; "
          f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    if ranks()[0] == 0: out.mkdir(parents=True, exist_ok=not new)  # two runs cannot both make it
    now = fit(model, cfg, corpus, valid, vocabularies, out, resume)
    if ranks()[0] == 0: report(cfg, test, example, device, out, now, begin)
def report(cfg, test, example, device, out, now, begin):
    (model, _, vocabularies), sources = restore(out, device, vars(cfg)), [example] + [p[0] for p in test[:99]]
    scores = evaluate(model, test, vocabularies, cfg)
    alphas = alignments(model, pairs := list(zip(sources, translate(model, sources, vocabularies, cfg))), vocabularies)
    dump(out / "align", pairs, alphas)
    seconds, speed, memory = time.perf_counter() - begin, now["tokens"] / now["seconds"], peak_memory(device)
    final = dict(final=True, **scores, seconds=seconds, tokens_per_second=speed, peak_memory_gib=memory, seed=cfg.seed)
    note(out, now["log"] + [final])
    print(f"\n{' '.join(pairs[0][0])}\n{' '.join(pairs[0][1])}\n\n{data.heatmap(*pairs[0], alphas[0])}\n")
    print(f"{len(test):,} sentences: loss {scores['loss']:.4f}, perplexity {scores['ppl']:.3f}, BLEU {scores['bleu']:.2f}"
          + (f", AER {scores['aer']:.3f}" if scores["aer"] is not None else ""))
    print("BLEU by source length:", ", ".join(f"{k}: {v:.1f}" for k, v in scores["bleu_by_length"].items()))
    print(f"{speed:,.0f} tokens/s, {memory:.2f} GiB at most, {seconds:.0f} s in all; everything is in {out}/", flush=True)
def peak_memory(device):
    if device.type == "cuda": return torch.cuda.max_memory_reserved(device) / 2**30
    try: return __import__("resource").getrusage(0).ru_maxrss / 2**(30 if sys.platform == "darwin" else 20)
    except ImportError: return 0.0  # Windows does not tell
def answer(args, device):  # --translate or --align: a line for each line, whatever it is, a thousand at a time
    model, cfg, vocabularies = restore(folder(args), device, args.config)
    lines = enumerate(data.read_pairs(*args.align) if args.align else zip(data.read(0), itertools.repeat([])), 1)
    while chunk := dict(itertools.islice(lines, 1000)):
        for number in [number for number, pair in chunk.items() if max(map(len, pair)) > 1000]:
            chunk[number] = [], warn(f"line {number}: more than 1,000 words; left empty") or []
        if args.align: said = map(data.pharaoh, alignments(model, list(chunk.values()), vocabularies))
        else: said = map(" ".join, translate(model, [source for source, _ in chunk.values()], vocabularies, cfg))
        print(*said, sep="\n", flush=True)

def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error, parser.formatter_class = lambda message: fail(f"{message}; see --help"), argparse.RawDescriptionHelpFormatter
    flag, mode, pair = parser.add_argument, parser.add_mutually_exclusive_group(), dict(nargs=2, metavar=("SRC", "TGT"))
    devices = ["cpu"] + ["mps"] * torch.backends.mps.is_available() + ["cuda"] * torch.cuda.is_available()
    mode.add_argument("--train", **pair, help="text to learn from, aligned line by line, or .gz (default: the built-in corpus)")
    mode.add_argument("--translate", action="store_true", help="translate stdin to stdout, line for line")
    mode.add_argument("--align", **pair, help="write the alignment of two files to stdout, as Pharaoh pairs i-j")
    flag("--valid", **pair, help="text to choose the best model by, and to score it on")
    flag("--out", type=Path, help="the run's folder (default: runs/ and the script's name, then -2, -3, ...; to use, the last)")
    flag("--resume", action="store_true", help="go on with the run in --out; its --train and --valid must be given again")
    flag("--paper", action="store_true", help="the paper's sizes and recipe")
    flag("--device", choices=devices, default=devices[-1], help="cpu, cuda or mps (default: the best there is)")
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Config), re.M))
    for name, field in Config.__dataclass_fields__.items():
        kind = {bool: dict(action=argparse.BooleanOptionalAction)}.get(field.type, dict(type=field.type))
        if typing.get_args(field.type): kind = dict(choices=typing.get_args(field.type))
        paper = getattr(Config.paper(), name)
        text = f"{comments[name]} (default: {field.default}" + f", --paper: {paper}" * (paper != field.default) + ")"
        flag("--" + name.replace("_", "-"), default=None, help=text.replace("%", "%%"), **kind)
    args = parser.parse_args(argv)
    args.config = {name: value for name, value in vars(args).items() if name in comments and value is not None}
    lows = dict(src_vocab=5, tgt_vocab=5, seed=0, max_len=0, align_layer=0, dropout=0, smoothing=0, alpha=0)
    highs = dict(dropout=0.99, smoothing=0.99, clip=math.inf, alpha=10)
    for name, value in ((name, value) for name, value in args.config.items() if type(value) in (int, float)):
        low, high = lows.get(name, 1 if type(value) is int else 1e-9), highs.get(name, 2**31)
        if not low <= value <= high: fail(f"--{name} {value}: must be {low} to {high}".replace("_", "-"))
    if args.paper: args.config = vars(Config.paper(**args.config))
    return args
def folder(args):  # --out or, without it, the next free folder to train in, or the last one to go on with or to use
    names = [Path("runs", Path(__file__).stem + (f"-{n}" if n > 1 else "")) for n in range(1, 1000)]
    taken = list(itertools.takewhile(Path.exists, names))
    return args.out or ((taken or names[:1])[-1] if args.translate or args.align or args.resume else names[len(taken)])
def warn(message):
    if os.environ.get("RANK", "0") == "0": print(f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
def fail(message, status=2): sys.exit(warn(message) or status)

def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"): sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    torch.backends.mkldnn.set_flags(False)  # slower with it: README
    try:
        args, process, gpus = parse(argv), os.environ.get("LOCAL_RANK"), torch.cuda.device_count()  # process: of torchrun's
        cuda = process and args.device == "cuda"
        if cuda and int(os.environ["LOCAL_WORLD_SIZE"]) > gpus: raise data.InputError(f"--nproc_per_node={gpus} at most")
        if cuda: torch.cuda.set_device(int(process))
        if process: dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        if ranks()[0]: sys.stdout = open(os.devnull, "w")  # the first one speaks
        if not (args.translate or args.align): train(args, torch.device(args.device))
        elif ranks()[0] == 0: answer(args, torch.device(args.device))
        if process: dist.destroy_process_group()
    except BrokenPipeError: os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read has seen enough
    except KeyboardInterrupt as stop: fail(str(stop) or "stopped; if training had begun, --resume goes on", 130)
    except (data.InputError, OSError) as error: fail(error)
    except (RuntimeError, MemoryError) as error:
        if not re.search("out of memory|allocate|overflow", str(error)): raise
        fail("not enough memory; try fewer --tokens, or a smaller model")
if __name__ == "__main__": main()
