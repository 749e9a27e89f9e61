"""Prompt intersection: text that continues two prompts, and the value of a good proposal.

The target is the product of the model's distributions after each prompt. Its two formulations differ in the
distribution from which a token is drawn. "first" draws after the first prompt, and weighs by the second. "product"
draws from the normalised product of both. The plot is similar to Fig. 4 of Lew et al. 2023: the mean of log Z-hat
against the number of particles.

What to look for: the mean of log Z-hat grows with N towards log Z, and cannot exceed log Z on average. A higher mean
means that the particles are closer to the target (docs/inference.md). Both formulations run with the default expansion
(*distinct* first choices) and with Algorithm 1 of the paper (*copies*). In the first case, of ten tokens, the product
is ahead with few particles, by two nats and more. From N=10 on the two are equal, as they must be. In the second case
(not shown) a text ends with its sentence. There, much of the weight is on the shortest texts: "." alone, or one word
and ".". A proposal that looks one token ahead cannot see this. The product ends a text at once twenty times less often
than the first prompt does. With the default expansion the product is still ahead from N=5 on, with copies it is not.
docs/papers.md has the results of 40 runs of each.

The output with --runs 40 --particles 1 2 5 10 20 40 80, with a plot of it in prompt_intersection.png:

    'For breakfast, the bear ate' and 'In the garden, the princess saw', ten tokens: mean log Z-hat of 40 runs, K=3

      N   distinct, product first             product - first   copies, product   first             product - first
      1   -30.30 +- 0.56    -32.71 +- 0.64      2.41 +- 0.85    -31.15 +- 0.43    -34.96 +- 1.00      3.81 +- 1.09
      2   -28.93 +- 0.53    -31.26 +- 0.54      2.33 +- 0.76    -29.14 +- 0.47    -31.38 +- 0.67      2.24 +- 0.82
      5   -26.28 +- 0.41    -28.37 +- 0.40      2.09 +- 0.57    -27.86 +- 0.36    -29.00 +- 0.40      1.15 +- 0.54
      10  -26.07 +- 0.17    -26.61 +- 0.47      0.54 +- 0.50    -26.58 +- 0.27    -27.48 +- 0.38      0.90 +- 0.46
      20  -25.21 +- 0.22    -25.38 +- 0.28      0.17 +- 0.36    -25.95 +- 0.25    -25.70 +- 0.44     -0.25 +- 0.50
      40  -25.14 +- 0.11    -25.39 +- 0.17      0.26 +- 0.20    -25.92 +- 0.15    -25.67 +- 0.25     -0.24 +- 0.29
      80  -24.67 +- 0.26    -24.74 +- 0.28      0.06 +- 0.39    -25.38 +- 0.11    -25.16 +- 0.25     -0.22 +- 0.28

      one text of each:
      N=1   product  ...the apple and went to the kitchen. "
      N=1   first    ...the muddy and the bear's cheese
      ...
      N=80  product  ...it, and said, "Yes, I will
      N=80  first    ...it and said, "What are you doing?"
"""

import argparse
from collections.abc import Callable
from typing import Literal

import numpy as np

from llmppl import CachedTransformer, PromptIntersection, smc_steer
from llmppl.distributions import Floats
from llmppl.models.programs import ends_sentence

Expand = Literal["distinct", "copies"]
Proposal = Literal["product", "first"]
Curves = dict[tuple[Expand, Proposal], Floats]          # (2, number of N): means and their errors
Case = tuple[str, list[str], int, Callable[[str], bool] | None]     # text, its prompts, max_tokens, until

CASES: list[Case] = [
    ("ten tokens", ["For breakfast, the bear ate", "In the garden, the princess saw"], 10, None),
    (
        "a sentence",                                   # after Lew et al. 2023, Fig. 4
        ["My favorite writer is probably", "My favorite physicist is probably"],
        30,
        ends_sentence,
    ),
]
PROPOSALS: dict[Proposal, str] = {"product": "from the product of both", "first": "from the first prompt's"}
EXPANSIONS: tuple[Expand, ...] = ("distinct", "copies")  # the default, and Algorithm 1 of the paper
K = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10, help="runs for each mean (10)")
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 2, 5, 10, 20], help="numbers N (1 2 5 10 20)")
    parser.add_argument("--out", default="prompt_intersection.png", help="where to draw the plot")
    args = parser.parse_args()
    counts, num_runs = ([1, 2], 3) if args.quick else (args.particles, args.runs)

    lm = CachedTransformer.from_pretrained(args.lm)
    results = []                                        # the curves of each case
    for what, prompts, max_tokens, until in CASES:
        print(f"\n{prompts[0]!r} and {prompts[1]!r}, {what}: mean log Z-hat of {num_runs} runs, K={K}\n")
        print("  N   " + "".join(f"{f'{each}, product':18}{'first':18}{'product - first':18}" for each in EXPANSIONS))
        curves: dict[tuple[Expand, Proposal], list[tuple[float, float]]] = {}
        samples = []
        for N in counts:
            cells = []
            for expansion in EXPANSIONS:
                for name in PROPOSALS:
                    model = PromptIntersection(lm, prompts, proposal=name, max_tokens=max_tokens, until=until)
                    runs = [smc_steer(model, N, K, expand=expansion, seed=args.seed + i) for i in range(num_runs)]
                    log_mls = np.array([posterior.log_ml for posterior in runs])
                    cells.append((log_mls.mean(), log_mls.std(ddof=1) / np.sqrt(num_runs)))
                    curves.setdefault((expansion, name), []).append(cells[-1])
                    if expansion == EXPANSIONS[0]:
                        text = " ".join(runs[0].sample(seed=args.seed).s.split())
                        samples.append(f"  N={N:<3} {name:8} ...{text}")
                (product, error), (first, other) = cells[-2:]
                cells.append((product - first, np.hypot(error, other)))
            print(f"  {N:<4}" + "".join(f"{f'{mean:6.2f} +- {error:.2f}':18}" for mean, error in cells), flush=True)
        print("\n  one text of each:", *samples, sep="\n")
        results.append({name: np.transpose(curve) for name, curve in curves.items()})
    plot(counts, results, num_runs, args.out)


def plot(counts: list[int], results: list[Curves], num_runs: int, path: str) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nNo plot: it needs matplotlib, pip install 'llmppl-smc[plots]'")
        return
    figure, axes = plt.subplots(1, len(CASES), figsize=(5.2 * len(CASES), 3.8), layout="constrained", squeeze=False)
    for ax, (what, prompts, _, _), curves in zip(axes[0], CASES, results, strict=True):
        shifts = np.linspace(0.94, 1.06, len(curves))   # side by side, to show all error bars
        for ((expansion, name), (means, errors)), shift in zip(curves.items(), shifts, strict=True):
            style = {"marker": "os"[name == "first"], "linestyle": ":" if expansion == "copies" else "-"}
            color = "C0" if name == "product" else "C1"
            label = f"{PROPOSALS[name]}, {expansion}"
            ax.errorbar([shift * N for N in counts], means, errors, color=color, capsize=3, label=label, **style)
        ax.set_title("\n".join(f"“{prompt} …”" for prompt in prompts), fontsize=10)
        ax.set_xscale("log")
        ax.set_xticks(counts, [str(N) for N in counts])
        ax.minorticks_off()
        ax.set_xlabel(f"particles N ({what})")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"mean log Z-hat of {num_runs} runs")
    axes[0][0].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=80)
    print(f"\nThe plot is in {path}")


if __name__ == "__main__":
    main()
