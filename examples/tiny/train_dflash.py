"""Trains a DFlash companion for the tiny model, measures it on held-out dialogues, writes both as Hugging Face folders.

    python train_dflash.py tiny.ninfer OUT [--seconds S] [--steps N] ...
    ninfer convert OUT/model tiny-dflash.ninfer --recipe q8 --dflash OUT/dflash

The companion learns from the weights of the artifact, as they are served. Needs one GPU for about five
minutes with the default settings.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from functools import partial
from pathlib import Path

import corpus
import dflash
import fast
import numpy as np
import tokenizer as tokens
import torch
from model import build
from model import config as geometry
from safetensors.torch import save_file
from torch.nn import functional as F
from train import batches, fit, training_batches

from ninfer.artifact import Artifact, open_artifact
from ninfer.convert.hf_config import SourceConfig
from ninfer.convert.sources import locate
from ninfer.models.qwen3_5.config import parse_text

ANCHORS = 24
DECAY = 4.0  # columns after which a draft counts 1/e as much: it is only looked at if those before it were right


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule early after this time")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="padded tokens per step")
    parser.add_argument("--documents", type=int, default=2560, help="documents sorted by length together")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=5, help="processes that generate text")
    parser.add_argument("--held-out", type=int, default=300, help="questions per held-out set")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def restore(artifact: Artifact, folder: Path) -> dict[str, torch.Tensor]:
    """The text model's state dict as the artifact serves it; also written as a checkpoint of fp32 to ``folder``."""
    record = dict(artifact.directory.components["text"].config)
    source = SourceConfig(record, None, {}, parse_text(record, mtp=True), None, "model.", 0, False, None, None)
    state: dict[str, np.ndarray] = {}
    for name, place in locate(source, ("text",), ()).items():
        values = np.asarray(artifact.decode(name), np.float32)
        tensor = state.setdefault(place.tensor, np.zeros(place.shape, np.float32))
        rows, at = tensor.reshape(-1, place.columns), 0
        values = (values.T if place.transposed else values).reshape(place.rows, place.columns)
        for first, last in place.spans:
            rows[first:last] = values[at : at + last - first]
            at += last - first
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: torch.from_numpy(values) for name, values in state.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for role in artifact.directory.components["text"].resources:
        (folder / role).write_bytes(artifact.resource("text", role))
    return stored


def anchored(ids: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` random places of each text [B,count] behind which the assistant goes on."""
    said = torch.zeros_like(weights)
    said[:, :-1] = (weights[:, 1:] == 1) + 1e-6
    said[:, 0] = 0
    return torch.multinomial(said, count, replacement=True)


def blocks(companion, features, model, ids, anchors):
    """Logits [B,A,BLOCK-1,V] of the drafts behind the anchors."""
    inputs = torch.full((*anchors.shape, dflash.BLOCK), dflash.MASK, device=ids.device)
    inputs[..., 0] = ids.gather(1, anchors)
    out = companion(features, model.model.embed_tokens(inputs), anchors)[:, :, 1:]
    return F.linear(out, model.lm_head.weight[: tokens.VOCABULARY])


def behind(values: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """values [B,T] at the places behind the anchors [B,A,BLOCK-1]; zero beyond the end."""
    places = anchors[..., None] + torch.arange(1, dflash.BLOCK, device=anchors.device)
    inside = places < values.shape[1]
    found = values[:, None].expand(-1, anchors.shape[1], -1).gather(2, places.clamp(max=values.shape[1] - 1))
    return found * inside


def train(companion, model, read, stream, options) -> int:
    late = torch.exp(-torch.arange(dflash.BLOCK - 1, device=options.device) / DECAY)

    def losses(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        features, likely = read(ids)
        anchors = anchored(ids, weights, ANCHORS)
        logits = blocks(companion, features, model, ids, anchors).float()
        each = F.cross_entropy(logits.flatten(0, 2), behind(likely, anchors).flatten(), reduction="none")
        counted = (behind(weights, anchors) == 1) * late
        # Scaled to the weight of whole texts, which `fit` divides by.
        return (each * counted.flatten()).sum() * (weights.sum() / counted.sum())

    return fit(list(companion.parameters()), losses, stream, options.steps, options.seconds, options)


@torch.no_grad()
def acceptance(companion, model, read, documents, options) -> list[float]:
    """Share of blocks whose first 1, 2, ... drafts are all what the model would have said."""
    counts = torch.zeros(dflash.BLOCK - 1, 2, device=options.device)
    for ids, weights in batches(documents, options.batch_tokens, options.device):
        features, likely = read(ids)
        anchors = anchored(ids, weights, ANCHORS)
        drafts = blocks(companion, features, model, ids, anchors).argmax(-1)
        inside = (behind(weights, anchors) == 1).cumprod(-1)
        # Where the text is not what the model says, it would not have come this far.
        agreed = ((drafts == behind(likely, anchors)) * inside).cumprod(-1)
        counts[:, 0] += agreed.sum((0, 1))
        counts[:, 1] += inside.sum((0, 1))
    return [round(float(hit / of), 4) for hit, of in counts.tolist()]


def main() -> None:
    options = arguments()
    began = time.time()
    torch.manual_seed(corpus.SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast.install()
    with open_artifact(options.artifact) as source:
        state = restore(Artifact(source), options.out / "model")
    file = str(options.out / "model" / "tokenizer.json")
    pool = multiprocessing.get_context("fork").Pool(options.workers)
    enough = options.steps * options.batch_tokens // (100 * options.documents) + 2
    stream = training_batches(pool.imap(partial(corpus.shard, file, size=options.documents), range(enough)), options)

    tokenizer = tokens.Tokenizer.from_file(file)
    settings = geometry(tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    model = build(settings).to(options.device)
    model.load_state_dict(state, strict=False)
    model.requires_grad_(False).eval()
    described = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 4}
    described |= {"mtp_num_hidden_layers": 0}
    described.pop("_name_or_path", None)
    (options.out / "model" / "config.json").write_text(json.dumps(described, indent=2) + "\n")

    companion = dflash.DFlash(settings.hidden_size).to(options.device)
    read = dflash.Features(model)
    print(f"{sum(p.numel() for p in companion.parameters()):,} parameters, {time.time() - began:.0f} s", flush=True)
    steps = train(companion, model, read, stream, options)
    pool.terminate()
    for parameter in companion.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    folder = options.out / "dflash"
    folder.mkdir(exist_ok=True)
    stored = {name: p.detach().cpu().bfloat16().contiguous() for name, p in companion.named_parameters()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dflash.config(model), indent=2) + "\n")
    encode = partial(corpus.encode, tokenizer)
    report: dict[str, object] = {"steps": steps}
    with torch.autocast(options.device, torch.bfloat16):
        for name, documents in corpus.held_out_sets(options.held_out).items():
            report[name] = accepted = acceptance(companion, model, read, encode(documents), options)
            print(f"{name}: drafts accepted {accepted}, {1 + sum(accepted):.2f} tokens of {dflash.BLOCK}", flush=True)
    report["seconds"] = round(time.time() - began)
    (options.out / "eval-dflash.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
