# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""A language model that attends to its own past: attention needs no second network.

Every pair of the corpus becomes one text, "<s> english </s> <s> french </s>". The model predicts
each next word and is never told that one half translates the other.

    h_t = LSTM(E x_t, h_{t-1})                     --model lstm: the past is one state
    alpha_ti = softmax_{i<=t}(q_t k_i / sqrt(d))   --model attention: a query from h_t, a key and a
    c_t = W_O sum_{i<=t} alpha_ti v_i              value from every state so far
    p(x_{t+1}) = softmax(W tanh(W_c [c_t ; h_t]))  as in Luong et al., (5) and (6)
    x = layer(x), four times                       --model transformer: causal self-attention only
    python docs/language_model.py                  default: attention; BLEU 92, 3 min, one x86 core

Attention within one text is self-attention; an early form is the intra-attention of Cheng et al.
2016 (Long Short-Term Memory-Networks for Machine Reading, arXiv 1601.06733). Simplified from their
LSTMN: h_t asks, not x_t and the previous summary; it also attends to itself; scores are scaled dot
products, not additive; c_t goes to the output, not into the recurrence. MultiHeadAttention and
EncoderLayer are those of transformer.py (imported; in your own project, copy them).

From here to GPT: --model transformer is a decoder-only Transformer (Liu et al. 2018, arXiv
1801.10198): source and target are one text, read by encoder layers with a causal mask. GPT (Radford
et al. 2018) has 12 of them, pretrained on books, then fine-tuned for a task. GPT-2 (2019) is also
tried without: the task is in the text, such as lines of "english = french".
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # transformer.py and data.py

import data  # noqa: E402
from data import BOS, EOS, PAD  # noqa: E402
from transformer import Config, EncoderLayer, MultiHeadAttention, set_up_torch  # noqa: E402

MODELS = dict(lstm=0.004, attention=0.004, transformer=0.002)  # and their learning rates
D, LAYERS, BATCH, WARMUP, EVAL_EVERY = 192, 4, 32, 200, 500  # sizes and recipe
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PERPLEXITY = "perplexity of English {english:.2f}, of French {french:.3f}"
# x tokens, h LSTM states, c context. Shapes: B batch, T length, D size, V vocabulary.


class Recurrent(nn.Module):
    """An LSTM language model, with or without attention to its own past states."""

    def __init__(self, V, kind):
        super().__init__()
        self.attends = kind == "attention"
        self.E = nn.Embedding(V, D)
        self.lstm = nn.LSTM(D, D, batch_first=True)
        if self.attends:
            self.attention = MultiHeadAttention(D, heads=1)
            self.W_c = nn.Linear(2 * D, D, bias=False)
        self.W = nn.Linear(D, V)

    def forward(self, x):  # (B,T) -> logits of the next words (B,T,V)
        h, _ = self.lstm(self.E(x))  # (B,T,D)
        if self.attends:
            future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
            c, self.alpha = self.attention(h, h, future.unsqueeze(0), need_alpha=True)  # (B,1,T,T)
            h = torch.tanh(self.W_c(torch.cat([c, h], -1)))  # h~, Luong et al. (5)
        return self.W(h)


class DecoderOnly(nn.Module):
    """A Transformer without encoder and cross-attention."""

    def __init__(self, V):
        super().__init__()
        cfg = Config(d_model=D, d_ff=2 * D, heads=4)  # of transformer.py; without dropout
        self.E = nn.Embedding(V, D)  # also the output matrix
        nn.init.normal_(self.E.weight, 0, D**-0.5)
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(LAYERS))

    def forward(self, x):  # (B,T) -> logits of the next words (B,T,V)
        pos = torch.arange(x.size(1), device=x.device).unsqueeze(1)  # (T,1)
        angle = pos / 10000 ** (torch.arange(0, D, 2, device=x.device) / D)
        PE = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)  # (T,D)
        future = MultiHeadAttention.bias((pos < pos.T).unsqueeze(0), PE.dtype)  # causal (1,1,T,T)
        x = self.E(x) * D**0.5 + PE
        for layer in self.layers:
            x = layer(x, future)
        return F.linear(x, self.E.weight)


def to_texts(pairs, encode):  # token ids: <s> english </s> <s> french </s>
    return [[BOS, *encode(x), EOS, BOS, *encode(y), EOS] for x, y, *_ in pairs]


def pad(texts):  # (B,T+1), right padding, which no word can see
    return nn.utils.rnn.pad_sequence([torch.tensor(x) for x in texts], True, PAD).to(DEVICE)


def batches(texts, seed):
    """Endless batches of texts of similar length, in random order."""
    rng = random.Random(seed)
    while True:
        texts = sorted(rng.sample(texts, len(texts)), key=len)  # texts of equal length are shuffled
        starts = range(0, len(texts), BATCH)
        for k in rng.sample(starts, len(starts)):
            yield pad(texts[k : k + BATCH])


def losses(model, x):  # (B,T+1) -> -log p of every token after the first (B,T), 0 at padding
    return F.cross_entropy(model(x[:, :-1]).mT, x[:, 1:], ignore_index=PAD, reduction="none")


def train(args, texts, V):
    """Trains a model; after every step, yields it and the loss per word."""
    torch.manual_seed(args.seed)
    model = DecoderOnly(V) if args.model == "transformer" else Recurrent(V, args.model)
    optimizer = torch.optim.Adam(model.to(DEVICE).parameters(), fused=True)
    for step, x in zip(trange(1, args.steps + 1, disable=None), batches(texts, args.seed)):
        loss = losses(model.train(), x).sum() / (x[:, 1:] != PAD).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(step / WARMUP, 1 - (step - 1) / args.steps)  # warm-up and linear decay
        optimizer.param_groups[0]["lr"] = MODELS[args.model] * scale
        optimizer.step()
        yield model, loss.item()


@torch.inference_mode()
def perplexities(model, texts):
    """Perplexity of the English halves and of the French halves, each with its </s>."""
    x = pad(texts)
    loss = losses(model.eval(), x)
    french = (x[:, :-1] == BOS).cumsum(1) == 2  # after the second <s>
    counted = (x[:, 1:] != PAD) & (x[:, 1:] != BOS)
    halves = dict(english=counted & ~french, french=counted & french)
    return {name: loss[half].mean().exp().item() for name, half in halves.items()}


@torch.inference_mode()
def translate(model, sentences, vocabulary):
    """Greedy continuations of "<s> english </s> <s>"; for a cache, see step in transformer.py."""
    translations = {}
    for n in set(map(len, sentences)):  # sentences of equal length need no padding
        start = n + 3  # of the French half
        rows = [k for k, sentence in enumerate(sentences) if len(sentence) == n]
        x = pad([[BOS, *vocabulary.encode(sentences[k]), EOS, BOS] for k in rows])
        while x.size(1) < 2 * start + 50 and not (x[:, start:] == EOS).any(1).all():
            x = torch.cat([x, model.eval()(x)[:, -1:].argmax(-1)], 1)
        translations.update(zip(rows, map(vocabulary.decode, x[:, start:].tolist())))  # up to </s>
    return [translations[k] for k in sorted(translations)]


@data.one_line_errors()
def main():
    """The command line: trains, reports like the scripts, draws where --model attention looked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="attention")
    parser.add_argument("--steps", type=int, default=3000, help="training steps [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of initialization and batches")
    parser.add_argument("--out", type=Path, default=Path("runs/language_model"), help="folder")
    args = parser.parse_args()
    set_up_torch()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs, valid, test = ([*data.read_pairs(*data.built_in(x))] for x in ("train", "valid", "test"))
    vocabulary, _ = data.build_vocabularies(pairs, share=True)
    texts, valid_texts, test_texts = (to_texts(x, vocabulary.encode) for x in (pairs, valid, test))
    log, train_losses = [], []
    start = time.perf_counter()
    for step, (model, loss) in enumerate(train(args, texts, len(vocabulary)), 1):
        train_losses.append(loss)
        if step % EVAL_EVERY == 0 or step == args.steps:
            loss = torch.tensor(train_losses[-EVAL_EVERY:]).mean().item()
            entry = dict(step=step, loss=loss) | perplexities(model, valid_texts)
            log.append(entry | dict(seconds=time.perf_counter() - start))
            data.write_log(args.out, log)
            (french,) = translate(model, [valid[0][0]], vocabulary)
            text = "step {step}, {seconds:.0f} s: train loss {loss:.3f}, validation " + PERPLEXITY
            data.progress(text.format(**log[-1]))
            data.progress(f"    {' '.join(valid[0][0])} → {' '.join(french)}")
    french = translate(model, [pair[0] for pair in test], vocabulary)
    result = perplexities(model, test_texts) | data.scores([pair[:2] for pair in test], french)
    data.write_log(args.out, [*log, vars(args) | dict(out=str(args.out)) | result])
    example = source, words, _ = test[0][0], french[0], test[0][1]
    print("\nsource:    {}\nmodel:     {}\nreference: {}\n".format(*map(" ".join, example)))
    if args.model == "attention":
        model(pad(to_texts([example], vocabulary.encode))[:, :-1])
        alpha = model.alpha[0, 0, len(source) + 2 :].numpy(force=True)  # when writing French
        rows, columns = [*words, "</s>"], ["<s>", *source, "</s>", "<s>", *words]
        print(f"{data.heatmap(columns, rows, alpha)}\n")
        data.write(args.out / "attention.svg", data.svg(columns, rows, alpha).encode())
    print(f"test set: {PERPLEXITY.format(**result)}, BLEU {result['bleu']:.2f}; see {args.out}/")


if __name__ == "__main__":
    main()
