"""Trains and measures the model of the section "What does 'it' refer to?" in attention.html.

"The animal did not cross the street because it was too tired ." and "... too dangerous ." differ in
one word, but "it" is "il" in one French sentence and "elle" in the other. The built-in corpus has
too few such sentences to learn this from, so this file adds 4,000. It is used by draw.py --film.

python docs/make/twins.py 3    trains with seed 3 and prints its line of docs/runs/twins.jsonl
"""

import json
import sys
import zlib
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))

from draw import as_text
from grammar import Grammar

import data
import transformer

NOUNS = [("animal", "street"), ("cow", "park"), ("dog", "forest")]  # opposite genders in French
ENGLISH = "the {} did not cross the {} because it was too {} ."
ANIMAL, PLACE, IT, ADJECTIVE = 1, 6, 8, 11  # positions of words in it
FRENCH = """
l' animal n' a pas traversé la rue parce qu' il était trop fatigué .
l' animal n' a pas traversé la rue parce qu' elle était trop dangereuse .
la vache n' a pas traversé le parc parce qu' elle était trop fatiguée .
la vache n' a pas traversé le parc parce qu' il était trop dangereux .
le chien n' a pas traversé la forêt parce qu' il était trop fatigué .
le chien n' a pas traversé la forêt parce qu' elle était trop dangereuse .
"""
SOURCES = [ENGLISH.format(*nouns, end) for nouns in NOUNS for end in ("tired", "dangerous")]
TARGETS = FRENCH.strip().split("\n")  # sentences 2n and 2n + 1 differ only in the adjective


class BecauseGrammar(Grammar):
    """Generates sentences such as "the big dog saw a park because it was very dark ."."""

    def pick(self, key):
        choices = {
            "joint": ["because", "parce+que"],
            "subjects": "animal",
            "does ground": "quality",
        }
        choices["does animal"] = "quality" if "because" in self.english else "ground"
        return choices[key] if key in choices else super().pick(key)


def is_held_out(source):
    """Whether a sentence contains both nouns of a test sentence; training excludes these."""
    return any(animal in source and ground in source for animal, ground in NOUNS)


def because_it(n, max_len=30):
    """n pairs with "because it", of the lengths and from the split of the training text."""
    grammar = BecauseGrammar("0 because")
    pairs = []
    while len(pairs) < n:
        source, target, _ = grammar.sentence(3 + int((max_len - 2) * grammar.random() ** 2))
        line = " ".join(source)
        in_train = zlib.crc32(line.encode()) % 10 < 8
        if in_train and "because it" in line and len(source) <= max_len and not is_held_out(source):
            pairs.append((source, target))
    return pairs


def prepare(script, **flags):
    """The built-in corpus and an untrained model, as in main of the scripts."""
    torch.backends.mkldnn.set_flags(False)  # as main does on ARM
    cfg = script.Config(**flags)
    corpus = data.Corpus(cfg, train=None, valid=None, saved={})
    cfg.src_vocab, cfg.tgt_vocab = map(len, corpus.vocabularies)
    torch.manual_seed(cfg.seed)
    return corpus, script.Model(cfg)


def train(out, seed):
    """Trains the default transformer.py, but for 6,000 steps and with the added sentences."""
    corpus, model = prepare(transformer, steps=6000, seed=seed)
    text = data.read_pairs(*data.built_in("train"))
    pairs = [pair for pair in text if not is_held_out(pair[0])]
    corpus.train = data.Bitext(pairs + because_it(4000), corpus.vocabularies)
    out.mkdir(parents=True)
    transformer.train(out, corpus, model, saved={})


def translate(model, vocabularies, source, head=None, row=None):
    """The translation and the encoder's weights (layers,h,S,S). In the given head (layer, head),
    "it" uses the weights `row` instead of its own."""
    weights = []

    def forward(attention, x, source, bias):  # replaces that of an encoder layer's self-attention
        alpha = type(attention).forward(attention, x, source, bias, need_alpha=True)[1]  # (1,h,S,S)
        if head and head[0] == len(weights):
            alpha[0, head[1], IT] = row
        weights.append(alpha[0])
        V = attention.KV(source)[:, :, 1].transpose(1, 2)  # (1,h,S,d_k)
        return attention.W_O((alpha @ V).transpose(1, 2).flatten(2)), None

    for layer in model.encoder:
        layer.self_attention.forward = partial(forward, layer.self_attention)
    (words,) = transformer.translate(model, [source], vocabularies)
    return " ".join(words), torch.stack(weights)


def pronoun(french):  # the word after "parce qu'"
    return french.partition("parce qu' ")[2].split(" ")[0]


def record(out, seed):
    """What the page shows. Trains the model first unless the run folder `out` exists."""
    if not out.exists():
        train(out, seed)
    model, vocabularies = transformer.load(out)
    said, weights = zip(*(translate(model, vocabularies, source) for source in SOURCES))
    it = torch.stack(weights)[..., IT, :]  # (6,layers,h,S)
    # How much weight moves from the animal to the place, 0 to 1, on average.
    change = it[1::2] - it[::2]
    moved = ((change[..., PLACE] - change[..., ANIMAL]) / 2).mean(0)  # (layers,h)
    deciding = divmod(moved.argmax().item(), model.cfg.heads)  # the head that moves most
    reading = 0, it[:, 0, :, ADJECTIVE].mean(0).argmax().item()  # in the first layer
    swaps = 0  # how often "it" becomes the other pronoun with the weights of the other sentence
    for n, source in enumerate(SOURCES):
        other, _ = translate(model, vocabularies, source, deciding, it[n ^ 1][deciding])
        swaps += pronoun(other) == pronoun(TARGETS[n ^ 1])
    sentences = []
    for source, target, french, layers in zip(SOURCES, TARGETS, said, weights):
        layers = [[as_text(head.numpy()) for head in layer] for layer in layers]
        sentences.append(dict(source=source, target=target, said=french, layers=layers))
    moves = [[round(share, 3) for share in layer] for layer in moved.tolist()]
    return dict(sentences=sentences, moved=moves, shown=[deciding, reading], swaps=swaps)


if __name__ == "__main__":
    seed = int(sys.argv[1])
    found = record(Path("runs") / f"twins-{seed}", seed)
    correct = sum(pair["said"] == pair["target"] for pair in found["sentences"])
    line = dict(moved=found["moved"], head=found["shown"][0], correct=correct, swaps=found["swaps"])
    print(json.dumps(dict(seed=seed) | line))
