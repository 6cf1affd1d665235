"""Generate the text that the classroom model learns from. In a conversation the user tells facts and asks for them later,
mixed with general questions and small talk. A question has only one answer, unless the user corrects a fact. The same seed
gives the same text."""
import random
from dataclasses import dataclass
from pathlib import Path

from models.classroom.facts import PLACES, Fact, Level, draw_fact


def pairs(title: str) -> list[tuple[str, str]]:
    """Return the lines under `title` in text.txt, each split at its |."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").partition(f"{title}\n")[2].split("\n\n")[0]
    return [tuple(line.split(" | ")) for line in lines.splitlines()]


CAPITALS, WORLD, SMALL_TALK = dict(pairs("capitals")), pairs("the world"), pairs("small talk")
SYSTEM_PROMPTS = ["You are a friendly assistant.", "You are a helpful assistant."]
DOCUMENT_LEADS = ["Read this:", "Here is a document:", "Remember this:"]
ACKNOWLEDGEMENT, READ = "I will remember that.", "I have read it."


@dataclass(frozen=True)
class Turn:
    """One message of the user, and the assistant's answer."""
    user: str
    assistant: str
    kind: str = ""                 # of the question; "": the user asked nothing


def general_question(rng: random.Random) -> Turn:
    """Draw a question that needs no history: about the world, a sum, or small talk."""
    pick = rng.random()
    if pick < 0.3:
        country = rng.choice(list(CAPITALS))
        return Turn(f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}.", "world")
    if pick < 0.5:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return Turn(f"What is {a}+{b}?", f"{a}+{b} is {a + b}.", "sum")
    if pick < 0.8:
        return Turn(*rng.choice(WORLD), "world")
    return Turn(*rng.choice(SMALL_TALK), "talk")


class Conversation:
    """A conversation without an end. Each call of `next_turn` adds a turn."""

    def __init__(self, rng: random.Random, level: Level):
        self.rng, self.level = rng, level
        self.facts: dict[str, Fact] = {}                               # question -> its fact, with corrections
        self.unasked: dict[str, None] = {}                             # questions that the user has not asked yet
        self.system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
        self.opening = rng.random() < 0.7                              # whether it begins with a document

    def new_fact(self) -> Fact | None:
        """Draw a fact whose question has no answer yet, and remember it. Return None if eight draws find none."""
        for _ in range(8):
            fact = draw_fact(self.rng, self.level)
            if fact.question not in self.facts:
                self.facts[fact.question] = fact
                self.unasked[fact.question] = None
                return fact
        return None

    def document(self, facts: int) -> Turn:
        """Return a turn in which the user tells up to `facts` facts in one message."""
        told = [fact.statement for fact in (self.new_fact() for _ in range(facts)) if fact]
        return Turn(" ".join([self.rng.choice(DOCUMENT_LEADS), *told]), READ) if told else general_question(self.rng)

    def tell(self) -> Turn:
        """Return a turn in which the user tells one fact."""
        fact = self.new_fact()
        return Turn(fact.statement, ACKNOWLEDGEMENT) if fact else general_question(self.rng)

    def correct(self) -> Turn:
        """Return a turn in which the user gives a thing a new place. The later sentence counts."""
        places = [fact for fact in self.facts.values() if fact.kind == "place"]
        if not places:
            return self.tell()
        old = self.rng.choice(places)
        thing = old.question.removeprefix("Where is ").removesuffix("?")
        now = f"{thing.capitalize()} is now in the {self.rng.choice(PLACES)}."
        self.facts[old.question] = Fact("corrected", now, old.question)
        self.unasked[old.question] = None
        return Turn(now, ACKNOWLEDGEMENT)

    def ask(self) -> Turn:
        """Return a turn in which the user asks for a fact, if possible for one that was not asked for yet."""
        fact = self.facts[self.rng.choice(list(self.unasked or self.facts))]
        self.unasked.pop(fact.question, None)
        return Turn(fact.question, fact.answer, fact.kind)

    def next_turn(self) -> Turn:
        """Draw the next turn."""
        if self.opening:
            self.opening = False
            return self.document(self.rng.randint(2, self.level.document))
        pick = self.rng.random()
        if len(self.unasked) < 2 or pick < 0.16:
            return self.tell()
        if pick < 0.20:
            return self.document(self.rng.randint(2, max(2, self.level.document // 2)))
        if pick < 0.20 + self.level.corrections:
            return self.correct()
        if pick < 0.34:
            return general_question(self.rng)
        return self.ask()
