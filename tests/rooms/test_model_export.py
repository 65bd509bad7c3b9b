"""A GGUF file written as a Hugging Face folder: the same model to whoever reads it."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.errors import ConfigError
from moonserve.live.engine.export import export_folder
from moonserve.live.engine.weights import FolderSource, GgufSource, load_weights
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.model.config import config_of_gguf, load_config
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.template import load_template
from moonserve.live.text.tokenizer import load_tokenizer
from tests.support.tiny import write_folder


@pytest.mark.model
def test_the_folder_is_the_same_model(tmp_path: Path) -> None:
    """Configuration, weights in float32, token ids and chat template all come back equal."""
    path, folder = resolve(DEFAULT_MODEL).path, tmp_path / "folder"
    export_folder(path, folder, "float32")
    file = open_gguf(path)
    assert load_config(folder) == config_of_gguf(file)
    theirs, ours = GgufSource(file, config_of_gguf(file)), FolderSource(folder)
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight"):
        assert torch.equal(theirs.tensor(name), ours.tensor(name))
    load_weights(folder, torch.float32, lambda stage: None)  # all that are wanted are there
    text = "  I'm 42 <|im_end|>\n 一二"
    one, other = load_tokenizer(path), load_tokenizer(folder)
    assert one.encode(text) == other.encode(text)
    said = [{"role": "user", "content": "Hi"}]
    assert load_template(path, one).render(said) == load_template(folder, other).render(said)
    assert (one.bos_token, one.eos_token) == (other.bos_token, other.eos_token)


@pytest.mark.model
def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """What lies in the folder is never overwritten; the error says what to do."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        export_folder(resolve(DEFAULT_MODEL).path, tmp_path, "float32")
    assert [it.name for it in tmp_path.iterdir()] == ["mine"]


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    """A folder, an unknown dtype: one line that names the field, nothing written."""
    model = write_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="folder already"):
        export_folder(model, tmp_path / "new", "float32")
    with pytest.raises(ConfigError, match="bfloat16"):
        export_folder(tmp_path / "x.gguf", tmp_path / "new", "int3")
    assert not (tmp_path / "new").exists()
    result = CliRunner().invoke(cli, ["model", "export", str(model), str(tmp_path / "new")])
    assert result.exit_code != 0
    assert "Traceback" not in result.output
