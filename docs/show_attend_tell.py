# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Show, Attend and Tell: image captions with soft or hard attention.
Xu et al. 2015, Show, Attend and Tell: Neural Image Caption Generation with Visual Attention,
arXiv 1502.03044

An example of using an attention class in another model: f_att is AdditiveAttention from
bahdanau.py, unchanged (imported here; in your own project, copy it). Uses a GPU if there is one.

    alpha_ti = softmax_i(f_att(a_i, h_{t-1}))   weights, AdditiveAttention                 (4), (5)
    z_t = beta_t sum_i alpha_ti a_i          soft: weighted mean of annotations, gated  (13), 4.2.1
    p(s_ti = 1) = alpha_ti                   hard: s_t is a sampled location, one-hot           (8)
    z_t = sum_i s_ti a_i                     hard: the annotation at that location              (9)
    h_t = LSTM(E y_{t-1}, h_{t-1}, z_t)      decoder state                               (1) to (3)
    p(y_t | a, y_<t) = softmax(L_o (E y_{t-1} + L_h h_t + L_z z_t))                             (7)
    L_d = -log p(y|a) + lambda sum_i (1 - sum_t alpha_ti)^2                soft: loss          (14)
    grad log p(y|s,a) + lambda_r (log p(y|s,a) - b) grad log p(s|a) + ...  hard: REINFORCE     (12)

    python docs/show_attend_tell.py                     95% of captions right, 1.3 min, 2 x86 cores
    python docs/show_attend_tell.py --attention hard    90% right; with --steps 3600, 95%
    runs/show_attend_tell/attention.svg                 where the model looked, for one test image

Deviations from the paper
- Images are generated. A small CNN with batch normalization, trained jointly, replaces the
  pretrained VGG network; the coordinates of a location are part of its annotation vector.
- lambda is 0.01, because the penalty asks for equal attention to all locations, and most of ours
  show only background. The authors' code has lambda = 64/196 = 0.33: with a weight of 1, it
  averages log p over a batch of 64 images, but sums the penalty over them and averages it over the
  196 locations. We tuned lambda_r and lambda_e on our images.
- With hard attention, the first half of every batch has s_t = alpha_t (in the paper, every image
  with probability 0.5). Testing takes the most probable location: captions are reproducible.
- beta_t gates only soft attention, as in the paper; the authors' code gates hard attention, too.
- To train in minutes: smaller, one-layer f_init, no dropout or early stopping, batches that mix
  caption lengths, warm-up, clipping, greedy decoding.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import time
import typing
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bahdanau.py and data.py

import data  # noqa: E402
from bahdanau import AdditiveAttention  # noqa: E402
from data import BOS, EOS, PAD  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = "captions exactly right {exact:.1f}%, BLEU {bleu:.2f}"


@dataclasses.dataclass
class Config:
    # fmt: off
    # model
    attention: typing.Literal["soft", "hard", "mean"] = "soft"  # soft, hard or mean (equal weights)
    features: int = 64         # size of an annotation vector (D)
    emb: int = 64              # embedding size (m)
    hidden: int = 128          # units of the LSTM (n)
    attn: int = 32             # hidden units of f_att
    # training
    lambda_d: float = 0.01     # weight of the doubly stochastic penalty (soft)
    lambda_r: float = 0.045    # weight of the REINFORCE term (hard)
    lambda_e: float = 0.0003   # weight of the entropy of alpha (hard)
    expected: float = 0.5      # share of a batch with s_t = alpha_t instead of a sample (hard)
    lr: float = 0.005          # learning rate
    warmup: int = 50           # steps of linear warm-up, before linear decay to 0
    scenes: int = 12000        # number of training scenes
    batch: int = 32            # scenes per batch
    steps: int = 1800          # training steps
    eval_every: int = 300      # steps between validations
    seed: int = 1              # random seed of initialization, batches and sampling
    out: str = "runs/show_attend_tell"  # folder of log.jsonl and attention.svg
    # fmt: on


# a annotations, y caption, h and c LSTM state, alpha attention weights, s location, z context.
# Shapes: B batch, L locations, T words with EOS, D annotation, m embedding, n LSTM, V vocabulary.


class Encoder(nn.Module):
    """A CNN with one annotation vector per 6x6 pixels, each of which sees 14x14 pixels."""

    def __init__(self, cfg):
        super().__init__()
        C, last = 24, cfg.features - 2  # the other two features are the coordinates
        convolutions = (3, C, 5, 3, 1), (C, 3 * C, 4, 2, 1), (3 * C, last, 1)
        layers = []
        for channels, out, *window in convolutions:  # window: kernel size, stride, padding
            layers += [nn.Conv2d(channels, out, *window), nn.BatchNorm2d(out), nn.ReLU()]
        self.cnn = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # faster on a CPU

    def forward(self, images):  # (B,3,48,48), uint8
        a = self.cnn(images / 85 - 1).permute(0, 2, 3, 1)  # (B,8,8,D-2)
        rows, columns = (torch.linspace(-2, 2, n, device=a.device) for n in a.shape[1:3])
        position = torch.cartesian_prod(rows, columns).expand(len(a), -1, -1)
        return torch.cat([a.flatten(1, 2), position], -1)  # (B,L,D)


class Captioner(nn.Module):
    """The complete model: CNN, attention, LSTM, output layer."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.encoder = Encoder(cfg)
        self.E = nn.Embedding(len(VOCABULARY), cfg.emb)
        self.attention = AdditiveAttention(cfg.hidden, cfg.features, cfg.attn)  # f_att
        self.f_beta = nn.Linear(cfg.hidden, 1)
        self.f_init_h = nn.Linear(cfg.features, cfg.hidden)
        self.f_init_c = nn.Linear(cfg.features, cfg.hidden)
        self.cell = nn.LSTMCell(cfg.emb + cfg.features, cfg.hidden)
        self.L_h = nn.Linear(cfg.hidden, cfg.emb)
        self.L_z = nn.Linear(cfg.features, cfg.emb, bias=False)
        self.L_o = nn.Linear(cfg.emb, len(VOCABULARY))

    def encode(self, images):
        a = self.encoder(images)
        return a, self.attention.keys(a)  # memory: (B,L,D), (B,L,attn)

    def init_state(self, memory):
        mean = memory[0].mean(1)
        return torch.tanh(self.f_init_h(mean)), torch.tanh(self.f_init_c(mean))  # h_0, c_0, 3.1.2

    def attend(self, h, memory):  # h_{t-1} (B,n) -> z_t (B,D), alpha_t (B,L), s_t (B,L)
        a, keys = memory
        z, alpha = self.attention(h.unsqueeze(1), a, keys=keys)  # eq. (4), (5), (13)
        z, alpha = z.squeeze(1), alpha.squeeze(1)  # one query per image
        if self.cfg.attention == "hard":
            location = torch.multinomial(alpha, 1) if self.training else alpha.argmax(-1, True)
            s = torch.zeros_like(alpha).scatter(-1, location, 1)  # sampled by eq. (8)
            n = int(len(a) * self.cfg.expected) if self.training else 0
            s = torch.cat([alpha[:n], s[n:]])  # 4.1: n images of the batch use the expected value
            return (s.unsqueeze(-1) * a).sum(1), alpha, s  # eq. (9)
        if self.cfg.attention == "mean":
            z, alpha = a.mean(1), torch.full_like(alpha, 1 / a.size(1))
        beta = torch.sigmoid(self.f_beta(h))  # 4.2.1   (B,1)
        return beta * z, alpha, alpha

    def step(self, Ey, state, memory):  # E y_{t-1} (B,m) -> what predicts y_t, and the next state
        z, alpha, s = self.attend(state[0], memory)
        h, c = self.cell(torch.cat([Ey, z], -1), state)  # eq. (1), (2), (3)
        return (h, z, alpha, s), (h, c)

    def output(self, Ey, h, z):
        return self.L_o(Ey + self.L_h(h) + self.L_z(z))  # eq. (7)

    def forward(self, images, tgt_in):  # (B,T) -> logits (B,T,V), alpha (B,T,L), s (B,T,L)
        memory = self.encode(images)
        state = self.init_state(memory)
        Ey = self.E(tgt_in)
        steps = []
        for Ey_t in Ey.unbind(1):
            out, state = self.step(Ey_t, state, memory)
            steps.append(out)
        h, z, alpha, s = (torch.stack(x, 1) for x in zip(*steps))
        return self.output(Ey, h, z), alpha, s


def objective(cfg, y, logits, alpha, s, b=0.0):
    """The value to maximize and log p(y|s,a), both (B,); b is the baseline of REINFORCE."""
    words = y != PAD
    log_p = -nn.functional.cross_entropy(logits.mT, y, ignore_index=PAD, reduction="none").sum(1)
    if cfg.attention != "hard":
        coverage = (alpha * words.unsqueeze(-1)).sum(1)  # sum_t alpha_ti   (B,L)
        return log_p - cfg.lambda_d * (1 - coverage).square().sum(1), log_p  # -L_d, eq. (14)
    log_alpha = alpha.clamp(min=1e-30).log()
    # log p(s|a); its gradient is 0 where s is alpha, not a sample
    log_p_s = ((s.detach() * log_alpha).sum(-1) * words).sum(1)
    H = -((alpha * log_alpha).sum(-1) * words).sum(1)
    reward = cfg.lambda_r * (log_p.detach() - b)
    return log_p + reward * log_p_s + cfg.lambda_e * H, log_p  # eq. (12), with b and H[s]


def train(cfg):
    """Trains a model; after every step, yields it and the loss per word."""
    torch.backends.mkldnn.set_flags(False)  # both slow this model down on ARM
    torch.backends.nnpack.set_flags(False)
    torch.manual_seed(cfg.seed)
    model = Captioner(cfg).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    images, captions = to_tensors(make_scenes(cfg.scenes, "train"))
    b = 0.0
    for n in trange(1, cfg.steps + 1, disable=None):  # no bar unless stderr is a terminal
        rows = torch.randint(len(images), (cfg.batch,))
        tgt = captions[rows]
        tgt = tgt[:, : (tgt != PAD).sum(1).max()]  # up to the end of the longest caption
        y = tgt[:, 1:]
        logits, alpha, s = model.train()(images[rows], tgt[:, :-1])
        value, log_p = objective(cfg, y, logits, alpha, s, b)
        b = 0.9 * b + 0.1 * log_p.mean().item()  # 4.1, moving average baseline
        words = (y != PAD).sum()
        (-value.sum() / words).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = cfg.lr * min(n / cfg.warmup, 1 - (n - 1) / cfg.steps)
        optimizer.step()
        optimizer.zero_grad()
        yield model, (-log_p.sum() / words).item()


@torch.inference_mode()
def greedy(model, images, max_len=18):  # the longest captions have 18 words with EOS
    """Greedy decoding: tokens (B,T), PAD after EOS, and where the model looked, s (B,T,L)."""
    memory = model.eval().encode(images)
    state = model.init_state(memory)
    y = torch.full((len(images),), BOS, device=images.device)
    steps = []
    for _ in range(max_len):
        Ey = model.E(y)
        (h, z, _, s), state = model.step(Ey, state, memory)
        logits = model.output(Ey, h, z)
        y = logits.argmax(-1).masked_fill((y == EOS) | (y == PAD), PAD)
        steps.append((y, s))
    return [torch.stack(x, 1) for x in zip(*steps)]


@torch.inference_mode()
def evaluate(model, scenes):
    """Exact match and BLEU of greedy captions. With gold captions, for every color and shape:
    pointing, the share of the attention on the object named; argmax, whether the largest weight
    is on it; chance, its area."""
    images, tgt = to_tensors(scenes)
    hypotheses = [VOCABULARY.decode(row) for row in greedy(model, images)[0].tolist()]
    references = [scene.words for scene in scenes]
    _, _, s = model.eval()(images, tgt[:, :-1])
    points = []
    for scene, looks in zip(scenes, s.cpu().numpy()):
        for word, owner, look in zip(scene.words, scene.owner, looks):
            if word in COLORS or word in SHAPES:
                cells = scene.regions[owner].reshape(GRID, 6, GRID, 6).any((1, 3)).ravel()
                points.append((look @ cells, cells[look.argmax()], cells.mean()))
    exact = np.mean([hyp == ref for hyp, ref in zip(hypotheses, references)])
    scores = 100 * exact, data.bleu(hypotheses, references), *100 * np.mean(points, 0)
    names = "exact", "bleu", "pointing", "argmax", "chance"
    return {name: round(float(score), 2) for name, score in zip(names, scores)}


# ---- scenes: objects on a noisy background, named from left to right ----
SIZE, GRID = 48, 8  # pixels and locations per side
SPLITS = ["train"] * 8 + ["valid", "test"]
SHAPES = ["circle", "cross", "square", "triangle"]
COLORS = dict(red=(230, 50, 50), green=(50, 180, 65), blue=(65, 100, 240))
COLORS |= dict(yellow=(240, 215, 50), purple=(165, 65, 205), white=(240, 240, 240))
WORDS = ["a", "small", "large", *COLORS, *SHAPES, "left", "of", "above", "below", "."]
VOCABULARY = data.Vocabulary(data.SPECIALS + WORDS)
Scene = dataclasses.make_dataclass("Scene", ["image", "regions", "words", "owner"])
# owner: the index of the object that a word describes, or -1; regions: the objects' visible pixels


def place(rng, n):
    """n objects (x, y, radius, color, shape) from left to right; neighbors may overlap slightly."""
    size = 100, n  # candidates; the first that fits is taken
    r = np.where(rng.random(size) < 0.5, rng.uniform(5, 6, size), rng.uniform(8, 10, size))
    x, y = rng.uniform(r, SIZE - r, (2, *size))
    dx, dy = np.diff(x), abs(np.diff(y))
    apart = np.hypot(dx, dy) > 0.75 * (r[:, 1:] + r[:, :-1])
    fits = (apart & (dx > 6) & (abs(dx - dy) > 6)).all(1)  # so order and relation are clear
    k = fits.argmax()
    looks = rng.choice([*COLORS], n).tolist(), rng.choice(SHAPES, n).tolist()
    return [*zip(x[k], y[k], r[k], *looks)] if fits[k] else place(rng, n)


def describe(objects):
    """The caption, and for each of its words the index of the object it describes, or -1."""
    words, owner = [], []
    for k, (x, y, r, color, shape) in enumerate(objects):
        if k:
            right, down = x - objects[k - 1][0], y - objects[k - 1][1]
            vertical = "above" if down > 0 else "below"
            words += ["left", "of"] if right > abs(down) else [vertical]
        words += ["a", "large" if r > 7 else "small", color, shape]
        owner += [-1] * (len(words) - 3 - len(owner)) + [k] * 3
    return [*words, "."], [*owner, -1]


def draw(rng, objects):
    """The image (3,48,48) and the visible pixels of each object; later ones cover earlier ones."""
    image = np.full((3, SIZE, SIZE), rng.uniform(25, 75))
    regions = np.zeros((len(objects), SIZE, SIZE), bool)
    v, u = np.ogrid[0.5:SIZE, 0.5:SIZE]
    for k, (x, y, r, color, shape) in enumerate(objects):
        dx, dy = abs(u - x) / r, (v - y) / r
        far, near = np.maximum(dx, abs(dy)), np.minimum(dx, abs(dy))
        inside = dict(
            circle=dx**2 + dy**2 < 1,
            cross=(near < 0.35) & (far < 1),
            square=far < 0.88,
            triangle=(dy < 0.8) & (2 * dx < dy + 1),
        )[shape]
        regions[:, inside] = False
        regions[k, inside] = True
        image[:, inside] = (COLORS[color] + rng.normal(0, 10, 3))[:, None]
    return (image + rng.normal(0, 15, image.shape)).clip(0, 255).astype(np.uint8), regions


def make_scenes(n, split):
    """n scenes; the hash of its caption assigns a scene to a split, so the splits are disjoint."""
    rng = np.random.default_rng(SPLITS.index(split))
    scenes = []
    while len(scenes) < n:
        objects = place(rng, (1, 2, 2, 3, 3)[len(scenes) % 5])
        words, owner = describe(objects)
        if SPLITS[zlib.crc32(" ".join(words).encode()) % 10] == split:
            scenes.append(Scene(*draw(rng, objects), words, owner))
    return scenes


def to_tensors(scenes):
    """Images (B,3,48,48) and captions (B,T+1) from BOS to EOS, padded."""
    rows = [[BOS, *VOCABULARY.encode(scene.words), EOS] for scene in scenes]
    tgt = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    images = torch.from_numpy(np.stack([scene.image for scene in scenes]))
    return images.to(DEVICE), tgt.to(DEVICE)


def picture(image, words, s):
    """An SVG with the image once per word, darkened except where the model looked, s (T,L)."""
    colors = enumerate(zip(*image.reshape(3, -1).tolist()))
    pixels = [f'<path d="M{k % SIZE} {k // SIZE}h1v1h-1z" fill="rgb{rgb}"/>' for k, rgb in colors]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{110 * len(words)}" height="130">']
    parts += ['<defs><g id="image" shape-rendering="crispEdges">', *pixels, "</g></defs>"]
    for k, (word, weights) in enumerate(zip(words, s)):
        parts.append(f'<g transform="translate({110 * k + 7},7) scale(2)"><use href="#image"/>')
        for (y, x), weight in np.ndenumerate(weights.reshape(GRID, GRID) / weights.max()):
            parts.append(f'<path d="M{6 * x} {6 * y}h6v6h-6z" opacity="{0.7 * (1 - weight):.2f}"/>')
        parts.append(f'<text x="24" y="58" text-anchor="middle" font-size="8">{word}</text></g>')
    return "\n".join([*parts, "</svg>\n"])


@data.one_line_errors()
def main():
    """The command line: trains, reports like the scripts, and draws where the model looked."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.splitlines()[0])
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)", inspect.getsource(Config), re.M))
    for name, default in vars(Config()).items():
        options = dict(type=type(default), default=default, help=f"{comments[name]} [{default}]")
        parser.add_argument("--" + name.replace("_", "-"), **options)
    cfg = Config(**vars(parser.parse_args()))
    data.check(cfg, seed=(0, float("inf")), features=(3, float("inf")))
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    valid, test = make_scenes(500, "valid"), make_scenes(1000, "test")
    log = []
    start = time.perf_counter()
    for step, (model, loss) in enumerate(train(cfg), 1):
        if step % cfg.eval_every == 0 or step == cfg.steps:
            entry = dict(step=step, loss=loss) | evaluate(model, valid)
            log.append(entry | dict(seconds=time.perf_counter() - start))
            data.write_log(out, log)
            tokens, _ = greedy(model, to_tensors(valid[:1])[0])
            words = VOCABULARY.decode(tokens[0].tolist())
            text = "step {step}, {seconds:.0f} s: train loss {loss:.3f}, validation " + SCORES
            data.progress(text.format(**log[-1]))
            data.progress(f"    {' '.join(valid[0].words)} → {' '.join(words)}")
    result = evaluate(model, test)
    data.write_log(out, [*log, vars(cfg) | result])
    tokens, s = greedy(model, to_tensors(test[2:3])[0])
    words = VOCABULARY.decode(tokens[0].tolist())
    data.write(out / "attention.svg", picture(test[2].image, words, s[0].cpu().numpy()).encode())
    print(f"\nmodel:     {' '.join(words)}\nreference: {' '.join(test[2].words)}\n")
    text = SCORES + ", attention on the object named {pointing:.0f}% (chance {chance:.0f}%)"
    print(f"test set: {text.format(**result)}\nwhere the model looked: {out}/attention.svg")


if __name__ == "__main__":
    main()
