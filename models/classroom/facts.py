"""Facts and questions about them, for demos and for the training of the classroom model; and documents and
conversations of facts, for demos and benchmarks.

An answer repeats the words of the fact, so that everybody can see whether the model still has the fact."""
import random
from dataclasses import dataclass
from pathlib import Path

OBJECTS, PLACES, COLORS, NAMES, CITIES, JOBS, FOODS, WORDS, LOCKS, PETS, PET_NAMES, EVENTS, DAYS = (
    line.split()[1:] for line in Path(__file__).with_name("words.txt").read_text().splitlines())
TURNS = [
    "Read this: The lamp is in the attic. Anna lives in Rome. The password of the safe is tiger. My cat is "
    "called Pip. The meeting is on Friday. Ben works as a baker. The color of the ball is green. My favorite "
    "food is honey.", "Where is the lamp?", "What is my cat called?", "What is the password of the safe?"]
SECRET, QUESTION = "The password of the safe is tiger.", TURNS[-1]
FAVORITES = {"color": COLORS, "city": CITIES, "food": FOODS, "day": DAYS, "place": PLACES}


@dataclass(frozen=True)
class Fact:
    kind: str                      # of fact, as "place" or "password"
    statement: str                 # the user's words
    question: str

    @property
    def answer(self) -> str:
        """The statement, in the assistant's words."""
        return self.statement.replace("My ", "Your ")


@dataclass(frozen=True)
class Level:
    """How hard conversations are. The fields after `document` are shares, from 0 to 1."""
    document: int = 8              # the most facts in a document
    two_word: float = 0.0          # things of two words: "the red box"
    digits: float = 0.0            # codes of digits: "The code of the gate is 4 8 2 1."
    invented: float = 0.0          # names that are in no list
    corrections: float = 0.0


def draw_name(rng: random.Random, level: Level, names: list[str]) -> str:
    """Return one of `names`, or an invented name with probability `level.invented`."""
    if rng.random() >= level.invented:
        return rng.choice(names)
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return ("".join(syllables) + rng.choice(["", "n", "r", "s", "x"])).capitalize()


def value_of(what: str, thing: str, value: str, kind: str) -> Fact:
    return Fact(kind, f"The {what} of the {thing} is {value}.", f"What is the {what} of the {thing}?")


def draw_fact(rng: random.Random, level: Level) -> Fact:
    """Draw a fact of any kind. It may have the question of a fact that was drawn before."""
    thing = rng.choice(OBJECTS)
    if rng.random() < level.two_word:
        thing = f"{rng.choice(COLORS)} {thing}"
    pick = rng.random()
    if pick < 0.28:
        return Fact("place", f"The {thing} is in the {rng.choice(PLACES)}.", f"Where is the {thing}?")
    if pick < 0.36:
        return value_of("color", thing.split()[-1], rng.choice(COLORS), "color")
    if pick < 0.62:
        name = draw_name(rng, level, NAMES)
        return rng.choice((
            Fact("city", f"{name} lives in {rng.choice(CITIES)}.", f"Where does {name} live?"),
            Fact("job", f"{name} works as a {rng.choice(JOBS)}.", f"What is the job of {name}?"),
            Fact("taste", f"{name} likes {rng.choice(FOODS)}.", f"What does {name} like?")))
    if pick < 0.74:
        lock = rng.choice(LOCKS)
        if rng.random() < level.digits:
            return value_of("code", lock, f"{rng.randint(0, 9999):04d}", "digits")
        return value_of("password", lock, rng.choice(WORDS), "password")
    if pick < 0.83:
        event = rng.choice(EVENTS)
        return Fact("day", f"The {event} is on {rng.choice(DAYS)}.", f"When is the {event}?")
    if pick < 0.92:
        pet, name = rng.choice(PETS), draw_name(rng, level, PET_NAMES)
        return Fact("pet", f"My {pet} is called {name}.", f"What is my {pet} called?")
    if pick < 0.94:
        return Fact("name", f"My name is {draw_name(rng, level, NAMES)}.", "What is my name?")
    what = rng.choice(list(FAVORITES))
    value = rng.choice(FAVORITES[what])
    return Fact("favorite", f"My favorite {what} is {value}.", f"What is my favorite {what}?")


def document(frontend, rng: random.Random, tokens: int, secret: str = "") -> str:
    """Return a text of facts with at least `tokens` tokens. If `secret` is given, it is the only password.

    `frontend`: the Frontend of the model that reads the text."""
    text = f"Read this: {secret}".rstrip()
    while len(frontend.tokenizer.encode(text)) < tokens:
        fact = draw_fact(rng, Level())
        if not secret or fact.kind != "password":
            text += " " + fact.statement
    return text


def conversation(frontend, rng: random.Random, tokens: int) -> list[dict]:
    """Return messages of at least `tokens` tokens, in which a user tells facts and asks for them.

    The last message is a question."""
    told, messages = {}, []
    while True:
        drawn = draw_fact(rng, Level())
        fact = told.setdefault(drawn.question, drawn)   # a question has only one answer
        asked = rng.choice(list(told.values()))
        said = ("user", fact.statement), ("assistant", "I will remember that."), ("user", asked.question)
        messages += [dict(role=role, content=content) for role, content in said]
        if len(frontend.encode(None, messages)) >= tokens:
            return messages
        messages.append(dict(role="assistant", content=asked.answer))
