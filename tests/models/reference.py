"""The text model in float64 NumPy, from a Hugging Face state dict: one function per formula, no cache, no blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Reference:
    """``config`` is the text config as a mapping with Hugging Face's keys, ``weights`` its state dict as arrays."""

    def __init__(self, config: dict[str, Any], weights: dict[str, npt.NDArray[Any]]) -> None:
        self.c = config
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.eps = float(np.float32(config["rms_norm_eps"]))
        self.closest_route = np.inf
        """Smallest gap seen between the last selected and the first rejected expert's router logit."""

    def logits(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Array:
        """tokens [T], positions [3, T] -> [T, R]."""
        return self.head(self.hidden(tokens, positions))

    def features(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], taps: list[int]) -> Array:
        """Residuals behind the layers ``taps``, side by side [T, len(taps) * H]."""
        x, out = self.w["model.embed_tokens.weight"][tokens], []
        for i, kind in enumerate(self.c["layer_types"]):
            x = self.layer(f"model.layers.{i}.", kind, x, positions)
            out.append(x)
        return np.concatenate([out[i] for i in taps], -1)

    def hidden(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Array:
        """Final hidden states [T, H]."""
        x = self.w["model.embed_tokens.weight"][tokens]
        for i, kind in enumerate(self.c["layer_types"]):
            x = self.layer(f"model.layers.{i}.", kind, x, positions)
        return self.norm1(x, "model.norm.weight")

    def mtp(self, hidden: Array, following: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Array:
        """Output [T, H] of the MTP module: hidden [T, H] of tokens t, following [T] the tokens t + 1."""
        e = self.norm1(self.w["model.embed_tokens.weight"][following], "mtp.pre_fc_norm_embedding.weight")
        both = np.concatenate([e, self.norm1(hidden, "mtp.pre_fc_norm_hidden.weight")], -1)
        y = self.layer("mtp.layers.0.", "full_attention", both @ self.w["mtp.fc.weight"].T, positions)
        return self.norm1(y, "mtp.norm.weight")

    def head(self, hidden: Array) -> Array:
        name = "model.embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"
        return hidden @ self.w[name].T

    def layer(self, p: str, kind: str, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        u = self.norm1(x, f"{p}input_layernorm.weight")
        x = x + (self.attention(p, u, positions) if kind == "full_attention" else self.gdn(p, u))
        u = self.norm1(x, f"{p}post_attention_layernorm.weight")
        return x + (self.moe(p, u) if "num_experts" in self.c else self.swiglu(f"{p}mlp.", u))

    def norm1(self, x: Array, name: str) -> Array:
        return rms(x, self.eps) * (1 + self.w[name])

    def swiglu(self, p: str, u: Array) -> Array:
        w = self.w
        inner = silu(u @ w[f"{p}gate_proj.weight"].T) * (u @ w[f"{p}up_proj.weight"].T)
        return inner @ w[f"{p}down_proj.weight"].T

    def moe(self, p: str, u: Array) -> Array:
        w, k, width = self.w, self.c["num_experts_per_tok"], self.c["moe_intermediate_size"]
        router = u @ w[f"{p}mlp.gate.weight"].T
        gate_up, down = w[f"{p}mlp.experts.gate_up_proj"], w[f"{p}mlp.experts.down_proj"]
        y = sigmoid(u @ w[f"{p}mlp.shared_expert_gate.weight"].T) * self.swiglu(f"{p}mlp.shared_expert.", u)
        for t, row in enumerate(router):
            order = np.argsort(-row, kind="stable")
            ids, rest = order[:k], order[k:]
            if rest.size:
                self.closest_route = min(self.closest_route, float(row[ids[-1]] - row[rest[0]]))
            for e, weight in zip(ids, softmax(row[ids])):
                h = gate_up[e] @ u[t]
                y[t] += weight * (down[e] @ (silu(h[:width]) * h[width:]))
        return y

    def rope(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        rope = self.c["rope_parameters"]
        rot = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        n, section = rot // 2, rope["mrope_section"]
        j = np.arange(n)
        axis = np.where((j % 3 == 1) & (j < 3 * section[1]), 1, np.where((j % 3 == 2) & (j < 3 * section[2]), 2, 0))
        inverse = (rope["rope_theta"] ** (-2.0 * j / rot)).astype(np.float32)
        angle = (positions[axis].T.astype(np.float32) * inverse).astype(np.float64)[:, None, :]
        lo, hi = x[..., :n], x[..., n:rot]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin, x[..., rot:]], -1)

    def attention(self, p: str, u: Array, positions: npt.NDArray[np.int64]) -> Array:
        w, hq, hk, hd = self.w, self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        T = len(u)
        both = (u @ w[f"{p}self_attn.q_proj.weight"].T).reshape(T, hq, 2, hd)
        q, gate = both[:, :, 0], both[:, :, 1]
        k = (u @ w[f"{p}self_attn.k_proj.weight"].T).reshape(T, hk, hd)
        v = (u @ w[f"{p}self_attn.v_proj.weight"].T).reshape(T, hk, hd)
        q = self.rope(self.norm1(q, f"{p}self_attn.q_norm.weight"), positions)
        k = self.rope(self.norm1(k, f"{p}self_attn.k_norm.weight"), positions)
        k, v = np.repeat(k, hq // hk, 1), np.repeat(v, hq // hk, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(hd)
        scores[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
        a = np.einsum("hqk,khd->qhd", softmax(scores), v) * sigmoid(gate)
        return a.reshape(T, -1) @ w[f"{p}self_attn.o_proj.weight"].T

    def gdn(self, p: str, u: Array) -> Array:
        w, c, T = self.w, self.c, len(u)
        nk, nv, dk, dv = (
            c[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        p = f"{p}linear_attn."
        mixed = u @ w[f"{p}in_proj_qkv.weight"].T
        taps = w[f"{p}conv1d.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
        y = silu(sum(padded[j : j + T] * taps[:, j] for j in range(taps.shape[1])))
        q, k, v = np.split(y, [nk * dk, 2 * nk * dk], 1)
        q, k = (np.repeat(m.reshape(T, nk, dk), nv // nk, 1) for m in (q, k))
        q, k = (m / np.sqrt((m * m).sum(-1, keepdims=True) + 1e-6) for m in (q, k))
        q, v = q / np.sqrt(dk), v.reshape(T, nv, dv)
        z = (u @ w[f"{p}in_proj_z.weight"].T).reshape(T, nv, dv)
        beta = sigmoid(u @ w[f"{p}in_proj_b.weight"].T)
        g = -np.exp(w[f"{p}A_log"]) * np.logaddexp(0, u @ w[f"{p}in_proj_a.weight"].T + w[f"{p}dt_bias"])
        state, out = np.zeros((nv, dk, dv)), np.zeros((T, nv, dv))
        for t in range(T):
            state *= np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state += k[t][:, :, None] * delta[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        out = rms(out, self.eps) * w[f"{p}norm.weight"] * silu(z)
        return out.reshape(T, -1) @ w[f"{p}out_proj.weight"].T


class DFlash:
    """A block-drafting companion: ``config`` its component config, ``weights`` its checkpoint's state dict."""

    def __init__(self, config: dict[str, Any], weights: dict[str, npt.NDArray[Any]], embedding: Array) -> None:
        self.c = config
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.embedding = embedding
        self.eps = float(np.float32(config["rms_norm_eps"]))

    def norm(self, x: Array, name: str) -> Array:
        return rms(x, self.eps) * self.w[name]

    def block(self, features: Array, anchor: int, columns: int) -> Array:
        """Outputs [columns, H] of the block behind a history of features [F, m*H]."""
        n, c = len(features), self.norm(features @ self.w["fc.weight"].T, "hidden_norm.weight")
        y = self.embedding[[anchor] + [self.c["dflash_config"]["mask_token_id"]] * (columns - 1)]
        own, other = n + np.arange(columns)[:, None], np.arange(n + columns)[None]
        causal = np.broadcast_to(self.c.get("causal", False), len(self.c["layer_types"]))
        for i, kind in enumerate(self.c["layer_types"]):
            p, a = f"layers.{i}.", f"layers.{i}.self_attn."
            seen = np.ones((columns, n + columns), bool)
            if kind == "sliding_attention":
                seen &= np.abs(own - other) < self.c["sliding_window"]
            if causal[i]:
                seen &= other <= own
            u, leave = self.around(self.norm(y, f"{p}input_layernorm.weight"), f"{p}attention_conv.")
            q = self.rope(self.heads(u, f"{a}q_proj", f"{a}q_norm"), n)
            k = np.concatenate([self.heads(x, f"{a}k_proj", f"{a}k_norm") for x in (c, u)])
            v = np.concatenate([self.heads(x, f"{a}v_proj") for x in (c, u)])
            k, groups = self.rope(k, 0), q.shape[1] // k.shape[1]
            scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, groups, 1)) / np.sqrt(q.shape[-1])
            weights = softmax(np.where(seen, scores, -np.inf))
            mixed = np.einsum("hqk,khd->qhd", weights, np.repeat(v, groups, 1)).reshape(columns, -1)
            y = y + leave(mixed @ self.w[f"{a}o_proj.weight"].T)
            u, leave = self.around(self.norm(y, f"{p}post_attention_layernorm.weight"), f"{p}mlp_conv.")
            m = f"{p}mlp."
            inner = silu(u @ self.w[f"{m}gate_proj.weight"].T) * (u @ self.w[f"{m}up_proj.weight"].T)
            y = y + leave(inner @ self.w[f"{m}down_proj.weight"].T)
        return self.norm(y, "norm.weight")

    def around(self, n: Array, p: str) -> tuple[Array, Callable[[Array], Array]]:
        """What a sublayer reads, and what is done to its output: the convolutions of DFlash2, or nothing."""
        if f"{p}base_kernel" not in self.w:
            return n, lambda y: y
        base = self.w[f"{p}base_kernel"]
        delta = (n @ self.w[f"{p}kernel_projection.weight"].T).reshape(len(n), 2, base.shape[1], -1)
        kernel = base + np.repeat(delta, n.shape[1] // delta.shape[-1], -1)

        def convolve(side: int, x: Array) -> Array:
            shifted = [np.concatenate([np.zeros((t, x.shape[1])), x[: len(x) - t]]) for t in range(base.shape[1])]
            return sum(kernel[:, side, t] * shifted[t] for t in range(base.shape[1]))

        return convolve(0, n), lambda y: convolve(1, y)

    def heads(self, x: Array, projection: str, norm: str | None = None) -> Array:
        y = (x @ self.w[f"{projection}.weight"].T).reshape(len(x), -1, self.c["head_dim"])
        return y if norm is None else self.norm(y, f"{norm}.weight")

    def rope(self, x: Array, first: int) -> Array:
        n = self.c["head_dim"] // 2
        inverse = (self.c["rope_parameters"]["rope_theta"] ** (-np.arange(n) / n)).astype(np.float32)
        ordinals = np.arange(first, first + len(x), dtype=np.float32)
        angle = (ordinals[:, None] * inverse).astype(np.float64)[:, None, :]
        low, high = x[..., :n], x[..., n:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
