"""Page counts, entitlements and unit extents against their definitions."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import InvalidRequest, OutOfDeviceMemory
from ninfer.program.capacity import AutomaticKV, ExplicitKV, KVCapacityProfile, resolve_capacity
from ninfer.program.layout import KVCodec, KVGeometry, PoolKind, build_pool_layouts, pages
from ninfer.program.licensing import reserved_tokens, unit_touch

MAIN = PoolKind.MAIN


def test_pages_counts_started_pages() -> None:
    assert [pages(t) for t in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("geometry", "page_bytes", "coded"),
    [
        (KVGeometry(16, 4, 256), 4_194_304, 2_162_688),
        (KVGeometry(10, 2, 256), 1_310_720, 675_840),
        (KVGeometry(1, 4, 256), 262_144, 135_168),
    ],
)
def test_page_bytes_of_released_geometries(geometry: KVGeometry, page_bytes: int, coded: int) -> None:
    (bf16,) = build_pool_layouts({PoolKind.MAIN: geometry}, KVCodec.BF16)
    (fp32,) = build_pool_layouts({PoolKind.MAIN: geometry}, KVCodec.FP32)
    assert bf16.page_bytes == page_bytes
    assert fp32.page_bytes == 2 * page_bytes
    assert len(bf16.planes) == 2 * geometry.full_attention_layers
    (int8,) = build_pool_layouts({PoolKind.MAIN: geometry}, KVCodec.INT8)
    assert int8.page_bytes == coded
    assert [plane.role.name for plane in int8.planes[:4]] == ["K", "V", "K_SCALE", "V_SCALE"]
    assert len(int8.planes) == 4 * geometry.full_attention_layers


def test_entitlement_golden_cases() -> None:
    profile = KVCapacityProfile(16, {MAIN: 32}, 1000)
    assert profile.entitlement(900, 101) == {MAIN: 16}
    assert profile.entitlement(100, 29) == {MAIN: 2}
    assert profile.entitlement(64, 1) == {MAIN: 1}


@given(st.integers(1, 400), st.integers(1, 400), st.data())
def test_every_unit_of_an_admitted_request_stays_inside_its_entitlement(prompt: int, output: int, data: st.DataObject):
    granted = pages(reserved_tokens(prompt, output))
    frontier = 0
    while frontier < prompt:
        width = data.draw(st.integers(1, prompt - frontier))
        assert pages(unit_touch((MAIN,), frontier, width)[MAIN]) <= granted
        frontier += width
    emitted = 1
    while emitted < output:
        width = data.draw(st.integers(1, output - emitted))
        assert pages(unit_touch((MAIN,), frontier, width)[MAIN]) <= granted
        frontier += width
        emitted += width
    assert frontier == reserved_tokens(prompt, output)


curves = st.lists(st.integers(0, 50), min_size=80, max_size=80).map(lambda steps: list(accumulate(steps)))


@given(curves, st.integers(1, 640), st.integers(1, 4), st.integers(0, 6), st.integers(0, 4500), st.integers(0, 200))
def test_automatic_capacity_is_the_largest_that_fits(curve, S, C, Q, free, headroom) -> None:
    L = pages(S)
    low, high = max(L, C), C * L + Q
    policy = AutomaticKV(headroom)
    fits = [m for m in range(low, high + 1) if curve[m] <= free - headroom]
    if not fits:
        with pytest.raises(OutOfDeviceMemory) as caught:
            resolve_capacity(policy, S=S, C=C, Q=Q, layout_bytes=curve.__getitem__, free_bytes=free)
        assert caught.value.plan == {"total": curve[low]}
        assert caught.value.free == max(0, free - headroom)
        return
    profile, report = resolve_capacity(policy, S=S, C=C, Q=Q, layout_bytes=curve.__getitem__, free_bytes=free)
    assert profile.pages == {MAIN: max(fits)}
    assert (profile.logical_pages, profile.max_context) == (L, S)
    assert (report.planned_bytes, report.slack_bytes) == (curve[max(fits)], free - curve[max(fits)])


@given(curves, st.integers(1, 640), st.integers(1, 4), st.integers(0, 4500))
def test_a_ceiling_never_goes_below_one_sequence(curve, S, C, ceiling) -> None:
    L = pages(S)
    low, high = max(L, C), C * L
    profile, _ = resolve_capacity(
        AutomaticKV(0, ceiling), S=S, C=C, Q=0, layout_bytes=curve.__getitem__, free_bytes=10**9
    )
    limit = max(ceiling, curve[low])
    assert profile.pages[MAIN] == max(m for m in range(low, high + 1) if curve[m] <= limit)


@given(st.integers(1, 640), st.integers(1, 4), st.integers(1, 3000))
def test_explicit_capacity_is_taken_or_refused(S: int, C: int, tokens: int) -> None:
    L = pages(S)
    legal = tokens >= S and max(L, C) <= pages(tokens) <= C * L

    def resolve() -> int:
        return resolve_capacity(ExplicitKV(tokens), S=S, C=C, Q=0, layout_bytes=lambda m: m, free_bytes=10**6)[0].pages[
            MAIN
        ]

    if legal:
        assert resolve() == pages(tokens)
    else:
        with pytest.raises(InvalidRequest) as caught:
            resolve()
        assert caught.value.field == "kv_capacity"


def test_an_explicit_plan_that_does_not_fit_names_both_numbers() -> None:
    with pytest.raises(OutOfDeviceMemory, match="the plan needs 4000 bytes, 3999 are free"):
        resolve_capacity(ExplicitKV(256), S=256, C=1, Q=0, layout_bytes=lambda m: 1000 * m, free_bytes=3999)
