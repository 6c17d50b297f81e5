"""Projections by compiled kernels: float64 is the oracle, sums are float32, and only the result is rounded."""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.backend import Activation, ProjectionKernels
from coppice_worker.kernels.choice import choose_projections
from coppice_worker.kernels.native import build as native_build
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.packed import Packer, onednn_packs_bfloat16
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic

pytestmark = pytest.mark.usefixtures("two_threads")
CPU = torch.device("cpu")
ROWS = [1, 12, 15, 16, 17, 32, 33, 48, 49, 255, 300, 530]
SHAPES = [(1, 32), (16, 64), (31, 96), (33, 2048), (96, 544), (200, 512)]  # out, in
UNEVEN = (33, 45)  # not for tiles


NARROWER = [  # on any x86
    pytest.param((dtype, False, flag), id=f"{dtype} {flag}", marks=pytest.mark.wide)
    for dtype in (torch.float32, torch.bfloat16)
    for flag in ("-mno-avx512f", "-mno-avx")
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((torch.float32, False, ""), id="float32"),
        pytest.param((torch.bfloat16, False, ""), id="bfloat16"),
        pytest.param((torch.bfloat16, True, ""), id="tiles"),
        *NARROWER,
    ],
)
def packer(request: pytest.FixtureRequest) -> Packer:
    dtype, tiles, flag = request.param
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_build, "_FLAGS", (*native_build._FLAGS, *filter(None, [flag])))
            return Packer(dtype, tiles=tiles)
    except BuildError as error:
        pytest.skip(f"none here: {error}")


def random(packer: Packer, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(packer.dtype)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.is_contiguous()
    half_step = torch.finfo(found.dtype).eps / 2 * 1.01
    # The sums themselves are float32.
    torch.testing.assert_close(found.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=half_step)


@pytest.mark.parametrize("shape", [*SHAPES, UNEVEN])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(packer: Packer, shape: tuple[int, int], has_bias: bool) -> None:
    weight = random(packer, *shape, seed=0)
    if not packer.takes(weight):
        pytest.skip("a whole number of tiles is needed")
    bias = random(packer, shape[0], seed=1) if has_bias else None
    projection = packer.project(weight, bias)
    for num_rows in ROWS:
        wide = random(packer, num_rows, shape[1] + 7, seed=num_rows)
        for rows in (wide[:, : shape[1]], wide[:, : shape[1]].contiguous()):
            exact = rows.double() @ weight.double().T
            assert_rounded_once(projection(rows), exact if bias is None else exact + bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up(packer: Packer, shape: tuple[int, int], has_bias: bool, activation: Activation) -> None:
    weight = random(packer, 2 * shape[0], shape[1], seed=0) / 8
    bias = random(packer, 2 * shape[0], seed=1) if has_bias else None
    projection = packer.gated(weight, bias, activation)
    for num_rows in ROWS:
        rows = random(packer, num_rows, shape[1], seed=num_rows)
        both = rows.double() @ weight.double().T
        exact = TorchArithmetic().gate(both if bias is None else both + bias.double(), activation)
        assert_rounded_once(projection(rows), exact)


def test_a_row_does_not_depend_on_its_batch_mates_or_threads(packer: Packer) -> None:
    projection, rows = packer.project(random(packer, 96, 1056, seed=0), None), random(packer, 300, 1056, seed=1)
    together = projection(rows)
    torch.set_num_threads(1)
    for part in (slice(0, 1), slice(7, 40), slice(255, 300)):
        assert torch.equal(projection(rows[part]), together[part])


def test_no_rows(packer: Packer) -> None:
    weight = random(packer, 32, 64, seed=0)
    for projection, columns in ((packer.project(weight, None), 32), (packer.gated(weight, None, "silu"), 16)):
        assert projection(weight[:0]).shape == (0, columns)


def test_nan_stays_nan(packer: Packer) -> None:
    rows = torch.full((1, 32), float("nan"), dtype=packer.dtype)
    weight = random(packer, 32, 32, seed=0)
    assert packer.project(weight, None)(rows).isnan().all()
    assert packer.gated(weight, None, "silu")(rows).isnan().all()


def test_weights_that_share_memory_stay_apart(packer: Packer) -> None:
    weights = [random(packer, 64, 96, seed=seed) for seed in range(5)]
    projections = [packer.project(weight, None) for weight in weights]
    rows = random(packer, 3, 96, seed=9)
    for weight, projection in zip(weights, projections, strict=True):
        assert_rounded_once(projection(rows), rows.double() @ weight.double().T)


def test_what_they_do_not_take(packer: Packer) -> None:
    assert packer.takes(torch.zeros(4, 64, dtype=packer.dtype))
    assert packer.takes(torch.zeros(4, 45, dtype=packer.dtype)) == (not packer.tiles)
    assert not packer.takes(torch.zeros(4, 64, dtype=torch.float16))


def chosen(kernels: str, dtype: torch.dtype) -> ProjectionKernels | None:
    return choose_projections(kernels, CPU, dtype, TorchArithmetic())


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert chosen("auto", torch.bfloat16) is None
    assert chosen("auto", torch.float32) is None
    assert "no C++ compiler" in caplog.text


def test_a_cpu_without_tiles_is_named_and_no_compiler_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice_worker.kernels.native.library.cpu_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"^this CPU has no bfloat16 tiles \(amx_bf16, amx_tile\)$"):
        Packer(torch.bfloat16, tiles=True)


def test_where_they_are_chosen(packer: Packer) -> None:
    ours = chosen("native", packer.dtype)
    assert isinstance(ours, Packer)
    assert ours.tiles >= packer.tiles
    assert chosen("torch", packer.dtype) is None
    assert chosen("auto", torch.float16) is None


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD", ""])
def test_without_tiles_onednn_takes_bfloat16_where_nobody_compared(
    monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    if not onednn_packs_bfloat16():
        pytest.skip("oneDNN has nothing for bfloat16 here")
    monkeypatch.setattr("coppice_worker.kernels.native.library.cpu_flags", frozenset)
    monkeypatch.setattr("coppice_worker.kernels.native.packed.cpu_vendor", lambda: vendor)
    ours = chosen("auto", torch.bfloat16)
    if vendor == "GenuineIntel":
        assert isinstance(ours, Packer)
        assert not ours.tiles
    else:
        assert ours is None


@pytest.mark.parametrize("kernels", ["auto", "triton", "flashinfer"])
def test_few_rows_have_kernels_on_a_gpu(kernels: str) -> None:
    few_rows = pytest.importorskip("coppice_worker.kernels.triton.few_rows")
    device, arithmetic = torch.device("cuda"), TorchArithmetic()
    assert isinstance(choose_projections(kernels, device, torch.bfloat16, arithmetic), few_rows.FewRows)
    assert choose_projections(kernels, device, torch.float32, arithmetic) is None
    assert choose_projections("torch", device, torch.bfloat16, arithmetic) is None
