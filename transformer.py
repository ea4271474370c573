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

    python transformer.py                        built-in corpus: BLEU 96, AER 0.075 after 104 s on two CPU cores
    python transformer.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr

The alignment it draws is the attention from decoder to encoder in the last layer, the mean of its heads. Of the default's two
layers the last has the lower AER on the valid split, 0.08, 0.06, 0.09 against 0.50, 0.33, 0.47 (seeds 1, 2, 3); of four and
of six layers it was the last, too (one short run each).

Deviations from the paper
- Words are what stands between spaces, so that nothing else is needed; the paper's are 37,000 pieces of words (byte pairs).
- The paper does not tell its initialisation. Here: embeddings N(0, 1/d_model), other matrices Glorot's uniform, biases zero.
- On CUDA the arithmetic is bf16, for speed. Decoding is greedy, to be simple; the paper's is a beam search over averaged checkpoints.
- Without --paper: small, no dropout, two vocabularies, and a learning rate that also falls to 0, so that it learns in two
  minutes on a laptop.
"""
import argparse, dataclasses, html, inspect, itertools, json, math, os, re, sys, time, typing
from pathlib import Path
import numpy as np
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from tqdm import tqdm
import data
from data import BOS, EOS, PAD

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
    seed: int = 1           # of all that is random

    def __post_init__(self):
        if self.d_model % self.heads or self.d_model % 2:
            raise data.InputError(f"--d-model {self.d_model}: must be even, and a multiple of --heads {self.heads}")
        if not 0 <= self.align_layer <= self.layers:
            raise data.InputError(f"--align-layer {self.align_layer}: there are layers 1 to {self.layers}")

    @classmethod
    def paper(cls, **overrides):
        """The base model of table 3. One vocabulary for both languages, as in section 5.1, unless their sizes differ."""
        joint = overrides.get("src_vocab") == overrides.get("tgt_vocab")
        return cls(**dict(src_vocab=37000, tgt_vocab=37000, joint=joint, d_model=512, d_ff=2048, heads=8, layers=6,
                          dropout=0.1, warmup=4000, cooldown=False, tokens=50000, sentences=50000, steps=100000,
                          every=1000) | overrides)

# Q queries, K keys, V values, x source, y target; memory: K and V of the source for each decoder layer, and its padding.
# Shapes: B batch, S source length, T target length, h heads, d_k = d_model / h.

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    @staticmethod
    def attention(Q, K, V, mask=None, causal=False, need_alpha=False):            # Q (B,h,T,d_k)  K, V (B,h,S,d_k)
        """mask (B,1,1,S) is True where nobody may look; causal: nobody looks ahead. One or the other."""
        if not need_alpha:                                        # eq. (1) in one kernel, which keeps the weights to itself
            return F.scaled_dot_product_attention(Q, K, V, None if mask is None else ~mask, is_causal=causal), None
        if causal: mask = torch.ones(Q.size(2), K.size(2), dtype=torch.bool, device=Q.device).triu(1)
        scores = Q @ K.mT / math.sqrt(Q.size(-1))                                 # (B,h,T,S)
        if mask is not None: scores = scores.masked_fill(mask, -torch.inf)
        alpha = scores.softmax(-1)
        return alpha @ V, alpha                                                   # eq. (1)   (B,h,T,d_k), (B,h,T,S)

    def split(self, x): return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B,T,d_model) -> (B,h,T,d_k)

    def keys_values(self, x): return self.split(self.W_K(x)), self.split(self.W_V(x))

    def forward(self, q, K, V, mask=None, causal=False, need_alpha=False):        # q (B,T,d_model)
        heads, alpha = self.attention(self.split(self.W_Q(q)), K, V, mask, causal, need_alpha)
        return self.W_O(heads.transpose(1, 2).flatten(2)), alpha                  # section 3.2.2

def feed_forward(cfg):
    return nn.Sequential(nn.Linear(cfg.d_model, cfg.d_ff), nn.ReLU(), nn.Linear(cfg.d_ff, cfg.d_model))   # eq. (2)

class EncoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attention, self.ffn = MultiHeadAttention(cfg.d_model, cfg.heads), feed_forward(cfg)
        self.norm_1, self.norm_2 = (nn.LayerNorm(cfg.d_model) for _ in range(2))
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, mask):                                                   # x (B,S,d_model)
        a, _ = self.self_attention(x, *self.self_attention.keys_values(x), mask)
        x = self.norm_1(x + self.drop(a))                                         # LayerNorm(x + Sublayer(x)), section 3.1
        return self.norm_2(x + self.drop(self.ffn(x)))

class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attention, self.ffn = MultiHeadAttention(cfg.d_model, cfg.heads), feed_forward(cfg)
        self.attention = MultiHeadAttention(cfg.d_model, cfg.heads)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(cfg.d_model) for _ in range(3))
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, y, past, source, mask, need_alpha=False):                   # y (B,T,d_model)
        K, V = self.self_attention.keys_values(y)
        if past is not None: K, V = (torch.cat(pair, 2) for pair in zip(past, (K, V)))   # the cache: one word more
        a, _ = self.self_attention(y, K, V, causal=past is None)                  # each word sees those before, section 3.2.3
        y = self.norm_1(y + self.drop(a))
        c, alpha = self.attention(y, *source, mask, need_alpha=need_alpha)        # source: K and V
        y = self.norm_2(y + self.drop(c))
        return self.norm_3(y + self.drop(self.ffn(y))), (K, V), alpha

class Transformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        if cfg.joint and cfg.src_vocab != cfg.tgt_vocab: raise ValueError("a joint vocabulary has one size")
        self.d_model, self.align_layer = cfg.d_model, cfg.align_layer or cfg.layers
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.d_model)       # the output's matrix too and, if joint, the source's: 3.4
        self.E_x = self.E_y if cfg.joint else nn.Embedding(cfg.src_vocab, cfg.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.layers))
        self.drop = nn.Dropout(cfg.dropout)
        for name, p in self.named_parameters():
            if name.startswith("E_"): nn.init.normal_(p, 0, cfg.d_model ** -0.5)
            elif p.ndim > 1: nn.init.xavier_uniform_(p)
            elif name.endswith("bias"): nn.init.zeros_(p)

    def embed(self, E, words, first=0):
        x = E(words) * math.sqrt(self.d_model)                                    # section 3.4
        exact = dict(device=x.device, dtype=torch.promote_types(x.dtype, torch.float))   # bf16 cannot count to 300
        pos = torch.arange(first, first + words.size(1), **exact).unsqueeze(1)
        angle = pos / 10000 ** (torch.arange(0, self.d_model, 2, **exact) / self.d_model)
        PE = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)               # section 3.5   (T,d_model)
        return self.drop(x + PE.to(x.dtype))

    def encode(self, src):
        mask, x = (src == PAD)[:, None, None], self.embed(self.E_x, src)          # (B,1,1,S), (B,S,d_model)
        for layer in self.encoder: x = layer(x, mask)
        return [layer.attention.keys_values(x) for layer in self.decoder], mask

    def start(self, memory):
        return [None for _ in self.decoder]                       # each layer's K and V of the target so far

    def decode(self, y, state, memory, need_alpha=False):                         # y (B,T): the whole target, or the next word
        sources, mask = memory
        first = 0 if state[0] is None else state[0][0].size(2)    # y's position: as many words are in the cache
        y, new, alphas = self.embed(self.E_y, y, first), [], []
        for n, (layer, past, source) in enumerate(zip(self.decoder, state, sources), 1):
            y, past, alpha = layer(y, past, source, mask, need_alpha and n == self.align_layer)
            new.append(past)
            alphas.append(alpha)
        return F.linear(y, self.E_y.weight), new, alphas[self.align_layer - 1]    # section 3.4   (B,T,V)

    def step(self, y, state, memory):                                             # y (B,)
        logits, state, _ = self.decode(y.unsqueeze(1), state, memory)
        return logits.squeeze(1), state

    def forward(self, src, tgt_in, need_alpha=False):
        memory = self.encode(src)
        logits, _, alpha = self.decode(tgt_in, self.start(memory), memory, need_alpha)
        return (logits, alpha.mean(1)) if need_alpha else logits

def make_optimizer(model, cfg):
    return torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)      # section 5.3; the rate is eq. (3)'s

def learning_rate(cfg, step):
    rate = cfg.lr * cfg.d_model ** -0.5 * min(step ** -0.5, step * cfg.warmup ** -1.5)                # eq. (3)
    return rate * max(1 - (step - 1) / cfg.steps, 0) if cfg.cooldown else rate

Model = Transformer

# ---- the same in every script from here on ----

def autocast(x):
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)

def nll(logits, y, smoothing=0.0):
    """Negative log-likelihood of y (B,T), label-smoothed if asked, summed over all that is not padding."""
    logits, y = logits.flatten(0, 1).float(), y.flatten()
    return F.cross_entropy(logits, y, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)

def make_train_step(model, cfg, optimizer=None):
    """step(src, tgt) -> loss per target token: forward, backward, clip, update; on CUDA in bf16.
    The learning rate is that of learning_rate(cfg, 1), (cfg, 2), ...; the optimizer keeps the count."""
    optimizer = optimizer or make_optimizer(model, cfg)
    world = dist.get_world_size() if dist.is_initialized() else 1
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    def step(src, tgt):
        model.train()
        with autocast(src):
            loss = nll(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing)
        total = torch.stack([loss.detach(), (tgt[:, 1:] != PAD).sum(), (tgt[:, 0] != PAD).sum()])
        if world > 1: dist.all_reduce(total)  # a token weighs the same on whichever process it is
        loss = loss / total[1 if cfg.per == "token" else 2]
        (loss * world).backward()  # times world: DistributedDataParallel takes the mean of the processes, wanted is the sum
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for group in optimizer.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = learning_rate(cfg, group["step"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total[0] / total[1]
    return step

@torch.no_grad()
def greedy(model, src, max_len):
    """The likeliest word after word, for all sentences at once: (B,T'), EOS kept, PAD after it.
    max_len, one for all or one each, counts EOS. No sentence's result depends on its batchmates."""
    model.eval()
    limit = torch.as_tensor(max_len, device=src.device).expand(src.size(0))
    out = src.new_full((src.size(0), int(limit.max())), PAD)
    with autocast(src):
        memory = model.encode(src)
        state, y, done = model.start(memory), torch.full_like(src[:, 0], BOS), limit <= 0
        for t in range(out.size(1)):
            if done.all(): return out[:, :t]
            logits, state = model.step(y, state, memory)
            out[:, t] = y = logits.argmax(-1).masked_fill(done, PAD)
            done = done | (y == EOS) | (y == PAD) | (t + 1 >= limit)
    return out

@torch.no_grad()
def align(model, src, tgt):
    """alpha (B,T,S) of a given target, in one forced pass."""
    model.eval()
    return model(src, tgt[:, :-1], need_alpha=True)[1]

def links(alpha):
    """{(source index, target index), ...}: where each target word's row has its maximum. EOS, last of both, has no link."""
    return {(int(i), j) for j, i in enumerate(alpha[:-1].argmax(-1)) if i < alpha.shape[1] - 1}

def pharaoh(alpha):
    return " ".join(f"{i}-{j}" for i, j in sorted(links(alpha)))

def batched(model, pairs, vocabularies):
    """Pairs of sentences, like lengths together, as (their indices, src, tgt) on the model's device."""
    bitext, device = data.Bitext(pairs, vocabularies), next(model.parameters()).device
    for rows in bitext.cut(tokens=4096):
        yield rows, *(torch.from_numpy(x).to(device) for x in bitext.batch(rows))

def translate(model, sentences, vocabularies):
    out = [[] for _ in sentences]
    for rows, src, _ in batched(model, [(words, []) for words in sentences], vocabularies):
        n = (src != PAD).sum(1) - 1
        for row, ids in zip(rows, greedy(model, src, (2 * n + 10) * (n > 0)).tolist()):
            out[row] = [vocabularies[1].words[i] for i in ids if i not in (PAD, EOS)]
    return out

def alignments(model, pairs, vocabularies):
    """alpha of each pair, target words and EOS by source words and EOS."""
    out = [None for _ in pairs]
    for rows, src, tgt in batched(model, pairs, vocabularies):
        for row, alpha in zip(rows, align(model, src, tgt).float().cpu().numpy()):
            out[row] = alpha[:len(pairs[row][1]) + 1, :len(pairs[row][0]) + 1]
    return out

@torch.no_grad()
def loss_of(model, pairs, vocabularies):
    """Per target token, EOS counted."""
    model.eval()
    total = tokens = 0
    for _, src, tgt in batched(model, pairs, vocabularies):
        with autocast(src): total += nll(model(src, tgt[:, :-1]), tgt[:, 1:]).item()
        tokens += (tgt[:, 1:] != PAD).sum().item()
    return total / tokens

def evaluate(model, pairs, vocabularies):
    """Greedy translations against the references, and the alignment of the references against gold where there is gold."""
    hypotheses, buckets = translate(model, [p[0] for p in pairs], vocabularies), {}
    for (source, target, *_), hypothesis in zip(pairs, hypotheses):
        buckets.setdefault(max(len(source) - 1, 0) // 10, []).append((hypothesis, target))
    loss, gold = loss_of(model, pairs, vocabularies), [p[2] for p in pairs if len(p) > 2]
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bleu": data.bleu(hypotheses, [p[1] for p in pairs]),
            "aer": data.aer([links(alpha) for alpha in alignments(model, pairs, vocabularies)], gold) if gold else None,
            "bleu_by_length": {f"{10 * k + 1}-{10 * k + 10}": data.bleu(*zip(*v)) for k, v in sorted(buckets.items())}}

def heatmap(source, target, alpha):
    """alpha in the terminal: a column a source word, a row a target word."""
    high, wide = (max(map(len, words), default=0) for words in (source, target))
    head = [" " * (wide + 1) + " ".join(word.rjust(high)[k] for word in source) for k in range(high)]
    shade = lambda a: " ░▒▓█"[min(int(5 * a), 4)] * 2
    return "\n".join(head + [word.rjust(wide) + " " + "".join(map(shade, row[:len(source)])) for word, row in zip(target, alpha)])

def svg(source, target, alpha, cell=22):
    """The same as a picture, readable on light and dark."""
    left, top = (12 + 9 * max(map(len, words), default=0) for words in (target, source))
    style = "text{fill:#222}rect{fill:#1a56b0}@media(prefers-color-scheme:dark){text{fill:#ddd}rect{fill:#8ab8ff}}"
    label = lambda x, y, more, word: f'<text transform="translate({x},{y}){more}>{html.escape(word)}</text>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + cell * len(source) + 12}" '
             f'height="{top + cell * len(target) + 12}" font-family="monospace" font-size="15"><style>{style}</style>']
    parts += [label(left + cell * j + 15, top - 6, ' rotate(-90)"', word) for j, word in enumerate(source)]
    parts += [label(left - 6, top + cell * i + 15, '" text-anchor="end"', word) for i, word in enumerate(target)]
    parts += [f'<rect x="{left + cell * j}" y="{top + cell * i}" width="{cell - 1}" height="{cell - 1}" opacity="{0.07 + 0.93 * a:.2f}"/>'
              for i, row in enumerate(alpha[:len(target)]) for j, a in enumerate(row[:len(source)])]
    return "\n".join([*parts, "</svg>\n"])

def dump(path, pairs, alphas):
    """path.npz: the soft weights; path.txt: Pharaoh links, a line a pair; path.svg: the first pair as a picture."""
    np.savez_compressed(f"{path}.npz", source=[" ".join(p[0]) for p in pairs], target=[" ".join(p[1]) for p in pairs],
                        **{f"alpha_{k}": alpha for k, alpha in enumerate(alphas)})
    Path(f"{path}.txt").write_text("".join(pharaoh(alpha) + "\n" for alpha in alphas))
    Path(f"{path}.svg").write_text(svg(*pairs[0][:2], alphas[0]), encoding="utf-8")

def save(path, content):
    """Whole or not at all: written beside the old file, then put in its place."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)

def load(path, device):
    """(checkpoint, vocabularies) of a run of this script."""
    if not path.exists(): raise data.InputError(f"{path}: no such file; train first, or name the run's folder with --out")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        script, vocabularies = checkpoint["script"], [data.Vocabulary(words) for words in checkpoint["words"]]
    except Exception as error: raise data.InputError(f"{path}: not a sound checkpoint ({type(error).__name__})") from None
    if script != Path(__file__).stem: raise data.InputError(f"{path}: made by {script}.py; use that")
    return checkpoint, vocabularies

def fit(model, cfg, corpus, valid, vocabularies, out, resume=None):
    """Trains for cfg.steps. out/model.pt is the model that scored best on valid, out/last.pt all it takes to go on."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer, device = make_optimizer(model, cfg), next(model.parameters()).device
    now = {"step": 0, "epoch": 0, "batch": 0, "tokens": 0, "seconds": 0.0, "best": math.inf, "pairs": len(corpus)}
    if resume:
        if resume["now"]["pairs"] != len(corpus): raise data.InputError(f"{out}: was trained on other text; give its --train again")
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
        torch.set_rng_state(resume["random"].cpu())
        now = resume["now"]
    train_step, clock = make_train_step(model, cfg, optimizer), time.perf_counter()
    bar = tqdm(total=cfg.steps, initial=now["step"], unit="step", disable=True if rank else None)
    while now["step"] < cfg.steps:
        for src, tgt in corpus.epoch(cfg.tokens, cfg.sentences, cfg.seed, now["epoch"], now["batch"], rank, world):
            now["step"], now["batch"] = now["step"] + 1, now["batch"] + 1
            now["tokens"] += world * int((src != PAD).sum() + (tgt[:, 1:] != PAD).sum())
            loss = train_step(*(torch.from_numpy(x).to(device) for x in (src, tgt)))
            bar.update()
            if now["step"] % cfg.every == 0 or now["step"] == cfg.steps:
                loss, now["seconds"] = loss.item(), now["seconds"] + time.perf_counter() - clock
                if rank == 0: look(model, cfg, valid, vocabularies, out, optimizer, now, loss, bar)
                clock = time.perf_counter()  # looking is not training
            if now["step"] == cfg.steps: break
        else: now["epoch"], now["batch"] = now["epoch"] + 1, 0
    bar.close()
    return now

def look(model, cfg, valid, vocabularies, out, optimizer, now, loss, bar):
    """Scores valid, writes a line of the log, and saves."""
    score, best = loss_of(model, valid, vocabularies), now["best"]
    note(out, step=now["step"], loss=loss, valid_loss=score, lr=optimizer.param_groups[0]["lr"], seconds=now["seconds"])
    bar.set_postfix(loss=f"{loss:.3f}", valid=f"{score:.3f}")
    now["best"] = min(best, score)
    content = {"script": Path(__file__).stem, "config": dataclasses.asdict(cfg), "words": [v.words for v in vocabularies],
               "model": model.state_dict()}
    if score < best: save(out / "model.pt", content)
    save(out / "last.pt", content | {"optimizer": optimizer.state_dict(), "now": now, "random": torch.get_rng_state()})

def note(out, **line):
    with open(out / "log.jsonl", "a") as log: log.write(json.dumps(line) + "\n")

def train(args, cfg, device):
    begin, out, resume, rank = time.perf_counter(), folder(args), None, dist.get_rank() if dist.is_initialized() else 0
    if args.resume:
        resume, vocabularies = load(out / "last.pt", device)
        cfg = Config(**resume["config"] | args.config)
    elif (out / "model.pt").exists(): raise data.InputError(f"{out}: holds a run already; add --resume, or name another --out")
    if args.train:
        if not args.valid: raise data.InputError("--train needs --valid SRC TGT, text to choose the best model by")
        pairs, valid = data.read_pairs(*args.train), list(data.read_pairs(*args.valid))
        if not valid: raise data.InputError(f"{args.valid[0]}: is empty; give at least one pair")
        test, example = valid, valid[0][0]
    else:
        sizes, example = {"train": 50000, "valid": 500, "test": 1000}, data.EXAMPLE.split()
        pairs, valid, test = (data.toy(n, max_len=cfg.max_len or 30, split=split) for split, n in sizes.items())
    limit = (cfg.max_len or 100) if args.train else None  # the built-in corpus keeps to it by itself
    if resume: corpus = data.Bitext(pairs, vocabularies, limit)
    else: corpus, vocabularies = data.learn(pairs, (cfg.src_vocab, cfg.tgt_vocab), cfg.min_count, cfg.joint, limit)
    cfg.src_vocab, cfg.tgt_vocab = (len(v.words) for v in vocabularies)
    if not len(corpus): raise data.InputError(f"{args.train[0]}: no pair of 1 to {limit} words a side; see --max-len")
    torch.manual_seed(cfg.seed + rank)
    model = Model(cfg).to(device)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        print(f"{len(corpus):,} pairs, {corpus.skipped:,} left out; {cfg.src_vocab:,} and {cfg.tgt_vocab:,} words; "
              f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    now = fit(model, cfg, corpus, valid, vocabularies, out, resume)
    if rank == 0: report(model, cfg, test, example, vocabularies, out, now, begin)

def report(model, cfg, test, example, vocabularies, out, now, begin):
    """What the best model does on the test set (for your own text: on valid, by which it was chosen), and where it looks."""
    device = next(model.parameters()).device
    model.load_state_dict(load(out / "model.pt", device)[0]["model"])
    scores, sources = evaluate(model, test, vocabularies), [example] + [p[0] for p in test[:99]]
    pairs = list(zip(sources, translate(model, sources, vocabularies)))
    alphas = alignments(model, pairs, vocabularies)
    dump(out / "align", pairs, alphas)
    seconds, speed, memory = time.perf_counter() - begin, now["tokens"] / now["seconds"], peak_memory(device)
    note(out, final=True, **scores, seconds=seconds, tokens_per_second=speed, peak_memory_gib=memory, seed=cfg.seed)
    print(f"\n{' '.join(pairs[0][0])}\n{' '.join(pairs[0][1])}\n\n{heatmap(*pairs[0], alphas[0])}\n")
    print(f"{len(test):,} sentences: loss {scores['loss']:.4f}, perplexity {scores['ppl']:.3f}, BLEU {scores['bleu']:.2f}"
          + (f", AER {scores['aer']:.3f}" if scores["aer"] is not None else ""))
    print("BLEU by source length:", ", ".join(f"{k}: {v:.1f}" for k, v in scores["bleu_by_length"].items()))
    print(f"{speed:,.0f} tokens/s, {memory:.2f} GiB at most, {seconds:.0f} s in all; everything is in {out}/")

def peak_memory(device):
    if device.type == "cuda": return torch.cuda.max_memory_allocated() / 2**30
    try: import resource
    except ImportError: return 0.0  # Windows does not tell
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**(30 if sys.platform == "darwin" else 20)

def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; see --help")
    flag, pair = parser.add_argument, dict(nargs=2, metavar=("SRC", "TGT"))
    flag("--train", **pair, help="text to learn from, aligned line by line, .gz or not (default: the built-in corpus)")
    flag("--valid", **pair, help="text to choose the best model by, and to score it on")
    flag("--translate", action="store_true", help="translate stdin to stdout, line for line")
    flag("--align", **pair, help="write the alignment of two files to stdout, as Pharaoh pairs i-j")
    flag("--out", type=Path, help=f"the run's folder (default: runs/{Path(__file__).stem}, then -2, -3, ...; to use, the last of them)")
    flag("--resume", action="store_true", help="go on with the run in --out; its --train and --valid must be given again")
    flag("--paper", action="store_true", help="the paper's sizes and recipe")
    flag("--device", help="cpu, cuda or mps (default: the best there is)")
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Config), re.M))
    for field in dataclasses.fields(Config):
        kind = {bool: dict(action=argparse.BooleanOptionalAction)}.get(field.type, dict(type=field.type))
        if typing.get_args(field.type): kind = dict(choices=typing.get_args(field.type))
        paper = getattr(Config.paper(), field.name)
        text = f"{comments[field.name]} (default: {field.default}" + f", --paper: {paper}" * (paper != field.default) + ")"
        flag("--" + field.name.replace("_", "-"), default=None, help=text.replace("%", "%%"), **kind)
    args = parser.parse_args(argv)
    args.config = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
    return args

def folder(args):
    """--out or, without it, the next free folder to train in, or the last one to go on with or to use."""
    if args.out: return args.out
    names = [Path("runs", Path(__file__).stem + (f"-{n}" if n > 1 else "")) for n in range(1, 1000)]
    free = next(i for i, path in enumerate(names) if not (path / "model.pt").exists())
    return names[max(free - 1, 0) if args.translate or args.align or args.resume else free]

def fail(message):
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)

def main(argv=None):
    args, best = parse(argv), "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    sys.stdout.reconfigure(encoding="utf-8")
    torch.backends.mkldnn.enabled = False  # on ARM it makes all four scripts slower, on x86 some
    if "LOCAL_RANK" in os.environ:  # one of several processes of torchrun
        if best == "cuda": torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if best == "cuda" else "gloo")
    try: device = torch.empty(0, device=args.device or best).device
    except (RuntimeError, AssertionError): fail(f"--device {args.device}: not on this machine; it has {best}")
    try:
        if not args.translate and not args.align:
            return train(args, (Config.paper if args.paper else Config)(**args.config), device)
        checkpoint, vocabularies = load(folder(args) / "model.pt", device)
        model = Model(Config(**checkpoint["config"] | args.config)).to(device)
        try: model.load_state_dict(checkpoint["model"])
        except RuntimeError: raise data.InputError(f"{folder(args)}: its model has other sizes; leave them out here") from None
        lines = data.read_pairs(*args.align) if args.align else data.read(0)
        while chunk := list(itertools.islice(lines, 1000)):
            if args.align: chunk = map(pharaoh, alignments(model, chunk, vocabularies))
            else: chunk = map(" ".join, translate(model, chunk, vocabularies))
            print(*chunk, sep="\n", flush=True)
    except BrokenPipeError: os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read has seen enough
    except (data.InputError, OSError) as error: fail(error)

if __name__ == "__main__":
    main()
