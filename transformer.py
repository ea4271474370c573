# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Transformer: attention is all there is, from source to source, target to target, and target to source.
Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                                                (1)
    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)                                                    3.2.2
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O                                             3.2.2
    FFN(x) = max(0, x W_1 + b_1) W_2 + b_2                                                           (2)
    x = LayerNorm(x + Dropout(Sublayer(x)))      around each attention and each FFN                  3.1, 5.4
    PE(pos, 2i), PE(pos, 2i+1) = sin, cos(pos / 10000^(2i/d_model))                                  3.5
    lrate = d_model^-0.5 min(step^-0.5, step warmup^-1.5)                                            (3)

    python transformer.py                        built-in corpus: BLEU 97, AER 0.074 after 99 s on two CPU cores
    python transformer.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr

The alignment it draws is the last layer's attention to the source, the mean of its heads: of 2, 4 and 6 layers the best one.

Deviations from the paper
- Words are what stands between spaces, so that nothing else is needed; the paper's are 37,000 byte pairs.
- How it starts, untold: E N(0, 1/d_model), biases 0, Glorot, a sublayer's last matrix over sqrt(2N), or deep ones hardly learn.
- bf16 on CUDA, for speed. The checkpoints whose mean --paper takes are --every steps apart; the paper's, ten minutes.
- Without --paper: small, no dropout, two vocabularies, greedy, a learning rate that also falls to 0: learns in two minutes.
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
    d_model: int = 96       # size of an embedding and of every layer's output
    d_ff: int = 256         # size of the hidden layer of FFN
    heads: int = 4          # h, attention heads; d_k = d_v = d_model / h
    layers: int = 2         # N, layers of the encoder and of the decoder
    align_layer: int = 0    # the decoder layer, from 1, whose attention to the source is the alignment (0: the last)
    dropout: float = 0.0    # on each sublayer's output and on embedding + position, section 5.4
    lr: float = 1.0         # factor on the learning rate (3)
    warmup: int = 400       # steps until the learning rate's maximum
    cooldown: bool = True   # the learning rate also falls to 0 in proportion to the --steps left; the paper's does not
    clip: float = math.inf  # a gradient of greater norm is scaled down to it; the paper does not
    smoothing: float = 0.1  # label smoothing, section 5.4
    per: typing.Literal["token", "sentence"] = "token"  # the gradient is that of the mean loss of a token, or of a sentence
    tokens: int = 1024      # source and target tokens in a batch of one process, padding counted
    sentences: int = 1000   # sentences in a batch of one process at most
    steps: int = 1700       # training steps
    every: int = 200        # steps between two looks at the validation set
    max_len: int = 0        # words in a sentence to train on at most (0: 30 in the built-in corpus, 100 in your own text)
    min_count: int = 1      # rarer words become <unk>
    joint: bool = False     # one vocabulary for both languages, of --src-vocab words, and one matrix for both embeddings
    beam: int = 1           # hypotheses kept in decoding; 1 is greedy
    alpha: float = 0.0      # in decoding log p is divided by the length penalty ((5 + |y|) / 6)^alpha
    replace_unk: bool = False  # an <unk> in a translation becomes the source word it is aligned with
    average: int = 1        # the weights used are the mean of those at the last so many looks at the validation set, if above 1
    seed: int = 1           # of all that is random
    def __post_init__(self):
        if self.d_model % self.heads or self.d_model % 2:
            raise data.InputError(f"--d-model {self.d_model}: must be even, and a multiple of --heads {self.heads}")
        if not 0 <= self.align_layer <= self.layers: raise data.InputError(f"--align-layer: one of layers 1 to {self.layers}")
    @classmethod
    def paper(cls, **overrides):
        """The base model of table 3. One vocabulary for both languages, as in section 5.1, unless their sizes differ."""
        joint = overrides.get("src_vocab") == overrides.get("tgt_vocab")
        return cls(**dict(src_vocab=37000, tgt_vocab=37000, joint=joint, d_model=512, d_ff=2048, heads=8, layers=6, dropout=0.1,
                          warmup=4000, cooldown=False, tokens=50000, sentences=50000, steps=100000, every=1000,
                          beam=4, alpha=0.6, average=5) | overrides)

# Q queries, K keys, V values, x source, y target; memory: K and V of the source for each decoder layer, and its padding.
# Shapes: B batch, S source length, T target length, h heads, d_k = d_model / h.

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_QKV = nn.Linear(d_model, 3 * d_model, bias=False)  # W^Q, W^K, W^V of all heads in one matrix
        self.W_O = nn.Linear(d_model, d_model, bias=False)
    @staticmethod
    def attention(Q, K, V, mask, need_alpha=False):                               # Q (B,h,T,d_k)  K, V (B,h,S,d_k)
        """mask is 0, or minus infinity where nobody may look; of shape (T,S), or (B,1,1,S): the same for all queries."""
        if not need_alpha: return F.scaled_dot_product_attention(Q, K, V, mask), None   # fused: the weights stay inside
        alpha = (Q @ K.mT / math.sqrt(Q.size(-1)) + mask).softmax(-1)             # (B,h,T,S)
        return alpha @ V, alpha                                                   # eq. (1)   (B,h,T,d_k)
    def project(self, x, first=0, last=3):                        # x W^Q, x W^K, x W^V, all or some   (B,T,1 to 3,h,d_k)
        W = self.W_QKV.weight[first * x.size(-1):last * x.size(-1)]
        return F.linear(x, W).unflatten(-1, (last - first, self.heads, -1))
    def forward(self, Q, K, V, mask, need_alpha=False):                           # Q (B,T,h,d_k)  K, V (B,S,h,d_k)
        heads, alpha = self.attention(*(x.transpose(1, 2) for x in (Q, K, V)), mask, need_alpha)
        return self.W_O(heads.transpose(1, 2).flatten(2)), alpha                  # section 3.2.2

def feed_forward(d_model, d_ff): return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))   # eq. (2)

class EncoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.ffn, self.drop = feed_forward(cfg.d_model, cfg.d_ff), nn.Dropout(cfg.dropout)
        self.norm_1, self.norm_2 = (nn.LayerNorm(cfg.d_model) for _ in range(2))
    def forward(self, x, mask):                                                   # x (B,S,d_model)
        a, _ = self.self_attention(*self.self_attention.project(x).unbind(2), mask)
        x = self.norm_1(x + self.drop(a))                                         # LayerNorm(x + Sublayer(x)), section 3.1
        return self.norm_2(x + self.drop(self.ffn(x)))

class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attention, self.attention = (MultiHeadAttention(cfg.d_model, cfg.heads) for _ in range(2))
        self.ffn, self.drop = feed_forward(cfg.d_model, cfg.d_ff), nn.Dropout(cfg.dropout)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(cfg.d_model) for _ in range(3))
    def forward(self, y, ahead, source, mask, t=None, past=None, need_alpha=False):   # y (B,T,d_model), or its t-th word alone
        Q, K, V = (QKV := self.self_attention.project(y)).unbind(2)
        if past is not None: K, V = past.scatter_(1, t.expand_as(QKV[:, :, 1:]), QKV[:, :, 1:]).unbind(2)   # past: those before
        a, _ = self.self_attention(Q, K, V, ahead)                                # each word sees those before, section 3.2.3
        y = self.norm_1(y + self.drop(a))
        Q, (K, V) = self.attention.project(y, 0, 1).squeeze(2), source.unbind(2)
        c, alpha = self.attention(Q, K, V, mask, need_alpha)
        y = self.norm_2(y + self.drop(c))
        return self.norm_3(y + self.drop(self.ffn(y))), alpha

class Transformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        if cfg.joint and cfg.src_vocab != cfg.tgt_vocab: raise ValueError("a joint vocabulary has one size")
        self.d_model, self.align_layer = cfg.d_model, cfg.align_layer or cfg.layers
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.d_model)       # the output's matrix too and, if joint, the source's: 3.4
        self.E_x = self.E_y if cfg.joint else nn.Embedding(cfg.src_vocab, cfg.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.layers))
        self.decoder, self.drop = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.layers)), nn.Dropout(cfg.dropout)
        for name, p in self.named_parameters():
            gain = (2 * cfg.layers) ** -0.5 if name.endswith(("W_O.weight", "ffn.2.weight")) else 1.0   # a sublayer's last
            if name.startswith("E_"): nn.init.normal_(p, 0, cfg.d_model ** -0.5)
            elif p.ndim > 1: [nn.init.xavier_uniform_(W, gain) for W in (p.chunk(3) if "QKV" in name else [p])]
            elif name.endswith("bias"): nn.init.zeros_(p)
    def tables(self, n):                                          # of n positions: PE, and a mask over what is ahead of each
        exact = dict(device=self.E_y.weight.device, dtype=torch.promote_types(self.E_y.weight.dtype, torch.float))
        angle = torch.arange(n, **exact).unsqueeze(1) / 10000 ** (torch.arange(0, self.d_model, 2, **exact) / self.d_model)
        PE = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)               # section 3.5   (n,d_model)
        ahead = torch.full((n, n), -torch.inf, **exact).triu(1)                   # section 3.2.3   (n,n)
        return PE.to(self.E_y.weight.dtype), ahead.to(self.E_y.weight.dtype)      # but bf16 cannot count to 300
    def embed(self, E, words, PE): return self.drop(E(words) * math.sqrt(self.d_model) + PE)      # section 3.4, 3.5
    def encode(self, src):
        x = self.embed(self.E_x, src, self.tables(src.size(1))[0])                # (B,S,d_model)
        mask = x.new_zeros(src.shape).masked_fill(src == PAD, -torch.inf)[:, None, None]          # (B,1,1,S)
        for layer in self.encoder: x = layer(x, mask)
        return mask, *(layer.attention.project(x, 1) for layer in self.decoder)
    def start(self, memory, room=256):                            # t = 0, and room for K and V of so many words in each layer
        caches = (KV.new_zeros(KV.size(0), room, *KV.shape[2:]) for KV in memory[1:])
        return torch.zeros(1, dtype=torch.long, device=memory[0].device), *self.tables(room), *caches
    def pick(self, state, rows): return *state[:3], *(past[rows] for past in state[3:])           # of some hypotheses
    def decode(self, y, memory, PE, ahead, t=None, caches=None, need_alpha=False):   # y (B,T): all the target, or its t-th word
        (mask, *sources), y, alphas = memory, self.embed(self.E_y, y, PE), []
        for n, (layer, source, past) in enumerate(zip(self.decoder, sources, caches or sources), 1):
            y, alpha = layer(y, ahead, source, mask, t, past if caches else None, need_alpha and n == self.align_layer)
            alphas.append(alpha)
        return F.linear(y, self.E_y.weight), alphas[self.align_layer - 1]         # section 3.4   (B,T,V)
    def step(self, y, state, memory):                                             # y (B,)
        t, PE, ahead, *caches = state
        logits, _ = self.decode(y.unsqueeze(1), memory, PE[t], ahead[t], t, caches)
        return logits.squeeze(1), (t + 1, PE, ahead, *caches)
    def forward(self, src, tgt_in, need_alpha=False):
        logits, alpha = self.decode(tgt_in, self.encode(src), *self.tables(tgt_in.size(1)), need_alpha=need_alpha)
        return (logits, alpha.mean(1)) if need_alpha else logits

def make_optimizer(model, cfg):
    return torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)      # section 5.3; the rate is eq. (3)'s
def learning_rate(cfg, step):
    rate = cfg.lr * cfg.d_model ** -0.5 * min(step ** -0.5, step * cfg.warmup ** -1.5)                # eq. (3)
    return rate * max(1 - (step - 1) / cfg.steps, 0) if cfg.cooldown else rate
Model, Parts = Transformer, (EncoderLayer, DecoderLayer)       # Parts: what torch.compile fuses, if there are steps enough

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
