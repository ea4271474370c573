"""Measures the tables of docs/speed.md on one idle GPU and writes the logs in docs/runs.

python docs/make/compare.py          speed.jsonl: about 7 minutes on an H200
python docs/make/compare.py plain    plain.jsonl, with and without --fast: about a minute
python docs/make/compare.py length   length.jsonl, cost by sentence length: about 3 minutes
python docs/make/compare.py tables   print the tables of the logs as Markdown
"""

import gc
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path

# An empty cache for torch.compile, so that figures do not depend on what was compiled before.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))

from grammar import generate

import bahdanau
import data
import luong
import seq2seq_lstm
import transformer
from data import BOS, EOS, PAD, UNK

LOG = Path(__file__).resolve().parents[1] / "runs" / "speed.jsonl"
LENGTH_LOG = LOG.with_name("length.jsonl")
PLAIN_LOG = LOG.with_name("plain.jsonl")
V = 32000  # words in each vocabulary, except in by_length


def random_words(*shape, V=V):
    return torch.randint(UNK + 1, V, shape, device="cuda")


def milliseconds(function, repeats, warm_up=0, in_a_row=1):
    """Median time of a call; compiling and recording happen during the warm-up."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(in_a_row):
            function()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start) / in_a_row)
    return statistics.median(times)


# ---- contestants: each function returns a training step ------------------------------------------
def ours(**flags):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    cfg = transformer.Config.paper(src_vocab=V, tgt_vocab=V, **flags)
    return transformer.make_train_step(transformer.Model(cfg).cuda(), cfg)


def alternative(make_model, compiled=None):
    """Compiled as a whole, with its loss and CUDA graphs, or layer by layer, for any length."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default
    model = make_model().cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    if compiled == "by layer":
        torch._dynamo.config.recompile_limit = 64  # more than are needed
        criterion = compiled_call(criterion)
        for part in model.modules():
            if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                part.forward = compiled_call(part.forward)

    def loss(src, tgt):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(src, tgt[:, :-1]).flatten(0, 1).float()
        return criterion(logits, tgt[:, 1:].flatten())

    if compiled == "all":
        loss = torch.compile(loss, mode="reduce-overhead")  # CUDA graphs

    def train_step(src, tgt):
        src, tgt = (x.cuda(non_blocking=True) for x in (src, tgt))
        optimizer.zero_grad()
        loss(src, tgt).backward()
        optimizer.step()

    return train_step


def compiled_call(function):
    """Compiles a method of torch.nn's modules. torch.compile skips the methods themselves, and so
    does module.compile(), but both compile a function that calls them."""
    return torch.compile(lambda *args, **kwargs: function(*args, **kwargs), dynamic=True)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with one embedding matrix."""

    def __init__(self):
        super().__init__()
        self.E = nn.Embedding(V, 512)
        self.positions = nn.Parameter(torch.randn(512, 512))
        self.drop = nn.Dropout(0.1)
        self.transformer = nn.Transformer(512, 8, 6, 6, 2048, 0.1, batch_first=True)
        for part in self.transformer.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
            elif isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                part.dropout = nn.Identity()  # the one inside the feed-forward network

    def embed(self, words):
        return self.drop(self.E(words) * 512**0.5 + self.positions[: words.size(1)])

    def forward(self, src, tgt_in):
        padding = src == PAD
        future = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1), tgt_in.device)
        masks = dict(tgt_mask=future, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        y = self.transformer(self.embed(src), self.embed(tgt_in), **masks, tgt_is_causal=True)
        return y @ self.E.weight.T


class Marian(nn.Module):
    """Hugging Face's MarianMTModel."""

    def __init__(self):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sizes = dict(vocab_size=V, d_model=512, encoder_layers=6, decoder_layers=6)
        sizes |= dict(encoder_attention_heads=8, decoder_attention_heads=8)
        sizes |= dict(encoder_ffn_dim=2048, decoder_ffn_dim=2048)
        dropout = dict(dropout=0.1, attention_dropout=0.0, activation_dropout=0.0)
        tokens = dict(pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS)
        options = dict(activation_function="relu", scale_embedding=True, forced_eos_token_id=None)
        self.model = MarianMTModel(MarianConfig(**sizes, **dropout, **tokens, **options))

    def forward(self, src, tgt_in):
        inputs = dict(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt_in)
        return self.model(**inputs, use_cache=False).logits


BY_LAYER = "`torch.nn.Transformer`, compiled layer by layer"
CONTESTANTS = {
    "ours": ours,
    "ours, `--no-compile`": partial(ours, compile=False),
    "`torch.nn.Transformer`": partial(alternative, TorchTransformer),
    "`torch.nn.Transformer`, compiled": partial(alternative, TorchTransformer, compiled="all"),
    "Hugging Face Marian": partial(alternative, Marian),
    "Hugging Face Marian, compiled": partial(alternative, Marian, compiled="all"),
    BY_LAYER: partial(alternative, TorchTransformer, compiled="by layer"),
}


# ---- measurements: entries of the log ------------------------------------------------------------
def speed():
    """Everything in speed.jsonl."""
    yield from decoding()
    yield from (training(name) for name in CONTESTANTS if name != BY_LAYER)
    # Every contestant in a process of its own, whose compilation cache is empty.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(mixed, ["ours", "`torch.nn.Transformer`", BY_LAYER])


def training(name, B=256, T=64):
    """Random batches of one shape, eight steps in a row: the CPU need not wait for the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    batch = random_words(B, T), random_words(B, T + 1)
    step = partial(CONTESTANTS[name](), *batch)
    ms = milliseconds(step, repeats=15, warm_up=6, in_a_row=8)
    return dict(table="training", name=name, speeds=[2 * B * T / ms])


def mixed(name):
    """Random words in sentences of 3 to 100 words, in batches of at most 60,000 tokens."""
    torch.manual_seed(0)
    pairs = generate(20000, "train", max_len=100)
    bitext = data.Bitext(pairs, data.build_vocabularies(pairs))
    batches = []
    for sides in islice(bitext.batches(60000, 60000, seed=1), 100):
        sides = map(torch.from_numpy, sides)
        batches.append([torch.where(x > UNK, torch.randint_like(x, UNK + 1, V), x) for x in sides])
    tokens = sum((x != PAD).sum().item() for batch in batches for x in batch)
    shapes = len({tuple(x.shape for x in batch) for batch in batches})
    make_step = cache(CONTESTANTS[name])

    def train():
        step = make_step()  # ours compiles here, at the first call
        for batch in batches:
            step(*batch)

    seconds = milliseconds(train, repeats=1) / 1000
    speeds = [tokens / milliseconds(train, repeats=3)]
    return dict(table="mixed", name=name, seconds=seconds, speeds=speeds, shapes=shapes)


def decoding(S=32, T=64):
    """Greedy decoding of the Transformer base model; no translation ends early."""
    cfg = transformer.Config.paper(src_vocab=V, tgt_vocab=V)
    model = transformer.bf16_copy(transformer.Model(cfg).cuda())
    nn.init.zeros_(model.E_y.weight[EOS].detach())  # its logit is 0, never the largest
    marian = Marian().model.cuda().eval().bfloat16()
    options = dict(num_beams=1, do_sample=False, min_new_tokens=T, max_new_tokens=T)
    plain = TorchTransformer().cuda().eval().bfloat16()

    def hugging_face(src):
        marian.generate(input_ids=src, attention_mask=torch.ones_like(src), **options)

    def without_cache(src):
        y = torch.full_like(src[:, :1], BOS)
        for _ in range(T):
            y = torch.cat([y, plain(src, y)[:, -1:].argmax(-1)], 1)

    contestants = {
        "ours": lambda src: transformer.greedy(model, src, T, fast=True),
        "Hugging Face Marian, `generate`": hugging_face,
        "`torch.nn.Transformer`, all recomputed for every word": without_cache,
    }
    for name, decode in contestants.items():
        speeds = []
        for B in (1, 64, 512):
            batch = partial(decode, random_words(B, S))
            with torch.inference_mode():
                speeds.append(1000 * B / milliseconds(batch, repeats=5, warm_up=2))
        yield dict(table="decoding", name=name, speeds=speeds)


MODELS = {  # name -> script and flags, besides --paper
    "`seq2seq_lstm.py`": (seq2seq_lstm, {}),
    "`bahdanau.py`": (bahdanau, {}),
    "`luong.py`": (luong, dict(attention="global", input_feeding=False)),
    "`luong.py --input-feeding`": (luong, dict(attention="global")),
    "`transformer.py`": (transformer, {}),
}
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
DIGITS = dict(ms_per_1000_tokens=1, mib_per_1000_tokens=0, ms_per_word=2)  # in the tables


def by_length(V=30000, tokens=16384, rows=64):
    """A training step with a fixed number of tokens, and greedy decoding of a fixed number of
    sentences. Source and target have n words; of 64 untrained translations, some never end."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    for name, (script, flags) in MODELS.items():
        for n in LENGTHS:
            cfg = script.Config.paper(src_vocab=V, tgt_vocab=V, compile=False, **flags)
            model = script.Model(cfg)
            words = torch.randint(UNK + 1, V, (2, n))
            # The difference is what depends on the batch: without weights, for example.
            kept = kept_mib(model, words, words) - kept_mib(model, words[:1], words[:1])
            step = script.make_train_step(model.cuda(), cfg)
            B = tokens // (2 * n)
            batch = random_words(B, n, V=V), random_words(B, n + 1, V=V)
            train = milliseconds(partial(step, *batch), repeats=5, warm_up=3)
            words = random_words(rows, n, V=V)
            decode = partial(script.greedy, script.bf16_copy(model), words, n, fast=True)
            with torch.inference_mode():
                ms_per_word = milliseconds(decode, repeats=3, warm_up=1) / n
            results = dict(ms_per_1000_tokens=1000 * train / tokens)
            results |= dict(mib_per_1000_tokens=1000 * kept / (2 * n), ms_per_word=ms_per_word)
            yield dict(table="length", name=name, n=n, **results)


BATCHES = {  # at the papers' sizes: sentence pairs, and words in each sentence
    "`seq2seq_lstm.py`": (128, 50),
    "`bahdanau.py`": (80, 50),
    "`luong.py`": (128, 50),
    "`transformer.py`": (256, 64),
}


def plain():
    """Training steps per second as the scripts are written, and with --fast; one shape of batch."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    for name, (B, T) in BATCHES.items():
        script, flags = MODELS[name]
        for sizes, fast in ((x, y) for x in ("default", "paper") for y in (False, True)):
            if sizes == "paper":
                rows, words, V = B, T, 30000
                flags = flags | dict(src_vocab=V, tgt_vocab=V, compile=False, fast=fast)
                cfg = script.Config.paper(**flags)
            else:
                cfg = script.Config(src_vocab=500, tgt_vocab=500, fast=fast)
                rows, words, V = cfg.batch_tokens // 28, 14, 500  # as many tokens as in a run
            step = script.make_train_step(script.Model(cfg).cuda(), cfg)
            batch = random_words(rows, words, V=V).cpu(), random_words(rows, words + 1, V=V).cpu()
            ms = milliseconds(partial(step, *batch), repeats=5, warm_up=5, in_a_row=10)
            yield dict(table="plain", name=name, sizes=sizes, fast=fast, steps_per_second=1000 / ms)


def kept_mib(model, src, tgt_in):
    """MiB of tensors that autograd keeps for the backward pass."""
    kept = {}  # address -> storage; one that several operations keep counts once

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):  # without a backward pass
        model(src, tgt_in)
    return sum(storage.nbytes() for storage in kept.values()) / 2**20


# ---- the tables of docs/speed.md -----------------------------------------------------------------
def tables():
    """The lines of the tables, as Markdown."""
    paths = (PLAIN_LOG, LOG, LENGTH_LOG)
    log = [json.loads(line) for path in paths for line in path.open(encoding="utf-8")]
    lengths = " | ".join(map(str, LENGTHS))
    heads = dict(
        plain="training steps/s | default sizes | with `--fast` | papers' sizes | with `--fast`",
        training="training | thousand tokens/s | ours / this",
        mixed="mixed lengths | until step 100 | thousand tokens/s after that | ours / this",
        decoding="greedy decoding, sentences/s | B = 1 | B = 64 | B = 512",
        ms_per_1000_tokens=f"training, ms per 1,000 tokens | {lengths}",
        mib_per_1000_tokens=f"kept for the backward pass, MiB per 1,000 tokens | {lengths}",
        ms_per_word=f"greedy decoding, ms per word | {lengths}",
    )
    rows = {table: {} for table in heads}  # table -> name -> cells
    ours = {}  # table -> our speed
    for entry in log:
        table, name = entry["table"], entry.get("name")
        if table == "length":
            for key, digits in DIGITS.items():
                rows[key].setdefault(name, []).append(f"{entry[key]:.{digits}f}")
        elif table == "plain":
            speed = entry["steps_per_second"]
            digits = 1 if speed < 100 else 0
            rows[table].setdefault(name, []).append(f"{speed:,.{digits}f}")
        elif table == "decoding":
            rows[table][name] = [f"{x:.1f}" if x < 10 else f"{x:,.0f}" for x in entry["speeds"]]
        elif table in rows:
            speed = entry["speeds"][0]
            seconds = [f"{entry['seconds']:.0f} s"] if table == "mixed" else []
            ratio = ours.setdefault(table, speed) / speed
            rows[table][name] = [*seconds, f"{speed:,.0f}", f"{ratio:.2f}"]
    for table, head in heads.items():
        yield f"| {head} |"
        yield "|---" * (head.count("|") + 1) + "|"
        yield from (f"| {name} | {' | '.join(cells)} |" for name, cells in rows[table].items())


def main():
    if sys.argv[1:] == ["tables"]:
        print(*tables(), sep="\n")
        return
    chosen = {"length": (LENGTH_LOG, by_length), "plain": (PLAIN_LOG, plain)}
    path, measure = chosen.get(" ".join(sys.argv[1:]), (LOG, speed))
    torch.manual_seed(0)
    about = dict(table="about", date=time.strftime("%Y-%m-%d"), gpu=torch.cuda.get_device_name())
    about |= dict(torch=torch.__version__)
    if path == LOG:
        about |= dict(transformers=importlib.metadata.version("transformers"))
    with path.open("w", encoding="utf-8") as log:
        for entry in chain([about], measure()):
            line = json.dumps(entry, ensure_ascii=False)
            print(line, flush=True)
            print(line, file=log, flush=True)


if __name__ == "__main__":
    main()
