"""A classifier as a critic: sad stories, rated by a classifier that takes many texts at a time.

The classifier is a logistic regression on the language model's own last layer. The program trains it on forty
sentences, and tests it on twenty others. The classifier is a function of a list of texts. `batched` converts it to a
function of one text, which any step may call. One call rates all particles, and rates a text that two of them have
written only once. The target is the model's own text times p(sad | text)^4; the unfinished text only guides (`twist`).
You can replace `sadness` by a reward model, or by a classifier from a hub.

What to look for (`--lm smollm2`): four steps are four calls, for 47 to 64 different texts. Steering has stories as sad
as importance sampling does for two thirds of the tokens, and the same log Z-hat within the errors. A classifier is only
as good as its forty sentences. On the embedded model it is right in 15 of 20 (log Z-hat -2.97 ± 0.12 by steering, -3.68
± 0.65 without).

    the classifier is right in 0.95 of 20 sentences

                                p(sad)         log Z-hat       tokens run   calls   texts
      importance sampling, N=16 0.68 ± 0.03    -3.07 ± 0.18           354     4.0    63.5
      smc_steer, N=8, K=2       0.71 ± 0.02    -3.19 ± 0.15           229     4.0    46.9

      importance sampling, N=16:
        It was a sunny day. The  ...The dog was harmless. But the dog had saved a life. Lena helped in the ...
      smc_steer, N=8, K=2:
        It was a sunny day. The  ...The dog was harmless. But the dog had saved a life. Lena helped a teenager ...
      ...
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from llmppl import CachedTransformer, Model, Particles, batched, importance_sampling, smc_steer
from llmppl.distributions import Floats
from llmppl.models import Batched

SAD = [
    "Lily lost her teddy bear and cried.", "Tom fell and hurt his knee.", "The old dog was sick and could not get up.",
    "Nobody came to her party.", "His mom was angry and sent him to his room.", "The bird had a broken wing.",
    "She was all alone in the dark.", "Ben's best friend moved far away.", "The rain ruined their picnic.",
    "The boys were mean and laughed at him.", "Her ice cream fell on the ground.", "He missed his dad and felt sad.",
    "The little cat was hungry and cold.", "They had a fight and did not talk.", "The tree fell on their house.",
    "She broke her favorite cup and wept.", "The fish in the bowl had died.", "He was too late and the bus was gone.",
    "No one wanted to play with Sue.", "The wolf took the smallest lamb.",
    "Max was lost and wanted to go home.", "Her balloon popped and she began to cry.", "Grandma was in the hospital.",
    "The snowman melted and they were sorry.", "He was scared of the big dark cave.", "Their boat sank in the storm.",
    "Mia was ashamed and hid her face.", "The toy was broken and could not be fixed.",
    "Sam hurt his friend and felt bad.", "The rabbit was caught in a trap.",
]
HAPPY = [
    "Lily found her teddy bear and smiled.", "Tom won the race and cheered.", "The puppy wagged its tail and played.",
    "All her friends came to the party.", "His mom gave him a big hug.", "The bird sang a pretty song.",
    "She danced in the warm sun.", "Ben made a new best friend.", "They had a lovely picnic in the park.",
    "The boys were kind and shared their toys.", "Her ice cream was sweet.", "He was proud and his dad clapped.",
    "The little cat was warm and purred.", "They laughed and played all day.", "The tree was full of red apples.",
    "She got a shiny new cup and was glad.", "The fish jumped and splashed in the pond.",
    "He was just in time and everybody was glad.", "Everyone wanted to play with Sue.", "The lamb jumped with joy.",
    "Max came home and ate a big cake.", "Her balloon was pretty and she loved it.",
    "Grandma told a funny story and they laughed.", "They built a snowman and had fun.",
    "He was brave and found a treasure.", "Their boat sailed on the blue sea and they sang.",
    "Mia was happy and gave a big smile.", "The toy was fixed and worked like new.",
    "Sam helped his friend and felt good.", "The rabbit was free and hopped away.",
]  # fmt: skip
PROMPTS = [
    "It was a sunny day. The children laughed and danced with their dog.",
    "It was her birthday. Lily got a new toy and a big cake. She was happy and",
    "The little dog wagged his tail. He loved the park, his friends and his ball. Today",
]
NUM_TRAINED, READERS = 20, 4


def classifier(lm: CachedTransformer) -> tuple[Batched[str, float], float]:
    """Return a batched function from a text to log p(sad | text), and its accuracy on the test sentences."""

    def last_layer(texts: list[str]) -> Floats:         # (n, d): mean over the tokens of each text
        ids = [list(map(int, lm.context(text).tokens)) for text in texts]
        read = torch.tensor([[j < len(row) for j in range(max(map(len, ids)))] for row in ids])
        padded = torch.zeros(read.shape, dtype=torch.long).masked_scatter(read, torch.tensor(sum(ids, [])))
        with torch.inference_mode():
            states = lm.model(input_ids=padded, attention_mask=read.long(), output_hidden_states=True).hidden_states
        means: Floats = ((states[-1] * read[:, :, None]).sum(1) / read.sum(1, keepdim=True)).double().numpy()
        return means

    trained = last_layer([*SAD[:NUM_TRAINED], *HAPPY[:NUM_TRAINED]])
    mean, scale = trained.mean(axis=0), trained.std(axis=0) * np.sqrt(trained.shape[1])
    labels, weights = np.repeat([1.0, 0.0], NUM_TRAINED), np.zeros(trained.shape[1])
    for _ in range(500):                                # gradient ascent, with a little weight decay
        p_sad = 1 / (1 + np.exp(-(trained - mean) / scale @ weights))
        weights += ((trained - mean) / scale).T @ (labels - p_sad) - 0.02 * weights

    @batched
    def sadness(texts: list[str]) -> list[float]:
        return [-float(each) for each in np.logaddexp(0.0, -(last_layer(texts) - mean) / scale @ weights)]

    sad, happy = (np.array([sadness(text) for text in texts[NUM_TRAINED:]]) for texts in (SAD, HAPPY))
    return sadness, ((sad > np.log(0.5)).mean() + (happy < np.log(0.5)).mean()) / 2


class Told(Model):
    """Story of `num_spans` spans of `length` tokens, weighed at its end by the classifier."""

    def __init__(
        self, lm: CachedTransformer, prompt: str, sadness: Batched[str, float], num_spans: int, length: int
    ) -> None:
        super().__init__()
        self.context, self.sadness, self.left, self.length = lm.context(prompt), sadness, num_spans, length
        self.log_sad = 0.0

    def step(self) -> None:
        span = self.extend(self.context, max_tokens=self.length)
        self.s += span.text
        self.context, self.left = span.context, self.left - 1
        self.log_sad = self.sadness(self.s)
        if span.ended == "eos" or self.left == 0:
            self.score(READERS * self.log_sad)
            self.finish()
        else:
            self.twist(READERS * self.log_sad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_spans, length, num_runs, N = (2, 4, 1, 4) if args.quick else (4, 6, 4, 16)

    lm = CachedTransformer.from_pretrained(args.lm, engine="transformers")
    sadness, accuracy = classifier(lm)
    print(f"the classifier is right in {accuracy:.2f} of {len(SAD) + len(HAPPY) - 2 * NUM_TRAINED} sentences\n")
    methods: dict[str, Callable[[Told, int], Particles[Told]]] = {
        f"importance sampling, N={N}": lambda model, seed: importance_sampling(model, N, seed=seed),
        f"smc_steer, N={N // 2}, K=2": lambda model, seed: smc_steer(model, N // 2, 2, expand="copies", seed=seed),
    }
    print(f"{'':28}p(sad)         log Z-hat       tokens run   calls   texts")
    stories: dict[str, list[tuple[str, Told]]] = {}
    for name, run in methods.items():
        rows = []
        for prompt in PROMPTS[: 1 if args.quick else None]:
            model = Told(lm, prompt, sadness, num_spans, length)
            for seed in range(args.seed, args.seed + num_runs):
                found = run(model, seed)
                stats = found.stats
                p_sad = found.expect(lambda told: np.exp(told.log_sad))
                rows.append([p_sad, found.log_ml, stats.tokens, stats.calls, stats.arguments])
                stories.setdefault(name, []).append((prompt, found.best))
        mean, error = np.mean(rows, axis=0), np.std(rows, axis=0) / np.sqrt(len(rows))
        cells = f"{mean[0]:.2f} ± {error[0]:.2f}    {mean[1]:.2f} ± {error[1]:.2f}"
        print(f"  {name:26}{cells}{mean[2]:14.0f}{mean[3]:8.1f}{mean[4]:8.1f}")
    for name, told in stories.items():
        print(f"\n  {name}:")
        for prompt, story in told[::num_runs]:
            print(f"    {prompt[:24]} ...{' '.join(story.s.split())} ({np.exp(story.log_sad):.2f})")


if __name__ == "__main__":
    main()
