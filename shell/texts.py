"""Facts, and questions about them: what demos tell a model, and what the classroom model was trained on.
An answer repeats the words of the fact, so that anybody can see whether a model still holds it."""
import random
from dataclasses import dataclass
from pathlib import Path

OBJECTS, PLACES, COLORS, NAMES, CITIES, JOBS, FOODS, WORDS, LOCKS, PETS, PET_NAMES, EVENTS, DAYS = (
    line.split()[1:] for line in Path(__file__).with_name("words.txt").read_text().splitlines())
FAVORITES = {"color": COLORS, "city": CITIES, "food": FOODS, "day": DAYS, "place": PLACES}


@dataclass(frozen=True)
class Fact:
    kind: str
    statement: str                 # what the user says
    question: str

    @property
    def answer(self) -> str:
        """The statement again, seen from the other side."""
        return self.statement.replace("My ", "Your ")


def value_of(what: str, thing: str, value: str) -> Fact:
    return Fact(what, f"The {what} of the {thing} is {value}.", f"What is the {what} of the {thing}?")


def draw_fact(rng: random.Random, choose=random.Random.choice) -> Fact:
    """Draw a fact of any kind. Another one with its question may have been drawn before.

    choose(rng, words) -> one of the words, or another one in their place."""
    thing = choose(rng, OBJECTS)
    pick = rng.random()
    if pick < 0.28:
        return Fact("place", f"The {thing} is in the {rng.choice(PLACES)}.", f"Where is the {thing}?")
    if pick < 0.36:
        return value_of("color", thing.split()[-1], rng.choice(COLORS))
    if pick < 0.62:
        name = choose(rng, NAMES)
        return rng.choice((
            Fact("city", f"{name} lives in {rng.choice(CITIES)}.", f"Where does {name} live?"),
            Fact("job", f"{name} works as a {rng.choice(JOBS)}.", f"What is the job of {name}?"),
            Fact("taste", f"{name} likes {rng.choice(FOODS)}.", f"What does {name} like?")))
    if pick < 0.74:
        return value_of("password", rng.choice(LOCKS), choose(rng, WORDS))
    if pick < 0.83:
        event = rng.choice(EVENTS)
        return Fact("day", f"The {event} is on {rng.choice(DAYS)}.", f"When is the {event}?")
    if pick < 0.92:
        pet, name = rng.choice(PETS), choose(rng, PET_NAMES)
        return Fact("pet", f"My {pet} is called {name}.", f"What is my {pet} called?")
    if pick < 0.94:
        return Fact("name", f"My name is {choose(rng, NAMES)}.", "What is my name?")
    what = rng.choice(list(FAVORITES))
    value = rng.choice(FAVORITES[what])
    return Fact("favorite", f"My favorite {what} is {value}.", f"What is my favorite {what}?")
