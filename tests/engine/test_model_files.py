"""Models by name and by folder: how they are made, what their files say, what may be wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.engine import builtin, description, loading, tiny, tokenizer, weights
from scheduler.engine.blas import SMALL_MODEL_PARAMETERS
from scheduler.engine.fields import Fields
from scheduler.engine.model import ModelError
from scheduler.engine.models import MlxSource, resolve
from scheduler.settings import Settings

pytestmark = pytest.mark.engine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fermata"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model's folder, to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.make(folder, "plain")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_tiny_models_are_the_same_each_time(tmp_path: Path, kind: tiny.Kind) -> None:
    made: list[dict[str, bytes]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tiny.make(tmp_path / name, kind)
        made.append(contents(tmp_path / name))
    assert made[0] == made[1]
    assert len(json.loads(made[0]["tokenizer.json"])["model"]["vocab"]) == tiny.VOCABULARY


def test_built_in_model_is_made_once(cache: Path) -> None:
    made = builtin.ensure("tiny-plain")
    assert made.parent == cache / "models"
    before = made.stat().st_mtime_ns
    assert builtin.ensure("tiny-plain") == made
    assert made.stat().st_mtime_ns == before


def test_model_that_was_left_half_made_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(builtin.MAKERS, "tiny-plain", die)
        with pytest.raises(KeyboardInterrupt):
            builtin.ensure("tiny-plain")
    assert [path.name for path in (cache / "models").glob("tiny*")] == []
    description.open_folder(builtin.ensure("tiny-plain"))
    assert sorted(path.name for path in (cache / "models").iterdir()) == ["lock", "tiny-plain-v1"]


def test_cache_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        builtin.ensure("tiny-plain")


def test_unknown_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ModelError, match=r"neither a folder nor one of smollm2, .*tiny-hybrid, fake"
    ):
        resolve(Settings(model="large"))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def spoil_header(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[9:12] = b"\xff\xff\xff"
    (folder / "model.safetensors").write_bytes(data)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def put(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "has no model"),
        (remove("tokenizer_config.json"), "has no tokenizer_config.json"),
        (remove("tokenizer.json"), "has no tokenizer.json"),
        (put("tokenizer.json", "{}"), "holds no tokenizer"),
        (put("config.json", "{"), "cannot be read"),
        (put("config.json", "[]"), "holds no JSON object"),
        (put("config.json", "{}"), "names no model_type"),
        (cut_weights, "bytes: fetch"),
        (cut_header, "ends inside its header"),
        (empty_weights, "no safetensors file"),
        (spoil_header, "broken header"),
    ],
)
def test_broken_folder_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=words) as caught:
        description.open_folder(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "four"),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("vocab_size", None),
        ("num_attention_heads", 0),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", "big"),
        ("text_config", [1]),
        ("quantization", {"bits": 0.5}),
        ("layer_types", [1]),
        ("eos_token_id", "end"),
    ],
)
def test_wrong_type_in_a_configuration_is_named(
    folder: Path, cache: Path, key: str, value: object
) -> None:
    edit(folder, **{key: value})
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match="bits" if key == "quantization" else key) as caught:
        MlxSource(str(folder), "stock").describe()
    assert "\n" not in str(caught.value)
    assert "fetch the model again" in str(caught.value)


def test_unknown_kind_of_model_is_refused_before_transformers_speaks(
    folder: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit(folder, model_type="nosuch")
    with pytest.raises(ModelError, match="knows no model_type 'nosuch'"):
        MlxSource(str(folder), "stock").describe()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    [
        put("tokenizer.json", '{"model": {"type": "BPE"}}'),
        put("tokenizer_config.json", '{"tokenizer_class": 5}'),
        put("tokenizer_config.json", "["),
        lambda folder: edit(folder, rms_norm_eps="small"),
    ],
)
def test_broken_tokenizer_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match="the tokenizer in") as caught:
        tokenizer.load(folder, None)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_the_configuration_are_refused_in_one_line(folder: Path) -> None:
    edit(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match="the model in") as caught:
        loading.load_weights(folder)
    assert "\n" not in str(caught.value)


def test_estimates_equal_what_is_measured(folder: Path) -> None:
    hybrid = folder.parent / "hybrid"
    hybrid.mkdir()
    tiny.make(hybrid, "hybrid")
    for path in (folder, hybrid):
        source = MlxSource(str(path), "stock")
        estimated = source.describe()
        measured = source.load(estimated).result
        assert measured.note == ""
        for name in ("weights_bytes", "kv_bytes_per_token", "kv_step_tokens", "state_bytes"):
            assert getattr(measured.model, name) == getattr(estimated.facts, name)
        assert estimated.facts.context_tokens == tiny.CONTEXT_TOKENS
        assert measured.model.transient_bytes_per_token > 0


def test_windows_are_estimated() -> None:
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 8192,
    }
    files = description.ModelFiles(
        Path("model"), Fields(Path("config.json"), config), Fields(Path("none"), {}), (), {}
    )
    facts = description.estimate("model", files, "")
    # 2 heads of 16 numbers of 2 bytes, keys and values.
    assert facts.kv_bytes_per_token == 2 * 128
    assert [(one.bytes_per_token, one.window_tokens) for one in facts.window_layers] == [
        (4 * 128, 512)
    ]


def test_fingerprint_sees_each_file_and_no_folder(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        return description.fingerprint(description.open_folder(path), tmp_path / "digests.json")

    first = digest(folder)
    moved = folder.rename(tmp_path / "moved")
    assert digest(moved) == first
    found = {first}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        path = moved / name
        path.write_text(path.read_text() + " ")
        found.add(digest(moved))
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    found.add(digest(moved))
    assert len(found) == 5


def test_weights_are_digested_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = description.open_folder(folder)
    first = description.fingerprint(files, tmp_path / "digests.json")
    digested: list[Path] = []

    def record(path: Path) -> str:
        digested.append(path)
        return "other"

    monkeypatch.setattr(description, "file_digest", record)
    assert description.fingerprint(files, tmp_path / "digests.json") != first
    assert folder / "model.safetensors" not in digested
    (tmp_path / "digests.json").write_text("broken")
    description.fingerprint(files, tmp_path / "digests.json")
    assert folder / "model.safetensors" in digested


def test_header_says_where_the_arrays_lie(folder: Path) -> None:
    entries = weights.read_header(folder / "model.safetensors")
    embeddings = entries["model.embed_tokens.weight"]
    assert (embeddings.dtype, embeddings.shape) == ("F32", (tiny.VOCABULARY, tiny.HIDDEN))
    assert embeddings.num_bytes == 4 * embeddings.num_elements


def test_tokenizer_renders_chats_with_tools_and_parts(folder: Path) -> None:
    found = tokenizer.load(folder, [2])
    call = {"function": {"name": "look", "arguments": {"where": "here"}}}
    text = found.render_chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "done"},
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
    )
    assert '{"type": "function", "function": {"name": "look"}}' in text
    assert '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>' in text
    assert text.index("Hello") < text.index("<tool_call>\n") < text.index("done")
    assert text.endswith("<|im_start|>assistant\n")
    ids = found.encode(text)
    assert ids[:1] == [1]
    assert found.end_of_turn_ids == (2,)
    detokenizer = found.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.last_segment == text


def test_template_that_refuses_is_a_value_error(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.load(folder, None).render_chat([{"role": "user", "content": "x"}])


BLAS_PROGRAM = """
import sys
from scheduler.engine import blas
chosen = blas.choose(sys.argv[1], int(sys.argv[2]))
assert "mlx.core" not in sys.modules
loaded = "/libopenblas" in open("/proc/self/maps").read()
print(chosen, loaded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a choice there is on Linux only")
@pytest.mark.parametrize(
    ("setting", "num_parameters"),
    [
        ("stock", 10**9),
        ("auto", SMALL_MODEL_PARAMETERS),
        ("auto", SMALL_MODEL_PARAMETERS + 1),
        ("openblas", 1),
    ],
)
def test_blas_is_chosen_by_setting_and_size(setting: str, num_parameters: int) -> None:
    program = [sys.executable, "-c", BLAS_PROGRAM, setting, str(num_parameters)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    wants = setting == "openblas" or (setting == "auto" and num_parameters > SMALL_MODEL_PARAMETERS)
    if wants and result.returncode:
        assert "install libopenblas0-pthread" in result.stderr
    elif wants and result.stdout.startswith("stock"):
        assert setting == "auto"
        assert result.stdout == "stock False\n"
    else:
        assert result.stdout == ("openblas True\n" if wants else "stock False\n")
