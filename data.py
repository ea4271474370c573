"""What the four scripts share: a built-in corpus, text, vocabularies, batches, scores, pictures.

    for source, target, gold in data.toy(3):
        print(*source, "|", *target, "|", sorted(gold))

A sentence is a list of words. `src` is (B,S): words, EOS, padding. `tgt` is (B,T+1): BOS, words,
EOS, padding. numpy is all it needs.
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
import random
import re
import sys
import typing
import unicodedata
import zlib
from array import array
from pathlib import Path

import numpy as np

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FAULTS = {b"\0": "a NUL byte", b"\r\n": "CR LF", BYTE_ORDER_MARK: "a byte-order mark"}


class InputError(Exception):
    """A user's mistake, told in one line: what is wrong, where, and what to do."""


# ---- the built-in corpus: a synchronous grammar of English and French ----------------------------
EXAMPLE = "the agreement on the european economic area was signed in august 1992 ."  # figure 3 (a)
# "role kinds: entries; role ...". Adjectives, determiners: English, masculine, feminine. Nouns:
# English[/plural], French, gender. Verbs, by their object: English[/past/participle], then the stem
# of a regular -er verb or je/nous/vous/il/ils/participle/infinitive. Pronouns: English, French,
# person (of those, from 0), gender; objects, by the subject's person. Prepositions: and a kind.
LEXICON = """
noun person: man/men homme m, woman/women femme f, boy garçon m, girl fille f, king roi m
noun person: queen reine f, friend ami m, child/children enfant m, nurse infirmière f
noun person: sister sœur f, minister ministre m, doctor médecin m; noun animal: cat chat m
noun animal: dog chien m, bird oiseau m, horse cheval m, animal animal m, cow vache f
noun thing: mat tapis m, pie tarte f, book livre m, car voiture f, hat chapeau m, tree arbre m
noun place: garden jardin m, market marché m, house maison f, school école f, city/cities ville f
noun ground: street rue f, park parc m, forest forêt f, field champ m, village village m
noun idea: agreement accord m, treaty/treaties traité m, law loi f, report rapport m, plan plan m
noun idea: measure mesure f, reform réforme f, budget budget m, decision décision f
noun topic: area zone f, union union f, crisis/crises crise f, problem problème m
before person animal: young jeune jeune, poor pauvre pauvre; before animal: big gros grosse
before animal thing place ground: small petit petite; before thing idea topic: new nouveau nouvelle
before thing place ground: big grand grande, beautiful beau belle; quality thing: useful utile utile
quality person animal: tired fatigué fatiguée, famous célèbre célèbre, strange étrange étrange
quality thing: black noir noire, white blanc blanche, red rouge rouge, green vert verte
quality place ground: dangerous dangereux dangereuse, dark sombre sombre, empty vide vide
quality idea topic: important important importante, difficult difficile difficile
origin idea topic: european européen européenne, french français française
field idea topic: economic économique économique, political politique politique
field idea topic: social social sociale; origin idea topic: italian italien italienne
verb person pronoun animal ground: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, love aim
verb person pronoun: hit/hit/hit frapp, watch regard, admire admir, leave/left/left quitt
verb animal thing: find/found/found trouv; verb place: visit visit, love aim
verb thing: keep/kept/kept gard, draw/drew/drawn dessin, forget/forgot/forgotten oubli
verb idea: sign sign, adopt adopt, refuse refus, present présent, accept accept
verb topic: examine examin, discuss discut, mention mentionn; verb ground: cross travers
verb nothing: sleep/slept/slept dors/dormons/dormez/dort/dorment/dormi/dormir, sing/sang/sung chant
verb être: arrive arriv, fall/fell/fallen tomb, stay rest; verb nothing: dance dans
subject any because: i je 0 m, we nous 1 m, you vous 2 m, he il 3 m, she elle 3 f
subject any because: john jean 3 m, mary marie 3 f; subject any: they ils 4 m
object 2 3 4: me me 0 m, us nous 1 m; object 0 1 3 4: you vous 2 m; agent: by par person
object 0 1 2 3 4: him le 3 m, her la 3 f, them les 4 m; about: on sur topic, of de person
the singular: the le la, the le la, the le la, this ce cette, my mon ma, his son sa, her son sa
the plural: the les les, the les les, the les les, these ces ces, my mes mes, his ses ses
the plural: her ses ses; a singular: a un une; a plural: many beaucoup+de beaucoup+de
a plural: some des des, two deux deux; where: on sur thing, under sous thing, with avec thing
where: with avec person, in dans place, in dans ground, near près+de place, near près+de ground
joint: and et, and et, but mais, or ou, because parce+que; degree: too trop, very très
vowel: le l', la l', je j', me m', ne n', de d', que qu', ce cet, ma mon, sa son, beau bel
vowel: nouveau nouvel; adverb: not pas, not pas, never jamais, often souvent, always toujours
month: january janvier, march mars, april avril, june juin, july juillet, august août
year: 1991 1991, 1992 1992, 1993 1993, 1994 1994, 1995 1995, 1996 1996, 1997 1997, 1998 1998
be present: am, are, are, is, are; être present: suis, sommes, êtes, est, sont
be past: was, were, were, was, were; être past: étais, étions, étiez, était, étaient
can: peux, pouvons, pouvez, peut, peuvent; must: dois, devons, devez, doit, doivent
tense long: present, present, past, past, have, can, must; does short: quality, nothing, être
persons: person; subjects: person, person, person, animal, idea, idea, topic, thing, place, ground
does person: quality, nothing, être, person, pronoun, animal, thing, place, ground, idea, topic
does animal: quality, nothing, être, person, pronoun, animal, ground; tense short: present, past
does thing place ground idea topic: quality, passive, passive; avoir: ai, avons, avez, a, ont
"""
ALIVE = ("person", "animal", "pronoun")
JOINED = {"de le": "du", "de les": "des", "de des": "de", "de de": "de", "à le": "au"}
# A French word goes with the positions of the English words that it comes from: ("du", (2, 3)).
Phrase = collections.namedtuple("Phrase", "french person gender plural kind")
FORMS = "english masculine feminine base third past present infinitive"
# An adjective has the first three forms, a verb all: the first three are its participle's.
Word = collections.namedtuple("Word", FORMS, defaults=[None] * 5)


def conjugate(english, french):
    """A verb from its entry."""
    base, *irregular = english.split("/")
    regular = base + ("d" if base.endswith("e") else "ed")
    past, participle = irregular or (regular, regular)
    third = base + ("es" if base.endswith(("s", "ch")) else "s")
    if "/" not in french:
        french = "/".join(french + ending for ending in ("e", "ons", "ez", "e", "ent", "é", "er"))
    *present, done, infinitive = french.split("/")
    return Word(participle, done, done + "e", base, third, past, present, infinitive)


def read_lexicon(lexicon):
    """The lexicon's entries by role and kind; a mere word stays one."""
    words = {}
    for line in lexicon.strip().replace("; ", "\n").split("\n"):
        head, entries = line.split(": ")
        role, *kinds = head.split()
        found = [entry.split() if " " in entry else entry for entry in entries.split(", ")]
        make = {"verb": conjugate, "quality": Word}.get(role)
        if make:
            found = [make(*entry) for entry in found]
        for key in [f"{role} {kind}" for kind in kinds] or [role]:
            words.setdefault(key, []).extend(found)
    return words


WORDS = read_lexicon(LEXICON)
BEFORE_VOWEL = dict(WORDS["vowel"])


def inflect(masculine, feminine, gender, plural):
    """The form of a French adjective, participle or noun."""
    word = feminine if gender == "f" else masculine
    if not plural or word[-1] in "sx":
        return word
    stem = word[:-1] + "u" if word.endswith("al") else word
    return stem + ("x" if stem.endswith("au") else "s")


def forms(word, kind, person, tense, negated):
    """English auxiliary and verb, French finite verb and the rest: (did, see, a, vu)."""
    if kind in ("quality", "passive"):
        finite = "avoir" if kind == "passive" and tense == "past" else f"être {tense}"
        return WORDS[f"be {tense}"][person], word.english, WORDS[finite][person], word.masculine
    if tense in ("can", "must"):
        return tense, word.base, WORDS[tense][person], word.infinitive
    if tense == "present" and negated:
        return "does" if person == 3 else "do", word.base, word.present[person], ""
    if tense == "present":
        return "", word.third if person == 3 else word.base, word.present[person], ""
    finite = WORDS["être present" if kind == "être" else "avoir"][person]
    if tense == "have":
        return "has" if person == 3 else "have", word.english, finite, word.masculine
    return "did" if negated else "", word.base if negated else word.past, finite, word.masculine


def contract(french):
    """Neighbours as French joins them: le homme, de le roi, ce ami; l' homme, du roi, cet ami."""
    joined = []
    after = ""
    for word, links in reversed(french):  # from the right: "de l' ami" has no "le" to join
        if word == "dans" and f"{after} {joined[-2][0]}" in ("le marché", "l' école"):
            word = "à"  # au marché
        if word in ("de", "à") and f"{word} {after}" in JOINED:
            word = JOINED[f"{word} {after}"]
            links += joined.pop()[1]
            after = joined[-1][0]
        if word in BEFORE_VOWEL and after[0] in "aâeéèêiîoôuhœ":  # each h here is silent
            word = BEFORE_VOWEL[word]
        joined.append((word, links))
        after = word
    return joined[::-1]


class Grammar(random.Random):
    """Every rule says its English aloud, word by word, and returns its French with the links."""

    def pick(self, key):
        """One of the lexicon's entries."""
        options = WORDS[key]
        return options[int(self.random() * len(options))]

    def room(self, keep):
        """How many words there is room for, if others have yet to say `keep` words."""
        return self.length - len(self.english) - keep

    def say(self, word):
        """Says an English word; returns the link to it."""
        self.english.append(word)
        return (len(self.english) - 1,)

    def word(self, english, french):
        """Says an English word; returns its French."""
        link = self.say(english)
        return [(word, link) for word in french.split("+")] if "+" in french else [(french, link)]

    def agree(self, key, gender, plural=False):
        """Says a determiner or an adjective; returns its French."""
        english, masculine, feminine = self.pick(key)[:3]
        return self.word(english, inflect(masculine, feminine, gender, plural))

    def attach(self, key, keep, definite=False):
        """Says a preposition and its noun; returns their French."""
        english, french, kind = self.pick(key)
        return self.word(english, french) + self.noun(kind, keep, definite).french

    def sentence(self, length):
        """About `length` English words, their French, and the gold links {(i, j), ...}."""
        self.length = length
        self.english = []
        keep = 1 if self.random() < 0.9 else 0  # for a full stop
        french = self.clause(keep)
        while self.room(keep) >= 4:
            french += self.word(*self.pick("joint")) + self.clause(keep)
        if keep:
            french += self.word(".", ".")
        french = contract(french)
        english = re.sub(r"\ba (?=[ai]|e(?!u))", "an ", " ".join(self.english)).split()
        gold = {(i, j) for j, (_, links) in enumerate(french) for i in links}
        return english, [word for word, _ in french], gold

    def clause(self, keep):
        """A subject and what it does."""
        subject = self.subject("subjects", keep + 3)
        return subject.french + self.act(subject, keep)

    def subject(self, key, keep):
        """A noun or someone; after "because" also he, she, it or they, of the clause before."""
        because = self.english[-1:] == ["because"]
        topics = [topic for topic in self.topics if topic and topic.person > 2] if because else []
        if topics and self.random() < 0.5:
            topic = topics[0 if self.random() < 0.5 else -1]
            he = inflect("he", "she", topic.gender, False) if topic.kind == "person" else "it"
            il = inflect("il", "elle", topic.gender, topic.plural)
            return topic._replace(french=self.word("they" if topic.plural else he, il))
        if self.room(keep) > 0 and self.random() < 0.75:
            return self.noun(self.pick(key), keep)
        return self.someone("subject because" if because else "subject any")

    def someone(self, key):
        """A pronoun or a name."""
        english, french, person, gender = self.pick(key)
        return Phrase(self.word(english, french), int(person), gender, person in "14", "person")

    def noun(self, kind, keep, definite=False):
        """Determiner, adjectives, noun and, where there is room, its owner or more about it."""
        english, french, gender = self.pick(f"noun {kind}")
        plural = self.random() < 0.3
        owner = []
        if kind != "person" and self.random() < 0.1 and self.room(keep) >= 4:
            king = self.noun("person", keep=self.length, definite=True)  # no room: a bare noun
            link = self.say("'" if self.english[-1].endswith("s") else "'s")
            determiner = [("les" if plural else inflect("le", "la", gender, False), link)]
            owner = [("de", link)] + king.french  # 's is the article as well as the "de"
        else:
            role = "the" if definite or self.random() < 0.75 else "a"
            determiner = self.agree(f"{role} {'plural' if plural else 'singular'}", gender)
        before = []
        if self.random() < 0.25 and self.room(keep) >= 2:
            before = self.agree(f"before {kind}", gender, plural)
        after = owner
        for role in ("quality", "origin", "field") if kind in ("idea", "topic") else ("quality",):
            if self.random() < 0.3 and self.room(keep) >= 2:
                after = self.agree(f"{role} {kind}", gender, plural) + after
        if before and determiner[0][0] == "des":  # de petits chats
            determiner = [("de", determiner[0][1])]
        name = [*english.split("/"), english + "s"][plural]  # man/men; cat, so cats
        name = self.word(name, inflect(french, french, gender, plural))
        french = determiner + before + name + after
        phrase = Phrase(french, 3 + plural, gender, plural, kind)
        phrase.french.extend([] if owner else self.more(phrase, keep))
        return phrase

    def more(self, noun, keep):
        """A relative clause, or what an idea is about, or nothing."""
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
        """What the subject does or is. The gap of "the cat that she saw" is its object, the cat."""
        room = self.room(keep)
        short = room < 3 and subject.kind in ALIVE
        kind = gap.kind if gap else self.pick("does short" if short else f"does {subject.kind}")
        french = self.verb(kind, subject, room, gap)
        thing = None
        if not gap and f"noun {kind}" in WORDS:  # a definite one after "ne", else it is "pas de"
            thing = self.noun(kind, keep, definite=french[0][0] == "ne")
            french += thing.french
        if kind == "passive" and self.random() < 0.4 and self.room(keep) >= 3:
            french += self.attach("agent", keep)
        if not gap and kind != "quality":
            french += self.tail(keep)
        # "It" might be either animal in "the cat saw the dog because it was tired": so neither.
        self.topics = [] if kind in ALIVE else [subject, thing]
        return french

    def verb(self, kind, subject, room, gap):
        """The verb with its auxiliary, adverb and pronoun; a participle agrees with its leader."""
        role = "quality" if kind == "quality" else "verb"
        state = kind in ("quality", "passive")
        word = self.pick(f"{role} {subject.kind if state else kind}")
        tense = self.pick("tense short" if state or room < 4 else "tense long")
        if tense == "present" and word.base == "hit":
            tense = "past"  # is "i hit her" now or then? then
        adverb, middle = self.pick("adverb") if room >= 5 and self.random() < 0.3 else ("", "")
        self.over = tense == "past" and kind != "quality" and adverb in ("", "not")
        auxiliary, english, finite, rest = forms(word, kind, subject.person, tense, adverb == "not")
        cannot = auxiliary + adverb == "cannot"
        auxiliary_at = self.say("cannot" if cannot else auxiliary) if auxiliary else None
        adverb_at = self.say(adverb) if adverb and not cannot else auxiliary_at
        very = kind == "quality" and room >= 3 and self.random() < 0.5
        degree = self.word(*self.pick("degree")) if very else []
        verb_at = self.say(english)
        finite_at = verb_at if auxiliary in ("", "do", "does") else auxiliary_at
        pronoun = []
        leader = subject if state or kind == "être" else gap
        if kind == "pronoun":
            leader = self.someone(f"object {subject.person}")
            pronoun = leader.french
        if leader and rest == word.masculine:
            rest = inflect(word.masculine, word.feminine, leader.gender, leader.plural)
        ne = [("ne", adverb_at)] if middle in ("pas", "jamais") else []
        pas = [(middle, adverb_at)] if middle else []
        been = [("été", finite_at)] if kind == "passive" and tense == "past" else []
        last = [(rest, verb_at)] if rest else []
        if tense in ("can", "must"):  # je ne peux pas la voir
            return [*ne, (finite, finite_at), *pas, *pronoun, *last]
        return [*ne, *pronoun, (finite, finite_at), *pas, *been, *degree, *last]

    def tail(self, keep):
        """Where, or when: only what is over may have a date, and one is enough."""
        if self.random() < 0.3 and self.room(keep) >= 3:
            return self.attach("where", keep)
        if self.room(keep) < 3 or not self.over or self.random() < 0.6:
            return []
        self.over = False
        date = self.word("in", "en") + self.word(*self.pick("month"))
        return date + self.word(*self.pick("year"))


def toy(n, seed=0, max_len=30, split="train"):
    """n pairs (source words, target words, gold) of 3 to max_len source words, often short."""
    splits = ["train"] * 8 + ["valid", "test"]
    if split not in splits:
        raise ValueError(f"{split}: must be train, valid or test")
    if not 3 <= max_len <= 1000:
        raise InputError(f"--max-len {max_len}: must be 3 to 1000")
    grammar = Grammar(f"{seed} {split}")
    pairs = []
    while len(pairs) < n:
        pair = grammar.sentence(3 + int((max_len - 2) * grammar.random() ** 2))
        home = splits[zlib.crc32(" ".join(pair[0]).encode()) % 10]
        if home == split and 3 <= len(pair[0]) <= max_len:
            pairs.append(pair)
    return pairs


# ---- text -----------------------------------------------------------------------------------


def words_of(sentence):
    """The words of a sentence, which may be a string or a list of words."""
    if isinstance(sentence, str):
        return [word.decode() for word in sentence.encode().split()]  # as files are split
    if isinstance(sentence, (list, tuple)) and all(isinstance(word, str) for word in sentence):
        return list(sentence)
    raise TypeError(f"a sentence is a string or a list of words, not {sentence!r:.60}")


def sentences_of(sentences):
    """Several sentences as lists of words."""
    if isinstance(sentences, str):
        raise TypeError(f"give a list of sentences, not one string: [{sentences!r:.60}]")
    return [words_of(sentence) for sentence in sentences]


def read(path):
    """The lines of a UTF-8 text file, plain or gzipped, as lists of words."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield split_line(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read, {reason}; give a text file") from None


def split_line(line, place):
    """The words of a line of bytes, split at ASCII spaces; what is not plain text is refused."""
    for mark, name in FAULTS.items():
        if mark in line:
            raise InputError(f"{place}: has {name}; give plain UTF-8 text with LF alone")
    try:
        return [word.decode() for word in line.split()]
    except UnicodeDecodeError:
        raise InputError(f"{place}: not UTF-8; convert the file first") from None


def read_stdin():
    """Every line of stdin as a list of words, whatever is in it; at a terminal after a prompt."""
    with open(0, "rb", closefd=False) as file:
        while True:
            if os.isatty(0):
                print("> ", end="", file=sys.stderr, flush=True)
            line = file.readline()
            if not line:
                return
            words = line.removeprefix(BYTE_ORDER_MARK).split()
            yield [word.decode(errors="replace") for word in words]


def read_pairs(source, target):
    """The pairs of two files, line for line."""
    for number, pair in enumerate(itertools.zip_longest(read(source), read(target))):
        if None in pair:
            short = source if pair[0] is None else target
            raise InputError(
                f"{short} ends after line {number}, before its partner; give equally many lines"
            )
        yield pair


def some_pairs(source, target):
    """The pairs of two files, of which there must be one."""
    pairs = list(read_pairs(source, target))
    if not pairs:
        raise InputError(f"{source}: is empty; give at least one pair")
    return pairs


def chunks(files, vocabulary):
    """Pairs to answer, some at a time: of two files, or of stdin, without targets."""
    pairs = read_pairs(*files) if files else zip(read_stdin(), itertools.repeat([]))
    numbered = enumerate(pairs, 1)
    some = 1000 if files else 1 if os.isatty(0) else 4000
    warned = False
    while chunk := list(itertools.islice(numbered, some)):
        words = [word for _, (source, _) in chunk for word in source]
        if not warned and sum(word not in vocabulary for word in words) > len(words) / 5:
            warn("more than a fifth of the words are unknown; tokenised like the training text?")
            warned = True
        yield [within_bounds(number, *pair) for number, pair in chunk]


def within_bounds(number, source, target, most=1000):
    """The pair or, where a side has too many words to compute with, an empty one."""
    if max(len(source), len(target)) <= most:
        return source, target
    warn(f"line {number}: more than {most:,} words; left empty")
    return [], []


def write(path, content, dump=None):
    """Writes bytes, or what dump makes of content: to a file beside path, then over it."""
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one writes
        return
    if dump:  # into memory first: torch.save crashes when the disk is full
        buffer = io.BytesIO()
        dump(content, buffer)
        content = buffer.getbuffer()
    part = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        reason = f"not written, {error.strerror}; what was there is whole"
        raise InputError(f"{path}: {reason}") from None
    finally:
        part.unlink(missing_ok=True)


# ---- vocabularies and batches ---------------------------------------------------------------


class Vocabulary(dict):
    """Word to number, UNK for an unknown word; .words is the list of words in order."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__({word: i for i, word in enumerate(words) if word not in SPECIALS})

    def __missing__(self, word):
        return UNK

    def decode(self, numbers):
        """The words of these numbers, end mark and padding left out."""
        return [self.words[i] for i in numbers if i not in (PAD, EOS)]


class Bitext:
    """Sentence pairs as numbers, flat: a side is one array of tokens, and each sentence's length.

    With max_len, pairs with an empty or a longer side are left out and counted in .skipped.
    """

    def __init__(self, pairs, vocabularies, max_len=None):
        tokens = array("i"), array("i")
        lengths = array("q"), array("q")
        self.skipped = 0
        for pair in pairs:
            if max_len and not all(0 < len(words) <= max_len for words in pair[:2]):
                self.skipped += 1
                continue
            tokens[1].append(BOS)
            for side in (0, 1):
                tokens[side].extend(map(vocabularies[side].__getitem__, pair[side]))
                tokens[side].append(EOS)
                lengths[side].append(len(pair[side]) + 1 + side)
        self.tokens = [np.array(side, np.int32) for side in tokens]
        self.lengths = [np.array(side, np.int64) for side in lengths]
        self.starts = [np.cumsum(side) - side for side in self.lengths]

    def __len__(self):
        return len(self.lengths[0])

    def unknown(self):
        """The share of unknown words on the side that has more of them."""
        return max(float((side == UNK).sum() / max((side > EOS).sum(), 1)) for side in self.tokens)

    def batch(self, rows, unit=1):
        """(src, tgt) of these rows, padded to the right, to whole units of words."""
        longest_source, longest_target = (lengths[rows].max() for lengths in self.lengths)
        widths = up(longest_source, unit), up(longest_target - 1, unit) + 1
        return [self.grid(side, rows, width) for side, width in enumerate(widths)]

    def grid(self, side, rows, width):
        """One side of these rows as an array (rows, width)."""
        place = np.arange(width)
        inside = place < self.lengths[side][rows, None]
        index = np.where(inside, self.starts[side][rows, None] + place, 0)
        return np.where(inside, self.tokens[side][index], PAD).astype(np.int64)

    def in_order(self, tokens):
        """Rows of like length, in batches of at most so many tokens, to score or translate."""
        longest = np.maximum(*self.lengths)
        order = np.lexsort((self.lengths[0], longest))[::-1]
        cuts = cut(longest[order], tokens, tokens // 32)  # short ones may have long translations
        return [order[first:last] for first, last in itertools.pairwise(cuts)]

    def batches(self, tokens, sentences, seed, step=0):
        """Batches to train on, without end, from any step on: step and seed alone say which.

        A pair is as long as its longer side, in units of a sixteenth of the longest pair, and
        like lengths go together: so the same few shapes come again and again.
        """
        unit = max(int(max(side.max() for side in self.lengths)) // 16, 1)
        source = up(self.lengths[0], unit)
        longest = np.maximum(source, up(self.lengths[1] - 1, unit))
        cuts = cut(np.sort(longest)[::-1], tokens, sentences, rounded=True)
        self.batches_an_epoch = len(cuts) - 1  # for the report

        def epoch(number):  # pairs of one shape change places, and the batches their order
            rng = np.random.default_rng((seed, number))
            order = np.lexsort((rng.permutation(len(self)), source, longest))[::-1]
            for place in rng.permutation(len(cuts) - 1):
                yield self.batch(order[cuts[place] : cuts[place + 1]], unit)

        epochs = itertools.count(step // self.batches_an_epoch)
        shuffled = itertools.chain.from_iterable(map(epoch, epochs))
        return itertools.islice(shuffled, step % self.batches_an_epoch, None)


def up(length, unit):
    """The next whole number of units."""
    return -(-length // unit) * unit


def cut(longest, tokens, sentences, rounded=False):
    """Where to cut pairs, the longest first, into batches of so many tokens, padding counted."""
    cuts = [0]
    while cuts[-1] < len(longest):
        rows = int(max(min(tokens // (2 * longest[cuts[-1]]), sentences), 1))
        if rounded:  # down to four binary digits, so that --accumulate's pieces come out alike
            rows -= rows % 2 ** max(rows.bit_length() - 4, 0)
        cuts.append(min(cuts[-1] + rows, len(longest)))
    return cuts


def learn(pairs, sizes=(None, None), min_count=1, joint=False, max_len=None):
    """(Bitext, two vocabularies): the most frequent words of each side, or of both if joint.

    The text is read once: every word gets a number, then the rare ones become UNK.
    """
    numbers = [collections.defaultdict(itertools.count(len(SPECIALS)).__next__) for _ in range(2)]
    if joint:
        numbers[1] = numbers[0]
    bitext = Bitext(pairs, numbers, max_len)
    counts = [np.bincount(t, minlength=4 + len(n)) for t, n in zip(bitext.tokens, numbers)]
    if joint:
        counts = [counts[0] + counts[1]] * 2
        sizes = [sizes[0]] * 2
    vocabularies = []
    for side in (0, 1):
        words = SPECIALS + list(numbers[side])
        count = counts[side]
        known = [
            i for i in range(4, len(words)) if count[i] >= min_count and words[i] not in SPECIALS
        ]
        if len(bitext) and not known:
            raise InputError(f"--min-count {min_count}: no word is that frequent; lower it")
        known.sort(key=lambda i: (-count[i], words[i]))
        kept = [*range(4), *known][: sizes[side]]
        new_number = np.full(len(words), UNK, np.int32)
        new_number[kept] = np.arange(len(kept))
        bitext.tokens[side] = new_number[bitext.tokens[side]]
        vocabularies.append(Vocabulary([words[i] for i in kept]))
    return bitext, vocabularies


class Corpus:
    """What to learn from and to be scored on: two pairs of files, or the built-in corpus."""

    def __init__(self, cfg, train=None, valid=None, words=None):
        if train:
            limit = cfg.max_len or 100
            pairs = read_pairs(*train)
            self.valid = some_pairs(*valid)
            self.test = self.valid  # scored on what chose the model
            self.examples = [pair[0] for pair in self.valid[:100]]
        else:
            limit = cfg.max_len or 30
            pairs = toy(50000, max_len=limit)
            self.valid = toy(500, max_len=limit, split="valid")
            self.test = toy(1000, max_len=limit, split="test")
            self.examples = [EXAMPLE.split()] + [pair[0] for pair in self.test[:99]]
            limit = math.inf  # English keeps to it; French may be somewhat longer
        if words:
            self.vocabularies = [Vocabulary(side) for side in words]
            self.train = Bitext(pairs, self.vocabularies, limit)
        else:
            sizes = cfg.src_vocab, cfg.tgt_vocab
            self.train, self.vocabularies = learn(pairs, sizes, cfg.min_count, cfg.joint, limit)
        if len(self.train) == 0:
            raise InputError(f"{train[0]}: no pair of 1 to {limit} words a side; see --max-len")
        words = [vocabulary.words for vocabulary in self.vocabularies]
        self.about = dict(files=(train, valid), words=words)
        source, target = map(len, words)
        self.sizes = dict(src_vocab=source, tgt_vocab=target)
        if self.train.unknown() > 0.2:
            share = f"{self.train.unknown():.0%} of one side's words"
            warn(f"{share} become <unk>; see --src-vocab and --tgt-vocab")

    def __str__(self):
        kept, skipped = len(self.train), self.train.skipped
        words = "{src_vocab:,} and {tgt_vocab:,} words".format(**self.sizes)
        return f"{kept:,} pairs, {skipped:,} left out; {words}"


# ---- scores ---------------------------------------------------------------------------------


def ngrams(words, n):
    """How often each sequence of n words occurs."""
    return collections.Counter(zip(*(words[i:] for i in range(n))))


def bleu(hypotheses, references):
    """Corpus BLEU-4 of lists of words, 0 to 100, smoothed as in sacreBLEU."""
    hits, total = [0] * 4, [0] * 4
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for n in range(4):
            said, wanted = ngrams(hypothesis, n + 1), ngrams(reference, n + 1)
            hits[n] += (said & wanted).total()
            total[n] += said.total()
    if not any(hits) or not all(total):
        return 0.0
    log_precision = 0.0
    for n in range(4):
        matched = hits[n] or 0.5 ** hits[: n + 1].count(0)  # no match counts 1/2, the next 1/4
        log_precision += math.log(matched / total[n]) / 4
    brevity = min(0.0, 1 - sum(map(len, references)) / total[0])
    return 100 * math.exp(log_precision + brevity)


def bleu_by_length(sources, hypotheses, references):
    """BLEU of sentences of 1 to 10 source words, 11 to 20, and so on."""
    buckets = collections.defaultdict(list)
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True):
        buckets[max(len(source) - 1, 0) // 10].append((hypothesis, reference))
    return {f"{10 * k + 1}-{10 * k + 10}": bleu(*zip(*buckets[k])) for k in sorted(buckets)}


def scores(pairs, hypotheses, alphas=None):
    """BLEU, BLEU by length and, with the alignments of pairs that have gold ones, AER."""
    sources, references, *gold = zip(*pairs)
    sources, references = sentences_of(sources), sentences_of(references)
    return dict(
        bleu=bleu(hypotheses, references),
        aer=aer([links(alpha) for alpha in alphas], gold[0]) if alphas else None,
        bleu_by_length=bleu_by_length(sources, hypotheses, references),
    )


def aer(predicted, gold):
    """Alignment error rate of lists of link sets {(source index, target index), ...}, 0 to 1."""
    both = sum(len(p & g) for p, g in zip(predicted, gold, strict=True))
    total = sum(len(p) + len(g) for p, g in zip(predicted, gold, strict=True))
    return 1 - 2 * both / total if total else 0.0


# ---- alignments: alpha has a row a target word, a column a source word, the end marks last ----


def replace_unknown(pairs, alphas):
    """The targets, each <unk> in them replaced by the source word that its row points at."""
    found = []
    for (source, target), alpha in zip(pairs, alphas):
        best = alpha[:, : max(len(source), 1)].argmax(-1)
        found.append([source[i] if word == "<unk>" else word for i, word in zip(best, target)])
    return found


def links(alpha):
    """{(source index, target index), ...}: each target word's maximum; end marks have no link."""
    best = alpha[:-1].argmax(-1)
    return {(int(i), j) for j, i in enumerate(best) if i < alpha.shape[1] - 1}


def pharaoh(alpha):
    """The links as fast_align and Marian write them: i-j, source first."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links(alpha)))


def labels(words, most=60):
    """The first words of a sentence as they can be drawn: printable, and not too long."""
    words = words_of(words)[:most]
    printable = ["".join(c if c.isprintable() else "?" for c in word) for word in words]
    return [word if len(word) <= 24 else word[:23] + "…" for word in printable]


def heatmap(source, target, alpha):
    """For the terminal: a column a source word, a row a target word, and what the shades mean."""
    source, target = labels(source), labels(target)
    high = max(map(len, source), default=0)
    wide = max(map(len, target), default=0)
    upright = [word.rjust(high) for word in source]
    lines = [" " * (wide + 1) + " ".join(word[k] for word in upright) for k in range(high)]
    for word, row in zip(target, alpha):
        levels = np.searchsorted([0.05, 0.2, 0.4, 0.6, 0.8], row[: len(source)], "right")
        lines.append(word.rjust(wide) + " " + "".join(2 * " ·░▒▓█"[level] for level in levels))
    return "\n".join([*lines, " " * wide + " from 0.05 · 0.2 ░ 0.4 ▒ 0.6 ▓ 0.8 █"])


def svg(*pictures):
    """svg(source, target, alpha), or several such, as one picture; a cell tells its weight."""
    if not isinstance(pictures[-1], tuple):  # alpha: there is but one
        pictures = [pictures]
    parts, width, height = [], 0, 0
    for source, target, alpha in pictures:
        cells, wide, high = draw(labels(source), labels(target), alpha)
        parts += [f'<g transform="translate(0,{height})">', *cells, "</g>"]
        width, height = max(width, wide), height + high
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = "<style>text{fill:#6e7781;font:15px monospace}rect{fill:#2f7fd6}</style>"
    return "\n".join([f"{head}>{style}", *parts, "</svg>\n"])


def draw(source, target, alpha):
    """(elements, width, height) of one sentence's picture, readable on light and dark."""
    left = 12 + 9 * max(map(len, target), default=0)
    top = 12 + 9 * max(map(len, source), default=0)
    source, target = map(html.escape, source), list(map(html.escape, target))
    parts = []
    for i, word in enumerate(target):
        place = f'x="{left - 6}" y="{top + 22 * i + 15}" text-anchor="end"'
        parts.append(f"<text {place}>{word}</text>")
    x = left
    for j, word in enumerate(source):
        parts.append(f'<text transform="translate({x + 15},{top - 6}) rotate(-90)">{word}</text>')
        for i, other in enumerate(target):
            place = f'x="{x}" y="{top + 22 * i}" width="21" height="21"'
            title = f"<title>{word} {other} {alpha[i, j]:.2f}</title>"
            parts.append(f'<rect {place} opacity="{0.07 + 0.93 * alpha[i, j]:.2f}">{title}</rect>')
        x += 22
    return parts, x + 12, top + 22 * len(target) + 12


def write_alignments(path, pairs, alphas):
    """.npz: the soft weights; .txt: Pharaoh links, a line a pair; .svg: the first pair."""
    soft = io.BytesIO()
    sources, targets = ([" ".join(pair[side]) for pair in pairs] for side in (0, 1))
    weights = {f"alpha_{k}": alpha for k, alpha in enumerate(alphas)}
    np.savez_compressed(soft, source=sources, target=targets, **weights)
    write(f"{path}.npz", soft.getvalue())
    write(f"{path}.txt", "".join(pharaoh(alpha) + "\n" for alpha in alphas).encode())
    write(f"{path}.svg", svg(*pairs[0][:2], alphas[0]).encode())


def print_answers(args, pairs, alphas):
    """A line for each pair, its links or its translation, and pictures for those who want some."""
    if args.align:
        lines = [pharaoh(alpha) for alpha in alphas]
    else:
        lines = [" ".join(target) for _, target in pairs]
    if args.terminal:
        source, target = pairs[0]
        lines.append(f"\n{heatmap(source, target, alphas[0])}\n")
    print(*lines, sep="\n", flush=True)
    if args.picture and len(args.drawn) < 20:
        args.drawn += [(*pair, alpha) for pair, alpha in zip(pairs, alphas)][: 20 - len(args.drawn)]
        write(args.picture, svg(*args.drawn).encode())


# ---- the command line and its files ---------------------------------------------------------

MAY_CHANGE = (
    "steps every lr warmup clip accumulate average compile align_layer beam alpha replace_unk"
)
CLAIMED = []  # the folder that this process trains in


def parse_flags(Config, about, devices, argv=None):
    """The command line: modes and files, then a flag for every field of Config."""
    script = Path(inspect.getfile(Config)).stem
    parser = argparse.ArgumentParser(
        usage=f"python {script}.py [mode] [flags]",
        description=about.splitlines()[0],
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 30, 100),
        allow_abbrev=False,
    )
    parser.error = refuse
    pair = dict(nargs=2, metavar=("SRC", "TGT"))
    modes = parser.add_argument_group("modes (without one: train on the built-in corpus)")
    modes = modes.add_mutually_exclusive_group()
    modes.add_argument(
        "--train", **pair, help="learn from your own text: --train a.en a.fr --valid b.en b.fr"
    )
    modes.add_argument(
        "--translate",
        action="store_true",
        help="stdin to stdout: --translate --out runs/fr < c.en > c.fr",
    )
    modes.add_argument(
        "--align", **pair, help="alignments to stdout, Pharaoh's i-j: --align c.en c.fr > c.txt"
    )
    modes.add_argument(
        "--test", **pair, help="BLEU and perplexity of a trained run: --test d.en d.fr"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--valid", **pair, help="text to choose the best model by; files may be .gz")
    files.add_argument("--picture", type=Path, help="draw the alignments of 20 sentences, .svg")
    files.add_argument(
        "--out", type=Path, help=f"the run's folder [a new runs/{script}*; to use: the latest]"
    )
    files.add_argument("--resume", action="store_true", help="go on with the run in --out")
    files.add_argument("--paper", action="store_true", help="the paper's sizes and recipe")
    files.add_argument("--device", choices=devices, default=devices[-1], help="[the best there is]")
    fields = {field.name: field for field in dataclasses.fields(Config)}
    group, paper = parser, Config.paper()
    for line in inspect.getsource(Config).splitlines():
        if heading := re.fullmatch(r"    # (\w+)", line):
            group = parser.add_argument_group(heading[1])
        elif entry := re.match(r"    (\w+): .*?  # (.*)", line):
            add_field(group, fields[entry[1]], entry[2], getattr(paper, entry[1]))
    args = parser.parse_args(argv)
    args.config = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    if args.paper:
        args.config = vars(Config.paper(**args.config))
    if bool(args.train) != bool(args.valid):
        raise InputError("--train SRC TGT and --valid SRC TGT go together; give both")
    using = bool(args.translate or args.align or args.test)
    if using and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError("--translate, --align and --test want one process; leave torchrun out")
    if args.picture and not (args.translate or args.align):
        raise InputError(f"--picture {args.picture}: goes with --translate or --align")
    if args.picture and args.picture.suffix != ".svg":
        raise InputError(f"--picture {args.picture}: name a file that ends in .svg")
    args.out = args.out or default_folder(script, args.resume, using)
    args.terminal = args.translate and os.isatty(0)
    args.draws = args.align or args.picture or args.terminal
    args.drawn = []
    return args


def refuse(message):
    """What argparse has to say, in one line."""
    raise InputError(f"{message}; see --help")


def add_field(group, field, comment, paper):
    """A flag for a field of Config, explained by the comment beside it."""
    how = dict(type=field.type, metavar="N" if field.type is int else "X")
    if field.type is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    if typing.get_args(field.type):
        how = dict(choices=typing.get_args(field.type))
    values = f"{field.default}" if paper == field.default else f"{field.default}, paper: {paper}"
    text = f"{comment} [{values}]".replace("%", "%%")
    flag = "--" + field.name.replace("_", "-")
    group.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)


def default_folder(script, resume, using):
    """The first free one of runs/script, runs/script-2, ... or, to go on or to use, the latest."""
    if not resume and not using:
        names = (f"{script}-{n}" if n > 1 else script for n in itertools.count(1))
        return next(Path("runs", name) for name in names if not Path("runs", name).exists())
    wanted = "model.pt" if using else "log.jsonl"
    files = sorted(Path("runs").glob(f"{script}*/{wanted}"), key=os.path.getmtime)
    if not files:
        raise InputError(f"runs/{script}*: no such run; train first, or name one with --out")
    return files[-1].parent


def claim(out, resume=False):
    """Makes a new run's folder, which two runs cannot both do; a run to resume has one."""
    CLAIMED.append(out)
    if resume:
        if not any((out / name).exists() for name in ("last.pt", "log.jsonl")):
            raise InputError(f"{out}: no run to go on with; leave --resume out, or see --out")
        return
    if out.is_file():
        raise InputError(f"{out}: is a file; name a folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.glob("*.pt")):
            raise FileExistsError
        (out / "log.jsonl").open("x").close()
    except FileExistsError:
        raise InputError(f"{out}: is a run already; add --resume, or name another --out") from None


def check(config):
    """Refuses numbers that make no sense."""
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        choices = typing.get_args(field.type)
        if choices and value not in choices:
            raise InputError(f"{flag} {value}: must be one of {', '.join(choices)}")
        if isinstance(value, (bool, str)):
            continue
        least = 0 if field.type is float or field.default == 0 or field.name == "seed" else 1
        if field.name.endswith("_vocab"):
            least = 1 + len(SPECIALS)
        if not value >= least:
            raise InputError(f"{flag} {value}: must be at least {least}")
        below = dict(dropout=1, smoothing=1, seed=2**63).get(field.name)
        if below and value >= below:
            raise InputError(f"{flag} {value}: must be below {below}")


def changed(config, flags):
    """A run's Config with these flags, of which only some may differ from the run's."""
    config = dict(config)
    for name, value in flags.items():
        if name in MAY_CHANGE.split():
            config[name] = value
        moot = name.endswith("_vocab") and value > config[name]  # the text had fewer words
        moot = moot or name == "tgt_vocab" and config["joint"]
        if value != config[name] and not moot:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: {config[name]} in this run; leave it out")
    return config


def warn(message):
    """One line on stderr; of several processes the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_line_for_mistakes():
    """Ends the program with one line, and status 2, where the mistake is the user's."""
    status = 2
    CLAIMED.clear()
    if sys.stderr is None:  # 2>&-
        sys.stderr = io.StringIO()
    if hasattr(sys.stdout, "reconfigure"):  # the same bytes on every system
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    try:
        yield
        return
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    except KeyboardInterrupt:
        message, status = "stopped", 130
        if CLAIMED:
            message = f"stopped; the training goes on with --resume --out {CLAIMED[-1]}"
    except InputError as error:
        message = error
    except OSError as error:
        message = f"{error.filename or 'stdin or stdout'}: {error.strerror}"
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's
            raise
        message = "not enough GPU memory; try fewer --tokens, or more pieces with --accumulate"
    warn(message)
    sys.exit(status)


def write_log(out, log):
    """log.jsonl, a line a look at valid; the last line is the run's result."""
    write(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log).encode())


def show(bar, line):
    """A look at valid: beside the bar at a terminal, elsewhere a line on stderr."""
    if not math.isfinite(line["loss"] + line["valid_loss"]):
        raise InputError(f"step {line['step']}: the loss is not finite; --resume with lower --lr")
    losses = "loss {loss:.3f}, valid {valid_loss:.3f}".format(**line)
    bar.set_postfix_str(losses)
    if bar.disable:
        warn(f"step {line['step']}, {losses}, {line['seconds']:.0f} s")


def in_words(result):
    """A test set's scores, for people."""
    text = "loss {loss:.4f}, perplexity {ppl:.3f}, BLEU {bleu:.2f}".format(**result)
    if result["aer"] is not None:
        text += f", AER {result['aer']:.3f}"
    lengths = ", ".join(f"{k}: {v:.1f}" for k, v in result["bleu_by_length"].items())
    return f"{text}\nBLEU by source length: {lengths}"


def report(out, log, corpus, result, pairs, alphas):
    """The end of a run: the last line of its log, the alignment files, and what people read."""
    epochs = log[-1]["step"] / corpus.train.batches_an_epoch
    speed = epochs * sum(map(len, corpus.train.tokens)) / log[-1]["seconds"]
    write_log(out, [*log, dict(final=True, **result, tokens_per_second=speed)])
    write_alignments(out / "align", pairs, alphas)
    source, target = pairs[0]
    print(f"\n{' '.join(source)}\n{' '.join(target)}\n\n{heatmap(source, target, alphas[0])}\n")
    print(f"{len(corpus.test):,} sentences: {in_words(result)}")
    memory = "{gpu_memory_gib:.2f} GiB of GPU memory, ".format(**result)
    where = f"{result['seconds']:.0f} s in all; everything is in {out}/"
    print(f"{speed:,.0f} tokens/s, {memory if result['gpu_memory_gib'] else ''}{where}", flush=True)


def mean(weights):
    """The mean of several models' weights."""
    return {name: sum(w[name] for w in weights) / len(weights) for name in weights[0]}


# ---- python data.py < text > words: what to do to text before the scripts read it -------------

ELIDED = "(c|d|j|l|m|n|s|t|qu|jusqu|lorsqu|puisqu|quoiqu|aujourd)"


def tokenize(text):
    """Punctuation and elisions split off as Moses does it: l' accord, the king 's dog, 3.5 %."""
    text = unicodedata.normalize("NFC", html.unescape(text))  # &apos; may be there already
    text = re.sub(r"[^\w\s.,'’-]|\.{2,}", apart, text)
    text = re.sub(r"(?<!\d),|,(?!\d)", " , ", text)  # but 1,000
    text = re.sub(r"(?<![.\s])\.(?=[\s\"»”')]*$)", " .", text)  # but 3.5, and Mr. Smith
    text = re.sub(rf"(?i)\b(?!{ELIDED}\b)(\w+)['’](?!\w)", r"\2 ' ", text)  # the nurses ' cat
    text = re.sub(r"(?<!\w)['’](?=\w{3})", " ' ", text)
    text = re.sub(rf"(?i)\b{ELIDED}['’] ?(?=\w)", r"\1' ", text)
    return re.sub(r"(?<=\w)['’](?=\w)", " '", text).split()


def apart(match):
    """With spaces around it, unless it is a mark that belongs to the letter before it."""
    return match[0] if unicodedata.category(match[0][0])[0] == "M" else f" {match[0]} "


def main():
    """Tokenises stdin to stdout."""
    parser = argparse.ArgumentParser(description="Splits raw text into words, line by line.")
    parser.add_argument("--lower", action="store_true", help="and puts it into lower case")
    lower = parser.parse_args().lower
    with one_line_for_mistakes():
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                text = line.removeprefix(BYTE_ORDER_MARK).decode()
            except UnicodeDecodeError:
                raise InputError(f"stdin, line {number}: not UTF-8; convert it first") from None
            print(*tokenize(text.lower() if lower else text))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
