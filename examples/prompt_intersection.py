"""Prompt intersection: text that goes on from two prompts, and what a good proposal is worth.

The target is the product of what the model says after each prompt. Two formulations of it differ in what a token is
drawn from: the distribution after the first prompt, weighed by the second ("first"), or the normalised product of both
("product"). This is Fig. 4 of Lew et al. 2023 in kind: the mean of log Z-hat against the number of particles.

What to look for: the mean of log Z-hat grows with N towards log Z, which it cannot exceed on average, and the higher it
is, the closer the particles are to the target (docs/inference.md). Where ten tokens are drawn, the product is ahead,
most with one or two particles, and still with 20 (30 other runs had -25.07 and -26.29). Where a text ends with its
sentence, much of the weight is on the shortest texts, "." alone or one word with it, which a proposal that is the best
one token ahead does not see: the product is not ahead. With few particles both are far off, with large standard errors,
as some runs go on to long texts (with one particle, five of the 20 runs had -82 to -94); from ten on they are near each
other. With 20 both are still short of log Z, which is at least -10.3: the texts of one or two tokens add up to that.

The output, with a plot of it in prompt_intersection.png:

    'For breakfast, the bear ate' and 'In the garden, the princess saw', ten tokens: mean log Z-hat of 10 runs, K=3

      N   from the product of both          from the first prompt's
      1    -30.55 +- 1.03                    -36.15 +- 1.34
      2    -29.10 +- 0.66                    -31.90 +- 1.33
      5    -27.17 +- 0.52                    -28.28 +- 0.91
      10   -25.36 +- 0.42                    -27.17 +- 0.40
      20   -25.27 +- 0.36                    -25.69 +- 0.49

      one text of each:
      N=1   product  ...the youngest daughter and the youngest daughter,
      N=1   first    ...it, and immediately ate it, and the little
      ...
      N=20  product  ...it, and said, "Would you like
      N=20  first    ...the bear and said, "Don't worry,

    'My favorite writer is probably' and 'My favorite physicist is probably', a sentence: mean log Z-hat of 10 runs, K=3

      N   from the product of both          from the first prompt's
      1    -47.99 +- 9.67                    -35.08 +- 8.82
      2    -30.34 +- 6.88                    -32.74 +- 9.59
      5    -17.83 +- 2.77                    -13.69 +- 1.13
      10   -13.68 +- 1.31                    -13.76 +- 0.91
      20   -11.50 +- 0.49                    -12.05 +- 0.74

      one text of each:
      N=1   product  ...a good one for me, and I can't believe that I should be out of the town."
      N=1   first    ...my most unable to ask for it."
      N=2   product  ...for the last time I will do it."
      N=2   first    ...a good one.
      N=5   product  ...the same.
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
PROPOSALS = {"product": "from the product of both", "first": "from the first prompt's"}
K = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10, help="runs for each mean (10)")
    parser.add_argument("--out", default="prompt_intersection.png", help="where to draw the plot")
    args = parser.parse_args()
    counts, num_runs = ([1, 2, 5], 3) if args.quick else ([1, 2, 5, 10, 20], args.runs)

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
