"""Writes the built-in corpus: a grammar generates English and French sentences together, so that
the right alignment of every word is known (valid.links and test.links, in Pharaoh format).

    python corpus/grammar.py                       rewrites this folder, but for simple.en and .fr
    python corpus/grammar.py long --max-len 60     longer sentences, in the folder long
"""

import argparse
import collections
import random
import re
import zlib
from pathlib import Path

# A line is "role kind kind ...: entry, entry, ..."; the fields of an entry depend on the role:
#   noun (kind: what it denotes)    city/cities ville f    English[/plural] French gender
#   before, quality, origin, field  red rouge rouge        adjective: English masculine feminine;
#     only "before" precedes a French noun; "before" and "quality" also follow a form of "be"
#   the, a                          my mon ma              determiner, like an adjective
#   verb (kind: its object)         keep/kept/kept gard    English[/past/participle], then the stem
#     of an -er verb, or je/nous/vous/il/ils/participle/infinitive, as in vois/voyons/.../vu/voir;
#     kind "nothing": intransitive, "être": intransitive and conjugated with être
#   name, subject, object           he il 3 m              name or pronoun: English French person
#     gender; persons are 0: je, 1: nous, 2: vous, 3: il, 4: ils; an object lists its subjects
#   where, about, agent             near près+de place     preposition: English French noun's kind;
#     "+" is a space; "where be" follows a form of "be", "where act" another verb
#   be, être, avoir, can, must      suis, sommes, ...      a form for each of the five persons
#   vowel, noun-vowel               le l', beau bel        its form before any vowel, or a noun's
#   degree, adverb, month, year, joint  august août        any other word: English French
#   subjects, persons, does, tense  past, past, have       choices; a repeated one is more likely
LEXICON = """
noun person: man/men homme m, woman/women femme f, boy garçon m, girl fille f, king roi m
noun person: queen reine f, friend ami m, child/children enfant m, nurse infirmière f
noun person: sister sœur f, minister ministre m, doctor médecin m
noun animal: cat chat m, dog chien m, bird oiseau m, horse cheval m, animal animal m, cow vache f
noun thing: mat tapis m, book livre m, car voiture f, hat chapeau m, tree arbre m, table table f
noun thing food: pie tarte f, apple pomme f
noun place: garden jardin m, market marché m, house maison f, school école f, city/cities ville f
noun ground: street rue f, park parc m, forest forêt f, field champ m, village village m
noun idea: agreement accord m, treaty/treaties traité m, law loi f, report rapport m, plan plan m
noun idea: measure mesure f, reform réforme f, budget budget m, decision décision f
noun topic: area zone f, union union f, crisis/crises crise f, problem problème m

the singular: the le la, the le la, the le la, this ce cette, my mon ma, his son sa, her son sa
the plural: the les les, the les les, these ces ces, my mes mes, his ses ses, her ses ses
a singular: a un une
a plural: many beaucoup+de beaucoup+de, some des des, two deux deux

before person animal: young jeune jeune, poor pauvre pauvre
before person animal thing food place ground: small petit petite, big grand grande
before person animal thing food place ground: beautiful beau belle
before person animal thing place ground: old vieux vieille
before person thing place idea topic: new nouveau nouvelle
quality person animal: tired fatigué fatiguée, famous célèbre célèbre, strange étrange étrange
quality person animal: happy heureux heureuse
quality animal thing: black noir noire, white blanc blanche, useful utile utile
quality thing food: red rouge rouge, green vert verte
quality place ground: dangerous dangereux dangereuse, dark sombre sombre, empty vide vide
quality idea topic: important important importante, difficult difficile difficile
origin idea topic: european européen européenne, french français française
origin idea topic: italian italien italienne
field idea topic: economic économique économique, political politique politique
field idea topic: social social sociale
degree: too trop, very très

verb person pronoun animal thing: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, love aim
verb food place ground: see/saw/seen vois/voyons/voyez/voit/voient/vu/voir, love aim
verb person pronoun animal: watch regard
verb person pronoun: hit/hit/hit frapp, admire admir, leave/left/left quitt
verb animal thing: find/found/found trouv, draw/drew/drawn dessin
verb animal thing: have/had/had ai/avons/avez/a/ont/eu/avoir
verb thing: keep/kept/kept gard, forget/forgot/forgotten oubli
verb food: eat/ate/eaten mange/mangeons/mangez/mange/mangent/mangé/manger
verb place: visit visit
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

name: john jean 3 m, mary marie 3 f
subject any because: i je 0 m, we nous 1 m, you vous 2 m, he il 3 m, she elle 3 f
subject any: they ils 4 m, john jean 3 m, mary marie 3 f
object 2 3 4: me me 0 m, us nous 1 m
object 0 1 3 4: you vous 2 m
object 0 1 2 3 4: him le 3 m, her la 3 f, them les 4 m

where be act: on sur thing, under sous thing, near près+de thing, with avec person
where be act: in dans place, in dans ground, near près+de place, near près+de ground
where act: with avec thing
about: on sur topic, of de person
agent: by par person
month: january janvier, march mars, april avril, june juin, july juillet, august août
year: 1991 1991, 1992 1992, 1993 1993, 1994 1994, 1995 1995, 1996 1996, 1997 1997, 1998 1998
joint: and et, and et, but mais, or ou, because parce+que
vowel: le l', la l', je j', me m', ne n', de d', que qu', ce cet, ma mon, sa son
noun-vowel: beau bel, nouveau nouvel, vieux vieil

subjects: person, person, person, animal, idea, idea, topic, thing, place, ground
persons: person
does short: quality, quality, nothing, être, pronoun
does person: quality, quality, where, nothing, nothing, être, person, person, pronoun, pronoun
does person: animal, animal, thing, thing, food, place, ground, idea, idea, topic
does animal: quality, quality, where, nothing, nothing, être, person, pronoun, animal, food, ground
does thing: quality, where, passive
does food place ground idea topic: quality, passive
tense short: present, past
tense long: present, present, past, past, have, can, must
"""
ALIVE = ("person", "animal", "pronoun")
STATES = ("quality", "passive", "where")  # a form of "be" and what follows it
JOINED = {"de le": "du", "de les": "des", "de des": "de", "de de": "de", "à le": "au"}
# French is a list of (word, positions of the English words it comes from), such as ("du", (2, 3)).
Phrase = collections.namedtuple("Phrase", "french person gender plural kind")
FORMS = "english masculine feminine base third past present infinitive"
# An adjective has the first three forms; a verb has all, the first three being its participle's.
Word = collections.namedtuple("Word", FORMS, defaults=[None] * 5)


def conjugate(english, french):  # the Word of a verb's entry
    if "/" not in english:
        past = english + ("d" if english.endswith("e") else "ed")
        english = f"{english}/{past}/{past}"
    base, past, participle = english.split("/")
    third = "has" if base == "have" else base + ("es" if base.endswith(("s", "ch")) else "s")
    if "/" not in french:
        french = "/".join(french + x for x in ("e", "ons", "ez", "e", "ent", "é", "er"))
    *present, done, infinitive = french.split("/")
    return Word(participle, done, done + "e", base, third, past, present, infinitive)


def read_lexicon(lexicon):
    """{"role kind": [entry, ...]}, or {"role": [entry, ...]} for a role that has no kinds; an entry
    is a list of fields, or a string if there is only one field."""
    words = {}
    for line in filter(None, lexicon.split("\n")):
        head, entries = line.split(": ")
        role, *kinds = head.split()
        fields = [entry.split() for entry in entries.split(", ")]
        found = [entry if len(entry) > 1 else entry[0] for entry in fields]
        for key in [f"{role} {kind}" for kind in kinds] or [role]:
            words.setdefault(key, []).extend(found)
    return words


WORDS = read_lexicon(LEXICON)
BEFORE_VOWEL = dict(WORDS["vowel"])
BEFORE_NOUN = dict(WORDS["noun-vowel"])
VOWELS = tuple("aâeéèêiîoôuhœ")  # each h here is silent


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
    if kind in STATES:
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
    joined = []  # the last word first: le becomes l' before "de le" can become "du"
    after = ""
    for word, positions in reversed(french):
        if word == "dans" and f"{after} {joined[-2][0]}" in ("le marché", "l' école"):
            word = "à"  # au marché, à l' école
        if f"{word} {after}" in JOINED:
            word = JOINED[f"{word} {after}"]
            positions += joined.pop()[1]
            after = joined[-1][0]
        if word in BEFORE_VOWEL and after.startswith(VOWELS):
            word = BEFORE_VOWEL[word]
        joined.append((word, positions))
        after = word
    return joined[::-1]


class Grammar:
    """Each rule adds its English words to self.english and returns its French words with links."""

    def __init__(self, seed):
        self.random = random.Random(seed).random  # the only method whose sequence Python keeps
        self.length = 0  # the number of English words to generate
        self.english = []  # the words so far
        self.topics = []  # the nouns of the last clause to which "because it" can refer
        self.completed = False  # whether the last verb is in the past, so that a date can follow
        self.unclear = False  # whether the subject follows "because" and could be either topic

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
        english, masculine, feminine = self.pick(key)
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
        english = re.sub(
            r"\ba (?=[aio]|e(?!u))", "an ", english
        )  # an old law; a european, a useful
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
        if self.room(keep) <= 0 or self.random() < 0.25:
            return self.someone("subject because" if because else "subject any")
        noun = self.noun(self.pick(key), keep)
        if noun.kind in ALIVE and len(noun.french) < 3 and self.random() < 0.1:
            return self.couple(noun)
        return noun

    def couple(self, first):  # the king and mary
        french = first.french + self.word("and", "et")
        second = self.noun(first.kind, keep=self.length)  # no room for more than its determiner
        gender = first.gender if first.gender == second.gender else "m"
        return Phrase(french + second.french, 4, gender, True, first.kind)

    def pronoun(self, noun):  # replaces a noun, as a subject
        english = "they" if noun.plural else "it"
        if noun.kind == "person" and not noun.plural:
            english = "she" if noun.gender == "f" else "he"
        french = inflect("il", "elle", noun.gender, noun.plural)
        return noun._replace(french=self.word(english, french))

    def someone(self, key):  # a pronoun or a name
        english, french, person, gender = self.pick(key)
        plural = person in ("1", "4")  # nous and ils; vous is one person here
        return Phrase(self.word(english, french), int(person), gender, plural, "person")

    def noun(self, kind, keep, definite=False, negated=False):
        """Determiner, adjectives, noun, and its owner or more about it; or a name, of a person."""
        if kind == "person" and self.random() < 0.25:
            return self.someone("name")
        english, french, gender = self.pick(f"noun {kind}")
        plural = self.random() < 0.3
        owner = []
        if kind != "person" and self.random() < 0.1 and self.room(keep) >= 4:
            determiner, owner = self.owner(gender, plural)
        else:
            definite = definite or (negated and plural) or self.random() < 0.75  # no "not some"
            role = "the" if definite else "a"
            determiner = self.agree(f"{role} plural" if plural else f"{role} singular", gender)
        before = []
        if self.random() < 0.25 and self.room(keep) >= 2:
            before = self.agree(f"before {kind}", gender, plural)
            if not plural and french.startswith(VOWELS):
                before = [(BEFORE_NOUN.get(word, word), link) for word, link in before]
        article, link = determiner[0]
        if (article in ("un", "une") and negated) or (article == "des" and before):
            determiner = [("de", link)]  # pas de chat, de petits chats
        after = owner
        for role in ("quality", "origin", "field"):  # reversed in French: économique européenne
            if f"{role} {kind}" in WORDS and self.random() < 0.3 and self.room(keep) >= 2:
                after = self.agree(f"{role} {kind}", gender, plural) + after
        singular, _, irregular = english.partition("/")  # man/men, but cat, without its plural
        english = (irregular or singular + "s") if plural else singular
        name = self.word(english, inflect(french, french, gender, plural))
        words = determiner + before + name + after
        phrase = Phrase(words, 4 if plural else 3, gender, plural, kind)
        if not owner:
            phrase.french.extend(self.more(phrase, keep))
        return phrase

    def owner(self, gender, plural):  # the king 's: the article before a noun, "du roi" after it
        owner = self.noun("person", keep=self.length, definite=True)  # only its determiner
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
        is_short = room < 3 and subject.kind in ALIVE
        kind = gap.kind if gap else self.pick("does " + ("short" if is_short else subject.kind))
        # In "the cat saw the park because it was small", "it" could be either.
        self.unclear = self.english[-2:-1] == ["because"] and len(self.topics) > 1
        if kind == "where" and self.unclear:
            kind = "quality"
        french = self.verb(kind, subject, room, gap)
        thing = None
        if not gap and f"noun {kind}" in WORDS:
            thing = self.noun(kind, keep, negated=french[0][0] == "ne")
            french += thing.french
        if kind == "passive" and self.random() < 0.4 and self.room(keep) >= 3:
            french += self.attach("agent", keep)
        if kind == "where":
            french += self.attach("where be", keep)
        elif not gap and kind != "quality":
            french += self.tail(keep)
        nouns = [noun for noun in (subject, thing) if noun and noun.person in (3, 4)]
        # "it" could be either in "the cat saw the dog because it was tired", so keep neither.
        self.topics = [] if kind in ALIVE else nouns
        return french

    def predicate(self, kind, subject):  # a verb or an adjective, or nothing if a place follows
        if kind == "where":
            return Word("", "", "")
        if kind == "passive":
            word = conjugate(*self.pick(f"verb {subject.kind}"))
            return self.predicate(kind, subject) if word.base == "have" else word  # not "is had"
        if kind != "quality":
            return conjugate(*self.pick(f"verb {kind}"))
        before = self.random() < 0.4 and not self.unclear
        return Word(*self.pick(f"{'before' if before else 'quality'} {subject.kind}"))

    def verb(self, kind, subject, room, gap):
        """The verb with auxiliary, adverb and pronoun."""
        is_state = kind in STATES
        word = self.predicate(kind, subject)
        tense = self.pick("tense short" if is_state or room < 4 else "tense long")
        # "i hit her" could be present or past; "had" would need the imperfect.
        tense = dict(hit="past", have="present").get(word.base, tense)
        adverb, pas = self.pick("adverb") if room >= 3 and self.random() < 0.3 else ("", "")
        self.completed = tense == "past" and adverb in ("", "not")
        auxiliary, english, finite, rest = forms(word, kind, subject.person, tense, adverb == "not")
        # English, from left to right: does, not, very, see
        if auxiliary == "can" and adverb == "not":
            auxiliary_at = adverb_at = self.say("cannot")
        else:
            auxiliary_at = self.say(auxiliary) if auxiliary else None
            adverb_at = self.say(adverb) if adverb else None
        very = kind == "quality" and room >= 3 and self.random() < 0.5
        degree = self.word(*self.pick("degree")) if very else []
        verb_at = self.say(english) if english else None
        pronoun = self.someone(f"object {subject.person}") if kind == "pronoun" else None
        # Adjectives agree with the subject, participles also with an object that precedes them.
        leader = subject if is_state or kind == "être" else (pronoun or gap)
        if leader and rest and rest == word.masculine:
            rest = inflect(word.masculine, word.feminine, leader.gender, leader.plural)
        # French: ne, la, a, pas, été, vue; n', est, pas, très, grande
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

    def tail(self, keep):  # a prepositional phrase, a date (only once, after the past) or nothing
        if self.random() < 0.3 and self.room(keep) >= 3:
            return self.attach("where act", keep)
        if self.room(keep) < 3 or not self.completed or self.random() < 0.6:
            return []
        self.completed = False
        date = self.word("in", "en") + self.word(*self.pick("month"))
        return date + self.word(*self.pick("year"))


def generate(n, split, max_len=30):
    """n triples (English, French, links) with 3 to max_len English words; short ones can recur."""
    excluded = {EXAMPLE[0], *Path(__file__).with_name("simple.en").read_text().splitlines()}
    splits = ["train"] * 8 + ["valid", "test"]  # every sentence belongs to one of them
    grammar = Grammar(f"0 {split}")
    pairs = []
    while len(pairs) < n:
        length = 3 + int((max_len - 2) * grammar.random() ** 2)  # short ones are more frequent
        english, french, links = grammar.sentence(length)
        text = " ".join(english)
        doubled = re.search(r"\b(\w+|\w+ \w+) and \1\b", text)  # john and john
        fits = 3 <= len(english) <= max_len and text not in excluded and not doubled
        if fits and splits[zlib.crc32(text.encode()) % 10] == split:
            pairs.append((text, " ".join(french), links))
    return pairs


# The example of Bahdanau et al., figure 3, is the first sentence of the test set.
EXAMPLE = (
    "the agreement on the european economic area was signed in august 1992 .",
    "l' accord sur la zone économique européenne a été signé en août 1992 .",
    {(0, 0), (1, 1), (2, 2), (3, 3), (6, 4), (5, 5), (4, 6), (7, 7), (7, 8), (8, 9)}
    | {(9, 10), (10, 11), (11, 12), (12, 13)},
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--max-len", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=25000, help="training pairs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, n in dict(train=args.pairs, valid=500, test=999).items():
        pairs = [EXAMPLE] if split == "test" else []
        pairs += generate(n, split, args.max_len)
        if split == "valid":  # first 11 words: scripts show how the first sentence is learned
            pairs.sort(key=lambda pair: len(pair[0].split()) != 11)
        english, french, links = zip(*pairs)
        columns = dict(en=english, fr=french)
        if split != "train":
            columns["links"] = [" ".join(f"{i}-{j}" for i, j in sorted(x)) for x in links]
        for name, lines in columns.items():
            text = "".join(line + "\n" for line in lines)
            (args.out / f"{split}.{name}").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
