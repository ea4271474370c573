# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Luong attention: global or local attention after the recurrent step, with simpler scores.
Luong, Pham, Manning 2015, Effective Approaches to Attention-based Neural Machine Translation,
arXiv 1508.04025

    h_t = LSTM([y_{t-1} ; h~_{t-1}], h_{t-1})  top decoder layer; h~ only with input feeding    3.3
    score(h_t, hbar_s) = h_t^T W_a hbar_s      general; dot: no W_a; concat: a tanh layer       3.1
    a_t(s) = softmax_s(score(h_t, hbar_s))     attention weights                                (7)
    a_t = softmax(W_a h_t)                     location: one row of W_a per source position     (8)
    p_t = S sigmoid(v_p^T tanh(W_p h_t))       local-p (local-m: p_t = t); |s - p_t| <= D       (9)
    a_t(s) *= exp(-(s - p_t)^2 / (2 sigma^2))  local-p only, sigma = D/2                       (10)
    h~_t = tanh(W_c [c_t ; h_t])               with the context c_t = sum_s a_t(s) hbar_s       (5)
    p(y_t | y_<t, x) = softmax(W_s h~_t)                                                        (6)

    python luong.py                          built-in corpus: BLEU 98, AER 0.05, 1-2 min, 2 cores
    python luong.py --medium --train train.en train.fr --valid dev.en dev.fr --out runs/fr

Deviations from the paper
- Positions s count from 1 to S, EOS included; the authors' code leaves EOS out.
- p_t is a real number, so a local-p window covers 2D words, not 2D + 1. In local-m, p_t <= S.
- a_t, rescaled to sum to 1, aligns y_t; in the paper y_{t-1}, except location (footnote 14).
- The location score needs global attention, and masks positions beyond the sentence (footnote 6).
- concat learns all of W_a; the authors fixed its half for hbar_s to the identity (footnote 15).
- The decoder's LSTMs have biases, as in Zaremba et al., whom the paper cites; the encoder's have
  none, as in the authors' code, so that zero padding leaves a zero state unchanged.
- Dropout also acts before the softmax. The clipped norm includes embeddings; the authors' does not.
- Where the paper is silent: beam 10, where ended hypotheses keep their places; 0 to n + 50 words
  for n source words; the weights with the best validation loss. --replace-unk has no dictionary.
- bf16 with --fast. --steps are the 12 epochs. Without --paper: one layer, Adam, smoothing, global.
"""

import copy
import dataclasses
import io
import itertools
import math
import os
import time
import typing
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import trange

import data
from data import BOS, EOS, PAD, RANK, WORLD_SIZE

# x source, y target, h_bar encoder states, h_t decoder state, a_t attention weights, c_t
# context, h_tilde (h~) attentional state, p_t window center. Shapes: B batch, S source length,
# T target length, E embedding, H hidden, L layers, V vocabulary. In a mask, True = masked.


class LuongAttention(nn.Module):
    """Global or local attention, 3.1 and 3.2: context, alpha = attention(query, source, mask).
    Local attention and the location score need right padding; local-m needs the step number t.
    With local-p, the weights sum to less than 1, eq. (10)."""

    def __init__(self, hidden, score="general", attention="global", window=10, positions=101):
        super().__init__()
        assert score in ("dot", "general", "concat", "location"), f"unknown score {score}"
        assert attention in ("global", "local-m", "local-p"), f"unknown attention {attention}"
        assert score != "location" or attention == "global", "location needs global attention"
        self.score = score
        self.kind = attention
        self.D = window
        if score == "general":
            self.W_a = nn.Linear(hidden, hidden, bias=False)
        if score == "concat":
            self.W_q = nn.Linear(hidden, hidden, bias=False)  # W_a = [W_q, W_k]
            self.W_k = nn.Linear(hidden, hidden, bias=False)
            self.v_a = nn.Linear(hidden, 1, bias=False)
        if score == "location":
            self.W_a = nn.Linear(hidden, positions, bias=False)  # a row per position
        if attention == "local-p":
            self.W_p = nn.Linear(hidden, hidden, bias=False)
            self.v_p = nn.Linear(hidden, 1, bias=False)

    def keys(self, h_bar):  # the part of score(h_t, hbar_s) that does not depend on h_t   (B,S,H)
        if self.score == "general":
            return self.W_a(h_bar)  # W_a hbar_s
        if self.score == "concat":
            return self.W_k(h_bar)
        return h_bar

    def scores(self, h_t, keys):  # score(h_t, hbar_s), section 3.1   (B,T,S)
        if self.score in ("dot", "general"):  # h_t^T hbar_s, or h_t^T W_a hbar_s: keys has W_a
            return h_t @ keys.mT
        if self.score == "concat":  # v_a^T tanh(W_a [h_t ; hbar_s])
            W_a_h = self.W_q(h_t).unsqueeze(2) + keys.unsqueeze(1)  # (B,T,S,H)
            return self.v_a(torch.tanh(W_a_h)).squeeze(-1)
        e = self.W_a(h_t)  # location: W_a h_t, eq. (8)   (B,T,positions)
        return F.pad(e, (0, keys.size(1) - e.size(-1)), value=-torch.inf)  # pads, or cuts, to S

    def center(self, h_t, t, lengths):  # p_t, section 3.2; lengths (B,1,1) of sources -> (B,T,1)
        if self.kind == "local-m":  # monotonic: p_t = t, at most S
            t = t + torch.arange(h_t.size(1), device=h_t.device)
            return torch.minimum(t.unsqueeze(1), lengths)
        return lengths * torch.sigmoid(self.v_p(torch.tanh(self.W_p(h_t))))  # local-p, eq. (9)

    def forward(self, query, source, mask=None, keys=None, t=1):
        """query (B,T,H) of steps t, t + 1, ...; source (B,S,H), mask bool (B,S), True: padding."""
        assert query.ndim == 3, "query must be (B,T,H)"
        h_t, h_bar = query, source  # the paper's symbols
        mask = torch.zeros_like(h_bar[..., 0], dtype=torch.bool) if mask is None else mask
        assert mask.dtype == torch.bool and mask.shape == h_bar.shape[:2], "mask must be bool (B,S)"
        if mask.is_cpu and (self.kind != "global" or self.score == "location"):  # would stall a GPU
            assert (mask[:, 1:] >= mask[:, :-1]).all(), "padding must be on the right"
        e = self.scores(h_t, self.keys(h_bar) if keys is None else keys)
        outside = mask.unsqueeze(1)  # (B,1,S)
        if self.kind != "global":
            lengths = (~mask).sum(1).float().view(-1, 1, 1)
            s = torch.arange(1, mask.size(1) + 1, device=mask.device)
            p_t = self.center(h_t, t, lengths)
            outside = outside | ((s - p_t).abs() > self.D)  # the window [p_t - D, p_t + D]
        a_t = e.masked_fill(outside, -torch.inf).softmax(-1)  # eq. (7)   (B,T,S)
        a_t = a_t.masked_fill(outside, 0)  # 0, not NaN, if the whole source is masked
        if self.kind == "local-p":  # float32 like p_t; the weights no longer sum to 1
            a_t = a_t * torch.exp(-((s - p_t) ** 2) / (2 * (self.D / 2) ** 2))  # eq. (10)
        return a_t.to(h_bar.dtype) @ h_bar, a_t  # c_t (B,T,H), a_t (B,T,S)


class LuongNMT(nn.Module):
    """The complete model: a deep LSTM encoder, a deep LSTM decoder, attention on the top layers."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        fed = cfg.hidden if cfg.input_feeding else 0  # size of h~_{t-1}
        self.E_x = nn.Embedding(cfg.src_vocab, cfg.emb)
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.emb)
        self.encoder = DeepLSTM(cfg.emb, cfg.hidden, cfg.layers, cfg.dropout, bias=False)
        self.decoder = DeepLSTM(cfg.emb + fed, cfg.hidden, cfg.layers, cfg.dropout)
        positions = cfg.max_len + 1  # enough for every training sentence and EOS
        self.attention = LuongAttention(cfg.hidden, cfg.score, cfg.attention, cfg.window, positions)
        self.W_c = nn.Linear(2 * cfg.hidden, cfg.hidden, bias=False)
        self.W_s = nn.Linear(cfg.hidden, cfg.tgt_vocab, bias=False)
        self.drop = nn.Dropout(cfg.dropout)
        self.init_weights()

    def init_weights(self):  # section 4.1
        for p in self.parameters():
            nn.init.uniform_(p, -self.cfg.init, self.cfg.init)

    def encode(self, src):
        # Padding is zero vectors: without biases, a zero state stays exactly zero.
        x = self.E_x(src) * (src != PAD).unsqueeze(-1)  # (B,S,E)
        zero = x.new_zeros(self.cfg.layers, len(src), self.cfg.hidden)
        h_bar, h, c = self.encoder(x.flip(1), zero, zero)  # the source is reversed, section 4.2
        h_bar = h_bar.flip(1)  # back to the order of src   (B,S,H)
        memory = h_bar, self.attention.keys(h_bar), src == PAD
        return memory, (h, c)  # h, c: final states (L,B,H)

    def init_state(self, memory, max_len=None):  # only transformer.py needs max_len
        (h_bar, _, _), (h, c) = memory
        t = torch.ones(1, dtype=torch.long, device=h.device)
        return h, c, torch.zeros_like(h_bar[:, 0]), t

    def reorder(self, state, rows):  # for beam search
        h, c, h_tilde, t = state
        return h[:, rows], c[:, rows], h_tilde[rows], t

    def attend(self, h_t, memory, t):  # h_t (B,T,H) of decoder steps t, t + 1, ...
        (h_bar, keys, mask), _ = memory
        c_t, a_t = self.attention(h_t, h_bar, mask, keys, t)
        h_tilde = torch.tanh(self.W_c(torch.cat([c_t, h_t], -1)))  # eq. (5)   (B,T,H)
        return h_tilde, a_t

    def advance(self, y, state, memory):  # embedded y_{t-1} (B,E) -> h~_t, a_t (B,S), next state
        h, c, h_tilde, t = state
        x = torch.cat([y, h_tilde], -1) if self.cfg.input_feeding else y  # section 3.3
        h_t, h, c = self.decoder.step(x, h, c)
        h_tilde, a_t = (z.squeeze(1) for z in self.attend(h_t.unsqueeze(1), memory, t))
        return h_tilde, a_t, (h, c, h_tilde, t + 1)

    def step(self, y, state, memory):  # y_{t-1} (B,) -> logits of y_t (B,V), next state
        h_tilde, _, state = self.advance(self.E_y(y), state, memory)
        return self.W_s(self.drop(h_tilde)), state  # eq. (6)

    def forward(self, src, tgt_in, need_alpha=False):
        memory = self.encode(src)
        state = self.init_state(memory)
        y = self.E_y(tgt_in)  # teacher forcing: the reference's words y_{t-1}   (B,T,E)
        if self.cfg.input_feeding:  # each step needs h~ of the previous one
            steps = []
            for previous in y.unbind(1):  # y_{t-1}
                h_tilde, a_t, state = self.advance(previous, state, memory)
                steps.append((h_tilde, a_t))
            h_tilde, a_t = (torch.stack(x, 1) for x in zip(*steps))  # (B,T,H), (B,T,S)
        else:
            _, (h, c) = memory
            h_t, _, _ = self.decoder(y, h, c)
            h_tilde, a_t = self.attend(h_t, memory, t=1)
        logits = self.W_s(self.drop(h_tilde))  # eq. (6)   (B,T,V)
        return (logits, a_t / a_t.sum(-1, keepdim=True)) if need_alpha else logits


class DeepLSTM(nn.Module):
    """A stack of LSTMs, each of which reads the outputs of the one below."""

    def __init__(self, size, hidden, layers, dropout, bias=True):
        super().__init__()
        sizes = [size] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, bias=bias, batch_first=True) for n in sizes)
        self.drop = nn.Dropout(dropout)  # not nn.LSTM's dropout, which CUDA graphs cannot record

    def forward(self, x, h, c):  # x (B,T,E), initial h and c (L,B,H)
        final = []
        for layer, h_0, c_0 in zip(self.layers, h.split(1), c.split(1)):
            x, h_c = layer(self.drop(x), (h_0, c_0))
            final.append(h_c)
        return x, *(torch.cat(part) for part in zip(*final))  # (B,T,H), final h and c (L,B,H)

    def step(self, x, h, c):  # one word x (B,E); faster than forward with T = 1
        final = []
        for layer, h_0, c_0 in zip(self.layers, h, c):
            weights = layer.all_weights[0]  # W_ih, W_hh and biases of the only layer in it
            x, c_1 = torch.lstm_cell(self.drop(x), (h_0, c_0), *weights)
            final.append((x, c_1))
        return x, *(torch.stack(part) for part in zip(*final))


@dataclasses.dataclass
class Config:
    """data.py makes every field a flag, with its comment as help. Fields above KW_ONLY are fixed
    once a run has started; a field added later takes its default. __post_init__ checks ranges."""

    # fmt: off
    # text
    src_vocab: int = 30000     # source vocabulary size; rarer words become <unk>
    tgt_vocab: int = 30000     # target vocabulary size
    share_vocab: bool = False  # one vocabulary of --src-vocab words for both languages
    min_count: int = 1         # words that occur fewer than N times become <unk>
    max_len: int = 100         # skip training pairs with longer sentences
    # model
    emb: int = 128             # embedding size
    hidden: int = 128          # LSTM units per layer
    layers: int = 1            # LSTM layers of the encoder and of the decoder
    score: typing.Literal["dot", "general", "concat", "location"] = "general"  # score function, 3.1
    attention: typing.Literal["global", "local-m", "local-p"] = "global"  # all words or a window
    window: int = 10           # words on each side of p_t in local attention (D)
    input_feeding: bool = False  # feed h~_{t-1} into the next decoder step, section 3.3
    init: float = 0.15         # initial weights are uniform between -X and X
    # training
    optimizer: typing.Literal["adam", "sgd"] = "adam"  # Adam, or plain SGD as in the paper
    average: int = 1           # average the weights at the last N validations (1: keep the best)
    _: dataclasses.KW_ONLY     # --resume and load may change the fields below this line
    lr: float = 0.006          # learning rate
    warmup: int = 100          # steps of linear warm-up (Adam only; a linear decay caps it)
    clip: float = 0.3          # maximum gradient norm (0: no clipping)
    dropout: float = 0.1       # dropout rate of LSTM and softmax inputs
    smoothing: float = 0.1     # label smoothing; none in the paper
    loss_per: typing.Literal["token", "sentence"] = "token"  # what the loss is averaged over
    batch_tokens: int = 1024   # maximum source + target tokens per batch, padding included
    batch_sentences: int = 1000  # maximum sentences per batch
    accumulate: int = 1        # split each batch into N micro-batches per process to save memory
    steps: int = 1700          # training steps
    eval_every: int = 200      # steps between validations
    fast: bool = False         # GPU: bf16, CUDA graphs; Python in the model runs once per shape
    compile: bool = False      # with --fast, also torch.compile; training starts later
    seed: int = 1              # random seed of initialization, batches and dropout
    # decoding
    beam: int = 1              # beam size; 1 is greedy decoding
    length_penalty: float = 0.0  # beam search ranks by log p / ((5 + |y|) / 6)^length_penalty
    replace_unk: bool = False  # replace <unk> by its source word; needs <unk> in training text
    # fmt: on

    def __post_init__(self):
        data.check(self, seed=(0, 2**63), dropout=(0, 1), smoothing=(0, 1))
        if self.score == "location" and self.attention != "global":
            raise data.InputError("--score location: works only with --attention global")

    @classmethod
    def medium(cls, **overrides):
        """For 10,000 to 100,000 pairs; chosen by validation on Multi30k, dot on Europarl."""
        vocabulary = dict(src_vocab=20000, tgt_vocab=20000, min_count=2)
        sizes = dict(emb=256, hidden=512, score="dot", input_feeding=True, dropout=0.5, init=0.08)
        recipe = dict(lr=0.008, clip=1.0, smoothing=0.2, average=10, beam=5, length_penalty=1.0)
        schedule = dict(batch_tokens=16384, accumulate=2, steps=2500, warmup=200, eval_every=100)
        return cls(**vocabulary | sizes | recipe | schedule | dict(fast=True) | overrides)

    @classmethod
    def paper(cls, **overrides):
        """Section 4.1, the best single model of table 1, trained on 4.5 million pairs."""
        sizes = dict(src_vocab=50000, tgt_vocab=50000, emb=1000, hidden=1000, layers=4, init=0.1)
        best = dict(attention="local-p", input_feeding=True, beam=10, replace_unk=True)
        recipe = dict(optimizer="sgd", lr=1.0, clip=5.0, smoothing=0.0, loss_per="sentence")
        batches = dict(batch_sentences=128, batch_tokens=14000, max_len=50, eval_every=5000)
        steps = 421875 if overrides.get("dropout", 0.2) else 351562  # 12 epochs, 10 without dropout
        schedule = dict(dropout=0.2, steps=steps, fast=True, compile=True)
        return cls(**sizes | best | recipe | batches | schedule | overrides)


def make_optimizer(model, cfg):
    """Plain SGD as in section 4.1, or Adam."""
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=cfg.lr)
    return torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)


def learning_rate(cfg, step):
    """SGD: --steps are 12 epochs; the rate is halved after each, from the 8th on (without dropout:
    10 epochs, 5th). Adam: linear warm-up, capped by a linear decay to 0."""
    if cfg.optimizer == "adam":
        return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    epochs, constant = (12, 8) if cfg.dropout else (10, 5)
    epoch = epochs * (step - 1) // cfg.steps  # 0, 1, ...
    return cfg.lr * 0.5 ** max(epoch - constant + 1, 0)


Model = LuongNMT
COMPILED = (LuongAttention,)  # what --compile compiles, besides the loss

# ---- the same in every script from here on ----


def make_train_step(model, cfg, optimizer=None):
    """Returns train_step(src, tgt), which makes one update and returns the loss per target token.
    src (B,S): words, EOS, right padding. tgt (B,T+1): BOS, words, EOS, right padding. The learning
    rate is the optimizer's. Under torchrun, all processes pass the same whole batch."""
    optimizer = optimizer or make_optimizer(model, cfg)
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"

    def forward_backward(src, tgt, count):
        logits = model(src, tgt[:, :-1])  # teacher forcing: it reads the reference's words
        loss = summed_loss(logits, tgt[:, 1:], cfg.smoothing) / count
        loss.backward()
        return loss.detach()

    if cfg.fast and on_cuda:
        forward_backward = accelerated(model, cfg)  # the price: see --fast

    def train_step(src, tgt):
        model.train()
        model.zero_grad()
        # Without waiting for the GPU, which may still compute earlier steps.
        src, tgt = (torch.as_tensor(x).to(device, non_blocking=on_cuda) for x in (src, tgt))
        tokens = (tgt[:, 1:] != PAD).sum()
        count = tokens if cfg.loss_per == "token" else torch.full_like(tokens, len(tgt))
        loss = torch.zeros((), device=device)
        for rows in micro_batches(len(src), cfg.accumulate):
            loss = loss + forward_backward(src[rows], tgt[rows], count)  # count: of the whole batch
        if WORLD_SIZE > 1:
            sum_over_processes(loss, model)
        if cfg.clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        return loss * count / tokens  # per target token, whatever --loss-per says

    return train_step


def micro_batches(rows, accumulate):
    """Slices of the rows of a batch, for this process: by default, one slice of all rows. With two
    processes and --accumulate 2, the first gets the rows 0, 4, 8, ..., then the rows 2, 6, ..."""
    n = WORLD_SIZE * accumulate
    return [slice(k, None, n) for k in range(RANK, min(n, rows), WORLD_SIZE)]


def sum_over_processes(loss, model):
    """Sums the loss and all gradients over the processes of torchrun, in one all_reduce."""
    weights = [p for p in model.parameters() if p.requires_grad]
    for p in weights:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # a process without rows
    tensors = [loss, *(p.grad for p in weights)]
    vector = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(vector)
    for x, total in zip(tensors, vector.split([x.numel() for x in tensors])):
        x.copy_(total.view_as(x))


def summed_loss(logits, y, smoothing=0.0):
    """Cross-entropy of the targets y (B,T), summed over all tokens except padding, in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float)).flatten(0, 1)
    options = dict(ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    return F.cross_entropy(logits, y.flatten(), **options)


@torch.no_grad()
def greedy(model, src, max_len, fast=False):
    """Greedy decoding of src (B,S): token ids (B,T), EOS included, then PAD. max_len: an int, or a
    limit per sentence. Needs model.encode, init_state and step. Leaves the model in eval mode."""
    model.eval()
    limit = torch.as_tensor(max_len, device=src.device).expand(len(src))
    T = int(limit.max())
    memory = model.encode(src)
    state = model.init_state(memory, T)

    def best_word(y, state):
        assert isinstance(state, tuple), "init_state and step must return a tuple of tensors"
        logits, state = model.step(y, state, memory)
        word = logits[:, 1:].argmax(-1) + 1  # never PAD, which is token 0
        return word.masked_fill((y == EOS) | (y == PAD), PAD), state  # after the end only PAD

    best_word = graphed(best_word, src.device) if fast and src.is_cuda else best_word
    y = torch.full_like(src[:, 0], BOS)
    out = src.new_full((len(src), T), PAD)
    for t in range(T):
        y = y.masked_fill(limit <= t, PAD)
        if t % 8 == 0 and ((y == EOS) | (y == PAD)).all():
            break  # checked every 8 steps, because .all() waits for the GPU
        y, state = best_word(y, state)
        out[:, t] = y
    return out[:, (out != PAD).any(0)]  # without columns of padding


@torch.no_grad()
def beam(model, src, max_len, K, penalty=0.0, fast=False):
    """Beam search with K hypotheses per sentence; returns the best, like greedy. One that has ended
    keeps its place, so fewer are extended. Those with EOS come first, then those with the highest
    log p / ((5 + |y|) / 6)^penalty (GNMT, Wu et al. 2016). Needs model.reorder as well."""
    if K == 1:
        return greedy(model, src, max_len, fast)
    model.eval()
    B = len(src)
    limit = torch.as_tensor(max_len, device=src.device).expand(B).repeat_interleave(K)
    T = int(limit.max())
    memory = model.encode(src.repeat_interleave(K, 0))  # K rows per sentence, its hypotheses
    state = model.init_state(memory, T)
    first_row = torch.arange(0, B * K, K, device=src.device).unsqueeze(1)  # of every sentence (B,1)

    def extend(y, score, state):  # adds a word to every hypothesis, keeps the K best
        assert isinstance(state, tuple), "init_state and step must return a tuple of tensors"
        logits, state = model.step(y, state, memory)
        assert isinstance(state, tuple), "step must return a tuple of tensors"
        ended = ((y == EOS) | (y == PAD)).unsqueeze(1)
        log_p = logits.log_softmax(-1, torch.float).masked_fill_(ended, -torch.inf)  # (BK,V)
        log_p[:, :1] = torch.where(ended, 0.0, -torch.inf)  # PAD: only after the end, at no cost
        log_p, words = log_p.topk(min(K, log_p.size(1)))  # the K best can only be among these
        total = score.view(-1, 1) + log_p  # (BK,K)
        order = total.masked_fill(ended & total.isfinite(), torch.inf)  # ended ones stay
        index = order.view(B, -1).topk(K).indices  # the K best of each sentence   (B,K)
        score = total.view(B, -1).gather(1, index)
        rows = (first_row + index // words.size(1)).flatten()  # what each new hypothesis extends
        y = words.view(B, -1).gather(1, index).flatten()
        return y, rows, score, model.reorder(state, rows)  # memory is equal for all K rows

    extend = graphed(extend, src.device) if fast and src.is_cuda else extend
    y = src.new_full((B * K,), BOS)
    score = torch.full((B, K), -torch.inf, device=src.device)
    score[:, 0] = 0  # the K hypotheses start out equal, so only one is extended
    out = src.new_empty(B * K, 0)
    for t in range(T):
        y = y.masked_fill(limit <= t, PAD)
        if t % 8 == 0 and ((y == EOS) | (y == PAD)).all():
            break
        y, rows, score, state = extend(y, score, state)
        out = torch.cat([out[rows], y.unsqueeze(1)], 1)
    out = out.unflatten(0, (B, K))  # (B,K,T)
    score = score / ((5 + (out != PAD).sum(-1)) / 6) ** penalty
    finished = (out == EOS).any(-1) & score.isfinite()
    score = score.masked_fill(finished.any(1, keepdim=True) & ~finished, -torch.inf)
    out = out[torch.arange(B), score.argmax(1)]
    return out[:, (out != PAD).any(0)]


@torch.no_grad()
def align(model, src, tgt):
    """alpha (B,T,S) of given translations tgt (B,T+1), by teacher forcing."""
    assert (tgt[:, 0] == BOS).all(), "tgt must start with BOS, which greedy and beam leave out"
    return model.eval()(src, tgt[:, :-1], need_alpha=True)[1]


def inference_batches(model, pairs, vocabularies, max_tokens=4096):
    """Yields batches (rows, src, tgt) that cover every pair once, similar lengths together."""
    bitext = data.Bitext(pairs, vocabularies)
    device = next(model.parameters()).device
    for rows in bitext.rows_by_length(max_tokens):
        yield rows, *(torch.from_numpy(x).to(device) for x in bitext.batch(rows))


def translate(model, sentences, vocabularies, beam_size=None):
    """Translates strings or lists of words into lists of words; the default beam is cfg.beam."""
    cfg = model.cfg
    K = beam_size or cfg.beam
    assert not isinstance(sentences, str), "expected a list of sentences, not one string"
    sources = [data.to_words(sentence) for sentence in sentences]
    targets = [[] for _ in sources]
    on_cuda = next(model.parameters()).is_cuda
    fast = cfg.fast and on_cuda
    net = bf16_copy(model) if fast else model
    max_tokens = (65536 if on_cuda else 16384) // K
    for rows, src, _ in inference_batches(model, zip(sources, targets), vocabularies, max_tokens):
        n = (src != PAD).sum(1) - 1  # source words, without EOS
        max_len = torch.where(n > 0, n + 50, 0)  # an empty sentence stays empty
        tokens = beam(net, src, max_len, K, cfg.length_penalty, fast)
        for row, ids in zip(rows, tokens.tolist()):
            targets[row] = vocabularies[1].decode(ids)
    if cfg.replace_unk:
        alphas = alignments(model, zip(sources, targets), vocabularies)
        targets = list(map(data.replace_unknown, sources, targets, alphas))
    return targets


def alignments(model, pairs, vocabularies):
    """A numpy array per pair: a row per target word, a column per source word, EOS last in both."""
    alphas = {}
    for rows, src, tgt in inference_batches(model, pairs, vocabularies):
        S, T = ((x != PAD).sum(1).tolist() for x in (src, tgt[:, 1:]))
        for k, alpha in enumerate(align(model, src, tgt).float().cpu().numpy()):
            alphas[rows[k]] = alpha[: T[k], : S[k]]
    return [alphas[row] for row in sorted(alphas)]


@torch.no_grad()
def mean_loss(model, pairs, vocabularies):
    """Cross-entropy per target token with EOS, without label smoothing; in bf16 with --fast."""
    fast = model.cfg.fast and next(model.parameters()).is_cuda
    net = bf16_copy(model.eval()) if fast else model.eval()
    loss = tokens = 0
    for _, src, tgt in inference_batches(model, pairs, vocabularies):
        loss += summed_loss(net(src, tgt[:, :-1]), tgt[:, 1:]).item()
        tokens += (tgt[:, 1:] != PAD).sum().item()
    return loss / tokens


def evaluate(model, pairs, vocabularies):
    """Loss, perplexity and BLEU on a list of pairs, and AER if they have gold alignments."""
    loss = mean_loss(model, pairs, vocabularies)
    hypotheses = translate(model, [pair[0] for pair in pairs], vocabularies)
    alphas = alignments(model, pairs, vocabularies) if len(pairs[0]) > 2 else None
    return dict(loss=loss, ppl=math.exp(min(loss, 700))) | data.scores(pairs, hypotheses, alphas)


def load(path, device="cpu", **flags):
    """Returns (model, vocabularies) of a run folder; flags override fields below KW_ONLY."""
    saved = read_checkpoint(Path(path, "model.pt"))
    model = Model(data.saved_config(saved, Config, flags)).to(device)
    model.load_state_dict(saved["model"])
    return model.eval(), [data.Vocabulary(words) for words in saved["vocabularies"]]


def train(out, corpus, model, saved):
    """Trains up to cfg.steps and returns the log; saved is the content of last.pt, or {}.
    Writes model.pt (best or averaged weights), last.pt (to resume) and log.jsonl."""
    cfg = model.cfg
    about = dict(config=vars(cfg)) | corpus.to_save()
    optimizer = make_optimizer(model, cfg)
    log = saved.get("log", [])  # one entry per validation
    snapshots = saved.get("snapshots", [])  # the weights at the last --average validations
    done = tokens = seconds = 0
    if log:
        model.load_state_dict(snapshots[-1])
        optimizer.load_state_dict(saved["optimizer"])
        done, tokens, seconds = (log[-1][key] for key in ("step", "tokens", "seconds"))
        save(out / "model.pt", read_checkpoint(out / "model.pt") | about)  # with the new flags
        old, new = optimizer.param_groups[0]["lr"], learning_rate(cfg, done + 1)
        data.progress(f"learning rate: was {old:.2g}, is now {new:.2g} (see --steps and --lr)")
    save(out / "last.pt", saved | about)  # from here on, --resume works
    start = time.perf_counter() - seconds
    train_step = make_train_step(model, cfg, optimizer)
    batches = corpus.train.batches(cfg.batch_tokens, cfg.batch_sentences, cfg.seed, done)
    losses = []  # of the steps since the last validation
    text = "step {} of {}, validating every {} steps; --resume continues from the last validation"
    data.progress(text.format(done, cfg.steps, cfg.eval_every))
    hidden = True if RANK else None  # None hides the bar unless stderr is a terminal
    bar = trange(done + 1, cfg.steps + 1, initial=done, total=cfg.steps, disable=hidden)
    for step, (src, tgt) in zip(bar, batches):
        # Dropout depends only on seed, process and step, so that --resume needs no random state.
        torch.manual_seed(hash((cfg.seed, RANK, step)))  # hashes of integers are not randomized
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        losses.append(train_step(src, tgt))
        tokens += int((src != PAD).sum() + (tgt != PAD).sum())  # BOS and EOS included
        if step % cfg.eval_every == 0 or step == cfg.steps:
            loss = torch.stack(losses).mean().item()
            losses = []
            valid_loss = mean_loss(model, corpus.valid, corpus.vocabularies)
            if not math.isfinite(loss + valid_loss):
                raise data.InputError(f"step {step}: loss not finite; --resume with a lower --lr")
            if not (saved or log):
                data.new_folder(out)  # again: another run may have been started here meanwhile
            entry = dict(step=step, loss=loss, valid_loss=valid_loss, tokens=tokens)
            log.append(entry | dict(seconds=time.perf_counter() - start))
            save_run(out, about, log, snapshots, model, optimizer)
            source = corpus.valid[0][0]
            (translation,) = translate(model, [source], corpus.vocabularies, beam_size=1)
            data.log_validation(out, log, cfg.smoothing, source, translation)
    return log


def save_run(out, about, log, snapshots, model, optimizer):
    """Writes last.pt, and also model.pt if --average > 1 or the model is the best so far."""
    snapshots.append({key: x.to("cpu", copy=True) for key, x in model.state_dict().items()})
    del snapshots[: -model.cfg.average]
    best = min(entry["valid_loss"] for entry in log)
    if model.cfg.average > 1 or log[-1]["valid_loss"] == best:
        mean = {key: sum(x[key] for x in snapshots) / len(snapshots) for key in snapshots[-1]}
        save(out / "model.pt", about | dict(model=mean))
    state = dict(log=log, snapshots=snapshots, optimizer=optimizer.state_dict())
    save(out / "last.pt", about | state)


def save(path, checkpoint):
    if RANK == 0:
        buffer = io.BytesIO()  # in memory first, because torch.save aborts when the disk is full
        torch.save(checkpoint, buffer)
        data.write(path, buffer.getbuffer())


def read_checkpoint(path):
    if not path.exists():
        raise data.InputError(f"no {path.name} in {path.parent}; train first, or check --out")
    try:
        return torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        raise data.InputError(f"{path}: unreadable or damaged") from error


def train_command(args, flags, device):
    """Trains a new run or resumes one, then scores the model and draws alignments."""
    saved = read_checkpoint(args.out / "last.pt") if args.resume else {}
    cfg = data.saved_config(saved, Config, flags) if saved else Config(**flags)
    if cfg.compile and not cfg.fast:
        raise data.InputError("--compile needs --fast; add --fast or --no-compile")
    corpus = data.Corpus(cfg, args.train, args.valid, saved)
    cfg.src_vocab, cfg.tgt_vocab = map(len, corpus.vocabularies)
    torch.manual_seed(cfg.seed)
    model = Model(cfg).to(device)
    if not args.resume:
        data.new_folder(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    corpus.report(f"{parameters:,} parameters on {device}")
    log = train(args.out, corpus, model, saved)
    if RANK == 0:
        data.progress(f"scoring the {corpus.test_name} of {len(corpus.test):,} sentences")
        model, vocabularies = load(args.out, device, **flags)  # the best or averaged weights
        result = evaluate(model, corpus.test, vocabularies)
        sources = [pair[0] for pair in corpus.test[:100]]
        pairs = list(zip(sources, translate(model, sources, vocabularies)))
        alphas = alignments(model, pairs, vocabularies)
        data.write_alignments(args.out / "align", pairs, alphas)
        speed = log[-1]["tokens"] / log[-1]["seconds"]
        gib = torch.cuda.max_memory_reserved() / 2**30  # 0 on other devices
        result |= dict(seed=cfg.seed, tokens_per_second=speed, gpu_memory_gib=gib)
        data.write_log(args.out, [*log, result])
        data.report(result, corpus, args.out, pairs[0], alphas[0])


def inference_command(args, flags, device):
    """--test prints scores; --align and --translate print one line per input line."""
    model, vocabularies = load(args.out, device, **flags)
    if args.test:
        pairs = list(data.read_pairs(*args.test))
        data.report_unknown((source for source, *_ in pairs), vocabularies[0])
        print(data.format_scores(evaluate(model, pairs, vocabularies)))
    elif args.align:
        pairs = data.read_pairs(*args.align)
        while chunk := list(itertools.islice(pairs, 4000)):
            data.report_unknown((source for source, _ in chunk), vocabularies[0])
            print(*map(data.pharaoh, alignments(model, chunk, vocabularies)), sep="\n")
    else:
        for sources in data.read_stdin(vocabularies[0]):
            targets = translate(model, sources, vocabularies)
            print(*map(" ".join, targets), sep="\n", flush=True)
            if os.isatty(0):
                alphas = alignments(model, zip(sources, targets), vocabularies)
                print(*map(data.heatmap, sources, targets, alphas), sep="\n")


@data.one_line_errors()
def main(argv=None):
    set_up_torch()
    args, flags = data.parse_args(Config, __doc__, argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not torch.get_device_module(device).is_available():
        raise data.InputError(f"--device {device}: not available on this machine")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    command = inference_command if args.translate or args.align or args.test else train_command
    try:
        command(args, flags, device)
    except torch.OutOfMemoryError:
        raise data.InputError("out of GPU memory; try --accumulate N or --device cpu") from None
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def set_up_torch():  # process-wide settings that suit these models
    if "OMP_NUM_THREADS" not in os.environ:  # more threads are much slower if the cores are busy
        torch.set_num_threads(min(max(torch.get_num_threads() // 2, 1), 4))
    has_avx = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    torch.backends.mkldnn.set_flags(has_avx)  # oneDNN slows these models down on ARM
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is slow for each new shape


# ---- speed: only --fast runs what follows; skip it at first ----


def accelerated(model, cfg):
    """forward_backward on a bf16 copy of the model, perhaps compiled, recorded for each shape of
    batch: what Python code in the model decides then holds for all batches of that shape. Weights,
    gradients and optimizer state stay in float32 (Micikevicius et al. 2018); buffers are not copied
    back; unused weights have gradient 0. After unfreezing a weight, make a new train step."""
    weights = list(model.parameters())
    net = bf16_copy(model).train()
    copies = list(net.parameters())
    gradients = [torch.zeros_like(p) for p in weights]  # a recording writes to fixed addresses
    criterion = compiled(net, cfg) if cfg.compile else summed_loss
    # Copying is faster than adding, and equivalent with one micro-batch per process and step.
    collect = torch._foreach_add_ if cfg.accumulate > 1 else torch._foreach_copy_

    def on_copy(src, tgt, count):
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
        net.zero_grad()  # to None: backward() allocates gradients in the graphs' memory pool
        loss = criterion(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing) / count
        loss.backward()
        pairs = [(total, q.grad) for total, q in zip(gradients, copies) if q.grad is not None]
        collect(*zip(*pairs))
        return loss.detach()

    on_copy = graphed(on_copy, weights[0].device)

    def forward_backward(src, tgt, count):
        if all(p.grad is None for p in weights):  # the first micro-batch after model.zero_grad()
            torch._foreach_zero_(gradients)
        loss = on_copy(src, tgt, count)
        for p, total in zip(weights, gradients):
            p.grad = total if p.requires_grad else None  # optimizers skip weights without gradient
        return loss

    return forward_backward


def bf16_copy(model):
    """A bf16 copy of the model, which is faster than autocast; float32 on GPUs without bf16."""
    capability = torch.cuda.get_device_capability(next(model.parameters()).device)
    if (torch.backends.cudnn.version() or 0) >= 91300:  # lets bfloat16() flatten RNN weights
        torch.backends.cudnn.CUDNN_TENSOR_DTYPES.add(torch.bfloat16)  # torch's list lacks it
    return copy.deepcopy(model).to(torch.bfloat16 if capability >= (8, 0) else torch.float)


def compiled(net, cfg):
    """Compiles the modules of net listed in COMPILED, and the loss, which it returns. Then runs a
    batch of typical size, because the compiler chooses kernels for the first shape that it sees."""
    from torch._inductor import config as inductor
    from torch.fx.experimental import _config as symbolic_shapes

    symbolic_shapes.use_duck_shape = False  # else the first batch with S = T would recompile
    if hasattr(inductor.triton, "mix_order_reduction"):  # not in torch 2.6
        inductor.triton.mix_order_reduction = False  # it slows LayerNorm down on an H200
    for part in net.modules():
        if isinstance(part, COMPILED):
            part.compile(dynamic=True)  # one compilation for all shapes
    criterion = torch.compile(summed_loss, dynamic=True)
    rows = min(cfg.batch_tokens // 64, cfg.batch_sentences) // (WORLD_SIZE * cfg.accumulate)
    # 31 words, because a size of 1, or with torch 2.6 of 32, would be compiled as a constant.
    words = torch.full((max(rows, 2), 31), EOS, device="cuda")
    criterion(net(words, words[:, :-1]), words[:, 1:], cfg.smoothing).backward()
    return criterion


def graphed(function, device):
    """Records the CUDA kernels that function launches, once for each combination of input shapes;
    later calls replay them with one launch. Its arguments are tensors and tuples of tensors."""
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    graphs = {}  # input shapes -> graph, its inputs, its output
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()

    def call(*inputs):
        tensors = torch.utils._pytree.tree_leaves(inputs)
        shapes = tuple(x.shape for x in tensors)
        if shapes not in graphs:
            graph = torch.cuda.CUDAGraph()
            buffers = torch.utils._pytree.tree_map(torch.clone, inputs)
            torch.cuda.synchronize(device)
            if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > 2**31:
                torch.cuda.empty_cache()  # recordings cannot reuse memory cached by other code
            # Not torch.cuda.graph, which empties the memory cache at every recording. Compiled
            # modules run eagerly where they would recompile, because compiling cannot be recorded.
            with torch.cuda.stream(stream), torch.compiler.set_stance("eager_on_recompile"):
                graph.capture_begin(pool, "relaxed")  # libraries may initialize meanwhile
                torch.cuda.set_sync_debug_mode("error")  # .item() would break recording
                try:
                    output = function(*buffers)  # recorded, not computed
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    graph.capture_end()
            graphs[shapes] = graph, buffers, output
        graph, buffers, output = graphs[shapes]
        for buffer, x in zip(torch.utils._pytree.tree_leaves(buffers), tensors):
            buffer.copy_(x)  # a replay reads the memory addresses of its recording
        graph.replay()
        return output  # later calls may overwrite it

    return call


if __name__ == "__main__":
    main()
