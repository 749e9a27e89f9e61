"""Adapters: sets of weights with a name that LoRA and similar methods add to the layers of a model.

The probabilities of a model with adapters (of the package peft, or by transformers' `add_adapter`) depend on which of
them are active, and anybody may change that at any time. `Adapted` is a model with a fixed choice. A call activates the
choice, runs the model, and restores the former state. Among all that share the weights, one call runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from llmppl.support.locks import Lock

_TURNS: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()   # by the model inside wrappers


class Adapted:
    """Model that runs with exactly the adapters `names` active; None for the currently active ones."""

    def __init__(self, model: Any, names: Sequence[str] | None = None) -> None:
        self.model = model
        self.inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.turn = _TURNS.setdefault(self.inner, Lock())
        self._known: list[Any] = []                     # configurations for which `_held` is right
        self._held: list[tuple[Any, frozenset[str]]] = []
        self.names = self._active() if names is None else tuple(names)
        self._check()
        self._configs = [self.loaded[name] for name in self.names]

    @property
    def loaded(self) -> dict[str, Any]:
        """Configurations of all adapters that the model has now, by name."""
        return getattr(self.inner, "peft_config", None) or getattr(self.model, "peft_config", None) or {}

    @property
    def current(self) -> bool:
        """True if the model still has the chosen adapters, and not others of the same names."""
        loaded = self.loaded
        return all(loaded.get(name) is config for name, config in zip(self.names, self._configs, strict=True))

    def __call__(self, **arguments: Any) -> Any:
        if not self.loaded and not self.names:
            return self.model(**arguments)
        with self.turn.lock, self._chosen():
            return self.model(**arguments)

    def _check(self) -> None:
        """Raise a ValueError for unknown adapters, and for kinds that cannot be switched on and off."""
        loaded = self.loaded
        unknown = [name for name in self.names if name not in loaded]
        if unknown:
            known = ", ".join(map(repr, loaded)) or "none: load one by peft, or by load_adapter of the model"
            raise ValueError(f"the model has no adapter {unknown[0]!r}; there are {known}")
        for name, config in loaded.items():
            invoked = name in self.names and getattr(config, "alora_invocation_tokens", None)
            if invoked or getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"the adapter {name!r} ({type(config).__name__}) depends on tokens or vectors before the text, "
                    "which contexts do not have; use an adapter that changes layers, as LoRA does"
                )
        trained = [name for name, config in loaded.items() if getattr(config, "bias", "none") not in ("none", None)]
        if trained and trained != list(self.names):
            raise ValueError(
                f"the adapter {trained[0]!r} was made with bias={loaded[trained[0]].bias!r}, so that its biases are in "
                "the model's own weights: the model can only be used with this adapter"
            )

    def _modules(self) -> list[tuple[Any, frozenset[str]]]:
        """Return the modules that hold adapters, with the names of these adapters."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        loaded = list(self.loaded.values())
        if [*map(id, loaded)] != [*map(id, self._known)]:
            kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
            self._held = [(each, _held(each)) for each in self.inner.modules() if isinstance(each, kinds)]
            self._known = loaded
        return self._held

    def _active(self) -> tuple[str, ...]:
        """Return the names of the adapters that are active now."""
        if not self.loaded:
            return ()
        layers = [(_active(module, held), held) for module, held in self._modules()]
        names = tuple(dict.fromkeys(name for active, _ in layers for name in active))
        if any(active != [name for name in names if name in held] for active, held in layers):
            raise ValueError(f"{names} are active in some layers of the model only: call its set_adapter first")
        return names

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """Activate the chosen adapters; afterwards restore the active ones and the parameters' `requires_grad`."""
        modules = self._modules()
        if not self.current or (self.names and not modules):
            raise RuntimeError(
                f"{list(self.names)} have been taken out of the model, or others put there under the same names: call "
                "lm.adapter(name) again, or make a new CachedTransformer"
            )
        changed = []
        for module, held in modules:
            merged = getattr(module, "merged_adapters", ())
            if merged and sorted(merged) != sorted(self.names):
                raise RuntimeError(
                    f"the adapters {list(merged)} have been merged into the model's weights, so it cannot run with "
                    f"{list(self.names) or 'none'}: call its unmerge_adapter first"
                )
            wanted = [name for name in self.names if name in held]
            if _active(module, held) != wanted:
                changed.append((module, wanted))
        before = [(module, not module.disable_adapters, list(module.active_adapters)) for module, _ in changed]
        trained = [(p, p.requires_grad) for module, _ in changed for p in module.parameters()]
        try:
            for module, wanted in changed:
                _set(module, bool(wanted), wanted or list(module.active_adapters))
            yield
        finally:
            for module, enabled, active in before:
                _set(module, enabled, active)
            for p, flag in trained:
                p.requires_grad_(flag)


def _held(module: Any) -> frozenset[str]:
    """Return the names of the adapters that a module holds."""
    dicts = (attrgetter(path)(module) for path in module.adapter_layer_names)
    return frozenset(name for each in dicts if hasattr(each, "keys") for name in each.keys())


def _active(module: Any, held: frozenset[str]) -> list[str]:
    """Return the names of the adapters that change the output of a module."""
    return [] if module.disable_adapters else [name for name in module.active_adapters if name in held]


def _set(module: Any, enabled: bool, active: list[str]) -> None:
    module.set_adapter(active)
    if enabled == module.disable_adapters:
        module.enable_adapters(enabled)
