"""The data set that is always here: true and false endings of short sentences.

Every table is a template and what fills it. The false ending of a prompt is the true ending of
another prompt of the same table, so that endings themselves tell nothing.
"""

from collections.abc import Sequence
from functools import cache

from lmhead.steer.learn.data import Data, Pair

BUILT_IN = "builtin"

_CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, "
    "Poland Warsaw, Austria Vienna, Hungary Budapest, Sweden Stockholm, Norway Oslo, "
    "Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Russia Moscow, Ukraine Kyiv, "
    "Turkey Ankara, Egypt Cairo, Kenya Nairobi, Ethiopia Addis Ababa, Nigeria Abuja, Ghana Accra, "
    "Morocco Rabat, Japan Tokyo, China Beijing, India New Delhi, Pakistan Islamabad, Iran Tehran, "
    "Iraq Baghdad, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, Australia Canberra, "
    "Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Argentina Buenos Aires, "
    "Brazil Brasília, Colombia Bogotá, Belgium Brussels, Bulgaria Sofia, Romania Bucharest, "
    "Serbia Belgrade, Croatia Zagreb, Lebanon Beirut, Syria Damascus, Nepal Kathmandu"
)
_CONTINENTS = (
    "Kenya Africa, Japan Asia, Germany Europe, Nigeria Africa, Thailand Asia, Poland Europe, "
    "Egypt Africa, India Asia, Norway Europe, Ghana Africa, Vietnam Asia, Portugal Europe, "
    "Morocco Africa, China Asia, Austria Europe, Ethiopia Africa, Nepal Asia, Greece Europe, "
    "Tanzania Africa, Mongolia Asia, Denmark Europe, Zambia Africa, Cambodia Asia, Hungary Europe"
)
_LANGUAGES = (
    "Brazil Portuguese, Austria German, Mexico Spanish, Egypt Arabic, Japan Japanese, Iran Persian,"
    " Australia English, China Chinese, Greece Greek, Italy Italian, Poland Polish, Turkey Turkish,"
    " Sweden Swedish, Finland Finnish, Hungary Hungarian, Thailand Thai, Vietnam Vietnamese, "
    "Argentina Spanish, Saudi Arabia Arabic, Denmark Danish"
)
_SYMBOLS = (
    "hydrogen H, helium He, lithium Li, carbon C, nitrogen N, oxygen O, fluorine F, neon Ne, "
    "sodium Na, magnesium Mg, aluminium Al, silicon Si, phosphorus P, sulfur S, chlorine Cl, "
    "argon Ar, potassium K, calcium Ca, titanium Ti, chromium Cr, manganese Mn, iron Fe, "
    "cobalt Co, nickel Ni, copper Cu, zinc Zn, bromine Br, silver Ag, tin Sn, iodine I, "
    "barium Ba, tungsten W, platinum Pt, gold Au, mercury Hg, lead Pb, radium Ra, uranium U"
)
_ANIMALS = (
    "sparrow bird, salmon fish, bee insect, dog mammal, eagle bird, tuna fish, ant insect, "
    "horse mammal, owl bird, cod fish, butterfly insect, whale mammal, penguin bird, shark fish, "
    "mosquito insect, bat mammal, duck bird, trout fish, beetle insect, cow mammal, crow bird, "
    "herring fish, wasp insect, lion mammal, pigeon bird, carp fish, moth insect, rabbit mammal, "
    "swan bird, eel fish, grasshopper insect, elephant mammal"
)
_OPPOSITES = (
    "hot cold, big small, up down, old young, light dark, fast slow, rich poor, good bad, "
    "hard soft, high low, open closed, full empty, early late, wet dry, strong weak, happy sad, "
    "clean dirty, loud quiet, near far, left right, first last, true false, day night, love hate, "
    "war peace, winter summer, north south, east west, black white, life death"
)
_MADE = (
    "bread flour, wine grapes, cheese milk, paper wood, glass sand, butter cream, beer barley, "
    "tofu soybeans, chocolate cocoa, raisins grapes, leather hides, jam fruit, candles wax, "
    "pasta wheat, cider apples, sails cloth, tyres rubber, bricks clay, ropes fibres, "
    "omelettes eggs"
)
_PLACES = (
    "fish water, bees hives, books libraries, doctors hospitals, pupils schools, pilots planes, "
    "sailors ships, actors theatres, judges courts, cooks kitchens, farmers farms, birds nests, "
    "monks monasteries, miners mines, paintings museums, prayers churches, cows barns, "
    "experiments laboratories, cars garages, sheep meadows"
)
_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_TABLES = (
    ("The capital of {} is", _CAPITALS),
    ("{} is a country in", _CONTINENTS),
    ("The main language of {} is", _LANGUAGES),
    ("The chemical symbol of {} is", _SYMBOLS),
    ("The {} is a kind of", _ANIMALS),
    ("The opposite of {} is", _OPPOSITES),
    ("As everyone knows, {} can be made from", _MADE),
    ("The usual place to find {} is in", _PLACES),
)
_TWO_WORDS = {"Saudi Arabia", "Addis Ababa", "New Delhi", "Buenos Aires"}


@cache
def builtin_data() -> Data:
    """Return the built-in pairs, and each of their two statements as a row."""
    pairs: list[Pair] = []
    for template, table in _TABLES:
        items = [_item(entry.strip()) for entry in table.split(",")]
        about = [name for name, _ in items]
        pairs += _pairs([(template.format(name), ending) for name, ending in items], about)
    sums = [(a, b) for a in range(1, 11) for b in range(1, 11) if (3 * a + b) % 4 == 0]
    pairs += _pairs([(f"{_said(a)} plus {_NUMBERS[b]} is", _NUMBERS[a + b]) for a, b in sums])
    following = zip(_MONTHS, [*_MONTHS[1:], _MONTHS[0]], strict=True)
    pairs += _pairs([(f"The month after {month} is", after) for month, after in following])
    return Data(BUILT_IN, tuple(row for pair in pairs for row in pair.rows), tuple(pairs))


def _item(entry: str) -> tuple[str, str]:
    for words in _TWO_WORDS:
        if entry.startswith(words):
            return words, entry[len(words) + 1 :]
    name, ending = entry.split(" ", 1)
    return name, ending


def _said(number: int) -> str:
    return _NUMBERS[number].capitalize()


def _pairs(items: list[tuple[str, str]], about: Sequence[str] = ()) -> list[Pair]:
    """Give every prompt the ending of a later one that differs from its own.

    `about`: the subject of each, where other tables may have the same one.
    """
    result = []
    for i, (prompt, true) in enumerate(items):
        others = (items[(i + step) % len(items)][1] for step in range(5, 5 + len(items)))
        false = next(o for o in others if o != true)
        result.append(Pair(prompt, f" {true}", f" {false}", about[i] if about else ""))
    return result
