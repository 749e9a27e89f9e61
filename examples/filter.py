"""A filter with a fitted calibration: complaints among messages, with probabilities that can be compared with costs.

A filter keeps probable complaints. If a missed one costs four times a false alarm, the threshold is 1/5.

What to look for (`--lm smollm2`): the held-out scores of the receipt are those of the same sentences about other
things, and nearly perfect. On other sentences the calibration helps less. Labels must be like the later messages.

    labels  Brier before  after  log loss before  after  ECE before  after  floor  map
        48         0.522  0.000            0.716  0.001       0.158  0.001  0.002  complaint: head (48 labels ...)

    before   Brier 0.596, 9 false alarms, 0 missed of 18
    after    Brier 0.406, 1 false alarms, 3 missed of 18
"""

import argparse

from llmppl import CachedTransformer
from llmppl.decisions import calibration_report, decide, fit_calibration

BAD = "The {} arrived broken. | Nobody answers when I ask about the {}. | The {} is the wrong colour. | The {} stopped."
GOOD = "The {} is lovely, thank you. | I use the {} every day. | My son likes the {}. | The {} came early and works."
NEW_BAD = "There is a crack in the {}. | I waited three weeks for the {}. | This {} is a disgrace."
NEW_GOOD = "We are very happy with the {}. | I bought a second {} for my mother. | Great {}, great price."
QUESTIONS = {"complaint": "Does the customer complain?"}
THRESHOLD = 1 / 5


def labelled(bad: str, good: str, things: tuple[str, ...]) -> list[tuple[str, dict[str, bool]]]:
    """Return messages about some things, with labels."""
    found = []
    for thing in things:
        for texts, label in ((bad, True), (good, False)):
            found += [(text.format(thing), {"complaint": label}) for text in texts.split(" | ")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="few labels")
    args = parser.parse_args()
    lm = CachedTransformer.from_pretrained(args.lm)
    fit = labelled(BAD, GOOD, ("lamp", "coat") if args.quick else ("lamp", "coat", "radio", "table", "clock", "bag"))
    test = labelled(NEW_BAD, NEW_GOOD, ("kettle", "bicycle", "chair"))      # other sentences about other things
    states = [state for state, _ in test]
    calibration = fit_calibration(lm, fit, QUESTIONS, progress=False)
    before = decide(lm, states, QUESTIONS, progress=False)
    after = decide(lm, states, QUESTIONS, calibration=calibration, progress=False)
    print(calibration, "\n")
    for name, decisions in (("before", before), ("after", after)):
        [measures] = calibration_report(decisions, test).measures.values()
        alarms = missed = 0
        for decision, (_, labels) in zip(decisions, test, strict=True):
            kept = decision["complaint"][True] > THRESHOLD
            alarms += kept > labels["complaint"]
            missed += kept < labels["complaint"]
        print(f"{name:8} Brier {measures.brier:.3f}, {alarms} false alarms, {missed} missed of {len(test)}")


if __name__ == "__main__":
    main()
