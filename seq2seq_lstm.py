# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Seq2Seq: one LSTM encodes the source into a fixed-size vector, another decodes it.
Sutskever, Vinyals, Le 2014, Sequence to Sequence Learning with Neural Networks, arXiv 1409.3215

    v = LSTM(x_S, ..., x_2, x_1)               final h and c of every layer, source reversed
    h_t = LSTM(y_{t-1}, h_{t-1})               a second deep LSTM, starting from h_0 = v
    p(y_t | v, y_<t) = softmax(W h_t)          probability of a word
    p(y | x) = prod_t p(y_t | v, y_<t)         probability of a sentence                      (1)

    python seq2seq_lstm.py                     built-in corpus: BLEU 44, 1-2 min, 2 cores
    python seq2seq_lstm.py --medium --train train.en train.fr --valid dev.en dev.fr --out runs/fr

This model has no attention and therefore no alignment. The script draws gradient saliency instead:
    alpha_ij = |x_j . d log p(y_i) / d x_j|    x_j: source embedding; normalized over j

Deviations from the paper
- The LSTMs are torch's. The encoder has no biases, so that zero padding leaves a zero state
  unchanged; the decoder and the softmax have biases. The paper gives no equations for its LSTM and
  cites Graves, whose LSTM has biases and peephole connections.
- Figure 1 has one <EOS> input, between source and target. Here the source ends with <EOS>, which
  the encoder reads first, because the source is reversed, and the decoder starts from <s>, so that
  all four scripts use the same batches.
- Single models only: the paper's BLEU 34.81 is from five models; its best single one has 30.59.
- The schedule stretches the paper's 7.5 epochs over --steps. Sentences of more than 100 words are
  skipped (--max-len). On CUDA, bf16 is used for speed. Where the paper is silent, an ended
  hypothesis keeps its place in the beam, a translation has 0 to n + 50 words for n source words,
  and the weights with the best validation loss are used.
- Without --paper: one layer of other sizes, Adam, label smoothing, the loss per token, and more
  (see --help); with --medium also dropout on the embeddings and the input of the softmax.
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

# x source, y target, v the fixed-size vector, h and c the LSTM state.
# Shapes: B batch, S source length, T target length, E embedding, H hidden, L layers, V vocabulary.


class Seq2Seq(nn.Module):
    """The complete model: the decoder sees the source only through v."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.E_x = nn.Embedding(cfg.src_vocab, cfg.emb)
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.emb)
        sizes = cfg.emb, cfg.hidden, cfg.layers
        self.encoder = nn.LSTM(*sizes, batch_first=True, bias=False)  # see encode
        self.decoder = nn.LSTM(*sizes, batch_first=True)
        self.W = nn.Linear(cfg.hidden, cfg.tgt_vocab)
        self.drop = nn.Dropout(cfg.dropout)
        self.init_weights()

    def init_weights(self):  # section 3.4
        for p in self.parameters():
            nn.init.uniform_(p, -self.cfg.init, self.cfg.init)

    def encode(self, src, x=None):  # x: embeddings of src, whose gradients saliency needs
        x = self.E_x(src) if x is None else x
        # Padding is zero vectors: without biases, a zero state stays exactly zero.
        x = x * (src != PAD).unsqueeze(-1)  # (B,S,E)
        x = x.flip(1) if self.cfg.reverse else pad_left(x, src)  # a b c -> c b a, section 3.3
        _, v = self.encoder(self.drop(x))
        return v  # final h and c, each (L,B,H)

    def init_state(self, v, max_len=None):  # max_len is unused here; transformer.py needs it
        return v

    def reorder(self, state, rows):  # for beam search
        return tuple(x[:, rows] for x in state)

    def step(self, y, state, v):  # y_{t-1} (B,) -> logits of y_t (B,V), next state
        h, state = self.decoder(self.drop(self.E_y(y).unsqueeze(1)), state)
        return self.W(self.drop(h.squeeze(1))), state

    def forward(self, src, tgt_in, need_alpha=False):
        h, _ = self.decoder(self.drop(self.E_y(tgt_in)), self.encode(src))
        logits = self.W(self.drop(h))  # of p(y_t | v, y_<t) in eq. (1)   (B,T,V)
        return (logits, saliency(self, src, tgt_in)) if need_alpha else logits


def pad_left(x, src):
    """Moves the padding of x (B,S,*) from the right to the left; the words keep their order."""
    padding = (src == PAD).sum(1, keepdim=True)
    index = (torch.arange(src.size(1), device=src.device) - padding) % src.size(1)  # (B,S)
    return x.gather(1, index.unsqueeze(-1).expand_as(x))


@torch.inference_mode(False)  # also enables gradients
@torch.backends.cudnn.flags(enabled=False)  # cuDNN RNNs have no backward in eval mode
def saliency(model, src, tgt_in):
    """Gradient saliency (B,T,S) of each source word for each target word; this is not attention."""
    src, tgt_in = src.clone(), tgt_in.clone()  # autograd rejects tensors of inference mode
    # The words to predict are those of tgt_in, shifted by one, then EOS.
    y = F.pad(tgt_in[:, 1:], (0, 1))
    y = y.masked_fill(y == PAD, EOS)  # (B,T)
    x = model.E_x(src).detach().requires_grad_()  # (B,S,E)
    h, _ = model.decoder(model.drop(model.E_y(tgt_in)), model.encode(src, x))
    rows = []
    for h_i, y_i in zip(h.unbind(1), y.unbind(1)):
        log_p = model.W(model.drop(h_i)).log_softmax(-1).gather(1, y_i.unsqueeze(1))  # (B,1)
        (slope,) = torch.autograd.grad(log_p.sum(), x, retain_graph=True)  # (B,S,E)
        rows.append((x.detach() * slope).sum(-1).abs())
    alpha = torch.stack(rows, 1)  # (B,T,S)
    alpha = alpha + torch.finfo(alpha.dtype).tiny  # avoids 0 / 0 below
    alpha = alpha.masked_fill((src == PAD).unsqueeze(1), 0)
    return alpha / alpha.sum(-1, keepdim=True)


@dataclasses.dataclass
class Config:
    """Every field is a flag, its comment the help text. A run keeps the fields above lr;
    an older run gets a new field's default. The limits of numbers are in __post_init__."""

    # fmt: off
    # text
    src_vocab: int = 30000     # source vocabulary size; rarer words become <unk>
    tgt_vocab: int = 30000     # target vocabulary size
    share_vocab: bool = False  # one vocabulary of --src-vocab words for both languages
    min_count: int = 1         # words that occur fewer than N times become <unk>
    max_len: int = 100         # skip training pairs with longer sentences
    # model
    emb: int = 192             # embedding size
    hidden: int = 192          # LSTM units per layer
    layers: int = 1            # LSTM layers of the encoder and of the decoder
    reverse: bool = True       # reverse the source, section 3.3
    init: float = 0.2          # initial weights are uniform between -X and X
    # training
    optimizer: typing.Literal["adam", "sgd"] = "adam"  # Adam, or plain SGD as in the paper
    lr: float = 0.01           # learning rate
    warmup: int = 30           # steps of linear warm-up, under a linear decay to 0 (Adam only)
    clip: float = 5.0          # maximum gradient norm (0: no clipping)
    dropout: float = 0.0       # dropout rate of embeddings and h_t; none in the paper
    smoothing: float = 0.1     # label smoothing; none in the paper
    loss_per: typing.Literal["token", "sentence"] = "token"  # what the loss is averaged over
    batch_tokens: int = 1024   # maximum source + target tokens per batch, padding included
    batch_sentences: int = 1000  # maximum sentences per batch
    accumulate: int = 1        # split each batch into N micro-batches per process to save memory
    steps: int = 1600          # training steps
    eval_every: int = 200      # steps between validations
    average: int = 1           # average the weights at the last N validations (1: keep the best)
    compile: bool = False      # use torch.compile, on CUDA only
    seed: int = 1              # random seed of initialization, batches and dropout
    # decoding
    beam: int = 1              # beam size; 1 is greedy decoding
    length_penalty: float = 0.0  # beam search ranks by log p / ((5 + |y|) / 6)^length_penalty
    replace_unk: bool = False  # replace <unk> by its source word; needs <unk> in training text
    # fmt: on

    def __post_init__(self):
        data.check(self, seed=(0, 2**63), dropout=(0, 1), smoothing=(0, 1))

    @classmethod
    def medium(cls, **overrides):
        """For 10,000 to 100,000 sentence pairs; chosen on the validation set of Multi30k."""
        vocabulary = dict(src_vocab=20000, tgt_vocab=20000, min_count=2)
        sizes = dict(emb=512, hidden=1024, dropout=0.6, init=0.08)
        recipe = dict(lr=0.006, warmup=200, smoothing=0.2, average=10, beam=5, length_penalty=1.0)
        batches = dict(batch_tokens=16384, accumulate=2, steps=3000, eval_every=100)
        return cls(**vocabulary | sizes | recipe | batches | overrides)

    @classmethod
    def paper(cls, **overrides):
        """Section 3.4: 7.5 epochs of 12 million pairs in batches of 128 are 703,125 steps."""
        sizes = dict(src_vocab=160000, tgt_vocab=80000, emb=1000, hidden=1000, layers=4, init=0.08)
        recipe = dict(optimizer="sgd", lr=0.7, smoothing=0.0, loss_per="sentence", compile=True)
        batches = dict(batch_sentences=128, batch_tokens=28000, steps=703125, eval_every=5000)
        return cls(**sizes | recipe | batches | dict(beam=12) | overrides)


def make_optimizer(model, cfg):
    """Plain SGD as in section 3.4, or Adam."""
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=cfg.lr)
    return torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)


def learning_rate(cfg, update):
    """SGD: halved every half epoch after 5 of 7.5 epochs. Adam: warm-up, linear decay."""
    if cfg.optimizer == "adam":
        return cfg.lr * min(update / cfg.warmup, max(1 - (update - 1) / cfg.steps, 0))
    half_epochs = 15 * (update - 1) // cfg.steps
    return cfg.lr * 0.5 ** max(half_epochs - 9, 0)


Model = Seq2Seq
COMPILED = ()  # --compile compiles only the loss, because cuDNN already fuses the LSTMs

# ---- the same in every script from here on ----


def make_train_step(model, cfg, optimizer=None):
    """Returns train_step(src, tgt): makes one update, returns the label-smoothed loss per token.
    src (B,S): words, EOS, right padding. tgt (B,T+1): BOS, words, EOS, right padding.
    The learning rate is the optimizer's. Under torchrun, every process passes the whole batch.
    Make a new one after adding, replacing or unfreezing weights. On CUDA, buffers do not change."""
    optimizer = optimizer or make_optimizer(model, cfg)
    net = bf16_copy(model)  # computes in bf16 on CUDA; the model keeps the float32 weights
    weights = list(model.parameters())
    sizes = [*(p.numel() for p in weights), 1]
    flat = weights[0].new_zeros(sum(sizes))  # all gradients, then the loss, for one all_reduce
    pairs = zip(weights, flat.split(sizes))
    gradients = [g.as_strided(p.shape, torch.empty_like(p).stride()) for p, g in pairs]  # dense
    collect = torch._foreach_add_ if cfg.accumulate > 1 else torch._foreach_copy_  # copy: faster
    compiled = cfg.compile and flat.is_cuda
    criterion = torch.compile(summed_loss, dynamic=True) if compiled else summed_loss
    n = WORLD_SIZE * cfg.accumulate  # micro-batches per update, over all processes

    def forward_backward(src, tgt, scale):
        net.train()
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters()), weights)  # a no-op if net is the model
        loss = criterion(net(src, tgt[:, :-1]), tgt[:, 1:], cfg.smoothing) * scale
        pairs = zip(net.parameters(), gradients)
        trained, parts = zip(*((p, g) for p, g in pairs if p.requires_grad))
        collect(parts, torch.autograd.grad(loss, trained, materialize_grads=True))
        return loss.detach()

    if compiled:  # now, on a typical batch, because the first shape decides which kernels are used
        compile_parts(net)
        rows = max(min(cfg.batch_tokens // 64, cfg.batch_sentences) // n, 2)
        words = flat.new_full((rows, 31), EOS, dtype=torch.long)  # torch 2.6 would hard-code 32
        forward_backward(words, words, flat.new_ones(()))
    forward_backward = graphed(forward_backward, flat.device)

    def train_step(src, tgt):
        to = dict(device=flat.device, non_blocking=flat.is_cuda)  # without waiting for the GPU
        src, tgt = (torch.as_tensor(x).to(**to) for x in (src, tgt))
        tokens = (tgt[:, 1:] != PAD).sum()
        count = tokens if cfg.loss_per == "token" else torch.full_like(tokens, len(tgt))
        flat.zero_()
        loss = flat[-1]
        for k in range(RANK, min(n, len(src)), WORLD_SIZE):  # micro-batch k: rows k, k + n, ...
            loss += forward_backward(src[k::n], tgt[k::n], 1 / count)
        if WORLD_SIZE > 1:
            dist.all_reduce(flat)  # a sum: 1 / count already divides by the whole batch
        for p, q, g in zip(weights, net.parameters(), gradients):
            p.grad = g if p.requires_grad and q.requires_grad else None  # 0 would decay in AdamW
        if cfg.clip:
            nn.utils.clip_grad_norm_(weights, cfg.clip)
        optimizer.step()
        model.zero_grad()
        return loss * (count / tokens)  # per target token, whatever --loss-per says

    return train_step


def summed_loss(logits, y, smoothing=0.0):
    """Cross-entropy of the targets y (B,T), summed over all tokens but padding, not in bf16."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float)).flatten(0, 1)
    options = dict(ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    return F.cross_entropy(logits, y.flatten(), **options)


@torch.no_grad()
def greedy(model, src, max_len):
    """Greedy decoding of src (B,S): token ids (B,T) with EOS, then PAD; max_len is an int, or one
    per sentence. Leaves the model in eval mode, as do beam, align, translate and mean_loss."""
    model.eval()
    limit = torch.as_tensor(max_len, device=src.device).expand(len(src))
    T = int(limit.max())
    memory = model.encode(src)
    state = model.init_state(memory, T)

    def best_word(y, *state):
        logits, state = model.step(y, state, memory)
        return logits[:, 1:].argmax(-1) + 1, *state  # never PAD, which is token 0

    best_word = graphed(best_word, src.device)
    y = torch.full_like(src[:, 0], BOS)
    out = src.new_full((len(src), T), PAD)
    for t in range(T):
        y, *state = best_word(y, *state)
        out[:, t] = y
        if t % 8 == 7 and ((out == EOS).any(1) | (limit <= t + 1)).all():
            break  # checked every 8 steps, because .all() waits for the GPU
    eos_before = (out == EOS).cumsum(1) - (out == EOS).int()  # how many EOS precede each word
    too_long = torch.arange(T, device=src.device) >= limit.unsqueeze(1)
    out = out.masked_fill((eos_before > 0) | too_long, PAD)
    return out[:, (out != PAD).any(0)]  # without columns of padding


@torch.no_grad()
def beam(model, src, max_len, K, penalty=0.0):
    """Beam search with K hypotheses per sentence; returns the best, like greedy. A hypothesis that
    has ended keeps one of the K places, so fewer are extended. The best has EOS, if any has, and
    the highest log p / ((5 + |y|) / 6)^penalty (GNMT, Wu et al. 2016). Overwrites step's logits."""
    if K == 1:
        return greedy(model, src, max_len)
    model.eval()
    B = len(src)
    src = src.repeat_interleave(K, 0)  # each sentence has K consecutive rows, its hypotheses
    first_row = torch.arange(0, B * K, K, device=src.device).unsqueeze(1)
    remaining = torch.as_tensor(max_len, device=src.device).expand(B).repeat_interleave(K)
    T = int(remaining.max())
    first_of_K = torch.tensor([0.0] + [-torch.inf] * (K - 1), device=src.device)  # log p
    memory = model.encode(src)  # equal for the K rows of a sentence, so it is never reordered
    state = model.init_state(memory, T)

    def extend(y, remaining, score, *state):  # every hypothesis by a word; keeps the K best
        logits, state = model.step(y, state, memory)
        log_p = logits.log_softmax(-1, torch.float)  # (BK,V)
        logits[:, PAD] = -torch.inf  # never predict padding
        words = logits.topk(min(K, logits.size(1) - 1)).indices  # faster than topk of float32
        log_p = log_p.gather(1, words)  # (BK,K), or (BK,V-1) if K is larger
        ended = (remaining == 0).unsqueeze(1)
        words = words.masked_fill(ended, PAD)  # an ended hypothesis has one candidate, PAD,
        log_p = torch.where(ended, first_of_K[: words.size(1)], log_p)  # with log p = 0
        total = score.view(-1, 1) + log_p
        rank = total.masked_fill(ended & total.isfinite(), torch.inf)  # ended ones keep their place
        index = rank.view(B, -1).topk(K).indices  # (B,K)
        score = total.view(B, -1).gather(1, index)
        rows = (first_row + index // words.size(1)).flatten()  # what each new hypothesis extends
        y = words.view(B, -1).gather(1, index).flatten()
        remaining = (remaining[rows] - 1).clamp(min=0).masked_fill(y == EOS, 0)
        return y, remaining, rows, score, *model.reorder(state, rows)

    extend = graphed(extend, src.device)
    y = torch.full_like(src[:, 0], BOS)
    score = first_of_K.repeat(B, 1)  # log p; the K hypotheses start out equal, so one is enough
    out = src[:, :0]
    for t in range(T):
        y, remaining, rows, score, *state = extend(y, remaining, score, *state)
        out = torch.cat([out[rows], y.unsqueeze(1)], 1)
        if t % 8 == 7 and not remaining.any():
            break
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


def translate(model, sentences, vocabularies):
    """Translates strings or lists of words into lists of words, with the beam of model.cfg."""
    cfg = model.cfg
    assert not isinstance(sentences, str), "expected a list of sentences, not one string"
    pairs = [[data.to_words(sentence), []] for sentence in sentences]  # [source, translation]
    net = bf16_copy(model.eval())
    max_tokens = (65536 if next(model.parameters()).is_cuda else 16384) // cfg.beam
    for rows, src, _ in inference_batches(model, pairs, vocabularies, max_tokens):
        n = (src != PAD).sum(1) - 1  # source words, without EOS
        max_len = torch.where(n > 0, n + 50, 0)  # an empty sentence stays empty
        tokens = beam(net, src, max_len, cfg.beam, cfg.length_penalty)
        for row, ids in zip(rows, tokens.tolist()):
            pairs[row][1] = vocabularies[1].decode(ids)
    if cfg.replace_unk:
        alphas = alignments(model, pairs, vocabularies)
        return [data.replace_unknown(*pair, alpha) for pair, alpha in zip(pairs, alphas)]
    return [target for _, target in pairs]


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
    """Cross-entropy per target token, EOS included, without label smoothing."""
    net = bf16_copy(model.eval())
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
    """(model, vocabularies) of a run folder; flags override Config fields from lr on."""
    saved = read_checkpoint(Path(path, "model.pt"))
    model = Model(data.saved_config(saved, Config, flags, __file__)).to(device)
    model.load_state_dict(saved["model"])
    return model.eval(), [data.Vocabulary(words) for words in saved["vocabularies"]]


def train(out, corpus, model, saved):
    """Trains until cfg.steps and returns the log; saved is the content of last.pt, or {}.
    Writes model.pt (best or averaged weights), last.pt (to resume) and log.jsonl."""
    cfg = model.cfg
    optimizer = make_optimizer(model, cfg)
    about = dict(script=Path(__file__).stem, config=vars(cfg)) | corpus.to_save()
    log = saved.get("log", [])  # one entry per validation
    snapshots = saved.get("snapshots", [])  # the weights at the last --average validations
    done = tokens = seconds = 0
    if log:
        model.load_state_dict(snapshots[-1])
        optimizer.load_state_dict(saved["optimizer"])
        done, tokens, seconds = (log[-1][key] for key in ("step", "tokens", "seconds"))
    else:  # marks the folder as used, and lets --resume start from step 0
        save(out / "last.pt", about)
    start = time.perf_counter() - seconds
    train_step = make_train_step(model, cfg, optimizer)
    batches = corpus.train.batches(cfg.batch_tokens, cfg.batch_sentences, cfg.seed, done)
    losses = []  # of the steps since the last validation
    no_bar = RANK > 0 or None  # None: no progress bar unless stderr is a terminal
    bar = trange(done + 1, cfg.steps + 1, initial=done, total=cfg.steps, disable=no_bar)
    for update, batch in zip(bar, batches):
        torch.manual_seed(hash((cfg.seed, RANK, update)))  # so checkpoints need no random state
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, update)
        losses.append(train_step(*batch))
        tokens += sum(int((side != PAD).sum()) for side in batch)  # BOS and EOS included
        if update % cfg.eval_every and update < cfg.steps:
            continue
        valid_loss = mean_loss(model, corpus.valid, corpus.vocabularies)
        loss = torch.stack(losses).mean().item()
        losses = []
        if not math.isfinite(loss + valid_loss):
            raise data.InputError(f"step {update}: loss is not finite; --resume with a lower --lr")
        entry = dict(step=update, loss=loss, valid_loss=valid_loss, tokens=tokens)
        log.append(entry | dict(seconds=time.perf_counter() - start))
        snapshot = {key: x.to("cpu", copy=True) for key, x in model.state_dict().items()}
        snapshots = [*snapshots, snapshot][-cfg.average :]
        if cfg.average > 1 or valid_loss == min(x["valid_loss"] for x in log):
            mean = {key: sum(s[key] for s in snapshots) / len(snapshots) for key in snapshot}
            save(out / "model.pt", about | dict(model=mean))
        state = dict(log=log, snapshots=snapshots, optimizer=optimizer.state_dict())
        save(out / "last.pt", about | state)
        data.log_validation(out, log, cfg.smoothing)
    return log


def save(path, checkpoint):
    if RANK == 0:
        buffer = io.BytesIO()  # in memory first, because torch.save crashes when the disk is full
        torch.save(checkpoint, buffer)
        data.write(path, buffer.getbuffer())


def read_checkpoint(path):
    if not path.exists():
        raise data.InputError(f"no {path.name} in {path.parent}; train first, or check --out")
    try:
        return torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise data.InputError(f"{path}: unreadable or damaged") from error


def train_command(args, flags, device):
    """Trains a new run or resumes one, then scores the model and draws alignments."""
    saved = read_checkpoint(args.out / "last.pt") if args.resume else {}
    cfg = data.saved_config(saved, Config, flags, __file__) if saved else Config(**flags)
    if RANK == 0 and not saved and any(args.out.glob("*.pt")):  # RANK 1 may see what 0 just wrote
        raise data.InputError(f"{args.out}: holds a run; add --resume, or choose another --out")
    corpus = data.Corpus(cfg, args.train, args.valid, saved)
    cfg.src_vocab, cfg.tgt_vocab = map(len, corpus.vocabularies)
    torch.manual_seed(cfg.seed)
    model = Model(cfg).to(device)
    if RANK == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{corpus}; {parameters:,} parameters on {device}", flush=True)
    log = train(args.out, corpus, model, saved)
    if RANK == 0:
        model, vocabularies = load(args.out, device, **flags)
        result = evaluate(model, corpus.test, vocabularies)
        sources = [pair[0] for pair in corpus.test[:100]]
        pairs = list(zip(sources, translate(model, sources, vocabularies)))
        alphas = alignments(model, pairs, vocabularies)
        data.write_alignments(args.out / "align", pairs, alphas)
        speed = log[-1]["tokens"] / log[-1]["seconds"]
        gib = torch.cuda.max_memory_reserved() / 2**30  # 0 on other devices
        result |= dict(seed=cfg.seed, tokens_per_second=speed, gpu_memory_gib=gib)
        data.write_log(args.out, [*log, result])
        source, target = map(" ".join, pairs[0])
        print(f"\n{source}\n{target}\n\n{data.heatmap(source, target, alphas[0])}\n")
        print(f"{corpus.test_name}: {data.format_scores(result)}")
        gpu = f", {gib:.1f} GiB of GPU memory" if gib else ""
        print(f"{speed:,.0f} tokens/s{gpu}; files are in {args.out}/")


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


def main(argv=None):
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # saves memory
    has_avx = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    torch.backends.mkldnn.set_flags(has_avx)  # oneDNN slows these models down on ARM
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is slow at new shapes
    with data.one_line_errors():
        args, flags = data.parse_args(Config, __doc__, argv)
        has = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
        device = torch.device(args.device or ("cuda" if has["cuda"] else "cpu"))
        if not has[device.type]:
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


# ---- speed: what follows affects only rounding and running time; skip it at first ----


def bf16_copy(model):
    """A bf16 copy of a model, faster than autocast; without CUDA or bf16, the model itself."""
    device = next(model.parameters()).device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return model
    if (torch.backends.cudnn.version() or 0) >= 91300:  # lets bfloat16() flatten RNN weights
        torch.backends.cudnn.CUDNN_TENSOR_DTYPES.add(torch.bfloat16)
    return copy.deepcopy(model).bfloat16()


def compile_parts(net):
    """Compiles the modules of net listed in COMPILED, when they are called for the first time."""
    from torch._inductor import config as inductor
    from torch.fx.experimental import _config as symbolic_shapes

    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")  # nothing a user can change
    symbolic_shapes.use_duck_shape = False  # so that the first batch with S = T does not recompile
    if hasattr(inductor.triton, "mix_order_reduction"):  # not in torch 2.6
        inductor.triton.mix_order_reduction = False  # it slows LayerNorm down on an H200
    for part in net.modules():
        if isinstance(part, COMPILED):
            part.compile(dynamic=True)  # one compilation for all shapes


def graphed(function, device):
    """On CUDA, records the kernels that function launches, once per combination of input shapes,
    and replays them later; elsewhere returns function."""
    if device.type != "cuda":
        return function
    graphs = {}  # input shapes -> graph, its input buffers, its output
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()

    def call(*inputs):
        shapes = tuple(x.shape for x in inputs)
        if shapes not in graphs:
            graph = torch.cuda.CUDAGraph()
            buffers = [x.clone() for x in inputs]
            torch.cuda.synchronize(device)
            if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > 2**31:
                torch.cuda.empty_cache()  # recordings cannot reuse memory cached by other code
            # Not torch.cuda.graph, which empties the memory cache at every recording. Compiled
            # modules run eagerly where they would recompile, because that cannot be recorded.
            with torch.cuda.stream(stream), torch.compiler.set_stance("eager_on_recompile"):
                graph.capture_begin(pool, "relaxed")  # allows kernels to be loaded meanwhile
                output = function(*buffers)  # recorded, not computed
                graph.capture_end()
            graphs[shapes] = graph, buffers, output
        graph, buffers, output = graphs[shapes]
        for buffer, x in zip(buffers, inputs):
            buffer.copy_(x)  # a replay reads the memory addresses of its recording
        graph.replay()
        return output  # later calls may overwrite it

    return call


if __name__ == "__main__":
    main()
