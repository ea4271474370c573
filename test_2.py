"""Text, batches, scores, files, the command line and faults.

python -m pytest -q test_2.py            all that is fast
python -m pytest -q -m slow test_2.py    random input, random kills, many lines
"""

# shared
import collections
import contextlib
import dataclasses
import gzip
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import typing
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import sacrebleu
import torch

import data
from data import BOS, EOS, PAD, UNK

HERE = Path(__file__).parent

warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # there is one: slow
torch.set_num_threads(1)  # the models here are tiny
torch.backends.mkldnn.set_flags(False)  # as the scripts do

SCRIPTS = dict(  # each with sizes to test it by
    seq2seq_lstm=dict(emb=6, hidden=5, layers=2),
    bahdanau=dict(emb=6, hidden=5, attn=7, maxout=4),
    luong=dict(emb=6, hidden=5, layers=2, D=2),
    transformer=dict(d_model=8, d_ff=10, heads=2, layers=2),
)
scripts = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(autouse=True)
def slow_when_asked(request):
    slow = request.node.get_closest_marker("slow")
    if slow and "slow" not in request.config.option.markexpr:
        pytest.skip("python -m pytest -m slow")


def script(name):
    return importlib.import_module(name.split()[0])


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape
    assert (a - b).abs().max() < tolerance


# end of shared

# ---- vocabularies and batches ---------------------------------------------------------------


def test_vocabulary():
    """The most frequent words come first, those of a kind by the alphabet; marks are no words."""
    pairs = [(["b", "a", "a", "<pad>"], ["x"]), (["a", "c", "b"], ["x", "y", "<unk>"])]
    source, target = data.learn(pairs)[1]
    assert source.words == ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c"]
    assert [source[w] for w in ("a", "nowhere", "<pad>", "<unk>")] == [4, UNK, UNK, UNK]
    assert source.decode([4, 6, UNK, EOS, PAD, PAD]) == ["a", "c", "<unk>"]
    assert data.learn(pairs, min_count=2)[1][0].words[4:] == ["a", "b"]
    one, two = data.learn(pairs, joint=True)[1]
    assert one.words == two.words == [*data.SPECIALS, "a", "b", "x", "c", "y"]
    bitext, (source, _) = data.learn(pairs, sizes=(5, 5))
    assert source.words[4:] == ["a"]
    assert bitext.unknown() == 4 / 7  # of the side that has more of them


def test_pairs_left_out():
    """A pair with an empty or too long side is left out of training, and counted."""
    pairs = [(["a"], ["b"]), ([], ["b"]), (["a"], []), (["a"] * 4, ["b"]), (["a"], ["b"] * 4)]
    bitext, vocabularies = data.learn(pairs, max_len=3)
    for found in (bitext, data.Bitext(pairs, vocabularies, 3)):
        assert (len(found), found.skipped) == (1, 4)
        src, tgt = found.batch(np.array([0]))
        assert (src.tolist(), tgt.tolist()) == ([[4, EOS]], [[BOS, 4, EOS]])
    assert len(data.Bitext(pairs, vocabularies)) == 5  # to score and translate, all are there


def test_batches():
    """A batch has one source length, and targets padded a little; none is too large."""
    pairs = [*data.toy(1500, max_len=20), ([], []), ([], ["x"]), (["a"], [])]
    bitext, _ = data.learn(pairs)
    made = list(itertools.islice(bitext.batches(600, 20, 1), 200))
    for src, tgt in made:
        assert src.dtype == tgt.dtype == np.int64
        assert src.size + tgt.size <= 600
        assert (src[:, -1] == EOS).all()
        assert (src[:, :-1] > EOS).all()
        assert (tgt[:, 0] == BOS).all()
        assert ((tgt == PAD) == (np.cumsum(tgt == EOS, 1) > (tgt == EOS))).all()
    assert max(len(src) for src, _ in made) == 20
    assert max(src.size + tgt.size for src, tgt in made) > 540
    assert sum((tgt == PAD).sum() for _, tgt in made) < 0.12 * sum(tgt.size for _, tgt in made)
    assert len({tgt.shape[1] for _, tgt in made}) < 12  # few shapes, which come again
    scored = bitext.in_order(500)
    assert sorted(itertools.chain(*scored)) == list(range(len(pairs)))
    assert all(len(rows) * sum(n[rows].max() for n in bitext.lengths) <= 500 for rows in scored)
    sources = [bitext.batch(rows)[0] for rows in scored]
    assert sum((src == PAD).sum() for src in sources) < 0.05 * sum(src.size for src in sources)


def test_the_step_alone_says_which_batch():
    """Every epoch holds every pair once, in other company; from step k on comes what comes k-th."""
    bitext, _ = data.learn(data.toy(1500, max_len=20))
    bitext.batch = lambda rows: sorted(rows.tolist())  # numbers of pairs, not their words
    stream = list(itertools.islice(bitext.batches(600, 20, 1), 600))
    n = next(k for k in range(600) if sum(map(len, stream[:k])) >= 1500)
    epochs = [stream[:n], stream[n : 2 * n], stream[2 * n : 3 * n]]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(1500))
        assert len(set(map(str, epoch)) & set(map(str, epochs[0]))) < 0.3 * n or epoch is epochs[0]
        assert list(map(len, epoch)) != list(map(len, epochs[0])) or epoch is epochs[0]
    for step in (0, 1, 7, n - 1, n, n + 5, 2 * n):
        assert (
            list(itertools.islice(bitext.batches(600, 20, 1, step), 5)) == stream[step : step + 5]
        )
    assert stream[:n] != list(itertools.islice(bitext.batches(600, 20, 2), n))


# ---- scores ---------------------------------------------------------------------------------


def their_bleu(hypotheses, references):
    """sacreBLEU of lists of words."""
    said, wanted = ([" ".join(words) for words in side] for side in (hypotheses, references))
    return pytest.approx(sacrebleu.corpus_bleu(said, [wanted], tokenize="none").score, abs=1e-6)


def test_bleu_equals_sacrebleu():
    """On random text, with empty sentences, with very short ones, and by the source's length."""
    assert data.bleu([], []) == 0
    for seed in range(100):
        r = random.Random(seed)
        references = [r.choices("abcde", k=r.randint(seed % 2, 12)) for _ in range(r.randint(1, 6))]
        hypotheses = [r.choices("abcde", k=r.randint(0, 3 * (seed % 5))) for _ in references]
        for k in range(seed % 3, len(references)):
            hypotheses[k] = [w if r.random() < 0.8 else r.choice("abcfg") for w in references[k]]
        assert data.bleu(hypotheses, references) == their_bleu(hypotheses, references)
    sources = [["x"] * n for n in (0, 1, 10, 11, 20, 41)]
    references = [list("abcdef")] * 6
    hypotheses = [list("abcdef"), list("abcdxx"), [], list("abxdef"), [], list("abcdef")]
    assert data.bleu_by_length(sources, hypotheses, references) == {
        "1-10": their_bleu(hypotheses[:3], references[:3]),
        "11-20": their_bleu(hypotheses[3:5], references[3:5]),
        "41-50": pytest.approx(100),
    }


def test_aer_by_hand():
    """Of the corpus, and no mean of sentences."""
    gold, guess = {(0, 0), (1, 2), (2, 1)}, {(0, 0), (1, 1)}
    assert [data.aer([x], [gold]) for x in (gold, {(5, 5)})] == [0, 1]
    assert data.aer([set()], [set()]) == 0
    assert data.aer([guess], [gold]) == pytest.approx(1 - 2 * 1 / (2 + 3))
    assert data.aer([guess, gold], [gold, gold]) == pytest.approx(1 - 2 * 4 / (5 + 6))


# ---- alignment files and pictures -----------------------------------------------------------

ALPHA = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]])
PAIR = ["red", "car"], ["voiture", "rouge", "."]


def test_alignment_files(tmp_path):
    """.npz: the soft weights; .txt: each target word's maximum, no end marks; .svg: a picture."""
    data.write_alignments(tmp_path / "align", [PAIR, (["a"], [])], [ALPHA, np.ones((1, 2)) / 2])
    soft = np.load(tmp_path / "align.npz")
    assert soft["source"].tolist() == ["red car", "a"]
    assert soft["target"].tolist() == ["voiture rouge .", ""]
    assert np.array_equal(soft["alpha_0"], ALPHA)
    assert soft["alpha_1"].shape == (1, 2)
    assert (tmp_path / "align.txt").read_text() == "0-1 1-0\n\n"
    root = ElementTree.parse(tmp_path / "align.svg").getroot()
    cells = [(float(c.get("y")), float(c.get("x")), c) for c in root.iter() if "rect" in c.tag]
    shades = [float(cell.get("opacity")) for _, _, cell in sorted(cells, key=lambda c: c[:2])]
    assert np.allclose(shades, 0.07 + 0.93 * ALPHA[:3, :2].flatten(), atol=0.01)
    rows = data.heatmap(*PAIR, ALPHA).split("\n")
    assert [row.split() for row in rows[:3]] == [["r", "c"], ["e", "a"], ["d", "r"]]
    assert rows[3:6] == ["voiture ··▓▓", "  rouge ▓▓░░", "      . ░░░░"]


ODD = {
    "many words": (["word"] * 3000, ["mot"] * 3000),
    "long words": (["x" * 5000, "y"], ["z" * 5000]),
    "control characters": (["\x1b[31m", "\0", "<&>\"'", "\ufffe", "\u202e"], ["a\nb", "]]>"]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("kind", ODD)
def test_pictures_are_bounded(kind):
    """Whatever the sentence, the picture is small and well formed, and the heatmap printable."""
    source, target = ODD[kind]
    alpha = np.broadcast_to(0.5, (len(target) + 1, len(source) + 1))
    picture = data.svg(source, target, alpha)
    root = ElementTree.fromstring(picture)
    assert len(picture) < 500_000
    assert max(float(root.get("width")), float(root.get("height"))) < 2000
    lines = data.heatmap(source, target, alpha).split("\n")
    assert (len(lines) < 100, max(map(len, lines)) < 200) == (True, True)
    assert all(line.isprintable() for line in lines)


# ---- the command line -----------------------------------------------------------------------

TEXT = ["--train", "train.en", "train.fr", "--valid", "valid.en.gz", "valid.fr.gz"]
PAIRS = data.toy(60, max_len=9)


def main(name, *args):
    """The command line, in this process."""
    script(name).main([*name.split()[1:], *map(str, args), "--device", "cpu"])


def small(name):
    """A command that trains in a moment: eight steps, two looks at valid."""
    flags = "--warmup 1 --lr 0.2 --dropout 0.1 --tokens 300 --every 4 --steps 8"
    for field, size in SCRIPTS[name.split()[0]].items():
        flags += f" --{field.replace('_', '-')} {2 * size}"
    return [name, *TEXT, *flags.split(), "--out"]


SMALL = small("bahdanau")


def begin(work, *args, stdin=b""):
    """The number of a child process that does work(*args); it speaks to files."""
    child = os.fork()
    if child:
        return child
    status, number = 99, os.getpid()
    with open(f"{number}.out", "w") as sys.stdout, open(f"{number}.err", "w") as sys.stderr:
        try:
            Path(f"{number}.in").write_bytes(stdin)
            os.dup2(os.open(f"{number}.in", os.O_RDONLY), 0)
            work(*args)
            status = 0
        except SystemExit as stop:
            status = stop.code
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)


def end(child):
    """(exit status, negative for a signal; stdout; the lines on stderr) of a child process."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    stdout, stderr = (Path(f"{child}.{name}").read_text() for name in ("out", "err"))
    for name in ("in", "out", "err"):
        Path(f"{child}.{name}").unlink()
    return status, stdout, stderr.splitlines()


def run(*command, stdin=b""):
    """stdout and the lines on stderr of a command that ends well."""
    status, stdout, lines = end(begin(main, *command, stdin=stdin))
    assert status == 0, lines
    return stdout, lines


def refusal(*command):
    """The one line of a command that ends with status 2."""
    status, _, lines = end(begin(main, *command))
    assert (status, len(lines)) == (2, 1), lines
    return lines[0]


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A folder with text, gzipped where it is to validate on, and a finished run."""
    folder = tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder):
        for side, language in enumerate(("en", "fr")):
            lines = [" ".join(pair[side]) + "\n" for pair in PAIRS]
            Path(f"train.{language}").write_text("".join(lines), encoding="utf-8")
            Path(f"valid.{language}.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
        run(*SMALL, "run")
    return folder


@pytest.fixture
def folder(template, tmp_path, monkeypatch):
    """A copy of the template, as the working directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder="."):
    """All files there are, with what is in them."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def read_log(out):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def checkpoint(*path):
    return torch.load(Path(*path), weights_only=True)


def same(a, b):
    """Are two things equal, bit for bit, but for what a clock says?"""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        clock = "seconds", "tokens_per_second"
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in clock)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_run(a, b):
    """Two runs ended with the same weights, optimisers, logs and alignments."""
    for file in ("last.pt", "model.pt"):
        assert same(checkpoint(a, file), checkpoint(b, file)), file
    assert same(read_log(a), read_log(b))
    assert Path(a, "align.txt").read_bytes() == Path(b, "align.txt").read_bytes()


VARIANTS = ["transformer --joint", "luong --score location", "luong --score concat --input-feeding"]
VARIANTS += [f"luong --score dot --input-feeding --attention local-{kind}" for kind in "mp"]


@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS])
def test_train_translate_align(name, folder):
    """Train on one's own text, then use the folder alone; what only reads writes nothing."""
    stdout, _ = run(*small(name), "new")
    assert "60 pairs, 0 left out" in stdout
    *looks, result = read_log("new")
    assert [line["step"] for line in looks] == [4, 8]
    assert {"final", "aer", "bleu_by_length", "seconds", "seed"} <= set(result)
    scores = "loss {loss:.4f}, perplexity {ppl:.3f}, BLEU {bleu:.2f}\n".format(**result)
    assert scores in stdout
    soft = np.load("new/align.npz")
    assert np.allclose(soft["alpha_0"].sum(1), 1, atol=1e-5)
    assert len(Path("new/align.txt").read_text().splitlines()) == len(soft["source"]) == 4
    words, config = (checkpoint("new/model.pt")[key] for key in ("words", "config"))
    assert (words[0] == words[1]) == config["joint"]
    before, use = contents(), (name.split()[0], "--out", "new")
    lines = ["", *(" ".join(source) for source, _, _ in PAIRS[:3]), "", "words nobody knows"]
    stdout, _ = run(*use, "--translate", stdin="\n".join(lines).encode())
    assert stdout.split("\n")[:5] == ["", *soft["target"][1:], ""]
    assert stdout.count("\n") == 6
    stdout, _ = run(*use, "--align", *TEXT[1:3])
    for line, (source, target, _) in zip(stdout.splitlines(), PAIRS, strict=True):
        links = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert all(i < len(source) and j < len(target) for i, j in links)
        assert len({j for _, j in links}) == len(links)
    assert scores in run(*use, "--test", *TEXT[4:])[0]
    assert contents() == before


def test_the_built_in_corpus(folder, monkeypatch):
    """Without files: the grammar's text, scored against gold, and the paper's own sentence."""
    toy = data.toy
    monkeypatch.setattr(data, "toy", lambda n, **how: toy(n // 500 + 3, **how))
    stdout, _ = run("bahdanau", *SMALL[7:-1], "--max-len", 8)
    assert "103 pairs" in stdout
    assert f"\n{data.EXAMPLE}\n" in stdout
    assert 0 <= read_log("runs/bahdanau")[-1]["aer"] <= 1


def test_which_weights_are_kept(folder, monkeypatch):
    """Those that scored best on valid or, with --average N, the mean of the last N looks'."""
    for average in (1, 3):
        losses = iter([4.0, 1.0, 3.0, 2.0])
        monkeypatch.setattr(script("bahdanau"), "loss_of", lambda *_, x=losses: next(x, 5.0))
        run(*SMALL, f"mean-{average}", "--steps", 4, "--every", 1, "--average", average)
    recent = checkpoint("mean-3/last.pt")["recent"]
    assert same(checkpoint("mean-1/model.pt")["model"], recent[0])  # the second of four
    assert same(checkpoint("mean-1/last.pt")["recent"], recent[2:])
    for key, p in checkpoint("mean-3/model.pt")["model"].items():
        close(p, sum(weights[key] for weights in recent) / 3, 1e-6)


def test_load(folder):
    """A folder or a checkpoint, str or Path; flags change how it decodes, and not what it is."""
    load, saved = script("bahdanau").load, checkpoint("run/model.pt")
    assert set(saved) == {"script", "config", "words", "files", "model"}
    for path in ("run", Path("run"), "run/model.pt", Path("run/model.pt")):
        model, vocabularies = load(path)
        assert same(dict(model.state_dict()), dict(saved["model"]))
        assert [vocabulary.words for vocabulary in vocabularies] == saved["words"]
        assert not model.training
    assert load("run", beam=3)[0].cfg.beam == 3
    with pytest.raises(data.InputError, match="--hidden"):
        load("run", hidden=3)


def test_folders_without_out(folder):
    """Each training gets a folder of its own; whoever uses a run gets the latest one."""

    def out(*args):
        return data.parse_flags(script("luong").Config, "", ["cpu"], args).out.as_posix()

    with pytest.raises(data.InputError, match="no run of luong.py"):
        out("--translate")
    assert out() == "runs/luong"
    for name, age in (("luong", 100), ("luong-2", 10), ("luong-3", 50), ("bahdanau", 0)):
        shutil.copytree("run", Path("runs", name))
        os.utime(Path("runs", name, "log.jsonl"), (time.time() - age,) * 2)
    assert (out(), out("--out", "there")) == ("runs/luong-4", "there")
    for mode in (["--translate"], ["--resume"], ["--align", "a", "b"], ["--test", "a", "b"]):
        assert out(*mode) == "runs/luong-2"


def test_progress(folder):
    """A line at each look, or a bar where there is a terminal; in a thread as in any other."""
    look = "step {step}, loss {loss:.3f}, valid {valid_loss:.3f}, 0 s"
    wanted = [look.format(**line) for line in read_log("run")[:-1]]
    assert [re.sub(r"\d+ s$", "0 s", line) for line in run(*SMALL, "new")[1]] == wanted
    terminal, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    terminal.isatty = lambda: True
    with contextlib.redirect_stderr(terminal):
        thread = threading.Thread(target=main, args=[*SMALL, "newer"])
        thread.start()
        thread.join()
    same_run("run", "newer")
    assert "8/8" in terminal.getvalue()
    assert wanted[1][8:-5] in terminal.getvalue()
    assert signal.getsignal(signal.SIGINT) is handler


@scripts
def test_help_explains_every_flag(name, folder):
    """Each field of Config is a flag, with an explanation and its default; the modes, too."""
    text, _ = run(name, "--help")
    fields = {field.name: field.default for field in dataclasses.fields(script(name).Config)}
    modes = ["train", "valid", "out", "translate", "align", "test", "paper", "resume", "device"]
    for flag in [*modes, *fields]:
        entry = re.search(rf"^  --{flag.replace('_', '-')}\b(.*?)^( ? ?\S|\Z)", text, re.M | re.S)
        words = " ".join(entry[1].split())
        assert len(words) > 20, flag
        assert flag in modes or re.search(rf"\[{fields[flag]}\W", words), flag


# ---- faults ---------------------------------------------------------------------------------


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(*_):
    raise KeyboardInterrupt


def spoil_weights(model, *_):
    next(model.parameters()).data.fill_(math.nan)


def spoil_loss(bar, line):
    line["loss"] = math.inf


def fill_disk(path, content):
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2,) * 2)


def protect_disk(path, *_):
    raise OSError(30, "Read-only file system", str(path))


def sabotaged(owner, function, number, fault, *command):
    """What becomes of a command if fault() happens in the number-th call of owner.function."""
    owner = script(owner) if isinstance(owner, str) else owner
    count, real = itertools.count(1), getattr(owner, function)

    def faulty(*args, **how):
        if next(count) == number:
            fault(*args)
        return real(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, faulty)
        return end(begin(main, *command))


STOPPED, WHOLE = (130, "--resume"), "what was there is whole"
FAULTS = [
    ("bahdanau", "update", 1, interrupt, *STOPPED),
    ("bahdanau", "update", 3, interrupt, *STOPPED),
    ("bahdanau", "update", 3, spoil_weights, 2, "step 4: the loss is not finite"),
    (data, "show", 2, spoil_loss, 2, "step 4: the loss is not finite"),
    (os, "mkdir", 1, protect_disk, 2, "new: Read-only file system"),
    *((os, "fsync", n, protect_disk, 2, f"Read-only file system; {WHOLE}") for n in (1, 5)),
    *((data, "write", n, fill_disk, 2, f"File too large; {WHOLE}") for n in (1, 4, 5, 8)),
    *((data, "write", n, kill, -signal.SIGKILL, "") for n in range(1, 11)),
    *((os, "fsync", n, kill, -signal.SIGKILL, "") for n in range(1, 11)),
    *((os, "replace", n, kill, -signal.SIGKILL, "") for n in range(1, 11)),
]


@pytest.mark.parametrize("owner, function, number, fault, status, message", FAULTS)
def test_faults(owner, function, number, fault, status, message, folder):
    """One line, what was saved before is whole, and --resume ends as if nothing had been."""
    command = [*SMALL, "new", "--steps", 4, "--every", 2, "--average", 2]
    found, _, lines = sabotaged(owner, function, number, fault, *command)
    progress = [line for line in lines if not line.startswith("step") or "finite" in line]
    assert (found, len(progress)) == (status, 1 if message else 0), lines
    assert message in "".join(progress)
    assert fault is kill or not list(Path("new").glob("*.tmp"))
    for path in Path("new").glob("*.pt"):
        checkpoint(path)  # is whole
    run(*command, *["--resume"] * Path("new").exists())
    run(*command, "--out", "whole")
    same_run("whole", "new")


@scripts
def test_killed_three_times(name, folder):
    """kill -9 at some step, three times in a row: not a bit differs from a run left alone."""
    command = [*small(name), "parts", "--steps", 14]
    for step, more, saved in ((2, [], 0), (6, ["--resume"], 4), (7, ["--resume"], 8)):
        assert sabotaged(name, "update", step, kill, *command, *more)[0] == -signal.SIGKILL
        assert not saved or checkpoint("parts/last.pt")["step"] == saved
    run(*command, "--resume")
    run(*command, "--out", "whole")
    same_run("whole", "parts")


def test_writing(tmp_path, monkeypatch):
    """On the disk before it takes its place; under a name that no other process uses."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda number: print(Path("file").read_text()))
    monkeypatch.setattr(os, "replace", lambda part, path: print(part, Path(part).read_text()))
    said = [end(begin(data.write, "file", b"new"))[1].split() for _ in range(2)]
    assert [words[::2] for words in said] == [["old", "new"], ["old", "new"]]
    assert said[0][1] != said[1][1]


class Malicious:
    """What a checkpoint must not do to whoever loads it."""

    def __reduce__(self):
        return os.mkdir, ("owned",)


BAD = {  # what becomes of its bytes, or of its content
    "empty": lambda sound, content: b"",
    "truncated": lambda sound, content: sound[: len(sound) // 2],
    "nearly whole": lambda sound, content: sound[:-1],
    "text": lambda sound, content: b"hello\n",
    "malicious": lambda sound, content: content | dict(model=Malicious()),
    "pickle": lambda sound, content: Malicious(),
    "list": lambda sound, content: [1],
    "luong.py": lambda sound, content: content | dict(script="luong"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_checkpoints(kind, folder):
    """One line, nothing that is in it is run, and it stays as it is."""
    for path in (Path("run/model.pt"), Path("run/last.pt")):
        bad = BAD[kind](path.read_bytes(), checkpoint(path))
        torch.save(bad, path)
        if isinstance(bad, bytes):
            path.write_bytes(bad)
    before = contents()
    for args in (["--align", *TEXT[1:3]], [*TEXT, "--resume"], ["--resume"]):
        line = refusal("bahdanau", *args, "--out", "run")
        assert re.match(r"run/\w+\.pt: not a sound checkpoint", line)
        assert kind != "luong.py" or "luong.py" in line
    assert contents() == before
    assert not Path("owned").exists()


OTHER_RUN = ["--hidden 12", "--seed 2", "--dropout 0.3", "--tokens 200", "--paper", "--joint"]


@pytest.mark.parametrize("flags", [*OTHER_RUN, "--src-vocab 50", "--min-count 2", "--max-len 50"])
def test_resume_refuses_to_change_the_run(flags, folder):
    """A flag that would make it another run gets one line; nothing is written."""
    before = contents()
    line = refusal("bahdanau", *TEXT, "--resume", "--out", "run", *flags.split())
    assert re.search(r"--[\w-]+: \S+ in this run; leave it out", line)
    assert contents() == before


def test_resume(folder, monkeypatch):
    """The first command again with --resume, and more steps; or without files: it knows them."""
    shutil.copytree("run", "again")
    more = ["--resume", *"--steps 12 --every 1 --lr 0.001 --warmup 3 --clip 2".split()]
    run(*SMALL, "run", "--src-vocab", 30000, *more)
    assert [entry.get("step") for entry in read_log("run")] == [4, 8, 9, 10, 11, 12, None]
    monkeypatch.setattr(data, "toy", None)  # not the built-in corpus
    run("bahdanau", "--out", "again", *more)
    same_run("run", "again")
    command = [*SMALL, "joint", "--joint", "--tgt-vocab", 20]  # which says nothing with --joint
    run(*command)
    run(*command, "--resume")


@pytest.mark.parametrize("steps", [8, 12])
def test_resume_with_last_alone(steps, folder):
    """last.pt is all it takes to go on, if only to the report."""
    files = set(os.listdir("run"))
    for file in files - {"last.pt"}:
        Path("run", file).unlink()
    run("bahdanau", "--resume", "--steps", steps, "--out", "run")
    assert set(os.listdir("run")) == files
    assert [look.get("step") for look in read_log("run")] == [*range(4, steps + 1, 4), None]


def claim_them(who, moment):
    """Claims a hundred folders, each at its moment, and notes those it got."""
    for k in range(100):
        while time.perf_counter() < moment + 0.003 * k:
            pass
        with contextlib.suppress(data.InputError):
            data.claim(Path(f"runs/{k}"))
            Path(f"{who}-{k}").touch()


def test_two_runs_with_one_name(folder):
    """Whoever comes second gets a line, be it in the same instant; --resume wants a first one."""
    moment = time.perf_counter() + 0.2
    for child in [begin(claim_them, who, moment) for who in "ab"]:
        assert end(child)[0] == 0
    assert all(Path(f"a-{k}").exists() != Path(f"b-{k}").exists() for k in range(100))
    results = [end(c) for c in [begin(main, *SMALL, "new", "--seed", seed) for seed in (0, 1)]]
    winner = [status for status, _, _ in results].index(0)
    assert results[1 - winner][::2] == (2, [refusal(*SMALL, "new")])
    assert checkpoint("new/last.pt")["config"]["seed"] == read_log("new")[-1]["seed"] == winner
    for gone in ("log.jsonl", "last.pt"):
        Path("run", gone).unlink()
        assert "run: is a run already; add --resume, or name another" in refusal(*SMALL, "run")
    assert "nowhere" in refusal(*SMALL, "nowhere", "--resume")


def without_stderr():
    """A training as Python starts it after 2>&-."""
    sys.stderr = None
    main(*SMALL, "new")


def without_reader():
    """Alignments to a stdout that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    with open(1, "w", closefd=False) as sys.stdout:
        main("bahdanau", "--align", *TEXT[1:3], "--out", "run")


def test_closed_streams(folder):
    """2>&- is no reason to stop; a reader that has seen enough is no error."""
    status, stdout, _ = end(begin(without_stderr))
    assert (status, "step 4" in stdout) == (0, False)
    same_run("run", "new")
    assert end(begin(without_reader)) == (0, "", [])


# ---- several processes ----------------------------------------------------------------------


def as_rank(rank, processes, port, name, *args):
    """The command line in one of several processes, set up as torchrun does it."""
    numbers = dict(RANK=rank, WORLD_SIZE=processes, LOCAL_RANK=rank, MASTER_PORT=port)
    os.environ.update({key: str(n) for key, n in numbers.items()}, MASTER_ADDR="127.0.0.1")
    script(name).RANK, script(name).WORLD_SIZE = rank, processes
    main(name, *args)


def similar_run(a, b):
    """Two runs had the same losses and weights, to float rounding."""
    for x, y in zip(read_log(a), read_log(b), strict=True):
        assert (x.get("step"), x["loss"]) == (y.get("step"), pytest.approx(y["loss"], abs=1e-4))
    weights = [checkpoint(out, "last.pt")["recent"][-1] for out in (a, b)]
    for p, q in zip(*(w.values() for w in weights), strict=True):
        close(p, q, 1e-3)


@scripts
def test_three_processes_equal_one(name, folder):
    """One begins, three go on, of which one speaks: as if alone. No batch has rows for all."""
    command = [*small(name), "one", "--dropout", 0, "--sentences", 2]
    run(*command)
    assert sabotaged(name, "update", 6, interrupt, *command, "--out", "three")[0] == 130
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command += ["--out", "three", "--resume"]
    children = [begin(as_rank, rank, 3, port, *command) for rank in range(3)]
    first, *others = [end(child) for child in children]
    assert (first[0], "BLEU" in first[1], len(first[2])) == (0, True, 1)
    assert others == [(0, "", []), (0, "", [])]
    similar_run("one", "three")


def torchrun(name, *args):
    """torchrun with two processes, as a user starts it."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--no-python"]
    command = [*start, sys.executable, HERE / f"{name}.py", *args, "--device", "cpu"]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(list(map(str, command)), env=environment, **quiet)


def test_torchrun_equals_one_process(folder):
    """The real thing, with pieces of batches."""
    command = [*SMALL, "one", "--dropout", 0, "--accumulate", 2]
    run(*command)
    started = torchrun(*command, "--out", "two")
    stdout, stderr = started.communicate(timeout=300)
    assert (started.returncode, stdout.count("60 pairs")) == (0, 1), stderr
    similar_run("one", "two")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["crash", "interrupt"])
def test_torchrun_stops(way, folder):
    """A crash of one process, or Ctrl-C, ends them all; what was saved before can be resumed."""
    started = torchrun(*SMALL, "new", "--dropout", 0, "--steps", 100_000)
    while not Path("new/last.pt").exists() and started.poll() is None:
        time.sleep(0.05)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    if way == "crash":
        os.kill(int(children[-1]), signal.SIGKILL)
    else:
        started.send_signal(signal.SIGINT)
    _, stderr = started.communicate(timeout=60)
    assert started.returncode != 0
    assert way == "crash" or len(re.findall("stopped; .*--resume", stderr)) == 1
    step = checkpoint("new/last.pt")["step"]
    run(*SMALL, "new", "--dropout", 0, "--resume", "--steps", step + 4)
    assert read_log("new")[-2]["step"] == step + 4


# ---- bad input ------------------------------------------------------------------------------

FRENCH = "".join(" ".join(pair[1]) + "\n" for pair in PAIRS).encode()
BAD_TEXT = {  # what is said about it
    "bad ends after line 1": b"un\n",
    "bad, line 2: not UTF-8": b"un\n\xe9\n",
    "bad, line 2: has a NUL byte": b"un\nun\0\n",
    "bad, line 1: has CR LF": FRENCH.replace(b"\n", b"\r\n"),
    "bad, line 1: has a byte-order mark": b"\xef\xbb\xbf" + FRENCH,
    "bad, line 1: ": FRENCH.decode().encode("utf-16"),
    "bad.gz: cannot be read": FRENCH,
    "bad.gz: cannot be read, ": gzip.compress(FRENCH)[:-20],
}


@pytest.mark.parametrize("message", BAD_TEXT)
def test_bad_text(message, folder):
    """File and line are named, in training and in use, and nothing is written."""
    file = re.match("[a-z.]+", message)[0]
    Path(file).write_bytes(BAD_TEXT[message])
    before = contents()
    for args in (["--train", "train.en", file, *TEXT[3:]], [*TEXT[:4], "train.en", file]):
        assert message in refusal("bahdanau", *args, "--out", "new")
    for mode in ("--align", "--test"):
        assert message in refusal("bahdanau", mode, "train.en", file, "--out", "run")
    assert contents() == before
    assert not Path("new").exists()


MISTAKES = """
--train train.en nowhere --valid train.en train.fr | nowhere: cannot be read, No such file
--train train.en . --valid train.en train.fr | Is a directory
--train empty empty --valid train.en train.fr | no pair of 1 to 100 words
--train long long --valid train.en train.fr | no pair of 1 to 100 words
--train train.en train.fr --valid empty empty | empty: is empty
--train train.en train.fr | give both
--valid train.en train.fr | give both
--train train.en train.fr --translate | not allowed with
--device cuda:99 | invalid choice: 'cuda:99'
--step 3 | --step
--max-len 2 | --max-len 2: must be 3 to 1000
--max-len 100000 | --max-len 100000: must be 3 to 1000
--translate --out nowhere | nowhere
--translate --out run --hidden 12 | --hidden: 10 in this run
--test empty empty --out run | empty
--train train.en train.fr --valid train.en train.fr --out train.en | train.en
--train train.en train.fr --valid train.en train.fr --out train.en/new | train.en
luong --score location --attention local-p | use --attention global
transformer --heads 5 | --heads 5
transformer --align-layer 3 | --align-layer 3
"""


@pytest.mark.parametrize("line", MISTAKES.strip().split("\n"))
def test_mistakes(line, folder):
    """A user's mistake gets one line that says what is wrong, and leaves no trace."""
    args, message = line.split(" | ")
    name = args.split()[0] if args[0] != "-" else "bahdanau"
    Path("empty").touch()
    Path("long").write_text("a " * 500 + "\n")
    before = sorted(folder.rglob("*"))
    assert message in refusal(name, "--out", "new", *args.removeprefix(name).split())
    assert sorted(folder.rglob("*")) == before


def nonsense(field):
    """Values of a field that make no sense."""
    if field.type is bool or typing.get_args(field.type):
        return ["x", ""]
    values = ["-1", "1.5", "nan", "x"] if field.type is int else ["-0.1", "x", "nan", "-inf"]
    values += ["1", "1.5"] * (field.name in ("dropout", "smoothing"))
    values += ["4"] * field.name.endswith("_vocab")
    return values + ["0"] * (field.type is int and field.default > 0 and field.name != "seed")


@scripts
def test_nonsense_values_of_every_flag(name, folder):
    """Each is refused in one line that names the flag, before anything is written."""
    shared = {field.name for field in dataclasses.fields(script("bahdanau").Config)}
    for field in dataclasses.fields(script(name).Config):
        if name != "bahdanau" and field.name in shared:
            continue  # is checked by the same lines
        flag = "--" + field.name.replace("_", "-")
        for value in nonsense(field):
            assert flag in refusal(name, *TEXT, f"{flag}={value}", "--out", "new")
    assert not Path("new").exists()


def test_words_that_become_unknown(folder):
    """A vocabulary that keeps too little is worth a line, with the share; else nothing is said."""
    counts = collections.Counter(word for source, _, _ in PAIRS for word in source)
    lost = 1 - sum(n for _, n in counts.most_common(2)) / counts.total()
    for size, wanted in ((6, [True, False]), (1000, [False])):
        _, lines = run(*SMALL, f"new{size}", "--steps", 1, "--src-vocab", size)
        assert [f"{lost:.0%} of " in line for line in lines] == wanted


def test_long_lines(folder):
    """Too long to train on: left out, and counted. Too long to align: empty, and its number."""
    with open("train.en", "a") as en, open("train.fr", "a") as fr:
        print("a b", "a " * 101, "", sep="\n", file=en)
        print("a " * 101, "a b", "a", sep="\n", file=fr)
    assert "60 pairs, 3 left out" in run(*SMALL, "new", "--steps", 1)[0]
    Path("a").write_text("he\n" + "he " * 1001 + "\n" + "he " * 1000 + "\nhe\n")
    Path("b").write_text("il\n" + "il il\n" * 2 + "il " * 1001 + "\n")
    stdout, lines = run("bahdanau", "--align", "a", "b", "--out", "new")
    assert [line == "" for line in stdout.split("\n")[1::2]] == [True, True]
    assert re.findall(r"line (\d): more than 1,000 words", "\n".join(lines)) == ["2", "4"]


def test_lines_are_answered_in_their_order(folder):
    """2,500 lines like each of them alone; what is no text, marks and NULs, line for line."""
    sources = [" ".join(source) for source, _, _ in PAIRS]
    lines = [sources[k % 60] if k % 7 else "" for k in range(2500)]
    use = "bahdanau", "--translate", "--out", "run"
    stdout, _ = run(*use, stdin="\n".join(lines).encode())
    model, vocabularies = script("bahdanau").load("run")
    alone = {line: script("bahdanau").translate(model, [line], vocabularies) for line in sources}
    assert stdout.split("\n")[:-1] == [" ".join(*alone.get(line, [""])) for line in lines]
    odd = (
        b"\xef\xbb\xbf" + sources[0].encode() + b" \r\n\xff\xfe\0\n\n\xe2\x80\xa8\n<unk> </s>\nend"
    )
    found = run(*use, "--replace-unk", stdin=odd)[0].split("\n")
    assert (len(found), found[0], found[2]) == (7, " ".join(*alone[sources[0]]), "")
    assert run(*use)[0] == ""


# ---- random input, random kills: python -m pytest -m slow ------------------------------------


def dirty(r, content):
    """content as it may arrive: cut, with bytes changed, put in, taken out; or anything at all."""
    kind = r.randrange(5)
    if kind == 0:
        return content[: r.randrange(len(content) + 1)]
    if kind == 1:
        return bytes(r.choices(b"ab \n\r\t\0\xef\xbb\xbf\xe9\xff<unk></s>", k=r.randrange(200)))
    odd = [b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf", b" " * 50, b"a " * 150, b"a " * 1200, b""]
    for _ in range(r.choice((1, 1, 2, 10))):
        at = r.randrange(len(content) + 1)
        put = r.choice([*odd, r.randbytes(kind), content[at : at + 40]])
        content = content[:at] + put + content[at + r.choice((0, 1, 5)) :]
    return content


def random_flags(r, config):
    """Some flags with values that may or may not make sense, none beyond the machine's memory."""
    values = {int: "-1 0 1 2 3 7 16 x 1e3", float: "-1 0 0.5 1 1e30 1e-30 inf nan x", bool: "yes"}
    for field in r.sample(dataclasses.fields(config), r.randint(1, 3)):
        choices = ["", *values.get(field.type, "x").split(), *typing.get_args(field.type)]
        yield f"--{field.name.replace('_', '-')}={r.choice(choices)}"


@pytest.mark.slow
@scripts
def test_random_input(name, folder):
    """Random flags and random bytes in every file, 500 times: a run or one line, no damage."""
    new = [*small(name), "made", "--steps", "2", "--every", "1"]
    run(*new)
    sound, seen, r = contents(), collections.Counter(), random.Random(name)
    use, files = (name, "--out", "made"), [Path(file) for file in (*TEXT[1:3], *TEXT[4:])]
    for case in 100 * ["flags", "stdin", "training", "aligning", "checkpoint"]:
        content, command, path = b"", [*new, "--out", "new"], r.choice(files)
        if case == "flags":
            command += random_flags(r, script(name).Config)
        elif case == "stdin":
            content, command = dirty(r, sound[path]), [*use, "--translate"]
        elif case == "aligning":
            command = [*use, "--align", *TEXT[1:3]]
        elif case == "checkpoint":
            path, command = Path("made/last.pt"), [*new, "--resume", "--steps", "3"]
        if case not in ("flags", "stdin"):
            path.write_bytes(dirty(r, sound[path]))
        before = contents()
        status, stdout, lines = end(begin(main, *command, stdin=content))
        told = [line for line in lines if not re.search("loss .* s$|unk|empty$", line)]
        assert (status, len(told)) in ((0, 0), (2, 1)), (command, lines)
        assert not status or contents() == before or "not finite" in told[0], (command, told)
        assert case != "stdin" or stdout.count("\n") == len(io.BytesIO(content).readlines())
        seen[case, status] += 1
        shutil.rmtree("new", ignore_errors=True)
        for path, whole in sound.items():
            path.write_bytes(whole)
    assert (len(seen), min(seen.values()) > 4) == (9, True), seen  # all are translated


@pytest.mark.slow
@scripts
def test_killed_at_any_moment(name, folder):
    """Real processes, killed some moment after some checkpoint, three times: the same run."""
    r, last = random.Random(name), Path("parts/last.pt")
    command = [sys.executable, HERE / f"{name}.py", *small(name)[1:], "parts", "--device", "cpu"]
    command += ["--steps", "200", "--every", "2"]
    for more in ([], ["--resume"], ["--resume"]):
        started = subprocess.Popen([*command, *more], stderr=subprocess.DEVNULL)
        wanted, seen = r.randint(2, 25), set()
        while len(seen) < wanted and started.poll() is None:
            if last.exists():
                seen.add(last.stat().st_mtime_ns)
            time.sleep(0.001)
        time.sleep(r.uniform(0, 0.05))
        started.kill()
        assert started.wait() == -signal.SIGKILL
    for more in (["--resume"], ["--out", "whole"]):
        subprocess.run([*command, *more], check=True, capture_output=True)
    same_run("whole", "parts")


def measured(*command):
    """The command line, and the memory it took."""
    main(*command)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)


@pytest.mark.slow
def test_many_lines_in_little_memory(folder):
    """100,000 lines take hardly more memory than 2,000."""
    peak = []
    for n in (2000, 100_000):
        content = "".join(" ".join(PAIRS[k % 60][0]) + "\n" for k in range(n)).encode()
        child = begin(measured, "bahdanau", "--translate", "--out", "run", stdin=content)
        status, stdout, lines = end(child)
        assert (status, stdout.count("\n")) == (0, n)
        peak.append(int(lines[-1]))
    assert peak[1] < 1.2 * peak[0]


# ---- README ---------------------------------------------------------------------------------


def test_readme_commands_exist(folder):
    """Every script and flag that README's commands name is there."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    commands = re.findall(r"^[^#|\n]*?(\w+)\.py\b(.*)$", "\n".join(blocks), re.M)
    assert {name for name, _ in commands} >= {"bahdanau", "test_all"}
    for name, rest in commands:
        assert list(HERE.rglob(f"{name}.py")), name
        if name in SCRIPTS:
            known = set(re.findall(r"--[a-z-]+", run(name, "--help")[0]))
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, (name, rest)


def test_links_point_at_the_right_lines():
    """The map from paper to code: each piece of code stands on the line it is linked to."""
    pages = [HERE / "README.md", *HERE.glob("docs/*.md")]
    pattern = r"\[`([^`]+)`\]\((?:\.\./)?(\w+\.py)#L(\d+)\)"
    rows = [row for page in pages for row in re.findall(pattern, page.read_text())]
    assert len(rows) >= 12
    for code, file, line in rows:
        assert code in (HERE / file).read_text().split("\n")[int(line) - 1], (code, file, line)


# ---- on a GPU -------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRIED = [*((name, {}) for name in SCRIPTS), ("bahdanau", dict(optimizer="adadelta", lr=1.0))]
TRIED += [("luong", dict(optimizer="sgd", lr=0.5, input_feeding=True, attention="local-p"))]


def batch(n, pad=False):
    """Some sentences; without padding their sources have one length, and shapes come again."""
    r = random.Random(n)
    lengths = [r.randint(1, 4) for _ in range(4)] if pad else [5 + n * n % 3] * 4
    src, tgt = torch.full((4, 9), PAD), torch.full((4, 9), PAD)
    for row, S in enumerate(lengths):
        T = 3 + (n + row) % 5
        src[row, : S + 1] = torch.tensor([*r.choices(range(4, 13), k=S), EOS])
        tgt[row, : T + 2] = torch.tensor([BOS, *r.choices(range(4, 11), k=T), EOS])
    return src[:, : max(lengths) + 1], tgt


def on_a_gpu(name, **changes):
    """A model of a fair size."""
    kept = "layers", "heads", "D"
    sizes = {key: n if key in kept else 8 * n for key, n in SCRIPTS[name].items()}
    sizes |= dict(src_vocab=13, tgt_vocab=11, dropout=0.3, steps=60, warmup=10)
    torch.manual_seed(0)
    return script(name).Model(script(name).Config(**sizes | changes)).cuda()


def trained(name, seed=0, **changes):
    """(model, losses) of 50 steps on a GPU, over shapes in any order."""
    model = on_a_gpu(name, **changes)
    step, losses = script(name).make_train_step(model, model.cfg), []
    for n in range(50):
        torch.manual_seed(seed + n)
        src, tgt = batch(n)
        losses.append((step(src.cuda(), tgt.cuda()) if n % 2 else step(src, tgt)).item())
    return model, torch.tensor(losses)


@cuda
@pytest.mark.parametrize("name, changes", TRIED)
def test_graphs_change_nothing(name, changes, monkeypatch):
    """Replayed as without graphs, to bf16's rounding; the seed decides a replayed step's dropout."""
    (model, losses), (_, again), (_, other) = (trained(name, s, **changes) for s in (0, 0, 1))
    assert losses[-10:].sum() < losses[:10].sum()
    assert torch.equal(losses, again)
    assert not torch.equal(losses, other)
    monkeypatch.setattr(script(name), "graphed", lambda function: function)
    monkeypatch.setattr(script(name), "record", lambda *args: pytest.fail("recorded"))
    plain_model, plain_losses = trained(name, **changes)
    close(losses, plain_losses, 1e-2)
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        close(p, q, 1e-2)


def word_by_word(advance, out, ended):
    """What the scripts' repeat does, without a graph and to the last column."""
    for _ in range(out.size(1)):
        advance()
    return out[:, : int((out != PAD).sum(1).max())]


@cuda
@scripts
def test_decoding_from_graphs(name, monkeypatch):
    """Greedy and beam search find from graphs what they find without, padded sources and all."""
    module, (model, _) = script(name), trained(name)
    sources = [batch(n, pad)[0].cuda() for n in range(4) for pad in (False, True)]
    found = []
    for _ in range(2):
        found.append([module.greedy(model, src, 20).tolist() for src in sources])
        found[-1] += [module.beam(model, src, 20, 3, 0.6).tolist() for src in sources]
        monkeypatch.setattr(module, "repeat", word_by_word)
    assert found[0] == found[1]
    assert len(set(map(str, found[0]))) > 4


@cuda
@scripts
def test_padded_sources_on_a_gpu(name, monkeypatch):
    """Sources of several lengths are not recorded, and give the loss they give on a CPU."""
    models = on_a_gpu(name, dropout=0.0), on_a_gpu(name, dropout=0.0).cpu()
    monkeypatch.setattr(script(name), "record", lambda *args: pytest.fail("recorded"))
    steps = [script(name).make_train_step(model, model.cfg) for model in models]
    for _ in range(3):
        losses = [step(*batch(1, pad=True)).item() for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)


@cuda
@scripts
def test_a_run_on_a_gpu(name, folder):
    """The command line, from training to the last line of the log; on, and back to a CPU."""
    command = [*small(name)[1:], "new", "--device", "cuda"]
    script(name).main(command)
    script(name).main([*command, "--steps", "16", "--resume"])
    assert [look.get("step") for look in read_log("new")] == [4, 8, 12, 16, None]
    assert read_log("new")[-2]["loss"] < read_log("new")[0]["loss"]
    model, vocabularies = script(name).load("new")
    assert len(script(name).translate(model, ["the cat", "he"], vocabularies)) == 2
