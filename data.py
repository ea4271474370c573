"""Shared by the four scripts: a loader of parallel text, BLEU and AER, alignments, flags and files.

>>> import data
>>> pairs = [("i see a cat".split(), "je vois un chat".split()), (["a", "cat"], ["un", "chat"])]
>>> source, target = data.build_vocabularies(pairs)  # your text: list(data.read_pairs(en, fr))
>>> source.words  # token id -> word, the most frequent words first
['<pad>', '<s>', '</s>', '<unk>', 'a', 'cat', 'i', 'see']
>>> bitext = data.Bitext(pairs, (source, target))
>>> src, tgt = bitext.batch([0, 1])  # endless training batches: bitext.batches(...)
>>> src  # (B,S): words, EOS, right padding
array([[6, 7, 4, 5, 2],
       [4, 5, 2, 0, 0]])
>>> tgt  # (B,T+1): BOS, words, EOS, right padding
array([[1, 6, 7, 5, 4, 2],
       [1, 5, 4, 2, 0, 0]])
>>> target.decode(tgt[1])
['un', 'chat']
"""

import argparse
import collections
import contextlib
import dataclasses
import gzip
import html
import inspect
import io
import itertools
import json
import math
import os
import re
import sys
import typing
import zlib
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
RANK = int(os.environ.get("RANK", 0))  # index of this process; torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
CORPUS = Path(__file__).resolve().parent / "corpus"  # the built-in text
GUIDE = "docs/troubleshooting.md"


class InputError(Exception):
    """A user error. The scripts print its message, without a traceback."""


# ---- 1. the loader: reading, vocabularies, batches ----------------------------------------------
def to_words(sentence):
    """Splits a string, or UTF-8 bytes, at ASCII whitespace; a list of words is left unchanged."""
    if isinstance(sentence, str):
        sentence = sentence.encode()  # str.split would also split at no-break spaces
    if isinstance(sentence, bytes):
        return [word.decode() for word in sentence.split()]
    return sentence


def read(path):
    """Yields each line of a UTF-8 text file (plain or .gz) as a list of words."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield to_words(line.removeprefix(b"\xef\xbb\xbf"))  # byte order mark
                except UnicodeDecodeError:
                    raise InputError(f"{path}, line {number}: not UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: not a .gz file, or damaged") from None


def read_pairs(source, target, gold=None):
    """Yields pairs of lines (lists of words), with links {(i, j), ...} if there is a gold file."""
    paths = [source, target, gold] if gold else [source, target]
    number = 0
    for number, lines in enumerate(itertools.zip_longest(*map(read, paths)), 1):
        if None in lines:
            short = paths[lines.index(None)]
            raise InputError(f"{short}: ends before line {number}, but the parallel text does not")
        if gold:
            lines = *lines[:2], parse_links(*lines, f"{gold}, line {number}")
        yield lines
    if number == 0:
        raise InputError(f"{source}: the file is empty, or a pipe, which cannot be read twice")


def parse_links(source, target, words, place):  # Pharaoh format: ["0-0", "1-2", ...]
    try:
        pairs = {(int(i), int(j)) for i, j in (word.split("-") for word in words)}
    except ValueError:
        raise InputError(f"{place}: expected links such as 0-0 1-2") from None
    if any(i >= len(source) or j >= len(target) for i, j in pairs):
        raise InputError(f"{place}: a link points past the sentence; indices start at 0")
    return pairs


def built_in(split):
    """The files of a split of the built-in corpus; valid and test have gold alignments."""
    parts = ("en", "fr") if split == "train" else ("en", "fr", "links")
    return [CORPUS / f"{split}.{part}" for part in parts]


class Vocabulary:
    """Words and their token ids."""

    def __init__(self, words):
        self.words = list(words)  # token id -> word
        # Without SPECIALS: a "<pad>" that occurs in a text is an unknown word, not padding.
        self.ids = {word: i for i, word in enumerate(self.words) if word not in SPECIALS}

    def __len__(self):
        return len(self.words)

    def encode(self, sentence):
        return [self.ids.get(word, UNK) for word in to_words(sentence)]

    def decode(self, ids):  # up to EOS
        ids = itertools.takewhile(lambda i: i != EOS, ids)
        return [self.words[i] for i in ids if i not in (PAD, BOS)]


def build_vocabularies(pairs, sizes=(None, None), min_count=1, share=False):
    """Vocabularies of both sides, most frequent words first; sizes include SPECIALS."""
    counts = [collections.Counter(), collections.Counter()]
    for pair in pairs:
        for count, sentence in zip(counts, pair):
            count.update(to_words(sentence))
    if share:
        counts = [counts[0] + counts[1]] * 2
        sizes = [sizes[0]] * 2
    vocabularies = []
    for count, size in zip(counts, sizes):
        words = sorted(count, key=lambda word: (-count[word], word))  # ties: alphabetical
        known = [word for word in words if count[word] >= min_count and word not in SPECIALS]
        vocabularies.append(Vocabulary((SPECIALS + known)[:size]))
    return vocabularies


class Bitext:
    """Sentence pairs as token ids. Sentence k of a side is tokens[starts[k] : starts[k + 1]]."""

    def __init__(self, pairs, vocabularies):
        tokens = array("i"), array("i")
        starts = array("q", [0]), array("q", [0])
        for pair in pairs:
            assert not isinstance(pair, str) and len(pair) in (2, 3), "expected pairs of sentences"
            for side, begin in enumerate(([], [BOS])):  # only the target starts with BOS
                ids = vocabularies[side].encode(pair[side])
                tokens[side].fromlist([*begin, *ids, EOS])
                starts[side].append(len(tokens[side]))
        self.tokens = [np.asarray(side) for side in tokens]  # without a copy
        self.starts = [np.asarray(side) for side in starts]
        self.lengths = [np.diff(side) for side in self.starts]

    def __len__(self):
        return len(self.lengths[0])

    def batch(self, rows, multiple=1):
        """Rows as src (B,S) and tgt (B,T+1), right-padded so that multiple divides S and T."""
        sides = []
        for side in (0, 1):
            lengths = self.lengths[side][rows][:, None]
            bos = side  # 1 for the target: its BOS, which T does not include
            column = np.arange(bos + round_up(lengths.max() - bos, multiple))
            index = self.starts[side][rows][:, None] + column
            ids = self.tokens[side].take(index, mode="clip").astype(np.int64)
            sides.append(np.where(column < lengths, ids, PAD))
        return sides

    def rows_by_length(self, max_tokens):
        """Batches of row numbers that cover each row once, longest first."""
        longest = np.maximum(*self.lengths)
        order = np.lexsort((self.lengths[0], longest))[::-1]
        max_rows = max_tokens // 32  # a pair counts as 32 tokens or more: its output can be long
        cuts = batch_boundaries(longest[order], max_tokens, max_rows)
        return [order[first:last] for first, last in itertools.pairwise(cuts)]

    def batches(self, max_tokens, max_sentences, seed, first_step=0):
        """Endless training batches. Batch k depends only on k and the arguments, for --resume."""
        # Pairs of similar length share a batch, and lengths are rounded up to a multiple of 1/16 of
        # the longest (outliers aside): little padding, and few distinct shapes, for CUDA graphs.
        length = np.maximum(*self.lengths)
        typical_max = int(min(length.max(), 2 * np.quantile(length, 0.99)))
        multiple = max(typical_max // 16, 1)
        source = round_up(self.lengths[0], multiple)
        longest = np.maximum(source, round_up(self.lengths[1] - 1, multiple))
        cuts = batch_boundaries(np.sort(longest)[::-1], max_tokens, max_sentences)
        first_epoch, skip = divmod(first_step, len(cuts) - 1)
        for epoch in itertools.count(first_epoch):
            rng = np.random.default_rng((seed, epoch))  # shuffles pairs of equal shape, and batches
            order = np.lexsort((rng.permutation(len(self)), source, longest))[::-1]
            for k in rng.permutation(len(cuts) - 1)[skip:]:
                yield self.batch(order[cuts[k] : cuts[k + 1]], multiple)
            skip = 0


def round_up(length, multiple):
    return (length + multiple - 1) // multiple * multiple


def batch_boundaries(longest, max_tokens, max_sentences):
    """Cuts sorted pairs into batches that fit in max_tokens when padded, or hold a single pair."""
    cuts = [0]
    while cuts[-1] < len(longest):
        tokens_per_pair = 2 * int(longest[cuts[-1]])  # the source and the target, with padding
        rows = max(min(max_tokens // tokens_per_pair, max_sentences), 1)
        cuts.append(min(cuts[-1] + rows, len(longest)))
    return cuts


# ---- 2. scoring ---------------------------------------------------------------------------------
def ngrams(words, n):  # how often each sequence of n words occurs
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu(hypotheses, references):
    """Corpus BLEU-4, 0 to 100, of tokenized sentences; sacreBLEU's with tokenize="none"."""
    assert str not in (type(hypotheses), type(references)), "expected lists of sentences"
    hypotheses, references = ([to_words(x) for x in side] for side in (hypotheses, references))
    matches = [0, 0, 0, 0]  # of 1-grams to 4-grams
    total = [0, 0, 0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for k in range(4):
            found = ngrams(hypothesis, k + 1)
            matches[k] += (found & ngrams(reference, k + 1)).total()
            total[k] += found.total()
    if not any(matches) or not all(total):
        return 0.0
    smoothed = 1.0  # as in sacreBLEU: the first order without a match counts as 1/2, the next 1/4
    for k in range(4):
        if matches[k] == 0:
            smoothed /= 2
            matches[k] = smoothed
    log_precision = sum(math.log(m / n) for m, n in zip(matches, total)) / 4
    log_brevity_penalty = min(0.0, 1 - sum(map(len, references)) / total[0])
    return 100 * math.exp(log_precision + log_brevity_penalty)


def aer(predicted, gold):
    """Alignment error rate, 0 to 1; both are lists of sets {(source index, target index), ...}."""
    both = sum(len(p & g) for p, g in zip(predicted, gold, strict=True))
    total = sum(len(p) + len(g) for p, g in zip(predicted, gold, strict=True))
    return 1 - 2 * both / total if total else 0.0


def scores(pairs, hypotheses, alphas=None):
    """BLEU, BLEU by source length and, given attention weights and gold alignments, AER."""
    sources, references, *gold = zip(*pairs)
    buckets = collections.defaultdict(list)
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True):
        buckets[max(len(to_words(source)) - 1, 0) // 10].append((hypothesis, reference))
    by_length = {f"{10 * k + 1}-{10 * k + 10}": bleu(*zip(*buckets[k])) for k in sorted(buckets)}
    error = aer([links(alpha) for alpha in alphas], gold[0]) if alphas else None
    return dict(bleu=bleu(hypotheses, references), aer=error, bleu_by_length=by_length)


# ---- 3. alignments: alpha has a row per target word, a column per source word, EOS last in both
def links(alpha):
    """Links (source index, target index): the argmax of every target word, unless that is EOS."""
    return {(int(i), j) for j, i in enumerate(alpha[:-1].argmax(-1)) if i < alpha.shape[1] - 1}


def pharaoh(alpha):  # the format of fast_align and Marian: i-j, source index first
    return " ".join(f"{i}-{j}" for i, j in sorted(links(alpha)))


def replace_unknown(source, target, alpha):
    """The target with each <unk> replaced by the source word it attends to most."""
    source = to_words(source) or ["<unk>"]  # an empty source has no word to copy
    best = alpha[:, : len(source)].argmax(-1)  # not EOS
    return [source[i] if word == "<unk>" else word for i, word in zip(best, to_words(target))]


def heatmap(source, target, alpha):
    """alpha as text for a terminal: a column per source word, a row per target word."""
    source, target = to_words(source), to_words(target)
    height = max(map(len, source), default=0)
    width = max(map(len, target), default=0)
    header = zip(*(word.rjust(height) for word in source))  # source words run top to bottom
    lines = [" " * (width + 1) + " ".join(row) for row in header]
    for word, row in zip(target, alpha):
        levels = np.searchsorted([0.05, 0.2, 0.4, 0.6, 0.8], row[: len(source)], "right")
        lines.append(word.rjust(width) + " " + "".join(" ·░▒▓█"[level] * 2 for level in levels))
    return "\n".join([*lines, " " * width + " from 0.05 · 0.2 ░ 0.4 ▒ 0.6 ▓ 0.8 █"])


def svg(source, target, alpha):
    """alpha as an SVG picture; hovering over a cell shows its weight."""
    source, target = to_words(source), to_words(target)
    left = 12 + 9 * max(map(len, target), default=0)
    top = 12 + 9 * max(map(len, source), default=0)
    size = f'width="{left + 22 * len(source) + 12}" height="{top + 22 * len(target) + 12}"'
    style = "<style>text{fill:#6e7781;font:15px monospace}rect{fill:#2f7fd6}</style>"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style]
    for column, word in enumerate(source):
        position = f"translate({left + 22 * column + 15},{top - 6}) rotate(-90)"
        parts.append(f'<text transform="{position}">{html.escape(word)}</text>')
    for row, word in enumerate(target):
        y = top + 22 * row
        label = f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{html.escape(word)}</text>'
        parts.append(label)
        for column, (other, weight) in enumerate(zip(source, alpha[row])):
            cell = f'x="{left + 22 * column}" y="{y}" opacity="{0.07 + 0.93 * weight:.2f}"'
            title = f"<title>{html.escape(f'{other} {word}')} {weight:.2f}</title>"
            parts.append(f'<rect {cell} width="21" height="21">{title}</rect>')
    return "\n".join([*parts, "</svg>\n"])


def write_alignments(path, pairs, alphas):
    """Writes path.npz (weights), path.txt (links of each pair) and path.svg (the first pair)."""
    sources, targets = ([" ".join(to_words(pair[side])) for pair in pairs] for side in (0, 1))
    weights = {f"alpha_{k}": alpha for k, alpha in enumerate(alphas)}
    arrays = io.BytesIO()
    np.savez_compressed(arrays, source=sources, target=targets, **weights)
    write(f"{path}.npz", arrays.getvalue())
    write(f"{path}.txt", "".join(pharaoh(alpha) + "\n" for alpha in alphas).encode())
    write(f"{path}.svg", svg(*pairs[0][:2], alphas[0]).encode())


# ---- 4. the command line: flags, the text of a run, its files ------------------------------------
def parse_args(Config, description, argv=None):
    """Returns (args, flags): flags has the Config fields given or, with a preset, all of them."""
    parser = argparse.ArgumentParser(
        description="\n".join(re.findall(r"\A.+|^    python .+", description or "", re.M)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    pair = dict(nargs=2, metavar=("SRC", "TGT"))
    mode = parser.add_mutually_exclusive_group()
    start = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", **pair, help="train on your own text [built-in corpus]")
    mode.add_argument("--test", nargs="+", metavar="FILE", help="score SRC TGT; with LINKS, AER")
    mode.add_argument("--align", **pair, help="print alignments in Pharaoh format (i-j)")
    mode.add_argument("--translate", action="store_true", help="translate stdin, line by line")
    parser.add_argument("--valid", **pair, help="validation text [every 20th pair, at most 1,000]")
    out = Path("runs", Path(inspect.getfile(Config)).stem)
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"run folder [{out}]")
    start.add_argument("--resume", action="store_true", help="continue the run in --out")
    preset = dict(action="store_const", dest="preset")
    start.add_argument("--medium", **preset, const="medium", help="preset for 10k to 100k pairs")
    start.add_argument("--paper", **preset, const="paper", help="the paper's sizes and recipe")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], help="[cuda if found, or cpu]")
    add_config_flags(parser, Config)
    args = parser.parse_args(argv)
    if args.resume and (args.train or args.valid):
        parser.error("--resume reads the text of the run; leave out --train and --valid")
    if args.valid and not args.train:
        parser.error("--valid SRC TGT needs --train SRC TGT")
    if args.test and len(args.test) not in (2, 3):
        parser.error("--test takes SRC TGT, or SRC TGT LINKS")
    uses_run = args.test or args.align or args.translate
    flags = {key: value for key, value in vars(args).items() if key in Config.__dataclass_fields__}
    if args.preset and not uses_run:  # a run keeps its own values
        flags = vars(getattr(Config, args.preset)(**flags))
    return args, flags


def add_config_flags(parser, Config):
    """A flag for every field of Config, in the groups of its headings."""
    presets = dict(medium=Config.medium(), paper=Config.paper())
    source = inspect.getsource(Config)  # has the help text of each field and the headings
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)", source, re.M))
    headings = {first: title for title, first in re.findall(r"    # (\w+)\n    (\w+):", source)}
    group = parser
    for field in dataclasses.fields(Config):
        if field.name in headings:
            group = parser.add_argument_group(headings[field.name])
        options = dict(type=field.type, metavar="N" if field.type is int else "X")
        if field.type is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        elif typing.get_origin(field.type) is typing.Literal:
            options = dict(choices=typing.get_args(field.type))
        values = {name: getattr(cfg, field.name) for name, cfg in presets.items()}
        changed = [f", {name}: {x}" for name, x in values.items() if x != field.default]
        text = f"{comments.get(field.name, '')} [{field.default}{''.join(changed)}]"
        options |= dict(default=argparse.SUPPRESS, help=text.replace("%", "%%"))
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def check(config, **ranges):
    """Rejects unknown choices, and numbers outside ranges[field] = (least, below)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')} {value}"
        choices = typing.get_args(field.type)
        if typing.get_origin(field.type) is typing.Literal and value not in choices:
            raise InputError(f"{flag}: must be one of {', '.join(map(str, choices))}")
        if field.type in (int, float):
            least, below = ranges.get(field.name, (1 if field.type is int else 0, math.inf))
            least = min(least, field.default)  # a default is always allowed
            if not least <= value < below:
                raise InputError(f"{flag}: must be in [{least}, {below})")


def saved_config(saved, Config, flags):
    """The Config of a checkpoint, updated with flags; fields above KW_ONLY must not change."""
    config = vars(Config()) | saved["config"]  # a field added since takes its default
    if unknown := config.keys() - Config.__dataclass_fields__:
        raise InputError(f"trained with another script: here is no {', '.join(sorted(unknown))}")
    flags = {k: flags[k] for k in flags if k not in ("src_vocab", "tgt_vocab")}  # already built
    for field in dataclasses.fields(Config):
        old = config[field.name]
        new = flags.get(field.name, old)
        if new != old and field.name in saved["config"] and not field.kw_only:
            raise InputError(f"this run has {field.name} = {old}, not {new}")
    return Config(**config | flags)


class Corpus:
    """The text of a run: training pairs as token ids, validation and test pairs as words."""

    def __init__(self, cfg, train, valid, saved):
        self.files = (train, valid) if train else saved.get("files")  # None: the built-in corpus
        train, valid = self.files or (built_in("train"), built_in("valid"))

        def fits(pair):
            return all(0 < len(sentence) <= cfg.max_len for sentence in pair)

        def training_pairs():  # read twice: to count words, then to encode them
            for number, pair in enumerate(read_pairs(*train)):
                self.pairs_read = number + 1
                if fits(pair) and number not in self.held_out:
                    yield pair

        self.held_out = range(0) if valid else range(19, 20000, 20)  # every 20th, 1,000 at most
        every_20th = itertools.islice(read_pairs(*train), 19, 20000, 20)
        self.valid = list(read_pairs(*valid[:2]) if valid else filter(fits, every_20th))  # no links
        if not self.valid:
            raise InputError(f"{train[0]}: too short to hold out every 20th pair; add --valid")
        self.test = self.valid if self.files else list(read_pairs(*built_in("test")))
        self.test_name = "validation set" if self.files else "test set"
        if saved:
            self.vocabularies = [Vocabulary(words) for words in saved["vocabularies"]]
        else:
            options = (cfg.src_vocab, cfg.tgt_vocab), cfg.min_count, cfg.share_vocab
            self.vocabularies = build_vocabularies(training_pairs(), *options)
        if min(map(len, self.vocabularies)) <= len(SPECIALS):
            raise InputError("no words left; see --min-count, --max-len, --src-vocab, --tgt-vocab")
        self.train = Bitext(training_pairs(), self.vocabularies)

    def to_save(self):  # what --resume needs; passed to __init__ as saved
        return dict(vocabularies=[x.words for x in self.vocabularies], files=self.files)

    def report(self, about_model):
        sides = self.train.tokens + Bitext(self.valid, self.vocabularies).tokens
        unknown = max((side == UNK).sum() / max((side > EOS).sum(), 1) for side in sides)
        hint = f" (is all text tokenized in the same way? see {GUIDE})" if unknown > 0.2 else ""
        held_out = len(self.valid) if self.held_out else 0
        skipped = self.pairs_read - len(self.train) - held_out
        pairs = f"{len(self.train):,} pairs ({skipped:,} skipped)"
        pairs += f", {held_out:,} held out for validation" if held_out else ""
        sizes = " and ".join(f"{len(vocabulary):,}" for vocabulary in self.vocabularies)
        text = f"vocabularies of {sizes}, up to {unknown:.1%} of words unknown{hint}"
        if RANK == 0:
            print(f"{pairs}, {text}; {about_model}", flush=True)


def new_folder(out):
    """Makes the folder of a run. One whose run has no validation yet may be used again."""
    if RANK == 0:
        out.mkdir(parents=True, exist_ok=True)
        files = {path.name for path in out.iterdir()}
        if "model.pt" in files:
            raise InputError(f"{out}: holds a run; add --resume (no --train), or another --out")
        if files - {"last.pt", "last.pt.tmp", "model.pt.tmp"}:
            raise InputError(f"{out}: not empty; choose another --out")


def read_stdin(vocabulary):
    """Yields lists of up to 4,000 sentences, or of one in a terminal; reports unknown words."""
    in_terminal = os.isatty(0)
    while True:
        if in_terminal:
            print("sentence (Ctrl-D ends)> ", end="", file=sys.stderr, flush=True)
        lines = list(itertools.islice(sys.stdin.buffer, 1 if in_terminal else 4000))
        if not lines:
            return
        sentences = [to_words(line.decode("utf-8-sig", "replace")) for line in lines]
        if in_terminal:
            sentences = [[*to_known(words, vocabulary)] for words in sentences]
        report_unknown(sentences, vocabulary)
        if any(sentences) or not in_terminal:  # an empty line at the prompt has no translation
            yield sentences


def to_known(words, vocabulary):
    """Lower-cases and splits unknown words such as "The" and "dog." where that makes them known."""
    for word in words:
        patterns = (r"\S+", r"[\w']+|[^\w\s]", r"'?\w+|[^\w\s]", r"\w+'?|[^\w\s]")
        choices = [re.findall(p, x) for p in patterns for x in (word, word.lower())]
        known = [sum(1 if x in vocabulary.ids else -1 for x in parts) for parts in choices]
        yield from [word] if word in vocabulary.ids else choices[known.index(max(known))]


def report_unknown(sentences, vocabulary):
    words = list(itertools.chain.from_iterable(sentences))
    unknown = [word for word in words if word not in vocabulary.ids]
    if unknown:
        distinct = list(dict.fromkeys(unknown))  # in order
        message = f"unknown words ({len(distinct):,}): {', '.join(distinct[:10])}"
        if len(unknown) > 0.1 * len(words):  # more than some rare words
            hint = "is the text tokenized and in lower case like the training text?"
            message += f" ({len(vocabulary.ids):,} are known; {hint} see {GUIDE})"
        print(message, file=sys.stderr)


def write(path, content):
    """Writes a file atomically: an interruption leaves the old file, never a partial one."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # so that the file is also complete after a power cut
    os.replace(temporary, path)


def write_log(out, log):  # one line per validation; the last line of a finished run is its result
    if RANK == 0:
        write(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log).encode())


def progress(message):  # on stderr, above the progress bar
    if RANK == 0:
        tqdm.write(message, file=sys.stderr)


def log_validation(out, log, smoothing, source, translation):
    write_log(out, log)
    smoothed = " (with label smoothing)" if smoothing else ""
    text = "step {step}, {seconds:.0f} s: train loss {loss:.3f}{smoothed}, valid {valid_loss:.3f}"
    progress(text.format(**log[-1], smoothed=smoothed))
    progress(f"    {' '.join(source)} → {' '.join(translation)}")


def report(result, corpus, out, pair, alpha):
    """Prints the scores of a new model, and an example with its alignment."""
    source, translation, reference = map(" ".join, [*pair, corpus.test[0][1]])
    print(f"\nsource:    {source}\nmodel:     {translation}\nreference: {reference}\n")
    print(f"{heatmap(source, translation, alpha)}\n")
    print(f"{corpus.test_name}: {format_scores(result)}")
    gib = result["gpu_memory_gib"]
    memory = f", {gib:.1f} GiB of GPU memory" if gib else ""
    print(f"{result['tokens_per_second']:,.0f} tokens/s{memory}; files are in {out}/")
    print(f"try: python {sys.argv[0]} --translate --out {out}")


def format_scores(result):
    lengths = ", ".join(f"{k}: {v:.1f}" for k, v in result["bleu_by_length"].items())
    text = "loss {loss:.4f}, perplexity {ppl:.4g}, BLEU {bleu:.2f}"
    text += "" if result["aer"] is None else ", AER {aer:.3f}"
    return f"{text.format(**result)}\nBLEU by source length: {lengths}"


@contextlib.contextmanager
def one_line_errors():
    """Ends the program without a traceback after user errors, Ctrl-C and closed pipes."""
    if hasattr(sys.stdout, "reconfigure"):  # the same bytes on every system; not in notebooks
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
