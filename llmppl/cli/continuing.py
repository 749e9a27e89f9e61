"""How `llmppl generate` continues prompts, one or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmppl.cli import options

if TYPE_CHECKING:
    import numpy as np

    from llmppl.distributions import Rule
    from llmppl.inference import Particles
    from llmppl.lm import CachedTransformer, End
    from llmppl.masks import Index
    from llmppl.models.programs import ConstrainedText


Task = dict[Literal["options", "prompt"], str]          # the options are those by which runs are told apart


class Loaded(NamedTuple):
    """What all prompts share."""

    model: CachedTransformer
    limit: Index | None                                 # of the constraint
    fits: Any                                           # from a text to the tokens that keep its words short


@dataclass(frozen=True)
class Continuing:
    """The options of the command. It pickles, for other processes, in which the language model is loaded anew."""

    lm: options.Source
    max_letters: int | None
    constraint: Any
    N: int
    K: int
    max_tokens: int
    end: End
    complete: bool | None
    rule: Rule
    stop: list[str] | None = None
    chat: bool = False
    system: str | None = None

    def load(self) -> Loaded:
        """The model, and what else takes long; a ValueError for what no prompt can meet."""
        model = options.load(self.lm)
        from llmppl.languages import index_of
        from llmppl.models.programs import short_words
        from llmppl.models.spans import must_end_by

        if self.chat and getattr(model.tokenizer, "chat_template", None) is None:
            raise ValueError("--chat wants a model that was trained to chat and has a template for it, as --lm smollm2")
        index = index_of(self.constraint, model.vocab)
        try:
            must_end_by("text", self.complete, self.max_tokens, index)
        except ValueError as error:
            raise ValueError(str(error).replace("complete=False", "--cut")) from None
        return Loaded(model, index, None if self.max_letters is None else short_words(model.vocab, self.max_letters))

    def program(self, loaded: Loaded, prompt: str) -> ConstrainedText:
        from llmppl.models.programs import ConstrainedText

        model, limit, fits = loaded
        before = "" if self.chat else prompt            # it may end inside a word
        return ConstrainedText(
            model,
            model.chat(prompt, system=self.system) if self.chat else prompt,
            limit,
            mask=None if fits is None else lambda text: fits(before + text),
            end=self.end,
            complete=self.complete,
            max_tokens=self.max_tokens,
            rule=self.rule,
            stop=self.stop or (),
        )

    def steer(self, loaded: Loaded, task: Task, rng: np.random.Generator) -> Particles[ConstrainedText]:
        """What comes of one of many prompts."""
        from llmppl.inference import smc_steer

        return smc_steer(self.program(loaded, task["prompt"]), self.N, self.K, rng=rng)
