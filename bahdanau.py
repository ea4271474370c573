# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""RNNsearch: neural machine translation with additive attention.
Bahdanau, Cho, Bengio 2015, Neural Machine Translation by Jointly Learning to Align and Translate,
arXiv 1409.0473

    h_j = [->h_j ; <-h_j]                      annotation of source word j                    (7)
    e_ij = v_a^T tanh(W_a s_{i-1} + U_a h_j)   alignment model                              A.1.2
    alpha_ij = softmax_j(e_ij)                 attention weights, the soft alignment          (6)
    c_i = sum_j alpha_ij h_j                   context of target word i                       (5)
    p(y_i | y_<i, x) = g(y_{i-1}, s_{i-1}, c_i)   maxout layer, then softmax                A.2.2
    s_i = f(s_{i-1}, y_i, c_i)                 decoder state; see the first deviation       A.1.1

    python bahdanau.py                         built-in corpus: BLEU 99, AER 0.06, 1-2 min, 2 cores
    python bahdanau.py --medium --train train.en train.fr --valid dev.en dev.fr --out runs/fr

Deviations from the paper
- The paper prints s_i = f(s_{i-1}, y_{i-1}, c_i), so that s_{i-1} has not read y_{i-1}. In the
  authors' code (GroundHog), f reads y_i: the state that attends and predicts has read the previous
  word. We follow the code. Our f first reads <s> and an empty context; GroundHog uses s_0 as it is.
- The encoder is torch's fused GRU, which is faster on a GPU than the paper's cell; it computes
  r * (U h) instead of U (r * h). It has no biases, so that zero padding leaves a zero state
  unchanged; in GroundHog, the candidate state and the embeddings have biases, the gates have none.
  The decoder's cell is the paper's, with biases.
- We clip the gradient of the mean over sentences; GroundHog clips that of the sum (80 times it).
- Batches hold pairs of similar length from the whole corpus, reshuffled every epoch; the paper
  sorts 1,600 pairs at a time. Where the paper is silent, we use beam 10, the weights with the best
  validation loss, and 0 to n + 50 words for n source words. GroundHog allows n/2 to 3n words, and
  factorizes W_o through 620 units. With --fast, bf16.
- Without --paper: smaller, Adam, dropout, label smoothing, and more (see --help).
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

# x source, y target, h annotations, s decoder state, alpha attention weights, c context; o is the
# elementwise product. Shapes: B batch, S and T source and target length with EOS, E embedding,
# H hidden, A alignment and l maxout units, V vocabulary. In a mask, True = masked.


class AdditiveAttention(nn.Module):
    """Additive attention, A.1.2: context, alpha = attention(query, source, mask)."""

    def __init__(self, query_size, source_size, units):  # of s_{i-1}, of h_j, of the tanh layer
        super().__init__()
        self.W_a = nn.Linear(query_size, units, bias=False)
        self.U_a = nn.Linear(source_size, units, bias=False)
        self.v_a = nn.Parameter(torch.randn(units) / math.sqrt(units))  # 0 in RNNsearch, B.1

    def keys(self, h):  # does not depend on the query, so it can be computed once per sentence
        return self.U_a(h)

    def forward(self, query, source, mask=None, keys=None):
        """query (B,T,query_size), source (B,S,source_size), mask bool (B,S), True at padding; keys:
        see keys(). Returns context (B,T,source_size) and alpha (B,T,S)."""
        assert query.ndim == 3, "query must be (B,T,query_size)"
        s, h = query, source  # the paper's symbols
        mask = torch.zeros_like(h[..., 0], dtype=torch.bool) if mask is None else mask
        assert mask.dtype == torch.bool and mask.shape == h.shape[:2], "mask must be bool (B,S)"
        mask = mask.unsqueeze(1)  # (B,1,S)
        keys = self.keys(h) if keys is None else keys  # (B,S,A)
        e = torch.tanh(self.W_a(s).unsqueeze(2) + keys.unsqueeze(1)) @ self.v_a  # A.1.2   (B,T,S)
        alpha = e.masked_fill(mask, -torch.inf).softmax(-1)  # eq. (6)
        alpha = alpha.masked_fill(mask, 0)  # 0, not NaN, if the whole source is masked
        return alpha @ h, alpha  # eq. (5)


class GatedUnit(nn.Module):
    """f, the decoder's GRU, A.1.1: the context enters the candidate state and both gates."""

    def __init__(self, emb, hidden, context):
        super().__init__()
        self.W = nn.Linear(emb, 3 * hidden)  # W_z, W_r, W stacked, like C and U_zr below
        self.C = nn.Linear(context, 3 * hidden, bias=False)
        self.U_zr = nn.Linear(hidden, 2 * hidden, bias=False)
        self.U = nn.Linear(hidden, hidden, bias=False)

    def forward(self, y, s, c, Wy=None):  # y (B,1,E), s (B,1,H), c (B,1,2H)
        H = s.size(-1)
        Wy = self.W(y) if Wy is None else Wy  # does not depend on the state, like keys   (B,1,3H)
        gates, candidate = (Wy + self.C(c)).split([2 * H, H], -1)
        z, r = torch.sigmoid(gates + self.U_zr(s)).chunk(2, -1)
        s_tilde = torch.tanh(candidate + self.U(r * s))  # U [r o s], not r o (U s)
        return (1 - z) * s + z * s_tilde


class RNNsearch(nn.Module):
    """The complete model: bidirectional encoder, attention, decoder, maxout output layer."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.E_x = nn.Embedding(cfg.src_vocab, cfg.emb)
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.emb)
        self.encoder = nn.GRU(cfg.emb, cfg.hidden, bidirectional=True, bias=False, batch_first=True)
        self.attention = AdditiveAttention(cfg.hidden, 2 * cfg.hidden, cfg.attn)
        self.cell = GatedUnit(cfg.emb, cfg.hidden, 2 * cfg.hidden)
        self.W_s = nn.Linear(cfg.hidden, cfg.hidden)
        self.U_o = nn.Linear(cfg.hidden, 2 * cfg.maxout)
        self.V_o = nn.Linear(cfg.emb, 2 * cfg.maxout, bias=False)
        self.C_o = nn.Linear(2 * cfg.hidden, 2 * cfg.maxout, bias=False)
        self.W_o = nn.Linear(cfg.maxout, cfg.tgt_vocab)
        self.drop = nn.Dropout(cfg.dropout)
        self.drop_out = nn.Dropout(cfg.dropout_out)
        self.init_weights()

    def init_weights(self):  # B.1
        for name, p in self.named_parameters():
            if name.endswith(("bias", "v_a")):
                nn.init.zeros_(p)
            elif "weight_hh" in name or name.startswith("cell.U"):  # recurrent
                for gate in p.split(p.size(1)):  # one square matrix per gate
                    nn.init.orthogonal_(gate)
            elif p.ndim == 2:
                is_alignment = name.startswith("attention")  # W_a and U_a
                nn.init.normal_(p, 0, self.cfg.init_attn if is_alignment else self.cfg.init)

    def encode(self, src):
        # Padding is zero vectors: without biases, <-h, which reads them first, remains exactly 0.
        x = self.E_x(src) * (src != PAD).unsqueeze(-1)  # (B,S,E)
        h, _ = self.encoder(self.drop(x))  # ->h and <-h, eq. (7)   (B,S,2H)
        h = self.drop(h).contiguous()  # a copy, because cuDNN returns a view of (S,B,2H)
        return h, self.attention.keys(h), src == PAD  # memory: annotations, keys (B,S,A), mask

    def init_state(self, memory, max_len=None):  # only transformer.py needs max_len
        h, _, _ = memory
        backward_1 = h[:, :1, h.size(-1) // 2 :]  # <-h_1
        s_0 = torch.tanh(self.W_s(backward_1))  # A.2.2   (B,1,H)
        return s_0, torch.zeros_like(h[:, :1])  # no context yet   (B,1,2H)

    def reorder(self, state, rows):  # for beam search
        return tuple(x[rows] for x in state)

    def output(self, s, y, c):  # s_{i-1}, E y_{i-1}, c_i
        t_tilde = self.U_o(s) + self.V_o(y) + self.C_o(c)  # A.2.2   (B,T,2l)
        t = t_tilde.unflatten(-1, (-1, 2)).amax(-1)  # maxout over pairs   (B,T,l)
        return self.W_o(self.drop_out(t))

    def advance(self, y, state, memory, Wy=None):  # y (B,1,E) -> next state, alpha_i (B,1,S)
        h, keys, mask = memory
        s = self.cell(y, *state, Wy)  # s_{i-1}: has read y_{i-1} (see Deviations) and c_{i-1}
        c, alpha = self.attention(s, h, mask, keys)  # c_i
        return (s, c), alpha

    def step(self, y, state, memory):  # y_{i-1} (B,) -> logits of y_i (B,V), next state
        y = self.drop(self.E_y(y.unsqueeze(1)))  # (B,1,E)
        (s, c), _ = self.advance(y, state, memory)
        return self.output(s, y, c).squeeze(1), (s, c)

    def forward(self, src, tgt_in, need_alpha=False):
        memory = self.encode(src)
        state = self.init_state(memory)
        y = self.drop(self.E_y(tgt_in))  # (B,T,E)
        Wy = self.cell.W(y)  # one matmul for all steps   (B,T,3H)
        steps = []
        # Teacher forcing: y_{i-1} is the reference's word. To feed the model's own words in
        # training, call step() in this loop: it reads a word and returns logits of the next.
        for y_before, Wy_before in zip(y.split(1, dim=1), Wy.split(1, dim=1)):
            state, alpha = self.advance(y_before, state, memory, Wy_before)
            steps.append((*state, alpha))
        s, c, alpha = (torch.cat(x, 1) for x in zip(*steps))  # (B,T,H), (B,T,2H), (B,T,S)
        logits = self.output(s, y, c)  # (B,T,V)
        return (logits, alpha) if need_alpha else logits


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
    emb: int = 128             # embedding size (m)
    hidden: int = 128          # units of the decoder and of each encoder direction (n)
    attn: int = 128            # units of the alignment model (n')
    maxout: int = 64           # maxout units of the deep output (l)
    init: float = 0.1          # standard deviation of initial weights (recurrent: orthogonal)
    init_attn: float = 0.15    # standard deviation of the initial W_a and U_a
    # training
    optimizer: typing.Literal["adam", "adadelta"] = "adam"  # Adam, or the paper's Adadelta
    average: int = 1           # average the weights at the last N validations (1: keep the best)
    _: dataclasses.KW_ONLY     # --resume and load may change the fields below this line
    lr: float = 0.009          # learning rate
    warmup: int = 30           # steps of linear warm-up (Adam only; a linear decay caps it)
    clip: float = 0.3          # maximum gradient norm (0: no clipping)
    dropout: float = 0.1       # dropout rate of embeddings and annotations; none in the paper
    dropout_out: float = 0.0   # dropout rate of the maxout layer; none in the paper
    smoothing: float = 0.1     # label smoothing; none in the paper
    loss_per: typing.Literal["token", "sentence"] = "token"  # what the loss is averaged over
    batch_tokens: int = 2048   # maximum source + target tokens per batch, padding included
    batch_sentences: int = 1000  # maximum sentences per batch
    accumulate: int = 1        # split each batch into N micro-batches per process to save memory
    steps: int = 900           # training steps
    eval_every: int = 100      # steps between validations
    fast: bool = False         # GPU: bf16, CUDA graphs; Python in the model runs once per shape
    compile: bool = False      # with --fast, also torch.compile; training starts later
    seed: int = 1              # random seed of initialization, batches and dropout
    # decoding
    beam: int = 1              # beam size; 1 is greedy decoding
    length_penalty: float = 0.0  # beam search ranks by log p / ((5 + |y|) / 6)^length_penalty
    replace_unk: bool = False  # replace <unk> by its source word; needs <unk> in training text
    # fmt: on

    def __post_init__(self):
        data.check(self, seed=(0, 2**63), dropout=(0, 1), dropout_out=(0, 1), smoothing=(0, 1))

    @classmethod
    def medium(cls, **overrides):
        """For 10,000 to 100,000 sentence pairs; chosen on the validation set of Multi30k."""
        vocabulary = dict(src_vocab=20000, tgt_vocab=20000, min_count=2)
        sizes = dict(emb=256, hidden=512, attn=256, maxout=256, dropout=0.5, dropout_out=0.5)
        recipe = dict(lr=0.006, warmup=200, clip=1.0, average=10, beam=5, length_penalty=1.0)
        batches = dict(batch_tokens=16384, accumulate=2, steps=3000, eval_every=100)
        return cls(**vocabulary | sizes | recipe | batches | dict(fast=True) | overrides)

    @classmethod
    def paper(cls, **overrides):
        """Section 4.2, A.2.3, appendix B, and the updates of RNNsearch-50 in table 2."""
        sizes = dict(emb=620, hidden=1000, attn=1000, maxout=500, dropout=0.0)
        init = dict(init=0.01, init_attn=0.001)
        recipe = dict(optimizer="adadelta", lr=1.0, smoothing=0.0, loss_per="sentence", clip=1.0)
        batches = dict(batch_sentences=80, batch_tokens=10000, max_len=50)
        rest = dict(steps=288000, eval_every=2000, fast=True, compile=True, beam=10)
        return cls(**sizes | init | recipe | batches | rest | overrides)


def make_optimizer(model, cfg):
    """Adadelta as in B.2, or Adam."""
    if cfg.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), lr=cfg.lr, rho=0.95, eps=1e-6)
    return torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)


def learning_rate(cfg, step):
    """Adadelta: constant. Adam: linear warm-up, capped by a linear decay to 0."""
    if cfg.optimizer == "adam":
        return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    return cfg.lr


Model = RNNsearch
COMPILED = (AdditiveAttention, GatedUnit)  # what --compile compiles, besides the loss

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
