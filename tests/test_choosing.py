"""Which engine a name is loaded by, and what an engine does not take."""

import pytest

from llmppl import CachedTransformer
from llmppl.lm import choosing, gguf

load = CachedTransformer.from_pretrained


@pytest.fixture
def installed(monkeypatch):
    """As if there were what the test says; loaders that give back what they were given."""

    def have(*packages):
        monkeypatch.setattr(choosing, "find_spec", lambda name: name if name in packages else None)

    return have


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ([], {"engine": "llamacpp"}, "engine must be one of 'transformers', 'llama.cpp', 'vllm', not 'llamacpp'"),
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
def test_what_an_engine_does_not_take_is_refused(installed, arguments, options, sentence):
    installed("xllamacpp", "vllm")
    with pytest.raises(ValueError, match=sentence):
        load(*arguments, **options)


@pytest.mark.parametrize(("engine", "extra"), [("llama.cpp", "llama-cpp"), ("vllm", "vllm")])
def test_an_engine_that_is_not_installed_says_how(installed, engine, extra):
    installed()
    with pytest.raises(ImportError, match=rf"pip install 'llmppl\[{extra}\]'"):
        load(engine=engine)


def test_a_gguf_file_goes_to_llama_cpp_unless_something_is_for_transformers(installed, monkeypatch, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("llmppl.lm.loading.load", lambda name, **options: ("transformers", options))
    monkeypatch.setattr("llmppl.lm.llamacpp.load", lambda source, **options: ("llama.cpp", options))
    file = str(tmp_path / "a.gguf")
    none = {"dtype": None, "device": None, "device_map": None}
    installed("xllamacpp")
    assert choosing.load(file, None, threads=3) == ("llama.cpp", {"threads": 3})
    assert choosing.load(file, None, cache_bytes=5) == ("llama.cpp", {"cache_bytes": 5})
    assert choosing.load(file, None, **none) == ("llama.cpp", {})
    for key in none:
        assert choosing.load(file, None, **{key: "x"}) == ("transformers", {**none, key: "x"})
    assert choosing.load(file, "transformers", cache_bytes=5) == ("transformers", none)
    assert choosing.load(None, None) == ("transformers", none)
    installed()
    assert choosing.load(file, None) == ("transformers", none)
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        choosing.load(str(tmp_path / "b.gguf"), "llama.cpp")
    assert gguf.find(file).file == tmp_path / "a.gguf"
