"""DFlash and DFlash2 companions of the tiny model for training: blocks behind many anchors of a text at once.

They have the checkpoint names of published companions. Features are the residuals behind the layers `TAPS`, side by
side. A block is the anchor token and mask tokens behind it; its columns see the features of what is before the anchor,
and each other, in layers with a window only what is less than the window away.

DFlash2 adds to every sublayer a convolution over the rows of a block, and a selector: the score of a token is its logit
plus a product of the block's row with codes of the token and of the one before it, so drafts are chosen along a chain.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM

TAPS = (1, 3, 5, 7)
MASK = 4223  # a row of the embedding that no token has
BLOCK = 8
WINDOW = 64
LAYERS = ("sliding_attention", "full_attention", "full_attention", "full_attention")
HEADS, KEY_HEADS, WIDTH, INNER, THETA, EPS = 4, 2, 64, 640, 10000.0, 1e-6
GROUP = 16  # neighbouring channels that a convolution treats alike
RANK, CANDIDATES = 64, 16


def config(model: Qwen3_5ForCausalLM, *, chain: bool) -> dict[str, object]:
    """The companion's `config.json`."""
    own: dict[str, object] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    if chain:
        own |= {
            "conv_kernel_size": 2,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": CANDIDATES,
            "sample_from_anchor": False,
        }
    return {
        "architectures": ["DFlash2DraftModel" if chain else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": model.config.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": WIDTH,
        "max_position_embeddings": model.config.max_position_embeddings,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "layer_types": list(LAYERS),
        "sliding_window": WINDOW,
        "is_causal": False,
        "num_target_layers": model.config.num_hidden_layers,
        "block_size": BLOCK,
        "dflash_config": own,
    }


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), EPS).to(x.dtype)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [B,N,heads,WIDTH] rotated by positions [B,N]."""
    half = WIDTH // 2
    inverse = THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * inverse)[:, :, None]
    cos, sin, (low, high) = angle.cos(), angle.sin(), x.float().split(half, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(hidden, KEY_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(hidden, KEY_HEADS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(WIDTH), Norm(WIDTH)

    def forward(self, u: torch.Tensor, context: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor],
                seen: torch.Tensor) -> torch.Tensor:  # fmt: skip
        """u [B,N,H] at positions places[0]; context [B,T,H] at 0..T-1; seen bool [B,1,N,T+N]."""
        both = torch.cat([context, u.to(context.dtype)], 1)
        q = turned(self.q_norm(self.q_proj(u).unflatten(-1, (HEADS, WIDTH))), places[0])
        k = turned(self.k_norm(self.k_proj(both).unflatten(-1, (KEY_HEADS, WIDTH))), places[1])
        v = self.v_proj(both).unflatten(-1, (KEY_HEADS, WIDTH))
        k, v = (x.transpose(1, 2).repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u))


class Convolution(nn.Module):
    """Around a sublayer: a row and the one before it in its block, weighted by a kernel that the row itself changes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.tensor([1.0, 0.0])[None, :, None].repeat(2, 1, hidden))
        self.kernel_projection = nn.Linear(hidden, 4 * hidden // GROUP, bias=False)

    def kernels(self, normed: torch.Tensor) -> torch.Tensor:
        """Of each side (what enters, what leaves) and row [2,2,B,N,H], from the sublayer's input [B,N,H]."""
        change = self.kernel_projection(normed).unflatten(-1, (2, 2, -1)).repeat_interleave(GROUP, -1)
        return (self.base_kernel + change).permute(2, 3, 0, 1, 4)


def convolved(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """x [B,N,H], N whole blocks; kernel [2,B,N,H]: for a row, and for the one before it."""
    before = F.pad(x.unflatten(1, (-1, BLOCK))[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
    return kernel[0] * x + kernel[1] * before


class Layer(nn.Module):
    def __init__(self, hidden: int, *, chain: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn, self.mlp = Attention(hidden), Mlp(hidden)
        self.attention_conv, self.mlp_conv = (Convolution(hidden) if chain else None for _ in range(2))

    def forward(self, y: torch.Tensor, *surroundings) -> torch.Tensor:
        y = y + _around(self.attention_conv, self.input_layernorm(y), lambda u: self.self_attn(u, *surroundings))
        return y + _around(self.mlp_conv, self.post_attention_layernorm(y), self.mlp)


def _around(convolution: Convolution | None, normed: torch.Tensor, sublayer) -> torch.Tensor:
    if convolution is None:
        return sublayer(normed)
    entering, leaving = convolution.kernels(normed)
    return convolved(sublayer(convolved(normed, entering)), leaving)


class Selector(nn.Module):
    def __init__(self, hidden: int, rows: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden, RANK, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(rows, RANK))
        self.successor_codebook = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, out: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
        """What is added to the logits of ``tokens``: ids [...,n], or all of the first so many. out [...,H]; before: id
        [...] of the token in front of each row."""
        codes = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(out)
        if isinstance(tokens, int):
            return F.linear(codes, self.successor_codebook[:tokens])
        return (codes[..., None, :] * F.embedding(tokens, self.successor_codebook)).sum(-1)


class Companion(nn.Module):
    """``chain``: DFlash2. ``rows``: of the model's embedding."""

    def __init__(self, hidden: int, rows: int, *, chain: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(len(TAPS) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden), Norm(hidden)
        self.layers = nn.ModuleList([Layer(hidden, chain=chain) for _ in LAYERS])
        self.candidate_selector = Selector(hidden, rows) if chain else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Outputs [B,A,BLOCK,H] of the blocks at ``anchors`` [B,A]; features [B,T,m*H]; tokens [B,A,BLOCK,H]: their
        embeddings. Row i of a block is for the token at anchor + i."""
        B, A, T = *anchors.shape, features.shape[1]
        context = self.hidden_norm(self.fc(features))
        own = (anchors[..., None] + torch.arange(BLOCK, device=anchors.device)).flatten(1)
        places = own, torch.cat([torch.arange(T, device=own.device).expand(B, T), own], 1)
        block = torch.arange(A * BLOCK, device=own.device) // BLOCK
        before = places[1][:, None, :T] < anchors.repeat_interleave(BLOCK, 1)[..., None]
        together = (block[:, None] == block).expand(B, -1, -1)
        all_seen = torch.cat([before, together], -1)
        near = (own[..., None] - places[1][:, None]).abs() < WINDOW
        seen = {"sliding_attention": (all_seen & near)[:, None], "full_attention": all_seen[:, None]}
        y = tokens.flatten(1, 2)
        for kind, layer in zip(LAYERS, self.layers):
            y = layer(y, context, places, seen[kind])
        return self.norm(y).unflatten(1, (A, BLOCK))


class Features:
    """Runs a model and keeps what the companions read."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.model = model
        self._found: dict[int, torch.Tensor] = {}
        for tap in TAPS:
            model.model.layers[tap].register_forward_hook(lambda _, __, out, tap=tap: self._keep(tap, out))

    def _keep(self, tap: int, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        self._found[tap] = out if isinstance(out, torch.Tensor) else out[0]

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B,T,m*H], and the model's most likely token [B,T] at each place, given all that is before it."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        likely = self.model.lm_head(hidden)[..., :vocabulary].argmax(-1)
        return torch.cat([self._found[tap] for tap in TAPS], -1), F.pad(likely[:, :-1], (1, 0))
