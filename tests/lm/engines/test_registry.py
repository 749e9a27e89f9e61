"""The registry of engines: the engine that loads a name, and the options that an engine refuses."""

import sys
import types
from typing import get_args

import pytest

from llmppl import CachedTransformer, Vocabulary
from llmppl.lm.engine import FunctionEngine
from llmppl.lm.engines import gguf, registry

load = CachedTransformer.from_pretrained


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes exactly the named packages appear installed."""

    def have(*packages):
        monkeypatch.setattr(registry, "find_spec", lambda name: name if name in packages else None)

    return have


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ([], {"engine": "llamacpp"}, "one of 'transformers', 'numpy', 'llama.cpp', 'vllm', not 'llamacpp'"),
        ([], {"engine": "llama.cpp"}, "reads GGUF files, and the model in the package is none"),
        (["gpt2"], {"engine": "llama.cpp"}, "reads GGUF files, and 'gpt2' is none: give the path"),
        (["x"], {"engine": "vllm", "device": "cuda"}, "device cannot be given to engine='vllm', which chooses"),
        (["x"], {"engine": "llama.cpp", "dtype": "float32"}, "dtype cannot be given to engine='llama.cpp', which"),
        (
            ["x"], {"engine": "llama.cpp", "dtype": "float32", "device_map": "auto"},
            "device_map and dtype cannot be given to engine='llama.cpp'",
        ),
    ],
)  # fmt: skip
def test_an_option_that_the_engine_lacks_is_refused(installed, arguments, options, sentence):
    installed("xllamacpp", "vllm")
    with pytest.raises(ValueError, match=sentence):
        load(*arguments, **options)


@pytest.mark.parametrize(("engine", "extra"), [("llama.cpp", "llama-cpp"), ("vllm", "vllm")])
def test_a_missing_engine_says_how_to_install_it(installed, engine, extra):
    installed()
    with pytest.raises(ImportError, match=rf"pip install 'llmppl\[{extra}\]'"):
        load(engine=engine)


def test_type_checkers_know_the_same_engines():
    assert get_args(registry.EngineName) == tuple(registry.ENGINES)


def test_a_gguf_file_uses_llama_cpp_unless_an_option_is_for_transformers(installed, monkeypatch, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("llmppl.lm.engines.loading.load", lambda name, **options: ("transformers", {**none, **options}))
    wide = types.SimpleNamespace(quantised=False)
    monkeypatch.setattr("llmppl.lm.engines.llamacpp.load", lambda source, **options: (wide, options))
    file = str(tmp_path / "a.gguf")
    none = {"dtype": None, "device": None, "device_map": None}
    installed("xllamacpp")
    assert registry.load(file, None, threads=3) == (wide, {"threads": 3})
    assert registry.load(file, None, cache_bytes=5) == (wide, {"cache_bytes": 5})
    assert registry.load(file, None, **none) == (wide, {})
    for key in none:
        assert registry.load(file, None, **{key: "x"}) == ("transformers", {**none, key: "x"})
    assert registry.load(file, "transformers", cache_bytes=5) == ("transformers", none)
    assert registry.load(None, None) == ("transformers", none)
    wide.quantised = True
    with pytest.warns(UserWarning, match="a.gguf has quantised weights.*They do not with engine='transformers'"):
        registry.load(file, None)
    registry.load(file, "llama.cpp")                    # chosen by name: no warning
    monkeypatch.setitem(gguf.PACKAGES, "toy", "toy==1.0")
    monkeypatch.setattr(gguf, "packaged", lambda name: tmp_path / "a.gguf")
    assert registry.load("toy", None) == ("transformers", none)
    assert registry.load("toy", "llama.cpp") == (wide, {})
    installed()
    assert registry.load(file, None) == ("transformers", none)
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        registry.load(str(tmp_path / "b.gguf"), "llama.cpp")
    assert gguf.find(file).file == tmp_path / "a.gguf"


def test_cache_bytes_size_the_cache_of_vllm_and_an_eighth_holds_rows(installed, monkeypatch):
    seen = {}

    class Mine(FunctionEngine):
        pass

    def load(name, **options):
        seen.update(options, name=name)
        return Mine(lambda ids: [0.0, 0.0, 0.0], 3), Vocabulary([b"a", b"b", b""], eos_ids=[2])

    monkeypatch.setitem(sys.modules, "llmppl.lm.engines.vllm", types.SimpleNamespace(load=load))
    monkeypatch.setattr("llmppl.lm.engines.vllm", sys.modules["llmppl.lm.engines.vllm"], raising=False)
    installed("vllm")
    lm = CachedTransformer.from_pretrained("x", engine="vllm", dtype="float32", cache_bytes=8000)
    assert seen == {"name": "x", "dtype": "float32", "kv_cache_memory_bytes": 7000}
    assert lm.store.row_budget == 1000
    lm = CachedTransformer.from_pretrained("x", engine="vllm", cache_bytes=8000, row_bytes=500)
    assert seen["kv_cache_memory_bytes"] == 8000 and lm.store.row_budget == 500
