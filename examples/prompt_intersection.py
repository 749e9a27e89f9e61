"""Prompt intersection: text that goes on from two prompts, and what a good proposal is worth.

The target is the product of what the model says after each prompt. Two formulations of it differ in what a token is
drawn from: the law after the first prompt, weighed by the second ("first"), or the normalised product of both
("product"). This is Fig. 4 of Lew et al. 2023 in kind: the mean of log Z-hat against the number of particles.

What to look for: the mean of log Z-hat grows with N towards log Z, which it cannot exceed on average, and the higher it
is, the closer the particles are to the target (docs/inference.md). Where ten tokens are drawn, the product needs fewer
particles. Where a text ends with its sentence, most of log Z is in how early it ends (the small model likes "." best),
which a proposal that is the best one token ahead does not see: the two are alike. Ten runs show no more than that;
with --runs 40, product against first at N=1, 2, 5, 10, 20, 50 is

    ten tokens   -29.2 -28.5 -27.3 -26.6 -25.9 -25.6   against   -37.0 -31.3 -28.1 -27.1 -26.8 -25.7   (+- 0.2 to 1.0)
    a sentence   -24.6 -21.8 -14.3 -10.6  -9.1  -7.4   against   -34.4 -24.6 -13.8 -10.3  -8.7  -7.4   (+- 0.2 to 4.2)

The output, with a plot of it in prompt_intersection.png:

    'For breakfast, the bear ate' and 'In the garden, the princess saw', ten tokens: mean log Z-hat of 10 runs, K=3

      N   from the product of both laws     from the first prompt's law
      1    -29.10 +- 0.97                    -37.79 +- 2.15
      2    -28.29 +- 1.15                    -29.42 +- 1.11
      5    -28.21 +- 0.45                    -27.70 +- 0.54
      10   -26.13 +- 0.41                    -26.55 +- 0.60
      20   -25.55 +- 0.28                    -26.59 +- 0.50
      50   -26.21 +- 0.36                    -25.96 +- 0.32

      one text of each:
      N=1   product  ...the delicious treat. She was very happy and
      N=1   first    ...her little her evil love, and she was not
      ...
      N=50  product  ...the butterfly. She was so happy and
      N=50  first    ...the dishwasher and the dish

    'My favorite writer is probably' and 'My favorite physicist is probably', a sentence: mean log Z-hat of 10 runs, K=3

      N   from the product of both laws     from the first prompt's law
      1    -25.07 +- 5.22                    -29.13 +- 9.48
      2    -37.26 +- 8.09                    -16.74 +- 1.99
      5    -14.94 +- 2.11                    -13.12 +- 2.24
      10   -10.30 +- 1.57                     -8.15 +- 0.85
      20    -8.53 +- 1.11                     -7.05 +- 0.19
      50    -7.11 +- 0.20                     -7.10 +- 0.14

      one text of each:
      N=1   product  ...a real thing to do.
      N=1   first    ...her brother.
      ...
"""

import argparse

import numpy as np

from llmppl import CachedTransformer, PromptIntersection, smc_steer
from llmppl.models.programs import ends_sentence

CASES = [                                               # what is drawn, its prompts, how it ends
    ("ten tokens", ["For breakfast, the bear ate", "In the garden, the princess saw"], {"max_tokens": 10}),
    (
        "a sentence",                                   # after Lew et al. 2023, Fig. 4
        ["My favorite writer is probably", "My favorite physicist is probably"],
        {"max_tokens": 30, "until": ends_sentence},
    ),
]
PROPOSALS = {"product": "from the product of both laws", "first": "from the first prompt's law"}
K = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10, help="runs for each mean (10)")
    parser.add_argument("--out", default="prompt_intersection.png", help="where to draw the plot")
    args = parser.parse_args()
    counts, num_runs = ([1, 2, 5], 3) if args.quick else ([1, 2, 5, 10, 20, 50], args.runs)

    lm = CachedTransformer.from_pretrained(args.lm)
    results = []                                        # one for each case: {proposal: (means, errors) over counts}
    for what, prompts, end in CASES:
        print(f"\n{prompts[0]!r} and {prompts[1]!r}, {what}: mean log Z-hat of {num_runs} runs, K={K}\n")
        print("  N   " + "".join(f"{source:34}" for source in PROPOSALS.values()).rstrip())
        curves, samples = {name: [] for name in PROPOSALS}, []
        for N in counts:
            for name in PROPOSALS:
                model = PromptIntersection(lm, prompts, proposal=name, **end)
                runs = [smc_steer(model, N, K, seed=args.seed + i) for i in range(num_runs)]
                log_mls = [posterior.log_ml for posterior in runs]
                curves[name].append((np.mean(log_mls), np.std(log_mls, ddof=1) / np.sqrt(num_runs)))
                samples.append(f"  N={N:<3} {name:8} ...{' '.join(runs[0].sample(seed=args.seed).s.split())}")
            cells = [f"{mean:7.2f} +- {error:.2f}" for mean, error in (curves[name][-1] for name in PROPOSALS)]
            print(f"  {N:<4}" + "".join(f"{cell:34}" for cell in cells).rstrip())
        print("\n  one text of each:", *samples, sep="\n")
        results.append({name: np.transpose(curve) for name, curve in curves.items()})
    plot(counts, results, num_runs, args.out)


def plot(counts, results, num_runs, path):
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nNo plot: it needs matplotlib, pip install 'llmppl[plots]'")
        return
    figure, axes = plt.subplots(1, len(CASES), figsize=(5.2 * len(CASES), 3.8), layout="constrained", squeeze=False)
    for ax, (what, prompts, _), curves in zip(axes[0], CASES, results, strict=True):
        for (name, (means, errors)), marker, shift in zip(curves.items(), "os", (0.97, 1.03), strict=True):
            places = [shift * N for N in counts]        # side by side, so that both error bars are seen
            ax.errorbar(places, means, errors, marker=marker, capsize=3, label=f"drawn {PROPOSALS[name]}")
        ax.set_title("\n".join(f"“{prompt} …”" for prompt in prompts), fontsize=10)
        ax.set_xscale("log")
        ax.set_xticks(counts, [str(N) for N in counts])
        ax.minorticks_off()
        ax.set_xlabel(f"particles N ({what})")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"mean log Z-hat of {num_runs} runs")
    axes[0][0].legend(loc="lower right")
    figure.savefig(path, dpi=150)
    print(f"\nThe plot is in {path}")


if __name__ == "__main__":
    main()
