"""Training forms of functions that `transformers` computes slowly without its optional kernels.

Same functions, other arrangement: the triangular system of a GDN chunk is inverted by halves with batched products
instead of a solver, the depthwise convolution is a sum of four shifted products, norms use the fused operator.
`install` puts them in place.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as family

CHUNK = 64


def _diagonal_blocks(a: torch.Tensor, size: int) -> torch.Tensor:
    """A view [..., n / size, size, size] of the blocks along the diagonal of a [..., n, n]."""
    grid = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return torch.diagonal(grid, dim1=-4, dim2=-2).movedim(-1, -3)


class UnitLowerInverse(torch.autograd.Function):
    """(I + strict_lower(a))^-1 for a [..., n, n], n a power of two."""

    @staticmethod
    def forward(ctx, a: torch.Tensor) -> torch.Tensor:
        n = a.shape[-1]
        inverse = torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a).clone()
        size = 1
        while size < n:
            # Every diagonal block of twice the size: [[P, 0], [C, Q]]^-1 = [[P', 0], [-Q' C P', Q']].
            source, target = (_diagonal_blocks(x, 2 * size) for x in (a, inverse))
            inner = source[..., size:, :size] @ target[..., :size, :size]
            target[..., size:, :size] = -(target[..., size:, size:] @ inner)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True, **_):
    """Gated delta rule from a zero state. query, key [B,T,nk or nv,dk]; value [B,T,nv,dv]; g, beta [B,T,nv].

    T is a multiple of `CHUNK`. Returns the outputs [B,T,nv,dv] and no state.
    """
    dtype = value.dtype
    with torch.autocast(value.device.type, enabled=False):
        repeat = value.shape[2] // key.shape[2]
        q, k, v = (x.transpose(1, 2).float().unflatten(2, (-1, CHUNK)) for x in (query, key, value))
        g, beta = (x.transpose(1, 2).float().unflatten(2, (-1, CHUNK)) for x in (g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        kk = (k @ k.transpose(-1, -2)).repeat_interleave(repeat, 1)
        qk = (q @ k.transpose(-1, -2)).repeat_interleave(repeat, 1)
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        total = g.cumsum(-1)
        above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
        inverse = UnitLowerInverse.apply(kk * beta.unsqueeze(-1) * decay)
        grown = total.exp().unsqueeze(-1)
        fresh = inverse @ (v * beta.unsqueeze(-1))
        read = inverse @ (k * beta.unsqueeze(-1) * grown)
        inside = qk * decay
        q = q * grown
        k = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
        last = total[..., -1].exp()[..., None, None]
        state, outputs = torch.zeros_like(k[:, :, 0] @ v[:, :, 0]), []
        for i in range(v.shape[2]):
            delta = fresh[:, :, i] - read[:, :, i] @ state
            outputs.append(q[:, :, i] @ state + inside[:, :, i] @ delta)
            state = state * last[:, :, i] + k[:, :, i] @ delta
        return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), None


def convolution(hidden_states, weight, bias=None, activation=None, **_):
    """Causal depthwise convolution, then SiLU. hidden_states [B,C,T]; weight [C,width]; no bias."""
    length, width = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    weight = weight.to(hidden_states.dtype)
    return F.silu(sum(padded[..., j : j + length] * weight[:, j, None] for j in range(width)))


def norm(self, x: torch.Tensor) -> torch.Tensor:
    """RMS norm whose stored weight is the distance from one."""
    return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight, self.eps).to(x.dtype)


def gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """RMS norm with a plain weight, then the SiLU gate."""
    return (F.rms_norm(x.float(), self.weight.shape, self.weight, self.variance_epsilon) * F.silu(gate.float())).to(
        x.dtype
    )


def install() -> None:
    family.torch_chunk_gated_delta_rule = delta_rule
    family.causal_conv1d_fn = convolution
    family.Qwen3_5RMSNorm.forward = norm
    family.Qwen3_5RMSNormGated.forward = gated_norm
