"""The compiled CPU kernels against the reference; unowned memory holds NaN, so reading any of it shows."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.choice import KernelsUnavailable, choose_backend
from coppice_worker.kernels.native import build as native_build
from coppice_worker.kernels.native.arithmetic import NativeArithmetic
from coppice_worker.kernels.native.backend import NativeBackend
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.library import load, load_tile_attention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic, rotate
from coppice_worker.kernels.torch_backend import TorchBackend
from tests.kernels.cases import Case, assert_exact, attend, expected, make_case

pytestmark = pytest.mark.usefixtures("two_threads")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler here"
)
# heads, KV heads, head size, block size
GEOMETRIES = [(14, 2, 64, 16), (28, 4, 128, 16), (8, 8, 96, 32), (6, 1, 80, 8), (8, 2, 64, 1), (4, 2, 16, 24)]
ONE_HEAD = Heads(1, (LayerAttention(scale=1.0),))
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps


def mixed_case(geometry: tuple[int, int, int, int], seed: int) -> Case:
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
    )


def narrowed(case: Case) -> Case:
    """The same step in bfloat16."""
    shape, old = case.pool.shape, case.pool
    pool = KvPool(
        shape, num_blocks=old.num_blocks, block_size=old.block_size, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    pool.storage.copy_(old.storage)
    return Case(pool, case.batch, case.qkv.bfloat16(), case.layer)


def native(case: Case) -> NativeBackend:
    return NativeBackend(case.pool, case.heads, load(case.pool.storage.dtype, case.pool.shape.head_dim))


@needs_compiler
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_in_float32(geometry: tuple[int, int, int, int], seed: int) -> None:
    case = mixed_case(geometry, seed)
    assert_exact(native(case), case)


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


def by_tiles(case: Case) -> NativeBackend:
    try:
        attend_by_tiles = load_tile_attention(case.pool.shape.head_dim)
    except BuildError as error:
        pytest.skip(f"no tiles here: {error}")
    return NativeBackend(case.pool, case.heads, load(torch.bfloat16, case.pool.shape.head_dim), attend_by_tiles)


@pytest.mark.parametrize("geometry", [(14, 2, 64, 16), (28, 4, 128, 16), (8, 8, 96, 32), (6, 1, 32, 48)])
@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_by_tiles(geometry: tuple[int, int, int, int], seed: int) -> None:
    case = narrowed(mixed_case(geometry, seed))
    out = attend(by_tiles(case), case)
    # Weights have 16 bits; then the result is rounded.
    torch.testing.assert_close(out.double(), expected(case), atol=3e-5, rtol=BFLOAT16_EPS / 2 * 1.01)


def test_large_scores_do_not_overflow_in_tiles() -> None:
    case = make_case([1, 50], [200, 40], block_size=16, num_kv_heads=2, group=4, head_dim=64)
    case.query.mul_(200.0)
    case = narrowed(case)
    out = attend(by_tiles(case), case)
    torch.testing.assert_close(out.double(), expected(case), atol=1e-3, rtol=BFLOAT16_EPS)


def test_in_tiles_a_row_does_not_depend_on_threads_or_chunks() -> None:
    case = narrowed(make_case([70, 1], [0, 90], block_size=16, num_kv_heads=2, group=4, head_dim=64))
    whole = attend(by_tiles(case), case)
    torch.set_num_threads(1)
    assert torch.equal(whole, attend(by_tiles(case), case))
    last = replace(
        case.batch, slots=case.batch.slots[69:], query_starts=np.array([0, 1, 2], np.int32),
        positions=case.batch.positions[69:], token_ids=case.batch.token_ids[69:],
    )  # fmt: skip
    alone = Case(case.pool, last, case.qkv[69:], case.layer)
    assert torch.equal(whole[69:], attend(by_tiles(case), alone))


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    case = make_case([1, 3], [200, 40], block_size=16, num_kv_heads=2, group=4, head_dim=64)
    case.query.mul_(200.0)
    assert_exact(native(case), case)


@needs_compiler
def test_a_row_does_not_depend_on_its_batch_mates_or_threads() -> None:
    case = mixed_case((8, 2, 64, 16), 1)
    together = attend(native(case), case)
    torch.set_num_threads(1)
    assert torch.equal(together, attend(native(case), case))


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
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 200])
def test_rotate(dtype: torch.dtype, head_dim: int, tokens: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(tokens, 7, head_dim).to(dtype)
    radians = torch.rand(tokens, 1, head_dim // 2) * 100
    angles = radians.cos().to(dtype), radians.sin().to(dtype)
    wanted = rotate(heads[:, :5].double(), (angles[0].double(), angles[1].double()))
    rest = heads[:, 5:].clone()
    found, (cos, sin) = heads[:, :5], angles
    load(dtype, head_dim).rotate(
        found.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, 5, found.stride(0), torch.get_num_threads()
    )
    eps = BFLOAT16_EPS / 2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=eps * 1.01)
    assert torch.equal(heads[:, 5:], rest)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), ARITHMETIC_SIZES)
def test_gate(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    both = (torch.randn(rows, 2 * size) * 20).to(dtype)
    both[0, :6] = torch.tensor([0.0, -0.0, 1e30, -1e30, 90.0, -90.0])
    wanted = TorchArithmetic().gate(both.double(), "silu")
    found = NativeArithmetic(load(dtype, 64)).gate(both, "silu")
    eps = BFLOAT16_EPS / 2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), wanted, atol=1e-30, rtol=eps * 1.01)


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
    assert torch.equal(found, TorchArithmetic().argmax(logits))


@needs_compiler
def test_argmax_of_another_type() -> None:
    logits = torch.randn(3, 50)
    assert torch.equal(NativeArithmetic(load(torch.bfloat16, 64)).argmax(logits), logits.argmax(dim=-1))


@needs_compiler
def test_nan_stays_nan() -> None:
    """What went wrong in a model must not look like a number."""
    for dtype in (torch.float32, torch.bfloat16):
        both = torch.full((1, 64), float("nan"), dtype=dtype)
        assert NativeArithmetic(load(dtype, 64)).gate(both, "silu").isnan().all()


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
