import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import flax.serialization
import numpy as np
import pytest

from maxdiff.models.network import flatten, unflatten
from maxdiff.pipeline import Pipeline
from maxdiff.weights.checkpoint import make_network, open_checkpoint
from maxdiff.weights.load import load_params
from maxdiff.weights.source import open_source, open_weights

STEM = "unet/diffusion_pytorch_model"


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(folders["sd1"], tmp_path / "sd1")


def unet_of(folder: Path, **options) -> dict:
    checkpoint = open_checkpoint(folder, **options)
    config = checkpoint.config("unet")
    assert config is not None
    return dict(flatten(load_params(make_network("unet", config), *checkpoint.tensors("unet"))))


def assert_equal(a: dict, b: dict):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path])


def test_sharded_files_with_an_index(diffusers_pipelines, folder: Path):
    expected = unet_of(folder)
    (folder / f"{STEM}.safetensors").unlink()
    diffusers_pipelines["sd1"][0].unet.save_pretrained(folder / "unet", max_shard_size="500KB")
    assert (folder / f"{STEM}.safetensors.index.json").exists()
    assert_equal(unet_of(folder), expected)
    shard = sorted((folder / "unet").glob("*-of-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"the index names {shard.name}, which unet/ does not have"):
        unet_of(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_variants(diffusers_pipelines, folder: Path, sharded: bool):
    import torch

    options = {"max_shard_size": "300KB"} if sharded else {}
    half = type(diffusers_pipelines["sd1"][0].unet).from_pretrained(folder / "unet").to(torch.float16)
    half.save_pretrained(folder / "unet", variant="fp16", **options)
    expected = unet_of(folder)
    for path, leaf in unet_of(folder, variant="fp16").items():
        np.testing.assert_array_equal(leaf, np.asarray(expected[path], np.float16).astype(np.float32))
    with pytest.raises(FileNotFoundError, match="has no weights of variant=ema in unet; there is: config.json, "):
        unet_of(folder, variant="ema")


def test_pickles_through_torch(diffusers_pipelines, folder: Path):
    expected = unet_of(folder)
    (folder / f"{STEM}.safetensors").unlink()
    diffusers_pipelines["sd1"][0].unet.save_pretrained(folder / "unet", safe_serialization=False)
    assert (folder / f"{STEM}.bin").exists()
    assert_equal(unet_of(folder), expected)
    assert_equal(unet_of(folder, from_pt=True), expected)


def write_flax(folder: Path, part: str, file: str) -> dict:
    """The part's weights as Flax once wrote them: its module names, its layouts, its file."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config(part)
    assert config is not None
    params = dict(flatten(load_params(make_network(part, config), *checkpoint.tensors(part))))
    numbered = {
        "down_blocks",
        "up_blocks",
        "resnets",
        "attentions",
        "downsamplers",
        "upsamplers",
        "transformer_blocks",
        "to_out",
        "net",
    }

    def names(path) -> tuple[str, ...]:
        keys: list[str] = []
        for key in path:
            if isinstance(key, int) and keys[-1] in numbered:
                keys[-1] += f"_{key}"
            else:
                keys.append(str(key))
        return tuple(keys)

    tree = unflatten((names(path), np.asarray(leaf)) for path, leaf in params.items())
    (folder / part / file).write_bytes(flax.serialization.msgpack_serialize(tree))
    return params


def test_old_flax_folders(folder: Path):
    parts = {
        "unet": "diffusion_flax_model.msgpack",
        "vae": "diffusion_flax_model.msgpack",
        "text_encoder": "flax_model.msgpack",
    }
    expected = {part: write_flax(folder, part, file) for part, file in parts.items()}
    flax_scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    flax_scheduler["_class_name"] = "FlaxDDIMScheduler"
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(flax_scheduler))
    for file in (*folder.glob("*/*.safetensors"),):
        file.unlink()
    for from_pt in ("auto", False):
        pipeline = Pipeline.load(folder, from_pt=from_pt)
        assert pipeline.scheduler["_class_name"] == "DDIMScheduler"
        for part, params in pipeline.networks():
            assert_equal(dict(flatten(params.params)), expected[part])
    with pytest.raises(FileNotFoundError, match=r"has no PyTorch weights \(from_pt=true\) in unet; there is: config.json, "
                                                "diffusion_flax_model.msgpack"):  # fmt: skip
        Pipeline.load(folder, from_pt=True)


def test_asking_for_flax_where_there_is_pytorch(folder: Path):
    with pytest.raises(FileNotFoundError, match=r"has no Flax weights \(from_pt=false\) in unet; there is: config.json, "
                                                "diffusion_pytorch_model.safetensors"):  # fmt: skip
        Pipeline.load(folder, from_pt=False)


def test_what_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="there is no folder ./nowhere"):
        open_source("./nowhere")
    with pytest.raises(FileNotFoundError, match="no name of a hub repository"):
        open_source("not a name!")
    (tmp_path / "unet").mkdir()
    with pytest.raises(FileNotFoundError, match="has no file unet/config.json"):
        Pipeline.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no weights in unet; there is: nothing"):
        open_weights(open_source(tmp_path), "unet")
    (tmp_path / "unet" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no JSON"):
        open_checkpoint(tmp_path).config("unet")
    (tmp_path / "unet" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list, not an object"):
        open_checkpoint(tmp_path).config("unet")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as huggingface_hub asks of it, over a folder."""

    root: Path
    requested: list[str]
    COMMIT = "a" * 40

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body: bool):
        path = self.path.split("?")[0]
        files = sorted(p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())
        if path.startswith("/api/models/some/gated"):
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if not path.startswith(("/api/models/some/model", "/some/model/resolve/")):
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if "/nothing" in path:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/some/model/tree/"):
            entries = [{"type": "file", "path": f, "size": (self.root / f).stat().st_size, "oid": "0" * 40} for f in files]
            return self.reply(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/some/model"):
            info = {"id": "some/model", "sha": self.COMMIT, "siblings": [{"rfilename": f} for f in files]}
            return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        file = path.split("/", 5)[5]
        if body:
            self.requested.append(file)
        data = (self.root / file).read_bytes()
        return self.reply(200, data, {"ETag": f'"{file}"', "X-Repo-Commit": self.COMMIT}, body=body)

    def reply(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine that has `some/model`; huggingface_hub itself talks to it."""
    import huggingface_hub

    handler = type("Handler", (Hub,), {"root": folder, "requested": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert huggingface_hub
    yield handler
    server.shutdown()
    server.server_close()


def test_a_hub_repository_is_fetched_part_by_part_and_found_again_offline(hub: type[Hub], folder: Path, monkeypatch):
    from huggingface_hub import constants

    (folder / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"never wanted")
    (folder / "sd1-4.ckpt").write_bytes(b"never wanted")
    expected = unet_of(folder)
    assert_equal(unet_of("some/model", revision="main"), expected)  # pyright: ignore[reportArgumentType]
    assert set(hub.requested) == {"unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
    pipeline = Pipeline.load("some/model")
    assert pipeline.tokenizer.pad_token == "<|endoftext|>"
    assert not [file for file in hub.requested if "fp16" in file or "ckpt" in file]

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    assert_equal(unet_of("some/model"), expected)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="the hub cannot be reached .* is not in its cache"):
        open_source("some/other")


def test_what_the_hub_does_not_have(hub: type[Hub]):
    assert hub
    with pytest.raises(FileNotFoundError, match="the hub has no such repository"):
        open_source("some/unknown")
    with pytest.raises(ValueError, match="the hub's some/model has no revision=nothing"):
        open_source("some/model", "nothing")
    with pytest.raises(ValueError, match="some/gated: the hub wants a login"):
        open_source("some/gated")
