"""Word pools and the draw of values from them.

Training and held-out text never share a name, a city, an object or an invented word: a word belongs to the held-out
eighth or to the training rest by its CRC-32, and a `Values` object draws from one side alone; whole questions are divided the same way. Small pools (colours,
rooms, weekdays) are vocabulary that both sides use.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

NAMES = """Ada Adam Agnes Aisha Alan Alba Albert Alice Alma Amara Amir Ana Andre Anna Anton Anya Arjun Arlo Aron Asha
Astrid Axel Bea Beatriz Ben Bella Boris Bruno Bo Cara Carl Carmen Cecil Chen Chloe Clara Cleo Cora Dana Daniel Daria
David Dev Diana Diego Dora Dylan Edda Eddie Edgar Edith Elena Eli Elias Ella Elsa Emil Emma Enzo Erik Erin Esme Ethan
Eva Ezra Farah Felix Finn Fiona Flora Frank Freya Frida Gabriel Gemma George Gina Grace Greta Gus Hana Hans Harald Hassan
Hazel Hector Heidi Helen Henry Hiro Hugo Ian Ida Igor Ines Ingrid Irene Iris Isaac Ivan Ivy Jack Jada James Jan Jana
Jane Jasper Jin Joan Joel John Jonas Jorge Josef Joy Julia June Kai Kamal Karen Karl Kate Keiko Ken Kira Klara Kofi Lara
Lars Laura Lea Lena Leo Lev Liam Lila Lily Lina Linus Lisa Lola Luca Lucy Luis Luka Luna Lydia Maja Malik Mara Marco
Maria Mark Marta Max Maya Mei Mia Mila Milo Mina Mira Mona Nadia Nasir Nate Nell Nia Nick Nico Nils Nina Noah Nora Olaf
Olga Oliver Omar Oscar Otto Owen Pablo Paul Paula Pearl Pedro Peter Petra Pia Priya Quinn Ravi Rana Remy Rita Rob Rosa
Ruby Rudy Ruth Sam Sana Sara Selma Seth Sena Simon Sofia Sol Stan Stella Sven Tara Tariq Ted Tess Theo Tilda Tim Tina Tom
Tova Uma Umar Ursula Vera Victor Vito Wanda Walter Wes Will Wren Xena Yara Yuki Yusuf Zara Zeno Zoe Zola""".split()

SURNAMES = """Abbott Adler Ahmed Allen Almeida Baker Banks Barros Becker Bell Berg Bishop Blake Bloom Bose Braun Brook
Burke Byrne Carr Castro Chen Clarke Cole Cook Costa Cruz Curie Dahl Dale Das Dietz Diaz Drake Dubois Egan Ellis Engel
Euler Evans Fischer Fisher Flynn Ford Foster Frost Fuchs Gauss Gibbs Gomez Grant Gray Green Gupta Haas Hale Hall Hansen
Hardy Hayes Hill Hopper Horn Hunt Ito Ivanov Jain Jensen Jones Kahn Kato Keller Kelly Khan Kim King Klein Knox Koch Kumar
Lane Lang Larsen Lee Lind Lopez Lovelace Lowe Lund Mann Marsh Mason Mehta Meyer Mills Moore Moreau Mori Moss Myers Nash
Nolan Noether Novak Olsen Ortiz Page Park Patel Pearce Perez Pike Popov Price Quist Ramos Reed Reyes Rossi Roy Ryan Sato
Scholz Shaw Silva Singh Skye Smith Snow Sousa Stark Stone Suzuki Sutton Tanaka Torres Turing Vance Vega Vogel Wagner Ward
Watt Weber Webb West Whitlock Wolf Wood Wright Yang York Young Zhang Ziegler""".split()

CITIES = """Accra Amsterdam Ankara Antwerp Athens Austin Baku Bangkok Barcelona Basel Beirut Belfast Bergen Berlin Bern
Bogota Bonn Boston Bremen Brno Bruges Brussels Bucharest Budapest Cairo Calgary Cardiff Chicago Cologne Copenhagen Cork
Dakar Dallas Delhi Denver Dhaka Doha Dresden Dubai Dublin Durban Edinburgh Essen Florence Frankfurt Galway Geneva Genoa
Ghent Glasgow Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kathmandu Kiel Krakow Kyoto Lagos Lahore Leeds
Leipzig Lima Linz Lisbon Liverpool Ljubljana London Lyon Madrid Malmo Manila Marseille Melbourne Miami Milan Minsk Montreal
Mumbai Munich Nairobi Naples Nice Nantes Odessa Osaka Oslo Ottawa Oxford Palermo Paris Perth Porto Prague Quito Reykjavik
Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Shanghai Singapore Sofia Split Stockholm Sydney Tallinn Tampere
Tokyo Toronto Trieste Tunis Turin Utrecht Valencia Vienna Vilnius Warsaw Wellington Zagreb Zurich""".split()

COUNTRIES = """Austria Brazil Canada Chile China Denmark Egypt Estonia Finland France Germany Ghana Greece Hungary Iceland
India Ireland Italy Japan Kenya Latvia Mexico Morocco Nepal Norway Peru Poland Portugal Romania Spain Sweden Tunisia
Turkey Vietnam Wales""".split()

COLORS = """red blue green yellow black white brown pink purple orange gray silver gold violet teal crimson beige navy
olive amber""".split()

ANIMALS = """cat dog horse cow goat sheep fox wolf bear lion tiger rabbit mouse owl eagle hawk duck goose hen swan frog
snail spider bee ant whale shark seal otter beaver deer moose camel zebra panda koala parrot turtle lizard salmon crow
badger""".split()

FRUITS = """apple pear plum peach cherry grape lemon lime orange banana mango melon kiwi fig date apricot papaya berry
coconut olive""".split()

FOODS = """bread butter cheese rice pasta soup salad flour sugar salt pepper milk cream honey garlic onion tomato potato
carrot celery basil lentil bean egg oil vinegar yeast cocoa tofu noodle""".split()

OBJECTS = """key book lamp chair table clock phone camera bag box cup plate spoon knife pen pencil ruler rope ladder hammer
drill saw brush mirror candle basket bottle ticket map coin ring scarf hat coat boot glove umbrella drum flute violin guitar
ball kite bike wagon tent stove kettle pillow blanket carpet radio laptop screen cable battery letter stamp""".split()

ROOMS = """garden kitchen office library garage attic cellar bedroom bathroom hallway workshop studio lobby classroom
balcony barn greenhouse pantry gym museum station market harbor bakery park""".split()

JOBS = """teacher baker nurse doctor pilot painter farmer lawyer engineer plumber tailor barber chef driver writer singer
dancer gardener librarian mechanic architect chemist dentist editor florist judge baker butcher carpenter clerk""".split()

COMPANIES = """Acme Borealis Cobalt Deltaware Everline Fernwood Globex Halcyon Ironclad Juniper Kestrel Lumen Meridian
Northgate Oakridge Pinnacle Quartz Redwood Solstice Tundra Umbra Vertex Westbrook Xylem Yonder Zephyr Initech Bluebird
Copperhead Driftwood""".split()

LANGUAGES = """English French German Spanish Italian Polish Dutch Swedish Danish Finnish Greek Turkish Arabic Hindi Korean
Japanese Portuguese Czech Hungarian Swahili""".split()

HOBBIES = """chess tennis soccer swimming sailing cooking drawing dancing hiking cycling reading running singing fishing
knitting pottery climbing skiing gardening rowing""".split()

VERBS = """walks runs jumps sings reads writes cooks sleeps waits laughs works plays swims dances paints climbs listens
travels studies whispers""".split()

ADJECTIVES = """small big old new quiet loud bright dark warm cold soft hard quick slow clean empty heavy light round flat
sweet sour brave calm eager gentle happy proud shy wise young tall short strong simple strange""".split()

PLACES = """river mountain forest lake island valley desert bridge tower castle village road hill beach meadow field cave
canyon coast pond""".split()

GENERAL = """after again air also always answer autumn back bank before begin below better between bird branch bring build
busy call carry chain change city clear cloud color come corner cover cross dance day deep door dream drink early earth
east edge enough evening every face fall family far fast father feather fire floor flower follow food forest forward friend
front future game gate give glass grass great ground group grow hand happen hear heart heavy hello help high home hope hour house
idea inside iron join keep kind know lake land large last laugh leaf learn leave letter level life light line listen long
look lost love low machine make many market meadow measure middle mind minute money month moon morning mother mountain move
music name near never next night north note number ocean often open order other over page paint paper part path people
picture place plan plant point power quick quiet rain reach ready rest rise river road rock room root round run sail sand
school sea season seed ship shore side silver sing sky sleep slow small smile snow song sound south space spring star start
stay step stone story street strong summer sun table take talk teach thing think time today together tomorrow travel tree
true turn under valley voice wait walk wall warm watch water wave way weather week west wheel wide wild wind window winter
wish wonder word work world write year yellow""".split()

ACCENTED = """Zoë José Łódź Málaga Köln Zürich Gdańsk Søren Chloé François Jürgen Ærø Reykjavík São Tomé Ångström Dvořák
東京 大阪 北京 上海 你好 서울 Москва Київ Αθήνα القاهرة naïve café jalapeño 🙂 🚀 🌍 ☕ ✓ → €""".split()

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
MONTH_LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

SHOWCASE = frozenset(["Ada", "Bo", "Ada Lovelace", "Paris", "Berlin", "London", "Rome", "Tokyo", "17", "25"])
"""Words of the examples and guides: texts with them are always on the training side."""

SPLIT_FROM = 60
"""Pools of at least this many words are divided between training and held-out text."""

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w z".split()
_VOWELS = "a e i o u a e i o ai ei ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "th", "x", "nd", "ck"]


def with_articles(text: str) -> str:
    """``text`` with every "a" before a vowel made "an"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("x", "s", "sh", "ch")) else "s")


def held_out(key: str) -> bool:
    """Whether the text or number combination named by ``key`` belongs to the held-out side."""
    return key not in SHOWCASE and zlib.crc32(key.encode()) % 8 == 0


_SPLICED = [
    word
    for word in NAMES
    + SURNAMES
    + CITIES
    + COMPANIES
    + COUNTRIES
    + OBJECTS
    + ANIMALS
    + FOODS
    + GENERAL
    + JOBS
    + ROOMS
    if not held_out(word)
]


class Values:
    """Random values from one side of the split."""

    def __init__(self, rng: random.Random, held: bool = False) -> None:
        self.rng = rng
        self.held = held

    def owns(self, question: str) -> bool:
        """Whether a whole question lies on this side: held-out questions appear nowhere in training."""
        shown = not SHOWCASE.isdisjoint(re.findall(r"\w+", question))
        return (held_out(question) and not shown) == self.held

    def pick(self, pool: Sequence[str]) -> str:
        """One word of the pool. A large pool is split, and now and then an invented word stands in for its words."""
        if len(pool) < SPLIT_FROM:
            return self.rng.choice(pool)
        if self.coin(0.15):
            return self.invented() if pool[0][0].isupper() else self.invented().lower()
        while True:
            word = self.rng.choice(pool)
            if held_out(word) == self.held:
                return word

    def some(self, pool: Sequence[str], count: int) -> list[str]:
        """``count`` different words drawn by `pick`."""
        words: list[str] = []
        while len(words) < count:
            word = self.pick(pool)
            if word not in words:
                words.append(word)
        return words

    def coin(self, probability: float) -> bool:
        return self.rng.random() < probability

    def any(self, pool: Sequence[T]) -> T:
        """A choice that is never split: templates, styles, closed classes such as weekdays."""
        return self.rng.choice(pool)

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def invented(self) -> str:
        """A made-up capitalised word: two or three syllables, or the start of one real word and the end of another."""
        while True:
            if self.coin(0.4):
                parts = [
                    self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) + self.rng.choice(_CODAS)
                    for _ in range(self.rng.choice((2, 2, 3)))
                ]
            else:
                parts = [
                    self.rng.choice(_SPLICED)[: self.rng.choice((2, 3, 3, 4))],
                    self.rng.choice(_SPLICED)[-self.rng.choice((2, 3, 3, 4)) :],
                ]
            word = "".join(parts).capitalize()
            if held_out(word) == self.held:
                return word

    def name(self) -> str:
        return self.invented() if self.coin(0.25) else self.pick(NAMES)

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if name not in found:
                found.append(name)
        return found

    def full_name(self) -> str:
        return f"{self.name()} {self.invented() if self.coin(0.25) else self.pick(SURNAMES)}"

    def city(self) -> str:
        return self.invented() if self.coin(0.2) else self.pick(CITIES)

    def company(self) -> str:
        return self.invented() if self.coin(0.3) else self.pick(COMPANIES)

    def date(self) -> str:
        """An ISO date, year 1950 to 2039."""
        month = self.number(1, 12)
        return f"{self.number(1950, 2039)}-{month:02d}-{self.number(1, MONTH_LENGTHS[month - 1]):02d}"

    def time(self) -> str:
        return f"{self.number(0, 23):02d}:{self.any((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"

    def price(self) -> float | int:
        """A whole number or one with cents."""
        whole = self.number(1, 200)
        return whole if self.coin(0.3) else round(whole + self.any((0.25, 0.5, 0.75, 0.95, 0.99)), 2)

    def code(self) -> str:
        letters = "".join(self.rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(self.number(1, 3)))
        return f"{letters}-{self.number(10, 9999)}"

    def email(self, name: str) -> str:
        return f"{name.split()[0].lower()}@{self.company().lower()}.{self.any(('com', 'org', 'net', 'io'))}"
