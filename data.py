"""Shared by the four scripts: the data loader, scoring, plots, flags and the built-in corpus.

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
>>> target.decode(tgt[1, 1:])
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
import pickle
import random
import re
import sys
import typing
import zipfile
import zlib
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
RANK = int(os.environ.get("RANK", 0))  # index of this process; torchrun sets both variables
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes


class InputError(Exception):
    """A user error, reported in one line: what is wrong, where, and what to do. No traceback."""


# ---- 1. the loader: reading, vocabularies, encoding, batching ----------------------------------
def to_words(sentence):
    """Splits a string (or UTF-8 bytes) at ASCII whitespace; a list of words is left unchanged."""
    if isinstance(sentence, str):
        sentence = sentence.encode()  # bytes.split, unlike str.split, keeps no-break spaces
    if isinstance(sentence, bytes):
        return [word.decode() for word in sentence.removeprefix(b"\xef\xbb\xbf").split()]  # no BOM
    return sentence


def read(path):
    """Yields each line of a UTF-8 text file (plain or .gz) as a list of words."""
    opener = gzip.open if str(path).endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                number += 1
                yield to_words(line)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {number}: not UTF-8; convert the file to UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); check the file") from None


def read_pairs(source, target):
    """Yields the sentence pairs of two parallel text files."""
    number = 0
    for number, pair in enumerate(itertools.zip_longest(read(source), read(target)), 1):
        if None in pair:
            short, long = (source, target) if pair[0] is None else (target, source)
            raise InputError(
                f"{short}: ends after line {number - 1:,}, but {long} does not; "
                "line n of one file must be the translation of line n of the other"
            )
        yield pair
    if number == 0:
        raise InputError(f"{source}: the file is empty; it needs at least one sentence")


class Vocabulary:
    """vocabulary[word] is a token id, or UNK for an unknown word; .words maps ids to words."""

    def __init__(self, words):
        self.words = list(words)
        # Without SPECIALS: a "<pad>" that occurs in a text is an unknown word, not padding.
        self.ids = {word: i for i, word in enumerate(self.words) if word not in SPECIALS}

    def __len__(self):  # the number of token ids, which includes SPECIALS
        return len(self.words)

    def __contains__(self, word):
        return word in self.ids

    def __getitem__(self, word):
        return self.ids.get(word, UNK)

    def __iter__(self):  # without it, a loop would call self[0], self[1], ... forever
        return iter(self.words)

    def decode(self, ids):
        """The words of these token ids, without EOS and padding."""
        return [self.words[i] for i in ids if i not in (PAD, EOS)]


def build_vocabularies(pairs, sizes=(None, None), min_count=1, share=False):
    """Vocabularies of both sides, most frequent words first; sizes include SPECIALS."""
    counts = [collections.Counter(), collections.Counter()]
    for pair in pairs:
        for count, sentence in zip(counts, pair):
            count.update(to_words(sentence))
    if share:
        both = counts[0] + counts[1]
        counts = [both, both]
        sizes = [sizes[0], sizes[0]]
    vocabularies = []
    for count, size in zip(counts, sizes):
        alphabetical = sorted(count)
        by_frequency = sorted(alphabetical, key=count.get, reverse=True)  # ties stay alphabetical
        known = [w for w in by_frequency if count[w] >= min_count and w not in SPECIALS]
        if count and not known:
            reason = f"--min-count {min_count}: no word occurs that often"
            raise InputError(f"{reason}; lower it, or check the text")
        vocabularies.append(Vocabulary((SPECIALS + known)[:size]))
    return vocabularies


class Bitext:
    """Sentence pairs as token ids. Sentence k of a side is tokens[starts[k] : starts[k + 1]]."""

    def __init__(self, pairs, vocabularies):
        tokens = array("i"), array("i")
        starts = array("q", [0]), array("q", [0])
        for pair in pairs:
            for side in (0, 1):
                ids = [vocabularies[side][word] for word in to_words(pair[side])]
                if side == 1:  # only the target starts with BOS
                    tokens[side].append(BOS)
                tokens[side].extend(ids)
                tokens[side].append(EOS)
                starts[side].append(len(tokens[side]))
        self.tokens = [np.array(side) for side in tokens]
        self.starts = [np.array(side) for side in starts]
        self.lengths = [np.diff(side) for side in self.starts]

    def __len__(self):
        return len(self.lengths[0])

    def batch(self, rows, multiple=1):
        """Rows as src (B,S) and tgt (B,T+1), right-padded so that multiple divides S and T."""
        sides = []
        for side in (0, 1):
            length = self.lengths[side][rows][:, None]
            bos = 1 if side == 1 else 0  # T does not include BOS
            width = bos + round_up(length.max() - bos, multiple)
            column = np.arange(width)
            index = self.starts[side][rows][:, None] + column
            tokens = self.tokens[side].take(index, mode="clip")  # padding is masked out below
            sides.append(np.where(column < length, tokens, PAD).astype(np.int64))
        return sides

    def rows_by_length(self, max_tokens):
        """Batches of row numbers that cover each row once, longest first."""
        longest = np.maximum(*self.lengths)
        order = np.lexsort((self.lengths[0], longest))[::-1]
        max_rows = max_tokens // 32  # because a short source can get a long translation
        cuts = batch_boundaries(longest[order], max_tokens, max_rows)
        return [order[first:last] for first, last in itertools.pairwise(cuts)]

    def batches(self, max_tokens, max_sentences, seed, first_step=0):
        """Endless training batches. Batch k depends only on seed and k, so training can resume."""
        # Pairs of similar length share a batch, and lengths are rounded up to a multiple of 1/16 of
        # the longest. That gives little padding and few distinct shapes, which suits CUDA graphs.
        longest_sentence = max(side.max() for side in self.lengths)
        multiple = max(longest_sentence // 16, 1)
        source = round_up(self.lengths[0], multiple)
        longest = np.maximum(source, round_up(self.lengths[1] - 1, multiple))
        cuts = batch_boundaries(np.sort(longest)[::-1], max_tokens, max_sentences, rounded=True)
        epoch, skip = divmod(first_step, len(cuts) - 1)
        while True:  # shuffle the pairs of each shape, then the order of the batches
            rng = np.random.default_rng((seed, epoch))
            order = np.lexsort((rng.permutation(len(self)), source, longest))[::-1]
            for k in rng.permutation(len(cuts) - 1)[skip:]:
                yield self.batch(order[cuts[k] : cuts[k + 1]], multiple)
            epoch += 1
            skip = 0


def round_up(length, multiple):
    return (length + multiple - 1) // multiple * multiple


def round_to_four_bits(n):
    """n rounded down to four significant bits: 1, ..., 15, 16, 18, ..., 30, 32, 36, ..., 60, ..."""
    step = 1
    while n >= 16 * step:
        step *= 2
    return n - n % step


def batch_boundaries(longest, max_tokens, max_sentences, rounded=False):
    """Boundaries of batches, longest pairs first: at most max_tokens with padding, or one pair."""
    cuts = [0]
    while cuts[-1] < len(longest):
        first = cuts[-1]
        tokens_per_pair = 2 * int(longest[first])  # the source and the target, with padding
        rows = min(max_tokens // tokens_per_pair, max_sentences)
        if rounded:  # so that --accumulate splits large batches evenly
            rows = round_to_four_bits(rows)
        rows = max(rows, 1)
        cuts.append(min(first + rows, len(longest)))
    return cuts


# ---- 2. scoring --------------------------------------------------------------------------------
def ngrams(words, n):  # how often each sequence of n words occurs
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu(hypotheses, references):
    """Corpus BLEU-4, 0 to 100, of two lists of lists of words; sacreBLEU's with tokenize="none"."""
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
    sources, references = ([to_words(x) for x in side] for side in (sources, references))
    buckets = collections.defaultdict(list)
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True):
        buckets[max(len(source) - 1, 0) // 10].append((hypothesis, reference))
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
    best = alpha[:, : max(len(source), 1)].argmax(-1)  # not EOS, unless there is nothing else
    return [source[i] if word == "<unk>" else word for i, word in zip(best, target)]


def shorten(sentence):  # what a picture has room for
    return [word[:24] for word in to_words(sentence)[:60]]


def heatmap(source, target, alpha):
    """alpha as text for a terminal: a column per source word, a row per target word."""
    source, target = shorten(source), shorten(target)
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
    source, target = shorten(source), shorten(target)
    left = 12 + 9 * max(map(len, target), default=0)
    top = 12 + 9 * max(map(len, source), default=0)
    width, height = left + 22 * len(source) + 12, top + 22 * len(target) + 12
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">']
    parts += ["<style>text{fill:#6e7781;font:15px monospace}rect{fill:#2f7fd6}</style>"]
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
    sources = [" ".join(to_words(pair[0])) for pair in pairs]
    targets = [" ".join(to_words(pair[1])) for pair in pairs]
    arrays = dict(source=sources, target=targets) | {f"alpha_{k}": a for k, a in enumerate(alphas)}
    write(f"{path}.npz", arrays, lambda arrays, file: np.savez_compressed(file, **arrays))
    write(f"{path}.txt", "".join(pharaoh(alpha) + "\n" for alpha in alphas).encode())
    write(f"{path}.svg", svg(*pairs[0][:2], alphas[0]).encode())


# ---- 4. the command line: flags, the data of a run, the run folder, the report ------------------
def parse_args(Config, description, devices, argv=None):
    """Returns the parsed command line and the Config fields it sets (all, with a preset)."""
    script = Path(inspect.getfile(Config)).stem
    title, *rest = description.splitlines()
    commands = [line for line in rest if line.startswith("    python ")]
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # so that an error is one line
        description="\n".join([title, *commands]),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 30, 100),
        allow_abbrev=False,
    )
    files = dict(nargs=2, metavar=("SRC", "TGT"))
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--train", **files, help="train on your own text [built-in corpus]")
    modes.add_argument(
        "--translate", action="store_true", help="translate stdin to stdout (< FILE)"
    )
    modes.add_argument("--align", **files, help="print alignments in Pharaoh format (i-j)")
    modes.add_argument("--test", **files, help="print BLEU and perplexity")
    parser.add_argument("--valid", **files, help="validation text for --train; files may be .gz")
    out_help = f"run folder [the next or latest of runs/{script}, runs/{script}-2, ...]"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    parser.add_argument("--resume", action="store_true", help="resume the run in --out")
    presets = parser.add_mutually_exclusive_group()
    const = dict(action="store_const", dest="preset")
    presets.add_argument("--medium", **const, const=Config.medium, help="for real text, on a GPU")
    presets.add_argument("--paper", **const, const=Config.paper, help="the paper's settings")
    parser.add_argument("--device", choices=devices, default=devices[-1], help=f"[{devices[-1]}]")
    add_flags(parser, Config, dict(medium=Config.medium(), paper=Config.paper()))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise InputError(f"{' '.join(unknown)}: unknown argument; see --help")
    flags = {k: value for k, value in vars(args).items() if k in Config.__dataclass_fields__}
    existing = args.resume or args.translate or args.align or args.test
    if bool(args.train) != bool(args.valid):
        raise InputError("--train SRC TGT and --valid SRC TGT go together; give both")
    if args.resume and (args.translate or args.align or args.test):
        raise InputError("--resume: is for training; omit it with --translate, --align and --test")
    if args.out and not existing and RANK == 0:  # other ranks may see rank 0's new folder
        check_new(args.out)
    if args.preset == Config.medium and args.device == "cpu" and not existing and RANK == 0:
        to_stderr("--medium can take a day on a CPU; for a few thousand pairs, leave it out")
    args.out = args.out or default_folder(script, existing)
    if args.preset:
        flags = vars(args.preset(**flags))
    return args, flags


def default_folder(script, existing):
    """Of runs/script, runs/script-2, ... the last one that exists, or the one after it."""
    folders = [Path("runs", f"{script}-{n}" if n > 1 else script) for n in range(1, 10000)]
    used = [n for n, folder in enumerate(folders) if not is_new(folder)]
    if existing:
        return folders[used[-1] if used else 0]
    return folders[used[-1] + 1 if used else 0]


def is_new(folder):  # also if a run was stopped there before it wrote a file
    return not folder.exists() or all(file.suffix == ".tmp" for file in folder.iterdir())


def check_new(folder):
    if folder.is_file():
        raise InputError(f"{folder}: is a file; choose another --out")
    if not is_new(folder):
        raise InputError(f"{folder}: already exists; add --resume, or choose another --out")


def add_flags(parser, Config, presets):
    """Adds a flag for every field of Config, whose headings and comments become --help."""
    group = parser
    pattern = r"^    (?:# (\w+)$|(\w+): [^#\n]*(?:# (.*))?)"  # headings and fields
    for heading, name, comment in re.findall(pattern, inspect.getsource(Config), re.M):
        if heading:
            group = parser.add_argument_group(heading)
            continue
        field = Config.__dataclass_fields__[name]
        options = dict(type=field.type, metavar="N" if field.type is int else "X")
        if field.type is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        elif typing.get_origin(field.type) is typing.Literal:
            options = dict(choices=typing.get_args(field.type))
        elif field.type not in (int, float, str):
            raise TypeError(f"Config.{name}: use int, float, str, bool or typing.Literal")
        values = {preset: getattr(cfg, name) for preset, cfg in presets.items()}
        shown = f"{field.default}"
        if set(values.values()) - {field.default}:
            shown += "".join(f", {preset}: {value}" for preset, value in values.items())
        text = f"{comment} [{shown}]".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **options)


def check(config):
    """Rejects values that would train on nothing, give nonsense or end in a traceback."""
    most = dict(beam=1000, seed=2**63 - 1)  # other integers: 10^9
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')} {value}"
        choices = typing.get_args(field.type)
        if choices and value not in choices:
            raise InputError(f"{flag}: must be one of {', '.join(choices)}")
        if field.type is int:
            least = min(field.default, 1)  # 0 is allowed where it is the default
            if field.name in ("src_vocab", "tgt_vocab"):
                least = 5  # SPECIALS and one word
            elif field.name == "seed":
                least = 0
            if value < least:
                raise InputError(f"{flag}: must be at least {least}")
            if value > most.get(field.name, 10**9):
                raise InputError(f"{flag}: must be at most {most.get(field.name, 10**9):,}")
        if field.name in ("dropout", "dropout_out", "smoothing") and not 0 <= value < 1:
            raise InputError(f"{flag}: must be at least 0 and below 1")
        if field.type is float and not 0 <= value < math.inf:
            raise InputError(f"{flag}: must be at least 0 and finite")


def saved_config(path, saved, Config, flags):
    """The Config of a checkpoint, updated with flags; rejects those that do not fit its weights."""
    if saved["script"] != Path(inspect.getfile(Config)).stem:
        raise InputError(f"{path}: made by {saved['script']}.py; use that script")
    names = [field.name for field in dataclasses.fields(Config)]
    removed = [name for name in saved["config"] if name not in names]
    if removed:
        flag = "--" + removed[0].replace("_", "-")
        missing = f"trained with {flag}, which this script does not have"
        raise InputError(f"{path}: {missing}; add it to Config, or use the script that has it")
    config = vars(Config()) | saved["config"]  # a field added since takes its default
    try:
        Config(**config)
    except InputError as error:  # a choice that has since been removed
        raise InputError(f"{path}: trained with {error}") from None
    fixed = {}
    for name in names[: names.index("lr")]:  # text, model and optimizer are fixed; the rest is not
        value = flags.get(name, config[name])
        unused = name in ("src_vocab", "tgt_vocab") and value > config[name]  # only a maximum
        unused |= name == "tgt_vocab" and config["share_vocab"]  # --src-vocab is the size of both
        if value != config[name] and not unused:
            flag = f"--{name.replace('_', '-')} {config[name]}, not {value}"
            raise InputError(f"{path}: trained with {flag}; leave it out, or start a new run")
        fixed[name] = config[name]
    return Config(**config | flags | fixed)


def check_files(paths, from_checkpoint):
    """Rejects pipes, which cannot be read twice, and missing files that a checkpoint names."""
    for path in map(Path, paths):
        if path.exists() and not path.is_file():  # such as <(zcat train.en.gz)
            problem = "not a regular file, but training reads it repeatedly"
            raise InputError(f"{path}: {problem}; save its content as a file")
        if from_checkpoint and not path.exists():
            remedy = "resume in the folder where the run started, or pass --train and --valid"
            raise InputError(f"{path}: not found, but this run needs it; {remedy}")


class Corpus:
    """Training, validation and test pairs: from text files, or the built-in corpus."""

    def __init__(self, cfg, train, valid, saved):
        from_checkpoint = not train
        train, valid = (train, valid) if train else saved.get("files", (None, None))
        check_files((*(train or ()), *(valid or ())), from_checkpoint)
        max_len = cfg.max_len or (100 if train else 30)
        if train:
            self.valid = self.test = list(read_pairs(*valid))
            self.test_name = "validation set"
            self.examples = [source for source, _ in self.valid[:100]]
        else:
            built_in = toy(50000, max_len=max_len)
            self.valid = toy(500, max_len=max_len, split="valid")
            self.test = toy(1000, max_len=max_len, split="test")
            self.test_name = "test set"
            self.examples = [EXAMPLE.split(), *(source for source, *_ in self.test[:99])]

        def training_pairs():  # called twice: to count words, then to encode them
            self.skipped = 0
            pairs = read_pairs(*train) if train else built_in
            for pair in pairs:
                if not train or all(0 < len(sentence) <= max_len for sentence in pair):
                    yield pair
                else:
                    self.skipped += 1

        if "vocabularies" in saved:
            self.vocabularies = [Vocabulary(words) for words in saved["vocabularies"]]
        else:
            options = (cfg.src_vocab, cfg.tgt_vocab), cfg.min_count, cfg.share_vocab
            self.vocabularies = build_vocabularies(training_pairs(), *options)
        self.train = Bitext(training_pairs(), self.vocabularies)
        if len(self.train) == 0:
            raise InputError(f"{train[0]}: no pair of 1 to {max_len} words; raise --max-len")
        valid_words = repr([pair[:2] for pair in self.valid]).encode()
        checksum = zlib.crc32(b"".join([*self.train.tokens, valid_words]))
        if checksum != saved.get("checksum", checksum):
            changed = "--resume: the training or validation text has changed since the run started"
            raise InputError(f"{changed}; pass the original text, or start a new run")
        log = saved.get("log", [])
        if log and log[-1]["step"] >= cfg.steps and RANK == 0:
            to_stderr("--resume: nothing left to train; raise --steps to train longer")
        words = [vocabulary.words for vocabulary in self.vocabularies]
        self.about = dict(files=(train, valid), vocabularies=words, checksum=checksum)
        self.sizes = dict(src_vocab=len(words[0]), tgt_vocab=len(words[1]))

    def __str__(self):
        unknown = max((side == UNK).sum() / (side > EOS).sum() for side in self.train.tokens)
        pairs = f"{len(self.train):,} training pairs ({self.skipped:,} skipped)"
        vocabularies = "vocabularies of {src_vocab:,} and {tgt_vocab:,} words".format(**self.sizes)
        return f"{pairs}, {vocabularies}, at most {unknown:.1%} of words unknown"


def report_unknown(sentences, vocabulary, hint=""):
    unknown = [word for sentence in sentences for word in sentence if word not in vocabulary]
    if unknown:
        noun = "word" if len(unknown) == 1 else "words"
        to_stderr(f"{len(unknown):,} unknown {noun}: {' '.join(unknown[:10])}{hint}")


def read_stdin(vocabulary):
    """Yields lists of up to 4,000 sentences, or of one in a terminal; reports unknown words."""
    in_terminal = os.isatty(0)
    hint = f" (the vocabulary has {len(vocabulary):,} words; write as in the training text, "
    hint += "probably in lower case and with spaces around punctuation)"
    while True:
        if in_terminal:
            to_stderr("> ", end="")
        lines = list(itertools.islice(sys.stdin.buffer, 1 if in_terminal else 4000))
        if not lines:
            return
        sentences = [to_words(line.decode(errors="replace")) for line in lines]
        if in_terminal and sentences == [[]]:
            continue
        report_unknown(sentences, vocabulary, hint if in_terminal else "")
        yield sentences


def write(path, content, save=None):
    """Replaces a file atomically with bytes, or with what save(content, file) writes."""
    if RANK > 0:  # only the first process writes
        return
    if save:  # to memory first, because torch.save crashes when the disk is full
        buffer = io.BytesIO()
        save(content, buffer)
        content = buffer.getbuffer()
    temporary = Path(f"{path}.{os.getpid()}.tmp")  # two processes may resume the same run
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        kept = "the old file is kept; free disk space or check permissions"
        raise InputError(f"{path}: not written ({error.strerror}); {kept}") from None


def to_stderr(message, end="\n"):
    """Writes a line to stderr. If that is not possible, training and translating go on."""
    try:
        tqdm.write(str(message), file=sys.stderr, end=end)  # above a progress bar
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def write_log(out, log):  # one line per validation; the last line of a finished run is its result
    write(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log).encode())


def read_checkpoint(path, load):
    """The content of a checkpoint; load is torch.load, which this file does not import."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()  # compares checksums, which torch.load does not
    except FileNotFoundError:
        raise InputError(f"{path}: not found; train a model first, or name another run") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    except Exception as error:  # a damaged archive can raise many kinds of errors
        wrong = error
    if wrong:
        raise InputError(f"{path}: damaged ({wrong}); restore the file, or train again")
    try:
        saved = load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # not only weights, or another kind of archive
        saved = None
    if not isinstance(saved, dict) or not {"script", "config", "vocabularies"} <= saved.keys():
        raise InputError(f"{path}: not a checkpoint of these scripts; name another file")
    return saved


@contextlib.contextmanager
def one_line_errors(out_of_memory):
    """Turns user errors, and torch's class of out-of-memory errors, into one line and status 2."""
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:  # closed by the caller, as by 2>&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if hasattr(sys.stdout, "reconfigure"):  # the same bytes on every system; not in notebooks
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        to_stderr("interrupted; if this was training, --resume continues from the last validation")
        sys.exit(130)
    except out_of_memory:
        advice = "in training, lower --batch-tokens or raise --accumulate; else use --device cpu"
        to_stderr(f"out of GPU memory; {advice}")
        sys.exit(2)
    except (InputError, OSError) as error:
        to_stderr(error)
        sys.exit(2)


def log_validation(out, log, smoothing):
    """Writes log.jsonl and shows its last line."""
    write_log(out, log)
    line = dict(log[-1], note="last batch, with label smoothing" if smoothing else "last batch")
    if RANK == 0:
        text = "step {step}, loss {loss:.3f} ({note}), valid {valid_loss:.3f}, {seconds:.0f} s"
        to_stderr(text.format(**line))


def format_scores(result, name):  # the scores of a test set in two lines
    scores = "loss {loss:.4f}, perplexity {ppl:.3f}, BLEU {bleu:.2f}"
    scores += "" if result["aer"] is None else ", AER {aer:.3f}"
    lengths = ", ".join(f"{k}: {v:.1f}" for k, v in result["bleu_by_length"].items())
    return f"{name}: {scores.format(**result)}\nBLEU by source length: {lengths}"


def report(out, log, result, name, pairs, alphas, gib):
    """Writes the result and the alignments of a finished run, and prints a summary."""
    speed = log[-1]["tokens"] / log[-1]["seconds"]
    result = dict(final=True, **result, tokens_per_second=speed, gpu_memory_gib=gib)
    write_log(out, [*log, result])
    write_alignments(out / "align", pairs, alphas)
    print("", *map(" ".join, pairs[0]), "", heatmap(*pairs[0], alphas[0]), "", sep="\n")
    memory = f", {gib:.2f} GiB of GPU memory" if gib else ""
    total = f"{result['seconds']:.0f} s for training and scoring; all files are in {out}/"
    print(format_scores(result, name), f"{speed:,.0f} tokens/s{memory}, {total}", sep="\n")


# ---- 5. the built-in corpus, a grammar of English and French: not needed for your own text -------
EXAMPLE = "the agreement on the european economic area was signed in august 1992 ."  # Bahdanau
# A line is "role kind kind ...: entry, entry, ..."; the fields of an entry depend on the role:
#   noun (kind: what it denotes)    city/cities ville f    English[/plural] French gender
#   before, quality, origin, field  red rouge rouge        adjective: English masculine feminine
#   the, a                          my mon ma              determiner, like an adjective
#   verb (kind: object, or être)    keep/kept/kept gard    English[/past/participle], then the stem
#     of an -er verb, or je/nous/vous/il/ils/participle/infinitive, as in vois/voyons/.../vu/voir
#   subject, object                 he il 3 m              pronoun: English French person gender;
#     persons are 0: je, 1: nous, 2: vous, 3: il, 4: ils; an object lists the subjects it can have
#   where, about, agent             near près+de place     preposition: English French noun's kind
#   be, être, avoir, can, must      suis, sommes, ...      a form for each of the five persons
#   vowel                           le l'                  a word, and its form before a vowel
#   degree, adverb, month, year, joint  august août        any other word: English French
#   subjects, persons, does, tense  past, past, have       choices; a repeated one is more likely
LEXICON = """
noun person: man/men homme m, woman/women femme f, boy garçon m, girl fille f, king roi m
noun person: queen reine f, friend ami m, child/children enfant m, nurse infirmière f
noun person: sister sœur f, minister ministre m, doctor médecin m
noun animal: cat chat m, dog chien m, bird oiseau m, horse cheval m, animal animal m, cow vache f
noun thing: mat tapis m, pie tarte f, book livre m, car voiture f, hat chapeau m, tree arbre m
noun place: garden jardin m, market marché m, house maison f, school école f, city/cities ville f
noun ground: street rue f, park parc m, forest forêt f, field champ m, village village m
noun idea: agreement accord m, treaty/treaties traité m, law loi f, report rapport m, plan plan m
noun idea: measure mesure f, reform réforme f, budget budget m, decision décision f
noun topic: area zone f, union union f, crisis/crises crise f, problem problème m

the singular: the le la, the le la, the le la, this ce cette, my mon ma, his son sa, her son sa
the plural: the les les, the les les, the les les, these ces ces, my mes mes, his ses ses
the plural: her ses ses
a singular: a un une
a plural: many beaucoup+de beaucoup+de, some des des, two deux deux

before person animal: young jeune jeune, poor pauvre pauvre
before animal: big gros grosse
before animal thing place ground: small petit petite
before thing idea topic: new nouveau nouvelle
before thing place ground: big grand grande, beautiful beau belle
quality person animal: tired fatigué fatiguée, famous célèbre célèbre, strange étrange étrange
quality thing: useful utile utile, black noir noire, white blanc blanche, red rouge rouge
quality thing: green vert verte
quality place ground: dangerous dangereux dangereuse, dark sombre sombre, empty vide vide
quality idea topic: important important importante, difficult difficile difficile
origin idea topic: european européen européenne, french français française
origin idea topic: italian italien italienne
field idea topic: economic économique économique, political politique politique
field idea topic: social social sociale
degree: too trop, very très

verb person pronoun animal ground: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, love aim
verb person pronoun: hit/hit/hit frapp, watch regard, admire admir, leave/left/left quitt
verb animal thing: find/found/found trouv
verb thing: keep/kept/kept gard, draw/drew/drawn dessin, forget/forgot/forgotten oubli
verb place: visit visit, love aim
verb ground: cross travers
verb idea: sign sign, adopt adopt, refuse refus, present présent, accept accept
verb topic: examine examin, discuss discut, mention mentionn
verb nothing: sleep/slept/slept dors/dormons/dormez/dort/dorment/dormi/dormir, sing/sang/sung chant
verb nothing: dance dans
verb être: arrive arriv, fall/fell/fallen tomb, stay rest
be present: am, are, are, is, are
be past: was, were, were, was, were
être present: suis, sommes, êtes, est, sont
être past: étais, étions, étiez, était, étaient
avoir: ai, avons, avez, a, ont
can: peux, pouvons, pouvez, peut, peuvent
must: dois, devons, devez, doit, doivent
adverb: not pas, not pas, never jamais, often souvent, always toujours

subject any because: i je 0 m, we nous 1 m, you vous 2 m, he il 3 m, she elle 3 f
subject any because: john jean 3 m, mary marie 3 f
subject any: they ils 4 m
object 2 3 4: me me 0 m, us nous 1 m
object 0 1 3 4: you vous 2 m
object 0 1 2 3 4: him le 3 m, her la 3 f, them les 4 m

where: on sur thing, under sous thing, with avec thing, with avec person
where: in dans place, in dans ground, near près+de place, near près+de ground
about: on sur topic, of de person
agent: by par person
month: january janvier, march mars, april avril, june juin, july juillet, august août
year: 1991 1991, 1992 1992, 1993 1993, 1994 1994, 1995 1995, 1996 1996, 1997 1997, 1998 1998
joint: and et, and et, but mais, or ou, because parce+que
vowel: le l', la l', je j', me m', ne n', de d', que qu', ce cet, ma mon, sa son
vowel: beau bel, nouveau nouvel

subjects: person, person, person, animal, idea, idea, topic, thing, place, ground
persons: person
does short: quality, nothing, être
does person: quality, nothing, être, person, pronoun, animal, thing, place, ground, idea, topic
does animal: quality, nothing, être, person, pronoun, animal, ground
does thing place ground idea topic: quality, passive, passive
tense short: present, past
tense long: present, present, past, past, have, can, must
"""
ALIVE = ("person", "animal", "pronoun")
JOINED = {"de le": "du", "de les": "des", "de des": "de", "de de": "de", "à le": "au"}
# French is a list of (word, positions of the English words it comes from), such as ("du", (2, 3)).
Phrase = collections.namedtuple("Phrase", "french person gender plural kind")
FORMS = "english masculine feminine base third past present infinitive"
# An adjective has the first three forms; a verb has all, the first three being its participle's.
Word = collections.namedtuple("Word", FORMS, defaults=[None] * 5)


def conjugate(english, french):  # the Word of a verb's entry
    if "/" in english:
        base, past, participle = english.split("/")
    else:
        base = english
        past = participle = base + ("d" if base.endswith("e") else "ed")
    third = base + ("es" if base.endswith(("s", "ch")) else "s")
    if "/" in french:
        *present, done, infinitive = french.split("/")
    else:
        present = [french + ending for ending in ("e", "ons", "ez", "e", "ent")]
        done = french + "é"
        infinitive = french + "er"
    return Word(participle, done, done + "e", base, third, past, present, infinitive)


def read_entry(role, entry):  # a Word, a list of fields, or a string if there is only one field
    fields = entry.split()
    if role == "verb":
        return conjugate(*fields)
    if role == "quality":  # used like a participle, which is a Word, too
        return Word(*fields)
    return fields if len(fields) > 1 else entry


def read_lexicon(lexicon):
    """{"role kind": [entry, ...]}, or {"role": [entry, ...]} for a role that has no kinds."""
    words = {}
    for line in lexicon.split("\n"):
        if not line:
            continue
        head, entries = line.split(": ")
        role, *kinds = head.split()
        keys = [f"{role} {kind}" for kind in kinds] if kinds else [role]
        for key in keys:
            found = [read_entry(role, entry) for entry in entries.split(", ")]
            words.setdefault(key, []).extend(found)
    return words


WORDS = read_lexicon(LEXICON)
BEFORE_VOWEL = dict(WORDS["vowel"])


def pluralize(word):  # a French adjective, participle or noun
    if word[-1] in "sx":
        return word
    if word.endswith("al"):
        word = word[:-1] + "u"  # animal, animaux
    return word + ("x" if word.endswith("au") else "s")


def inflect(masculine, feminine, gender, plural):
    word = feminine if gender == "f" else masculine
    return pluralize(word) if plural else word


def forms(word, kind, person, tense, negated):
    """(did, see, a, vu): the English auxiliary and verb, the French finite verb and the rest."""
    if kind in ("quality", "passive"):
        has_been = kind == "passive" and tense == "past"  # was signed: a été signé
        finite = WORDS["avoir" if has_been else f"être {tense}"][person]
        return WORDS[f"be {tense}"][person], word.english, finite, word.masculine
    if tense in ("can", "must"):
        return tense, word.base, WORDS[tense][person], word.infinitive
    third = person == 3
    if tense == "present" and negated:
        return "does" if third else "do", word.base, word.present[person], ""
    if tense == "present":
        return "", word.third if third else word.base, word.present[person], ""
    finite = WORDS["être present" if kind == "être" else "avoir"][person]
    if tense == "have":
        return "has" if third else "have", word.english, finite, word.masculine
    if negated:
        return "did", word.base, finite, word.masculine
    return "", word.past, finite, word.masculine


def contract(french):
    """Joins words as French does: le homme > l' homme, de le roi > du roi, ce ami > cet ami."""
    joined = []  # the last word first, because "de l' ami" keeps its l'
    after = ""
    for word, positions in reversed(french):
        if word == "dans":
            noun = joined[-2][0]  # after an article
            if f"{after} {noun}" in ("le marché", "l' école"):
                word = "à"  # au marché
        if f"{word} {after}" in JOINED:
            word = JOINED[f"{word} {after}"]
            _, more_positions = joined.pop()
            positions += more_positions
            after = joined[-1][0]
        if word in BEFORE_VOWEL and after[0] in "aâeéèêiîoôuhœ":  # each h here is silent
            word = BEFORE_VOWEL[word]
        joined.append((word, positions))
        after = word
    return joined[::-1]


class Grammar:
    """Each rule adds its English words to self.english and returns its French words with links."""

    def __init__(self, seed):
        self.random = random.Random(seed).random  # random() is at least 0 and below 1
        self.length = 0  # the number of English words to generate
        self.english = []  # the words so far
        self.topics = []  # the nouns of the last clause to which "because it" can refer
        self.completed = False  # whether a date can follow the last verb

    def pick(self, key):  # a random entry of the lexicon
        options = WORDS[key]
        return options[int(self.random() * len(options))]

    def room(self, keep):  # how many more words fit if `keep` are reserved for what follows
        return self.length - len(self.english) - keep

    def say(self, word):  # adds an English word; returns the link to it
        self.english.append(word)
        return (len(self.english) - 1,)

    def word(self, english, french):  # adds an English word; returns its French, split at "+"
        link = self.say(english)
        return [(word, link) for word in french.split("+")]

    def agree(self, key, gender, plural=False):  # a determiner or an adjective
        english, masculine, feminine = self.pick(key)[:3]  # a Word has more
        return self.word(english, inflect(masculine, feminine, gender, plural))

    def attach(self, key, keep, definite=False):  # a preposition and its noun
        english, french, kind = self.pick(key)
        return self.word(english, french) + self.noun(kind, keep, definite).french

    def sentence(self, length):  # about `length` English words, their French, links {(i, j), ...}
        self.length = length
        self.english = []
        keep = 1 if self.random() < 0.9 else 0  # for the period
        french = self.clause(keep)
        while self.room(keep) >= 4:
            french += self.word(*self.pick("joint")) + self.clause(keep)
        if keep:
            french += self.word(".", ".")
        french = contract(french)
        english = " ".join(self.english)
        english = re.sub(r"\ba (?=[ai]|e(?!u))", "an ", english)  # an agreement, a european law
        gold = {(i, j) for j, (_, positions) in enumerate(french) for i in positions}
        return english.split(), [word for word, _ in french], gold

    def clause(self, keep):  # a subject and what it does
        subject = self.subject("subjects", keep + 3)
        return subject.french + self.act(subject, keep)

    def subject(self, key, keep):
        """A noun phrase, a pronoun or a name; after "because" also a pronoun for a recent noun."""
        because = self.english[-1:] == ["because"]
        if because and self.topics and self.random() < 0.5:
            return self.pronoun(self.topics[0] if self.random() < 0.5 else self.topics[-1])
        if self.room(keep) > 0 and self.random() < 0.75:
            return self.noun(self.pick(key), keep)
        return self.someone("subject because" if because else "subject any")

    def pronoun(self, noun):  # replaces a noun, as a subject
        if noun.plural:
            english = "they"
        elif noun.kind == "person":
            english = "she" if noun.gender == "f" else "he"
        else:
            english = "it"
        french = inflect("il", "elle", noun.gender, noun.plural)
        return noun._replace(french=self.word(english, french))

    def someone(self, key):  # a pronoun or a name
        english, french, person, gender = self.pick(key)
        person = int(person)
        plural = person in (1, 4)  # nous and ils; vous is one person here
        return Phrase(self.word(english, french), person, gender, plural, "person")

    def noun(self, kind, keep, definite=False):
        """Determiner, adjectives, noun and, where there is room, its owner or more about it."""
        english, french, gender = self.pick(f"noun {kind}")
        plural = self.random() < 0.3
        owner = []
        if kind != "person" and self.random() < 0.1 and self.room(keep) >= 4:
            determiner, owner = self.owner(gender, plural)
        else:
            role = "the" if definite or self.random() < 0.75 else "a"
            determiner = self.agree(f"{role} plural" if plural else f"{role} singular", gender)
        before = []
        if self.random() < 0.25 and self.room(keep) >= 2:
            before = self.agree(f"before {kind}", gender, plural)
            if determiner[0][0] == "des":  # "des" becomes "de": de petits chats
                determiner = [("de", determiner[0][1])]
        after = owner
        roles = ("quality", "origin", "field") if kind in ("idea", "topic") else ("quality",)
        for role in roles:  # French has the reverse order: zone économique européenne
            if self.random() < 0.3 and self.room(keep) >= 2:
                after = self.agree(f"{role} {kind}", gender, plural) + after
        singular, _, irregular = english.partition("/")  # man/men, but cat, without its plural
        if plural:
            name = self.word(irregular or singular + "s", pluralize(french))
        else:
            name = self.word(singular, french)
        person = 4 if plural else 3
        phrase = Phrase(determiner + before + name + after, person, gender, plural, kind)
        if not owner:
            phrase.french.extend(self.more(phrase, keep))
        return phrase

    def owner(self, gender, plural):  # the king 's: the article before a noun, "du roi" after it
        owner = self.noun("person", keep=self.length, definite=True)  # no room for adjectives
        link = self.say("'" if self.english[-1].endswith("s") else "'s")
        article = "les" if plural else inflect("le", "la", gender, plural)
        return [(article, link)], [("de", link)] + owner.french

    def more(self, noun, keep):  # a relative clause, or what an idea is about, or nothing
        if self.random() < 0.3 and self.room(keep) >= 4:
            if self.random() < 0.6:
                qui = self.word("who" if noun.kind == "person" else "that", "qui")
                return qui + self.act(noun, keep)
            que = self.word("that", "que")
            subject = self.subject("persons", keep + 2)
            return que + subject.french + self.act(subject, keep, gap=noun)
        if self.room(keep) >= 3 and noun.kind == "idea" and self.random() < 0.35:
            return self.attach("about", keep, definite=True)
        return []

    def act(self, subject, keep, gap=None):
        """What the subject does or is; gap is an object already named: the cat that she saw."""
        room = self.room(keep)
        if gap:
            kind = gap.kind
        elif room < 3 and subject.kind in ALIVE:
            kind = self.pick("does short")
        else:
            kind = self.pick(f"does {subject.kind}")
        french = self.verb(kind, subject, room, gap)
        thing = None
        if not gap and f"noun {kind}" in WORDS:
            negated = french[0][0] == "ne"
            thing = self.noun(kind, keep, definite=negated)  # because "pas un" would be "pas de"
            french += thing.french
        if kind == "passive" and self.random() < 0.4 and self.room(keep) >= 3:
            french += self.attach("agent", keep)
        if not gap and kind != "quality":
            french += self.tail(keep)
        nouns = [noun for noun in (subject, thing) if noun and noun.person in (3, 4)]
        # "it" could be either in "the cat saw the dog because it was tired", so keep neither.
        self.topics = [] if kind in ALIVE else nouns
        return french

    def verb(self, kind, subject, room, gap):
        """The verb with auxiliary, adverb and pronoun."""
        is_state = kind in ("quality", "passive")
        role = "quality" if kind == "quality" else "verb"
        partner = subject.kind if is_state else kind  # decides which words fit
        word = self.pick(f"{role} {partner}")
        tense = self.pick("tense short" if is_state or room < 4 else "tense long")
        if tense == "present" and word.base == "hit":
            tense = "past"  # because "i hit her" could be present or past
        adverb, pas = "", ""
        if room >= 5 and self.random() < 0.3:
            adverb, pas = self.pick("adverb")
        self.completed = tense == "past" and kind != "quality" and adverb in ("", "not")
        auxiliary, english, finite, rest = forms(word, kind, subject.person, tense, adverb == "not")
        # English, from left to right: does, not, very, see
        if auxiliary == "can" and adverb == "not":
            auxiliary_at = adverb_at = self.say("cannot")
        else:
            auxiliary_at = self.say(auxiliary) if auxiliary else None
            adverb_at = self.say(adverb) if adverb else None
        very = kind == "quality" and room >= 3 and self.random() < 0.5
        degree = self.word(*self.pick("degree")) if very else []
        verb_at = self.say(english)
        pronoun = self.someone(f"object {subject.person}") if kind == "pronoun" else None
        # A participle agrees with the subject of "être" or with an object that precedes it.
        leader = subject if is_state or kind == "être" else (pronoun or gap)
        if leader and rest == word.masculine:
            rest = inflect(word.masculine, word.feminine, leader.gender, leader.plural)
        # French: ne, la, a, pas, été, très, vue
        finite_at = verb_at if auxiliary in ("", "do", "does") else auxiliary_at
        before = [("ne", adverb_at)] if pas in ("pas", "jamais") else []
        clitic = pronoun.french if pronoun else []
        after = [(pas, adverb_at)] if pas else []
        if kind == "passive" and tense == "past":
            after.append(("été", finite_at))
        last = [(rest, verb_at)] if rest else []
        if tense in ("can", "must"):  # je ne peux pas la voir
            return [*before, (finite, finite_at), *after, *clitic, *last]
        return [*before, *clitic, (finite, finite_at), *after, *degree, *last]

    def tail(self, keep):  # a place, a date (only after completed actions, only once) or nothing
        if self.random() < 0.3 and self.room(keep) >= 3:
            return self.attach("where", keep)
        if self.room(keep) < 3 or not self.completed or self.random() < 0.6:
            return []
        self.completed = False
        date = self.word("in", "en") + self.word(*self.pick("month"))
        return date + self.word(*self.pick("year"))


def toy(n, seed=0, max_len=30, split="train"):
    """The built-in corpus: n triples (source, target, gold links), 3 to max_len source words."""
    splits = ["train"] * 8 + ["valid", "test"]
    if split not in splits:
        raise ValueError(f"{split}: must be train, valid or test")
    if not 3 <= max_len <= 1000:
        raise InputError(f"--max-len {max_len}: the built-in corpus needs 3 to 1000")
    grammar = Grammar(f"{seed} {split}")
    pairs = []
    while len(pairs) < n:
        length = 3 + int((max_len - 2) * grammar.random() ** 2)  # short ones are more frequent
        pair = grammar.sentence(length)
        home = splits[zlib.crc32(" ".join(pair[0]).encode()) % 10]
        if home == split and 3 <= len(pair[0]) <= max_len:
            pairs.append(pair)
    return pairs
