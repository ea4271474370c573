"""What the four scripts share: a built-in corpus, vocabularies, batches, BLEU, AER, pictures. Needs numpy and nothing else.

    for source, target, gold in data.toy(3): print(*source, "|", *target, "|", sorted(gold))

A sentence is a list of words. `src` is (B,S): words, EOS, padding. `tgt` is (B,T+1): BOS, words, EOS, padding.
"""
import collections, gzip, html, itertools, math, random, re, zlib
import numpy as np

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]

class InputError(Exception): """A user's mistake, told in one line: what is wrong, where, and what to do."""

# ---- the built-in corpus: a synchronous grammar of English and French ------------------------------------------------
EXAMPLE = "the agreement on the european economic area was signed in august 1992 ."  # the paper's figure 3 (a)
# Nouns: English[/plural], French, gender. Adjectives: English, French masculine, feminine. Verbs, by their object:
# English[/past/participle], then the stem of a regular -er verb or je/nous/vous/il/ils/participle/infinitive.
LEXICON = """
noun person: man/men homme m, woman/women femme f, boy garçon m, girl fille f, king roi m, queen reine f, friend ami m, \
child/children enfant m, nurse infirmière f, minister ministre m, sister sœur f, doctor médecin m
noun animal: cat chat m, dog chien m, bird oiseau m, horse cheval m, animal animal m, mouse/mice souris f, cow vache f
noun thing: mat tapis m, pie tarte f, book livre m, car voiture f, hat chapeau m, letter lettre f, tree arbre m, apple pomme f
noun place: garden jardin m, street rue f, market marché m, house maison f, village village m, city/cities ville f, school école f
noun idea: agreement accord m, area zone f, treaty/treaties traité m, law loi f, report rapport m, union union f, \
measure mesure f, plan plan m, reform réforme f, budget budget m, decision décision f, project projet m
before: big grand grande, small petit petite, good bon bonne, bad mauvais mauvaise
person: tired fatigué fatiguée, intelligent intelligent intelligente, famous célèbre célèbre, strange étrange étrange
thing: black noir noire, white blanc blanche, red rouge rouge, green vert verte, useful utile utile
idea: important important importante, difficult difficile difficile, dangerous dangereux dangereuse
origin: european européen européenne, french français française, german allemand allemande, italian italien italienne
field: economic économique économique, political politique politique, social social sociale, cultural culturel culturelle
verb person: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, love aim, hit/hit/hit frapp, watch regard, admire admir
verb animal: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, find/found/found trouv, love aim, watch regard
verb thing: find/found/found trouv, keep/kept/kept gard, draw/drew/drawn dessin, forget/forgot/forgotten oubli
verb place: cross travers, visit visit, love aim, leave/left/left quitt
verb idea: sign sign, adopt adopt, refuse refus, present présent, accept accept
verb nothing: sleep/slept/slept dors/dormons/dormez/dort/dorment/dormi/dormir, sing/sang/sung chant, dance dans
verb être: arrive arriv, fall/fell/fallen tomb, stay rest
subject: i je 0 m, we nous 1 m, you vous 2 m, he il 3 m, she elle 3 f, they ils 4 m, john jean 3 m, mary marie 3 f
object: me me m 0, us nous m 1, him le m 0, her la f 0, them les m 1, you vous m 0
singular: the le la, the le la, the le la, this ce cette, my mon ma, his son sa, our notre notre, a un une, a un une
plural: the les les, the les les, the les les, these ces ces, my mes mes, his ses ses, our nos nos, some des des, \
two deux deux, many beaucoup+de beaucoup+de
where: on sur thing, under sous thing, with avec thing, with avec person, in dans place, near près+de place
month: january janvier, march mars, april avril, june juin, july juillet, august août, october octobre
middle: not pas, not pas, never jamais, often souvent, always toujours
joint: and et, and et, but mais, or ou, because parce+que
"""
FORMS = {"be": "am are are is are", "was": "was were were was were", "do": "do do do does do", "have": "have have have has have",
         "avoir": "ai avons avez a ont", "être": "suis sommes êtes est sont", "était": "étais étions étiez était étaient",
         "sera": "serai serons serez sera seront", "can": "peux pouvons pouvez peut peuvent",
         "must": "dois devons devez doit doivent"}  # of i/je, we/nous, you/vous, he/il, they/ils: persons 0 to 4
Phrase = collections.namedtuple("Phrase", "french person gender plural kind")
def inflect(masculine, feminine, gender, plural):
    word = feminine if gender == "f" else masculine
    if not plural or word[-1] in "sx": return word
    return word[:-1] + "ux" if word.endswith("al") else word + ("x" if word.endswith("eau") else "s")
def conjugate(english, french):
    """English base, third person, past, participle; French present (five persons), participle, infinitive."""
    base, *past = english.split("/") if "/" in english else (english, *[english + "ed"[english[-1] == "e":]] * 2)
    forms = french.split("/") if "/" in french else [french + end for end in ("e", "ons", "ez", "e", "ent", "é", "er")]
    return base, base + ("es" if base.endswith(("s", "ch")) else "s"), *past, forms[:5], *forms[5:]
def contract(french):
    """le homme, de le roi, ce ami, ma école: l' homme, du roi, cet ami, mon école. From the right: "de l' ami" is no "du"."""
    out = []
    for word, links in reversed(french):
        after = out[-1][0] if out else ""
        if word == "de" and after in ("le", "les", "des", "de"):
            word, links, after = {"le": "du", "les": "des"}.get(after, "de"), links + out.pop()[1], out[-1][0]
        if after and after[0] in "aâeéèêiîoôuhœ":  # every h of this lexicon is silent
            if word in ("le", "la", "je", "me", "ne", "de", "que"): word = word[:-1] + "'"
            word = {"ce": "cet", "ma": "mon", "sa": "son"}.get(word, word)
        out.append((word, links))
    return out[::-1]

class Grammar:
    """Every rule says its English aloud, word by word, and returns its French as (word, English positions it comes from).
    `keep` counts the words that others still have to say: what is optional is said only while there is room."""
    def __init__(self, seed):
        self.random, self.words = random.Random(seed).random, {key: forms.split() for key, forms in FORMS.items()}
        for line in LEXICON.strip().split("\n"):
            head, entries = line.split(": ")
            self.words[head] = entries = [entry.split() for entry in entries.split(", ")]
            if head.startswith("verb"): entries[:] = [conjugate(*entry) for entry in entries]
            if head.startswith("noun"): entries[:] = [((e.split("/") + [e + "s"])[:2], *rest) for e, *rest in entries]
    def pick(self, options): return options[int(self.random() * len(options))]
    def choose(self, key): return self.pick(self.words[key])
    def chance(self, p): return self.random() < p
    def room(self, keep): return self.length - len(self.en) - keep
    def say(self, word): return self.en.append(word) or len(self.en) - 1
    def word(self, english, french):
        at = (self.say(english),)
        return [(w, at) for w in french.split("+")] if "+" in french else [(french, at)]
    def sentence(self, length):
        """A pair of about `length` English words and its gold alignment: English, French, {(i, j), ...}."""
        self.en, self.length, stop = [], length, int(self.chance(0.9))
        french = self.clause(stop)
        while self.room(stop) >= 4:
            english, joint = self.choose("joint")
            again = english == "because" and self.subject.person > 2 and self.chance(0.5)
            french += self.word(english, joint) + (self.because(stop) if again else self.clause(stop))
        if stop: french += self.word(".", ".")
        english, french = re.sub(r"\ba (?=[ai]|e(?!u))", "an ", " ".join(self.en)).split(), contract(french)
        return english, [word for word, _ in french], {(i, j) for j, (_, links) in enumerate(french) for i in links}
    def clause(self, keep):
        kinds = ("person", "person", "person", "animal", "idea", "idea", "thing", "place")
        short = self.room(keep) < 4 or self.chance(0.25)
        self.subject = subject = self.someone() if short else self.noun(self.pick(kinds), keep + 3)
        return subject.french + self.act(subject, keep)
    def because(self, keep):
        """... because it was too tired: the pronoun agrees with the subject before it."""
        _, _, gender, plural, kind = self.subject
        english = "they" if plural else "it" if kind != "person" else "she" if gender == "f" else "he"
        return self.word(english, inflect("il", "elle", gender, plural)) + self.be(self.subject, keep, "was")
    def someone(self):
        english, french, person, gender = self.choose("subject")
        return Phrase(self.word(english, french), int(person), gender, int(person in "14"), "person")
    def adjective(self, key, gender, plural):
        english, m, f = self.choose(key)
        return self.word(english, inflect(m, f, gender, plural))
    def noun(self, kind, keep, definite=False):
        """Determiner, adjectives, noun and, where there is room, an owner, a relative clause or a second noun."""
        (english, noun, gender), plural = self.choose("noun " + kind), int(self.chance(0.3))
        if self.room(keep) >= 4 and self.chance(0.1):  # the king 's dog: 's is the article as well as the "de"
            owner = self.noun("person", self.length, definite=True).french
            at = (self.say("'" if self.en[-1][-1] == "s" else "'s"),)
            determiner, after = [("les" if plural else inflect("le", "la", gender, 0), at)], [("de", at)] + owner
        else:
            word, m, f = self.pick(self.words["plural" if plural else "singular"][:7 if definite else None])
            determiner, after = self.word(word, inflect(m, f, gender, 0)), []
        own = (("before", 0.25), ({"animal": "person", "place": "idea"}.get(kind, kind), 0.25))
        own = (("idea", 0.15), ("origin", 0.35), ("field", 0.4)) if kind == "idea" else own
        described = {k: self.adjective(k, gender, plural) for k, p in own if self.room(keep) >= 2 and self.chance(p)}
        before = described.pop("before", [])
        if before and determiner[0][0] == "des": determiner = [("de", determiner[0][1])]
        french = determiner + before + self.word(english[plural], inflect(noun, noun, gender, plural))
        french += sum(reversed(described.values()), []) + after
        phrase = Phrase(french, 3 + plural, gender, plural, kind)
        if not after and self.room(keep) >= 4 and self.chance(0.3):
            if self.chance(0.6): french += self.word("who" if kind == "person" else "that", "qui") + self.act(phrase, keep)
            else:
                french += self.word("that", "que")
                subject = self.someone() if self.room(keep) < 4 or self.chance(0.5) else self.noun("person", self.length)
                french += subject.french + self.act(subject, keep, gap=phrase)
        elif not after and self.room(keep) >= 2 and kind == "idea" and self.chance(0.35):
            french += self.word(*self.pick((("on", "sur"), ("of", "de")))) + self.noun("idea", keep, definite=True).french
        return phrase
    def be(self, subject, keep, tense):
        """An adjective, or the passive: was signed, a été signé."""
        _, person, gender, plural, kind = subject
        animate = kind in ("person", "animal")
        passive = not animate and self.room(keep) >= 2 and self.chance(0.7)
        at = (self.say("will" if tense == "will" else self.words[tense][person]),)
        no = self.say("not") if self.room(keep) >= 3 and self.chance(0.2) else None
        if tense == "will": at += (self.say("be"),)  # will be: sera
        form = {"will": "sera", "be": "être", "was": "avoir" if passive else "était"}[tense]
        french = self.around([(self.words[form][person], at)], no, "pas")
        if not passive:
            if self.room(keep) >= 2 and self.chance(0.5): french += self.word(*self.pick((("too", "trop"), ("very", "très"))))
            return french + self.adjective("person" if animate else "idea", gender, plural)
        if tense == "was": french.append(("été", at))
        _, _, _, participle, _, done, _ = self.choose("verb " + kind)
        french += self.word(participle, inflect(done, done + "e", gender, plural))
        if self.room(keep) >= 3 and self.chance(0.4): french += self.word("by", "par") + self.noun("person", keep).french
        return french + self.tail(keep, tense)
    def act(self, subject, keep, gap=None):
        """An active verb. In a relative clause its object is the noun before it, the gap, and the participle agrees."""
        if not gap and (subject.kind not in ("person", "animal") or self.chance(0.15)):
            return self.be(subject, keep, self.pick(("was", "was", "be", "be", "will")))
        room, person = self.room(keep), subject.person
        kinds = ("nothing", "être", "person", "animal", "thing", "thing", "place", "idea", "idea")
        kind = gap.kind if gap else self.pick(kinds[:2 if room < 3 else 7 if subject.kind == "animal" else None])
        base, third, past, participle, present, done, infinitive = self.choose("verb " + kind)
        tense = self.pick(("present", "past", "present", "past", "have", "can", "must")[:2 if room < 4 else None])
        adverb, middle = self.choose("middle") if room >= 5 and self.chance(0.3) else (None, None)
        aux, said = None, {"present": third if person == 3 else base, "past": past, "have": participle}.get(tense, base)
        if tense in ("have", "can", "must"): aux = self.say(self.words["have"][person] if tense == "have" else tense)
        elif adverb == "not": aux, said = self.say("did" if tense == "past" else self.words["do"][person]), base
        at_middle, at = self.say(adverb) if adverb else None, self.say(said)
        clitic, rest, (gender, plural) = [], [], (gap or subject)[2:4] if gap or kind == "être" else ("m", 0)
        if kind == "person" and not gap and self.chance(0.4):
            english, french, gender, plural = self.pick(self.words["object"][2 * (person < 2):5 if person == 2 else None])
            clitic = self.word(english, french)
        elif kind not in ("nothing", "être") and not gap:
            rest = self.noun(kind, keep, definite=adverb in ("not", "never")).french
        if tense == "present": finite = clitic + [(present[person], (at,))]
        elif tense in ("can", "must"):
            finite, rest = [(self.words[tense][person], (aux,))], clitic + [(infinitive, (at,))] + rest
        else:  # one word in English, two in French: without an English auxiliary both come from the verb
            finite = clitic + [(self.words["être" if kind == "être" else "avoir"][person], (at if aux is None else aux,))]
            rest = [(inflect(done, done + "e", gender, int(plural)), (at,))] + rest
        french = self.around(finite, at_middle, middle) + rest
        return french if gap else french + self.tail(keep, tense)
    def around(self, finite, at, middle):
        """ne ... pas around the finite verb, both from "not"; often and always only follow it."""
        return finite if at is None else [("ne", (at,))] * (middle in ("pas", "jamais")) + finite + [(middle, (at,))]
    def tail(self, keep, tense):
        if self.room(keep) >= 3 and self.chance(0.3):
            english, french, kind = self.choose("where")
            return self.word(english, french) + self.noun(kind, keep).french
        if self.room(keep) < 3 or tense not in ("past", "was") or self.chance(0.7): return []
        year = self.pick(("1990", "1991", "1992", "1993", "1994", "1995", "1996", "1997", "1998", "1999"))
        return self.word("in", "en") + self.word(*self.choose("month")) + self.word(year, year)

def toy(n, seed=0, max_len=30, split="train"):
    """n pairs (source words, target words, gold) of 3 to max_len source words, more short ones than long ones.
    A sentence's words alone decide its split, so train, valid and test never share one."""
    grammar, splits, pairs = Grammar(f"{seed} {split}"), ["train"] * 8 + ["valid", "test"], []
    if not 3 <= max_len <= 1000 or split not in splits: raise InputError(f"--max-len {max_len}: must be 3 to 1000 ({split})")
    while len(pairs) < n:
        pair = grammar.sentence(3 + int((max_len - 2) * grammar.random() ** 2))
        if 3 <= len(pair[0]) <= max_len and splits[zlib.crc32(" ".join(pair[0]).encode()) % 10] == split: pairs.append(pair)
    return pairs

# ---- text, vocabularies, batches -------------------------------------------------------------------------------------
def read(path):
    """The sentences of a UTF-8 text file, plain or gzipped, as lists of words; of stdin (0) every line, whatever is in it."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                bom, words = line.startswith(b"\xef\xbb\xbf"), b" ".join(line.removeprefix(b"\xef\xbb\xbf").split())
                fault = "a NUL byte" if b"\0" in line else "CR LF" if b"\r\n" in line else "a byte-order mark" if bom else ""
                if fault and path: raise InputError(f"{path}, line {number}: has {fault}; give plain UTF-8 text with LF alone")
                yield words.decode(errors="strict" if path else "replace").split(" ") if words else []
    except UnicodeDecodeError: raise InputError(f"{path}, line {number}: not UTF-8; convert the file first") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read, {getattr(error, 'strerror', None) or error}; give a text file") from None

def read_pairs(source, target):
    """The pairs of two files, line for line."""
    for number, pair in enumerate(itertools.zip_longest(read(source), read(target))):
        short = source if pair[0] is None else target
        if None in pair: raise InputError(f"{short} ends after line {number}, before its partner; give equally many lines")
        yield pair

class Vocabulary(dict):
    """Word to number, UNK for an unknown word; .words is the list of words in order."""
    def __init__(self, words):
        super().__init__({word: i for i, word in enumerate(words) if i >= UNK})  # "<pad>" in a text is not padding
        self.words = list(words)
    def __missing__(self, word): return UNK

def learn(pairs, sizes=(None, None), min_count=1, joint=False, max_len=None):
    """(Bitext, two vocabularies) of training text, read once: a side's most frequent words, at most `sizes` with the four
    specials, the rest UNK; if joint, one vocabulary for both."""
    new = lambda: collections.defaultdict(itertools.count(UNK + 1).__next__, {"<unk>": UNK})  # each new word the next number
    grown = [new()] * 2 if joint else [new(), new()]
    bitext = Bitext(pairs, grown, max_len)
    lists = [SPECIALS[:UNK] + list(numbers) for numbers in grown]
    counts = [np.bincount(tokens, minlength=len(words)) for tokens, words in zip(bitext.tokens, lists)]
    if joint: counts, sizes = [sum(counts)] * 2, sizes[:1] * 2
    for side, (words, count, size) in enumerate(zip(lists, counts, sizes)):
        known = [i for i in range(len(SPECIALS), len(words)) if count[i] >= min_count and words[i] not in SPECIALS]
        known = [*range(len(SPECIALS)), *sorted(known, key=lambda i: (-count[i], words[i]))][:size]
        table = np.full(len(words), UNK, np.int32)
        table[known] = np.arange(len(known))
        bitext.tokens[side], grown[side] = table[bitext.tokens[side]], Vocabulary([words[i] for i in known])
    return bitext, grown

def coarse(n): return -(-n // (step := 2 ** np.maximum(np.log2(n).astype(int) - 2, 0))) * step  # up to three significant bits
class Bitext:
    """Numbered sentence pairs, flat: a side is one array of tokens and one of the places where its sentences begin.
    Pairs with an empty side or one of more than max_len words are left out and counted in .skipped."""
    def __init__(self, pairs, vocabularies, max_len=None):
        self.skipped, pairs, parts = 0, iter(pairs), [[(np.zeros(0, np.int32), np.zeros(0, np.int64))] for _ in range(2)]
        while block := list(itertools.islice(pairs, 10000)):
            kept = [pair for pair in block if not max_len or all(0 < len(words) <= max_len for words in pair[:2])]
            self.skipped += len(block) - len(kept)
            for side, vocabulary in enumerate(vocabularies):
                n = np.array([len(pair[side]) for pair in kept], np.int64)
                words = itertools.chain.from_iterable(pair[side] for pair in kept)
                ids = np.fromiter(map(vocabulary.__getitem__, words), np.int32, n.sum())
                ends = n.cumsum()
                frame = (np.stack([ends - n, ends], 1).ravel(), [BOS, EOS] * len(n)) if side else (ends, EOS)
                parts[side].append((np.insert(ids, *frame), n + 1 + side))
        self.tokens, self.lengths = map(list, zip(*(map(np.concatenate, zip(*part)) for part in parts)))
        self.starts = [np.cumsum(n) - n for n in self.lengths]

    def __len__(self): return len(self.lengths[0])
    def batch(self, rows, even=False):
        """(src, tgt) of these rows, padded to the right."""
        out = []
        for side, (tokens, starts, lengths) in enumerate(zip(self.tokens, self.starts, self.lengths)):
            place = np.arange(coarse(lengths[rows].max() - 1) + 1 if even and side else lengths[rows].max())
            grid = tokens[np.minimum(starts[rows, None] + place, len(tokens) - 1)]
            out.append(np.where(place < lengths[rows, None], grid, PAD).astype(np.int64))
        return out
    def cut(self, tokens, sentences=None, ties=None, even=False):
        """The rows, like lengths together, cut into batches of at most `tokens`, padding counted. If even, sources of one length
        make a batch, and targets of coarse lengths: the same shapes come again and again."""
        src, tgt, near = (self.lengths[0], coarse(self.lengths[1] - 1) + 1, 1) if even else (*self.lengths, 3)
        # sorted by source length, in threes, and by target length up and down in turn: little padding
        order = np.lexsort((np.arange(len(self)) if ties is None else ties, src, tgt * (-1) ** (src // near), src // near))
        src, tgt, batches, at = src[order], tgt[order], [], 0
        while at < len(order):
            window = slice(at, at + min(tokens // (src[at] + tgt[at]) + 1, sentences or len(order)))
            cost = np.maximum.accumulate(src[window]) + np.maximum.accumulate(tgt[window])
            size = max(int(np.searchsorted(cost * np.arange(1, len(cost) + 1), tokens, "right")), 1)
            if even: size = min(size, int(np.searchsorted(src[window], src[at], "right")))
            batches.append(order[at:at + size])
            at += size
        return batches
    def epoch(self, tokens, sentences=None, seed=0, epoch=0, skip=0, rank=0, world=1, even=False):
        """An epoch's batches, in an order that (seed, epoch) alone decides, from the skip-th on. Of several processes
        each gets every world-th row of a joint batch `world` times as big; if it gets none, one with an empty target."""
        random = np.random.default_rng((seed, epoch))
        batches = self.cut(tokens * world, sentences and sentences * world, random.permutation(len(self)), even)
        for rows in (batches[i] for i in random.permutation(len(batches))[skip:]):
            src, tgt = self.batch(rows[rank::world] if rank < len(rows) else rows[:1], even)
            yield src, tgt * (rank < len(rows))

# ---- scores ----------------------------------------------------------------------------------------------------------
def bleu(hypotheses, references):
    """Corpus BLEU-4 of lists of words, 0 to 100. An order without a match counts as 1/2, the next 1/4, as in sacreBLEU."""
    hits, total = [0] * 4, [0] * 4
    for sentences in zip(hypotheses, references, strict=True):
        for n in range(4):
            hyp, ref = (collections.Counter(zip(*(words[i:] for i in range(n + 1)))) for words in sentences)
            hits[n] += (hyp & ref).total()
            total[n] += hyp.total()
    if not any(hits) or not all(total): return 0.0
    precision = sum(math.log((hits[n] or 2.0 ** -hits[:n + 1].count(0)) / total[n]) for n in range(4)) / 4
    return 100 * math.exp(precision + min(0, 1 - sum(map(len, references)) / total[0]))

def aer(predicted, gold):
    """Alignment error rate of lists of link sets {(source index, target index), ...}: 0 is perfect, 1 is all wrong."""
    both, total = sum(len(p & g) for p, g in zip(predicted, gold, strict=True)), sum(map(len, [*predicted, *gold]))
    return 1 - 2 * both / total if total else 0.0

# ---- alignments: alpha has a row a target word, a column a source word, the end marks last ------------------------------
def links(alpha):  # {(source index, target index), ...}: each target word's maximum; EOS, last of both, has no link
    return {(int(i), j) for j, i in enumerate(alpha[:-1].argmax(-1)) if i < alpha.shape[1] - 1}
def pharaoh(alpha): return " ".join(f"{i}-{j}" for i, j in sorted(links(alpha)))
def heatmap(source, target, alpha):  # in the terminal: a column a source word, a row a target word
    high, wide = (max(map(len, words), default=0) for words in (source, target))
    head = [" " * (wide + 1) + " ".join(word.rjust(high)[k] for word in source) for k in range(high)]
    shade = lambda row: "".join(" ░▒▓█"[min(int(5 * a), 4)] * 2 for a in row[:len(source)])
    return "\n".join(head + [word.rjust(wide) + " " + shade(row) for word, row in zip(target, alpha)])
def svg(source, target, alpha):  # the same as a picture, readable on light and dark
    left, top = (12 + 9 * max(map(len, words), default=0) for words in (target, source))
    style = "text{fill:#6e7781}rect{fill:#2f7fd6}"
    label = lambda x, y, more, word: f'<text transform="translate({x},{y}){more}>{html.escape(word)}</text>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 22 * len(source) + 12}" '
             f'height="{top + 22 * len(target) + 12}" font-family="monospace" font-size="15"><style>{style}</style>']
    parts += [label(left + 22 * j + 15, top - 6, ' rotate(-90)"', word) for j, word in enumerate(source)]
    parts += [label(left - 6, top + 22 * i + 15, '" text-anchor="end"', word) for i, word in enumerate(target)]
    parts += [f'<rect x="{left + 22 * j}" y="{top + 22 * i}" width="21" height="21" opacity="{0.07 + 0.93 * alpha[i, j]:.2f}"/>'
              for i in range(len(target)) for j in range(len(source))]
    return "\n".join([*parts, "</svg>\n"])
