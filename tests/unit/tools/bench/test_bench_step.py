"""`coppice bench step`: both ways to hold KV compute the same step, floors are counted by hand, the report is whole."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from coppice.errors import EXIT_OK
from coppice_bench.kernels.ceilings import Ceilings
from coppice_bench.step.floor import floor_ms, num_projected, step_bytes, step_flops
from coppice_bench.step.mixed import Mixed, MixedShape, launches, times_ms
from coppice_bench.step.model import Contiguous, Sequences, StepModel, StepShape, config_of
from coppice_cli.app import app
from coppice_worker.model.decoder.linear import Projections
from tests.fakes.cache.recorded import RecordableBackend, Recorded

CONFIG = config_of(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96, max_position_embeddings=128,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [StepShape(3, 1, 50), StepShape(1, 40, 40)])
def test_blocks_and_contiguous_memory_give_the_same_logits(shape: StepShape) -> None:
    model = StepModel(CONFIG, CPU, torch.float32)
    blocks = Sequences(model, shape, block_size=16)
    contiguous = Contiguous(model, shape, blocks)
    wanted = model.logits(contiguous)
    assert wanted.shape == (shape.batch, 96)
    torch.testing.assert_close(model.logits(blocks), wanted)
    assert model.step(blocks).tolist() == wanted.argmax(dim=-1).tolist()


def test_the_floor_by_torch_has_the_weights_of_the_model() -> None:
    model = StepModel(CONFIG, CPU, torch.float32)
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    again = model.random_weights(Projections())
    torch.testing.assert_close(again.layers[1].gated(rows), model.weights.layers[1].gated(rows))
    torch.testing.assert_close(again.head(rows), model.weights.head(rows))


def test_bytes_and_flops_of_a_step() -> None:
    layer = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 48
    assert num_projected(CONFIG) == 3 * layer + 96 * 32
    model = StepModel(CONFIG, CPU, torch.bfloat16)
    decode = StepShape(batch=5, new_tokens=1, context=20)
    assert step_bytes(model, decode) == 2 * (3 * layer + 96 * 32) + 5 * 20 * (3 * 2 * 2 * 16 * 2)
    assert step_flops(CONFIG, decode) == 2 * 5 * (3 * layer + 96 * 32) + 4 * 3 * 64 * 5 * 20
    chunk = StepShape(batch=1, new_tokens=3, context=7)  # its tokens see 5, 6 and 7 keys
    assert step_flops(CONFIG, chunk) == 2 * (3 * 3 * layer + 96 * 32) + 4 * 3 * 64 * (5 + 6 + 7)
    assert floor_ms(Ceilings(1e6, {torch.bfloat16: 1e30}), model, decode) == pytest.approx(
        step_bytes(model, decode) / 1e3
    )
    assert floor_ms(Ceilings(1e30, {torch.bfloat16: 1e6}), model, decode) == pytest.approx(
        step_flops(CONFIG, decode) / 1e3
    )


@pytest.mark.wide
def test_the_report() -> None:
    done = CliRunner().invoke(app, ["bench", "step", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == EXIT_OK
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [(row["dtype"], row["batch"]) for row in report["decode"]] == [
        ("float32", 1), ("float32", 4), ("bfloat16", 1), ("bfloat16", 4),
    ]  # fmt: skip
    for row in report["decode"] + report["prefill"]:
        assert row["fraction_of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"], rel=0.02)
        assert row["vs_contiguous"] == pytest.approx(row["contiguous_ms"] / row["step_ms"], rel=0.02)
        tokens = row.get("batch") or row["tokens"]
        assert row["tokens_per_s"] == pytest.approx(1000 * tokens / row["step_ms"], rel=0.02)
        assert row["rounds"] >= 5
    assert [(row["dtype"], row["new_tokens"], row["decodes"]) for row in report["mixed"]] == [
        ("float32", 8, 3), ("bfloat16", 8, 3),
    ]  # fmt: skip
    for row in report["mixed"]:
        assert row["eager"].keys() == {"step_ms"}, "a CPU computes in its calls, and has no graphs"
        assert row["eager"]["step_ms"] > 0
    assert {"model", "device", "machine", "versions", "load_average"} <= report.keys()


@pytest.mark.parametrize("kind", ["blocks", "contiguous", "rows on the device"])
def test_a_recorded_step_chooses_what_a_launched_one_does(kind: str) -> None:
    model = StepModel(CONFIG, CPU, torch.float32)
    shape = StepShape(3, 1, 48)
    sequences = Sequences(model, shape, 16)
    wanted = model.step(sequences).tolist()
    if kind == "contiguous":
        sequences = Contiguous(model, shape, sequences)
    elif kind == "rows on the device":
        sequences.backend = RecordableBackend(sequences.pool, model.heads)
    recorded = Recorded()
    step = model.recorded(sequences, recorded, in_a_row=3)
    assert [step().tolist() for _ in range(2)] == [wanted] * 2
    assert recorded.num_replays == (12 if kind == "rows on the device" else 6)
    launched = model.launched(sequences)
    assert (launched.compute().tolist(), launched.count) == (wanted, 1)


def test_a_mixed_step_is_the_same_as_a_graph_and_launched_one_by_one() -> None:
    model = StepModel(CONFIG, CPU, torch.float32)
    sequences = Mixed(model, MixedShape(decodes=3, new_tokens=7, context=32), 16)
    assert sequences.batch.query_starts.tolist() == [0, 1, 2, 3, 10]
    assert sequences.batch.context_lens.tolist() == [32, 32, 32, 39]
    alone = launches(model, sequences, None)
    wanted = alone["eager"]().wait().tokens.tolist()
    assert (len(wanted), alone.keys()) == (4, {"eager"})
    sequences.backend = RecordableBackend(sequences.pool, model.heads)
    recorded = Recorded()
    found = launches(model, sequences, recorded)
    assert [found["graph"]().wait().tokens.tolist() for _ in range(2)] == [wanted] * 2
    assert recorded.num_replays == 4, "a body and a tail each time"
    assert sequences.backend.sizes[-1] == 16, "the graph that has room for 10 tokens"
    times = times_ms(found, rounds=3)
    assert times.keys() == {"eager", "graph"}
    assert all(0 < one["host_ms"] <= one["step_ms"] for one in times.values())


def test_more_tokens_than_graphs_have_room_for_are_launched_one_by_one() -> None:
    model = StepModel(CONFIG, CPU, torch.float32)
    sequences = Mixed(model, MixedShape(decodes=1, new_tokens=600, context=32), 16)
    sequences.backend = RecordableBackend(sequences.pool, model.heads)
    assert launches(model, sequences, Recorded()).keys() == {"eager"}
