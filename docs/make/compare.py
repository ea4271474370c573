"""The comparison in docs/speed.md: these scripts and their alternatives, in one run on one GPU.

python docs/make/compare.py

Random batches of one shape; figures are medians after warm-up, of 20 training steps or 5 calls.
The alternatives train with bf16 autocast and fused Adam, and decode with bf16 weights. Ours train
and decode in bf16, with the optimizer of their papers. Gradients are clipped where ours are: not in
the Transformers. Compiled means torch.compile of the model and its loss, in the default mode and
with CUDA graphs (mode="reduce-overhead"). cuDNN's recurrent networks are not compiled, because
torch.compile does not fuse them. Hugging Face's Marian is included if transformers is installed.
Needs an otherwise idle machine.
"""

import gc
import math
import os
import statistics
import sys
import tempfile
import warnings
from functools import partial
from itertools import product
from pathlib import Path

# An empty cache for torch.compile, so that the figures do not depend on what was compiled before.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bahdanau
import luong
import seq2seq_lstm
import transformer
from data import BOS, EOS, PAD


def random_batch(B, S, T, V):
    src = torch.randint(4, V, (B, S), device="cuda")
    tgt = torch.randint(4, V, (B, T + 1), device="cuda")
    tgt[:, 0] = BOS
    return src, tgt


def milliseconds(function, repeats=20, warm_up=6):
    """The median time of a call; compiling and recording happen during the warm-up."""
    times = []
    for n in range(warm_up + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if n >= warm_up:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


# ---- training: each function returns one training step ------------------------------------------
def ours(script, src, tgt, V, **flags):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in main of the scripts
    cfg = script.Config.paper(src_vocab=V, tgt_vocab=V, **flags)
    train_step = script.make_train_step(script.Model(cfg).cuda(), cfg)
    return lambda: train_step(src, tgt)


def alternative(model, src, tgt, mode=None, clip=False):
    """A training step of a module that is called with src and tgt_in and returns logits."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default
    model = model.cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def loss(src, tgt):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(src, tgt[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tgt[:, 1:].flatten())

    if mode:
        loss = torch.compile(loss, mode=mode)

    def train_step():
        optimizer.zero_grad()
        loss(src, tgt).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train_step


class TorchTransformer(nn.Module):
    """torch.nn.Transformer at the base size, with one embedding matrix."""

    def __init__(self, V):
        super().__init__()
        self.E = nn.Embedding(V, 512)
        self.positions = nn.Parameter(torch.randn(512, 512))
        self.transformer = nn.Transformer(512, 8, 6, 6, 2048, 0.1, batch_first=True)

    def embed(self, words):
        return self.E(words) * math.sqrt(512) + self.positions[: words.size(1)]

    def forward(self, src, tgt_in):
        padding = src == PAD
        future = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1), tgt_in.device)
        masks = dict(tgt_mask=future, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        y = self.transformer(self.embed(src), self.embed(tgt_in), **masks, tgt_is_causal=True)
        return y @ self.E.weight.T


class Marian(nn.Module):
    """Hugging Face's MarianMTModel at the base size."""

    def __init__(self, V):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sizes = dict(d_model=512, encoder_layers=6, decoder_layers=6, dropout=0.1)
        sizes |= dict(encoder_attention_heads=8, decoder_attention_heads=8)
        sizes |= dict(encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="relu")
        tokens = dict(pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS)
        options = dict(scale_embedding=True, forced_eos_token_id=None)
        self.model = MarianMTModel(MarianConfig(vocab_size=V, **sizes, **tokens, **options))

    def forward(self, src, tgt_in):
        inputs = dict(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt_in)
        return self.model(**inputs, use_cache=False).logits


class Recurrent(nn.Module):
    """cuDNN's recurrent networks and the output layer, without attention."""

    def __init__(self, V, rnn, emb, hidden, layers, bidirectional=False):
        super().__init__()
        self.E_x = nn.Embedding(V, emb)
        self.E_y = nn.Embedding(V, emb)
        self.encoder = rnn(emb, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.decoder = rnn(emb, hidden, layers, batch_first=True)
        self.W = nn.Linear(hidden, V)

    def forward(self, src, tgt_in):
        h, _ = self.encoder(self.E_x(src))
        s, _ = self.decoder(self.E_y(tgt_in))
        return self.W(s + 0 * h[:, :1, : s.size(-1)])  # so that backward includes the encoder


def compare_training(work, shape, contestants):
    """Prints one line per contestant; ours comes first."""
    B, S, T, V = shape
    src, tgt = random_batch(*shape)
    print(f"\n{work}, B = {B}, S = {S}, T = {T}, V = {V:,}")
    speeds = []
    for name, make in contestants.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats()
        try:
            time = milliseconds(make(src, tgt, V))
        except ImportError as error:
            print(f"    {name:32} skipped: {error}")
            continue
        speeds.append(B * (S + T) / time)
        gib = torch.cuda.max_memory_allocated() / 2**30
        ratio = speeds[0] / speeds[-1]
        line = f"{speeds[-1]:8,.0f} thousand tokens/s {gib:6.1f} GiB, ours / this {ratio:.2f}"
        print(f"    {name:32} {line}", flush=True)


# ---- greedy decoding: no translation ends early --------------------------------------------------
def compare_decoding(V=32000, S=32, T=64):
    model = transformer.Model(transformer.Config.paper(src_vocab=V, tgt_vocab=V)).cuda()
    nn.init.zeros_(model.E_y.weight[EOS].detach())  # its logit is 0, never the largest
    model = transformer.bf16_copy(model)
    contestants = {"ours": lambda src: transformer.greedy(model, src, T)}
    try:
        marian = Marian(V).model.cuda().eval().to(torch.bfloat16)
        options = dict(num_beams=1, do_sample=False, min_new_tokens=T, max_new_tokens=T)
        contestants["Hugging Face Marian, generate"] = lambda src: marian.generate(
            input_ids=src, attention_mask=torch.ones_like(src), **options
        )
    except ImportError as error:
        print(f"\nHugging Face Marian skipped: {error}")
    plain = TorchTransformer(V).cuda().eval().to(torch.bfloat16)

    def without_cache(src):
        y = torch.full_like(src[:, :1], BOS)
        for _ in range(T):
            y = torch.cat([y, plain(src, y)[:, -1:].argmax(-1)], 1)

    contestants["torch.nn.Transformer, no cache"] = without_cache
    for B in (1, 64, 512):
        src, _ = random_batch(B, S, 1, V)
        print(f"\nTransformer base, greedy decoding of {T} words, B = {B}, S = {S}")
        speeds = []
        for name, decode in contestants.items():
            with torch.inference_mode():
                time = milliseconds(lambda decode=decode, src=src: decode(src), 5, 2)
            speeds.append(1000 * B / time)
            line = f"{speeds[-1]:8,.1f} sentences/s, ours / this {speeds[0] / speeds[-1]:.1f}"
            print(f"    {name:32} {line}", flush=True)


OUTPUT = {transformer: "E_y", bahdanau: "W_o", luong: "W_s", seq2seq_lstm: "W"}  # output layers


def our_decoding(S=32, T=64):
    """Prints the milliseconds of greedy and beam search in all four scripts."""
    print(f"\nOurs at the papers' sizes, V = 30,000, S = {S}, {T} words, milliseconds per batch")
    for script, name in OUTPUT.items():
        model = script.Model(script.Config.paper(src_vocab=30000, tgt_vocab=30000)).cuda()
        nn.init.zeros_(getattr(model, name).weight[EOS].detach())
        net = script.bf16_copy(model)
        for K in (1, 5):
            times = []
            for B in (1, 64, 512):
                src, _ = random_batch(B, S, 1, 30000)
                decode = partial(script.beam, net, src, T, K, 0.6)
                times.append(milliseconds(decode, 5, 2))
            line = ", ".join(f"{time:.0f}" for time in times)
            print(f"    {script.__name__:32} K = {K}, B = 1, 64, 512: {line}", flush=True)


def main():
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    lstm = (nn.LSTM, 1000, 1000, 4)
    contestants = {
        "ours": lambda *batch: ours(transformer, *batch),
        "ours, --no-compile": lambda *batch: ours(transformer, *batch, compile=False),
    }
    modes = {"": None, ", compiled": "default", ", reduce-overhead": "reduce-overhead"}
    for (name, model), (suffix, mode) in product(
        {"torch.nn.Transformer": TorchTransformer, "Hugging Face Marian": Marian}.items(),
        modes.items(),
    ):
        contestants[name + suffix] = lambda src, tgt, V, model=model, mode=mode: alternative(
            model(V), src, tgt, mode
        )
    compare_training("Transformer base", (256, 64, 64, 32000), contestants)
    compare_training(
        "RNNsearch",
        (80, 50, 50, 30000),
        {
            "ours": lambda *batch: ours(bahdanau, *batch),
            "cuDNN GRUs, no attention": lambda src, tgt, V: alternative(
                Recurrent(V, nn.GRU, 620, 1000, 1, bidirectional=True), src, tgt, clip=True
            ),
        },
    )
    compare_training(
        "Luong, global general, input feeding, 4 x 1000",
        (128, 50, 50, 50000),
        {
            "ours": lambda *batch: ours(luong, *batch, attention="global"),
            "cuDNN LSTMs, no attention": lambda src, tgt, V: alternative(
                Recurrent(V, *lstm), src, tgt, clip=True
            ),
        },
    )
    compare_training(
        "Seq2Seq, 4 x 1000",
        (128, 50, 50, 80000),
        {
            "ours": lambda *batch: ours(seq2seq_lstm, *batch),
            "cuDNN LSTMs": lambda src, tgt, V: alternative(
                Recurrent(V, *lstm), src, tgt, clip=True
            ),
        },
    )
    gc.collect()
    torch.cuda.empty_cache()
    compare_decoding()
    our_decoding()


if __name__ == "__main__":
    main()
