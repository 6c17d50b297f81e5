"""Projections by the CPU's bfloat16 tiles: float64 is the oracle, and only the result is rounded."""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.choice import choose_tiles
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.tiles import Tiles
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic

pytestmark = pytest.mark.usefixtures("two_threads")
HALF_STEP = torch.finfo(torch.bfloat16).eps / 2 * 1.01
ROWS = [1, 15, 16, 17, 32, 33, 48, 255, 300]
SHAPES = [(1, 32), (16, 64), (31, 96), (33, 2048), (96, 544), (200, 512)]  # out, in


@pytest.fixture(scope="module")
def tiles() -> Tiles:
    try:
        return Tiles()
    except BuildError as error:
        pytest.skip(f"no tiles here: {error}")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pool(dtype: torch.dtype) -> KvPool:
    return KvPool(KvShape(1, 1, 16), num_blocks=1, block_size=4, device=torch.device("cpu"), dtype=dtype)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    # The sums themselves are float32.
    torch.testing.assert_close(found.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=HALF_STEP)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(tiles: Tiles, shape: tuple[int, int], has_bias: bool) -> None:
    weight = random(*shape, seed=0)
    bias = random(shape[0], seed=1) if has_bias else None
    projection = tiles.project(weight, bias)
    for num_rows in ROWS:
        wide = random(num_rows, shape[1] + 7, seed=num_rows)
        for rows in (wide[:, : shape[1]], wide[:, : shape[1]].contiguous()):
            exact = rows.double() @ weight.double().T
            assert_rounded_once(projection(rows), exact if bias is None else exact + bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up(tiles: Tiles, shape: tuple[int, int], has_bias: bool, activation: Activation) -> None:
    weight = random(2 * shape[0], shape[1], seed=0) / 8
    bias = random(2 * shape[0], seed=1) if has_bias else None
    projection = tiles.gated(weight, bias, activation)
    for num_rows in ROWS:
        rows = random(num_rows, shape[1], seed=num_rows)
        both = rows.double() @ weight.double().T
        exact = TorchArithmetic().gate(both if bias is None else both + bias.double(), activation)
        assert_rounded_once(projection(rows), exact)


def test_a_row_does_not_depend_on_its_batch_mates_or_threads(tiles: Tiles) -> None:
    projection, rows = tiles.project(random(96, 1056, seed=0), None), random(300, 1056, seed=1)
    together = projection(rows)
    torch.set_num_threads(1)
    for part in (slice(0, 1), slice(7, 40), slice(255, 300)):
        assert torch.equal(projection(rows[part]), together[part])


def test_nan_stays_nan(tiles: Tiles) -> None:
    rows = torch.full((1, 32), float("nan")).bfloat16()
    weight = random(32, 32, seed=0)
    assert tiles.project(weight, None)(rows).isnan().all()
    assert tiles.gated(weight, None, "silu")(rows).isnan().all()


def test_weights_that_share_memory_stay_apart(tiles: Tiles) -> None:
    weights = [random(64, 96, seed=seed) for seed in range(5)]
    projections = [tiles.project(weight, None) for weight in weights]
    rows = random(3, 96, seed=9)
    for weight, projection in zip(weights, projections, strict=True):
        assert_rounded_once(projection(rows), rows.double() @ weight.double().T)


def test_what_they_do_not_take(tiles: Tiles) -> None:
    assert tiles.takes(random(4, 64, seed=0))
    assert not tiles.takes(random(4, 48, seed=0))
    assert not tiles.takes(random(4, 64, seed=0).float())


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose_tiles("auto", pool(torch.bfloat16)) is None
    assert "no C++ compiler" in caplog.text


def test_where_they_are_chosen(tiles: Tiles) -> None:
    assert choose_tiles("auto", pool(torch.bfloat16)) is not None
    assert choose_tiles("torch", pool(torch.bfloat16)) is None
    assert choose_tiles("auto", pool(torch.float32)) is None
