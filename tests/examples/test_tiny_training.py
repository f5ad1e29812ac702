"""The numerical parts of the training script against their plain forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
family = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


@pytest.fixture
def parts(tiny):
    torch.manual_seed(0)
    return tiny("fast", "model")


def small(parts):
    settings = parts.model.config(
        1, 0, vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                                      "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    model = parts.model.build(settings)
    for parameter in model.parameters():
        if parameter.ndim == 1 and parameter.numel() in (32, 48):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_the_fast_forms_are_the_same_functions(parts, monkeypatch):
    """Values and every gradient of a whole model, on a length of two chunks."""
    model = small(parts)
    ids = torch.randint(0, 96, (2, 128))

    def run():
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.float().pow(2).mean().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters()]

    plain, gradients = run()
    for owner, name in (
        (family, "torch_chunk_gated_delta_rule"),
        (family, "causal_conv1d_fn"),
        (family.Qwen3_5RMSNorm, "forward"),
        (family.Qwen3_5RMSNormGated, "forward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after install()
    parts.fast.install()
    fast, others = run()
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-4 * plain.std().item())
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm() + 1e-9


def test_parallel_drafts_equal_drafts_made_one_by_one(parts):
    """Chains of three drafts from every row, each with a growing cache of its own."""
    settings = small(parts).config
    mtp = parts.model.Mtp(settings).eval()
    for parameter in mtp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    length, depth = 9, 3
    hidden, following = torch.randn(1, length, 48), torch.randn(1, length, 48)
    block, layer = mtp.layers[0].self_attn, mtp.layers[0]

    def one(source, token, position, cache):
        y = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(token), mtp.pre_fc_norm_hidden(source)], -1))[None, None]
        u = layer.input_layernorm(y)
        turn = mtp.rotary(y, torch.full((3, 1, 1), position))
        q, gate = block.q_proj(u).view(1, 1, -1, 64).chunk(2, -1)
        k = block.k_norm(block.k_proj(u).view(1, 1, -1, 32)).transpose(1, 2)
        q, k = family.apply_rotary_pos_emb(block.q_norm(q).transpose(1, 2), k, *turn)
        v = block.v_proj(u).view(1, 1, -1, 32).transpose(1, 2)
        cache = [*cache, (k, v)]
        groups = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in zip(*cache, strict=True))
        mixed = torch.softmax(q @ keys.transpose(-1, -2) * block.scaling, -1) @ values
        y = y + block.o_proj(mixed.transpose(1, 2).reshape(1, 1, -1) * torch.sigmoid(gate.reshape(1, 1, -1)))
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        return mtp.norm(y)[0, 0], cache

    with torch.no_grad():
        together = mtp(hidden, following, depth)
        true_rows: list = []
        for start in range(length):
            output, true_rows = one(hidden[0, start], following[0, start], start, true_rows)
            cache = true_rows
            for step in range(depth):
                row = start + step
                if row == length:
                    break
                if step:
                    output, cache = one(output, following[0, row], row, cache)
                torch.testing.assert_close(together[step][0, row], output, rtol=1e-4, atol=1e-5)


@pytest.fixture
def drafting(tiny):
    torch.manual_seed(0)
    return tiny("dflash", "train_dflash")


@torch.no_grad()
@pytest.mark.parametrize("chain", [False, True])
def test_blocks_of_many_anchors_equal_each_of_them_alone(drafting, chain):
    """A block sees what is before its anchor, and itself: neither other blocks nor the text behind."""
    companion = drafting.dflash.Companion(48, 96, chain=chain)
    for name, parameter in companion.named_parameters():
        torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.2)
    taps, block = len(drafting.dflash.TAPS), drafting.dflash.BLOCK
    features, embedded = torch.randn(2, 90, taps * 48), torch.randn(2, 3, block, 48)
    anchors = torch.tensor([[70, 8, 89], [1, 66, 2]])
    together = companion(features, embedded, anchors)
    for row in range(2):
        for i, anchor in enumerate(anchors[row].tolist()):
            one = (features[row : row + 1, :anchor], embedded[row : row + 1, i : i + 1], torch.tensor([[anchor]]))
            torch.testing.assert_close(together[row, i], companion(*one)[0, 0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_drafts_of_a_chain_are_chosen_one_behind_the_other(drafting):
    dflash, train = drafting.dflash, drafting.train_dflash
    H, V = 16, train.tokens.VOCABULARY
    companion = dflash.Companion(H, 4224, chain=True)
    torch.nn.init.normal_(companion.candidate_selector.successor_codebook)
    torch.nn.init.normal_(companion.candidate_selector.hidden_projection.weight)
    head = torch.nn.Linear(H, 4224, bias=False)
    out = torch.randn(1, 2, train.DRAFTS, H)

    def outputs(*_):
        return out, out @ head.weight[:V].T

    ids, anchors = torch.randint(0, V, (1, 20)), torch.tensor([[4, 9]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "outputs", outputs)
        found = train.drafts(companion, None, (ids, None, None, None), anchors)
    codes = companion.candidate_selector
    for block, anchor in enumerate(anchors[0].tolist()):
        before = int(ids[0, anchor])
        for i in range(train.DRAFTS):
            row = out[0, block, i]
            logits = head.weight[:V] @ row
            gamma = codes.hidden_projection.weight @ row
            scores = {
                int(c): float(
                    logits[c] + (codes.predecessor_codebook[before] * gamma * codes.successor_codebook[c]).sum()
                )
                for c in logits.topk(dflash.CANDIDATES).indices
            }
            before = max(scores, key=scores.__getitem__)
            assert int(found[0, block, i]) == before


def test_rounds_of_an_answer_begin_where_the_one_before_ended(drafting, monkeypatch):
    """An answer of 20 tokens behind a question of 10, and drafts that are right but for some of every anchor's."""
    train = drafting.train_dflash
    ids, weights = torch.arange(32)[None], torch.full((1, 32), 0.05)
    weights[0, 10:30] = 1
    wrong = {10: 3, 13: 7, 14: 1, 21: 0}  # of an anchor, the place of its first wrong draft; elsewhere none is

    def drafts(companion, model, batch, anchors):
        made = anchors[..., None] + 1 + torch.arange(train.DRAFTS)
        for i, anchor in enumerate(anchors[0].tolist()):
            made[0, i, wrong.get(anchor, train.DRAFTS) :] = 99
        return made

    monkeypatch.setattr(train, "told", lambda *_: [(ids, weights, None, ids.clone())])
    monkeypatch.setattr(train, "batches", lambda *_: None)
    monkeypatch.setattr(train, "drafts", drafts)
    found = train.accepted(None, None, None, SimpleNamespace(batch_tokens=0, device="cpu"))
    # 10: three are kept, the fourth token is corrected; 14: one; 16: all seven; 24: five, the last of them ends it.
    assert found == {"tokens per round": 5.0, "drafts kept": [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]}
