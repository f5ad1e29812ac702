"""The tiny model: its geometry, and the multi-token-prediction (MTP) module that `transformers` does not have.

The MTP module is one full-attention decoder layer that reads the final hidden state of position t and the embedding of
token t+1 and predicts token t+2 through the shared head. Drafting further ahead feeds it its own output in place of the
hidden state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as family

Rows = tuple[torch.Tensor, torch.Tensor]


def config(end: int, pad: int, **changes: object) -> Qwen3_5TextConfig:
    """Eight layers of width 256, every fourth with full attention; ``end`` and ``pad`` are token ids."""
    values: dict[str, object] = {
        "vocab_size": 4224,  # 4,096 tokens; the rows beyond them exist and are never used, as in the family
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": end,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    return Qwen3_5TextConfig(**{**values, **changes})


def build(settings: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """The model with random weights. Decay rates start spread over memories of about 10 to 1,000 tokens."""
    model = Qwen3_5ForCausalLM(settings)
    for module in model.modules():
        if isinstance(module, family.Qwen3_5GatedDeltaNet):
            rate = torch.exp(torch.empty_like(module.dt_bias).uniform_(-6.9, -2.3))
            with torch.no_grad():
                module.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # inverse of softplus
                module.A_log.uniform_(0.0, 1.0)
    return model


class Mtp(nn.Module):
    """Draft module; the state dict has the family's names without their ``mtp.`` prefix."""

    def __init__(self, settings: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = settings.hidden_size, settings.rms_norm_eps
        self.pre_fc_norm_embedding = family.Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = family.Qwen3_5RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(
            [family.Qwen3_5DecoderLayer(settings, settings.layer_types.index("full_attention"))]
        )
        self.norm = family.Qwen3_5RMSNorm(width, eps=eps)
        self.rotary = family.Qwen3_5TextRotaryEmbedding(settings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=settings.initializer_range)

    def forward(self, hidden: torch.Tensor, following: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Outputs of ``depth`` chained drafts at every row.

        hidden [B,T,H]: final hidden states. following [B,T,H]: embedding of the token after each row. Element j of the
        result is [B,T,H]; its row t predicts token t+2 as the (j+1)-th draft of the chain that began with the true
        hidden state of row t-j. Rows below j are meaningless.
        """
        layer, rows = self.layers[0], torch.arange(hidden.shape[1], device=hidden.device)
        turn = self.rotary(hidden, rows[None, None].expand(3, hidden.shape[0], -1))
        steps: list[Rows] = []
        outputs: list[torch.Tensor] = []
        for step in range(depth):
            source = hidden if step == 0 else _shifted(outputs[-1], 1)
            both = torch.cat([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(source)], dim=-1)
            y = self.fc(both)
            y = y + _attend(layer.self_attn, layer.input_layernorm(y), turn, steps)
            y = y + layer.mlp(layer.post_attention_layernorm(y))
            outputs.append(self.norm(y))
        return outputs


def _shifted(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x moved down by ``rows`` along the token axis (the last but one), zeros above."""
    return F.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :] if rows else x


def _attend(block: nn.Module, u: torch.Tensor, turn: Rows, steps: list[Rows]) -> torch.Tensor:
    """Gated attention of draft step ``len(steps)``; appends this step's keys and values.

    A drafted row sees the true rows up to the start of its chain and, of every later step, the one row of its own
    chain: exactly the cache contents it meets when drafts are made one by one.
    """
    batch, length, _ = u.shape
    q, gate = block.q_proj(u).view(batch, length, -1, 2 * block.head_dim).chunk(2, dim=-1)
    q = block.q_norm(q).transpose(1, 2)
    k = block.k_norm(block.k_proj(u).view(batch, length, -1, block.head_dim)).transpose(1, 2)
    v = block.v_proj(u).view(batch, length, -1, block.head_dim).transpose(1, 2)
    q, k = family.apply_rotary_pos_emb(q, k, *turn)
    groups = q.shape[1] // k.shape[1]
    step = len(steps)
    steps.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    keys, values = steps[0]
    rows = torch.arange(length, device=u.device)
    hidden = rows[None, :] > rows[:, None] - step
    scores = [(q @ keys.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)]
    own = [(_shifted(steps[s][0], step - s), _shifted(steps[s][1], step - s)) for s in range(1, step + 1)]
    scores += [(q * key).sum(-1, keepdim=True).float() for key, _ in own]
    weights = torch.softmax(torch.cat(scores, dim=-1) * block.scaling, dim=-1).to(v.dtype)
    out = weights[..., :length] @ values
    for i, (_, value) in enumerate(own):
        out = out + weights[..., length + i, None] * value
    out = out.transpose(1, 2).reshape(batch, length, -1)
    return block.o_proj(out * torch.sigmoid(gate.reshape(batch, length, -1)))
