"""Words that come more often than others, as RULER's common words and frequent words ask for them."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from longreach.tasks.ruler import common_words, frequent_words
from longreach.tasks.ruler.common_words import CommonWords, numbered
from longreach.tasks.ruler.frequent_words import DOTS, FrequentWords
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked, taken


def common(random: Random, room: int, materials: Materials) -> Page:
    """A numbered list in which some words come several times as often as the others; their order is free."""
    number = 10 if random.random() < 0.7 and room > 900 else random.randrange(3, 6 if room < 900 else 11)
    words = _words(random, materials, 2 * number + 30 + room // 8)
    task = CommonWords(common=number)
    question = f"{common_words.ASKED} {common_words.BEGUN}".format(common=number)
    head = ""
    if random.random() < 0.8 and room > 1000:
        form = common_words.LONG if room > 3800 else common_words.SHORT
        shown, words = words[: number + form.others], words[number + form.others :]
        head = f"{task.worked(random, shown, form)}\n\n"
    chosen, rare = words[:number], words[number:]
    pairs = asked(materials, [Exchange(question, " " + numbered(chosen))], room)
    share, most = random.uniform(0.25, 0.6), random.choice((30, 30, 30, random.randrange(10, 60)))
    total, apart = room // 4, random.choice((3, 3, 1, 2, 4, 5))
    while True:
        often = max(2, min(int(share * total / number), most))
        seldom = max(1, min(apart, often // 3))
        entries = [word for word in chosen for _ in range(often)]
        for word in rare[: max(0, total - len(entries)) // seldom]:
            entries += [word] * seldom
        random.shuffle(entries)
        context = materials.tokens(f"{head}{common_words.INTRO}\n{numbered(entries)}\n\n")
        over = len(context) / (room - taken(pairs))
        if over <= 1 or total <= 2 * number:
            return Page(context, pairs)
        total = max(2 * number, int(total * min(0.97, 0.99 / over)))


def frequent(random: Random, room: int, materials: Materials) -> Page:
    """Coded words whose counts follow a zeta law, dots the most frequent; the next three, the most frequent first."""
    count = int(3 * room**0.5)  # more than have a place in so many tokens
    letters = 6 if random.random() < 0.7 else random.randrange(3, 9)
    codes = list(dict.fromkeys("".join(random.choice(ascii_lowercase) for _ in range(letters)) for _ in range(count)))
    cost = list(map(len, materials.encode([f" {code}" for code in [DOTS, *codes]])))
    question = f"{frequent_words.ASKED} {frequent_words.BEGUN}"
    pairs = asked(materials, [Exchange(question, " " + " ".join(codes[:3]))], room)
    left = room - taken(pairs) - len(materials.tokens(f"{frequent_words.INTRO}\n")) - 4
    for alpha in (2.0 if random.random() < 0.5 else random.uniform(1.6, 3.0), 2.0, 1.5):
        task, total = FrequentWords(alpha=alpha), left
        times = task.times(total, len(cost))
        while sum(n * c for n, c in zip(times, cost, strict=True)) > left:
            total = int(total * 0.97)
            times = task.times(total, len(cost))
        if times[3] > times[4]:  # the third is a clear one
            break
    words = [word for word, n in zip([DOTS, *codes], times, strict=True) for _ in range(n)]
    random.shuffle(words)
    return Page(materials.tokens(f"{frequent_words.INTRO}\n{' '.join(words)}\n\n"), pairs)


def _words(random: Random, materials: Materials, count: int) -> list[str]:
    """So many different words: common ones, and, where more are asked for, adjectives and nouns written as one."""
    count = min(count, 6000)
    found = dict.fromkeys(random.sample(materials.words, min(count, len(materials.words))))
    joined = 0.2 if random.random() < 0.5 else 0.0
    names = [materials.keys.pair(random).replace(" ", "") if random.random() < joined else word for word in found]
    found = dict.fromkeys(names)
    while len(found) < count:
        found[materials.keys.pair(random).replace(" ", "")] = None
    names = list(found)
    random.shuffle(names)
    return names
