"""The methods of `generate` on 40 extractions and 40 choices: right answers, tokens and seconds.

    python benchmarks/one_call.py --seeds 3     # SmolLM2, 20 minutes of one core
    python benchmarks/one_call.py --lm embedded --seeds 5
    python benchmarks/one_call.py --only topics

SmolLM2 extracts records with a free string without a bound, and the prompt has no example. It also names the topic of
20 headlines and the continent of 20 countries, after examples. The embedded model completes stories: it repeats the
name of a child, and the pet, of which six are listed. docs/generate.md has the results.
"""

import argparse
import time
import warnings
from typing import Literal

import numpy as np
from pydantic import BaseModel

from llmppl import CachedTransformer, generate
from llmppl.constraints import Regex

CITIES = """Oslo Lima Cairo Kyoto Prague Quito Hanoi Vienna Nairobi Dublin Athens Denver Geneva Havana Madrid Naples
Boston Zurich Mumbai Seoul Venice Tunis Ottawa Warsaw Bergen Malaga Dakar Perth Turin Riga Sofia Bogota Munich Austin
Helsinki Krakow Lyon Manila Seville Glasgow""".split()
SEASONS = "spring", "summer", "autumn", "winter"
TRIPS = (
    "In {season} we spent {nights} nights in {city}.", "I booked a room in {city} for {nights} nights this {season}.",
    "{city} was lovely in {season}; our stay of {nights} nights was too short.",
    "They want to see {city} for {nights} nights, but only in {season}.",
    "The hotel charged her for {nights} nights, though {city} is cheap in {season}.",
)  # fmt: skip
HEADLINES = {
    "sports": ("United win the cup after extra time", "Sprinter breaks the record over 200 metres",
               "Goalkeeper saves two penalties", "Tennis star out with a knee injury", "Coach names his team"),
    "food": ("How to bake bread without yeast", "Ten soups for cold evenings", "Chef opens a noodle bar",
             "The secret of a crisp pie crust", "Why ripe tomatoes need salt"),
    "weather": ("Heavy snow closes mountain roads", "Storm warning for the coast", "Hottest June for ten years",
                "Fog delays morning flights", "Rain at last after a dry month"),
    "music": ("Singer cancels her world tour", "Orchestra plays a lost symphony", "Rock band returns after a decade",
              "Young pianist wins a prize", "New album tops the charts"),
}  # fmt: skip
COUNTRIES = {
    "Africa": "Kenya Ghana Morocco Ethiopia Senegal", "Asia": "Vietnam Nepal Japan Thailand Mongolia",
    "Europe": "Portugal Denmark Hungary Ireland Greece", "America": "Peru Chile Mexico Cuba Uruguay",
}  # fmt: skip
METHODS = "auto", "greedy", "beam", "best_of", "importance", "steer"
DRAWN = "auto", "best_of", "importance", "steer"
CHILDREN = "Lily Tom Mia Sam Anna Ben Lucy Max Jane Tim Sue Jack Amy Bob Sara Leo Mary John Emma Fred".split()
ANIMALS = "cat", "dog", "bird", "rabbit", "fish", "horse"


class Trip(BaseModel):
    city: str
    nights: int
    season: Literal["spring", "summer", "autumn", "winter"]


def records(lm):
    """Return 40 prompts with the right record of each."""
    question = 'Describe the trip in this sentence by a record {"city": ..., "nights": ..., "season": ...}.\nSentence: '
    right = [Trip(city=city, nights=2 + 5 * i % 19, season=SEASONS[i // 3 % 4]) for i, city in enumerate(CITIES)]
    prompts = [lm.chat(question + TRIPS[i % 5].format(**each.model_dump())) for i, each in enumerate(right)]
    return prompts, right, Trip


def topics(lm):
    """Return 20 prompts with the right topic of each."""
    shots = "Headline: Striker scores three\nTopic: sports\n\nHeadline: A stew for two\nTopic: food\n\n"
    shots += "Headline: Sunny weekend ahead\nTopic: weather\n\nHeadline: Choir sings Bach\nTopic: music\n\n"
    cases = [(line, topic) for topic, lines in HEADLINES.items() for line in lines]
    prompts = [f"{shots}Headline: {line}\nTopic:" for line, _ in cases]
    return prompts, [f" {topic}" for _, topic in cases], [f" {topic}" for topic in HEADLINES]


def continents(lm):
    """Return 20 prompts with the right continent of each."""
    shots = "Egypt is a country in Africa. China is a country in Asia. Brazil is a country in America. "
    cases = [(country, continent) for continent, names in COUNTRIES.items() for country in names.split()]
    prompts = [f"{shots}Spain is a country in Europe. {country} is a country in" for country, _ in cases]
    return prompts, [f" {continent}" for _, continent in cases], [f" {continent}" for continent in COUNTRIES]


def names(lm):
    """Return 40 stories of the embedded model with the name that comes next."""
    places = ("park", "The {} said: My name is"), ("shop", "A kind man asked the {}: Are you")
    cases = [(CHILDREN[i % 20], ("girl", "boy")[i % 2], *places[i // 20]) for i in range(40)]
    prompts = [f"There was a {kind} named {name}. {name} lost a ball in the {place}. {end.format(kind)}"
               for name, kind, place, end in cases]  # fmt: skip
    return prompts, [f" {name}" for name, *_ in cases], Regex(" [A-Z][a-z]{1,8}")


def pets(lm):
    """Return 40 stories of the embedded model with the pet that comes next, and the list of pets."""
    cases = [(CHILDREN[i % 20], ANIMALS[i % 6], ("park", "lake", "shop")[i // 14]) for i in range(40)]
    prompts = [f"{name} had a pet {pet}. One day, {name} took the {pet} to the {place}. They played all day. Then "
               f"they went home. {name} said to the" for name, pet, place in cases]  # fmt: skip
    return prompts, [f" {pet}" for _, pet, _ in cases], [f" {pet}" for pet in ANIMALS]


TASKS = {"smollm2": {"records": [records], "choices": [topics, continents]},
         "embedded": {"names": [names], "pets": [pets]}}  # fmt: skip


def mean(hits: np.ndarray, sign: str = "") -> str:
    """Return mean and standard error over the prompts, in percent."""
    return f"{100 * hits.mean():{sign}.1f} ± {100 * hits.std() / len(hits) ** 0.5:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="name of a task")
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--seeds", type=int, default=1, help="of the methods that draw")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    source = {"engine": "numpy"} if given.lm == "embedded" else {"name": given.lm}
    print("| task | method | right, % | over the best other | tokens | CPU s |\n|---|---|---|---|---|---|")
    for task, parts in TASKS[given.lm].items():
        if given.only not in (None, task, *(part.__name__ for part in parts)):
            continue
        rows = dict[str, tuple[np.ndarray, str]]()
        for method in METHODS:
            runs, tokens, start = [], 0, time.process_time()
            for seed in range(given.seeds if method in DRAWN else 1):
                lm, hits = CachedTransformer.from_pretrained(**source), []      # with an empty cache
                for part in parts:
                    prompts, right, constraint = part(lm)
                    options = {"max_tokens": 50} if task == "records" else {}
                    answers = generate(lm, prompts, constraint, method=method, seed=seed, progress=False, **options)
                    hits += [not each.error and each.value == truth
                             for each, truth in zip(answers, right, strict=True)]  # fmt: skip
                    tokens += sum(each.tokens for each in answers)
                runs.append(hits)
            name = f"auto ({answers[0].method})" if method == "auto" else method
            number = len(runs) * len(hits)
            cost = f"{tokens / number:.0f} | {(time.process_time() - start) / number:.2f}"
            rows[name] = np.mean(runs, axis=0), cost    # hits of each prompt, over the seeds
        for name, (hits, cost) in rows.items():
            best = max((other for each, (other, _) in rows.items() if each != name), key=np.mean)
            print(f"| {task} | {name} | {mean(hits)} | {mean(hits - best, '+')} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
