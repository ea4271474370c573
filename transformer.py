# /// script
# requires-python = ">=3.10"
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

    python transformer.py                      built-in corpus: BLEU 97, AER 0.07, 2 min on 2 cores
    python transformer.py --medium --train train.en train.fr --valid valid.en valid.fr
The alignment is the cross-attention of the last layer, averaged over heads. With 4 layers the third
aligns better on the built-in corpus (--align-layer 3).
Deviations from the paper
- Text is split only at spaces, so byte-pair units must be made beforehand. Initialization, on
  which the paper is silent: embeddings N(0, 1/d_model), biases 0, Glorot otherwise, divided by
  sqrt(2N) in the last matrix of each sublayer. On Multi30k, 4 layers stayed below BLEU 25 without
  the division and exceeded 54 with it.
- 25,000 source and 25,000 target tokens per batch are about 60,000 in our count with padding.
- Sentences of more than 100 words are skipped. Averaged checkpoints are --eval-every steps apart,
  not 10 minutes. A finished hypothesis leaves the beam, which shrinks; tensor2tensor always extends
  K hypotheses. Translations have no minimum length. On CUDA, bf16 is used for speed.
- Without --paper: smaller, and the learning rate also decays to 0. The default also has two
  vocabularies and no dropout.
"""

import copy
import dataclasses
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

# Q queries, K keys, V values, x source, y target. Shapes: B batch, S source length, T target
# length, h heads, d_k = d_model / h, V vocabulary. In a bool mask, True = masked.


class MultiHeadAttention(nn.Module):
    """Multi-head attention, 3.2.2: c, alpha = attention(query, source, mask, need_alpha=True)."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_Q = nn.Linear(d_model, d_model, bias=False)  # W_1^Q, ..., W_h^Q
        self.W_KV = nn.Linear(d_model, 2 * d_model, bias=False)  # all W_i^K, then all W_i^V
        self.W_O = nn.Linear(d_model, d_model, bias=False)

    def keys(self, source):  # K and V (B,S,2,h,d_k), which do not depend on the query
        return self.W_KV(source).unflatten(-1, (2, self.heads, -1))

    @staticmethod
    def additive_mask(mask, dtype):  # 0 or -inf for scores (B,1,T,S), and which queries see any key
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask[:, None, None]
        seen = ~mask.all(-1, keepdim=True)  # if all keys are masked, adding -inf would give NaN
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask & seen, -torch.inf), seen

    def forward(self, query, source, mask=None, keys=None, need_alpha=False):
        """query (B,T,d_model), source (B,S,d_model), mask bool (B,S) or (B,T,S)."""
        Q = self.W_Q(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B,h,T,d_k)
        keys = self.keys(source) if keys is None else keys
        K, V = keys.transpose(1, 3).unbind(2)  # (B,h,S,d_k)
        seen = None
        if mask is not None and not (mask.ndim == 4 and mask.is_floating_point()):  # not additive
            B, T, S = len(Q), Q.size(2), K.size(2)
            is_valid = mask.shape in ((B, S), (B, T, S), (1, T, S))
            assert is_valid and mask.dtype == torch.bool, "mask must be bool (B,S) or (B,T,S)"
            mask, seen = self.additive_mask(mask, Q.dtype)
        if need_alpha:
            e = Q @ K.mT / math.sqrt(Q.size(-1))  # (B,h,T,S)
            alpha = (e if mask is None else e + mask).softmax(-1)
            alpha = alpha if seen is None else alpha * seen
            heads = alpha @ V  # eq. (1)   (B,h,T,d_k)
        else:  # one fused kernel, which does not store alpha
            heads, alpha = F.scaled_dot_product_attention(Q, K, V, mask), None
            heads = heads if seen is None else heads * seen
        return self.W_O(heads.transpose(1, 2).flatten(2)), alpha  # section 3.2.2   (B,T,d_model)


class EncoderLayer(nn.Module):
    """Self-attention over the source, then the feed-forward network, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        W_1, W_2 = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.ffn = nn.Sequential(W_1, nn.ReLU(), W_2)  # eq. (2)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)

    def forward(self, x, mask):  # x (B,S,d_model)  mask (B,S), or additive (B,1,1,S)
        a, _ = self.self_attention(x, x, mask)  # section 3.2.3
        x = self.norm_1(x + self.drop(a))  # LayerNorm(x + Sublayer(x)), section 3.1
        return self.norm_2(x + self.drop(self.ffn(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network, section 3.1."""

    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.cross_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        W_1, W_2 = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.ffn = nn.Sequential(W_1, nn.ReLU(), W_2)  # eq. (2)
        self.drop = nn.Dropout(cfg.dropout)
        self.norm_1 = nn.LayerNorm(cfg.d_model)
        self.norm_2 = nn.LayerNorm(cfg.d_model)
        self.norm_3 = nn.LayerNorm(cfg.d_model)

    def forward(self, y, causal_mask, source, mask, past=None, need_alpha=False):
        """y (B,T,d_model); source: K, V of the source; past: of the target so far (None: of y)."""
        a, _ = self.self_attention(y, y, causal_mask, past)  # section 3.2.3
        y = self.norm_1(y + self.drop(a))
        c, alpha = self.cross_attention(y, None, mask, source, need_alpha)
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
        for name, p in self.named_parameters():  # initialization: see Deviations at the top
            if name.startswith("E_"):
                nn.init.normal_(p, 0, cfg.d_model**-0.5)
            elif p.ndim == 2:
                last = name.endswith(("W_O.weight", "ffn.2.weight"))
                matrices = p.chunk(2) if "W_KV" in name else [p]
                for W in matrices:
                    nn.init.xavier_uniform_(W, (2 * cfg.layers) ** -0.5 if last else 1.0)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def positional_encoding(self, n):  # (n,d_model), section 3.5
        weight = self.E_y.weight
        dtype = torch.promote_types(weight.dtype, torch.float)  # bf16 rounds positions above 256
        pos = torch.arange(n, dtype=dtype, device=weight.device)
        two_i = torch.arange(0, self.cfg.d_model, 2, dtype=dtype, device=weight.device)
        angle = pos.unsqueeze(1) / 10000 ** (two_i / self.cfg.d_model)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(weight.dtype)

    def causal_mask(self, n):  # (1,1,n,n), masks the words after each word, section 3.2.3
        return self.E_y.weight.new_full((1, 1, n, n), -torch.inf).triu(1)

    def embed(self, E, words, PE):
        return self.drop(E(words) * math.sqrt(self.cfg.d_model) + PE)  # sections 3.4, 3.5

    def encode(self, src):  # returns the mask, then K and V of the source for each decoder layer
        x = self.embed(self.E_x, src, self.positional_encoding(src.size(1)))  # (B,S,d_model)
        mask, _ = MultiHeadAttention.additive_mask(src == PAD, x.dtype)  # for all layers (B,1,1,S)
        for layer in self.encoder:
            x = layer(x, mask)
        return mask, *(layer.cross_attention.keys(x) for layer in self.decoder)

    def init_state(self, memory, max_len=256):  # t = 0, tables and empty caches for max_len steps
        mask, *sources = memory
        t = torch.zeros(1, dtype=torch.long, device=mask.device)
        caches = (KV.new_zeros(len(KV), max_len, *KV.shape[2:]) for KV in sources)
        return t, self.positional_encoding(max_len), self.causal_mask(max_len), *caches

    def reorder(self, state, rows):  # for beam search
        t, PE, causal_mask, *caches = state
        return t, PE, causal_mask, *(cache[rows] for cache in caches)

    def step(self, y, state, memory):  # y_{t-1} (B,) -> logits of y_t (B,V), next state
        t, PE, causal_mask, *caches = state
        mask, *sources = memory
        y = self.embed(self.E_y, y.unsqueeze(1), PE[t])  # (B,1,d_model)
        for layer, source, cache in zip(self.decoder, sources, caches):
            cache.index_copy_(1, t, layer.self_attention.keys(y))  # causal_mask hides the rest
            y, _ = layer(y, causal_mask[:, :, t], source, mask, cache)
        return F.linear(y.squeeze(1), self.E_y.weight), (t + 1, PE, causal_mask, *caches)

    def forward(self, src, tgt_in, need_alpha=False):
        mask, *sources = self.encode(src)
        y = self.embed(self.E_y, tgt_in, self.positional_encoding(tgt_in.size(1)))  # (B,T,d_model)
        causal_mask = self.causal_mask(tgt_in.size(1))
        alphas = []
        for layer, source in zip(self.decoder, sources):
            y, alpha = layer(y, causal_mask, source, mask, need_alpha=need_alpha)
            alphas.append(alpha)
        logits = F.linear(y, self.E_y.weight)  # section 3.4   (B,T,V)
        return (logits, alphas[self.cfg.align_layer - 1].mean(1)) if need_alpha else logits


@dataclasses.dataclass
class Config:
    # fmt: off
    # text
    src_vocab: int = 30000     # source vocabulary size; less frequent words become <unk>
    tgt_vocab: int = 30000     # target vocabulary size
    share_vocab: bool = False  # one vocabulary of --src-vocab words, one embedding matrix (3.4)
    min_count: int = 1         # words that occur fewer than N times become <unk>
    max_len: int = 0           # skip longer sentences (0: 100 words, or 30 in the built-in corpus)
    # model
    d_model: int = 96          # size of the embeddings and of every layer's output
    d_ff: int = 256            # hidden size of the feed-forward network
    heads: int = 4             # attention heads (h); d_k = d_v = d_model / heads
    layers: int = 2            # layers of the encoder and of the decoder (N)
    # training
    lr: float = 1.0            # factor on the learning rate, eq. (3)
    warmup: int = 400          # steps of linear warm-up, eq. (3)
    cooldown: bool = True      # also decay the learning rate linearly to 0; not in the paper
    clip: float = math.inf     # maximum gradient norm; the paper does not clip
    dropout: float = 0.0       # dropout rate of sublayer outputs and embeddings, section 5.4
    smoothing: float = 0.1     # label smoothing, section 5.4
    loss_per: typing.Literal["token", "sentence"] = "token"  # what the loss is averaged over
    batch_tokens: int = 1024   # maximum source + target tokens per batch, padding included
    batch_sentences: int = 1000  # maximum sentences per batch
    accumulate: int = 1        # split each batch into N micro-batches per process to save memory
    steps: int = 2000          # training steps
    eval_every: int = 200      # steps between validations
    average: int = 1           # average the weights at the last N validations (1: keep the best)
    compile: bool = False      # use torch.compile, on CUDA only
    seed: int = 1              # random seed of initialization, batches and dropout
    # decoding
    align_layer: int = 0       # decoder layer whose attention is the alignment (0: the last)
    beam: int = 1              # beam size; 1 is greedy decoding
    length_penalty: float = 0.0  # beam search ranks by log p / ((5 + |y|) / 6)^length_penalty
    replace_unk: bool = False  # replace each <unk> with the source word it attends to most
    # fmt: on

    def __post_init__(self):
        data.check(self)
        if self.d_model % self.heads or self.d_model % 2:
            raise data.InputError(f"--d-model: must be even and a multiple of --heads {self.heads}")
        if self.align_layer > self.layers:
            raise data.InputError(f"--align-layer: must be at most --layers {self.layers}")
        if self.share_vocab:
            self.tgt_vocab = self.src_vocab

    @classmethod
    def medium(cls, **overrides):
        """Transformer-tiny of Wu et al. 2021, arXiv 2105.14462; expects joint byte-pair units."""
        vocabulary = dict(src_vocab=20000, share_vocab=True)
        sizes = dict(d_model=128, d_ff=256, heads=4, layers=4, dropout=0.3)
        recipe = dict(lr=2.5, warmup=2000, average=10, beam=5, length_penalty=1.0)
        batches = dict(batch_tokens=16384, steps=8000, eval_every=250)
        return cls(**vocabulary | sizes | recipe | batches | overrides)

    @classmethod
    def paper(cls, **overrides):
        """The base model of table 3, decoded as in section 6.1."""
        vocabulary = dict(src_vocab=37000, share_vocab=True)  # section 5.1
        sizes = dict(d_model=512, d_ff=2048, heads=8, layers=6, dropout=0.1)
        recipe = dict(warmup=4000, cooldown=False, average=5, beam=4, length_penalty=0.6)
        batches = dict(batch_tokens=60000, batch_sentences=60000, steps=100000, eval_every=1000)
        return cls(**vocabulary | sizes | recipe | batches | dict(compile=True) | overrides)


def make_optimizer(model, cfg):
    """Section 5.3. The training step sets the learning rate before each update."""
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


def learning_rate(cfg, step):
    """Equation (3); with --cooldown, multiplied by the fraction of steps that remain."""
    rate = cfg.lr * cfg.d_model**-0.5 * min(step**-0.5, step * cfg.warmup**-1.5)  # eq. (3)
    return rate * max(1 - (step - 1) / cfg.steps, 0) if cfg.cooldown else rate


Model = Transformer
COMPILED = (EncoderLayer, DecoderLayer)  # what --compile compiles, besides the loss

# ---- the same in every script from here on ----


def make_train_step(model, cfg, optimizer=None):
    """Returns step(src, tgt): trains on one batch, returns its loss per token, with smoothing."""
    optimizer = optimizer or make_optimizer(model, cfg)
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    net = bf16_copy(model)  # on CUDA; elsewhere net is the model itself
    criterion = compile_parts(net) if on_gpu and cfg.compile else summed_loss
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # allocated once, because CUDA graphs add to these tensors

    def forward_backward(src, tgt, scale):
        bf16_copy(model)  # gives net the weights of the last update
        net.train()
        loss = criterion(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing) * scale
        loss.backward()
        move_gradients(net, model)
        return loss.detach()

    if on_gpu:  # with --compile, the first call compiles, which cannot be recorded
        forward_backward = graphed(forward_backward, device, eager_calls=int(cfg.compile))

    def step(src, tgt):
        tokens = (tgt[:, 1:] != PAD).sum()
        count = tokens if cfg.loss_per == "token" else (tgt[:, 0] != PAD).sum()  # sentences
        scale = (1 / count).to(device)
        loss = torch.zeros((), device=device)
        n = WORLD_SIZE * cfg.accumulate  # micro-batches per step, over all processes
        for k in range(RANK, min(n, len(src)), WORLD_SIZE):  # every process has the whole batch
            micro_batch = (x[k::n].to(device, non_blocking=on_gpu) for x in (src, tgt))
            loss += forward_backward(*micro_batch, scale)
        if WORLD_SIZE > 1:
            for tensor in [loss, *(p.grad for p in model.parameters())]:
                dist.all_reduce(tensor)  # a sum: scale already divides by the whole batch
        if 0 < cfg.clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for group in optimizer.param_groups:
            group["step"] = group.get("step", 0) + 1  # stored here so that checkpoints include it
            group["lr"] = learning_rate(cfg, group["step"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # CUDA graphs keep using the same tensors
        return loss * (count / tokens)  # per target token, whatever --loss-per says

    return step


def summed_loss(logits, y, smoothing=0.0):
    """Cross-entropy of the targets y (B,T), summed over all tokens but padding, in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float)).flatten(0, 1)
    options = dict(ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    return F.cross_entropy(logits, y.flatten(), **options)


def greedy(model, src, max_len):
    """Greedy decoding: the most probable token at each step, except PAD, which is token 0."""
    return decode(model, src, max_len, lambda logits, _: (logits[:, 1:].argmax(-1) + 1, None))


def beam(model, src, max_len, K, penalty=0.0):
    """Beam search; ranks by log p / ((5 + |y|) / 6)^penalty, as in GNMT (Wu et al. 2016)."""
    if K == 1:
        return greedy(model, src, max_len)
    B = len(src)
    score = torch.full((B, K), -torch.inf, device=src.device)  # log p of each hypothesis
    score[:, 0] = 0  # all K start out equal, so only the first one is extended
    first_row = K * torch.arange(B, device=src.device).unsqueeze(1)

    def choose(logits, ended):
        log_p = logits.log_softmax(-1, torch.float)  # (BK,V)
        logits[:, PAD] = -torch.inf  # never predict padding
        tokens = logits.topk(min(K, logits.size(1) - 1)).indices  # (BK,K): no other word can win
        total = score.view(-1, 1) + log_p.gather(1, tokens)
        total.masked_fill_(ended.unsqueeze(1), -torch.inf)
        total[:, 0].masked_fill_(ended & score.flatten().isfinite(), torch.inf)  # ended: kept aside
        best, index = total.view(B, -1).topk(K)  # (B,K)
        rows = first_row + index // tokens.size(1)
        score.copy_(torch.where(best.isposinf(), score.flatten()[rows], best))  # PAD costs nothing
        return tokens.view(B, -1).gather(1, index).flatten(), rows.flatten()

    limit = torch.as_tensor(max_len, device=src.device).expand(B).repeat_interleave(K)
    out = decode(model, src.repeat_interleave(K, 0), limit, choose).unflatten(0, (B, K))  # (B,K,T)
    rank = score / ((5 + (out != PAD).sum(-1)) / 6) ** penalty
    finished = (out == EOS).any(-1) & score.isfinite()
    excluded = finished.any(1, keepdim=True) & ~finished  # the unfinished, if any has finished
    return out[torch.arange(B), rank.masked_fill(excluded, -torch.inf).argmax(1)]


@torch.inference_mode()
def decode(model, src, max_len, choose):
    """Tokens (B,T), PAD after EOS. choose(logits, ended) -> tokens, rows they extend or None."""
    net = bf16_copy(model).eval()
    limit = torch.as_tensor(max_len, device=src.device).expand(len(src))  # one int, or one per row
    memory = net.encode(src)
    state = [x.clone() for x in net.init_state(memory, int(limit.max()))]  # advance updates it
    out = src.new_full((len(src), int(limit.max())), PAD)
    y = torch.full_like(src[:, 0], BOS)
    ended = limit <= 0
    t = src.new_zeros(1)  # words so far; a tensor, because a CUDA graph updates it

    def advance():  # updates its tensors in place, so that a CUDA graph can repeat it
        logits, new_state = net.step(y, state, memory)
        tokens, rows = choose(logits, ended)
        if rows is not None:  # memory is not reordered: it is the same for all rows of a sentence
            new_state = net.reorder(new_state, rows)
            out.copy_(out[rows])
            ended.copy_(ended[rows])
        y.copy_(tokens.masked_fill(ended, PAD))
        out.index_copy_(1, t, y.unsqueeze(1))
        t.add_(1)
        ended.copy_((y == EOS) | (y == PAD) | (t >= limit))
        for old, new in zip(state, new_state):
            old.copy_(new)

    if src.is_cuda:
        advance = graphed(advance, src.device)  # recorded at the first call, then replayed
    for i in range(out.size(1)):
        if i % 8 == 0 and ended.all():  # every 8 steps, because .all() waits for the GPU
            break
        advance()
    return out[:, : int((out != PAD).sum(1).max())]


@torch.no_grad()
def align(model, src, tgt):
    """alpha (B,T,S) for given targets (teacher forcing), in float32 even on CUDA."""
    return model.eval()(src, tgt[:, :-1], need_alpha=True)[1]


def make_batches(model, pairs, vocabularies, max_tokens=8192):
    """Yields batches (rows, src, tgt) that cover every pair once, similar lengths together."""
    bitext = data.Bitext(pairs, vocabularies)
    device = next(model.parameters()).device
    for rows in bitext.rows_by_length(max_tokens):
        yield rows, *(torch.from_numpy(x).to(device) for x in bitext.batch(rows))


def translate(model, sentences, vocabularies):
    """Translates strings or lists of words into lists of words, with the beam of model.cfg."""
    cfg = model.cfg
    assert not isinstance(sentences, str), "expected a list of sentences, not one string"
    pairs = [(data.to_words(sentence), []) for sentence in sentences]
    max_tokens = 65536 if next(model.parameters()).is_cuda else 16384  # measured to be fastest
    for rows, src, _ in make_batches(model, pairs, vocabularies, max_tokens // cfg.beam):
        max_len = (src != PAD).sum(1) + 49  # the source words plus 50; src includes EOS
        max_len.masked_fill_(src[:, 0] == EOS, 0)  # an empty sentence stays empty
        for row, ids in zip(rows, beam(model, src, max_len, cfg.beam, cfg.length_penalty).tolist()):
            pairs[row][1].extend(vocabularies[1].decode(ids))
    if cfg.replace_unk:
        alphas = alignments(model, pairs, vocabularies)
        return [data.replace_unknown(*pair, alpha) for pair, alpha in zip(pairs, alphas)]
    return [target for _, target in pairs]


def alignments(model, pairs, vocabularies):
    """One alpha per pair: a row per target word, a column per source word, EOS last in both."""
    alphas = {}
    for rows, src, tgt in make_batches(model, pairs, vocabularies):
        S, T = ((x != PAD).sum(1).tolist() for x in (src, tgt[:, 1:]))
        for k, alpha in enumerate(align(model, src, tgt).float().cpu().numpy()):
            alphas[rows[k]] = alpha[: T[k], : S[k]]
    return [alphas[row] for row in sorted(alphas)]


@torch.no_grad()
def mean_loss(model, pairs, vocabularies):
    """Cross-entropy per target token, EOS included, without label smoothing."""
    net = bf16_copy(model).eval()
    loss = tokens = 0
    for _, src, tgt in make_batches(model, pairs, vocabularies):
        loss += summed_loss(net(src, tgt[:, :-1]), tgt[:, 1:]).item()
        tokens += (tgt[:, 1:] != PAD).sum().item()
    return loss / tokens


def evaluate(model, pairs, vocabularies):
    """Loss, perplexity and BLEU on a test set, and AER if its pairs have gold alignments."""
    loss = mean_loss(model, pairs, vocabularies)
    hypotheses = translate(model, [pair[0] for pair in pairs], vocabularies)
    alphas = alignments(model, pairs, vocabularies) if len(pairs[0]) > 2 else None
    return dict(loss=loss, ppl=math.exp(min(loss, 700))) | data.scores(pairs, hypotheses, alphas)


def load(path, device="cpu", **flags):
    """(model, vocabularies) of a run folder or a checkpoint file; flags override its Config."""
    path = Path(path, "model.pt") if Path(path).is_dir() else Path(path)
    with data.checkpoint_errors(path):
        saved = torch.load(path, map_location=device, weights_only=True)
        model = Model(data.saved_config(path, saved, Config, flags)).to(device)
        model.load_state_dict(saved.get("model") or saved["snapshots"][-1])
        return model.eval(), [data.Vocabulary(words) for words in saved["vocabularies"]]


def start_run(args, flags, device):
    """Corpus, model, optimizer, log and snapshots of a new run or, with --resume, a saved one."""
    saved = dict(log=[], snapshots=[])
    if args.resume:
        saved = torch.load(args.out / "last.pt", map_location=device, weights_only=True)
    cfg = data.saved_config(args.out, saved, Config, flags) if args.resume else Config(**flags)
    corpus = data.Corpus(cfg, args.train, args.valid, saved)
    torch.manual_seed(cfg.seed)
    model = Model(dataclasses.replace(cfg, **corpus.sizes)).to(device)
    optimizer = make_optimizer(model, cfg)
    if saved["snapshots"]:  # none if the run was stopped before its first validation
        model.load_state_dict(saved["snapshots"][-1])
        optimizer.load_state_dict(saved["optimizer"])
    return corpus, model, optimizer, saved["log"], saved["snapshots"]


def train(out, corpus, model, optimizer, log, snapshots):
    """Trains until --steps. Writes model.pt (best weights or --average) and last.pt (to resume)."""
    cfg = model.cfg
    about = dict(corpus.about, config=vars(cfg), script=Path(__file__).stem)
    if not log:  # so that --resume works before the first validation
        data.write(out / "last.pt", dict(about, log=[], snapshots=[]), torch.save)
    train_step = make_train_step(model, cfg, optimizer)
    last = log[-1] if log else dict(step=0, tokens=0, seconds=0)
    step, tokens = last["step"], last["tokens"]
    start = time.perf_counter() - last["seconds"]
    batches = corpus.train.batches(cfg.batch_tokens, cfg.batch_sentences, cfg.seed, step)
    no_bar = RANK > 0 or None  # None: no progress bar unless stderr is a terminal
    bar = trange(step + 1, cfg.steps + 1, initial=step, total=cfg.steps, disable=no_bar)
    for step, batch in zip(bar, batches):
        torch.manual_seed(hash((cfg.seed, RANK, step)))  # so checkpoints need no random state
        loss = train_step(*map(torch.from_numpy, batch))
        tokens += sum(int((side != PAD).sum()) for side in batch)
        if step % cfg.eval_every and step < cfg.steps:
            continue
        with torch.compiler.set_stance("force_eager"):  # validation is too short to compile
            valid_loss = mean_loss(model, corpus.valid, corpus.vocabularies)
        line = dict(step=step, loss=loss.item(), valid_loss=valid_loss, tokens=tokens)
        log = [*log, dict(line, seconds=time.perf_counter() - start)]
        data.log_validation(bar, out, log, cfg.smoothing)
        snapshots = [*snapshots, copy.deepcopy(model.state_dict())][-cfg.average :]
        if cfg.average > 1 or valid_loss == min(line["valid_loss"] for line in log):
            mean = {key: sum(s[key] for s in snapshots) / len(snapshots) for key in snapshots[0]}
            data.write(out / "model.pt", dict(about, model=mean), torch.save)
        checkpoint = dict(about, log=log, snapshots=snapshots, optimizer=optimizer.state_dict())
        data.write(out / "last.pt", checkpoint, torch.save)
    return log


def train_command(args, flags, device):
    """Trains a new run or resumes one, then scores the model and draws alignments."""
    start = time.perf_counter()
    with data.checkpoint_errors(args.out / "last.pt"):
        corpus, model, optimizer, log, snapshots = start_run(args, flags, device)
    start -= log[-1]["seconds"] if log else 0  # the time before --resume
    if RANK == 0:
        args.out.mkdir(parents=True, exist_ok=args.resume)
        print(f"{corpus}; {sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    log = train(args.out, corpus, model, optimizer, log, snapshots)
    del optimizer, snapshots  # frees GPU memory
    if RANK == 0:
        model, vocabularies = load(args.out, device, **flags)
        result = evaluate(model, corpus.test, vocabularies)
        pairs = list(zip(corpus.examples, translate(model, corpus.examples, vocabularies)))
        alphas = alignments(model, pairs, vocabularies)
        result |= dict(seed=model.cfg.seed, seconds=time.perf_counter() - start)
        data.report(args.out, log, result, pairs, alphas, torch.cuda.max_memory_reserved() / 2**30)


def inference_command(args, flags, device):
    """--test prints scores; --align and --translate print one line per input line."""
    model, vocabularies = load(args.out, device, **flags)
    if args.test:
        print(data.format_scores(evaluate(model, list(data.read_pairs(*args.test)), vocabularies)))
    elif args.align:
        pairs = data.read_pairs(*args.align)
        while chunk := list(itertools.islice(pairs, 4000)):
            print(*map(data.pharaoh, alignments(model, chunk, vocabularies)), sep="\n")
    else:
        for sources in data.read_stdin(vocabularies[0]):
            targets = translate(model, sources, vocabularies)
            print(*map(" ".join, targets), sep="\n", flush=True)
            if os.isatty(0):  # then sources has one sentence
                (alpha,) = alignments(model, zip(sources, targets), vocabularies)
                print(data.heatmap(sources[0], targets[0], alpha))


def main(argv=None):
    """The command line. User errors print one line and exit with status 2."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # less memory
    torch.backends.mkldnn.set_flags(False)  # oneDNN slows these models on ARM, and often on x86
    has = dict(cpu=True, mps=torch.backends.mps.is_available(), cuda=torch.cuda.is_available())
    with data.one_line_errors():
        args, flags = data.parse_args(Config, __doc__, [name for name in has if has[name]], argv)
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if WORLD_SIZE > 1:
            dist.init_process_group()
        command = inference_command if args.translate or args.align or args.test else train_command
        command(args, flags, torch.device(args.device))


# ---- speed: what follows changes only rounding and the time it takes; skip it at first ----


@torch.no_grad()
def bf16_copy(model):
    """On CUDA, a bf16 copy of the model with its current weights; elsewhere the model itself."""
    if not next(model.parameters()).is_cuda:
        return model
    if "bf16" not in model.__dict__:
        with torch.inference_mode(False):  # so that net can be trained even if decode made it
            net = copy.deepcopy(model).half()  # .bfloat16() would not flatten RNN weights for cuDNN
        for p in net.parameters():
            p.data = p.data.view(torch.bfloat16)  # meaningless values until the copy below
        model.__dict__["bf16"] = net  # not registered as a submodule, so not in checkpoints
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN attention is re-planned for every shape
    torch._foreach_copy_(list(model.bf16.parameters()), list(model.parameters()))
    return model.bf16


def move_gradients(net, model):
    """Adds the bf16 gradients of net to the float32 gradients of the model it is a copy of."""
    if net is not model:
        for p, q in zip(model.parameters(), net.parameters()):
            p.grad.add_(q.grad)
        net.zero_grad()


def compile_parts(net):
    """Compiles the modules listed in COMPILED and the loss; returns the compiled loss."""
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")  # nothing a user can change
    for part in net.modules():
        if isinstance(part, COMPILED):
            part.compile(dynamic=True)  # one compilation for all shapes
    return torch.compile(summed_loss, dynamic=True)


def graphed(function, device, eager_calls=0):
    """Records the kernels that function launches, once per input shape, and replays them later."""
    graphs = {}  # input shapes -> graph, its input buffers, its output
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    calls = itertools.count()

    def call(*inputs):
        if next(calls) < eager_calls:
            return function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in graphs:
            graph, buffers = torch.cuda.CUDAGraph(), [x.clone() for x in inputs]
            torch.cuda.synchronize(device)
            if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > 2**31:
                torch.cuda.empty_cache()  # recordings cannot reuse memory cached by other code
            with torch.cuda.stream(stream), torch.compiler.set_stance("eager_on_recompile"):
                graph.capture_begin(pool, "relaxed")  # allows kernels to be loaded meanwhile
                output = function(*buffers)  # eagerly where torch.compile would recompile
                graph.capture_end()
            graphs[shapes] = graph, buffers, output
        graph, buffers, output = graphs[shapes]
        for buffer, x in zip(buffers, inputs):
            buffer.copy_(x)  # a replay reads the memory addresses of its recording
        graph.replay()
        return output

    return call


if __name__ == "__main__":
    main()
