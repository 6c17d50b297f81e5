"""The compiled CPU kernels against the reference; unowned memory holds NaN, so reading any of it shows."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm

from coppice_worker.kernels.backend import Activation, HeadNorms, Heads, LayerAttention
from coppice_worker.kernels.choice import KernelsUnavailable, choose_backend
from coppice_worker.kernels.native import build as native_build
from coppice_worker.kernels.native.arithmetic import NativeArithmetic
from coppice_worker.kernels.native.backend import NativeBackend
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.library import load
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic, rotate
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.kernels.torch_sampling import first_argmax
from tests.kernels.cases import Case, assert_exact, attend, expected, make_case, reference_of

pytestmark = pytest.mark.usefixtures("two_threads")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler here"
)
# heads, KV heads, head size, block size
GEOMETRIES = [
    (14, 2, 64, 16), (28, 4, 128, 16), (8, 8, 96, 32), (6, 1, 80, 8), (8, 2, 64, 1), (4, 2, 16, 24), (32, 8, 256, 64),
]  # fmt: skip
NARROWER = ["-mno-avx512f", "-mno-avx"]  # vectors of 8 float32, and of 4, on any x86
ONE_HEAD = Heads(1, (LayerAttention(scale=1.0),))
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps


def features(num_heads: int, head_dim: int) -> list[LayerAttention]:
    """Ways to attend that a plain softmax is not."""
    sinks, scale = torch.linspace(-3, 3, num_heads), head_dim**-0.5
    return [
        LayerAttention(scale, window=1),
        LayerAttention(scale, window=37),
        LayerAttention(scale / 2, window=128, sinks=sinks),
        LayerAttention(scale, soft_cap=0.7),
        LayerAttention(scale * 3, window=50, soft_cap=2.0, sinks=sinks),
    ]


def mixed_case(geometry: tuple[int, int, int, int], seed: int, layer: LayerAttention | None = None) -> Case:
    heads, num_kv_heads, head_dim, block_size = geometry
    rng = np.random.default_rng(seed)
    return make_case(
        rng.choice([1, 1, 1, 1, 2, 15, 17, 31, 63, 65, 70], 9).tolist(),
        rng.choice([0, 1, 15, 16, 31, 32, 200, 700], 9).tolist(),
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=heads // num_kv_heads,
        head_dim=head_dim,
        seed=seed,
        layer=layer,
    )


def forget_what_no_query_sees(case: Case) -> None:
    """NaN in place of tokens that are before everybody's window."""
    batch, window = case.batch, case.layer.window
    assert window is not None
    for row, context_len in enumerate(batch.context_lens.tolist()):
        first_new = context_len - int(batch.query_starts[row + 1] - batch.query_starts[row])
        for position in range(first_new - window + 1):
            block, offset = divmod(position, case.pool.block_size)
            case.pool.storage[:, :, batch.block_tables[row, block], :, offset] = float("nan")


def narrowed(case: Case) -> Case:
    """The same step in bfloat16."""
    shape, old = case.pool.shape, case.pool
    pool = KvPool(
        shape, num_blocks=old.num_blocks, block_size=old.block_size, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    pool.storage.copy_(old.storage)
    return replace(case, pool=pool, qkv=case.qkv.bfloat16())


def native(case: Case) -> NativeBackend:
    return NativeBackend(case.pool, case.heads, load(case.pool.storage.dtype, case.pool.shape.head_dim))


@needs_compiler
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in (1, 2))])
def test_random_mixes_in_float32(geometry: tuple[int, int, int, int], seed: int) -> None:
    case = mixed_case(geometry, seed)
    assert_exact(native(case), case)


@needs_compiler
@pytest.mark.parametrize("geometry", [(14, 2, 64, 16), (6, 1, 80, 8), (4, 2, 128, 32)])
@pytest.mark.parametrize("index", range(5))
def test_features(geometry: tuple[int, int, int, int], index: int) -> None:
    case = mixed_case(geometry, index, features(geometry[0], geometry[2])[index])
    assert_exact(native(case), case)


@needs_compiler
@pytest.mark.parametrize("block_size", [8, 32])
def test_what_is_before_the_window_is_not_looked_at(block_size: int) -> None:
    case = mixed_case((4, 2, 64, block_size), 1, LayerAttention(0.1, window=29))
    forget_what_no_query_sees(case)
    out = attend(native(case), case)
    torch.testing.assert_close(out.double(), reference_of(case), atol=2e-6, rtol=1e-5)


@needs_compiler
def test_a_large_soft_cap_leaves_scores_as_they_are() -> None:
    """Within what float32 has of them: where nothing cancels in the tangent of small numbers."""
    case = make_case([1, 40], [60, 20], block_size=16, num_kv_heads=2, group=2, head_dim=16)
    out = attend(native(case), case)
    capped = replace(case, layer=replace(case.layer, soft_cap=1e5))
    torch.testing.assert_close(attend(native(capped), capped), out, atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_random_mixes_in_bfloat16(geometry: tuple[int, int, int, int]) -> None:
    heads, num_kv_heads, head_dim, block_size = geometry
    case = narrowed(
        make_case(
            [1, 1, 1, 2, 16, 9], [0, 300, 63, 17, 40, 0],
            block_size=block_size, num_kv_heads=num_kv_heads, group=heads // num_kv_heads, head_dim=head_dim,
        )
    )  # fmt: skip
    out = attend(native(case), case)
    # All arithmetic is float32: only the result is rounded.
    torch.testing.assert_close(out.double(), expected(case), atol=1e-5, rtol=BFLOAT16_EPS / 2 * 1.01)


@needs_compiler
@pytest.mark.wide
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these flags are those of x86")
@pytest.mark.parametrize("flag", NARROWER)
@pytest.mark.parametrize("geometry", [(14, 2, 64, 16), (6, 1, 80, 8), (8, 2, 256, 32)])
def test_where_vectors_are_narrower(
    flag: str, geometry: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_FLAGS", (*native_build._FLAGS, flag))
    for layer in (None, features(geometry[0], geometry[2])[4]):
        case = mixed_case(geometry, 1, layer)
        assert_exact(native(case), case)
    arithmetic, logits = NativeArithmetic(load(torch.float32, geometry[2])), torch.randn(3, 1_001)
    assert torch.equal(arithmetic.argmax(logits), logits.argmax(1))
    both = torch.randn(5, 2 * 52)
    torch.testing.assert_close(arithmetic.gate(both, "silu"), TorchArithmetic().gate(both, "silu"))


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    case = make_case([1, 3], [200, 40], block_size=16, num_kv_heads=2, group=4, head_dim=64)
    case.query.mul_(200.0)
    assert_exact(native(case), case)


@needs_compiler
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_does_not_depend_on_threads_or_chunks(window: int | None) -> None:
    layer = LayerAttention(0.125, window=window)
    case = make_case([40, 1], [0, 90], block_size=24, num_kv_heads=2, group=4, head_dim=64, layer=layer)
    together = attend(native(case), case)
    torch.set_num_threads(1)
    assert torch.equal(together, attend(native(case), case))
    last = replace(
        case.batch, slots=case.batch.slots[21:], query_starts=np.array([0, 19, 20], np.int32),
        positions=case.batch.positions[21:], token_ids=case.batch.token_ids[21:],
    )  # fmt: skip
    alone = replace(case, batch=last, qkv=case.qkv[21:])
    assert torch.equal(together[21:], attend(native(alone), alone))


@needs_compiler
@pytest.mark.parametrize("group", [65, 64])
def test_more_query_heads_than_a_tile_holds(group: int) -> None:
    case = make_case([1, 4], [30, 3], block_size=16, num_kv_heads=1, group=group, head_dim=16)
    assert_exact(native(case), case)


ARITHMETIC_SIZES = [(1, 512), (33, 1000), (300, 768)]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), ARITHMETIC_SIZES)
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(dtype: torch.dtype, rows: int, size: int, adds: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, size).to(dtype), torch.randn(size)
    delta = torch.randn(rows, size).to(dtype) if adds else None
    there, here = hidden.clone(), hidden.clone()
    wanted = TorchArithmetic().add_norm(there, delta, weight, 1e-5)
    found = NativeArithmetic(load(dtype, 64)).add_norm(here, delta, weight, 1e-5)
    assert torch.equal(here, there)
    assert_rounded(found, wanted, roundings=1)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("has_norms", [False, True])
def test_write(dtype: torch.dtype, head_dim: int, tokens: int, has_norms: bool) -> None:
    """Norms, rotates and stores like torch in float64, rounding once."""
    torch.manual_seed(0)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 0.1) if has_norms else None
    layer = LayerAttention(1.0, head_norms=norms)
    case = make_case([tokens], [3], block_size=16, num_kv_heads=2, group=3, head_dim=head_dim, layer=layer)
    case = case if dtype == torch.float32 else narrowed(case)
    radians = torch.rand(tokens, 1, head_dim // 2) * 100
    angles = radians.cos().to(dtype), radians.sin().to(dtype)
    wanted, values = case.qkv[:, :8].double(), case.value.clone()
    if norms is not None:
        parts = zip(wanted.split([6, 2], dim=1), (norms.query, norms.key), strict=True)
        wanted = torch.cat([rms_norm(part, (head_dim,), weight.double(), norms.eps) for part, weight in parts], dim=1)
    wanted = rotate(wanted, (angles[0].double(), angles[1].double()))
    query = native(case).plan(case.batch).write(0, case.qkv, angles)
    blocks, offsets = np.divmod(case.batch.slots, 16)
    assert torch.equal(case.pool.values(0)[blocks, :, offsets], values)
    found = torch.cat([query, case.pool.keys(0)[blocks, :, offsets]], dim=1).double()
    eps = BFLOAT16_EPS / 2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=eps * 1.01)
    assert (~case.pool.keys(0).isnan()).sum() == (tokens + 3) * 2 * head_dim


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), ARITHMETIC_SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(dtype: torch.dtype, rows: int, size: int, activation: Activation) -> None:
    torch.manual_seed(0)
    both = (torch.randn(rows, 2 * size) * 20).to(dtype)
    both[0, :6] = torch.tensor([0.0, -0.0, 1e30, -1e30, 90.0, -90.0])
    wanted = exactly_gated(both, activation)
    found = NativeArithmetic(load(dtype, 64)).gate(both, activation)
    # Far down the exponent of gelu is a large number, and rounded as such.
    exact = 1e-6 if activation == "silu" else 1e-5
    eps = BFLOAT16_EPS / 2 + exact if dtype == torch.bfloat16 else exact
    torch.testing.assert_close(found.double(), wanted, atol=1e-30, rtol=eps)


def exactly_gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In float64, without the difference from one that torch's own takes."""
    gate, up = both.double().chunk(2, dim=-1)
    twice = 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * up * torch.sigmoid(gate if activation == "silu" else twice)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 32000])
def test_argmax_is_the_first_of_the_largest(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(40, size).to(dtype)  # in bfloat16 many are equal
    logits[1] = -3.0
    logits[2] = float("-inf")
    logits[3, size // 2] = float("nan")
    logits[4, size - 1] = float("inf")
    logits[5] = float("-inf")
    logits[5, size - 1] = -1e30
    found = NativeArithmetic(load(dtype, 64)).argmax(logits)
    assert found.dtype == torch.int64
    assert torch.equal(found, first_argmax(logits))


@needs_compiler
def test_argmax_of_another_type() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(NativeArithmetic(load(torch.bfloat16, 64)).argmax(logits), logits.argmax(dim=-1))


@needs_compiler
def test_nan_stays_nan() -> None:
    """What went wrong in a model must not look like a number."""
    for dtype in (torch.float32, torch.bfloat16):
        both = torch.full((1, 64), float("nan"), dtype=dtype)
        arithmetic = NativeArithmetic(load(dtype, 64))
        assert arithmetic.gate(both, "silu").isnan().all()
        assert arithmetic.gate(both, "gelu_tanh").isnan().all()


def assert_rounded(found: torch.Tensor, wanted: torch.Tensor, *, roundings: int) -> None:
    eps = BFLOAT16_EPS * roundings if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted.double(), atol=1e-6, rtol=eps)


def small_pool(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> KvPool:
    return KvPool(KvShape(1, 1, head_dim), num_blocks=2, block_size=4, device=torch.device("cpu"), dtype=dtype)


@needs_compiler
def test_auto_compiles_where_it_can() -> None:
    assert isinstance(choose_backend("auto", small_pool(), ONE_HEAD), NativeBackend)
    assert not isinstance(choose_backend("torch", small_pool(), ONE_HEAD), NativeBackend)


@pytest.mark.parametrize(
    ("pool", "why"), [(small_pool(torch.float16), "not torch.float16"), (small_pool(head_dim=24), "head size 24")]
)
def test_what_the_kernels_do_not_know_is_left_to_torch(
    pool: KvPool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coppice.worker")
    assert type(choose_backend("auto", pool, ONE_HEAD)) is TorchBackend
    assert why in caplog.text
    with pytest.raises(KernelsUnavailable, match=why):
        choose_backend("native", pool, ONE_HEAD)


def test_triton_without_a_gpu_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="for GPUs"):
        choose_backend("triton", small_pool(), ONE_HEAD)
    with pytest.raises(KernelsUnavailable, match="for NVIDIA GPUs"):
        choose_backend("flashinfer", small_pool(), ONE_HEAD)


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert type(choose_backend("auto", small_pool(), ONE_HEAD)) is TorchBackend
    assert "no C++ compiler" in caplog.text


@needs_compiler
def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native_build.build("kernels.cpp", ("HEAD_DIM=16",))
    assert native_build.build("kernels.cpp", ("HEAD_DIM=32",)) != first
    monkeypatch.setattr(native_build, "_run", lambda command: pytest.fail("compiled again"))
    assert native_build.build("kernels.cpp", ("HEAD_DIM=16",)) == first
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".so", ".so"]


@needs_compiler
def test_what_does_not_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="heads are read in whole vectors"):
        native_build.build("kernels.cpp", ("HEAD_DIM=20",))
    assert list((tmp_path / "coppice" / "kernels").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="Not a directory"):
        native_build.build("kernels.cpp", ("HEAD_DIM=16",))
