"""Instances of `tasks.py`: at least 50 for each of four tasks, all written for it.

A `Task` asks a question for each instance, and decides which texts are admitted and which answer a text gives. Answers
are compared, not texts: a record, a query's result, a value written in any of its forms. None means no answer.

extraction   a sentence on a person -> a JSON object; right if all four fields are
pattern      words -> a date with its weekday, digits with their check digit, hours with the minutes between them, a
             sum with its total; the last part must agree with all before it, so the pattern constrains late
keywords     three words -> a sentence with all of them; right if each occurs once and the sentence is as fluent as nine
             of ten written by hand, by the log-probability of a byte under the model that ships with the package
sql          a question -> a query; right if it returns from a SQLite database the same as the right query
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmppl import CachedTransformer, Regex
from llmppl.constraints import DFA

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import extraction_records as records  # noqa: E402
import text_to_sql as sql  # noqa: E402

Answer = Any                                            # of a hashable type
Messages = list[dict[str, str]]

PEOPLE = """
The singer Rosa Vidal, 28, left Seville for Valencia last May. | Rosa Vidal | 28 | singer | Valencia
Peter Frost drives a bus in Hull, is 51 and has never been to London. | Peter Frost | 51 | bus driver | Hull
Mia Larsen, a student of 22, lives in Aarhus. | Mia Larsen | 22 | student | Aarhus
The engineer Karl Huber, 49, moved from Linz to Salzburg. | Karl Huber | 49 | engineer | Salzburg
At 35, Jack Doyle is the best surgeon in Galway. | Jack Doyle | 35 | surgeon | Galway
Elena Popa is 40. She is a journalist and lives in Cluj. | Elena Popa | 40 | journalist | Cluj
The fireman Bruno Keller, 37, lives in Basel; his wife is 35. | Bruno Keller | 37 | fireman | Basel
Leila Haddad has been an actor since she was 18; now 54, she lives in Tunis. | Leila Haddad | 54 | actor | Tunis
The clerk Dan Hobbs, 43, was seen in Bristol, where he lives. | Dan Hobbs | 43 | clerk | Bristol
Olga Smirnova, thirty, is a dancer in Riga. | Olga Smirnova | 30 | dancer | Riga
Frank Moser is a barber in Zurich. He is seventy-one years old. | Frank Moser | 71 | barber | Zurich
In Malmo lives the electrician Nils Ek, who is 24. | Nils Ek | 24 | electrician | Malmo
The writer Zoe Martin, 46, has two children, 9 and 12, and lives in Ghent. | Zoe Martin | 46 | writer | Ghent
My neighbour in Dublin, Sean Walsh, is 59 and a postman. | Sean Walsh | 59 | postman | Dublin
Isabel Cruz, a vet from Merida, is 33. | Isabel Cruz | 33 | vet | Merida
The soldier Marko Ilic, 21, has a room in Split. | Marko Ilic | 21 | soldier | Split
Helen Park is the new editor. She is 42 and comes from Busan. | Helen Park | 42 | editor | Busan
The fisherman Rui Alves, 68, has spent all his life in Faro. | Rui Alves | 68 | fisherman | Faro
Clara Jung was 19 when she became a model; she is 25 and lives in Berlin. | Clara Jung | 25 | model | Berlin
Victor Hale, 62, once a miner, is a guide in Cardiff. | Victor Hale | 62 | guide | Cardiff
Amy Tan, 27, is a programmer and lives in Penang. | Amy Tan | 27 | programmer | Penang
The photographer Luca Conti (48) lives in Genoa. | Luca Conti | 48 | photographer | Genoa
Ahmed Nasser is a cleaner in Doha; he is 39. | Ahmed Nasser | 39 | cleaner | Doha
The professor Ingrid Holm, 64, teaches and lives in Uppsala. | Ingrid Holm | 64 | professor | Uppsala
George Stamos, a sailor, is 53; his home is Piraeus. | George Stamos | 53 | sailor | Piraeus
The nurse of the year is Tara Singh, 36, of Delhi. | Tara Singh | 36 | nurse | Delhi
Oscar Lund, 18, has just become a cook in Odense. | Oscar Lund | 18 | cook | Odense
The secretary Julia Brandt is 50 and lives in Kiel. | Julia Brandt | 50 | secretary | Kiel
Max Werner retired at 65; until then he was a tailor. He is 70, from Ulm. | Max Werner | 70 | tailor | Ulm
The florist Emma Stone-Hill, no, Emma Hill, is 44 and lives in York. | Emma Hill | 44 | florist | York
"""
QUESTIONS = """
Who lives in Lyon? | SELECT name FROM people WHERE city = 'Lyon'
Who lives in Rome? | SELECT name FROM people WHERE city = 'Rome'
How old is Carl Voss? | SELECT age FROM people WHERE name = 'Carl Voss'
How old is Kurt Adler? | SELECT age FROM people WHERE name = 'Kurt Adler'
What is the age of Dora Lind? | SELECT age FROM people WHERE name = 'Dora Lind'
What is the job of Ben Stone? | SELECT job FROM people WHERE name = 'Ben Stone'
What is the job of Ivo Kral? | SELECT job FROM people WHERE name = 'Ivo Kral'
What does Fay Dunn do for a living? | SELECT job FROM people WHERE name = 'Fay Dunn'
What does Jane Wood earn? | SELECT salary FROM people WHERE name = 'Jane Wood'
What is the salary of Hana Ito? | SELECT salary FROM people WHERE name = 'Hana Ito'
In which city does Kurt Adler live? | SELECT city FROM people WHERE name = 'Kurt Adler'
Where does Ann Moore live? | SELECT city FROM people WHERE name = 'Ann Moore'
Where is Gus Hall from? | SELECT city FROM people WHERE name = 'Gus Hall'
How many people live in Oslo? | SELECT COUNT(*) FROM people WHERE city = 'Oslo'
How many people live in Bonn? | SELECT COUNT(*) FROM people WHERE city = 'Bonn'
How many pilots are there? | SELECT COUNT(*) FROM people WHERE job = 'pilot'
Who is a teacher? | SELECT name FROM people WHERE job = 'teacher'
Who are the lawyers? | SELECT name FROM people WHERE job = 'lawyer'
Who is a pilot in Bonn? | SELECT name FROM people WHERE job = 'pilot' AND city = 'Bonn'
Which lawyer lives in Lyon? | SELECT name FROM people WHERE job = 'lawyer' AND city = 'Lyon'
Which baker lives in Oslo? | SELECT name FROM people WHERE job = 'baker' AND city = 'Oslo'
Who is the youngest? | SELECT name FROM people ORDER BY age LIMIT 1
Who earns the most? | SELECT name FROM people ORDER BY salary DESC LIMIT 1
Who is older than 60? | SELECT name FROM people WHERE age > 60
Who is younger than 30? | SELECT name FROM people WHERE age < 30
Who earns more than 90000? | SELECT name FROM people WHERE salary > 90000
What is the average age? | SELECT AVG(age) FROM people
What is the highest salary? | SELECT MAX(salary) FROM people
What is the oldest nurse called? | SELECT name FROM people WHERE job = 'nurse' ORDER BY age DESC LIMIT 1
Who wrote Winter Sea? | SELECT author FROM books WHERE title = 'Winter Sea'
Who wrote The Last Train? | SELECT author FROM books WHERE title = 'The Last Train'
Who is the author of The Red Door? | SELECT author FROM books WHERE title = 'The Red Door'
Which books did Ann Moore write? | SELECT title FROM books WHERE author = 'Ann Moore'
What did Hana Ito write? | SELECT title FROM books WHERE author = 'Hana Ito'
How many books did Fay Dunn write? | SELECT COUNT(*) FROM books WHERE author = 'Fay Dunn'
How many pages does Winter Sea have? | SELECT pages FROM books WHERE title = 'Winter Sea'
How long is A Long Night? | SELECT pages FROM books WHERE title = 'A Long Night'
When did Green Hills come out? | SELECT year FROM books WHERE title = 'Green Hills'
From which year is The Last Train? | SELECT year FROM books WHERE title = 'The Last Train'
Which books came out in 2011? | SELECT title FROM books WHERE year = 2011
Which books came out after 2012? | SELECT title FROM books WHERE year > 2012
Which book is the oldest? | SELECT title FROM books ORDER BY year LIMIT 1
"""
SENTENCES = """
dog ball park | The dog ran after the ball in the park.
girl cake plate | The girl put the cake on a big plate.
cat tree bird | The cat climbed the tree to catch the bird.
boy boat river | The boy played with his boat in the river.
mom soup table | Mom put the hot soup on the table.
bear honey forest | The bear looked for honey in the forest.
king castle horse | The king rode his horse to the castle.
rain umbrella street | They walked down the street in the rain with an umbrella.
fish pond stone | A little fish was hiding under a stone in the pond.
baby bed toy | The baby slept in the bed with a soft toy.
teacher book child | The teacher gave a book to every child.
moon star sky | The moon and a bright star were in the sky.
farmer cow field | The farmer took the cow to the green field.
snow hill sled | They went down the hill in the snow on a sled.
mouse cheese hole | The mouse took the cheese into its hole.
grandma cookie kitchen | Grandma baked a cookie for him in the kitchen.
frog jump water | The frog liked to jump into the water.
train window friend | She waved to her friend from the window of the train.
flower garden bee | A bee sat on a flower in the garden.
shoe door mud | He left his shoe with the mud by the door.
box key gold | The key opened a box full of gold.
duck bread lake | The duck ate the bread by the lake.
car road truck | The red car and the big truck were on the road.
apple basket market | She bought an apple at the market and put it in her basket.
lion cage zoo | At the zoo the lion slept in its cage.
hat wind beach | The wind took his hat at the beach.
doctor leg hospital | The doctor looked at his leg in the hospital.
song bird morning | Every morning the bird sang a happy song.
fire wood night | At night they put wood on the fire.
letter sister box | My sister put the letter in a box.
rabbit carrot hole | The rabbit pulled the carrot into the hole.
monkey banana tree | The monkey ate a banana in the tree.
queen crown mirror | The queen put on her crown and looked in the mirror.
sand castle wave | A big wave washed away the castle of sand.
paint wall brush | He used a brush to paint the wall blue.
milk cup floor | The cup fell and the milk was on the floor.
dad chair hammer | Dad fixed the chair with a hammer.
island ship storm | The ship came to the island after the storm.
coat winter pocket | In winter she had a hand in the pocket of her coat.
horse fence grass | The horse ate the grass behind the fence.
pig mud farm | The pig on the farm liked to play in the mud.
clock school bell | When the clock said eight, the school bell rang.
bridge river man | An old man stood on the bridge over the river.
egg nest tree | There was a blue egg in the nest in the tree.
balloon party child | Every child at the party got a red balloon.
owl night forest | At night the owl flew over the forest.
kite string cloud | The kite flew up to a cloud on its long string.
puppy sock bed | The puppy hid my sock under the bed.
bus stop rain | We waited in the rain at the bus stop.
picture grandpa house | Grandpa had a picture of his old house.
"""
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DATES = """
Tuesday, the third of March 1987 | 1987-03-03
Friday, July 20, 1990 | 1990-07-20
Sunday, the first of May 1983 | 1983-05-01
Monday, December 31st, 1984 | 1984-12-31
Wednesday, 12 October 1988 | 1988-10-12
Saturday, the ninth of June 1984 | 1984-06-09
Thursday, January the second, 1986 | 1986-01-02
Friday, 28 February 1986 | 1986-02-28
Tuesday, the eleventh of August 1981 | 1981-08-11
Sunday, September 30, 1990 | 1990-09-30
Monday, the fifteenth of April 1985 | 1985-04-15
Wednesday, 4 November 1987 | 1987-11-04
Saturday, the twenty-first of May 1983 | 1983-05-21
"""
CODES = "417-280 905-133 662-041 381-954 270-116 548-327 133-790 896-205 724-418 059-663 315-870 482-036 671-942"
HOURS = """
09:40 11:25 | twenty to ten | 11:25
08:15 09:05 | a quarter past eight | five past nine
13:30 15:00 | half past one in the afternoon | three
10:00 12:20 | ten | twenty past twelve
14:10 14:55 | ten past two in the afternoon | 14:55
07:45 08:30 | a quarter to eight in the morning | half past eight
16:05 18:05 | five past four in the afternoon | 18:05
11:35 13:15 | 11:35 | a quarter past one
09:20 10:50 | 9:20 | ten to eleven
12:00 13:40 | noon | 13:40
15:25 17:00 | 15:25 | five in the afternoon
08:50 10:10 | ten to nine | ten past ten
17:15 19:45 | 17:15 | a quarter to eight in the evening
"""
SUMS = """
38 47 | thirty-eight euros for shoes and 47 for a coat
16 59 | 16 euros for a lamp and fifty-nine for a chair
72 19 | seventy-two euros for the train and nineteen for the bus
25 68 | 25 euros for flowers and 68 for a dinner
41 36 | forty-one euros for a bag and thirty-six for a hat
53 29 | 53 euros for a ticket and 29 for a book
64 17 | sixty-four euros for paint and 17 for brushes
22 79 | 22 euros for soap and seventy-nine for towels
35 35 | thirty-five euros for each of two plates
48 26 | 48 euros for the room and twenty-six for breakfast
57 44 | fifty-seven euros for wood and forty-four for nails
83 12 | eighty-three euros for tyres and 12 for oil
18 65 | eighteen euros for tea and 65 for a pot
"""


@dataclass(frozen=True)
class Instance:
    """Question, the language of admitted texts, and the right answer (for keywords: the words)."""

    messages: Messages
    language: Any
    right: Answer


@dataclass(frozen=True)
class Task:
    """Instances, their maximal number of tokens, and the functions that judge a text."""

    name: str
    instances: list[Instance]
    max_tokens: int
    answer: Callable[[Instance, str], Answer]           # None for a text that is no answer
    admits: Callable[[str], bool] = lambda text: True   # can be decided only when a text has ended

    def right(self, instance: Instance, answer: Answer) -> bool:
        return answer == instance.right

    def judge(self, instance: Instance, texts: list[str], log_weights: list[float]) -> dict[str, list[Any]]:
        """Return texts, answers and correctness of a set; a text of weight 0 is no answer."""
        answers = [
            self.answer(instance, text) if log_weight > -math.inf and self.admits(text) else None
            for text, log_weight in zip(texts, log_weights, strict=True)
        ]
        return {
            "texts": texts, "log_weights": log_weights,
            "answers": [answer if answer is None else repr(answer) for answer in answers],
            "right": [answer is not None and self.right(instance, answer) for answer in answers],
        }  # fmt: skip


# ---- extraction


def extraction() -> Task:
    language = Regex(records.PATTERN)
    known = [*records.instances(records.PEOPLE), *records.instances(PEOPLE)]
    instances = [Instance(records.question(sentence), language, record) for sentence, record in known]
    return Task("extraction", instances, records.MAX_TOKENS, lambda _, text: records.record_in(text))


# ---- pattern

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class CheckDigit:
    """Codes 123-456-1, whose last digit is the last digit of the sum of the others."""

    start = (0, 0)

    def step(self, state: tuple[int, int], byte: int) -> tuple[int, int] | None:
        place, total = state
        if place in (3, 7):
            return (place + 1, total) if byte == ord("-") else None
        digit = byte - ord("0")
        if place > 8 or not 0 <= digit <= 9 or (place == 8 and digit != total):
            return None
        return place + 1, (total + digit) % 10

    def accepts(self, state: tuple[int, int]) -> bool:
        return state[0] == 9


def in_words(code: str) -> str:
    return " ".join(DIGITS[int(digit)] for digit in code)


def shown(shots: list[tuple[str, str]], asked: str) -> Messages:
    """Return a conversation in which the first questions have been answered."""
    turns = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in shots]
    return [*(each for turn in turns for each in turn), {"role": "user", "content": asked}]


def minutes(clock: str) -> int:
    hours, rest = clock.split(":")
    return 60 * int(hours) + int(rest)


def span(start: int, length: int) -> str:
    first, last = (f"{at // 60:02}:{at % 60:02}" for at in (start, start + length))
    return f"{first}-{last}, {length} min"


def pattern() -> Task:
    instances = []

    days = [datetime.date(1980, 1, 1) + datetime.timedelta(n) for n in range(366 + 10 * 365 + 2)]
    dates = {day.isoformat(): f"{day.isoformat()} {DAYS[day.weekday()]}" for day in days}
    language: Any = DFA.from_strings(dates.values())
    ask = "Write the date as YYYY-MM-DD and day of the week: "
    shots = [(f"{ask}Thursday, the second of July 1981", "1981-07-02 Thu"),
             (f"{ask}Monday, May 9, 1988", "1988-05-09 Mon")]  # fmt: skip
    for words, date in lines(DATES):
        instances.append(Instance(shown(shots, ask + words), language, dates[date]))

    ask = "Write the code in digits, the check digit last: "
    shots = [(f"{ask}five zero nine, three three one, one", "509-331-1"),
             (f"{ask}two eight four, seven zero six, seven", "284-706-7")]  # fmt: skip
    for code in CODES.split():
        check = sum(int(digit) for digit in code.replace("-", "")) % 10
        first, second = code.split("-")
        asked = f"{ask}{in_words(first)}, {in_words(second)}, {DIGITS[check]}"
        instances.append(Instance(shown(shots, asked), CheckDigit(), f"{code}-{check}"))

    spans = [span(start, length) for start in range(360, 1200, 5) for length in range(30, 185, 5)]
    language = DFA.from_strings(spans)
    ask = "Write the hours in 24-hour form and the minutes between them: "
    shots = [(f"{ask}from ten past eight to 9:25", "08:10-09:25, 75 min"),
             (f"{ask}from a quarter past two in the afternoon to three", "14:15-15:00, 45 min")]  # fmt: skip
    for clocks, first, last in lines(HOURS):
        start, end = (minutes(clock) for clock in clocks.split())
        asked = f"{ask}from {first} to {last}"
        instances.append(Instance(shown(shots, asked), language, span(start, end - start)))

    language = DFA.from_strings(f"{a} + {b} = {a + b}" for a in range(1, 100) for b in range(1, 100))
    ask = "Write the sum with its total: "
    shots = [(f"{ask}31 euros for a shirt and twelve for socks", "31 + 12 = 43"),
             (f"{ask}sixty-six euros for a tent and 27 for a lantern", "66 + 27 = 93")]  # fmt: skip
    for numbers, words in lines(SUMS):
        a, b = map(int, numbers.split())
        instances.append(Instance(shown(shots, ask + words), language, f"{a} + {b} = {a + b}"))

    def answer(instance: Instance, text: str) -> Answer:
        return text.strip() or None

    return Task("pattern", instances, 24, answer)


def lines(text: str) -> list[list[str]]:
    return [line.split(" | ") for line in text.strip().splitlines()]


# ---- keywords


class Fluency:
    """Fluency of a sentence: the model's log-probability per byte; `least` is exceeded by nine of ten sentences."""

    def __init__(self, lm: CachedTransformer) -> None:
        self.lm = lm

    def __call__(self, sentence: str) -> float:
        text = " " + sentence
        return self.lm.context("Once upon a time.").next_token().string().log_prob(text) / len(text.encode())

    @cached_property
    def least(self) -> float:
        return float(np.quantile([self(sentence) for _, sentence in lines(SENTENCES)], 0.1))


def forms(word: str) -> str:
    """Return a pattern for a word and its possible endings."""
    first, rest = f"[{word[0].upper()}{word[0]}]", word[1:]
    return f"{first}{rest}(s|es|d|ed|ing)?" + (f"|{first}{rest[:-1]}ies" if word.endswith("y") else "")


def keywords(fluency: Fluency, sets: list[list[str]]) -> Task:
    ask = "Write one short sentence with the words: "
    shots = [(f"{ask}cat, milk, bowl", "The cat drank the milk from her bowl."),
             (f"{ask}sun, hat, beach", "He wore a hat in the sun at the beach.")]  # fmt: skip
    sentence = Regex(r"[A-Z][a-zA-Z]*(,? [a-zA-Z]+)*[.!]")
    instances = []
    for words in sets:
        language: Any = sentence
        for word in words:
            language = language & Regex(f"(.*[^A-Za-z])?({forms(word)})([^A-Za-z].*)?")
        instances.append(Instance(shown(shots, ask + ", ".join(words)), language, tuple(words)))

    def answer(instance: Instance, text: str) -> Answer:
        whole = re.fullmatch(r"[A-Z][^.!?\n]*[.!]", text.strip())
        return whole[0] if whole and all(uses(word, text) for word in instance.right) else None

    class Keywords(Task):
        def right(self, instance: Instance, answer: Answer) -> bool:
            once = all(uses(word, answer) == 1 for word in instance.right)
            return once and fluency(answer) >= fluency.least

    return Keywords("keywords", instances, 24, answer)


def uses(word: str, text: str) -> int:
    """Count the occurrences of a word in a text, in any of its forms."""
    return sum(bool(re.fullmatch(forms(word), each)) for each in re.findall("[A-Za-z]+", text))


def concept_sets(folder: Path | None, num: int = 50) -> list[list[str]]:
    """Return our sets, or the first of CommonGen's that have three words of letters."""
    if folder is None:
        return [words.split() for words, _ in lines(SENTENCES)]
    with open(folder / "dev_concepts.jsonl", encoding="utf-8") as file:
        sets = [json.loads(line)["concepts"] for line in file]
    return [words for words in sets if len(words) == 3 and all(map(str.isalpha, words))][:num]


# ---- text to SQL


def text_to_sql() -> Task:
    base, language = sql.database(), Regex(sql.PATTERN)
    instances = [
        Instance(sql.question(asked), language, sql.result(base, query))
        for asked, query in lines(sql.QUESTIONS) + lines(QUESTIONS)
    ]
    return Task(
        "sql", instances, sql.MAX_TOKENS,
        lambda _, text: sql.result(base, text), lambda text: sql.result(base, text) is not None,
    )  # fmt: skip
