# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Transformer: encoder self-attention, causal decoder self-attention, and cross-attention.
Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                                         (1)
    MultiHead = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) 3.2.2
    FFN(x) = max(0, x W_1 + b_1) W_2 + b_2                                                    (2)
    x = LayerNorm(x + Dropout(Sublayer(x)))    around every attention and FFN            3.1, 5.4
    PE(pos, 2i), PE(pos, 2i+1) = sin, cos(pos / 10000^(2i/d_model))                           3.5
    lrate = d_model^-0.5 min(step^-0.5, step warmup^-1.5)                                     (3)

    python transformer.py                     built-in corpus: BLEU 98, AER 0.07, 1-2 min, 2 cores
    python transformer.py --medium --train bpe.train.{en,fr} --valid bpe.valid.{en,fr} --out runs/fr

The alignment is the cross-attention of the last layer (see --align-layer), averaged over heads.

Deviations from the paper
- Text is split only at spaces, so apply byte-pair encoding beforehand. With 37,000 words, the
  base model has 63 million parameters; table 3 says 65.
- Initialization, on which the paper is silent, is that of fairseq 0.10: embeddings N(0, 1/d_model)
  (ours also for PAD), attention Glorot (Q, K and V with gain 1/sqrt(2)), torch's default for the
  feed-forward network.
- --batch-tokens 60000, padding included, stands for 25,000 source and 25,000 target tokens.
- Sentences of more than 100 words are skipped. Averaged checkpoints are --eval-every steps apart,
  not 10 minutes. A hypothesis that has ended keeps one of the K places in the beam; tensor2tensor
  always extends K hypotheses. With --fast, bf16.
- Without --paper: smaller, and the learning rate also decays to 0. The default also has two
  vocabularies and no dropout; --help lists all values.
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

# Q queries, K keys, V values, x source, y target. Shapes: B batch, S source and T target length,
# h heads, d_k = d_model / h, V vocabulary. Masked positions: True in a mask, -inf in a bias.


class MultiHeadAttention(nn.Module):
    """Multi-head attention, 3.2.2: context, alpha = attention(query, source, need_alpha=True)."""

    def __init__(self, d_model, heads):
        super().__init__()
        assert d_model % heads == 0, "d_model must be a multiple of heads"
        self.heads = heads
        self.W_Q = nn.Linear(d_model, d_model, bias=False)  # W_1^Q, ..., W_h^Q
        self.W_KV = nn.Linear(d_model, 2 * d_model, bias=False)  # all W_i^K, then all W_i^V
        self.W_O = nn.Linear(d_model, d_model, bias=False)

    def KV(self, source):  # keys and values (B,S,2,h,d_k), which do not depend on the query
        return self.W_KV(source).unflatten(-1, (2, self.heads, -1))

    @staticmethod
    def bias(mask, dtype):
        """What to add to the scores for a bool mask: -inf where True. All layers can share one."""
        mask = mask[:, None, None] if mask.ndim == 2 else mask.unsqueeze(1)  # (B,1,1,S), (B,1,T,S)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)

    def forward(self, query, source, mask=None, KV=None, need_alpha=False):
        """query (B,T,d_model), source (B,S,d_model), or None with KV, see KV(); mask: bool (B,S) or
        one per query, (B,T,S) or (1,T,S), True: masked, or a bias, see bias(). Returns context
        (B,T,d_model) and alpha (B,h,T,S), which is None without need_alpha."""
        assert query.ndim == 3, "query must be (B,T,d_model)"
        KV = self.KV(source) if KV is None else KV
        K, V = (x.transpose(1, 2) for x in KV.unbind(2))  # each (B,h,S,d_k)
        Q = self.W_Q(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B,h,T,d_k)
        B, T, S = len(query), query.size(1), KV.size(1)
        mask = torch.zeros(B, S, dtype=torch.bool, device=KV.device) if mask is None else mask
        is_mask = mask.dtype == torch.bool and mask.shape in ((B, S), (B, T, S), (1, T, S))
        is_bias = mask.is_floating_point() and mask.ndim == 4
        assert is_mask or is_bias, "mask must be bool (B,S) or (B,T,S), or a bias"
        bias = self.bias(mask, Q.dtype) if is_mask else mask
        if need_alpha:
            e = Q @ K.mT / math.sqrt(Q.size(-1)) + bias  # (B,h,T,S)
            masked = bias == -torch.inf
            alpha = e.masked_fill(masked, -torch.inf).softmax(-1)  # again, to block NaN gradients
            alpha = alpha.masked_fill(masked, 0)  # 0, not NaN, if all keys are masked
            head = alpha @ V  # eq. (1)   (B,h,T,d_k)
        else:  # one fused kernel without alpha; also 0 if all keys are masked
            head, alpha = F.scaled_dot_product_attention(Q, K, V, bias), None
        return self.W_O(head.transpose(1, 2).flatten(2)), alpha  # section 3.2.2


def feed_forward(cfg):  # FFN(x), eq. (2)
    W_1 = nn.Linear(cfg.d_model, cfg.d_ff)
    W_2 = nn.Linear(cfg.d_ff, cfg.d_model)
    return nn.Sequential(W_1, nn.ReLU(), W_2)


class EncoderLayer(nn.Module):
    """Self-attention over the source, then the feed-forward network, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.ffn = feed_forward(cfg)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)

    def forward(self, x, padding):  # x (B,S,d_model); padding: a bias (B,1,1,S)
        a, _ = self.self_attention(x, x, padding)  # section 3.2.3
        x = self.norm_1(x + self.drop(a))  # LayerNorm(x + Sublayer(x)), section 3.1
        return self.norm_2(x + self.drop(self.ffn(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.cross_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.ffn = feed_forward(cfg)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)
        self.norm_3 = nn.LayerNorm(cfg.d_model)

    def forward(self, y, target_KV, future, source_KV, padding, need_alpha=False):
        """y (B,T,d_model); future and padding are the biases for target_KV and for source_KV."""
        a, _ = self.self_attention(y, None, future, KV=target_KV)  # section 3.2.3
        y = self.norm_1(y + self.drop(a))
        c, alpha = self.cross_attention(y, None, padding, KV=source_KV, need_alpha=need_alpha)
        y = self.norm_2(y + self.drop(c))
        return self.norm_3(y + self.drop(self.ffn(y))), alpha


class Transformer(nn.Module):
    """The complete model, figure 1."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.d_model)  # also the output matrix, 3.4
        self.E_x = self.E_y if cfg.share_vocab else nn.Embedding(cfg.src_vocab, cfg.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.layers))
        self.drop = nn.Dropout(cfg.dropout)
        self.init_weights()

    def init_weights(self):  # as in fairseq 0.10; the rest has torch's initialization
        for part in self.modules():
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, 0, self.cfg.d_model**-0.5)
            elif isinstance(part, MultiHeadAttention):
                for W in (part.W_Q.weight, *part.W_KV.weight.chunk(2)):  # W^Q, W^K, W^V
                    nn.init.xavier_uniform_(W, 2**-0.5)
                nn.init.xavier_uniform_(part.W_O.weight)

    def positional_encoding(self, pos):  # positions (n,) -> (n,d_model), section 3.5
        dtype = torch.promote_types(self.E_y.weight.dtype, torch.float)  # bf16 rounds pos > 256
        two_i = torch.arange(0, self.cfg.d_model, 2, dtype=dtype, device=pos.device)
        angle = pos.unsqueeze(1) / 10000 ** (two_i / self.cfg.d_model)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(self.E_y.weight.dtype)

    def embed(self, E, words, pos):
        PE = self.positional_encoding(pos)
        return self.drop(E(words) * math.sqrt(self.cfg.d_model) + PE)  # sections 3.4, 3.5

    def encode(self, src):
        x = self.embed(self.E_x, src, torch.arange(src.size(1), device=src.device))  # (B,S,d_model)
        padding = MultiHeadAttention.bias(src == PAD, x.dtype)  # (B,1,1,S)
        for layer in self.encoder:
            x = layer(x, padding)
        return *(layer.cross_attention.KV(x) for layer in self.decoder), padding

    def init_state(self, memory, max_len):  # t = 0, and empty caches for K and V of max_len words
        *source_KVs, padding = memory
        t = torch.zeros(1, dtype=torch.long, device=padding.device)
        return t, *(KV.new_zeros(len(KV), max_len, *KV.shape[2:]) for KV in source_KVs)

    def reorder(self, state, rows):  # for beam search
        t, *caches = state
        return t, *(cache[rows] for cache in caches)

    def step(self, y, state, memory):  # y_t (B,) -> logits of y_{t+1} (B,V); overwrites state
        t, *caches = state
        *source_KVs, padding = memory
        y = self.embed(self.E_y, y.unsqueeze(1), t)  # (B,1,d_model)
        pos = torch.arange(caches[0].size(1), device=t.device)
        empty = (pos > t).unsqueeze(0)  # the empty part of the caches   (1,max_len)
        future = MultiHeadAttention.bias(empty, y.dtype)
        for layer, target_KV, source_KV in zip(self.decoder, caches, source_KVs):
            target_KV.index_copy_(1, t, layer.self_attention.KV(y))  # in place
            y, _ = layer(y, target_KV, future, source_KV, padding)
        return F.linear(y.squeeze(1), self.E_y.weight), (t + 1, *caches)

    def forward(self, src, tgt_in, need_alpha=False):
        *source_KVs, padding = self.encode(src)
        pos = torch.arange(tgt_in.size(1), device=src.device)
        y = self.embed(self.E_y, tgt_in, pos)  # teacher forcing   (B,T,d_model)
        future = (pos > pos.unsqueeze(1)).unsqueeze(0)  # section 3.2.3   (1,T,T)
        future = MultiHeadAttention.bias(future, y.dtype)
        aligned = self.decoder[self.cfg.align_layer - 1]  # counts from 1; 0: the last
        alpha = None
        for layer, source_KV in zip(self.decoder, source_KVs):
            target_KV = layer.self_attention.KV(y)
            keep = need_alpha and layer is aligned  # the other layers use the fused kernel
            y, weights = layer(y, target_KV, future, source_KV, padding, keep)
            alpha = weights if keep else alpha
        logits = F.linear(y, self.E_y.weight)  # section 3.4   (B,T,V)
        return (logits, alpha.mean(1)) if need_alpha else logits


@dataclasses.dataclass
class Config:
    """data.py makes every field a flag, with its comment as help. Fields above KW_ONLY are fixed
    once a run has started; a field added later takes its default. __post_init__ checks ranges."""

    # fmt: off
    # text
    src_vocab: int = 30000     # source vocabulary size; rarer words become <unk>
    tgt_vocab: int = 30000     # target vocabulary size
    share_vocab: bool = False  # one vocabulary of --src-vocab words, one embedding matrix (3.4)
    min_count: int = 1         # words that occur fewer than N times become <unk>
    max_len: int = 100         # skip training pairs with longer sentences
    # model
    d_model: int = 96          # size of the embeddings and of every layer's output
    d_ff: int = 256            # hidden size of the feed-forward network
    heads: int = 4             # attention heads (h); d_k = d_v = d_model / heads
    layers: int = 2            # layers of the encoder and of the decoder (N); with 6: --warmup 1000
    # training
    average: int = 1           # average the weights at the last N validations (1: keep the best)
    _: dataclasses.KW_ONLY     # --resume and load may change the fields below this line
    lr: float = 1.0            # factor of the learning rate, eq. (3)
    warmup: int = 400          # steps of linear warm-up, eq. (3)
    cooldown: bool = True      # also decay the learning rate linearly to 0; not in the paper
    clip: float = 0.0          # maximum gradient norm (0: no clipping, as in the paper)
    dropout: float = 0.0       # dropout rate of sublayer outputs and embeddings, section 5.4
    smoothing: float = 0.1     # label smoothing, section 5.4
    loss_per: typing.Literal["token", "sentence"] = "token"  # what the loss is averaged over
    batch_tokens: int = 1024   # maximum source + target tokens per batch, padding included
    batch_sentences: int = 1000  # maximum sentences per batch
    accumulate: int = 1        # split each batch into N micro-batches per process to save memory
    steps: int = 2000          # training steps
    eval_every: int = 200      # steps between validations
    fast: bool = False         # GPU: bf16, CUDA graphs; Python in the model runs once per shape
    compile: bool = False      # with --fast, also torch.compile; training starts later
    seed: int = 1              # random seed of initialization, batches and dropout
    # decoding
    align_layer: int = 0       # decoder layer whose attention is the alignment (0: the last)
    beam: int = 1              # beam size; 1 is greedy decoding
    length_penalty: float = 0.0  # beam search ranks by log p / ((5 + |y|) / 6)^length_penalty
    replace_unk: bool = False  # replace <unk> by its source word; needs <unk> in training text
    # fmt: on

    def __post_init__(self):
        data.check(self, seed=(0, 2**63), dropout=(0, 1), smoothing=(0, 1))
        if self.d_model % self.heads or self.d_model % 2:
            raise data.InputError(f"--d-model: must be even and a multiple of --heads {self.heads}")
        if self.align_layer > self.layers:
            raise data.InputError(f"--align-layer: must be at most --layers {self.layers}")
        if self.share_vocab:
            self.tgt_vocab = self.src_vocab

    @classmethod
    def medium(cls, **overrides):
        """Transformer-tiny of Wu et al. 2021, arXiv 2105.14462; expects joint byte-pair units."""
        vocabulary = dict(src_vocab=20000, tgt_vocab=20000, share_vocab=True)
        sizes = dict(d_model=128, d_ff=256, heads=4, layers=4, dropout=0.3)
        recipe = dict(lr=2.5, warmup=2000, average=10, beam=5, length_penalty=1.0)
        batches = dict(batch_tokens=16384, steps=8000, eval_every=250, fast=True)
        return cls(**vocabulary | sizes | recipe | batches | overrides)

    @classmethod
    def paper(cls, **overrides):
        """The base model of table 3, decoded as in section 6.1."""
        vocabulary = dict(src_vocab=37000, tgt_vocab=37000, share_vocab=True)  # section 5.1
        sizes = dict(d_model=512, d_ff=2048, heads=8, layers=6, dropout=0.1)
        recipe = dict(warmup=4000, cooldown=False, average=5, beam=4, length_penalty=0.6)
        batches = dict(batch_tokens=60000, batch_sentences=60000, steps=100000, eval_every=1000)
        speed = dict(fast=True, compile=True)
        return cls(**vocabulary | sizes | recipe | batches | speed | overrides)


def make_optimizer(model, cfg):
    """Adam as in section 5.3; lr is the peak of (3) until train sets the rate of each update."""
    peak = cfg.lr * (cfg.d_model * cfg.warmup) ** -0.5
    return torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98), eps=1e-9, fused=True)


def learning_rate(cfg, step):
    """Equation (3); with --cooldown, multiplied by the fraction of steps that remain."""
    rate = cfg.lr * cfg.d_model**-0.5 * min(step**-0.5, step * cfg.warmup**-1.5)  # eq. (3)
    return rate * max(1 - (step - 1) / cfg.steps, 0) if cfg.cooldown else rate


Model = Transformer
COMPILED = (EncoderLayer, DecoderLayer)  # what --compile compiles, besides the loss

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
