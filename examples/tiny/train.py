"""Trains the tiny model and its MTP module, measures both on held-out dialogues, writes a Hugging Face folder.

    python train.py OUT [--steps N] [--mtp-steps N] ...

Needs one GPU for a few minutes with the default settings. The data stream, the initial weights and the order of
batches follow from fixed seeds; GPU arithmetic is not bit-reproducible, so figures of a second run differ slightly.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import corpus
import fast
import numpy as np
import tokenizer as tokens
import torch
from model import Mtp, build, config
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM

Document = tuple[np.ndarray, np.ndarray]
Batch = tuple[torch.Tensor, torch.Tensor]
Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OTHER_WEIGHT = 0.05  # loss weight of tokens that the assistant does not write
DRAFTS = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2481, help="optimizer steps of the model")
    parser.add_argument("--mtp-steps", type=int, default=483, help="optimizer steps of the MTP module")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end the model's schedule early after this time"
    )
    parser.add_argument("--mtp-seconds", type=float, default=math.inf, help="likewise for the MTP module")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="padded tokens per step")
    parser.add_argument("--documents", type=int, default=2560, help="documents sorted by length together")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=5, help="processes that generate text")
    parser.add_argument("--held-out", type=int, default=1000, help="questions per held-out set")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


# --- batches ----------------------------------------------------------------------------------------------------


def batches(documents: list[Document], limit: int, device: str) -> Iterator[Batch]:
    """Documents of similar length together: ids [B,T] and loss weights [B,T], B * T <= limit, T a multiple of 64."""
    ordered = sorted(documents, key=lambda d: len(d[0]))
    while ordered:
        width = -(-len(ordered[-1][0]) // 64) * 64
        taken, ordered = ordered[-max(1, limit // width) :], ordered[: -max(1, limit // width)]
        ids = np.zeros((len(taken), width), np.int64)
        weights = np.zeros((len(taken), width), np.float32)
        for row, (document, mark) in enumerate(taken):
            ids[row, : len(document)] = document
            weights[row, : len(document)] = np.where(mark, 1.0, OTHER_WEIGHT)
        yield _sent(ids, device), _sent(weights, device)


def _sent(values: np.ndarray, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def training_batches(shards: Iterator[list[Document]], options: argparse.Namespace) -> Iterator[Batch]:
    """The batches of every shard in a random order; a shard's leftover that would not fill half a batch is dropped."""
    rng = random.Random(corpus.SEED)
    for documents in shards:
        made = [
            b
            for b in batches(documents, options.batch_tokens, options.device)
            if 2 * b[0].numel() > options.batch_tokens
        ]
        rng.shuffle(made)
        yield from made


def final_hidden(model: Qwen3_5ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """[B,T,H] after the final norm. Padding follows the text, so causality keeps it out without a mask."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def optimizer_for(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=parameters[0].is_cuda)


def rate_at(progress: float) -> float:
    """Share of the peak rate at a progress of 0 to 1: 5 % warm-up, then a cosine down to 1 %."""
    if progress < 0.05:
        return 0.02 + 0.98 * progress / 0.05
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95))


# --- training ---------------------------------------------------------------------------------------------------


def fit(parameters: list[torch.nn.Parameter], losses: Losses, stream: Iterator[Batch], steps: int, seconds: float,
        options: argparse.Namespace) -> int:  # fmt: skip
    """One optimizer step per batch on ``losses(ids, weights)``, a weighted sum. Returns the number of steps made."""
    optimizer = optimizer_for(parameters, options.rate)
    began, step, seen, progress = time.time(), 0, 0, 0.0
    while progress < 1:
        ids, weights = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * rate_at(progress)
        with torch.autocast(options.device, torch.bfloat16):
            # A constant divisor: every assistant token counts the same in whichever batch it comes.
            loss = losses(ids, weights) / (0.3 * options.batch_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + ids.numel()
        spent = time.time() - began
        progress = max(step / steps, spent / seconds)
        if step % 50 == 0 or progress >= 1:
            mean = loss.item() * 0.3 * options.batch_tokens / weights.sum().item()
            print(f"step {step} loss {mean:.4f} {seen / spent / 1e3:.0f}k tokens/s {spent:.0f} s", flush=True)
    return step


def train_model(model: Qwen3_5ForCausalLM, stream: Iterator[Batch], options: argparse.Namespace) -> int:
    def losses(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(final_hidden(model, ids)[:, :-1]).float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (each * weights[:, 1:].flatten()).sum()

    return fit(list(model.parameters()), losses, stream, options.steps, options.seconds, options)


def train_mtp(model: Qwen3_5ForCausalLM, mtp: Mtp, stream: Iterator[Batch], options: argparse.Namespace) -> int:
    """Teaches the drafts the model's own most likely tokens, `DRAFTS` steps ahead, with the model frozen."""

    def losses(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = final_hidden(model, ids)
            target = model.lm_head(hidden).argmax(-1)[:, 1:]
            following = model.model.embed_tokens(ids[:, 1:])
        loss = torch.zeros((), device=ids.device)
        for step, output in enumerate(mtp(hidden[:, :-1], following, DRAFTS)):
            logits = F.linear(output[:, step:-1], model.lm_head.weight).float()
            each = F.cross_entropy(logits.flatten(0, 1), target[:, step:-1].flatten(), reduction="none")
            loss = loss + (each * weights[:, step + 2 :].flatten()).sum()
        return loss / DRAFTS

    return fit(list(mtp.parameters()), losses, stream, options.mtp_steps, options.mtp_seconds, options)


# --- measuring --------------------------------------------------------------------------------------------------


@torch.no_grad()
def exact(model: Qwen3_5ForCausalLM, documents: list[Document], options) -> float:
    """Share of documents whose every assistant token is the model's most likely one.

    That is when greedy decoding writes the whole answer, end mark included, exactly as expected.
    """
    right = 0
    for ids, weights in batches(documents, options.batch_tokens, options.device):
        logits = model.lm_head(final_hidden(model, ids))[:, :-1, : tokens.VOCABULARY]
        wrong = (logits.argmax(-1) != ids[:, 1:]) & (weights[:, 1:] == 1)
        right += int((~wrong.any(-1)).sum())
    return right / len(documents)


@torch.no_grad()
def acceptance(model: Qwen3_5ForCausalLM, mtp: Mtp, documents: list[Document], options) -> list[float]:
    """Share of chains whose first 1, 2, ... greedy drafts all equal the model's own greedy tokens."""
    counts = torch.zeros(DRAFTS, 2, device=options.device)
    for ids, weights in batches(documents, options.batch_tokens, options.device):
        hidden = final_hidden(model, ids)
        target = model.lm_head(hidden)[..., : tokens.VOCABULARY].argmax(-1)[:, 1:]
        outputs = mtp(hidden[:, :-1], model.model.embed_tokens(ids[:, 1:]), DRAFTS)
        said = weights == 1
        chains = ids.shape[1] - 1 - DRAFTS  # starts r for which every draft r+2 .. r+1+DRAFTS exists
        agreed = torch.ones(ids.shape[0], chains, dtype=torch.bool, device=ids.device)
        for step, output in enumerate(outputs):
            draft = F.linear(output, model.lm_head.weight)[..., : tokens.VOCABULARY].argmax(-1)
            agreed = agreed & (draft == target)[:, step : step + chains]
            inside = said[:, 1 : 1 + chains] & said[:, step + 2 : step + 2 + chains]
            counts[step, 0] += (agreed & inside).sum()
            counts[step, 1] += inside.sum()
    return [float(hit / of) for hit, of in counts.tolist()]


def measure(model, mtp, file: str, options) -> dict[str, object]:
    encode = partial(corpus.encode, tokens.Tokenizer.from_file(file))
    report: dict[str, object] = {}
    accuracy, drafts = {}, {}
    for name, documents in corpus.held_out_sets(options.held_out).items():
        encoded = encode(documents)
        accuracy[name] = round(exact(model, encoded, options), 4)
        drafts[name] = [round(x, 4) for x in acceptance(model, mtp, encoded, options)]
        print(f"{name}: exact {accuracy[name]:.3f}, drafts accepted {drafts[name]}", flush=True)
    report["exact"], report["drafts accepted"] = accuracy, drafts
    return report


# --- files ------------------------------------------------------------------------------------------------------


def round_weights(module: torch.nn.Module) -> None:
    """What the file will hold: bf16 values, except the two decay vectors."""
    for name, parameter in module.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data.copy_(parameter.data.bfloat16())


def save(model: Qwen3_5ForCausalLM, mtp: Mtp, folder: Path) -> None:
    tensors = {name: p for name, p in model.named_parameters() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": p for name, p in mtp.named_parameters()}
    stored = {
        name: p.detach().cpu().to(torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16).contiguous()
        for name, p in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = model.config.to_dict()
    settings |= {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", "full_attention_interval": 4}
    settings.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    torch.manual_seed(corpus.SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast.install()

    tokenizer = tokens.train()
    tokens.save(tokenizer, options.out)
    file = str(options.out / "tokenizer.json")
    # Forked before CUDA starts: the workers need neither torch nor the GPU.
    pool = multiprocessing.get_context("fork").Pool(options.workers)
    enough = (options.steps + options.mtp_steps) * options.batch_tokens // (100 * options.documents) + 2
    shards = pool.imap(partial(corpus.shard, file, size=options.documents), range(enough))
    stream = training_batches(shards, options)

    settings = config(tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    model = build(settings).to(options.device)
    mtp = Mtp(settings).to(options.device)
    count = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in mtp.parameters())
    print(f"{count[0]:,} + {count[1]:,} parameters, ready after {time.time() - began:.0f} s", flush=True)

    steps = train_model(model, stream, options)
    round_weights(model)
    save(model, mtp, options.out)
    mtp_steps = train_mtp(model.requires_grad_(False), mtp, stream, options)
    round_weights(mtp)
    save(model, mtp, options.out)
    pool.terminate()

    torch.backends.cuda.matmul.allow_tf32 = False
    report = {"parameters": count, "steps": steps, "mtp steps": mtp_steps}
    report |= measure(model.eval(), mtp.eval(), file, options)
    report["seconds"] = round(time.time() - began)
    (options.out / "eval.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"done after {report['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
