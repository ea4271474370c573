# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Seq2Seq: one LSTM encodes the source into a fixed-size vector, another decodes it.
Sutskever, Vinyals, Le 2014, Sequence to Sequence Learning with Neural Networks, arXiv 1409.3215

    v = LSTM(x_S, ..., x_2, x_1)               final h and c of every layer, source reversed
    h_t = LSTM(y_{t-1}, h_{t-1})               a second deep LSTM, starting from h_0 = v
    p(y_t | v, y_<t) = softmax(W h_t)          probability of a word
    p(y | x) = prod_t p(y_t | v, y_<t)         probability of a sentence                      (1)

    python seq2seq_lstm.py                     built-in corpus: BLEU 43, 2 min on 2 cores
    python seq2seq_lstm.py --medium --train train.en train.fr --valid valid.en valid.fr

This model has no attention and therefore no alignment. The script draws gradient saliency instead:
    alpha_ij = |x_j . d log p(y_i) / d x_j|    x_j: source embedding; normalized over j
Deviations from the paper
- The LSTM is torch's; the paper's, from Graves, also has peephole connections.
- The decoder starts from <s> instead of <EOS>, and the reversed source begins with <EOS>, which
  the encoder of figure 1 reads last. This way, all four scripts use the same batches.
- Single models only: the paper's BLEU 34.81 is from five models; its best single one has 30.59.
- The schedule stretches the paper's 7.5 epochs over --steps. Sentences of more than 100 words are
  skipped (--max-len). On CUDA, bf16 is used for speed. Where the paper is silent, a translation has
  0 to n + 50 words for n source words, and the weights with the best validation loss are used.
- Without --paper: smaller, one layer, Adam, label smoothing; with --medium also dropout.
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

# x source, y target, v the fixed-size vector, h and c the LSTM state.
# Shapes: B batch, S source length, T target length, E embedding, H hidden, L layers, V vocabulary.


class DeepLSTM(nn.Module):
    """A stack of LSTMs, each of which reads the outputs of the one below, section 2."""

    def __init__(self, size, hidden, layers, dropout):
        super().__init__()
        sizes = [size] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, batch_first=True) for n in sizes)
        self.drop = nn.Dropout(dropout)  # not nn.LSTM's dropout, which CUDA graphs cannot record

    def forward(self, x, state=None, padding=None):
        """x (B,T,E); a decoder passes its state h, c (L,B,H), an encoder its left padding (B,T)."""
        final = []
        for n, layer in enumerate(self.layers):
            x = self.drop(x)
            if padding is None:
                x, h_c = layer(x, tuple(part[n : n + 1] for part in state))
            else:
                x, h_c = lstm_after_padding(layer, x, padding)
            final.append(h_c)
        return x, tuple(torch.cat(part) for part in zip(*final))  # (B,T,H), final h and c (L,B,H)


class Seq2Seq(nn.Module):
    """The complete model: the decoder sees the source only through v."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.E_x = nn.Embedding(cfg.src_vocab, cfg.emb)
        self.E_y = nn.Embedding(cfg.tgt_vocab, cfg.emb)
        self.encoder = DeepLSTM(cfg.emb, cfg.hidden, cfg.layers, cfg.dropout)
        self.decoder = DeepLSTM(cfg.emb, cfg.hidden, cfg.layers, cfg.dropout)
        self.W = nn.Linear(cfg.hidden, cfg.tgt_vocab)
        self.drop = nn.Dropout(cfg.dropout)
        for p in self.parameters():
            nn.init.uniform_(p, -cfg.init, cfg.init)  # section 3.4

    def encode(self, src, factor=1.0):  # factor scales the embeddings, for saliency
        x = self.E_x(src) * factor  # (B,S,E)
        x = x.flip(1) if self.cfg.reverse else pad_left(x, src)  # a b c -> c b a, section 3.3
        _, v = self.encoder(x, padding=(src == PAD).flip(1))  # either way, padding is on the left
        return v  # final h and c, each (L,B,H)

    def init_state(self, v, max_len=None):  # max_len is unused here; transformer.py needs it
        return v

    def reorder(self, state, rows):  # for beam search
        return tuple(x[:, rows] for x in state)

    def step(self, y, state, v):  # y_{t-1} (B,) -> logits of y_t (B,V), next state
        h, state = self.decoder(self.E_y(y).unsqueeze(1), state)
        return self.W(self.drop(h.squeeze(1))), state

    def forward(self, src, tgt_in, need_alpha=False):
        h, _ = self.decoder(self.E_y(tgt_in), self.encode(src))
        logits = self.W(self.drop(h))  # before the softmax of eq. (1)   (B,T,V)
        return (logits, self.saliency(src, tgt_in)) if need_alpha else logits

    @torch.inference_mode(False)
    @torch.enable_grad()
    @torch.backends.cudnn.flags(enabled=False)  # cuDNN RNNs have no backward in eval mode
    def saliency(self, src, tgt_in):
        """Gradient saliency of each source word for each target word; this is not attention."""
        src, tgt_in = src.clone(), tgt_in.clone()  # autograd rejects tensors of inference mode
        y = F.pad(tgt_in[:, 1:], (0, 1))  # the words to predict: tgt_in shifted by one,
        y = y.masked_fill(y == PAD, EOS).unsqueeze(-1)  # then EOS   (B,T,1)
        factor = torch.ones(*src.shape, 1, dtype=self.W.weight.dtype, device=src.device)  # (B,S,1)
        factor.requires_grad_()
        h, _ = self.decoder(self.E_y(tgt_in), self.encode(src, factor))
        log_p = self.W(self.drop(h)).log_softmax(-1).gather(-1, y)  # (B,T,1)
        (dh,) = torch.autograd.grad(log_p.sum(), h, retain_graph=True)  # y_i depends on h_i only
        slopes = []
        for h_i, dh_i in zip(h.unbind(1), dh.unbind(1)):
            slopes.append(torch.autograd.grad(h_i, factor, dh_i, retain_graph=True)[0])  # (B,S,1)
        alpha = torch.stack(slopes, 1).squeeze(-1).abs()  # d/d factor_j = x_j . d/d x_j   (B,T,S)
        alpha = alpha + torch.finfo(alpha.dtype).tiny  # avoids 0 / 0 below
        alpha = alpha.masked_fill((src == PAD).unsqueeze(1), 0)
        return alpha / alpha.sum(-1, keepdim=True)


def lstm_after_padding(lstm, x, padding):
    """Runs lstm on x with left padding (B,T); its state stays zero until the first word."""
    W_ih, *others = lstm.all_weights[0]  # not a packed sequence: CUDA graphs cannot record those
    closed = W_ih.new_zeros(len(W_ih), 8)  # weights of 8 equal padding flags (8: memory alignment)
    closed[: lstm.hidden_size] = -1e4  # close the input gate: c = f * 0 + 0 * g = 0, so h = 0
    weights = [torch.cat([W_ih, closed], 1), *others]
    flat = torch.cat([w.flatten() for w in weights])  # contiguous, as cuDNN requires
    parts = flat.split([w.numel() for w in weights])
    weights = [part.view_as(w) for part, w in zip(parts, weights)]
    x = torch.cat([x, padding.to(x.dtype).unsqueeze(-1).expand(-1, -1, 8)], -1)
    zero = x.new_zeros(1, len(x), lstm.hidden_size)
    options = True, 1, 0.0, lstm.training, False, True  # bias, layers, ..., batch_first
    x, h, c = torch.lstm(x, (zero, zero), weights, *options)
    return x, (h, c)


def pad_left(x, src):
    """Moves the padding of x (B,S,*) from the right to the left; the words keep their order."""
    padding = (src == PAD).sum(1, keepdim=True)
    index = (torch.arange(src.size(1), device=src.device) - padding) % src.size(1)  # (B,S)
    return x.gather(1, index.unsqueeze(-1).expand_as(x))


@dataclasses.dataclass
class Config:
    # fmt: off
    # text
    src_vocab: int = 30000     # source vocabulary size; less frequent words become <unk>
    tgt_vocab: int = 30000     # target vocabulary size
    share_vocab: bool = False  # one vocabulary of --src-vocab words for both languages
    min_count: int = 1         # words that occur fewer than N times become <unk>
    max_len: int = 0           # skip longer sentences (0: 100 words, or 30 in the built-in corpus)
    # model
    emb: int = 192             # embedding size
    hidden: int = 192          # LSTM units per layer
    layers: int = 1            # LSTM layers of the encoder and of the decoder
    reverse: bool = True       # reverse the source, section 3.3
    init: float = 0.2          # initial weights are uniform between -X and X
    # training
    optimizer: typing.Literal["adam", "sgd"] = "adam"  # Adam, or plain SGD as in the paper
    lr: float = 0.01           # learning rate
    warmup: int = 30           # steps of linear warm-up, before linear decay to 0 (Adam only)
    clip: float = 5.0          # maximum gradient norm (0: no clipping)
    dropout: float = 0.0       # dropout rate of LSTM and softmax inputs; none in the paper
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
    replace_unk: bool = False  # replace each <unk> with the source word that influences it most
    # fmt: on

    def __post_init__(self):
        data.check(self)

    @classmethod
    def medium(cls, **overrides):
        """For 10,000 to 300,000 sentence pairs; chosen on the validation set of Multi30k."""
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


def learning_rate(cfg, step):
    """SGD: halved every half epoch after 5 of 7.5 epochs, section 3.4. Adam: linear decay."""
    if cfg.optimizer == "adam":
        return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    half_epochs = 15 * (step - 1) // cfg.steps
    return cfg.lr * 0.5 ** max(half_epochs - 9, 0)


Model = Seq2Seq
COMPILED = ()  # --compile compiles only the loss, because cuDNN already fuses the LSTMs

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
