# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Transformer: attention is all there is, source to source, target to target, target to source.
Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                                         (1)
    MultiHead = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) 3.2.2
    FFN(x) = max(0, x W_1 + b_1) W_2 + b_2                                                    (2)
    x = LayerNorm(x + Dropout(Sublayer(x)))    around each attention and each FFN        3.1, 5.4
    PE(pos, 2i), PE(pos, 2i+1) = sin, cos(pos / 10000^(2i/d_model))                           3.5
    lrate = d_model^-0.5 min(step^-0.5, step warmup^-1.5)                                     (3)

    python transformer.py                      built-in corpus: BLEU 97, AER 0.07, 97 s, 2 cores
    python transformer.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr
It draws the last layer's attention, heads averaged: the best aligned of 2 or 4; of 6 the 5th is.
Deviations from the paper
- Words are split at spaces, not into 37,000 byte pairs, so that no other program is needed.
- Initial weights, which the paper does not give: embeddings N(0, 1/d_model), biases 0, the rest
  Glorot, each sublayer's last / sqrt(2N), or deep models hardly learn. bf16 on CUDA, for speed.
- Sentences over 100 words are left out; averaged checkpoints are --every steps, not minutes, apart.
- Without --paper: small, no dropout, two vocabularies, greedy, a rate that also falls to 0.
"""

import copy
import dataclasses
import math
import os
import time
import typing
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import trange

import data
from data import BOS, EOS, PAD


@dataclasses.dataclass
class Config:
    # fmt: off
    # text
    src_vocab: int = 30000     # source words kept, the most frequent; the others become <unk>
    tgt_vocab: int = 30000     # target words kept, likewise
    joint: bool = False        # one vocabulary of --src-vocab words, and one matrix, for both
    min_count: int = 1         # rarer words become <unk>
    max_len: int = 0           # words in a training sentence at most (0: 30 built-in, 100 your own)
    # model
    d_model: int = 96          # size of an embedding and of every layer's output
    d_ff: int = 256            # size of the hidden layer of FFN
    heads: int = 4             # h, attention heads; d_k = d_v = d_model / h
    layers: int = 2            # N, layers of the encoder and of the decoder
    align_layer: int = 0       # the decoder layer, from 1, whose attention is drawn (0: the last)
    dropout: float = 0.0       # on each sublayer's output and on embedding + position, 5.4
    # training
    lr: float = 1.0            # factor on the learning rate (3)
    warmup: int = 400          # steps until the learning rate's maximum
    cooldown: bool = True      # the rate also falls to 0 with the steps left; the paper's does not
    clip: float = math.inf     # a gradient of greater norm is scaled down to it; the paper's is not
    smoothing: float = 0.1     # label smoothing, 5.4
    per: typing.Literal["token", "sentence"] = "token"  # what the summed loss is divided by
    tokens: int = 1024         # source and target tokens in a batch, padding counted
    sentences: int = 1000      # sentences in a batch at most
    accumulate: int = 1        # pieces a batch is computed in, to save memory
    steps: int = 2000          # training steps
    every: int = 200           # steps between two looks at the validation set
    average: int = 1           # if above 1: keep the mean of the weights at the last so many looks
    compile: bool = False      # torch.compile what it makes faster, on CUDA
    seed: int = 1              # of all that is random
    # decoding
    beam: int = 1              # hypotheses kept; 1 is greedy
    alpha: float = 0.0         # not the alignment: log p is divided by ((5 + |y|) / 6)^alpha
    replace_unk: bool = False  # an <unk> becomes the source word it is aligned with
    # fmt: on

    def __post_init__(self):
        data.check(self)
        if self.d_model % self.heads or self.d_model % 2:
            raise data.InputError(f"--d-model: must be even, a multiple of --heads {self.heads}")
        if self.align_layer > self.layers:
            raise data.InputError(f"--align-layer: there are {self.layers} layers")
        if self.joint:
            self.tgt_vocab = self.src_vocab

    @classmethod
    def paper(cls, **overrides):
        """The base model of table 3, with one vocabulary (5.1) unless two sizes are asked for."""
        size = overrides.get("src_vocab", overrides.get("tgt_vocab", 37000))
        words = dict(src_vocab=size, tgt_vocab=size, joint=overrides.get("tgt_vocab", size) == size)
        sizes = dict(d_model=512, d_ff=2048, heads=8, layers=6, dropout=0.1)
        recipe = dict(warmup=4000, cooldown=False, average=5, beam=4, alpha=0.6, compile=True)
        batches = dict(tokens=50000, sentences=50000, steps=100000, every=1000)
        return cls(**words | sizes | recipe | batches | overrides)


# Q queries, K keys, V values (in shapes vocabulary), x source, y target. Shapes: B batch, S source,
# T target (queries), h heads, d_k = d_model / h. A mask is True, or -inf, where nobody may look.


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: project applies W^Q, W^K, W^V; forward lets each head look and applies W^O."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_QKV = nn.Linear(d_model, 3 * d_model, bias=False)  # W^Q, W^K, W^V of all heads
        self.W_O = nn.Linear(d_model, d_model, bias=False)

    @staticmethod
    def attention(Q, K, V, mask=None, need_alpha=False):  # mask (T,S) or (B,1,1,S)
        """Equation (1); when nobody asks for the weights, in one kernel that keeps them inside."""
        if mask is not None and mask.dtype == torch.bool:
            mask = MultiHeadAttention.hide(mask, Q.dtype)
        if not need_alpha:
            return F.scaled_dot_product_attention(Q, K, V, mask), None
        e = Q @ K.mT / math.sqrt(Q.size(-1))  # (B,h,T,S)
        alpha = (e if mask is None else e + mask).softmax(-1)
        return alpha @ V, alpha  # eq. (1)   (B,h,T,d_k)

    @staticmethod
    def hide(mask, dtype):  # what to add to the scores: minus infinity where the mask is True
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)

    def project(self, x, which="QKV"):  # x W^Q, x W^K, x W^V   (B,T,len(which),h,d_k)
        first = "QKV".index(which)  # "QKV", "Q" or "KV": neighbours in W_QKV
        W = self.W_QKV.weight.unflatten(0, (3, -1))[first : first + len(which)].flatten(0, 1)
        return F.linear(x, W).unflatten(-1, (len(which), self.heads, -1))

    def forward(self, Q, K, V, mask=None, need_alpha=False):  # Q (B,T,h,d_k)  K, V (B,S,h,d_k)
        Q, K, V = (x.transpose(1, 2) for x in (Q, K, V))  # (B,h,T or S,d_k)
        heads, alpha = self.attention(Q, K, V, mask, need_alpha)
        return self.W_O(heads.transpose(1, 2).flatten(2)), alpha  # section 3.2.2   (B,T,d_model)


class EncoderLayer(nn.Module):
    """Each source word looks at all of them, then thinks, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        W_1, W_2 = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.ffn = nn.Sequential(W_1, nn.ReLU(), W_2)  # eq. (2)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)

    def forward(self, x, mask):  # x (B,S,d_model)  mask (B,1,1,S)
        Q, K, V = self.self_attention.project(x).unbind(2)
        a, _ = self.self_attention(Q, K, V, mask)
        x = self.norm_1(x + self.drop(a))  # LayerNorm(x + Sublayer(x)), section 3.1
        return self.norm_2(x + self.drop(self.ffn(x)))


class DecoderLayer(nn.Module):
    """Each target word looks at those before it, then at the source, then thinks, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.source_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        W_1, W_2 = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.ffn = nn.Sequential(W_1, nn.ReLU(), W_2)  # eq. (2)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)
        self.norm_3 = nn.LayerNorm(cfg.d_model)

    def forward(self, y, ahead, source, mask, cache=None, t=None, need_alpha=False):
        """y (B,T,d_model), or with a cache (B,1,d_model), word t; source: K, V (B,S,2,h,d_k)."""
        QKV = self.self_attention.project(y)
        Q, K, V = QKV.unbind(2)
        if cache is not None:  # (B,room,2,h,d_k), written in place; ahead hides what is empty yet
            K, V = cache.index_copy_(1, t, QKV[:, :, 1:]).unbind(2)
        a, _ = self.self_attention(Q, K, V, ahead)  # section 3.2.3
        y = self.norm_1(y + self.drop(a))
        Q = self.source_attention.project(y, "Q").squeeze(2)
        c, alpha = self.source_attention(Q, *source.unbind(2), mask, need_alpha)
        y = self.norm_2(y + self.drop(c))
        return self.norm_3(y + self.drop(self.ffn(y))), alpha


class Transformer(nn.Module):
    """The whole model, figure 1."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.d_model)  # the output's matrix too, 3.4
        self.E_x = self.E_y if cfg.joint else nn.Embedding(cfg.src_vocab, cfg.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.layers))
        self.drop = nn.Dropout(cfg.dropout)
        self.init(cfg)

    def init(self, cfg):
        """Glorot, but a sublayer's last matrix is divided by sqrt(2N): see the deviations."""
        for name, p in self.named_parameters():
            if name.startswith("E_"):
                nn.init.normal_(p, 0, cfg.d_model**-0.5)
            elif p.ndim == 2:
                last = name.endswith(("W_O.weight", "ffn.2.weight"))
                for W in p.chunk(3) if "QKV" in name else [p]:
                    nn.init.xavier_uniform_(W, (2 * cfg.layers) ** -0.5 if last else 1.0)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def tables(self, n):
        """Of n positions: PE (3.5), and the mask over what is ahead of each (3.2.3)."""
        E = self.E_y.weight
        exact = torch.promote_types(E.dtype, torch.float)  # bf16 cannot count to 300
        pos = torch.arange(n, dtype=exact, device=E.device)
        two_i = torch.arange(0, self.cfg.d_model, 2, dtype=exact, device=E.device)
        angle = pos.unsqueeze(1) / 10000 ** (two_i / self.cfg.d_model)
        PE = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)  # (n,d_model)
        ahead = pos > pos.unsqueeze(1)  # (n,n)
        return PE.to(E.dtype), MultiHeadAttention.hide(ahead, E.dtype)

    def embed(self, E, words, PE):
        return self.drop(E(words) * math.sqrt(self.cfg.d_model) + PE)  # sections 3.4, 3.5

    def encode(self, src):  # the mask, then the source's K and V for each decoder layer
        PE, _ = self.tables(src.size(1))
        x = self.embed(self.E_x, src, PE)  # (B,S,d_model)
        mask = MultiHeadAttention.hide(src == PAD, x.dtype)[:, None, None]  # (B,1,1,S)
        for layer in self.encoder:
            x = layer(x, mask)
        return mask, *(layer.source_attention.project(x, "KV") for layer in self.decoder)

    def start(self, memory, room=256):  # t = 0, tables, empty caches: for so many steps at most
        mask, *sources = memory
        t = torch.zeros(1, dtype=torch.long, device=mask.device)
        caches = (KV.new_zeros(len(KV), room, *KV.shape[2:]) for KV in sources)
        return t, *self.tables(room), *caches

    def pick(self, state, rows):  # the states of these rows, for beam search
        t, PE, ahead, *caches = state
        return t, PE, ahead, *(cache[rows] for cache in caches)

    def step(self, y, state, memory):  # y (B,)
        t, PE, ahead, *caches = state
        mask, *sources = memory
        y = self.embed(self.E_y, y.unsqueeze(1), PE[t])
        ahead_t = ahead[t]
        for layer, source, cache in zip(self.decoder, sources, caches):
            y, _ = layer(y, ahead_t, source, mask, cache, t)
        return F.linear(y.squeeze(1), self.E_y.weight), (t + 1, PE, ahead, *caches)

    def forward(self, src, tgt_in, need_alpha=False):
        mask, *sources = self.encode(src)
        PE, ahead = self.tables(tgt_in.size(1))
        y = self.embed(self.E_y, tgt_in, PE)  # (B,T,d_model)
        alphas = []
        for layer, source in zip(self.decoder, sources):
            y, alpha = layer(y, ahead, source, mask, need_alpha=need_alpha)
            alphas.append(alpha)
        logits = F.linear(y, self.E_y.weight)  # section 3.4   (B,T,V)
        return (logits, alphas[self.cfg.align_layer - 1].mean(1)) if need_alpha else logits


def make_optimizer(model, cfg):
    """Section 5.3; update sets the rate, (3), before each step."""
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


def learning_rate(cfg, step):
    """Equation (3); with --cooldown times the share of the steps still to come."""
    rate = cfg.lr * cfg.d_model**-0.5 * min(step**-0.5, step * cfg.warmup**-1.5)  # eq. (3)
    return rate * max(1 - (step - 1) / cfg.steps, 0) if cfg.cooldown else rate


Model = Transformer  # its name from here on
Parts = (EncoderLayer, DecoderLayer)  # what --compile compiles

# ---- the same in every script from here on ----

RANK = int(os.environ.get("RANK", 0))  # torchrun sets both
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
COPIES = weakref.WeakKeyDictionary()  # the bf16 copies of models: it takes long to make one


@torch.no_grad()
def in_bf16(model):
    """On CUDA the model's bf16 copy, its weights brought up to date; elsewhere the model itself."""
    if not next(model.parameters()).is_cuda:
        return model
    if model not in COPIES:
        with torch.inference_mode(False):
            net = copy.deepcopy(model).half()  # lays RNN weights out for cuDNN; bf16 would not
        for p in net.parameters():
            p.data = p.data.view(torch.bfloat16)  # the layout alone; the values come below
        COPIES[model] = net
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, and long, for every shape
    torch._foreach_copy_(list(COPIES[model].parameters()), list(model.parameters()))
    return COPIES[model]


def graphed(function, device, compiles=False):
    """The function as CUDA graphs: recorded when it meets new shapes, replayed from then on."""
    graphs = {}  # by shape: a CUDA graph, the inputs it reads and the output it writes
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def call(*inputs):
        nonlocal compiles
        if compiles:  # in its first call, which a graph cannot record
            compiles = False
            return function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in graphs:
            graph, buffers = torch.cuda.CUDAGraph(), [x.clone() for x in inputs]
            torch.cuda.synchronize(device)
            if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > 2**31:
                torch.cuda.empty_cache()  # a recording cannot use what others have left behind
            with torch.cuda.stream(stream), torch.compiler.set_stance("eager_on_recompile"):
                graph.capture_begin(pool, "relaxed")  # libraries may be loading their kernels
                output = function(*buffers)
                graph.capture_end()
            graphs[shapes] = graph, buffers, output
        graph, buffers, output = graphs[shapes]
        for buffer, x in zip(buffers, inputs):
            buffer.copy_(x)
        graph.replay()  # one launch instead of thousands
        return output

    return call


def summed_loss(logits, y, smoothing=0.0):
    """Negative log-likelihood of y (B,T), summed over all words but padding."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float)).flatten(0, 1)
    how = dict(ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    return F.cross_entropy(z, y.flatten(), **how)


def make_train_step(model, cfg, optimizer=None):
    """step(src, tgt) -> loss per target word: forward, backward, clip, update; on CUDA in bf16."""
    optimizer = optimizer or make_optimizer(model, cfg)
    net = in_bf16(model)  # on CUDA a copy, elsewhere the model itself
    device = next(model.parameters()).device
    criterion = compile_parts(net) if cfg.compile and net is not model else summed_loss
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # for good: graphs add to this very tensor

    def backward(src, tgt, scale):
        loss = criterion(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing) * scale
        loss.backward()
        if net is not model:
            for p, q in zip(model.parameters(), net.parameters()):
                p.grad.add_(q.grad)
            net.zero_grad()
        return loss.detach()

    compute = graphed(backward, device, cfg.compile) if net is not model else backward

    def step(src, tgt):
        net.train()
        words = (tgt[:, 1:] != PAD).sum()
        count = words if cfg.per == "token" else (tgt[:, 0] != PAD).sum()  # sentences
        loss = torch.zeros((), device=device)
        pieces = WORLD_SIZE * cfg.accumulate  # of a batch, one or more a process
        for k in range(RANK, min(pieces, len(src)), WORLD_SIZE):
            piece = src[k::pieces], tgt[k::pieces], 1 / count
            loss += compute(*(x.to(device, non_blocking=net is not model) for x in piece))
        update(model, cfg, optimizer)
        if WORLD_SIZE > 1:
            dist.all_reduce(loss)
        return loss * (count / words)  # per word, whatever was counted

    return step


def compile_parts(net):
    """Has torch.compile fuse the network's Parts; returns the loss, fused likewise."""
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):  # torch 2.11 has it
        torch._inductor.config.triton.mix_order_reduction = False  # slow in LayerNorm's gradient
    torch.fx.experimental._config.use_duck_shape = False  # sizes may be equal by chance
    for part in net.modules():
        if isinstance(part, Parts):
            part.compile(dynamic=True)  # once for all shapes
    return torch.compile(summed_loss, dynamic=True)


def update(model, cfg, optimizer):
    """Moves the weights by their gradients, and those of the copy with them."""
    if WORLD_SIZE > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0) + 1  # kept there, so that checkpoints hold it
        group["lr"] = learning_rate(cfg, group["step"])
    if 0 < cfg.clip < math.inf:
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # graphs hold these tensors
    in_bf16(model)  # the copy gets the new weights


@torch.inference_mode()
def greedy(model, src, max_len, choose=None):
    """The likeliest word, again and again: (B,T'), EOS kept, PAD after it; max_len counts EOS."""
    net = in_bf16(model).eval()
    limit = torch.as_tensor(max_len, device=src.device).expand(len(src))  # one for all, or each
    memory = net.encode(src)
    state = [x.clone() for x in net.start(memory, int(limit.max()))]
    out = src.new_full((len(src), int(limit.max())), PAD)
    y = torch.full_like(src[:, 0], BOS)
    ended = limit <= 0
    t = torch.zeros_like(src[0, :1])

    def advance():  # in place, so that a graph can do it again
        logits, new_state = net.step(y, state, memory)
        if choose is None:
            logits[:, PAD] = -torch.inf  # it is no word
            words = logits.argmax(-1).masked_fill(ended, PAD)
        else:  # beam search: which hypotheses go on, and how
            words, rows = choose(logits, out, ended)
            new_state = net.pick(new_state, rows)
            out.copy_(out[rows])
        y.copy_(words)
        out.index_copy_(1, t, y.unsqueeze(1))
        t.add_(1)
        ended.copy_((y == EOS) | (y == PAD) | (t >= limit))
        for old, new in zip(state, new_state):
            old.copy_(new)

    proceed = graphed(advance, src.device) if src.is_cuda else advance
    for i in range(out.size(1)):
        if i % 8 == 0 and ended.all():  # seldom: to look is to wait for the GPU
            break
        proceed()
    return out[:, : int((out != PAD).sum(1).max())]


def beam(model, src, max_len, K, penalty=0.0):
    """Of K hypotheses a sentence the best by log p / ((5 + |y|) / 6)^penalty, Wu et al. 2016."""
    if K == 1:
        return greedy(model, src, max_len)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float)
    score = torch.full((len(src), K), -torch.inf, dtype=dtype, device=src.device)
    score[:, 0] = 0  # at first a sentence's hypotheses are the same: one begins
    first = torch.arange(len(src), device=src.device).unsqueeze(1) * K  # each one's first row

    def choose(logits, out, ended):
        log_p = logits.log_softmax(-1, dtype)  # (BK,V)
        log_p[:, PAD] = logits[:, PAD] = -torch.inf
        words = logits.topk(min(K, logits.size(1))).indices  # no row has more than K winners
        gain = log_p.gather(1, words)  # (BK,K)
        gain.masked_fill_(ended.unsqueeze(1), -torch.inf)
        gain[:, 0].masked_fill_(ended, 0)  # an ended one goes on in one way alone, at no cost
        words.masked_fill_(ended.unsqueeze(1), PAD)
        total = score.view(-1, 1) + gain
        length = ((out != PAD).sum(1) + ~ended).to(dtype).unsqueeze(1)  # this word too
        rank = total / ((5 + length) / 6) ** penalty
        best = rank.view(len(src), -1).topk(K).indices + first * gain.size(1)  # (B,K), sorted
        score.copy_(total.flatten()[best])
        return words.flatten()[best.flatten()], best.flatten() // gain.size(1)

    limit = torch.as_tensor(max_len, device=src.device).expand(len(src)).repeat_interleave(K)
    return greedy(model, src.repeat_interleave(K, 0), limit, choose)[::K]  # the best is first


@torch.no_grad()
def align(model, src, tgt):
    """alpha (B,T,S) of a given target, in one forced pass; in the model's own floats, not bf16."""
    return model.eval()(src, tgt[:, :-1], need_alpha=True)[1]


def batches_of(pairs, vocabularies, model, tokens=8192):
    """(rows, src, tgt) of all pairs, like lengths together, on the model's device."""
    bitext = data.Bitext([data.sentences_of(pair[:2]) for pair in pairs], vocabularies)
    device = next(model.parameters()).device
    for rows in bitext.in_order(tokens):
        src, tgt = (torch.from_numpy(x).to(device) for x in bitext.batch(rows))
        yield rows, src, tgt


def translate(model, sentences, vocabularies):
    """The words of each sentence's translation, found as model.cfg says: greedy or beam."""
    cfg = model.cfg
    pairs = [(source, []) for source in data.sentences_of(sentences)]
    tokens = 65536 if next(model.parameters()).is_cuda else 16384  # what is fastest there
    for rows, src, _ in batches_of(pairs, vocabularies, model, tokens // cfg.beam):
        limit = ((src != PAD).sum(1) + 49).masked_fill(src[:, 0] == EOS, 0)  # n + 50; 0 if n is 0
        for row, numbers in zip(rows, beam(model, src, limit, cfg.beam, cfg.alpha).tolist()):
            pairs[row][1][:] = vocabularies[1].decode(numbers)
    if cfg.replace_unk:
        return data.replace_unknown(pairs, alignments(model, pairs, vocabularies))
    return [words for _, words in pairs]


def alignments(model, pairs, vocabularies):
    """alpha of each pair: a row per target word, a column per source word, the end marks last."""
    pairs = [data.sentences_of(pair[:2]) for pair in pairs]
    found = [None] * len(pairs)
    for rows, src, tgt in batches_of(pairs, vocabularies, model):
        for row, alpha in zip(rows, align(model, src, tgt).float().cpu().numpy()):
            source, target = pairs[row]
            found[row] = alpha[: len(target) + 1, : len(source) + 1]
    return found


@torch.no_grad()
def loss_of(model, pairs, vocabularies):
    """Loss per target word, end marks counted."""
    net = in_bf16(model).eval()
    batches = batches_of(pairs, vocabularies, model)
    losses = (summed_loss(net(src, tgt[:, :-1]), tgt[:, 1:]).item() for _, src, tgt in batches)
    return sum(losses) / sum(len(data.words_of(pair[1])) + 1 for pair in pairs)


def evaluate(model, pairs, vocabularies):
    """Loss, perplexity, BLEU and, where there is gold, alignment error on a test set."""
    loss = loss_of(model, pairs, vocabularies)
    hypotheses = translate(model, [pair[0] for pair in pairs], vocabularies)
    alphas = alignments(model, pairs, vocabularies) if len(pairs[0]) > 2 else None  # [2]: gold
    return dict(loss=loss, ppl=math.exp(min(loss, 700))) | data.scores(pairs, hypotheses, alphas)


def read_checkpoint(path, device):
    """What save wrote, if this script did; code in the file is not run."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["script"] == Path(__file__).stem:
            return saved
        fault = f"made by {saved['script']}.py"
    except Exception as error:  # a torn file fails in any way it likes
        fault = getattr(error, "strerror", None) or type(error).__name__
    raise data.InputError(f"{path}: not a sound checkpoint ({fault}); train first, or see --out")


def load(path, device="cpu", **flags):
    """(model, vocabularies) of a run's folder or of one checkpoint; flags change its Config."""
    saved = read_checkpoint(Path(path, "model.pt") if Path(path).is_dir() else path, device)
    model = Model(Config(**data.changed(saved["config"], flags))).to(device)
    model.load_state_dict(saved.get("model") or data.mean(saved["recent"]))  # last.pt's
    return model.eval(), [data.Vocabulary(words) for words in saved["words"]]


def fit(model, corpus, out, saved=None):
    """Trains to the last step. model.pt: best on valid, or --average's mean; last.pt: to resume."""
    cfg = model.cfg
    about = dict(script=Path(__file__).stem, config=vars(cfg), **corpus.about)

    def save(name, **content):
        data.write(out / name, about | content, torch.save)

    if saved is None:  # so that a run that is stopped before its first look can be resumed
        saved = dict(step=0, log=[], recent=[])
        save("last.pt", **saved)
    optimizer = make_optimizer(model, cfg)
    done, log, recent = saved["step"], saved["log"], saved["recent"]
    if recent:
        model.load_state_dict(recent[-1])
        optimizer.load_state_dict(saved["optimizer"])
    train_step = make_train_step(model, cfg, optimizer)
    begin = time.perf_counter() - (log[-1]["seconds"] if log else 0)
    batches = corpus.train.batches(cfg.tokens, cfg.sentences, cfg.seed, done)
    bar = trange(done + 1, cfg.steps + 1, initial=done, total=cfg.steps, disable=RANK > 0 or None)
    for step, batch in zip(bar, batches):
        torch.manual_seed(hash((cfg.seed, RANK, step)))  # so that no random state need be saved
        loss = train_step(*(torch.from_numpy(x) for x in batch))
        if step % cfg.every and step < cfg.steps:
            continue
        with torch.compiler.set_stance("force_eager"):  # not worth compiling anew
            valid_loss = loss_of(model, corpus.valid, corpus.vocabularies)
        best = all(valid_loss < line["valid_loss"] for line in log)
        seconds = time.perf_counter() - begin
        log.append(dict(step=step, loss=loss.item(), valid_loss=valid_loss, seconds=seconds))
        data.show(bar, log[-1])
        recent = [*recent, copy.deepcopy(model.state_dict())][-cfg.average :]
        if best or cfg.average > 1:
            save("model.pt", model=data.mean(recent))
        save("last.pt", step=step, log=log, recent=recent, optimizer=optimizer.state_dict())
        data.write_log(out, log)
    if not (out / "model.pt").exists():  # resumed without it, and not better since
        save("model.pt", model=data.mean(recent))
    return log


def train(args, device):
    """Trains a new run, or goes on with one, and reports on it."""
    begin = time.perf_counter()
    last = args.out / "last.pt"  # a run that had hardly begun has none
    saved = read_checkpoint(last, device) if args.resume and last.exists() else None
    cfg = Config(**(data.changed(saved["config"], args.config) if saved else args.config))
    files = (args.train, args.valid) if args.train or not saved else saved["files"]
    corpus = data.Corpus(cfg, *files, saved["words"] if saved else None)
    torch.manual_seed(cfg.seed)
    model = Model(dataclasses.replace(cfg, **corpus.sizes)).to(device)
    if RANK == 0:
        data.claim(args.out, args.resume)
        print(f"{corpus}; {sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    log = fit(model, corpus, args.out, saved)
    if RANK == 0:
        model, vocabularies = load(args.out, device, **args.config)
        result = evaluate(model, corpus.test, vocabularies)
        pairs = list(zip(corpus.examples, translate(model, corpus.examples, vocabularies)))
        alphas = alignments(model, pairs, vocabularies)
        result |= dict(seconds=time.perf_counter() - begin, seed=cfg.seed)
        result |= dict(gpu_memory_gib=torch.cuda.max_memory_reserved() / 2**30)
        data.report(args.out, log, corpus, result, pairs, alphas)


def answer(args, device):
    """--test: scores. --translate and --align: a line for each line, some thousand at a time."""
    model, vocabularies = load(args.out, device, **args.config)
    if args.test:
        print(data.in_words(evaluate(model, data.some_pairs(*args.test), vocabularies)))
        return
    for pairs in data.chunks(args.align, vocabularies[0]):
        if args.translate:
            sources = [source for source, _ in pairs]
            pairs = list(zip(sources, translate(model, sources, vocabularies)))
        alphas = alignments(model, pairs, vocabularies) if args.draws else None
        data.print_answers(args, pairs, alphas)


def main(argv=None):
    """The command line; a user's mistake gets one line and status 2."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # less waste
    torch.backends.mkldnn.set_flags(False)  # oneDNN: slower on ARM, on x86 for some scripts
    has = dict(cpu=True, mps=torch.backends.mps.is_available(), cuda=torch.cuda.is_available())
    with data.one_line_for_mistakes():
        args = data.parse_flags(Config, __doc__, [name for name in has if has[name]], argv)
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if WORLD_SIZE > 1:
            dist.init_process_group()
        work = answer if args.translate or args.align or args.test else train
        work(args, torch.device(args.device))


if __name__ == "__main__":
    main()
