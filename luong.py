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

    python luong.py                              built-in corpus: BLEU 97, AER 0.030 after 110 s on two CPU cores
    python luong.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr

Deviations from the paper
- Where the paper is silent: the source is reversed, but s counts from 1 in reading order, the end mark last, else p_t = t
  would start at the wrong end; p_t = t stops at the last word; the location score goes with global attention alone.
- By (10) a_t sums to less than 1. The model uses it so; the alpha it returns is scaled to sum to 1, as all do.
- --steps counts as the paper's 12 epochs (10 without dropout). bf16 on CUDA, for speed; greedy, to be simple, not a beam.
- Without --paper: small, Adam, label smoothing, no input feeding, so that it learns in two minutes on a laptop.
"""
import argparse, dataclasses, html, inspect, io, itertools, json, math, os, re, signal, sys, time, typing, zipfile, zlib
from pathlib import Path
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
    lr: float = 0.01        # learning rate
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
    seed: int = 1           # of all that is random

    def __post_init__(self):
        if self.score == "location" and self.attention != "global":
            raise data.InputError("--score location gives weights to the whole source; use it with --attention global")

    @classmethod
    def paper(cls, **overrides):
        """Section 4.1, the best single model of table 1. 12 epochs of 4.5 million pairs, 128 a batch, are 421,875 steps."""
        return cls(**dict(src_vocab=50000, tgt_vocab=50000, emb=1000, hidden=1000, layers=4, attention="local-p",
                          input_feeding=True, init=0.1, smoothing=0.0, optimizer="sgd", lr=1.0, clip=5.0, per="sentence",
                          sentences=128, tokens=13184, max_len=50, steps=421875, every=5000) | overrides)

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
        return a_t @ h_bar, a_t                                                                        # c_t (B,T,H), a_t

class Encoder(nn.Module):
    """A deep LSTM over the source, which it reads backwards."""
    def __init__(self, cfg):
        super().__init__()
        self.E = nn.Embedding(cfg.src_vocab, cfg.emb)
        between = cfg.dropout if cfg.layers > 1 else 0.0          # nn.LSTM's own: between its layers, and there alone
        self.lstm = nn.LSTM(cfg.emb, cfg.hidden, cfg.layers, batch_first=True, dropout=between)
        self.drop, self.reverse = nn.Dropout(cfg.dropout), cfg.reverse

    def forward(self, src):
        length, place = (src != PAD).sum(1, keepdim=True), torch.arange(src.size(1), device=src.device)
        turn = ((length - 1 - place) % src.size(1)).unsqueeze(-1)     # turns the words around, padding stays behind them
        x = self.drop(self.E(src))
        if self.reverse: x = x.gather(1, turn.expand_as(x))
        packed = nn.utils.rnn.pack_padded_sequence(x, length.squeeze(1).cpu(), batch_first=True, enforce_sorted=False)
        h_bar, state = self.lstm(packed)                              # state: every layer's h and c after the last word
        h_bar, _ = nn.utils.rnn.pad_packed_sequence(h_bar, batch_first=True, total_length=src.size(1))
        if self.reverse: h_bar = h_bar.gather(1, turn.expand_as(h_bar))           # turned again: in reading order
        return h_bar, state                                                       # (B,S,H), 2 x (L,B,H)

class LuongNMT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = Encoder(cfg)
        self.E = nn.Embedding(cfg.tgt_vocab, cfg.emb)
        self.drop, self.input_feeding = nn.Dropout(cfg.dropout), cfg.input_feeding
        self.attention = LuongAttention(cfg.hidden, cfg.score, cfg.attention, cfg.D, positions=(cfg.max_len or 100) + 1)
        self.lstm = nn.LSTM(cfg.emb + cfg.hidden * cfg.input_feeding, cfg.hidden, cfg.layers, batch_first=True,
                            dropout=self.encoder.lstm.dropout)
        self.W_c, self.W_s = (nn.Linear(*n, bias=False) for n in ((2 * cfg.hidden, cfg.hidden), (cfg.hidden, cfg.tgt_vocab)))
        for p in self.parameters(): nn.init.uniform_(p, -cfg.init, cfg.init)      # section 4.1

    def encode(self, src):
        h_bar, state = self.encoder(src)
        return h_bar, self.attention.keys(h_bar), (src != PAD).sum(1), state

    def start(self, memory):
        h_bar, _, length, state = memory
        return state, torch.zeros_like(h_bar[:, :1]), torch.ones_like(length[:1])                   # (h, c), h~_0, t = 1

    def attend(self, h_t, memory, t):                                             # h_t (B,T,H)  t (T,)
        h_bar, keys, length, _ = memory
        c_t, a_t = self.attention(h_t, keys, h_bar, length, t)
        return torch.tanh(self.W_c(torch.cat([c_t, h_t], -1))), a_t                                 # eq. (5)   (B,T,H), (B,T,S)

    def advance(self, y, state, memory):                                          # y (B,1,E): one step
        state, h_tilde, t = state
        h_t, state = self.lstm(self.drop(torch.cat([y, h_tilde], -1) if self.input_feeding else y), state)   # section 3.3
        h_tilde, a_t = self.attend(h_t, memory, t)
        return (state, h_tilde, t + 1), a_t

    def step(self, y, state, memory):                                             # y (B,)
        state, _ = self.advance(self.E(y).unsqueeze(1), state, memory)
        return self.W_s(self.drop(state[1].squeeze(1))), state                                      # eq. (6)

    def forward(self, src, tgt_in, need_alpha=False):
        memory = self.encode(src)
        y, state, steps = self.E(tgt_in), self.start(memory), []                  # (B,T,E)
        if self.input_feeding:                                    # every step waits for the h~ of the one before
            for i in range(tgt_in.size(1)):
                state, a_t = self.advance(y[:, i:i + 1], state, memory)
                steps.append((state[1], a_t))
            h_tilde, a_t = (torch.cat(x, 1) for x in zip(*steps))                 # (B,T,H), (B,T,S)
        else:                                                     # none does: the whole target in one call
            h_t, _ = self.lstm(self.drop(y), state[0])
            h_tilde, a_t = self.attend(h_t, memory, torch.arange(1, tgt_in.size(1) + 1, device=src.device))
        logits = self.W_s(self.drop(h_tilde))                                     # eq. (6)   (B,T,V)
        return (logits, a_t / a_t.sum(-1, keepdim=True)) if need_alpha else logits

def make_optimizer(model, cfg):
    return (torch.optim.SGD if cfg.optimizer == "sgd" else torch.optim.Adam)(model.parameters(), lr=cfg.lr)

def learning_rate(cfg, step):
    if cfg.optimizer == "adam": return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    epochs, constant = (12, 8) if cfg.dropout else (10, 5)        # section 4.1: after the constant ones, halved with each
    return cfg.lr * 0.5 ** max(epochs * (step - 1) // cfg.steps - constant + 1, 0)

Model = LuongNMT

# ---- the same in every script from here on ----

def autocast(x): return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)
def ranks(): return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def nll(logits, y, smoothing=0.0):
    """Negative log-likelihood of each sentence of y (B,T), label-smoothed if asked, summed over all that is not padding."""
    logits, how = logits.flatten(0, 1).float(), dict(ignore_index=PAD, reduction="none", label_smoothing=smoothing)
    return F.cross_entropy(logits, y.flatten(), **how).view_as(y).sum(1)

def make_train_step(model, cfg, optimizer=None):
    """step(src, tgt) -> loss per target token: forward, backward, clip, update; on CUDA in bf16.
    The learning rate is that of learning_rate(cfg, 1), (cfg, 2), ...; the optimizer keeps the count."""
    optimizer, (_, world) = optimizer or make_optimizer(model, cfg), ranks()
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    def step(src, tgt):
        model.train()
        with autocast(src): loss = nll(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing).sum()
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
def align(model, src, tgt):  # alpha (B,T,S) of a given target, in one forced pass
    model.eval()
    return model(src, tgt[:, :-1], need_alpha=True)[1]

def each(use, model, pairs, vocabularies):  # use(src, tgt) of all pairs, like lengths in a batch: a result a pair, in order
    bitext, device, out = data.Bitext(pairs, vocabularies), next(model.parameters()).device, [None for _ in pairs]
    for rows in bitext.cut(tokens=4096):
        results = use(*(torch.from_numpy(x).to(device) for x in bitext.batch(rows)))
        for row, result in zip(rows, results): out[row] = result
    return out

def translate(model, sentences, vocabularies):
    def use(src, _):
        n = (src != PAD).sum(1) - 1
        return greedy(model, src, (2 * n + 10) * (n > 0)).tolist()
    found = each(use, model, [(words, []) for words in sentences], vocabularies)
    return [[vocabularies[1].words[i] for i in ids if i not in (PAD, EOS)] for ids in found]

def alignments(model, pairs, vocabularies):  # alpha of each pair, target words and EOS by source words and EOS
    found = each(lambda src, tgt: align(model, src, tgt).float().cpu().numpy(), model, pairs, vocabularies)
    return [alpha[:len(target) + 1, :len(source) + 1] for alpha, (source, target, *_) in zip(found, pairs)]

@torch.no_grad()
def loss_of(model, pairs, vocabularies):  # per target token, EOS counted
    def use(src, tgt):
        with autocast(src): return nll(model(src, tgt[:, :-1]), tgt[:, 1:]).tolist()
    model.eval()
    return sum(each(use, model, pairs, vocabularies)) / sum(len(p[1]) + 1 for p in pairs)

def evaluate(model, pairs, vocabularies):  # greedy translations against the references, alignments against gold, if any
    hypotheses, buckets = translate(model, [p[0] for p in pairs], vocabularies), {}
    for (source, target, *_), hypothesis in zip(pairs, hypotheses):
        buckets.setdefault(max(len(source) - 1, 0) // 10, []).append((hypothesis, target))
    loss, gold = loss_of(model, pairs, vocabularies), [p[2] for p in pairs if len(p) > 2]
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bleu": data.bleu(hypotheses, [p[1] for p in pairs]),
            "aer": data.aer([links(alpha) for alpha in alignments(model, pairs, vocabularies)], gold) if gold else None,
            "bleu_by_length": {f"{10 * k + 1}-{10 * k + 10}": data.bleu(*zip(*v)) for k, v in sorted(buckets.items())}}

def links(alpha):  # {(source index, target index), ...}: each target word's maximum; EOS, last of both, has no link
    return {(int(i), j) for j, i in enumerate(alpha[:-1].argmax(-1)) if i < alpha.shape[1] - 1}
def pharaoh(alpha): return " ".join(f"{i}-{j}" for i, j in sorted(links(alpha)))

def heatmap(source, target, alpha):  # in the terminal: a column a source word, a row a target word
    high, wide = (max(map(len, words), default=0) for words in (source, target))
    head = [" " * (wide + 1) + " ".join(word.rjust(high)[k] for word in source) for k in range(high)]
    shade = lambda row: "".join(" ░▒▓█"[min(int(5 * a), 4)] * 2 for a in row[:len(source)])
    return "\n".join(head + [word.rjust(wide) + " " + shade(row) for word, row in zip(target, alpha)])

def svg(source, target, alpha):  # the same as a picture, readable on light and dark
    left, top = (12 + 9 * max(map(len, words), default=0) for words in (target, source))
    style = "text{fill:#222}rect{fill:#1a56b0}@media(prefers-color-scheme:dark){text{fill:#ddd}rect{fill:#8ab8ff}}"
    label = lambda x, y, more, word: f'<text transform="translate({x},{y}){more}>{html.escape(word)}</text>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 22 * len(source) + 12}" '
             f'height="{top + 22 * len(target) + 12}" font-family="monospace" font-size="15"><style>{style}</style>']
    parts += [label(left + 22 * j + 15, top - 6, ' rotate(-90)"', word) for j, word in enumerate(source)]
    parts += [label(left - 6, top + 22 * i + 15, '" text-anchor="end"', word) for i, word in enumerate(target)]
    parts += [f'<rect x="{left + 22 * j}" y="{top + 22 * i}" width="21" height="21" opacity="{0.07 + 0.93 * alpha[i, j]:.2f}"/>'
              for i in range(len(target)) for j in range(len(source))]
    return "\n".join([*parts, "</svg>\n"])

def dump(path, pairs, alphas):
    """path.npz: the soft weights; path.txt: Pharaoh links, a line a pair; path.svg: the first pair as a picture."""
    sides = {side: [" ".join(pair[k]) for pair in pairs] for k, side in enumerate(("source", "target"))}
    np.savez_compressed(soft := io.BytesIO(), **sides, **{f"alpha_{k}": alpha for k, alpha in enumerate(alphas)})
    save(f"{path}.npz", soft.getvalue())
    save(f"{path}.txt", "".join(pharaoh(alpha) + "\n" for alpha in alphas).encode())
    save(f"{path}.svg", svg(*pairs[0][:2], alphas[0]).encode())

def save(path, content):
    """Whole or not at all: written beside the old file, then put in its place. Of several processes the first one writes."""
    part = Path(f"{path}.tmp")
    if ranks()[0]: return
    try:
        with open(part, "wb") as file: file.write(content), file.flush(), os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error: raise data.InputError(f"{path}: not written, {error.strerror}; what was there is whole") from None
    finally: part.unlink(missing_ok=True)

def load(path, device, flags={}, keys=("model",)):
    """(checkpoint, vocabularies) of a run of this script. A few flags may be new; the others make the run what it is."""
    if not path.exists(): raise data.InputError(f"{path}: no such file; train first, or name the run's folder with --out")
    try:
        with zipfile.ZipFile(path) as parts: fault = parts.testzip()  # torch.load would not notice a changed byte
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        script, config, words = (checkpoint[key] for key in ("script", "config", "words"))
        if script == Path(__file__).stem: Config(**config), [checkpoint[key] for key in keys]
    except Exception as error: fault = type(error).__name__
    if fault: raise data.InputError(f"{path}: not a sound checkpoint ({fault}); copy it again, or train again")
    if script != Path(__file__).stem: raise data.InputError(f"{path}: made by {script}.py; use that")
    for name in flags.keys() - {"src_vocab", "tgt_vocab"}:
        if name in ("steps", "every", "lr", "warmup", "clip", "align_layer"): config[name] = flags[name]
        if flags[name] != config[name]: fail(f"--{name}: {config[name]} in this run; leave it out".replace("_", "-"))
    return checkpoint, [data.Vocabulary(side) for side in words]

def fit(model, cfg, corpus, valid, vocabularies, out, resume=None):
    """Trains for cfg.steps. out/model.pt is the model that scored best on valid, out/last.pt all it takes to go on exactly."""
    (rank, world), device, optimizer, noted = ranks(), next(model.parameters()).device, make_optimizer(model, cfg), []
    now, words = {"step": 0, "epoch": 0, "batch": 0, "tokens": 0, "seconds": 0.0, "log": []}, [v.words for v in vocabularies]
    text = [world, zlib.crc32(repr([pair[:2] for pair in valid]).encode()), *map(zlib.crc32, corpus.tokens)]  # to know it again
    if resume:
        if resume["text"] != text: raise data.InputError(f"{out}: has another text or number of processes; give the same")
        for part in (model, optimizer): part.load_state_dict(resume["model" if part is model else "optimizer"])
        now = resume["now"]

    def keep(name):
        content = {"script": Path(__file__).stem, "config": vars(cfg), "words": words, "model": model.state_dict()}
        if name == "last.pt": content |= {"optimizer": optimizer.state_dict(), "now": now, "text": text}
        torch.save(content, memory := io.BytesIO())  # not to the file: torch.save crashes when the disk is full
        save(out / name, memory.getbuffer())

    if not resume: keep("last.pt")
    before = {n: signal.signal(n, lambda n, _: noted.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    train_step, clock, told = make_train_step(model, cfg, optimizer), time.perf_counter(), False
    with tqdm(total=cfg.steps, initial=now["step"], unit="step", disable=True if rank else None) as bar:
        while now["step"] < cfg.steps and not told:
            for src, tgt in corpus.epoch(cfg.tokens, cfg.sentences, cfg.seed, now["epoch"], now["batch"], rank, world):
                torch.manual_seed(hash((cfg.seed, rank, now["step"])))  # so that no random state need be saved
                loss = score = train_step(*(torch.from_numpy(x).to(device) for x in (src, tgt))).item()
                count = torch.tensor([(src[tgt[:, 0] != PAD] != PAD).sum() + (tgt[:, 1:] != PAD).sum(), len(noted)])
                if world > 1: dist.all_reduce(count)
                now.update(step=now["step"] + 1, batch=now["batch"] + 1, tokens=now["tokens"] + int(count[0]))
                rate, told = learning_rate(cfg, now["step"]), bool(count[1])
                look = now["step"] % cfg.every == 0 or now["step"] == cfg.steps
                if look or told: score = loss_of(model, valid, vocabularies)
                if not math.isfinite(score):
                    at = f"step {now['step']}, epoch {now['epoch']}, batch {now['batch']}, learning rate {rate:.2g}"
                    raise data.InputError(f"{at}: the loss is {score}; {out}/last.pt is from before: --resume with lower --lr")
                now["seconds"], clock = now["seconds"] + time.perf_counter() - clock, time.perf_counter()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False), bar.update()
                if look and all(score < line["valid_loss"] for line in now["log"]): keep("model.pt")
                now["log"] += [dict(step=now["step"], loss=loss, valid_loss=score, lr=rate, seconds=now["seconds"])] * look
                if look or told: keep("last.pt"), note(out, now["log"])
                if told or now["step"] == cfg.steps: break
            else: now.update(epoch=now["epoch"] + 1, batch=0)
    for number, handler in before.items(): signal.signal(number, handler)
    if noted or told: raise KeyboardInterrupt(f"stopped at step {now['step']}; repeat the command with --resume --out {out}")
    return now

def note(out, log): save(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log).encode())

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
    if ranks()[0] == 0: report(model, cfg, test, example, vocabularies, device, out, now, begin)

def report(model, cfg, test, example, vocabularies, device, out, now, begin):
    model.load_state_dict(load(out / "model.pt", device)[0]["model"])  # the best one
    scores, sources = evaluate(model, test, vocabularies), [example] + [p[0] for p in test[:99]]
    pairs = list(zip(sources, translate(model, sources, vocabularies)))
    alphas = alignments(model, pairs, vocabularies)
    dump(out / "align", pairs, alphas)
    seconds, speed, memory = time.perf_counter() - begin, now["tokens"] / now["seconds"], peak_memory(device)
    final = dict(final=True, **scores, seconds=seconds, tokens_per_second=speed, peak_memory_gib=memory, seed=cfg.seed)
    note(out, now["log"] + [final])
    print(f"\n{' '.join(pairs[0][0])}\n{' '.join(pairs[0][1])}\n\n{heatmap(*pairs[0], alphas[0])}\n")
    print(f"{len(test):,} sentences: loss {final['loss']:.4f}, perplexity {final['ppl']:.3f}, BLEU {final['bleu']:.2f}"
          + (f", AER {final['aer']:.3f}" if final["aer"] is not None else ""))
    print("BLEU by source length:", ", ".join(f"{k}: {v:.1f}" for k, v in final["bleu_by_length"].items()))
    print(f"{speed:,.0f} tokens/s, {memory:.2f} GiB at most, {seconds:.0f} s in all; everything is in {out}/", flush=True)

def peak_memory(device):
    if device.type == "cuda": return torch.cuda.max_memory_allocated(device) / 2**30
    try: import resource
    except ImportError: return 0.0  # Windows does not tell
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**(30 if sys.platform == "darwin" else 20)

def answer(args, device):  # --translate or --align: a line for each line, whatever it is, a thousand at a time
    checkpoint, vocabularies = load(folder(args) / "model.pt", device, args.config)
    model = Model(Config(**checkpoint["config"])).to(device)
    model.load_state_dict(checkpoint["model"])
    lines = enumerate(data.read_pairs(*args.align) if args.align else zip(data.read(0), itertools.repeat([])), 1)
    while chunk := dict(itertools.islice(lines, 1000)):
        for number in [number for number, pair in chunk.items() if max(map(len, pair)) > 1000]:
            chunk[number] = [], warn(f"line {number}: more than 1,000 words; left empty") or []
        if args.align: said = map(pharaoh, alignments(model, list(chunk.values()), vocabularies))
        else: said = map(" ".join, translate(model, [source for source, _ in chunk.values()], vocabularies))
        print(*said, sep="\n", flush=True)

def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error, parser.formatter_class = lambda message: fail(f"{message}; see --help"), argparse.RawDescriptionHelpFormatter
    flag, mode, pair = parser.add_argument, parser.add_mutually_exclusive_group(), dict(nargs=2, metavar=("SRC", "TGT"))
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())] + ["cuda"] * torch.cuda.is_available()
    devices = ["cpu"] + ["mps"] * torch.backends.mps.is_available() + gpus
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
    five, zero, share = (5, 2**31), (0, 2**31), (0, 0.99)
    bounds = dict(src_vocab=five, tgt_vocab=five, seed=zero, max_len=zero, align_layer=zero, dropout=share, smoothing=share)
    for name, value in ((name, value) for name, value in args.config.items() if type(value) in (int, float)):
        low, high = bounds.get(name, (1, 2**31) if type(value) is int else (1e-9, math.inf if name == "clip" else 1e9))
        if not low <= value <= high: fail(f"--{name} {value}: must be {low} to {high}".replace("_", "-"))
    if args.paper: args.config = vars(Config.paper(**args.config))
    return args

def folder(args):  # --out or, without it, the next free folder to train in, or the last one to go on with or to use
    if args.out: return args.out
    names = [Path("runs", Path(__file__).stem + (f"-{n}" if n > 1 else "")) for n in range(1, 1000)]
    taken = list(itertools.takewhile(Path.exists, names))
    return (taken or names[:1])[-1] if args.translate or args.align or args.resume else names[len(taken)]

def warn(message):
    if os.environ.get("RANK", "0") == "0": print(f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
def fail(message, status=2): sys.exit(warn(message) or status)

def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"): sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    for use in (torch.backends.mkldnn.set_flags, torch.backends.cuda.enable_cudnn_sdp): use(False)  # slower with them: README
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

if __name__ == "__main__":
    main()
