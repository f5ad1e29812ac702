"""Trains DFlash and DFlash2 companions for the tiny model, measures them on held-out dialogues, writes all three as
Hugging Face folders.

    python train_dflash.py tiny.ninfer OUT [--seconds S] [--steps N] ...
    ninfer convert OUT/model tiny-dflash.ninfer --recipe q8 --dflash OUT/dflash --dflash2 OUT/dflash2

The companions learn from the weights of the artifact, as they are served, and from one pass of them over each text.
Needs one GPU for about five minutes with the default settings.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
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
from train import Batch, Document, batches, optimizer_for, rate_at, training_batches

from ninfer.artifact import Artifact, open_artifact
from ninfer.convert.hf_config import SourceConfig
from ninfer.convert.sources import locate
from ninfer.models.qwen3_5.config import parse_text

Told = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""ids and loss weights [B,T], and what the model says of them: features [B,T,m*H], its likeliest tokens [B,T]."""
DECAY = 4.0  # columns after which a draft counts 1/e as much: it is only looked at if those before it were right
DRAFTS = dflash.BLOCK - 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1915, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule early after this time")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="padded tokens per step")
    parser.add_argument("--anchors", type=int, default=32, help="blocks per document and step")
    parser.add_argument("--repeats", type=int, default=2, help="steps per text, each with other anchors")
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


# --- blocks -----------------------------------------------------------------------------------------------------


def anchored(weights: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` random places of each text [B,count] behind which the assistant goes on."""
    said = torch.zeros_like(weights)
    said[:, :-1] = (weights[:, 1:] == 1) + 1e-6
    said[:, 0] = 0
    return torch.multinomial(said, count, replacement=True)


def outputs(companion, model, told: Told, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B,A,DRAFTS,H] of the blocks behind the anchors, and their logits [B,A,DRAFTS,V]."""
    ids, _, features, _ = told
    inputs = torch.full((*anchors.shape, dflash.BLOCK), dflash.MASK, device=ids.device)
    inputs[..., 0] = ids.gather(1, anchors)
    out = companion(features, model.model.embed_tokens(inputs), anchors)[:, :, 1:]
    return out, F.linear(out, model.lm_head.weight[: tokens.VOCABULARY])


def behind(values: torch.Tensor, anchors: torch.Tensor, first: int = 1) -> torch.Tensor:
    """values [B,T] at the DRAFTS places from ``first`` behind the anchors [B,A,DRAFTS]; zero beyond the end."""
    places = anchors[..., None] + torch.arange(first, first + DRAFTS, device=anchors.device)
    inside = places < values.shape[1]
    found = values[:, None].expand(-1, anchors.shape[1], -1).gather(2, places.clamp(max=values.shape[1] - 1))
    return found * inside


def loss(companion, model, told: Told, anchors: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the model's likeliest tokens, as far as the text itself consists of them."""
    ids, weights, _, likely = told
    late = torch.exp(-torch.arange(DRAFTS, device=ids.device) / DECAY)
    spoken, said = behind(weights, anchors) == 1, behind((likely == ids).int(), anchors)
    counted = (F.pad(said[..., :-1], (1, 0), value=1).cumprod(-1) * spoken * late).flatten()
    wanted = behind(likely, anchors).flatten()

    def mean(logits: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(logits.float().flatten(0, 2), wanted, reduction="none")
        return (each * counted).sum() / counted.sum()

    out, logits = outputs(companion, model, told, anchors)
    if (selector := companion.candidate_selector) is None:
        return mean(logits)
    # The logits alone must bring the right token among the candidates; with the selector it must be the first.
    chosen = logits + selector(out, behind(ids, anchors, 0), tokens.VOCABULARY)
    return (2 * mean(chosen) + mean(logits)) / 3


@torch.no_grad()
def drafts(companion, model, told: Told, anchors: torch.Tensor) -> torch.Tensor:
    """Greedy drafts [B,A,DRAFTS] behind the anchors."""
    out, logits = outputs(companion, model, told, anchors)
    if (selector := companion.candidate_selector) is None:
        return logits.argmax(-1)
    scores, candidates = logits.float().topk(dflash.CANDIDATES)
    chain = [told[0].gather(1, anchors)]
    for i in range(DRAFTS):
        score = scores[:, :, i] + selector(out[:, :, i], chain[-1], candidates[:, :, i])
        chain.append(candidates[:, :, i].gather(-1, score.argmax(-1, keepdim=True))[..., 0])
    return torch.stack(chain[1:], -1)


# --- training ---------------------------------------------------------------------------------------------------


def told(model, stream: Iterator[Batch], device: str, repeats: int = 1) -> Iterator[Told]:
    """Every batch ``repeats`` times, with one pass of the model."""
    read = dflash.Features(model)
    for ids, weights in stream:
        with torch.autocast(device, torch.bfloat16):
            features, likely = read(ids, tokens.VOCABULARY)
        yield from [(ids, weights, features, likely)] * repeats


def optimizers(companion: dflash.Companion, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, AdamW for the rest."""
    matrices = [m.weight for m in companion.modules() if isinstance(m, torch.nn.Linear)]
    known = {id(p) for p in matrices}
    rest = [p for p in companion.parameters() if id(p) not in known]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, optimizer_for(rest, rate)]


def fit(companions: dict[str, dflash.Companion], model, stream: Iterator[Told], options) -> int:
    """One step of every companion per batch; what they have learned is saved every minute. Returns the steps made."""
    steppers = [o for c in companions.values() for o in optimizers(c, options.rate)]
    began, step, seen, progress, saved = time.time(), 0, 0, 0.0, 0
    while progress < 1:
        batch = next(stream)
        for group in (group for o in steppers for group in o.param_groups):
            group["lr"] = options.rate * rate_at(progress)
        anchors = anchored(batch[1], options.anchors)
        found = {}
        for name, companion in companions.items():
            with torch.autocast(options.device, torch.bfloat16):
                found[name] = loss(companion, model, batch, anchors)
            found[name].backward()
            torch.nn.utils.clip_grad_norm_(companion.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + anchors.numel()
        if step % 50 == 0 or options.device != "cuda":
            losses = ", ".join(f"{name} {value.item():.4f}" for name, value in found.items())
            spent = time.time() - began
            print(f"step {step} loss {losses}; {seen / spent / 1e3:.0f}k blocks/s, {spent:.0f} s", flush=True)
            if spent // 60 > saved:
                saved = spent // 60
                save(companions, model, options.out)
        progress = max(step / options.steps, (time.time() - began) / options.seconds)
    return step


# --- measuring --------------------------------------------------------------------------------------------------


def accepted(companion, model, documents: list[Document], options) -> dict[str, object]:
    """Over the last answers of documents, where these are what the model itself would have said: tokens per round, and
    the share of rounds that keep their first 1, 2, ... drafts."""
    counts = np.zeros(DRAFTS + 1, int)
    for batch in told(model, batches(documents, options.batch_tokens, options.device), options.device):
        ids, weights, _, likely = batch
        every = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        right = [drafts(companion, model, batch, some) == behind(likely, some) for some in every.split(64, 1)]
        kept = torch.cat(right, 1).cumprod(-1).sum(-1).cpu().numpy()
        spoken, same = (weights == 1).cpu().numpy(), (likely == ids).cpu().numpy()
        for row in range(len(ids)):
            end = np.flatnonzero(spoken[row])[-1]
            place = np.flatnonzero(~spoken[row, :end])[-1] + 1
            while same[row, place : end + 1].all() and place < end:
                accepted = min(kept[row, place], end - place)
                counts[: accepted + 1] += 1
                place += accepted + 1
    shares = (counts / counts[0]).round(3).tolist()
    return {"tokens per round": round(sum(shares), 2), "drafts kept": shares[1:]}


# --- files ------------------------------------------------------------------------------------------------------


def save(companions: dict[str, dflash.Companion], model, out: Path) -> None:
    for name, companion in companions.items():
        (out / name).mkdir(exist_ok=True)
        stored = {n: p.detach().cpu().bfloat16().contiguous() for n, p in companion.named_parameters()}
        save_file(stored, out / name / "model.safetensors", metadata={"format": "pt"})
        described = dflash.config(model, chain=companion.candidate_selector is not None)
        (out / name / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def main() -> None:
    options = arguments()
    began = time.time()
    torch.manual_seed(corpus.SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast.install()
    with open_artifact(options.artifact) as source:
        state = restore(Artifact(source), options.out / "model")
    file = str(options.out / "model" / "tokenizer.json")
    # Forked before CUDA starts: the workers need neither torch nor the GPU.
    pool = multiprocessing.get_context("fork").Pool(options.workers)
    enough = options.steps * options.batch_tokens // (100 * options.documents * options.repeats) + 2
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

    companions = {}
    for name in ("dflash", "dflash2"):
        made = dflash.Companion(settings.hidden_size, settings.vocab_size, chain=name == "dflash2")
        # The outputs are read by the model's own head: they begin at the scale it is used to.
        made.norm.weight.data.copy_(1 + model.model.norm.weight.data)
        companions[name] = made.to(options.device)
        print(f"{name}: {sum(p.numel() for p in made.parameters()):,} parameters", flush=True)
    examples = told(model, stream, options.device, options.repeats)
    report: dict[str, object] = {"steps": fit(companions, model, examples, options)}
    pool.terminate()
    save(companions, model, options.out)
    for parameter in (p for c in companions.values() for p in c.parameters()):
        parameter.data.copy_(parameter.data.bfloat16())
    encode = partial(corpus.encode, tokenizer)
    held_out = {name: encode(documents) for name, documents in corpus.held_out_sets(options.held_out).items()}
    for name, companion in companions.items():
        report[name] = found = {}
        for kind, documents in held_out.items():
            with torch.autocast(options.device, torch.bfloat16):
                found[kind] = accepted(companion, model, documents, options)
            print(f"{name}, {kind}: {found[kind]}", flush=True)
    report["seconds"] = round(time.time() - began)
    (options.out / "eval-dflash.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
