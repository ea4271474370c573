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


class BecauseGrammar(Grammar):
    """Generates sentences such as "the big dog saw a park because it was very dark ."."""

    def pick(self, key):
        if key == "joint":
            return ["because", "parce+que"]
        if key == "subjects":
            return "animal"
        if key == "does animal":
            return "quality" if "because" in self.english else "ground"
        if key == "does ground":
            return "quality"
        return super().pick(key)


def twin_pairs():
    """The six test sentences and their reference translations, the two of a pair in a row."""
    sources = [ENGLISH.format(*nouns, end) for nouns in NOUNS for end in ("tired", "dangerous")]
    return list(zip(sources, FRENCH.strip().split("\n")))


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


def train(out, seed):
    """Trains the default transformer.py, but for 6,000 steps and with the added sentences."""
    torch.backends.mkldnn.set_flags(False)  # as transformer.main does on ARM
    cfg = transformer.Config(steps=6000, seed=seed)
    corpus = data.Corpus(cfg, train=None, valid=None, saved={})  # the built-in corpus
    text = data.read_pairs(*data.built_in("train"))
    pairs = [pair for pair in text if not is_held_out(pair[0])]
    corpus.train = data.Bitext(pairs + because_it(4000), corpus.vocabularies)
    cfg.src_vocab, cfg.tgt_vocab = map(len, corpus.vocabularies)
    torch.manual_seed(cfg.seed)
    model = transformer.Model(cfg)
    out.mkdir(parents=True)
    transformer.train(out, corpus, model, saved={})


def translate(model, vocabularies, source, other=None, swapped=None):
    """The translation and the encoder's weights (layers,h,S,S).

    In the head `swapped` (layer, head), "it" uses the weights of another sentence.
    """
    weights = []

    def attend(attention, x, KV, bias):  # replaces attend of an encoder layer's self-attention
        alpha = type(attention).attend(attention, x, KV, bias, need_alpha=True)[1]  # (1,h,S,S)
        if swapped and swapped[0] == len(weights):
            alpha[0, swapped[1], IT] = other[swapped][IT]
        weights.append(alpha[0])
        V = KV[:, :, 1].transpose(1, 2)  # (1,h,S,d_k)
        return attention.W_O((alpha @ V).transpose(1, 2).flatten(2)), None

    layers = [layer.self_attention for layer in model.encoder]
    for attention in layers:
        attention.attend = partial(attend, attention)
    (words,) = transformer.translate(model, [source], vocabularies)
    for attention in layers:
        del attention.attend
    return " ".join(words), torch.stack(weights)


def moved(weights):
    """(layers,h): how much weight of "it" moves from the animal to the place, 0 to 1, on average.

    The weights are those of all test sentences, (6,layers,h,S,S).
    """
    tired, dangerous = weights[::2, ..., IT, :], weights[1::2, ..., IT, :]  # (3,layers,h,S)
    leaves = tired[..., ANIMAL] - dangerous[..., ANIMAL]
    arrives = dangerous[..., PLACE] - tired[..., PLACE]
    return ((leaves + arrives) / 2).mean(0)


def count_swaps(model, vocabularies, weights, head):
    """In how many test sentences "it" becomes the pronoun of the other sentence of the pair if, in
    the given head, it uses the weights of that other sentence."""
    pairs = twin_pairs()
    count = 0
    for n, (source, _) in enumerate(pairs):
        said, _ = translate(model, vocabularies, source, weights[n ^ 1], head)
        count += pronoun(said) == pronoun(pairs[n ^ 1][1])
    return count


def pronoun(french):  # the word after "parce qu'"
    _, _, rest = french.partition("parce qu' ")
    return rest.split(" ")[0]


def record(out, seed):
    """What the page shows. Trains the model first unless the run folder `out` exists."""
    if not out.exists():
        train(out, seed)
    model, vocabularies = transformer.load(out)
    sentences, weights = [], []
    for source, target in twin_pairs():
        said, alpha = translate(model, vocabularies, source)
        weights.append(alpha)
        layers = [[as_text(head.numpy()) for head in layer] for layer in alpha]
        sentences.append(dict(source=source, target=target, said=said, layers=layers))
    weights = torch.stack(weights)
    shares = moved(weights)
    deciding = divmod(shares.argmax().item(), model.cfg.heads)  # the head that moves most
    swaps = count_swaps(model, vocabularies, weights, deciding)
    reading = 0, weights[:, 0, :, IT, ADJECTIVE].mean(0).argmax().item()  # in the first layer
    moves = [[round(share, 3) for share in layer] for layer in shares.tolist()]
    return dict(sentences=sentences, moved=moves, shown=[deciding, reading], swaps=swaps)


def main(seed):
    found = record(Path("runs") / f"twins-{seed}", seed)
    correct = sum(pair["said"] == pair["target"] for pair in found["sentences"])
    line = dict(moved=found["moved"], head=found["shown"][0], correct=correct, swaps=found["swaps"])
    print(json.dumps(dict(seed=seed) | line))


if __name__ == "__main__":
    main(int(sys.argv[1]))
