# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Seq2Seq: one LSTM reads the sentence into a vector of fixed size, another writes from it.
Sutskever, Vinyals, Le 2014, Sequence to Sequence Learning with Neural Networks, arXiv 1409.3215

    v = LSTM(x_T, ..., x_2, x_1)               the last h and c of every layer, reading backwards
    h_t = LSTM(y_{t-1}, h_{t-1})               a second deep LSTM, h_0 = v
    p(y_t | v, y_<t) = softmax(W h_t)          a word's probability
    p(y | x) = prod_t p(y_t | v, y_<t)         a sentence's                                   (1)

    python seq2seq_lstm.py                     built-in corpus: BLEU 43, 100 s, 2 cores
    python seq2seq_lstm.py --paper --train train.en train.fr --valid valid.en valid.fr --out runs/fr

There is no attention in this model, so there is no alignment. What it draws is gradient saliency,
    alpha_ij = |x_j . d log p(y_i) / d x_j|, scaled to sum to 1 over j:
how much each source word still moves each target word's probability through the one vector.

Deviations from the paper
- torch's LSTM, because it is fused; the paper's is Graves', which also has peepholes.
- The decoder starts from <s>, not <EOS>, and the source ends with </s>: as in the other scripts.
- The schedule takes --steps for the paper's 7.5 epochs. Sentences over 100 words are left out
  (--max-len). bf16 on CUDA, for speed. The paper names no limit: ours is n + 50 words for n.
- Without --paper: small, one layer, Adam, label smoothing, greedy, to learn in two minutes.
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
    joint: bool = False        # one vocabulary for both languages, of --src-vocab words
    min_count: int = 1         # rarer words become <unk>
    max_len: int = 0           # words in a training sentence at most (0: 30 built-in, 100 your own)
    # model
    emb: int = 192             # size of a word embedding
    hidden: int = 192          # cells of each LSTM layer
    layers: int = 1            # LSTM layers, in the encoder and in the decoder
    reverse: bool = True       # read the source backwards
    dropout: float = 0.0       # on each LSTM layer's input and the softmax's; the paper has none
    init: float = 0.2          # every weight is drawn between this and its negative
    # training
    optimizer: typing.Literal["adam", "sgd"] = "adam"  # sgd is the paper's
    lr: float = 0.01           # learning rate
    warmup: int = 30           # steps until Adam's learning rate is reached; then it falls to 0
    clip: float = 5.0          # a gradient of greater norm is scaled down to it (0: none is)
    smoothing: float = 0.1     # label smoothing; the paper has none
    per: typing.Literal["token", "sentence"] = "token"  # what the summed loss is divided by
    tokens: int = 1024         # source and target tokens in a batch, padding counted
    sentences: int = 1000      # sentences in a batch at most
    accumulate: int = 1        # pieces a batch is computed in, to save memory
    steps: int = 1600          # training steps
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

    @classmethod
    def paper(cls, **overrides):
        """Section 3.4. 7.5 epochs of 12 million pairs, 128 at a time, are 703,125 steps."""
        sizes = dict(src_vocab=160000, tgt_vocab=80000, emb=1000, hidden=1000, layers=4, init=0.08)
        recipe = dict(optimizer="sgd", lr=0.7, smoothing=0.0, per="sentence", compile=True)
        batches = dict(sentences=128, tokens=28000, steps=703125, every=5000)
        return cls(**sizes | recipe | batches | dict(beam=12) | overrides)


# x source, y target, v the fixed vector, h and c an LSTM's state.
# Shapes: B batch, S source length, T target length, E embedding, H hidden, L layers, V vocabulary.


class DeepLSTM(nn.Module):
    """LSTM layers, dropout before each: CUDA graphs cannot record that of nn.LSTM(dropout=...)."""

    def __init__(self, size, hidden, layers, dropout):
        super().__init__()
        sizes = [size] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, batch_first=True) for n in sizes)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, state=None, padding=None):  # decoder: h, c (L,B,H); encoder: padding (B,T)
        last = []
        for n, layer in enumerate(self.layers):
            x = self.drop(x)
            if padding is None:
                x, (h, c) = layer(x, tuple(part[n : n + 1] for part in state))
            else:
                x, h, c = after_padding(layer, x, padding)
            last.append((h, c))
        return x, tuple(torch.cat(part) for part in zip(*last))


def after_padding(lstm, x, padding):
    """lstm(x) without the padding (B,T) before each sentence; CUDA graphs cannot record packing."""
    W_ih, *others = lstm.all_weights[0]
    shut = W_ih.new_zeros(len(W_ih), 8)  # a further input of 8 columns, as GPUs like them,
    shut[: lstm.hidden_size] = -1e4  # that shuts gate i: c = f * 0 + 0 * g = 0, h = o * tanh(0) = 0
    weights = [torch.cat([W_ih, shut], 1), *others]
    flat = torch.cat([w.flatten() for w in weights])  # in one piece, as cuDNN wants them
    parts = flat.split([w.numel() for w in weights])
    weights = [part.view_as(w) for part, w in zip(parts, weights)]
    x = torch.cat([x, padding.to(x.dtype).unsqueeze(-1).expand(-1, -1, 8)], -1)
    zero = x.new_zeros(1, len(x), lstm.hidden_size)
    return torch.lstm(x, (zero, zero), weights, True, 1, 0.0, lstm.training, False, True)


def turned(x, src):
    """x (B,S,E), each sentence's words in reverse order, its padding still behind them."""
    length = (src != PAD).sum(1, keepdim=True)
    place = torch.arange(src.size(1), device=src.device)
    index = ((length - 1 - place) % src.size(1)).unsqueeze(-1)  # below 0: padding, from the end
    return x.gather(1, index.expand_as(x))


class Seq2Seq(nn.Module):
    """The whole model: a sentence into a vector, and out of it again."""

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

    def encode(self, src, factor=1.0):  # factor: on each embedding, for saliency
        x = self.E_x(src) * factor  # (B,S,E)
        if not self.cfg.reverse:
            x = turned(x, src)  # which flip undoes; the padding comes to the front either way
        _, v = self.encoder(x.flip(1), padding=(src == PAD).flip(1))  # c b a for a b c, section 3.3
        return v  # the state after the word read last: h and c, each (L,B,H)

    def start(self, v, room=None):  # room: the Transformer's cache needs it
        return v  # all that the decoder will ever know of the source

    def pick(self, state, rows):  # the states of these rows, for beam search
        return tuple(x[:, rows] for x in state)

    def step(self, y, state, v):  # y (B,)
        h, state = self.decoder(self.E_y(y).unsqueeze(1), state)
        return self.W(self.drop(h.squeeze(1))), state

    def forward(self, src, tgt_in, need_alpha=False):
        h, _ = self.decoder(self.E_y(tgt_in), self.encode(src))  # the whole target in one call
        logits = self.W(self.drop(h))  # the softmax of eq. (1)   (B,T,V)
        return (logits, self.saliency(src, tgt_in)) if need_alpha else logits

    @torch.inference_mode(False)
    @torch.enable_grad()
    @torch.backends.cudnn.flags(enabled=False)  # cuDNN has no gradient in eval mode
    def saliency(self, src, tgt_in):
        """What each source word has to do with each target word, by gradient: not attention."""
        src, tgt_in = src.clone(), tgt_in.clone()  # may come from inference mode
        y = F.pad(tgt_in[:, 1:], (0, 1))  # the words to predict: tgt_in one step on,
        y = y.masked_fill(y == PAD, EOS).unsqueeze(-1)  # then EOS   (B,T,1)
        factor = torch.ones(*src.shape, 1, dtype=self.W.weight.dtype, device=src.device)  # (B,S,1)
        factor.requires_grad_()
        h, _ = self.decoder(self.E_y(tgt_in), self.encode(src, factor))
        log_p = self.W(self.drop(h)).log_softmax(-1).gather(-1, y)  # (B,T,1)
        (dh,) = torch.autograd.grad(log_p.sum(), h, retain_graph=True)  # p(y_i) needs h_i alone
        slopes = []
        for h_i, dh_i in zip(h.unbind(1), dh.unbind(1)):
            slopes.append(torch.autograd.grad(h_i, factor, dh_i, retain_graph=True)[0])  # (B,S,1)
        alpha = torch.stack(slopes, 1).squeeze(-1).abs()  # d/d factor_j = x_j . d/d x_j   (B,T,S)
        alpha = alpha + torch.finfo(alpha.dtype).tiny  # no row is all zero
        alpha = alpha.masked_fill((src == PAD).unsqueeze(1), 0)
        return alpha / alpha.sum(-1, keepdim=True)


def make_optimizer(model, cfg):
    """Plain SGD is the paper's, 3.4."""
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=cfg.lr)
    return torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)


def learning_rate(cfg, step):
    """Section 3.4: after 5 of 7.5 epochs SGD's is halved every half epoch; Adam's falls to 0."""
    if cfg.optimizer == "adam":
        return cfg.lr * min(step / cfg.warmup, max(1 - (step - 1) / cfg.steps, 0))
    half_epochs = 15 * (step - 1) // cfg.steps
    return cfg.lr * 0.5 ** max(half_epochs - 9, 0)


Model = Seq2Seq  # its name from here on
Parts = ()  # what --compile compiles: cuDNN has fused it all

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
