"""Measures the tables of docs/speed.md on one idle GPU and writes the logs in docs/runs.

python docs/make/compare.py          speed.jsonl: about 8 minutes on an H200
python docs/make/compare.py length   length.jsonl, cost by sentence length: about 3 minutes
python docs/make/compare.py tables   print the tables of both logs as Markdown

All Transformers have the base size and the dropout of the paper: on embeddings and sublayer
outputs, not on attention weights or inside the feed-forward network. They train with label
smoothing 0.1 and without clipping. The alternatives compute under bf16 autocast, update with fused
Adam and decode with bf16 weights. Hugging Face's Marian needs transformers.
"""

import datetime
import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import chain, islice
from pathlib import Path

# An empty cache for torch.compile, so that figures do not depend on what was compiled before.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch._dynamo
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))

from grammar import generate

import bahdanau
import data
import luong
import seq2seq_lstm
import transformer
from data import BOS, EOS, PAD

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "docs" / "runs" / "speed.jsonl"
LENGTH_LOG = LOG.with_name("length.jsonl")
LAYERS = 6  # of the Transformers


def random_batch(B, S, T, V):
    src = torch.randint(4, V, (B, S), device="cuda")
    tgt = torch.randint(4, V, (B, T + 1), device="cuda")
    tgt[:, 0] = BOS
    return src, tgt


def milliseconds(function, repeats, warm_up, in_a_row=1):
    """Times of a call, sorted; compiling and recording happen during the warm-up."""
    times = []
    for _ in range(warm_up):
        function()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(in_a_row):
            function()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start) / in_a_row)
    return sorted(times)


# ---- contestants: each function takes V and returns a training step ------------------------------
def ours(script, V, **flags):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    cfg = script.Config.paper(src_vocab=V, tgt_vocab=V, **flags)
    return script.make_train_step(script.Model(cfg).cuda(), cfg)


def alternative(make_model, V, compiled=None):
    """make_model(V) makes a module that is called with src and tgt_in and returns logits. Compiled
    as a whole, with its loss and with CUDA graphs, or layer by layer, for any length."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default
    model = make_model(V).cuda().train()
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

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return torch.compile(call, dynamic=True)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with one embedding matrix."""

    def __init__(self, V):
        super().__init__()
        self.E = nn.Embedding(V, 512)
        self.positions = nn.Parameter(torch.randn(512, 512))
        self.drop = nn.Dropout(0.1)
        self.transformer = nn.Transformer(512, 8, LAYERS, LAYERS, 2048, 0.1, batch_first=True)
        for part in self.transformer.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
            elif isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                part.dropout = nn.Identity()  # the one inside the feed-forward network

    def embed(self, words):
        return self.drop(self.E(words) * math.sqrt(512) + self.positions[: words.size(1)])

    def forward(self, src, tgt_in):
        padding = src == PAD
        future = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1), tgt_in.device)
        masks = dict(tgt_mask=future, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        y = self.transformer(self.embed(src), self.embed(tgt_in), **masks, tgt_is_causal=True)
        return y @ self.E.weight.T


class Marian(nn.Module):
    """Hugging Face's MarianMTModel."""

    def __init__(self, V):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sizes = dict(d_model=512, encoder_layers=LAYERS, decoder_layers=LAYERS)
        sizes |= dict(encoder_attention_heads=8, decoder_attention_heads=8)
        sizes |= dict(encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="relu")
        dropout = dict(dropout=0.1, attention_dropout=0.0, activation_dropout=0.0)
        tokens = dict(pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS)
        options = dict(scale_embedding=True, forced_eos_token_id=None)
        config = MarianConfig(vocab_size=V, **sizes, **dropout, **tokens, **options)
        self.model = MarianMTModel(config)

    def forward(self, src, tgt_in):
        inputs = dict(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt_in)
        return self.model(**inputs, use_cache=False).logits


TRAINING = {
    "ours": partial(ours, transformer, layers=LAYERS),
    "ours, `--no-compile`": partial(ours, transformer, layers=LAYERS, compile=False),
    "`torch.nn.Transformer`": partial(alternative, TorchTransformer),
    "`torch.nn.Transformer`, compiled": partial(alternative, TorchTransformer, compiled="all"),
    "Hugging Face Marian": partial(alternative, Marian),
    "Hugging Face Marian, compiled": partial(alternative, Marian, compiled="all"),
}
MIXED = {
    "ours": partial(ours, transformer, layers=LAYERS),
    "`torch.nn.Transformer`": partial(alternative, TorchTransformer),
    "`torch.nn.Transformer`, compiled layer by layer": partial(
        alternative, TorchTransformer, compiled="by layer"
    ),
}


# ---- measurements: each yields entries of the log ------------------------------------------------
def training(V=32000):
    """Random batches of one shape, eight steps in a row: the CPU need not wait for the GPU."""
    B, T = 256, 64
    batch = random_batch(B, T, T, V)
    for name, make in TRAINING.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        times = milliseconds(partial(make(V), *batch), repeats=15, warm_up=6, in_a_row=8)
        speeds = [2 * B * T / times[k] for k in (len(times) // 2, -1, 0)]  # median, min., max.
        yield dict(table="training", name=name, speeds=speeds)


def mixed_lengths(name, V=32000):
    """Random words in sentences of 3 to 100 words, in batches of at most 60,000 tokens."""
    rng = torch.Generator().manual_seed(0)
    words = [f"w{i}" for i in range(V - len(data.SPECIALS))]
    vocabulary = data.Vocabulary(data.SPECIALS + words)
    pairs = []
    for english, french, _ in generate(20000, "train", max_len=100):
        lengths = len(english.split()), len(french.split())
        ids = [torch.randint(len(words), (n,), generator=rng).tolist() for n in lengths]
        pairs.append([[words[i] for i in side] for side in ids])
    bitext = data.Bitext(pairs, [vocabulary] * 2)
    arrays = islice(bitext.batches(60000, 60000, seed=1), 300)
    batches = [[torch.from_numpy(x) for x in batch] for batch in arrays]
    shapes = [tuple(x.shape for x in batch) for batch in batches]
    torch.manual_seed(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step = MIXED[name](V)  # ours compiles here
    for batch in batches[:100]:
        step(*batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    rest = {shape: batch for shape, batch in zip(shapes, batches) if shape not in shapes[:100]}
    for batch in rest.values():
        step(*batch)
    tokens = sum((x != PAD).sum().item() for batch in batches[:100] for x in batch)
    speeds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for batch in batches[:100]:
            step(*batch)
        torch.cuda.synchronize()
        speeds.append(tokens / (time.perf_counter() - start) / 1000)
    low, median, high = sorted(speeds)
    shapes = len(set(shapes))
    print(json.dumps(dict(seconds=seconds, speeds=[median, low, high], shapes=shapes)))


def mixed():
    """Every contestant in a process of its own, whose compilation cache is empty."""
    for name in MIXED:
        command = [sys.executable, __file__, "mixed", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield dict(table="mixed", name=name, **json.loads(done.stdout))


def decoding(V=32000, S=32, T=64):
    """Greedy decoding of the Transformer base model; no translation ends early."""
    cfg = transformer.Config.paper(src_vocab=V, tgt_vocab=V, layers=LAYERS)
    model = transformer.bf16_copy(transformer.Model(cfg).cuda())
    nn.init.zeros_(model.E_y.weight[EOS].detach())  # its logit is 0, never the largest
    marian = Marian(V).model.cuda().eval().bfloat16()
    options = dict(num_beams=1, do_sample=False, min_new_tokens=T, max_new_tokens=T)
    plain = TorchTransformer(V).cuda().eval().bfloat16()

    def hugging_face(src):
        marian.generate(input_ids=src, attention_mask=torch.ones_like(src), **options)

    def without_cache(src):
        y = torch.full_like(src[:, :1], BOS)
        for _ in range(T):
            y = torch.cat([y, plain(src, y)[:, -1:].argmax(-1)], 1)

    contestants = {
        "ours": lambda src: transformer.greedy(model, src, T),
        "Hugging Face Marian, `generate`": hugging_face,
        "`torch.nn.Transformer`, all recomputed for every word": without_cache,
    }
    for name, decode in contestants.items():
        speeds = []
        for B in (1, 64, 512):
            src, _ = random_batch(B, S, 1, V)
            with torch.inference_mode():
                speeds.append(1000 * B / milliseconds(partial(decode, src), 5, 2)[2])  # the median
        yield dict(table="decoding", name=name, speeds=speeds)


OUTPUT = {transformer: "E_y", bahdanau: "W_o", luong: "W_s", seq2seq_lstm: "W"}
MODELS = {  # name -> script and flags, besides --paper
    "`seq2seq_lstm.py`": (seq2seq_lstm, {}),
    "`bahdanau.py`": (bahdanau, {}),
    "`luong.py`": (luong, dict(attention="global", input_feeding=False)),
    "`luong.py --input-feeding`": (luong, dict(attention="global")),
    "`transformer.py`": (transformer, {}),
}
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)


def by_length(V=30000, tokens=16384, rows=64):
    """A training step with a fixed number of tokens, and greedy decoding of a fixed number of
    sentences; source and target have n words, and no translation ends early."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    for name, (script, flags) in MODELS.items():
        for n in LENGTHS:
            cfg = script.Config.paper(src_vocab=V, tgt_vocab=V, compile=False, **flags)
            model = script.Model(cfg)
            batches = (random_batch(B, n, n, V) for B in (1, 2))
            one, two = (kept_mib(model, src.cpu(), tgt.cpu()) for src, tgt in batches)
            kept = 1000 * (two - one) / (2 * n)  # without what does not depend on the batch
            step = script.make_train_step(model.cuda(), cfg)
            batch = random_batch(tokens // (2 * n), n, n, V)
            train = milliseconds(partial(step, *batch), repeats=5, warm_up=3)
            model = script.bf16_copy(model)
            nn.init.zeros_(getattr(model, OUTPUT[script]).weight[EOS].detach())
            src, _ = random_batch(rows, n, 1, V)
            with torch.inference_mode():
                decode = milliseconds(partial(script.greedy, model, src, n), repeats=3, warm_up=1)
            results = dict(ms_per_1000_tokens=1000 * train[2] / tokens, mib_per_1000_tokens=kept)
            yield dict(table="length", name=name, n=n) | results | dict(ms_per_word=decode[1] / n)


def kept_mib(model, src, tgt):
    """MiB of tensors that autograd keeps for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}  # address -> bytes; a storage that several operations keep counts once

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(src, tgt[:, :-1])
    assert logits.requires_grad  # keeps the graph, and so all addresses, until here
    return sum(kept.values()) / 2**20


def memory():
    """The GPU memory that --paper reserves for 100 steps, validation and decoding; all at once."""
    with tempfile.TemporaryDirectory() as folder:
        grammar = [ROOT / "corpus" / "grammar.py", folder, "--max-len", "100"]
        subprocess.run([sys.executable, *grammar], check=True)
        text = [f"{folder}/{x}" for x in ("train.en", "train.fr", "valid.en", "valid.fr")]
        flags = ["--paper", "--steps", "100", "--train", *text[:2], "--valid", *text[2:]]
        running = {}
        for name in ("transformer", "bahdanau", "luong", "seq2seq_lstm"):
            command = [sys.executable, ROOT / f"{name}.py", *flags, "--out", f"{folder}/{name}"]
            running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for name, process in running.items():
            assert process.wait() == 0, name
            *_, result = Path(folder, name, "log.jsonl").read_text(encoding="utf-8").splitlines()
            gib = json.loads(result)["gpu_memory_gib"]
            yield dict(table="memory", name=f"`{name}.py`", gib=gib)


# ---- the tables of docs/speed.md -----------------------------------------------------------------
def cells(entry, ours):
    """The cells of an entry of speed.jsonl; ours: our speeds, by table."""
    table = entry["table"]
    if table == "memory":
        return [f"{entry['gib']:.1f}"]
    if table == "decoding":
        return [f"{x:.1f}" if x < 10 else f"{x:,.0f}" for x in entry["speeds"]]
    speed, *_ = entry["speeds"]  # the median
    seconds = [f"{entry['seconds']:.0f} s"] if table == "mixed" else []
    return [*seconds, f"{speed:,.0f}", f"{ours.setdefault(table, speed) / speed:.2f}"]


def tables(log):
    """The lines of the tables, as Markdown."""
    lengths = " | ".join(str(n) for n in LENGTHS)
    heads = dict(
        training="training | thousand tokens/s | ours / this",
        mixed="mixed lengths | until step 100 | thousand tokens/s after that | ours / this",
        decoding="greedy decoding, sentences/s | B = 1 | B = 64 | B = 512",
        ms_per_1000_tokens=f"training, ms per 1,000 tokens | {lengths}",
        mib_per_1000_tokens=f"kept for the backward pass, MiB per 1,000 tokens | {lengths}",
        ms_per_word=f"greedy decoding, ms per word | {lengths}",
        memory="`--paper` | GiB of GPU memory",
    )
    rows = {name: [] for name in heads}
    ours = {}
    for entry in log:
        if entry["table"] != "length":
            rows[entry["table"]].append([entry["name"], *cells(entry, ours)])
    for name in MODELS:
        entries = [entry for entry in log if entry["table"] == "length" and entry["name"] == name]
        for key, digits in dict(ms_per_1000_tokens=1, mib_per_1000_tokens=0, ms_per_word=2).items():
            rows[key].append([name, *(f"{entry[key]:.{digits}f}" for entry in entries)])
    for table, head in heads.items():
        yield f"| {head} |"
        yield "|---" * (head.count("|") + 1) + "|"
        yield from (f"| {' | '.join(row)} |" for row in rows[table])


def read_logs():
    logs = [path.read_text(encoding="utf-8").splitlines() for path in (LOG, LENGTH_LOG)]
    return [json.loads(line) for _, *lines in logs for line in lines]  # without the first, "about"


def main():
    warnings.filterwarnings("ignore")
    if sys.argv[1:] == ["tables"]:
        print(*tables(read_logs()), sep="\n")
        return
    if sys.argv[1:2] == ["mixed"]:
        mixed_lengths(sys.argv[2])
        return
    torch.manual_seed(0)
    machine = dict(gpu=torch.cuda.get_device_name(), cudnn=torch.backends.cudnn.version())
    about = dict(table="about", date=str(datetime.date.today()), torch=torch.__version__, **machine)
    if sys.argv[1:] == ["length"]:
        path, measurements = LENGTH_LOG, [by_length()]
    else:
        about |= dict(transformers=importlib.metadata.version("transformers"))
        path, measurements = LOG, [decoding(), training(), mixed(), memory()]
    with path.open("w", encoding="utf-8") as log:
        for entry in chain([about], *measurements):
            line = json.dumps(entry, ensure_ascii=False)
            print(line, flush=True)
            print(line, file=log, flush=True)


if __name__ == "__main__":
    main()
