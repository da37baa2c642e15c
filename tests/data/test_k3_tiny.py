"""The embedded checkpoint is what its script makes, and has every part that it is there to prove."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.placement import Layout
from workbench.placement.table import check_layout
from workbench.serving.inputs import Tokenizer, read_tokenizer
from workbench.spec import DenseFFNSpec, KDASpec, MLASpec, ModelSpec, MoESpec, read_spec

DATA = Path(__file__).resolve().parents[2] / "data"
SCRIPT, MODEL, CORPUS = DATA / "make_k3_tiny.py", DATA / "k3-tiny", DATA / "corpus.txt"


def make(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, "--out", out], capture_output=True, text=True, timeout=120)


def differences(found: Path, expected: Path) -> list[str]:
    names = {path.name for path in [*found.iterdir(), *expected.iterdir()]}
    return sorted(
        name
        for name in names
        if not (found / name).is_file()
        or not (expected / name).is_file()
        or (found / name).read_bytes() != (expected / name).read_bytes()
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "k3-tiny"
    done = make(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(MODEL)


@pytest.fixture(scope="module")
def tokenizer(spec: ModelSpec) -> Tokenizer:
    return read_tokenizer(MODEL, spec)


def test_script_makes_the_committed_files_byte_for_byte(made: Path) -> None:
    assert differences(made, MODEL) == [], "run `python data/make_k3_tiny.py` with the pinned package versions"


def test_comparison_names_a_changed_a_missing_and_a_stray_file(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    shard = copy / "model-00003-of-000012.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (copy / "config.json").unlink()
    (copy / "notes.txt").write_text("stray")
    assert differences(copy, made) == ["config.json", shard.name, "notes.txt"]


def test_script_replaces_its_own_files_but_never_those_of_others(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    (copy / "config.json").write_text("{}")
    assert make(copy).returncode == 0
    assert differences(copy, made) == []
    (copy / "thesis.docx").write_text("years of work")
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    refused = make(copy)
    assert refused.returncode != 0
    assert "thesis.docx" in refused.stderr
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_folder_stays_below_three_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 3_000_000


def test_readme_says_that_the_weights_are_random() -> None:
    text = (MODEL / "README.md").read_text()
    assert "weights are random" in text
    assert "cannot answer" in text


def test_model_has_every_structural_part_of_k3(spec: ModelSpec) -> None:
    mixers = [type(layer.mixer) for layer in spec.layers]
    assert mixers[-2:] == [MLASpec, MLASpec]
    assert mixers.count(KDASpec) > mixers.count(MLASpec)
    assert isinstance(spec.layers[0].ffn, DenseFFNSpec)
    assert all(isinstance(layer.ffn, MoESpec) for layer in spec.layers[1:])
    assert spec.quant is not None
    assert spec.residual is not None
    assert spec.num_layers % spec.residual.block_size, "the last residual block is shorter than the others"
    assert spec.vision is not None
    assert spec.projector is not None
    assert spec.unknown_keys == ()


def test_no_two_widths_of_one_kind_of_block_are_equal(spec: ModelSpec) -> None:
    kda, mla, moe = spec.layers[0].mixer, spec.layers[8].mixer, spec.layers[8].ffn
    assert isinstance(kda, KDASpec)
    assert isinstance(mla, MLASpec)
    assert isinstance(moe, MoESpec)
    widths = [spec.hidden_size, kda.width, kda.head_dim]
    assert len(set(widths)) == len(widths)
    widths = [spec.hidden_size, mla.q_rank, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim, mla.qk_dim]
    assert len(set(widths)) == len(widths)
    widths = [spec.hidden_size, moe.width, moe.latent_dim, moe.num_experts]
    assert len(set(widths)) == len(widths)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=4),
        Layout(pp=3),
        Layout(tp=2, ep=2),
        Layout(tp=4, ep=4),
        Layout(tp=2, pp=2),
        Layout(dp=2, ep=2, dispatch="all_to_all"),
    ],
    ids=str,
)
def test_model_fits_the_usual_layouts(spec: ModelSpec, layout: Layout) -> None:
    check_layout(spec, layout)


def test_reserved_ids_stand_where_k3_has_them_counted_from_the_block(tokenizer: Tokenizer) -> None:
    first, markers = tokenizer.vocab_size - 256, tokenizer.markers
    assert [markers.bos - first, markers.eos - first, markers.end_of_msg - first] == [0, 1, 2]
    assert [markers.open - first, markers.close - first, markers.sep - first] == [3, 4, 5]
    media = [markers.media_begin, markers.media_content, markers.media_end, markers.media_pad]
    assert [token_id - first for token_id in media] == [18, 19, 20, 21]
    assert markers.pad - first == 255
    assert all(tokenizer.is_reserved(token_id) for token_id in range(first, tokenizer.vocab_size))
    assert not any(tokenizer.is_reserved(token_id) for token_id in range(first))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_has_learned_its_corpus(tokenizer: Tokenizer) -> None:
    text = CORPUS.read_text(encoding="utf-8")
    assert len(text.encode()) / len(tokenizer.encode(text)) > 3.5  # bytes a token; without merges it would be 1


def test_corpus_has_no_sentence_twice() -> None:
    sentences = [line for line in CORPUS.read_text(encoding="utf-8").splitlines() if line]
    assert len(sentences) >= 300
    assert len(set(sentences)) == len(sentences)
    assert all(line[0].isupper() and line[-1] in ".?" for line in sentences)
